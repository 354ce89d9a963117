"""Bounds of the parts of a quantity by degree, and of all that is left.

A quantity x(G) that depends on a perturbation G is x = x_1 + x_2 + x_3 + x_R with x_k "of degree k": homogeneous
polynomials for k = 1, 2, and for k = 3 whatever the expansion leaves out. Sums and products of quantities are bounded
by sums and products of such bounds: what a product has of degree above 3 goes to its rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

DEGREES = 3


@final
@dataclass(frozen=True)
class Graded:
    """Bounds of the parts of degree 1, 2, 3 of a quantity, or of many of them, and of the rest; none is negative."""

    parts: tuple[Tensor, ...]
    rest: Tensor

    @classmethod
    def of(cls, *parts: Tensor) -> Graded:
        """A quantity without a rest; parts that are not given are zero."""
        zero = torch.zeros_like(parts[0])
        return cls((*parts, *(zero for _ in range(DEGREES - len(parts)))), zero)

    @property
    def total(self) -> Tensor:
        """A bound of the quantity."""
        out = self.rest
        for part in self.parts:
            out = out + part
        return out

    def __add__(self, other: Graded) -> Graded:
        parts = tuple(x + y for x, y in zip(self.parts, other.parts, strict=True))
        return Graded(parts, self.rest + other.rest)

    def __mul__(self, other: Graded) -> Graded:
        zero = torch.zeros_like(self.parts[0] * other.parts[0])
        parts: list[Tensor] = [zero] * DEGREES
        rest = self.total * other.rest
        for y in other.parts:
            rest = rest + self.rest * y
        for i, x in enumerate(self.parts, 1):
            for j, y in enumerate(other.parts, 1):
                if i + j <= DEGREES:
                    parts[i + j - 1] = parts[i + j - 1] + x * y
                else:
                    rest = rest + x * y
        return Graded(tuple(parts), rest)

    def times(self, factor: Tensor | float) -> Graded:
        """The quantity times a constant."""
        return self.each(lambda x: x * factor)

    def each(self, change: Callable[[Tensor], Tensor]) -> Graded:
        """The image under a map that is subadditive, such as a sum, a maximum or a norm."""
        return Graded(tuple(change(x) for x in self.parts), change(self.rest))

    def all_rest(self) -> Graded:
        """The whole quantity as a rest: for the tail of a series."""
        return Graded(tuple(torch.zeros_like(x) for x in self.parts), self.total)


def smaller(x: Graded, y: Graded) -> Graded:
    """Two bounds of one quantity, part by part."""
    parts = tuple(torch.minimum(a, b) for a, b in zip(x.parts, y.parts, strict=True))
    return Graded(parts, torch.minimum(x.rest, y.rest))
