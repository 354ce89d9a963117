"""Majorants of polynomials with a rest: how large each homogeneous part of a quantity can be, and all that is left.

A quantity x(G) that depends on a perturbation G, ‖G‖ <= eps, is x = x_1 + … + x_K + x_R with x_k homogeneous of degree k.
`Graded` holds numbers with |x_k| <= parts[k-1] and |x_R| <= rest on the whole ball. Sums and products of quantities are
bounded by sums and products of these: what a product has of degree above K goes to its rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Graded:
    """Bounds of the parts of degree 1 to K of a quantity, or of many of them, and of the rest; none is negative."""

    parts: tuple[Tensor, ...]
    rest: Tensor

    @property
    def total(self) -> Tensor:
        """A bound of the quantity."""
        return torch.stack([*self.parts, self.rest]).sum(0)

    def __add__(self, other: Graded) -> Graded:
        parts = tuple(x + y for x, y in zip(self.parts, other.parts, strict=True))
        return Graded(parts, self.rest + other.rest)

    def __mul__(self, other: Graded) -> Graded:
        K, zero = len(self.parts), torch.zeros_like(self.parts[0] * other.parts[0])
        parts, rest = [zero] * K, self.total * other.rest + self.rest * (other.total - other.rest)
        for i, x in enumerate(self.parts, 1):
            for j, y in enumerate(other.parts, 1):
                if i + j <= K:
                    parts[i + j - 1] = parts[i + j - 1] + x * y
                else:
                    rest = rest + x * y
        return Graded(tuple(parts), rest)

    def times(self, factor: Tensor | float) -> Graded:
        """The quantity times a constant."""
        return self.each(lambda x: x * factor)

    def each(self, linear: Callable[[Tensor], Tensor]) -> Graded:
        """The image under a map that is subadditive, such as a sum or a norm."""
        return Graded(tuple(linear(x) for x in self.parts), linear(self.rest))

    def plus_rest(self, rest: Tensor) -> Graded:
        """The quantity plus something of which nothing but a bound is known."""
        return Graded(self.parts, self.rest + rest)

    def raised(self, k: int) -> Graded:
        """The k-th power."""
        out = self
        for _ in range(k - 1):
            out = out * self
        return out


def series(x: Graded, coefficients: Sequence[float], tail: Tensor) -> Graded:
    """Σ_k c_k x^k from k = 2 on, as many terms as there are parts, and a bound of the tail beyond."""
    out = Graded(tuple(torch.zeros_like(x.rest) for _ in x.parts), tail)
    power = x
    for c in coefficients[: len(x.parts) - 1]:
        power = power * x
        out = out + power.times(c)
    return out
