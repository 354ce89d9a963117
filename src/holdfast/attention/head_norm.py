"""Normalised queries and keys (Qwen 3, Gemma 3, OLMo 2), and how raw queries and keys become those that meet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.rotary import Rotary
from holdfast.errors import InputError
from holdfast.linalg.rounding import Array, Ball, lift, up

Kind = Literal["rms", "layer"]

_SHARP = up(2 / math.sqrt(3.0), 2**-48)  # not below the exact value, also after one more rounding


@final
@dataclass(frozen=True, eq=False)
class HeadNorm:
    """w ∘ u / √(mean u² + eps) + bias of every query or key, "rms"; "layer" subtracts the mean of u first.

    Args:
        weight: (k), or (heads, k) for weights of each head; the heads of keys are the key-value heads.
        bias: like weight, or None.
        eps: what is added to the mean square.
        kind: "rms" or "layer".
        across: whether one norm is taken over all heads of a token together (OLMo 2), or one for each head.
        after_rotation: whether rotary positions turn first.
    """

    weight: Float[Tensor, "*h k"]
    bias: Float[Tensor, "*h k"] | None = None
    eps: float = 1e-6
    kind: Kind = "rms"
    across: bool = False
    after_rotation: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InputError(f'kind of a head norm is {self.kind!r}; expected "rms" or "layer"')
        if not isinstance(self.weight, Tensor) or self.weight.ndim not in (1, 2):
            raise InputError("weight of a head norm is not a tensor (k) or (heads, k)")
        if self.bias is not None and self.bias.shape != self.weight.shape:
            given, expected = tuple(self.bias.shape), tuple(self.weight.shape)
            raise InputError(f"bias of a head norm has shape {given}; expected that of its weight, {expected}")
        if not self.eps >= 0:
            raise InputError(f"eps of a head norm is {self.eps}; expected a number that is not negative")

    def to(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> HeadNorm:
        """The same with another dtype or on another device."""
        bias = None if self.bias is None else self.bias.to(device=device, dtype=dtype)
        return replace(self, weight=self.weight.to(device=device, dtype=dtype), bias=bias)

    def tensors(self) -> dict[str, Tensor]:
        """Everything as tensors, for a file."""
        tensors = {"weight": self.weight.clone(), "eps": torch.tensor(self.eps, dtype=torch.float64)}
        tensors |= {} if self.bias is None else {"bias": self.bias.clone()}
        flags = {"layer": self.kind == "layer", "across": self.across, "after_rotation": self.after_rotation}
        return tensors | {name: torch.tensor(flag) for name, flag in flags.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], source: str) -> HeadNorm:
        """The norm that `tensors` describes."""
        missing = [name for name in ("weight", "eps", "layer", "across", "after_rotation") if name not in tensors]
        if missing:
            raise InputError(f"{source}: no tensor named {', '.join(missing)}; a head norm needs them")
        flags = {name: bool(tensors[name]) for name in ("across", "after_rotation")}
        kind: Kind = "layer" if bool(tensors["layer"]) else "rms"
        return cls(tensors["weight"], tensors.get("bias"), float(tensors["eps"]), kind, **flags)

    def repeated(self, heads: int) -> HeadNorm:
        """With weights for this many heads, where they are given for each."""
        if self.weight.ndim == 1 or len(self.weight) == heads:
            return self
        times = heads // len(self.weight)
        bias = None if self.bias is None else self.bias.repeat_interleave(times, 0)
        return replace(self, weight=self.weight.repeat_interleave(times, 0), bias=bias)

    def mean(self, u: Array) -> Array:
        """The mean over what one norm is taken of, kept as dimensions of size 1: (…, h, n, k)."""
        dims = (-3, -1) if self.across else (-1,)
        count = u.shape[-1] * (u.shape[-3] if self.across else 1)
        return u.sum(dims, keepdim=True) / float(count)

    def centred(self, u: Array) -> Array:
        """What is normalised: u, or u minus its mean."""
        return u if self.kind == "rms" else u - self.mean(u)

    def steepest(self, u: Array, radius: Array) -> Array:
        """(…, h or 1, n) a bound of the norm of the derivative at all points within `radius` of u (…, h, n, k).

        D = diag(w)(1 - zzᵀ/(kσ²))Π/σ with z = Πu, σ² = |z|²/k + eps, so that ‖D‖ <= max |w| / σ, and |z| falls by at
        most the radius. (Π takes the mean off for "layer", and is 1 for "rms".)
        """
        return lift(self._largest, u) / self._least_sigma2(u, radius).sqrt()

    def sharpest(self, u: Array, radius: Array) -> Array:
        """(…, h or 1, n) the same of the second derivative, (2/√3) max |w| / (√k σ²): docs/math/scores.md, Lemma 1."""
        count = u.shape[-1] * (u.shape[-3] if self.across else 1)
        return lift(self._largest, u) * (_SHARP / math.sqrt(count)) / self._least_sigma2(u, radius)

    def _least_sigma2(self, u: Array, radius: Array) -> Array:
        """(…, h or 1, n) what σ² is not below within `radius` of u."""
        dims = (-3, -1) if self.across else (-1,)
        count = u.shape[-1] * (u.shape[-3] if self.across else 1)
        length = self.centred(u).square().sum(dims, keepdim=True).squeeze(-1).sqrt()
        return (length - radius).clamp(min=0.0).square() / float(count) + self.eps

    @property
    def _largest(self) -> Tensor:
        """Max |w|, of each head where each has its own norm."""
        largest = self.weight.abs().amax(-1)
        return largest.amax() if self.across or largest.ndim == 0 else largest.unsqueeze(-1)


@final
class Placed(Generic[Array]):
    """Raw queries or keys as they meet: normalised and turned by their positions.

    Args:
        raw: (…, h, n, k) x W + b.
        norm: or None.
        rotary: or None.
    """

    def __init__(self, raw: Array, norm: HeadNorm | None, rotary: Rotary | None) -> None:
        self._norm = None if norm is None else norm.repeated(raw.shape[-3])
        self._rotary = rotary
        first = norm is not None and norm.after_rotation
        self._raw: Array = rotary.turn(raw) if first and rotary is not None else raw

    @cached_property
    def value(self) -> Array:
        if self._norm is None:
            return self._turned(self._raw)
        y = self._directions * self._weight
        if self._norm.bias is not None:
            y = y + lift(self._norm.bias.unsqueeze(-2), y)
        return y if self._norm.after_rotation else self._turned(y)

    def push(self, d: Array) -> Array:
        """How `value` moves when raw moves by d."""
        norm = self._norm
        if norm is None:
            return self._turned(d)
        moved = self._through(self._turned(d) if norm.after_rotation else d) * self._weight
        return moved if norm.after_rotation else self._turned(moved)

    def pull(self, d: Array) -> Array:
        """The transpose of `push`."""
        norm = self._norm
        if norm is None:
            return self._turned_back(d)
        pulled = self._through((d if norm.after_rotation else self._turned_back(d)) * self._weight)
        return self._turned_back(pulled) if norm.after_rotation else pulled

    def push2(self, a: Array, b: Array) -> Array:
        """The second derivative of `value` along movements a and b of raw."""
        norm = self._norm
        if norm is None:
            return self._turned(a + b) * 0.0
        first, second = (norm.centred(self._turned(d) if norm.after_rotation else d) / self._sigma for d in (a, b))
        unit = self._directions
        along, other = norm.mean(unit * first), norm.mean(unit * second)
        bent = unit * (along * other * 3.0 - norm.mean(first * second)) - first * other - second * along
        bent = bent * self._weight
        return bent if norm.after_rotation else self._turned(bent)

    def _through(self, d: Array) -> Array:
        """(Πd - z mean(z d)/σ²)/σ, a symmetric map."""
        assert self._norm is not None
        unit = self._directions
        d = self._norm.centred(d)
        return (d - unit * self._norm.mean(unit * d)) / self._sigma

    @cached_property
    def _sigma(self) -> Array:
        assert self._norm is not None
        return (self._norm.mean(self._norm.centred(self._raw).square()) + self._norm.eps).sqrt()

    @cached_property
    def _directions(self) -> Array:
        """What is normalised, in units of σ."""
        assert self._norm is not None
        return self._norm.centred(self._raw) / self._sigma

    @cached_property
    def _weight(self) -> Array:
        assert self._norm is not None
        weight = self._norm.weight
        return lift(weight if weight.ndim == 1 else weight.unsqueeze(-2), self._raw)

    def _turned(self, d: Array) -> Array:
        return d if self._rotary is None else self._rotary.turn(d)

    def _turned_back(self, d: Array) -> Array:
        return d if self._rotary is None else self._rotary.turn_back(d)


def with_column(scores: Array, column: Array) -> Array:
    """Scores (…, h, n, m) with one more key: column (h, 1, 1)."""
    shape = (*scores.shape[:-1], 1)
    if isinstance(scores, Ball):
        extra = column.expand(*shape)
        return Ball(torch.cat([scores.mid, extra.mid], -1), torch.cat([scores.rad, extra.rad], -1))
    return torch.cat([scores, column.expand(*shape)], -1)
