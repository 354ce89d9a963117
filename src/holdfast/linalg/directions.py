"""Symmetric tensors over the p directions of an input; those of second order are stored once for every pair."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor


@final
class Directions:
    """The directions of an input with p coordinates, and their unordered pairs.

    Args:
        p: how many.
        device: where indices live.

    Attributes:
        first, second: (pairs) the two directions of each pair.
    """

    def __init__(self, p: int, device: torch.device) -> None:
        self.p, self._device = p, device
        self.first, self.second = torch.triu_indices(p, p, device=device).unbind(0)

    @cached_property
    def place(self) -> Int64[Tensor, "p p"]:
        """Where a pair is stored, in either order."""
        place = torch.empty(self.p, self.p, dtype=torch.long, device=self._device)
        numbers = torch.arange(len(self.first), device=self._device)
        place[self.first, self.second] = numbers
        place[self.second, self.first] = numbers
        return place

    @cached_property
    def count(self) -> Float64[Tensor, " pairs"]:
        """How many ordered pairs each stands for."""
        return 2.0 - (self.first == self.second).double()

    def full(self, pairs: Tensor) -> Tensor:
        """Pairs (pairs, …) as symmetric matrices (p, p, …)."""
        return pairs[self.place]

    def symmetric(self, Z: Float64[Tensor, "*b p pairs"]) -> Float64[Tensor, "*b p p p"]:
        """T_qrs = Z[q, rs] + Z[r, qs] + Z[s, qr]."""
        full = Z[..., self.place]
        return full + full.movedim(-3, -2) + full.movedim(-3, -1)
