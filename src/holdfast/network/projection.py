"""Pieces without weights: projections of every token into a ball, and sorting in pairs."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.bounds.arithmetic import Arithmetic
from holdfast.errors import InputError
from holdfast.linalg import Array
from holdfast.linalg.rounding import frobenius
from holdfast.network.base import Piece
from holdfast.network.norms import Normalisation
from holdfast.network.weights import number


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
class MaxMin(Piece):
    """Channels 2k and 2k + 1 become their maximum and their minimum: sorting moves no two points apart."""

    def value(self, u: Array) -> Array:
        if u.shape[-1] % 2:
            raise InputError(f"MaxMin got {u.shape[-1]} channels; expected an even number")
        channels = torch.arange(u.shape[-1], device=u.device)
        other, first = u[..., channels ^ 1], channels % 2 == 0
        return u.minimum(other).masked_fill(first, 0.0) - (-u).minimum(-other).masked_fill(~first, 0.0)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho


def _positive(radius: float) -> float:
    if not (math.isfinite(radius) and radius > 0):
        raise InputError(f"radius is {radius!r}; expected a positive number")
    return float(radius)
