"""Radii at which a curve of margins is positive: the largest, or the largest of a few given ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import TimeLimitError

PRECISION = 1e-3  # of a radius, relative
STRIDE = 0.25
_STEPS = 100
_STEEP = 5.0  # a margin that is missed by more than e⁵ times itself says nothing of where it is met
_WIDER, _HALVINGS = 2.0, 5  # how much farther clipped boxes are tried, and how often

#: Lower bounds (b) of the smallest margin over all points within eps (b).
Curve = Callable[[Float64[Tensor, " b"]], Float64[Tensor, " b"]]


@final
@dataclass(frozen=True)
class Reached:
    """Where a search ended.

    Attributes:
        radius: (b) the largest at which the margin was positive; 0 where there was none.
        margin: (b) the margin there.
        cut: whether the deadline ended it.
    """

    radius: Float64[Tensor, " b"]
    margin: Float64[Tensor, " b"]
    cut: bool = False


def largest(
    curve: Curve, lead: Tensor, begin: Tensor, least: Tensor, most: Tensor, stride: float, precision: float = PRECISION
) -> Reached:
    """The largest radii with a positive margin.

    Strides from `begin`, then interpolation of what is lost of the `lead` as a power of the radius, and every third
    time the middle. Every input goes its own way, whatever else is in the batch: not at all from 0, not below `least`,
    and not above `most`.
    """
    eps, searching = begin, begin > 0
    low, high = torch.zeros_like(eps), torch.full_like(eps, torch.inf)
    above, below = lead, torch.full_like(eps, -torch.inf)  # the margins there
    for step in range(_STEPS):
        try:
            margin = curve(eps)
        except TimeLimitError:
            return Reached(low, above, cut=True)
        holds, fails = searching & (margin > 0), searching & ~(margin > 0)
        low, above = torch.where(holds, eps, low), torch.where(holds, margin, above)
        high, below = torch.where(fails, eps, high), torch.where(fails, margin, below)
        apart = torch.minimum(high, most) > low * (1 + precision)
        searching = searching & apart & (high > least)
        if not bool(searching.any()):
            break
        little, much = ((1 - end / lead).clamp(min=1e-6).log() for end in (above, below))
        share = -little / (much - little)
        # On the far side of the root, as seen from the nearer end: then both ends come close to it.
        share = share + torch.where(share < 0.5, 1, -1) * (precision / 3) / torch.log(high / low)
        middle = torch.where((much < _STEEP) & (share < 1) & (step % 3 < 2), share, 0.5)
        between = torch.where(low > 0, low * (high / low) ** middle, high * stride)
        eps = torch.where(searching, torch.where(torch.isinf(high), low * 2, between), eps)
        stride = max(stride**4, STRIDE)
    return Reached(low, above)


def widened(curve: Curve, reached: Reached, most: float) -> Reached:
    """Larger radii, from some at which another curve that is never above this one was positive: by halving."""
    low, above = reached.radius, reached.margin
    high = (_WIDER * low).clamp(max=most)
    for _ in range(_HALVINGS):
        eps = (low * high).sqrt()
        try:
            margin = curve(eps)
        except TimeLimitError:
            return Reached(low, above, cut=True)
        holds = (low > 0) & (margin > 0)
        low, above = torch.where(holds, eps, low), torch.where(holds, margin, above)
        high = torch.where(holds, high, eps)
    return Reached(low, above, reached.cut)


def decided(curve: Curve, guess: Curve | None, lead: Tensor, at: Sequence[float], known: Tensor) -> Reached:
    """The largest of the radii `at` with a positive margin, among those above the known ones.

    Args:
        curve: the margins.
        guess: a cheaper curve that is hardly ever below; where it is not positive, nothing is tried.
        lead: (b) the margins at radius 0; nothing is tried where they are not positive.
        at: the radii.
        known: (b) radii up to which nothing needs to be decided.
    """
    radius, margin = torch.zeros_like(lead), lead
    for r in sorted(at, reverse=True):
        open_ = (radius == 0) & (lead > 0) & (r > known)
        eps = torch.full_like(lead, r)
        try:
            if guess is not None and bool(open_.any()):
                open_ = open_ & (guess(eps) > 0)
            if not bool(open_.any()):
                continue
            margins = curve(eps)
        except TimeLimitError:
            return Reached(radius, margin, cut=True)
        holds = open_ & (margins > 0)
        radius, margin = torch.where(holds, eps, radius), torch.where(holds, margins, margin)
    return Reached(radius, margin)
