"""The front doors: thin functions that pick a method and call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from holdfast.attacks import LipschitzAscent, ProjectedAscent
from holdfast.attention import AttentionJacobian, AttentionLayer, checks
from holdfast.bounds import ball_bounds, bound_named, point_bounds
from holdfast.errors import InputError, check_counts
from holdfast.linalg import FunctionJacobian, estimate, upper
from holdfast.linalg.certified import GIB
from holdfast.radii import GivenRadii
from holdfast.results import AttackResult, BoundResult, Guarantee, LipschitzResult, LipschitzWitness, NormResult, Side


def bound(
    layer: AttentionLayer | nn.Module,
    x: Tensor,
    eps: GivenRadii,
    method: str = "best",
    *,
    guarantee: Guarantee = "proved",
    memory_limit: float = 8 * GIB,
) -> BoundResult:
    """How far the output of the layer can move when x moves by at most eps in the Frobenius norm.

    Args:
        layer: the attention layer, or an `nn.MultiheadAttention`.
        x: (b…, n, d) the inputs.
        eps: one radius, for a value (b…); or a sequence of e radii, for a value (b…, e).
        method: a name that `list_bounds` shows.
        guarantee: "proved" (float64, rounded outward) or "numerical" (faster; norms from an iteration).
        memory_limit: bytes that one proved norm may use.

    Example:
        >>> r = bound(layer, x, eps=0.1, method="lofast")
        >>> r.value, r.terms["zeta"]
    """
    return bound_named(method)(_as_layer(layer), x, eps, guarantee=guarantee, memory_limit=memory_limit)


def lipschitz_bound(
    layer: AttentionLayer | nn.Module,
    x: Tensor | None = None,
    method: str = "best",
    *,
    radius: GivenRadii | None = None,
    tokens: int | None = None,
    p: float = 2.0,
    guarantee: Guarantee = "proved",
    memory_limit: float = 8 * GIB,
) -> LipschitzResult:
    """How steep the layer can be: at x, or everywhere on sequences of tokens of bounded length.

    Args:
        layer: the attention layer, or an `nn.MultiheadAttention`.
        x: (b…, n, d) the points, for a bound of the Jacobian's norm there; or omit it and give radius and tokens.
        method: a name that `list_bounds` shows with the scope "point" (for x) or "ball at 0" (for a radius).
        radius: R, or a sequence of them: no token is longer.
        tokens: how many tokens there are.
        p: exponent of the distance between inputs and between outputs: W_p without a mask, token-wise otherwise; 2 is
            the Frobenius norm.
        guarantee: "proved" (float64, rounded outward) or "numerical" (faster; norms from an iteration).
        memory_limit: bytes that one proved norm may use.

    Example:
        >>> lipschitz_bound(layer, x, "yudin-b3").value
        >>> lipschitz_bound(layer, radius=4.0, tokens=64, method="castin-ball").value
    """
    layer = _as_layer(layer)
    options: _Options = {"guarantee": guarantee, "memory_limit": memory_limit}
    if x is not None:
        if radius is not None or tokens is not None:
            raise InputError("both x and a radius or tokens were given; pass x for a point, the others for a ball at 0")
        if method in ball_bounds and method not in point_bounds:
            raise InputError(
                f"{method!r} holds on a ball around 0; in the place of x pass radius (--radius) and tokens (--tokens)"
            )
        return point_bounds[method](layer, x, **options)
    if radius is None or tokens is None:
        raise InputError("neither x nor a radius with tokens was given; pass x for a point, the others for a ball at 0")
    if method in point_bounds and method not in ball_bounds:
        raise InputError(f"{method!r} holds at a point; pass x in the place of radius and tokens")
    return ball_bounds[method](layer, radius, tokens, p, **options)


class _Options(TypedDict):
    guarantee: Guarantee
    memory_limit: float


def attack(
    layer: AttentionLayer | nn.Module,
    x: Tensor,
    eps: GivenRadii,
    *,
    objective: str = "output",
    restarts: int = 10,
    steps: int = 100,
    seed: int = 0,
) -> AttackResult:
    """A perturbation of x by at most eps that moves the output far, and how far it does.

    Args:
        layer: the attention layer, or an `nn.MultiheadAttention`.
        x: (b…, n, d) the inputs.
        eps: one radius, or a sequence of them.
        objective: "output", or an inner quantity of LoFAST: "delta-2", "delta-21", "scores", "delta-22".
        restarts: starting points that are followed for every input; four times as many are tried.
        steps: gradient steps for every start.
        seed: for everything random.
    """
    check_counts(restarts=restarts, steps=steps)
    return ProjectedAscent(restarts, steps)(_as_layer(layer), x, eps, objective=objective, seed=seed)


def lipschitz_attack(
    layer: AttentionLayer | nn.Module,
    radius: float,
    tokens: int,
    *,
    restarts: int = 16,
    steps: int = 100,
    seed: int = 0,
) -> LipschitzWitness:
    """Tokens of bounded length at which the layer is steep, and how steep it is there.

    Args:
        layer: the attention layer, or an `nn.MultiheadAttention`.
        radius: R; no token is longer.
        tokens: how many tokens there are.
        restarts: starting points that are followed; at least four times as many are tried.
        steps: gradient steps for every start.
        seed: for everything random.

    Example:
        >>> lipschitz_attack(layer, radius=4.0, tokens=64).lower
    """
    check_counts(restarts=restarts, steps=steps)
    return LipschitzAscent(restarts, steps)(_as_layer(layer), radius, tokens, seed=seed)


def _as_layer(layer: AttentionLayer | nn.Module) -> AttentionLayer:
    return layer if isinstance(layer, AttentionLayer) else AttentionLayer.from_module(cast("Any", layer))


def local_lipschitz(
    f_or_layer: AttentionLayer | Callable[[Tensor], Tensor],
    x: Tensor,
    side: Side = "estimate",
    *,
    batch_dims: int = 0,
    tolerance: float = 1e-6,
    memory_limit: float = 8 * GIB,
    seed: int = 0,
) -> NormResult:
    """The norm of the Jacobian at x: how fast the output moves with the input, to first order.

    Args:
        f_or_layer: an attention layer, an `nn.MultiheadAttention`, or any differentiable function of one tensor.
        x: where; (b…, n, d) for a layer.
        side: "estimate" (Lanczos, from below) or "upper" (proved; needs a layer).
        batch_dims: how many leading dimensions of x a bare function treats one by one.
        tolerance: relative accuracy of an estimate.
        memory_limit: bytes that a proved norm may use.
        seed: for the random start of an estimate.
    """
    if side not in ("estimate", "upper"):
        raise InputError(f'side is {side!r}; expected "estimate" or "upper"')
    if isinstance(f_or_layer, nn.MultiheadAttention):
        f_or_layer = _as_layer(f_or_layer)
    if not isinstance(f_or_layer, AttentionLayer):
        if side == "upper":
            raise InputError(
                'side="upper" is proved only for an AttentionLayer: a bare function has no proved rounding; '
                'use side="estimate"'
            )
        return estimate(FunctionJacobian(f_or_layer, x, batch_dims), tolerance=tolerance, seed=seed)
    checks.input(f_or_layer, x)
    if side == "estimate":
        checks.same_dtype(f_or_layer, x)
        with torch.no_grad():
            return estimate(AttentionJacobian(f_or_layer, x), tolerance=tolerance, seed=seed)
    with torch.no_grad():
        return upper(AttentionJacobian(f_or_layer.double(), x.double()), memory_limit=memory_limit)
