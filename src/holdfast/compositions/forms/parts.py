"""Boxes in parts: where one centre fails, both halves of the box may hold.

Margins that are positive on every part are positive on the box. A part is halved along its main coordinate.
In many dimensions a half is hardly smaller than the whole, and no number of halves helps: the search ends as soon as
what the last halving gained does not promise a proof in the time that is left.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.margins import Margins
from holdfast.compositions.forms.settled import Lower
from holdfast.errors import InputError
from holdfast.linalg.rounding import up
from holdfast.network.network import Network


def margins_over_box(network: Network, lower: Float64[Tensor, "n d"], upper: Float64[Tensor, "n d"]) -> Lower:
    """Lower bounds of all margins over the box between `lower` and `upper`, expanded around its middle.

    Args:
        network: the classifier.
        lower: (n, d) lower ends of the input's coordinates.
        upper: (n, d) upper ends; equal to the lower ones for a coordinate that is fixed.
    """
    return _over_box(network, lower, upper).at(1.0)


def _over_box(network: Network, lower: Float64[Tensor, "n d"], upper: Float64[Tensor, "n d"]) -> Margins:
    """The margins around the middle of a box, which has the scale 1."""
    if lower.shape != upper.shape or lower.ndim != 2 or not bool((lower <= upper).all()):
        raise InputError(
            f"lower has shape {tuple(lower.shape)} and upper {tuple(upper.shape)}; expected (n, d) with lower <= upper"
        )
    low, high = lower.double(), upper.double()
    middle = (low + high) / 2
    half = torch.maximum(high - middle, middle - low)
    return Margins(network, middle, shape=torch.where(half > 0, up(half), half))


@final
@dataclass(frozen=True)
class _SplitPart:
    """A box that may have to be halved, and its margins."""

    low: Tensor
    high: Tensor
    lower: Lower
    along: int  # the coordinate that counts most, of n·d

    @property
    def proved(self) -> bool:
        return self.lower.least > 0

    def __lt__(self, other: _SplitPart) -> bool:
        return self.lower.least < other.lower.least

    @classmethod
    def of(cls, network: Network, low: Tensor, high: Tensor) -> _SplitPart:
        forms = _over_box(network, low, high)
        sides = forms.region.sides
        assert sides is not None
        return cls(low, high, forms.at(1.0), int(torch.where((high > low).flatten(), sides, 0.0).argmax()))

    def halves(self, network: Network) -> list[_SplitPart]:
        """Both halves; they share a face, so that nothing between them is lost."""
        high, low = self.high.clone(), self.low.clone()
        middle = (low + high).flatten()[self.along] / 2
        high.view(-1)[self.along] = low.view(-1)[self.along] = middle
        return [_SplitPart.of(network, self.low, high), _SplitPart.of(network, low, self.high)]


def margins_over_parts(
    network: Network,
    lower: Float64[Tensor, "n d"],
    upper: Float64[Tensor, "n d"],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Lower:
    """Lower bounds of all margins over a box, by parts of it where they are not positive on the whole.

    Args:
        network: the classifier.
        lower: (n, d) lower ends of the input's coordinates.
        upper: (n, d) upper ends.
        seconds: no part is begun that is unlikely to finish within them.
        clock: tells the time, in seconds.

    Returns:
        The least bounds of all parts, and how many there are. Where a part's centre has another prediction, nothing
        is proved: the margins of the first are then at most 0 there.
    """
    began = clock()
    parts = [_SplitPart.of(network, lower.double(), upper.double())]
    whole, per_part = parts[0].lower, clock() - began
    while not (worst := parts[0]).proved and bool((worst.high > worst.low).any()):
        left = seconds - (clock() - began)
        if 2 * per_part > left:
            break
        halves = worst.halves(network)
        heapq.heappop(parts)
        for half in halves:
            heapq.heappush(parts, half)
        if any(half.lower.margins.argmax() != whole.margins.argmax() for half in halves):
            return replace(whole, least=-math.inf, margins=torch.full_like(whole.margins, -math.inf), parts=len(parts))
        per_part = (clock() - began) / (2 * len(parts) - 1)
        # Where nothing at all is known of a part, this is not a number, and forbids nothing.
        gain = min(half.lower.least for half in halves) - worst.lower.least
        if (
            gain <= 0
            or per_part * sum(2.0 ** min(-part.lower.least / gain, 1e3) for part in parts if not part.proved) > left
        ):
            break
    margins = torch.stack([part.lower.margins for part in parts]).amin(0)
    return replace(parts[0].lower, margins=margins, parts=sum(part.lower.parts for part in parts))
