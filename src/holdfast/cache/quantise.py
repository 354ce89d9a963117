"""Quantisers of a cache, each with a stated rounding rule and a proved bound of what it changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg.rounding import FLOOR, up

Per = Literal["channel", "token"]
_LARGEST_FP8 = 448.0  # of torch.float8_e4m3fn
_FLOAT32 = 2.0**-24  # what rounding to it may change, relatively
_SLACK = 2.0**-40  # more than the float64 rounding of a step and of a product with it
_LEAST = 2.0**-1000  # of steps and scales, so that these themselves are rounded without underflow


@final
@dataclass(frozen=True)
class Quantiser:
    """How keys or values (…, n, k) are stored.

    Integers of `bits` bits: x is stored as round((x - least) / step), half to even, step = (largest - least) / (2^bits
    - 1), and read as least + step · integer; least and largest are those of a channel (over all tokens) or of a token.
    So |read - x| <= step / 2. With bits None, fp8 (e4m3): x / s is rounded to float32, as torch does it, and then to
    the nearest such number, s the largest |x| / 448; so |read - x| <= max(|x| / 16, s / 1024) + 2⁻²⁴ |x|. Steps and s
    are at least 2⁻¹⁰⁰⁰.

    Args:
        bits: 1 to 16, or None for fp8.
        per: what shares a scale: "channel" or "token".
    """

    bits: int | None
    per: Per = "token"

    def __post_init__(self) -> None:
        if self.bits is not None and (not isinstance(self.bits, int) or not 1 <= self.bits <= 16):
            raise InputError(f"bits is {self.bits!r}; expected 1 to 16, or None for fp8")
        if self.per not in get_args(Per):
            raise InputError(f'per is {self.per!r}; expected "channel" or "token"')

    @property
    def name(self) -> str:
        """As `quantiser` reads it."""
        return f"{'fp8' if self.bits is None else f'int{self.bits}'}/{self.per}"

    def __call__(self, x: Float64[Tensor, "*b n k"]) -> Float64[Tensor, "*b n k"]:
        """What is read where x was stored."""
        if self.bits is None:
            scale = self._fp8_scale(x)
            return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
        least, step = self._grid(x)
        return least + step * ((x - least) / step).round()

    def error(self, x: Float64[Tensor, "*b n k"]) -> Float64[Tensor, "*b n k"]:
        """A bound of |read - x| for every entry, rounded up."""
        if self.bits is None:
            scale = self._fp8_scale(x)
            return up(torch.maximum(x.abs() / 16, scale / 1024) + x.abs() * _FLOAT32, _SLACK)
        least, step = self._grid(x)
        # The sum least + step · integer is rounded once more.
        return (up(step / 2, _SLACK) + (x.abs() + least.abs() + step) * 2.0**-50 + FLOOR).expand_as(x)

    def _grid(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.bits is not None
        dim = -2 if self.per == "channel" else -1
        least, largest = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        return least, ((largest - least) / (2**self.bits - 1)).clamp(min=_LEAST)

    def _fp8_scale(self, x: Tensor) -> Tensor:
        return (x.abs().amax(-2 if self.per == "channel" else -1, keepdim=True) / _LARGEST_FP8).clamp(min=_LEAST)


def quantiser(name: str, per: Per) -> Quantiser:
    """The quantiser called "int8", "int4", "int2", "fp8", …, with "/channel" or "/token" behind it or the default."""
    kind, _, shared = name.partition("/")
    given = shared or per
    if kind == "fp8":
        return Quantiser(None, given)  # type: ignore[arg-type]
    if kind.startswith("int") and kind[3:].isdigit():
        return Quantiser(int(kind[3:]), given)  # type: ignore[arg-type]
    raise InputError(
        f'{name!r} is not a quantiser; expected "int8", "int4", "int2" or "fp8", with "/channel" or "/token"'
    )
