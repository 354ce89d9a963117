"""The front doors: thin functions that pick a method and call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.attacks import ProjectedAscent
from holdfast.attention import AttentionJacobian, AttentionLayer, checks
from holdfast.bounds import bounds
from holdfast.errors import InputError
from holdfast.linalg import FunctionJacobian, estimate, upper
from holdfast.linalg.certified import GIB
from holdfast.results import AttackResult, BoundResult, Guarantee, NormResult, Side


def bound(
    layer: AttentionLayer,
    x: Tensor,
    eps: float | Sequence[float],
    method: str = "best",
    *,
    guarantee: Guarantee = "proved",
    memory_limit: float = 8 * GIB,
) -> BoundResult:
    """How far the output of the layer can move when x moves by at most eps in the Frobenius norm.

    Args:
        layer: the attention layer.
        x: (b…, n, d) the inputs.
        eps: one radius, for a value (b…); or a sequence of e radii, for a value (b…, e).
        method: a name that `list_bounds` shows.
        guarantee: "proved" (float64, rounded outward) or "numerical" (faster; norms from an iteration).
        memory_limit: bytes that one proved norm may hold.

    Example:
        >>> r = bound(layer, x, eps=0.1, method="lofast")
        >>> r.value, r.terms["zeta"]
    """
    return bounds[method](layer, x, eps, guarantee=guarantee, memory_limit=memory_limit)


def attack(
    layer: AttentionLayer,
    x: Tensor,
    eps: float | Sequence[float],
    *,
    objective: str = "output",
    restarts: int = 10,
    steps: int = 100,
    seed: int = 0,
) -> AttackResult:
    """A perturbation of x by at most eps that moves the output far, and how far it does.

    Args:
        layer: the attention layer.
        x: (b…, n, d) the inputs.
        eps: one radius, or a sequence of them.
        objective: "output", or an inner quantity of LoFAST: "delta-2", "delta-21", "scores", "delta-22".
        restarts: starting points that are followed for every input; four times as many are tried.
        steps: gradient steps for every start.
        seed: of everything random.
    """
    for name, count in (("restarts", restarts), ("steps", steps)):
        if count < 1:
            raise InputError(f"{name} is {count}; expected at least 1")
    return ProjectedAscent(restarts, steps)(layer, x, eps, objective=objective, seed=seed)


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
        f_or_layer: an attention layer, or any differentiable function of one tensor.
        x: where; (b…, n, d) for a layer.
        side: "estimate" (Lanczos, from below) or "upper" (proved; needs a layer).
        batch_dims: how many leading dimensions of x a bare function treats one by one.
        tolerance: relative accuracy of an estimate.
        memory_limit: bytes that a proved norm may hold.
        seed: of the random start of an estimate.
    """
    if side not in ("estimate", "upper"):
        raise InputError(f'side is {side!r}; expected "estimate" or "upper"')
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
