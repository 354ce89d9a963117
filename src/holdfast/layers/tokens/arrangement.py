"""Layers that rearrange entries, or repeat all of them equally often: isometries."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from holdfast.errors import InputError
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.tokens.selection import Rearrangement

#: The steps of a 3 × 3 convolution: rows down, columns right.
_RING = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))


class Arrangement(Layer):
    """Every entry in `root`² places, divided by `root`: a kind writes `arrange` and the shape that it takes."""

    root: ClassVar[int] = 1

    @property
    @final
    def gain(self) -> float:
        return 1.0

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of one input."""

    @abstractmethod
    def arrange(self, x: Tensor) -> Tensor:
        """The entries in their new places."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d), or what the kind takes."""
        return self.arrange(x if self.root == 1 else x / self.root)

    def steepness(self) -> Steepness:
        return Steepness(self.gain, 0.0)

    @final
    def pieces(self) -> tuple[Piece, ...]:
        # Sent through the module itself, the numbers of the entries say where each of them goes.
        rows = self.shape[0]
        numbers = torch.arange(math.prod(self.shape)).reshape(1, *self.shape)
        return (Rearrangement(self.arrange(numbers)[0], (rows, numbers.numel() // rows), self.root),)


@final
class Patches(Arrangement):
    """An image (b, channels, side, side) cut into square patches: tokens (b, n, channels · patch²).

    Example:
        >>> Patches(3, 32, 4)(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 64, 48])
    """

    def __init__(self, channels: int, side: int, patch: int) -> None:
        super().__init__()
        if patch < 1 or side % patch:
            raise InputError(f"patches of side {patch} do not fit an image of side {side}; expected a divisor of it")
        self.channels, self.side, self.patch = channels, side, patch

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels, self.side, self.side)

    @property
    def width(self) -> int:
        """Of a token."""
        return self.channels * self.patch**2

    def arrange(self, images: Tensor) -> Tensor:
        """Images of one channel may come as (b, side, side)."""
        if images.numel() != len(images) * math.prod(self.shape):
            raise InputError(
                f"images have shape {tuple(images.shape)}; expected (b, {', '.join(map(str, self.shape))})"
            )
        p, across = self.patch, self.side // self.patch
        split = images.reshape(-1, self.channels, across, p, across, p).permute(0, 2, 4, 1, 3, 5)
        return split.reshape(-1, across * across, self.width)


@final
class MergedTokens(Arrangement):
    """Squares of neighbouring tokens side by side: (b, n, d) on a grid to (b, n/factor², d · factor²)."""

    def __init__(self, grid: tuple[int, int], width: int, factor: int) -> None:
        super().__init__()
        if factor < 1 or grid[0] % factor or grid[1] % factor:
            raise InputError(f"squares of {factor} tokens do not fit a grid of {grid[0]} x {grid[1]}")
        self.grid, self.width, self.factor = grid, width, factor

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.grid), self.width)

    def arrange(self, x: Tensor) -> Tensor:
        """Tokens, row by row of the grid."""
        f, (rows, columns) = self.factor, self.grid
        split = x.reshape(-1, rows // f, f, columns // f, f, self.width).permute(0, 1, 3, 2, 4, 5)
        return split.reshape(-1, (rows // f) * (columns // f), f * f * self.width)


class _AroundGrid(Arrangement):
    """Moves over a grid of tokens, around its edges."""

    def __init__(self, grid: tuple[int, int], width: int) -> None:
        super().__init__()
        self.grid, self.width = grid, width

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.grid), self.width)


@final
class Shifts(_AroundGrid):
    """Nine groups of channels, each moved by one step over the grid, around its edges; one group stays.

    Followed by an orthogonal map of the channels it is an orthogonal 3 × 3 convolution.
    """

    def arrange(self, x: Tensor) -> Tensor:
        """Tokens, row by row of the grid."""
        groups = x.reshape(-1, *self.grid, self.width).tensor_split(len(_RING), -1)
        moved = [group.roll(step, (1, 2)) for group, step in zip(groups, _RING, strict=True)]
        return torch.cat(moved, -1).flatten(1, 2)


@final
class Neighbourhoods(_AroundGrid):
    """Every token beside its eight neighbours on the grid, around its edges: (b, n, d) to (b, n, 9 d), divided by 3.

    Followed by a map of 9 d channels it is a 3 × 3 convolution, and its gain is that of the map. It can do more than
    `Shifts`, and keeps less: a map from 9 d channels to d loses part of its input.
    """

    root = 3
    count: ClassVar[int] = root**2

    def arrange(self, x: Tensor) -> Tensor:
        """Tokens, row by row of the grid."""
        square = x.reshape(-1, *self.grid, self.width)
        return torch.cat([square.roll(step, (1, 2)) for step in sorted(_RING, reverse=True)], -1).flatten(1, 2)


@final
class Flattened(Arrangement):
    """All tokens as one: (b, n, d) to (b, 1, n d)."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self._shape = (tokens, width)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def arrange(self, x: Tensor) -> Tensor:
        """Tokens."""
        return x.flatten(1).unsqueeze(1)


def shift_scores(grid: tuple[int, int], heads: int, sharpness: float, own: float = 0.0) -> Float[Tensor, "h n n"]:
    """Scores that let every token of a head attend to one neighbour on the grid, around its edges.

    They depend on the difference of two places alone, so that softmax gives doubly stochastic matrices: ‖P_l‖ = 1. The
    score of the neighbour is `sharpness`, that of the token itself `own`, all others are 0; where both are equal, the
    content decides between the two.
    """
    places = torch.arange(math.prod(grid)).reshape(grid)
    steps = sorted(
        (min(r, grid[0] - r) ** 2 + min(c, grid[1] - c) ** 2, r, c) for r in range(grid[0]) for c in range(grid[1])
    )
    neighbours = [places.roll((r, c), (0, 1)).flatten() for _, r, c in steps[:heads]]
    chosen = torch.stack([neighbours[head % len(neighbours)] for head in range(heads)])
    return sharpness * functional.one_hot(chosen, places.numel()).float() + own * torch.eye(places.numel())
