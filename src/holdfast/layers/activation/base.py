"""Activation functions with their derivatives, and proved ranges of these over intervals (docs/math/pieces.md).

A derivative φ⁽ᵏ⁾ is monotone between neighbouring zeros of φ⁽ᵏ⁺¹⁾. So its range over [low, high] is spanned by its
values at the two ends and at the zeros inside. The zeros are isolated once, by bisection in ball arithmetic: a cell
where the ball of φ⁽ᵏ⁺¹⁾ does not meet zero has none. Nothing has to be known of the function but its derivatives and
what is left of them far from zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg import Array, Ball
from holdfast.linalg.rounding import down, up

_FAR = 40.0  # beyond it every φ⁽ᵏ⁾, k = 1..4, is within _LEFT of its limit
_LEFT = 1e-15
_COARSE, _FINE = 2.0**-5, 2.0**-24  # widths of the first and the last cells of the bisection


@final
@dataclass(frozen=True)
class Interval:
    """Numbers between `low` and `high`, entry by entry; rounded outward."""

    low: Tensor
    high: Tensor

    @property
    def magnitude(self) -> Tensor:
        """The largest absolute value."""
        return torch.maximum(self.high, -self.low)


class Activation(ABC):
    """A function φ of one variable, applied entry by entry."""

    name: str
    #: Whether the slopes of all secants lie in [0, 1].
    restricted: bool = False

    @abstractmethod
    def value(self, t: Array) -> Array:
        """φ(t)."""

    @abstractmethod
    def slopes(self, low: Tensor, high: Tensor) -> Interval:
        """What the slopes of all secants of φ within [low, high] lie in."""

    @property
    @abstractmethod
    def all_slopes(self) -> tuple[float, float]:
        """What the slopes of all secants lie in."""

    @abstractmethod
    def slope(self, t: Array) -> Array:
        """φ'(t); at a kink, the slope on one of its sides."""


class SmoothActivation(Activation):
    """An activation with five derivatives; a kind writes `derivative`."""

    #: The limits of φ' at -∞ and ∞; higher derivatives vanish there.
    limits: tuple[float, float] = (0.0, 1.0)
    #: t is measured in this unit: φ⁽ᵏ⁾ has reached its limits at |t| = 40 units.
    unit: float = 1.0

    @abstractmethod
    def derivative(self, k: int, t: Array) -> Array:
        """φ⁽ᵏ⁾(t), for k from 0 to 5."""

    @final
    def value(self, t: Array) -> Array:
        return self.derivative(0, t)

    @final
    def slope(self, t: Array) -> Array:
        return self.derivative(1, t)

    @final
    def slopes(self, low: Tensor, high: Tensor) -> Interval:
        return self.range(1, low, high)

    @final
    @cached_property
    def all_slopes(self) -> tuple[float, float]:
        ends = torch.tensor([math.inf], dtype=torch.float64)
        slopes = self.range(1, -ends, ends)
        return float(slopes.low), float(slopes.high)

    def range(self, k: int, low: Tensor, high: Tensor) -> Interval:
        """What φ⁽ᵏ⁾ stays in over [low, high], for k from 1 to 4; float64, rounded outward.

        Args:
            k: order of the derivative.
            low: (…) lower ends, may be -inf.
            high: (…) upper ends, may be inf.
        """
        _check_order(k)
        turning, far = _turning(self, k), _FAR * self.unit
        ends = [self.derivative(k, Ball.exact(end.clamp(-far, far))) for end in (low, high)]
        least = torch.minimum(ends[0].lower, ends[1].lower)
        most = torch.maximum(ends[0].upper, ends[1].upper)
        for left, right, lowest, highest in turning:
            inside = (high >= left) & (low <= right)
            least = torch.where(inside, least.clamp(max=lowest), least)
            most = torch.where(inside, most.clamp(min=highest), most)
        return Interval(least, most)

    @final
    def supremum(self, k: int, low: Tensor, high: Tensor) -> Tensor:
        """A proved bound of max |φ⁽ᵏ⁾| over [low, high], for k from 1 to 4."""
        return self.range(k, low, high).magnitude

    @final
    def drift(self, k: int, centre: Tensor, radius: Tensor) -> Tensor:
        """A proved bound of max |φ⁽ᵏ⁾(t) - φ⁽ᵏ⁾(centre)| over |t - centre| <= radius, for k from 1 to 4."""
        low, high = down(centre - radius), up(centre + radius)
        reached, here = self.range(k, low, high), self.derivative(k, Ball.exact(centre))
        moved = up(torch.maximum(reached.high - here.lower, here.upper - reached.low))
        if k == _ORDERS:
            return moved
        return torch.minimum(moved, up(radius * self.supremum(k + 1, low, high)))


_ORDERS = 4


def _check_order(k: int) -> None:
    if k not in range(1, _ORDERS + 1):
        raise InputError(f"derivative of order {k!r} of an activation; ranges are known for k from 1 to {_ORDERS}")


@lru_cache(maxsize=256)
def _turning(phi: SmoothActivation, k: int) -> tuple[tuple[float, float, float, float], ...]:
    """(left, right, lowest, highest): intervals outside which φ⁽ᵏ⁾ is monotone, and its range on each of them."""
    far = _FAR * phi.unit
    limits = phi.limits if k == 1 else (0.0, 0.0)
    left_over = _LEFT * phi.unit ** (1 - k)
    intervals = [(-math.inf, -far, limits[0] - left_over, limits[0] + left_over)]
    width = _COARSE
    centres = torch.arange(-_FAR, _FAR, width, dtype=torch.float64) + width / 2  # in units; all of them are exact
    while len(centres):
        cells = Ball(centres, torch.full_like(centres, width / 2)) * phi.unit
        steepness = phi.derivative(k + 1, cells)
        reached = _mean_value_range(phi, k, cells, steepness)
        undecided = (steepness.lower <= 0) & (steepness.upper >= 0)
        done = undecided & ((reached.high - reached.low <= 100 * left_over) | (width <= _FINE))
        ends = (cells.lower, cells.upper, reached.low, reached.high)
        intervals += zip(*(t[done].tolist() for t in ends), strict=True)
        width /= 2
        rest = centres[undecided & ~done]
        centres = torch.cat([rest - width / 2, rest + width / 2])
    intervals.append((far, math.inf, limits[1] - left_over, limits[1] + left_over))
    return _joined(sorted(intervals))


def _mean_value_range(phi: SmoothActivation, k: int, cells: Ball, steepness: Ball) -> Interval:
    """φ⁽ᵏ⁾(c) ± radius · max |φ⁽ᵏ⁺¹⁾|: second order in the width of a cell next to a zero of φ⁽ᵏ⁺¹⁾."""
    steepest = torch.maximum(steepness.upper, -steepness.lower)
    reach = phi.derivative(k, Ball.exact(cells.mid)) + Ball(torch.zeros_like(steepest), up(cells.rad * steepest))
    return Interval(reach.lower, reach.upper)


def _joined(cells: Sequence[tuple[float, float, float, float]]) -> tuple[tuple[float, float, float, float], ...]:
    """Cells that touch become one."""
    out = [cells[0]]
    for left, right, low, high in cells[1:]:
        if left <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], right), min(out[-1][2], low), max(out[-1][3], high))
        else:
            out.append((left, right, low, high))
    return tuple(out)
