"""Layers that add to all tokens or join them."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn

from holdfast.network import pooling
from holdfast.network.base import Piece
from holdfast.network.embedding import AddPositions
from holdfast.nn.layer import Layer


@final
class PositionCodes(Layer):
    """A learned vector added to every token, by its place."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(0.02 * torch.randn(tokens, width))

    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        return x + self.codes

    def pieces(self) -> tuple[Piece, ...]:
        return (AddPositions(self.codes),)


@final
class MeanPool(Layer):
    """The mean of the tokens: (b, n, d) to (b, 1, d).

    Args:
        tokens: n.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    @property
    def gain(self) -> float:
        return 1 / math.sqrt(self.tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        return x.mean(1, keepdim=True)

    def pieces(self) -> tuple[Piece, ...]:
        return (pooling.MeanPool(self.tokens),)
