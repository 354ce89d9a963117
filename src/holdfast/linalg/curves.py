"""Bounds on balls of every radius, from a few evaluations that are kept.

A bound that holds on a ball holds on every smaller one. So a bound is evaluated at the radii base · ratio^level only,
and the next such radius above serves: a search over radii costs a handful of evaluations, however many it tries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

RATIO = 1.5  # of two radii, where nothing else is said
_REACH = 90 * math.log(RATIO)  # the logarithm of the largest radius over the base, and of the base over the smallest


def or_unbounded(bound: Tensor) -> Tensor:
    """The bound of a length or a slope; infinite where it is not a number, or negative, and so bounds nothing."""
    return torch.where(bound >= 0, bound, math.inf)


@final
class Grid:
    """Radii base · ratio^level, for each input its own.

    Args:
        base: gives them, (b) and positive; it is asked when they are needed.
        limit: (b) radii above it are not looked at.
        ratio: of a radius to the one below; above 1.

    Attributes:
        zero: the level of radius 0, just below all others.
        beyond: the level of radii for which nothing is known, just above them.
    """

    def __init__(
        self, base: Callable[[], Float64[Tensor, " b"]], limit: Float64[Tensor, " b"], ratio: float = RATIO
    ) -> None:
        self._find_base, self._limit, self._ratio = base, limit.unsqueeze(-1), ratio
        self._most = round(_REACH / math.log(ratio))
        self.zero, self.beyond = -self._most - 1, self._most + 1

    @cached_property
    def _base(self) -> Float64[Tensor, "b 1"]:
        return self._find_base().unsqueeze(-1)

    def level(self, rho: Float64[Tensor, "b e"]) -> Int64[Tensor, "b e"]:
        """The lowest level whose radius is not below rho."""
        usable = (rho > 0) & (rho <= self._limit)
        position = torch.log(torch.where(usable, rho, 1.0) / self._base) / math.log(self._ratio)
        level = position.ceil().clamp(-self._most, self._most).long()
        level = torch.where(self._above_zero(level) < rho, level + 1, level)
        level = torch.where(usable & (self._above_zero(level) >= rho), level, self.beyond)
        return torch.where(rho == 0, self.zero, level)

    def radius(self, level: Int64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """The radius of a level; 0 at `zero`."""
        if bool((level == self.zero).all()):
            return torch.zeros_like(level, dtype=torch.float64)
        return torch.where(level == self.zero, 0.0, self._above_zero(level))

    def _above_zero(self, level: Int64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        return self._base * torch.pow(torch.tensor(self._ratio, dtype=torch.float64, device=level.device), level)


@final
class Curve:
    """A bound as a function of the level of a grid; every level is evaluated once, for all inputs together."""

    def __init__(self, grid: Grid, evaluate: Callable[[Tensor], Tensor]) -> None:
        self._grid, self._evaluate = grid, evaluate
        self._known: dict[int, Tensor] = {}
        self._table: tuple[Int64[Tensor, " k"], Float64[Tensor, "b k"]] | None = None

    def __call__(self, level: Int64[Tensor, "b e"]) -> Float64[Tensor, "b e"]:
        """The bound at the radius of each level; infinite at the grid's `beyond`."""
        new = set(level.flatten().tolist()) - self._known.keys() - {self._grid.beyond}
        for at in new:
            # One level at a time: what is known about it must not depend on what else was asked for.
            radius = self._grid.radius(level.new_tensor([[at]]).expand(level.shape[0], 1))
            self._known[at] = or_unbounded(self._evaluate(radius)).expand_as(radius)[:, 0]
        if new or self._table is None:
            beyond = torch.full(level.shape[:1], math.inf, dtype=torch.float64, device=level.device)
            self._known.setdefault(self._grid.beyond, beyond)
            levels = sorted(self._known)
            self._table = level.new_tensor(levels), torch.stack([self._known[at] for at in levels], -1)
        levels_known, values = self._table
        return values.gather(-1, torch.searchsorted(levels_known, level))
