"""Projections of every token into a ball: what takes the place of LayerNorm."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.module import Layer
from holdfast.layers.norm.piece import Normalisation
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.weights import number
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import frobenius


@final
class HardProject(Piece):
    """LayerProject: x for ‖x‖ <= R and R x/‖x‖ beyond, for every token (Havens et al. 2024, equation 24).

    A projection onto a convex set moves no two points apart. Where the whole ball of radius ρ around a token lies
    beyond R, the derivative R/‖z‖ (I - zzᵀ/‖z‖²) has a norm of at most R/(‖x‖ - ρ) there.

    Args:
        radius: R.
    """

    def __init__(self, radius: float) -> None:
        self.radius = _positive(radius)

    def value(self, u: Array) -> Array:
        length = frobenius(u, (-1,)).unsqueeze(-1)
        # R/max(‖x‖, R) is 1 inside; the quotient of equal floats is exact.
        return u * (number(self.radius, u) / length.clamp(min=self.radius))

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        left = (frobenius(a.lift(u), (-1,)).unsqueeze(-2) - rho.unsqueeze(-1)).clamp(min=self.radius)
        return (number(self.radius, left) / left).amax(-1) * rho


@final
class SmoothProject(Normalisation):
    """x/√(1 + ‖x‖²/R²) for every token: into the open ball of radius R, with gain at most 1.

    Args:
        radius: R.
    """

    def __init__(self, radius: float) -> None:
        self.radius = _positive(radius)
        super().__init__(torch.ones(1), torch.zeros(1), 1.0, centred=False)

    def _length(self, x: Array) -> Array:
        return number(self.radius, x).square()


@final
class LayerProject(Layer):
    """Every token brought into the ball of radius R.

    Hard (Havens et al. 2024, equation 24): x · min(1, R/‖x‖), the projection onto a convex set, so the gain is 1.
    Smooth: x / √(1 + ‖x‖²/R²), whose derivative has the eigenvalues r and r³ for r = (1 + ‖x‖²/R²)^(-1/2) <= 1.

    Args:
        radius: R.
        smooth: which of the two.
    """

    def __init__(self, radius: float, *, smooth: bool = False) -> None:
        super().__init__()
        self.radius, self.smooth = _positive(radius), smooth

    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        square = x.square().sum(-1, keepdim=True, dtype=torch.float32 if x.dtype != torch.float64 else None)
        inside = square / self.radius**2
        shrink = (1 + inside).rsqrt() if self.smooth else inside.clamp(min=1).rsqrt()
        return x * shrink.to(x.dtype)

    def steepness(self) -> Steepness:
        # Of y / √(1 + |y|²) the second derivative is at most 3t (1 + t²)^(-5/2) <= 48 / (25 √5), at t = |y| = 1/2.
        return Steepness(self.gain, 48 / (25 * math.sqrt(5)) / self.radius if self.smooth else math.inf)

    def pieces(self) -> tuple[Piece, ...]:
        return (SmoothProject(self.radius) if self.smooth else HardProject(self.radius),)


def _positive(radius: float) -> float:
    if not (math.isfinite(radius) and radius > 0):
        raise InputError(f"the radius of a projection is {radius!r}; expected a positive number")
    return float(radius)
