"""Sorting in pairs, as an activation (Anil et al. 2019)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
class PairSort(Piece):
    """MaxMin for certificates: sorting moves no two points apart."""

    kind = "MaxMin"

    def value(self, u: Array) -> Array:
        if u.shape[-1] % 2:
            raise InputError(f"MaxMin got {u.shape[-1]} channels; expected an even number")
        channels = torch.arange(u.shape[-1], device=u.device)
        other, first = u[..., channels ^ 1], channels % 2 == 0
        return u.minimum(other).masked_fill(first, 0.0) - (-u).minimum(-other).masked_fill(~first, 0.0)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho


@final
class MaxMin(Layer):
    """Channels 2k and 2k + 1 become their maximum and their minimum."""

    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d), d even."""
        if x.shape[-1] % 2:
            raise InputError(f"tokens have width {x.shape[-1]}; channels in pairs need an even one")
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([torch.maximum(first, second), torch.minimum(first, second)], -1).flatten(-2)

    def pieces(self) -> tuple[Piece, ...]:
        return (PairSort(),)
