"""The normalisation of an image's channels, so that perturbations are in units of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from holdfast.errors import InputError
from holdfast.layers.piece import LinearPiece
from holdfast.layers.weights import weight
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
class Normalise(LinearPiece):
    """(x_c - mean_c)/std_c for every channel c of an image (…, channels, pixels); its norm is 1/min std.

    Args:
        mean: one number for each channel.
        std: one positive number for each channel.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = (torch.tensor(list(v), dtype=torch.float64).unsqueeze(-1) for v in (mean, std))
        if self.mean.shape != self.std.shape or not bool((self.std > 0).all()) or not bool(self.mean.isfinite().all()):
            raise InputError(
                f"mean {list(mean)} and std {list(std)}: expected one number and one positive number per channel"
            )

    def value(self, u: Array) -> Array:
        return (u - weight(self.mean, u)) / weight(self.std, u)

    def push(self, u: Array, a: Array) -> Array:
        return a / weight(self.std, u)

    def pull(self, u: Array, c: Array) -> Array:
        return c / weight(self.std, u)

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(self.std.new_ones(())) / a.lift(self.std.amin())
