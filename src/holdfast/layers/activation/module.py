"""Activations of gain 1."""

from __future__ import annotations

import math
from typing import Literal, final, get_args

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.errors import InputError, UnknownNameError
from holdfast.layers.activation import functions as known
from holdfast.layers.activation.base import Activation, SmoothActivation
from holdfast.layers.activation.piece import KinkedEntries, SmoothAbs, SmoothEntries
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness

#: Functions of one variable; softplus is centred, smooth-abs is 2/s · log cosh(s t/2).
EntryKind = Literal["relu", "abs", "softplus", "smooth-abs", "tanh"]


@final
class Entrywise(Layer):
    """A function of every entry, or of those in the first half of the channels.

    Args:
        width: d.
        kind: which function.
        on_half: whether the second half of the channels passes as it is.
        sharpness: s of softplus and smooth-abs; their curvature is s/4 and s/2.

    Example:
        >>> Entrywise(2, "abs", on_half=True)(torch.tensor([[-1.0, -2.0]]))
        tensor([[ 1., -2.]])
    """

    def __init__(self, width: int, kind: EntryKind, *, on_half: bool = False, sharpness: float = 4.0) -> None:
        super().__init__()
        if kind not in get_args(EntryKind):
            raise UnknownNameError("activation", kind, get_args(EntryKind))
        if not (math.isfinite(sharpness) and sharpness > 0):
            raise InputError(f"sharpness is {sharpness}; expected a positive number")
        if on_half and width % 2:
            raise InputError(f"the width {width} is odd; an activation on half of the channels needs an even one")
        self.width, self.kind, self.on_half, self.sharpness = width, kind, on_half, sharpness

    @property
    def gain(self) -> float:
        return 1.0

    @property
    def curvature(self) -> float:
        """The largest |φ''|; infinite at a kink."""
        bends = {"softplus": self.sharpness / 4, "smooth-abs": self.sharpness / 2, "tanh": 4 / math.sqrt(27)}
        return bends.get(self.kind, math.inf)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        if not self.on_half:
            return self._entries(x)
        first, second = x.chunk(2, -1)
        return torch.cat([self._entries(first), second], -1)

    def function(self) -> Activation:
        """The same function for certificates."""
        if self.kind == "softplus":
            return known.Softplus(self.sharpness, centred=True)
        return SmoothAbs(self.sharpness) if self.kind == "smooth-abs" else known.activations[self.kind]

    def steepness(self) -> Steepness:
        return Steepness(self.gain, self.curvature)

    def pieces(self) -> tuple[Piece, ...]:
        active = torch.arange(self.width) < (self.width // 2 if self.on_half else self.width)
        phi = self.function()
        return (SmoothEntries(phi, active) if isinstance(phi, SmoothActivation) else KinkedEntries(phi, active),)

    def _entries(self, x: Tensor) -> Tensor:
        if self.kind == "relu":
            return x.relu()
        if self.kind == "abs":
            return x.abs()
        if self.kind == "tanh":
            return x.tanh()
        s = self.sharpness
        softplus = functional.softplus(x, beta=s, threshold=50.0) - math.log(2) / s
        return softplus if self.kind == "softplus" else 2 * softplus - x
