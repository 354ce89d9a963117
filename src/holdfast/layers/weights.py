"""How pieces keep their weights: float64, checked once; float32 weights are float64 values exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg import Array, Ball
from holdfast.linalg.rounding import lift


def double(x: Tensor, what: str, *dims: int) -> Tensor:
    """The weights in float64, detached; refused unless finite and of one of the given numbers of dimensions."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim not in dims:
        shape = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"{what} is {shape}; expected a float tensor with {' or '.join(map(str, dims))} dimensions")
    if not bool(torch.isfinite(x).all()):
        raise InputError(f"{what} holds a value that is not finite; expected finite weights")
    return x.detach().double()


def weight(x: Tensor, like: Array) -> Array:
    """A piece's weights in the arithmetic of its input, which must be float64."""
    if not isinstance(like, Ball) and like.dtype != torch.float64:
        raise InputError(f"a piece got an input of {like.dtype}; expected float64: pass x.double()")
    return lift(x, like)


def number(x: float, like: Array) -> Array:
    """One number, taken as exact, in the arithmetic of `like`."""
    return lift(torch.tensor(x, dtype=torch.float64), like)
