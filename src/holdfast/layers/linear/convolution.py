"""Convolutions over a grid of tokens."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.layers.linear.module import Linear, MapKind
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.tokens.arrangement import Neighbourhoods


@final
class Convolution(Layer):
    """A 3 × 3 convolution with a whole kernel, around the edges of a grid: `Neighbourhoods` and a map of limited norm.

    Certificates take it in these two pieces; it runs as one convolution, which spares the nine copies.

    Args:
        grid: rows and columns of the tokens.
        d_in: width of the input.
        d_out: width of the output.
        kind: how the map keeps its norm of 1.
        centred: see `Linear`.

    Example:
        >>> Convolution((16, 16), 12, 64)(torch.randn(2, 256, 12)).shape
        torch.Size([2, 256, 64])
    """

    def __init__(
        self, grid: tuple[int, int], d_in: int, d_out: int, *, kind: MapKind = "orthogonal", centred: bool = False
    ) -> None:
        super().__init__()
        self.around = Neighbourhoods(grid, d_in)
        self.map = Linear(self.around.count * d_in, d_out, kind=kind, centred=centred)

    @property
    def gain(self) -> float:
        return self.map.gain

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, row by row of the grid."""
        kernel = self.map.weight.reshape(-1, 3, 3, self.around.width).permute(0, 3, 1, 2) / self.around.root
        square = x.reshape(-1, *self.around.grid, self.around.width)
        square = torch.cat([square[:, -1:], square, square[:, :1]], 1)
        square = torch.cat([square[:, :, -1:], square, square[:, :, :1]], 2)
        bias = self.map.bias if self.map.centring is None else None
        convolved = functional.conv2d(square.permute(0, 3, 1, 2), kernel, bias)
        tokens = convolved.permute(0, 2, 3, 1).flatten(1, 2)
        return tokens if bias is not None else self.map.shifted(tokens)

    def steepness(self) -> Steepness:
        return self.map.steepness()

    def pieces(self) -> tuple[Piece, ...]:
        return (*self.around.pieces(), *self.map.pieces())
