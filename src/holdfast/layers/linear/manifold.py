"""Steps on the manifold of matrices with orthonormal rows or columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from holdfast.errors import InputError

# Coefficients of the odd quintic of Jordan et al. 2024 (Muon): five steps bring every singular value that is not
# negligible near 1, which is all that a direction needs.
_A, _B, _C = 3.4445, -4.7750, 2.0315

# Up to this lr singular values change by |e| <= 1.25 lr, and a step along the manifold by far less: two steps do.
_SHORT = 0.03


def nearest_orthonormal(w: Float[Tensor, "*g m n"], steps: int = 5) -> Float[Tensor, "*g m n"]:
    """The polar factor of matrices whose singular values are near 1, by W ← W (3I - WᵀW)/2 (Newton and Schulz).

    A singular value 1 + e becomes 1 - 3e²/2 - e³/2: five steps bring every |e| <= 0.36 below 1e-8, and no step of
    `ManifoldStep` leaves more, because a direction has singular values below 1.25 and `lr` is at most 0.25. A step
    along the manifold leaves e of order lr², for which two steps do.
    """
    tall = _tall(w)
    for _ in range(steps):
        tall = torch.baddbmm(tall, tall, tall.mT @ tall, beta=1.5, alpha=-0.5)
    return _like(tall, w)


def direction(g: Float[Tensor, "*g m n"], steps: int = 5) -> Float[Tensor, "*g m n"]:
    """Roughly the polar factor of any matrices, in the precision given: the steepest step of spectral norm 1."""
    tall = _tall(g)
    tall = tall / (torch.linalg.matrix_norm(tall, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = tall.mT @ tall
        tall = torch.baddbmm(tall, tall, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), beta=_A)
    return _like(tall, g)


def _tall(w: Float[Tensor, "*g m n"]) -> Float[Tensor, "all long short"]:
    """The matrices in one row, each standing on its shorter side."""
    w = w.reshape(-1, *w.shape[-2:])
    return w.mT if w.shape[-2] < w.shape[-1] else w


def _like(tall: Float[Tensor, "all long short"], w: Float[Tensor, "*g m n"]) -> Float[Tensor, "*g m n"]:
    """The inverse of `_tall`."""
    return (tall.mT if w.shape[-2] < w.shape[-1] else tall).reshape(w.shape)


@final
class ManifoldStep(torch.optim.Optimizer):
    """Muon on the Stiefel manifold: weights with orthonormal rows or columns stay so.

    With W of orthonormal columns (or its transpose) and momentum M, the part of M along the manifold is
    Z = M - W sym(WᵀM); the step goes along the polar factor of Z, so that it has spectral length `lr`, and ends at the
    polar factor of the sum. Matrices of equal shape are stepped together. Directions are computed in bfloat16 on a GPU;
    the last iterations run in float64, so that the weights are orthonormal to the rounding of float32 whatever
    precision the process allows its float32 products.

    Args:
        params: matrices with orthonormal rows or columns: `manifold_parameters(model)`.
        lr: spectral length of a step, at most 0.25.
        momentum: share of the old momentum that is kept.

    Example:
        >>> on_manifold = list(manifold_parameters(model))
        >>> optimiser = ManifoldStep(on_manifold, lr=0.01)
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01, momentum: float = 0.95) -> None:
        if not 0 < lr <= 0.25:
            raise InputError(f"lr is {lr}; expected a step of at most 0.25: the weights have norm 1")
        if not 0 <= momentum < 1:
            raise InputError(f"momentum is {momentum}; expected 0 <= momentum < 1")
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise InputError(f"a parameter has shape {tuple(p.shape)}; expected matrices")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every matrix that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, torch.device], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape, p.device].append(p)
            for weights in alike.values():
                self._step_together(weights, group["lr"], group["momentum"])
        return loss

    def _step_together(self, weights: list[Tensor], lr: float, momentum: float) -> None:
        held = []
        for p in weights:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            held.append(state["momentum"])
        gradients = [p.grad for p in weights if p.grad is not None]
        torch._foreach_mul_(held, momentum)
        torch._foreach_add_(held, gradients)
        W = torch.stack(weights)
        # Nesterov's look-ahead, as in Muon.
        M = torch.stack(gradients) + momentum * torch.stack(held)
        fast = torch.bfloat16 if W.is_cuda else W.dtype
        step = direction(_along(W.to(fast), M.to(fast))).to(torch.float64)
        moved = nearest_orthonormal(W.double() - lr * step, steps=2 if lr <= _SHORT else 5)
        torch._foreach_copy_(weights, list(moved.to(W.dtype).unbind()))


def _along(W: Tensor, M: Tensor) -> Tensor:
    """The part of M that is tangent to the manifold at W."""
    if W.shape[-2] < W.shape[-1]:
        return _along(W.mT, M.mT).mT
    product = W.mT @ M
    return M - W @ (0.5 * (product + product.mT))
