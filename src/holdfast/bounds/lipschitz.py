"""Bounds of the slope of a layer: of ‖DF(x)‖ at a point, or of the Lipschitz constant on a ball around 0.

None of them bounds how far the output moves in a ball around x, so none of them can be reached from `holdfast.bound`.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, checks
from holdfast.attention.paths import paths
from holdfast.bounds.arithmetic import Arithmetic, Numerical, Proved
from holdfast.bounds.base import NUMERICAL_SLACK, Evaluation, Method
from holdfast.errors import HoldfastError, InputError, SoundnessError
from holdfast.linalg import Array, Ball
from holdfast.linalg.certified import GIB
from holdfast.linalg.rounding import frobenius
from holdfast.radii import check_radii
from holdfast.registry import Registry
from holdfast.results import Guarantee, LipschitzResult, Scope

_POWER_STEPS = 4


class LipschitzBound(Method):
    """An upper bound of the slope of a layer; either of two kinds, by its scope."""

    @final
    def _result(self, found: Evaluation[Tensor], attained: Tensor, guarantee: Guarantee) -> LipschitzResult:
        """Wraps a value; withholds one that is not finite, or below what is attained."""
        if not bool(torch.isfinite(found.value).all()):
            raise HoldfastError(f"bound {self.name!r} overflowed float64; use smaller weights, inputs or radii")
        slack = NUMERICAL_SLACK if guarantee == "numerical" else 0.0
        if bool((attained > found.value * (1 + slack)).any()):
            raise SoundnessError(
                f"bound {self.name!r} returned a value below one that is attained; the value is withheld; "
                "please report the layer and the input"
            )
        return LipschitzResult(found.value, self.name, self.side, self.scope, guarantee, found.terms, found.notes)


class PointBound(LipschitzBound):
    """An upper bound of ‖DF(x)‖, the norm of the Jacobian at x and nowhere else.

    A method states its metadata and writes `_evaluate` and `_refusal`.
    """

    scope: ClassVar[Scope] = "point"

    @abstractmethod
    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        """The formula, in the arithmetic `a`: x is float64 (b…, n, d), the value (b…)."""

    @abstractmethod
    def _refusal(self, layer: AttentionLayer) -> str | None:
        """Why the bound has no proof for this layer, or None."""

    @final
    def refusal(self, layer: AttentionLayer) -> str | None:
        """Why the bound does not apply to the layer, or None where it does."""
        return self.refuse_score_terms(layer) or self._refusal(layer)

    @final
    def __call__(
        self, layer: AttentionLayer, x: Tensor, *, guarantee: Guarantee = "proved", memory_limit: float = 8 * GIB
    ) -> LipschitzResult:
        """Evaluates the bound.

        Args:
            layer: the layer.
            x: (b…, n, d) the points, float32 or float64; computed in float64.
            guarantee: "proved" or "numerical".
            memory_limit: bytes that one proved norm may hold.
        """
        began = time.perf_counter()
        checks.input(layer, x)
        self.check_call(guarantee, self.refusal(layer))
        layer, x = layer.double(), x.detach().double()
        with torch.no_grad():
            if guarantee == "proved":
                found = _numbers(self._evaluate(Proved(memory_limit), layer, x))
            else:
                found = self._evaluate(Numerical(), layer, x)
            result = self._result(found, attained_gain(layer, x), guarantee)
        return replace(result, seconds=time.perf_counter() - began)


class BallBound(LipschitzBound):
    """An upper bound of the Lipschitz constant on B_R^n: sequences of n tokens, each of length at most R.

    The metric is that of the W_p distance; for p = 2 and n tokens it is the Frobenius norm, and the value bounds
    ‖DF(X)‖ at every X in B_R^n. A method states its metadata and writes `_evaluate` and `_refusal`.
    """

    scope: ClassVar[Scope] = "ball at 0"

    @abstractmethod
    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        """The formula, in the arithmetic `a`: the radii R are (r), n = tokens, 1 <= p <= inf; the value is (r)."""

    @abstractmethod
    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        """Why the bound has no proof for this layer and exponent, or None."""

    @final
    def refusal(self, layer: AttentionLayer, p: float = 2.0) -> str | None:
        """Why the bound does not apply to the layer, or None where it does."""
        return self.refuse_score_terms(layer) or self._refusal(layer, p)

    @final
    def __call__(
        self,
        layer: AttentionLayer,
        radius: float | Sequence[float],
        tokens: int,
        p: float = 2.0,
        *,
        guarantee: Guarantee = "proved",
        memory_limit: float = 8 * GIB,
    ) -> LipschitzResult:
        """Evaluates the bound.

        Args:
            layer: the layer; computed in float64.
            radius: R, or a sequence of r radii for a value (r).
            tokens: n, how many tokens there are.
            p: exponent of the W_p distance, from 1 to inf.
            guarantee: "proved" or "numerical".
            memory_limit: bytes that one proved norm may hold.
        """
        began = time.perf_counter()
        radii = check_radii(radius, "radius")
        _check_tokens(layer, tokens)
        if not isinstance(p, int | float) or isinstance(p, bool) or not p >= 1:
            raise InputError(f"p is {p!r}; expected a number from 1 to inf")
        self.check_call(guarantee, self.refusal(layer, p))
        layer, p = layer.double(), float(p)
        R = torch.tensor(radii, dtype=torch.float64, device=layer.device)
        with torch.no_grad():
            if guarantee == "proved":
                found = _numbers(self._evaluate(Proved(memory_limit), layer, Ball.exact(R), tokens, p))
            else:
                found = self._evaluate(Numerical(), layer, R, tokens, p)
            attained = _attained_in_ball(layer, R, tokens) if p == 2 else torch.zeros_like(R)
            result = self._result(found, attained, guarantee)
        one = not isinstance(radius, Sequence)
        return replace(
            result,
            value=result.value.squeeze(-1) if one else result.value,
            radius=radii[0] if one else tuple(radii),
            tokens=tokens,
            p=p,
            seconds=time.perf_counter() - began,
        )


def attained_gain(layer: AttentionLayer, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b"]:
    """‖DF(x)g‖ / ‖g‖, rounded down, for a direction g that a few power steps found: ‖DF(x)‖ is not below it."""
    jacobian = AttentionJacobian(layer, x)
    start = torch.randn(x.shape[-2:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = start.to(x).expand_as(x)
    for _ in range(_POWER_STEPS):
        g = jacobian.rmv(jacobian.mv(g))
        largest = g.abs().amax((-2, -1), keepdim=True)
        g = g / torch.where(largest > 0, largest, torch.inf)
    direction = Ball.exact(g)
    gain = frobenius(paths(layer, Ball.exact(x), direction).total) / frobenius(direction)
    return gain.lower.nan_to_num(nan=0.0, neginf=0.0)  # where nothing moves, or rounding hides it


def _attained_in_ball(layer: AttentionLayer, radii: Float[Tensor, " r"], tokens: int) -> Float[Tensor, " r"]:
    """(r) an attained slope in each ball: at random tokens of length R."""
    masks = () if layer.mask is None else layer.mask.shape[:-2]
    shape = (*masks, tokens, layer.d)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(radii)
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) * (1 - 1e-12)
    gain = attained_gain(layer, radii.reshape(-1, *(1 for _ in shape)) * x)
    return gain.flatten(1).amax(1) if masks else gain


def _check_tokens(layer: AttentionLayer, tokens: int) -> None:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InputError(f"tokens is {tokens!r}; expected how many tokens there are, at least 1")
    if layer.mask is not None and layer.mask.shape[-1] != tokens:
        raise InputError(f"tokens is {tokens} and the mask is for {layer.mask.shape[-1]}")


def _numbers(found: Evaluation[Ball]) -> Evaluation[Tensor]:
    """What is reported of balls."""
    return Evaluation(found.value.upper, {name: term.upper for name, term in found.terms.items()}, found.notes)


point_bounds: Registry[PointBound] = Registry("method at a point", group="holdfast.bounds")
ball_bounds: Registry[BallBound] = Registry("method on a ball around 0", group="holdfast.bounds")

L = TypeVar("L", bound=type[PointBound] | type[BallBound])


def register_lipschitz_bound(cls: L) -> L:
    """Class decorator that registers a Lipschitz bound under its `name`, beside those of the same scope."""
    cls.check_metadata()
    if issubclass(cls, PointBound):
        point_bounds.add(cls.name)(cls())
    else:
        ball_bounds.add(cls.name)(cls())
    return cls
