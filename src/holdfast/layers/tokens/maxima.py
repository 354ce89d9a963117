"""The largest entries of windows: max-pooling, and maxima along an axis."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Int64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.rows import Rows, distinct, entries_among
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import up

_APART = up(math.sqrt(2), 1e-12)  # how much two entries may come closer to each other, over the radius


@final
class WindowMax(Piece):
    """The largest entry of every window, (…, n, d) to (…, m, c); windows may overlap.

    On a ball of radius ρ the largest entry of a window is one that is at most √2 ρ below it at the centre, and moves by
    no more than these do. An entry that is so near in k windows at most gives the reach √k ρ (docs/math/pieces.md, 5).

    Args:
        index: (m, c, w) the entries of each window, in the flattened input; -1 where a window has fewer than w.
        shape: (n, d) of the input.
    """

    pools = True

    def __init__(self, index: Int64[Tensor, "m c w"], shape: tuple[int, int]) -> None:
        if index.ndim != 3 or index.shape[-1] < 2 or int(index.min()) < -1 or int(index.max()) >= math.prod(shape):
            raise InputError(f"an index of shape {tuple(index.shape)} does not choose windows of entries of {shape}")
        if bool((index.amax(-1) < 0).any()):
            raise InputError("a window has no entries; expected one at least")
        self.index, self.shape = index, shape

    def rows_behind(self, rows: Rows, n: int) -> Rows:
        entries = self.index[rows].flatten()
        return distinct(entries[entries >= 0] // self.shape[1])

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        d = self.shape[1]
        return (WindowMax(entries_among(self.index[needed], rows, d), (len(rows), d)),)

    @property
    def filled(self) -> Int64[Tensor, "m c w"]:
        """The index with an entry of the window once more where there are fewer: that changes no maximum."""
        return torch.where(self.index < 0, self.index.amax(-1, keepdim=True), self.index)

    @property
    def times(self) -> int:
        """In how many windows an entry is, at most."""
        return int(torch.bincount(self.index[self.index >= 0]).max())

    def value(self, u: Array) -> Array:
        if tuple(u.shape[-2:]) != self.shape:
            raise InputError(f"the input has tokens of shape {tuple(u.shape[-2:])}; these windows are of {self.shape}")
        return u.flatten(-2, -1)[..., self.filled.to(u.device)].amax(-1)

    def held_numbers(self, u: Tensor) -> int:
        return max(u.numel(), self.index.numel())

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        if self.times == 1:
            return rho
        index, radius = self.index.to(u.device), a.number(rho)
        below = u.flatten(-2, -1)[..., self.filled.to(u.device)]
        below = (below.amax(-1, keepdim=True) - below).flatten(-3, -1).unsqueeze(-2)
        near = ~(below > (radius * _APART).unsqueeze(-1)) & (index >= 0).flatten()
        count = torch.zeros(*near.shape[:-1], math.prod(self.shape), dtype=torch.float64, device=u.device)
        count.scatter_add_(-1, index.clamp(min=0).flatten().expand(near.shape), near.double())
        return rho * a.lift(count.amax(-1)).sqrt()
