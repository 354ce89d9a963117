"""Bounds of the slope of a layer: of ‖DF(x)‖ at a point, or of the Lipschitz constant on a ball around 0.

None of them bounds how far the output moves in a ball around x, so none of them can be reached from `holdfast.bound`.
"""

from __future__ import annotations

import math
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
from holdfast.bounds.base import Evaluation, LayerMethod, MethodAtPoint
from holdfast.errors import HoldfastError, InputError
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic, Numerical, Proved
from holdfast.linalg.certified import GIB
from holdfast.linalg.rounding import frobenius
from holdfast.radii import GivenRadii, as_numbers, check_number, check_radii
from holdfast.registry import Registry
from holdfast.results import Guarantee, LipschitzResult, Scope

_POWER_STEPS = 4
_CHECKED_TOKENS = 256  # at most, in the check of a bound on a ball
_TENSORS = 32  # of n x n numbers for each head, that the check holds at once


class LipschitzBound(LayerMethod):
    """An upper bound of the slope of a layer; either of two kinds, by its scope."""

    @final
    def _result(self, evaluation: Evaluation[Tensor], attained: Tensor, guarantee: Guarantee) -> LipschitzResult:
        """Wraps a value; withholds one that is not finite, or below what is attained."""
        if not bool(torch.isfinite(evaluation.value).all()):
            raise HoldfastError(f"bound {self.name!r} overflowed float64; use smaller weights, inputs or radii")
        self.withhold_below(attained, evaluation.value, guarantee)
        return LipschitzResult(
            evaluation.value, self.name, self.side, self.scope, guarantee, evaluation.terms, evaluation.notes
        )


class PointBound(MethodAtPoint, LipschitzBound):
    """An upper bound of ‖DF(x)‖, the norm of the Jacobian at x and nowhere else.

    A method states its metadata and writes `_evaluate` and `_refusal`.
    """

    scope: ClassVar[Scope] = "point"

    @abstractmethod
    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        """The formula, in the arithmetic `a`: x is float64 (b…, n, d), the value (b…)."""

    @final
    def __call__(
        self, layer: AttentionLayer, x: Tensor, *, guarantee: Guarantee = "proved", memory_limit: float = 8 * GIB
    ) -> LipschitzResult:
        """Evaluates the bound.

        Args:
            layer: the layer.
            x: (b…, n, d) the points, float32 or float64; computed in float64.
            guarantee: "proved" or "numerical".
            memory_limit: bytes that one proved norm may use.
        """
        began = time.perf_counter()
        checks.input(layer, x)
        self.check_call(guarantee, self.refusal(layer))
        layer, x = layer.double(), x.detach().double()
        with torch.no_grad():
            if guarantee == "proved":
                evaluation = _numbers(self._evaluate(Proved(memory_limit), layer, x))
            else:
                evaluation = self._evaluate(Numerical(), layer, x)
            result = self._result(evaluation, attained_gain(layer, x), guarantee)
        return replace(result, seconds=time.perf_counter() - began)


class BallBound(LipschitzBound):
    """An upper bound of the Lipschitz constant on B_R^n: sequences of n tokens, each of length at most R.

    The metric is (Σ_i |x_i|^p)^{1/p}, the Frobenius norm for p = 2, so that the value bounds ‖DF(X)‖ at every X in
    B_R^n then. Without a mask it is also a constant for the W_p distance; with one it is not, because the order of the
    tokens matters and W_p does not see it. A method states its metadata and writes `_evaluate` and `_refusal`.
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
        radius: GivenRadii,
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
            tokens: n, the number of tokens.
            p: exponent of the distance, from 1 to inf: W_p without a mask, token-wise otherwise.
            guarantee: "proved" or "numerical".
            memory_limit: bytes that one proved norm may use.
        """
        began = time.perf_counter()
        radius = as_numbers(radius)
        radii = check_radii(radius, "radius")
        _check_tokens(layer, tokens)
        exponent = check_number(p, "p", "a number from 1 to inf")
        if not exponent >= 1:
            raise InputError(f"p is {p!r}; expected a number from 1 to inf")
        self.check_call(guarantee, self.refusal(layer, exponent))
        layer, p = layer.double(), exponent
        R = torch.tensor(radii, dtype=torch.float64, device=layer.device)
        with torch.no_grad():
            if guarantee == "proved":
                evaluation = _numbers(self._evaluate(Proved(memory_limit), layer, Ball.exact(R), tokens, p))
            else:
                evaluation = self._evaluate(Numerical(), layer, R, tokens, p)
            attained = _attained_in_ball(layer, R, tokens, memory_limit) if p == 2 else torch.zeros_like(R)
            result = self._result(evaluation, attained, guarantee)
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


def _attained_in_ball(
    layer: AttentionLayer, radii: Float[Tensor, " r"], tokens: int, memory_limit: float
) -> Float[Tensor, " r"]:
    """(r) an attained slope in each ball: at random tokens of length R; 0 where memory does not allow the search."""
    masks = () if layer.mask is None else layer.mask.shape[:-2]
    masks = masks if layer.rotary is None else layer.rotary.batch or masks
    heads = radii.numel() * layer.h * math.prod(masks)
    tokens = _tokens_to_check(layer, tokens, memory_limit / (8 * _TENSORS * max(heads, 1)))
    if not tokens:
        return torch.zeros_like(radii)
    shape = (*masks, tokens, layer.d)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(radii)
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True) * (1 - 1e-12)
    gain = attained_gain(layer, radii.reshape(-1, *(1 for _ in shape)) * x)
    return gain.flatten(1).amax(1) if masks else gain


def _tokens_to_check(layer: AttentionLayer, tokens: int, pairs: float) -> int:
    """How many tokens to look at, so that a slope there is one of `tokens` tokens too; 0 for none.

    A prefix is enough for a causal layer: its derivative is a block of the whole one. Without a mask a divisor of the
    number of tokens is: copies of a sequence that move alike have the slope of one. Another mask fits one number only,
    and so do rotary positions.
    """
    most = min(tokens, _CHECKED_TOKENS, math.isqrt(int(min(pairs, 2.0**62))))
    if layer.mask is not None or layer.rotary is not None:
        return tokens if most == tokens else 0
    if layer.causal:
        return most
    return next((m for m in range(most, 0, -1) if tokens % m == 0), 0)


def _check_tokens(layer: AttentionLayer, tokens: int) -> None:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InputError(f"tokens is {tokens!r}; expected how many tokens there are, at least 1")
    if layer.mask is not None and layer.mask.shape[-1] != tokens:
        raise InputError(f"tokens is {tokens} and the mask is for {layer.mask.shape[-1]}")
    if layer.rotary is not None and layer.rotary.n != tokens:
        raise InputError(f"tokens is {tokens} and the rotary positions are for {layer.rotary.n}")


def _numbers(evaluation: Evaluation[Ball]) -> Evaluation[Tensor]:
    """What is reported of balls."""
    return Evaluation(
        evaluation.value.upper, {name: term.upper for name, term in evaluation.terms.items()}, evaluation.notes
    )


point_bounds: Registry[PointBound] = Registry("method at a point", group="holdfast.bounds")
ball_bounds: Registry[BallBound] = Registry("method on a ball around 0", group="holdfast.bounds")

L = TypeVar("L", bound=type[PointBound] | type[BallBound])


def register_lipschitz_bound(cls: L) -> L:
    """Class decorator that registers a Lipschitz bound under its `name`, beside those of the same scope."""
    cls.check_guarantees()
    if issubclass(cls, PointBound):
        point_bounds.add(cls.name)(cls())
    else:
        ball_bounds.add(cls.name)(cls())
    return cls
