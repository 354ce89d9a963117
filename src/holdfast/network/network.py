"""A classifier as a chain of pieces and residual branches, ending in a linear head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.piece import Piece
from holdfast.linalg import Array
from holdfast.linalg.ball_map import BallMap
from holdfast.linalg.rounding import lift


@final
@dataclass(frozen=True)
class Residual:
    """u ↦ u + f(u), with f a chain of pieces: the blocks of a pre-norm transformer."""

    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not self.pieces:
            raise InputError("a residual branch has no pieces; expected at least one")


@final
@dataclass(frozen=True)
class Head:
    """Logits w z + b of the features z (…, 1, d); a margin is the difference of two of them."""

    weight: Float64[Tensor, "classes d"]
    bias: Float64[Tensor, " classes"]

    def logits(self, z: Array) -> Array:
        """(…, 1, d) to (…, classes)."""
        return (z @ lift(self.weight.mT, z) + lift(self.bias, z)).squeeze(-2)


@final
class Network(BallMap):
    """A classifier f = head ∘ f_K ∘ … ∘ f_1 on inputs (…, n, d).

    Args:
        stages: pieces, and residual branches of pieces, in order.
        head: the linear map at the end.
        name: what messages call the network.
    """

    def __init__(self, stages: Sequence[Piece | Residual], head: Head, name: str = "network") -> None:
        self.stages = tuple(stages)
        self.head = head
        self.name = name

    def __repr__(self) -> str:
        stages = "".join(f"\n  {_described(stage)}" for stage in self.stages)
        return f"Network({self.name!r}, {len(self.head.bias)} classes):{stages}"

    def __call__(self, x: Array) -> Array:
        """The logits (…, classes)."""
        for stage in self.stages:
            x = run(stage, x)
        return self.head.logits(x)

    def pieces(self) -> Iterator[Piece]:
        """Every piece, in the order of computation."""
        for stage in self.stages:
            yield from stage.pieces if isinstance(stage, Residual) else (stage,)

    def check_classes(self) -> None:
        """Refuses a head in which no class can take the place of another."""
        if (classes := len(self.head.bias)) < 2:
            raise InputError(f"{self.name} has {classes} class; expected two or more, one of which leads")

    def after(self, stages: int) -> Network:
        """The rest of the network once the first `stages` stages are done: for perturbations of a layer's input."""
        return Network(self.stages[stages:], self.head, self.name)

    def before(self, first: Piece) -> Network:
        """The network with one more piece in front: for perturbations that act through it, such as one token's."""
        return Network((first, *self.stages), self.head, self.name)


def _described(stage: Piece | Residual) -> str:
    """The pieces of a stage, by the names of their classes."""
    if isinstance(stage, Piece):
        return type(stage).__name__
    return "x + " + " → ".join(type(piece).__name__ for piece in stage.pieces)


def run(stage: Piece | Residual, u: Array) -> Array:
    """The output of one stage."""
    if isinstance(stage, Piece):
        return stage.value(u)
    v = u
    for piece in stage.pieces:
        v = piece.value(v)
    return u + v
