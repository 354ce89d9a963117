"""Tokens of a grid beside their neighbours, in shares that are trained."""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import InputError
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.tokens.selection import WeightedSelection


@final
class Surroundings(Layer):
    """Every token beside its eight neighbours on the grid: (b, n, d) to (b, n, 9 d); zeros lie beyond the edge.

    Each channel has nine weights of its own, whose squares, its *shares*, sum to one: the gain is 1 for any shares.
    With equal ones it is `Neighbourhoods`, but for the edge, and a kernel of gain 1 behind it hands on only what all
    neighbours have in common. With a large share of the token itself it can hand on nearly everything.

    Args:
        grid: rows and columns of the tokens.
        width: d.
        own: the share of the token itself at the start.
    """

    count: ClassVar[int] = 9

    def __init__(self, grid: tuple[int, int], width: int, own: float = 0.75) -> None:
        super().__init__()
        if not 0 < own < 1:
            raise InputError(f"own is {own}; expected a share above 0 and below 1")
        self.grid, self.width = grid, width
        shares = torch.zeros(self.count, width)
        shares[self.count // 2] = math.log((self.count - 1) * own / (1 - own))
        self.shares = nn.Parameter(shares)  # before softmax

    @property
    def gain(self) -> float:
        return 1.0

    @property
    def weights(self) -> Float[Tensor, "9 d"]:
        """Of the neighbours in the order of a kernel's entries, row by row; the token itself is the fifth."""
        return (self.shares.log_softmax(0) / 2).exp()  # a root of softmax has no slope where it underflows

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, row by row of the grid."""
        weights = self.weights.to(x.dtype)
        return torch.cat([part * weights[i] for i, part in enumerate(self._parts(x))], -1).flatten(1, 2)

    def steepness(self) -> Steepness:
        return Steepness(self.gain, 0.0)

    def pieces(self) -> tuple[Piece, ...]:
        shape = (math.prod(self.grid), self.width)
        numbers = torch.arange(1, math.prod(shape) + 1).reshape(1, *shape)
        index = torch.cat(self._parts(numbers), -1).flatten(1, 2)[0] - 1  # -1 beyond the edge
        return (WeightedSelection(index, self.weights.flatten().expand(index.shape), shape),)

    def _parts(self, x: Tensor) -> list[Tensor]:
        rows, columns = self.grid
        square = functional.pad(x.reshape(-1, rows, columns, self.width), (0, 0, 1, 1, 1, 1))
        return [square[:, down : down + rows, right : right + columns] for down in range(3) for right in range(3)]
