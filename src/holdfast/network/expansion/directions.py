"""Symmetric tensors over the p directions of an input, stored once for every unordered pair or triple."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor


@final
@dataclass(frozen=True)
class Triples:
    """The unordered triples {q, r, s} with one q and q <= r <= s.

    Attributes:
        q: the first direction.
        r, s: (m) the others.
        qr, qs, rs: (m) places of the pairs.
        count: (m) how many ordered triples each stands for.
    """

    q: int
    r: Int64[Tensor, " m"]
    s: Int64[Tensor, " m"]
    qr: Int64[Tensor, " m"]
    qs: Int64[Tensor, " m"]
    rs: Int64[Tensor, " m"]
    count: Float64[Tensor, " m"]


@final
class Directions:
    """The directions of an input with p coordinates, in pairs and triples.

    Args:
        p: how many.
        device: where indices live.
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
    def pair_count(self) -> Float64[Tensor, " pairs"]:
        """How many ordered pairs each stands for."""
        return 2.0 - (self.first == self.second).double()

    def full(self, pairs: Float64[Tensor, "pairs *rest"]) -> Float64[Tensor, "p p *rest"]:
        """The symmetric matrices."""
        return pairs[self.place]

    def triples(self, most: int) -> Iterator[Triples]:
        """All triples, at most so many at a time."""
        for q in range(self.p):
            keep = (self.first >= q).nonzero().squeeze(-1)
            for rs in torch.split(keep, most):
                r, s = self.first[rs], self.second[rs]
                equal = (r == q).double() + (r == s).double()  # q <= r <= s: none, one or both
                count = torch.where(equal == 2, 1.0, torch.where(equal == 1, 3.0, 6.0))
                yield Triples(q, r, s, self.place[q, r], self.place[q, s], rs, count)

    def cube(self, values: Float64[Tensor, "triples *rest"]) -> Float64[Tensor, "p p p *rest"]:
        """The full tensor from values in the order of `triples`."""
        out = values.new_empty(self.p, self.p, self.p, *values.shape[1:])
        begin = 0
        for t in self.triples(len(self.first)):
            part = values[begin : begin + len(t.r)]
            begin += len(t.r)
            for a, b, c in ((t.q, t.r, t.s), (t.q, t.s, t.r)):
                out[a, b, c] = part
                out[b, a, c] = part
                out[b, c, a] = part
        return out
