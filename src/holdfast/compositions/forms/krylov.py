"""Where a quadratic function is about least on a ball, by Lanczos' method; nothing here is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 80  # steps
_LOOK = 5  # after so many the residual is examined
_ACCURACY = 1e-4  # of the gradient, where the steps end
_BISECTIONS = 60
_EXTREME = 40  # steps to the extreme eigenvalues

#: A symmetric matrix, as what it does to a vector.
Symmetric = Callable[[Tensor], Tensor]


@dataclass
class _LanczosSpace:
    """An orthonormal basis (k, p) of the span of a start and its images, and the symmetric matrix on it."""

    H: Symmetric
    basis: Tensor
    steps: int = 0
    diagonal: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()

    @classmethod
    def of(cls, H: Symmetric, start: Tensor, most: int) -> _LanczosSpace:
        basis = torch.zeros(min(most, len(start)) + 1, len(start), dtype=torch.float64)
        basis[0] = start / torch.linalg.vector_norm(start)
        return cls(H, basis)

    @property
    def complete(self) -> bool:
        """Whether nothing new can come."""
        small = 1e-12 * max(map(abs, self.diagonal), default=0.0)
        return self.steps + 1 >= len(self.basis) or (self.steps > 0 and not self.beside[-1] > small)

    def step(self) -> None:
        q, k = self.basis[self.steps], self.steps + 1
        new = self.H(q)
        self.diagonal += (float(q @ new),)
        for _ in range(2):
            new = new - self.basis[:k].mT @ (self.basis[:k] @ new)
        length = float(torch.linalg.vector_norm(new))
        self.beside, self.steps = (*self.beside, length), k
        if length > 0:
            self.basis[k] = new / length

    def eigen(self) -> tuple[Tensor, Tensor]:
        diagonal, beside = (torch.tensor(x, dtype=torch.float64) for x in (self.diagonal, self.beside[:-1]))
        values, vectors = torch.linalg.eigh(torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1))
        return values, vectors


def trust_region(H: Symmetric, g: Tensor, r: float) -> tuple[float, Tensor]:
    """About the μ >= 0 and b with (H + μ)b = -g and ‖b‖ = r, or a shorter b and μ = 0: where ½bᵀHb + g·b is least."""
    length = float(torch.linalg.vector_norm(g))
    if not (length > 0 and math.isfinite(length) and r > 0):
        return 0.0, torch.zeros_like(g)
    space = _LanczosSpace.of(H, g, _MOST)
    while True:
        space.step()
        if space.steps % _LOOK and not space.complete:
            continue
        w, U = space.eigen()
        c = U[0] * length
        mu = _multiplier(w, c, r)
        y = U @ (c / (w + mu))
        if space.complete or space.beside[-1] * abs(float(y[-1])) <= _ACCURACY * length:
            return mu, -(space.basis[: space.steps].mT @ y)


def _multiplier(w: Tensor, c: Tensor, r: float) -> float:
    """The least μ >= 0 with w + μ > 0 and ‖c/(w + μ)‖ <= r."""
    low = max(0.0, -float(w[0]))
    high = low + float(torch.linalg.vector_norm(c)) / r
    pairs = list(zip(c.tolist(), w.tolist(), strict=True))  # few numbers, many steps: tensors would only be in the way
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if math.hypot(*(a / (b + middle) for a, b in pairs)) <= r:
            high = middle
        else:
            low = middle
    return high + 1e-13 * float(w.abs().max())


def extremes(H: Symmetric, p: int) -> tuple[float, float]:
    """About the least and the largest eigenvalue."""
    start = torch.linspace(1.0, 2.0, p, dtype=torch.float64).sin_()
    space = _LanczosSpace.of(H, start, _EXTREME)
    while not space.complete:
        space.step()
    w, _ = space.eigen()
    return float(w[0]), float(w[-1])
