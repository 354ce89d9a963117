"""Convolutions over a grid of tokens."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.layers.linear.module import Linear, MapKind, manifold_parameters
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.tokens.arrangement import Neighbourhoods
from holdfast.layers.tokens.surroundings import Surroundings


@final
class Convolution(Layer):
    """A 3 × 3 convolution with a whole kernel: tokens beside their neighbours, and a map of limited norm.

    Certificates take it in these two pieces; it runs as one convolution, which spares the nine copies.

    Args:
        grid: rows and columns of the tokens.
        d_in: width of the input.
        d_out: width of the output.
        kind: how the map keeps its norm of 1.
        weighted: whether the neighbours come from `Surroundings`, and the kernel starts as the identity where it can,
            rather than from `Neighbourhoods`, around the edges of the grid.

    Example:
        >>> Convolution((16, 16), 12, 64)(torch.randn(2, 256, 12)).shape
        torch.Size([2, 256, 64])
    """

    def __init__(
        self,
        grid: tuple[int, int],
        d_in: int,
        d_out: int,
        *,
        kind: MapKind = "orthogonal",
        weighted: bool = False,
    ) -> None:
        super().__init__()
        self.around = Surroundings(grid, d_in) if weighted else Neighbourhoods(grid, d_in)
        self.map = Linear(self.around.count * d_in, d_out, kind=kind)
        if weighted and d_in == d_out:
            self._start_as_identity()

    @property
    def gain(self) -> float:
        return self.map.gain

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, row by row of the grid."""
        kernel = self.map.weight.reshape(-1, 3, 3, self.around.width)
        square = x.reshape(-1, *self.around.grid, self.around.width)
        if isinstance(self.around, Surroundings):
            kernel, beyond = kernel * self.around.weights.reshape(3, 3, -1), 1
        else:
            kernel, beyond = kernel / self.around.root, 0
            square = torch.cat([square[:, -1:], square, square[:, :1]], 1)
            square = torch.cat([square[:, :, -1:], square, square[:, :, :1]], 2)
        convolved = functional.conv2d(
            square.permute(0, 3, 1, 2), kernel.permute(0, 3, 1, 2), self.map.bias, padding=beyond
        )
        return convolved.permute(0, 2, 3, 1).flatten(1, 2)

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        for weight in manifold_parameters(self.map):
            nn.init.zeros_(weight)
            own = self.around.count // 2 * self.around.width
            weight[:, own : own + self.around.width].fill_diagonal_(1.0)

    def steepness(self) -> Steepness:
        return self.map.steepness()

    def pieces(self) -> tuple[Piece, ...]:
        return (*self.around.pieces(), *self.map.pieces())
