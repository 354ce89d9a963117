"""LayerProject: what stands in the place of LayerNorm."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.network.base import Piece
from holdfast.network.projection import HardProject, SmoothProject
from holdfast.nn.layer import Layer


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
        if not (math.isfinite(radius) and radius > 0):
            raise InputError(f"the radius of a projection is {radius}; expected a positive number")
        self.radius, self.smooth = float(radius), smooth

    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        square = x.square().sum(-1, keepdim=True, dtype=torch.float32 if x.dtype != torch.float64 else None)
        inside = square / self.radius**2
        shrink = (1 + inside).rsqrt() if self.smooth else inside.clamp(min=1).rsqrt()
        return x * shrink.to(x.dtype)

    def pieces(self) -> tuple[Piece, ...]:
        return (SmoothProject(self.radius) if self.smooth else HardProject(self.radius),)
