"""What is asked about a network: whether some input of a box has outputs in a polyhedron."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxtyping import Float64
from torch import Tensor


@final
@dataclass(frozen=True, eq=False)
class OutputCase:
    """A polyhedron of outputs y: those with A y <= c."""

    A: Float64[Tensor, "m outputs"]
    c: Float64[Tensor, " m"]

    def excess(self, y: Float64[Tensor, "*b outputs"]) -> Float64[Tensor, "*b m"]:
        """A y - c: the case holds where none of it is positive."""
        return y @ self.A.mT - self.c


@final
@dataclass(frozen=True, eq=False)
class Box:
    """Inputs between two corners, and the cases that apply there.

    Attributes:
        lower: the least value of every input.
        upper: the largest.
        cases: the property is violated where at least one of them holds.
    """

    lower: Float64[Tensor, " inputs"]
    upper: Float64[Tensor, " inputs"]
    cases: tuple[OutputCase, ...]


@final
@dataclass(frozen=True, eq=False)
class Specification:
    """A counter-example is an input x of some box whose outputs satisfy one of the box's cases.

    Attributes:
        inputs: how many numbers X_0, X_1, … the network takes.
        outputs: how many numbers Y_0, Y_1, … it returns.
        boxes: where counter-examples may lie.
    """

    inputs: int
    outputs: int
    boxes: tuple[Box, ...]
