"""Midpoint-radius arithmetic: tensors that carry a proved bound of their own rounding error.

A `Ball` is a float64 tensor `mid` with a tensor `rad` of the same shape; it stands for every real tensor Z with
|Z - mid| <= rad entry by entry. Each operation returns a ball that holds the exact result for all members of its
operands. The model is the usual one (Higham 2002, sections 2.2 and 3.1; Rump 1999 for products):

    fl(a ∘ b) = (a ∘ b)(1 + δ) + η,  |δ| <= u = 2⁻⁵³,  |η| <= 2⁻¹⁰²² (subnormals may be flushed),
    |fl(AB) - AB| <= γ_K |A||B|,     γ_K = K u / (1 - K u), for an inner product of length K in any order.

`exp`, `expm1`, `log`, `tanh` and `erf` are taken to be accurate to 4 units in the last place; the vendors state 1 or 2.
Radii are themselves computed in floating point from non-negative numbers, so a relative inflation pays for their
rounding.

The class has the method names of a tensor, so that one formula serves both: with tensors it is fast, with balls proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.device import waits
from holdfast.errors import HoldfastError, InputError

UNIT = 2.0**-53
FLOOR = 2.0**-1022
_EXP_ULPS = 8 * UNIT
_EXP_LEAST = -690.0  # exp of it is a normal number; below it, its value bounds the true one

Scalar = int | float
Number = TypeVar("Number", float, Tensor)


def gamma(k: int) -> float:
    """γ_k = k u / (1 - k u), rounded up."""
    return (k * UNIT) / (1.0 - k * UNIT) * (1.0 + 4 * UNIT)


def up(x: Number, by: float | None = None) -> Number:
    """The next number above `x`, which pays for one rounding to nearest; with `by`, x (1 + by) of a number x >= 0."""
    return _next(x, math.inf) if by is None else x * (1 + by)


def down(x: Number, by: float | None = None) -> Number:
    """The next number below `x`; with `by`, x (1 - by) of a number x >= 0."""
    return _next(x, -math.inf) if by is None else x * (1 - by)


def outward(x: Tensor, terms: int = 0) -> Tensor:
    """Pays for the rounding, and underflows, of sums of `terms` numbers >= 0 and of up to 2⁸ other operations."""
    return up(x, 2.0**-44 + 2 * terms * UNIT) + 2.0**-1000


def _next(x: Number, towards: float) -> Number:
    return torch.nextafter(x, torch.full_like(x, towards)) if isinstance(x, Tensor) else math.nextafter(x, towards)


ROOT2 = up(math.sqrt(2.0))  # not below the exact value


def power_of_two(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A power of two within a factor 2 of the largest magnitude over `dims` (kept): scaling by it is exact.

    Where that is zero or not finite, it is some power of two.
    """
    largest = torch.linalg.vector_norm(x, math.inf, dims, keepdim=True)
    most = 1020 if x.dtype == torch.float64 else 120  # its reciprocal must be representable too
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp_(-most, most))


def frobenius_upper(x: Tensor, dims: tuple[int, ...] = (-2, -1)) -> Tensor:
    """A proved upper bound of the Frobenius norm of the float64 tensor `x` over `dims`."""
    terms = math.prod(x.shape[dim] for dim in dims)
    if not waits(x.device):  # here the scaled copy costs more than to ask
        plain = torch.linalg.vector_norm(x, dim=dims)
        if bool(((plain > 1e-140) & (plain < 1e140)).all()):  # no square overflows, and none that counts underflows
            return _grow(plain, terms)
    scale = power_of_two(x, dims)
    norm = torch.linalg.vector_norm(x / scale, dim=dims)
    return _grow(norm * scale.squeeze(dims), terms)


def product_error(left: Ball, right: Ball, roundings: int = 0) -> Ball:
    """(…) a bound of ‖(L + δL)(R + δR) - fl(LR)‖_F for products of the midpoints (…, m, k) and (…, k, n).

    ‖δL‖‖R + δR‖ + ‖L‖‖δR‖ + γ_k‖L‖‖R‖ in Frobenius norms: no ball of the size of the product is formed.

    Args:
        left: L with δL.
        right: R with δR.
        roundings: how many sums each entry enters after the product, of terms that are all bounded in this way.
    """
    long, wide = (Ball.exact(frobenius_upper(part)) for part in (left.mid, left.rad))
    tall, high = (Ball.exact(frobenius_upper(part)) for part in (right.mid, right.rad))
    k = left.shape[-1] + roundings
    underflow = k * (left.shape[-2] + right.shape[-1]) * FLOOR
    return wide * (tall + high) + long * high + long * tall * gamma(k) + underflow


def _grow(radius: Tensor, terms: int = 1) -> Tensor:
    """Pays for the rounding of a radius that was summed from `terms` products."""
    if radius.dtype != torch.float64:
        raise InputError(f"a bound of rounding errors met {radius.dtype}; expected float64: lift it by Ball.exact")
    return (radius * (1.0 + (terms + 16) * 2 * UNIT)).add_((3 * terms + 8) * FLOOR)


def _known(mid: Tensor, rad: Tensor) -> Tensor:
    """The radius, or infinity where the midpoint has overflowed: there is no bound then."""
    return torch.where(mid.abs() < math.inf, rad, math.inf)


def _exact(x: Tensor | Scalar) -> Tensor | float:
    """Numbers that are taken as they are: float32 and float64 values are float64 values."""
    # The model allows that a subnormal result is flushed to zero, but not that a subnormal operand is.
    if FLOOR * 0.5 == 0.0:
        raise HoldfastError(
            "this thread takes subnormal numbers for zero, so nothing can be proved; call "
            "torch.set_flush_denormal(False) after the imports (a library built with -ffast-math may have set it)"
        )
    return x.detach().to(torch.float64) if isinstance(x, Tensor) else float(x)


def _operand(other: Ball | Tensor | Scalar) -> tuple[Tensor | float, Tensor | None]:
    """Midpoint and radius, which is None where the operand is exact."""
    return (other.mid, other.rad) if isinstance(other, Ball) else (_exact(other), None)


@dataclass(frozen=True)
class Ball:
    """All real tensors within `rad` of `mid`, entry by entry."""

    mid: Tensor
    rad: Tensor

    @classmethod
    def exact(cls, x: Tensor | Scalar, like: Tensor | None = None) -> Ball:
        """The given numbers, with radius zero: float32 and float64 values are float64 values."""
        mid = _exact(x)
        if not isinstance(mid, Tensor):
            mid = torch.tensor(mid, dtype=torch.float64, device=None if like is None else like.device)
        return cls(mid, torch.zeros_like(mid))

    # -- what a ball says about the exact value

    @property
    def upper(self) -> Tensor:
        """A float64 that no member exceeds."""
        return up(self.mid + self.rad)

    @property
    def lower(self) -> Tensor:
        """A float64 that no member falls below."""
        return down(self.mid - self.rad)

    # -- shapes

    @property
    def shape(self) -> torch.Size:
        return self.mid.shape

    @property
    def ndim(self) -> int:
        return self.mid.ndim

    @property
    def device(self) -> torch.device:
        return self.mid.device

    @property
    def mT(self) -> Ball:
        return self._each(lambda t: t.mT)

    def __getitem__(self, index: Any) -> Ball:
        return self._each(lambda t: t[index])

    def double(self) -> Ball:
        return self._each(lambda t: t.double())

    def unsqueeze(self, dim: int) -> Ball:
        return self._each(lambda t: t.unsqueeze(dim))

    def squeeze(self, dim: int) -> Ball:
        return self._each(lambda t: t.squeeze(dim))

    def reshape(self, *shape: int) -> Ball:
        return self._each(lambda t: t.reshape(*shape))

    def flatten(self, start: int, end: int) -> Ball:
        return self._each(lambda t: t.flatten(start, end))

    def diagonal(self, offset: int, dim1: int, dim2: int) -> Ball:
        return self._each(lambda t: t.diagonal(offset, dim1, dim2))

    def expand(self, *shape: int) -> Ball:
        return self._each(lambda t: t.expand(*shape))

    def movedim(self, source: int, destination: int) -> Ball:
        return self._each(lambda t: t.movedim(source, destination))

    def repeat_interleave(self, repeats: int, dim: int) -> Ball:
        return self._each(lambda t: t.repeat_interleave(repeats, dim))

    def masked_fill(self, mask: Tensor, value: float) -> Ball:
        return Ball(self.mid.masked_fill(mask, value), self.rad.masked_fill(mask, 0.0))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Ball:
        return Ball(change(self.mid), change(self.rad))

    # -- arithmetic

    def __add__(self, other: Ball | Tensor | Scalar) -> Ball:
        mid, rad = _operand(other)
        return self._moved(self.mid + mid, rad)

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad)

    def __sub__(self, other: Ball | Tensor | Scalar) -> Ball:
        mid, rad = _operand(other)
        return self._moved(self.mid - mid, rad)

    def _moved(self, mid: Tensor, rad: Tensor | None) -> Ball:
        """The sum that was rounded to `mid`, where the other operand has this radius."""
        spread = self.rad if rad is None else self.rad + rad
        return Ball(mid, _grow(torch.add(spread, mid.abs(), alpha=UNIT)))

    def __mul__(self, other: Ball | Tensor | Scalar) -> Ball:
        factor, rad = _operand(other)
        mid, size = self.mid * factor, factor.abs() if isinstance(factor, Tensor) else abs(factor)
        spread = self.rad * size if rad is None else self.mid.abs() * rad + self.rad * (size + rad)
        return Ball(mid, _grow(torch.add(spread, mid.abs(), alpha=UNIT)))

    def __truediv__(self, other: Ball | Tensor | Scalar) -> Ball:
        other = self._lift(other)
        mid = self.mid / other.mid
        # |a'/b' - a/b| <= (|a' - a| + |a/b||b' - b|) / |b'|; a divisor that may vanish has no bound.
        least = other.mid.abs() - other.rad
        # Quotients come first: a product could underflow where the divisor is tiny.
        spread = self.rad / least + (mid.abs() * (1 + 4 * UNIT) + FLOOR) * (other.rad / least)
        rad = _grow(spread + UNIT * mid.abs())
        return Ball(mid, torch.where(least > 0, rad, torch.full_like(rad, math.inf)))

    def __matmul__(self, other: Ball | Tensor) -> Ball:
        other = self._lift(other)
        k = self.shape[-1]
        a, b = self.mid.abs(), other.mid.abs()
        # γ b may underflow where a is large; the floor pays for it.
        rad = a @ (other.rad + (gamma(k) * b + FLOOR))
        if bool(self.rad.any()):  # products of exact numbers are common, and a third product costs as much as they do
            rad = rad + self.rad @ (b + other.rad)
        mid = self.mid @ other.mid
        return Ball(mid, _known(mid, _grow(rad, k)))

    __radd__ = __add__
    __rmul__ = __mul__

    def sum(self, dim: int | tuple[int, ...], keepdim: bool = False) -> Ball:
        dims = (dim,) if isinstance(dim, int) else dim
        k = math.prod(self.shape[i] for i in dims)
        rad = (self.rad + gamma(k) * self.mid.abs()).sum(dims, keepdim=keepdim)
        mid = self.mid.sum(dims, keepdim=keepdim)
        return Ball(mid, _known(mid, _grow(rad, k)))

    def amax(self, dim: int | tuple[int, ...], keepdim: bool = False) -> Ball:
        return self._each(lambda t: t.amax(dim, keepdim=keepdim))

    def abs(self) -> Ball:
        return Ball(self.mid.abs(), self.rad)

    def minimum(self, other: Ball) -> Ball:
        """From the smaller of the lower ends to the smaller of the upper ends."""
        low, high = torch.minimum(self.lower, other.lower), torch.minimum(self.upper, other.upper)
        mid = low / 2 + high / 2
        rad = up(torch.maximum(high - mid, mid - low))
        known = torch.isfinite(low) & torch.isfinite(high)
        least, most = torch.minimum(self.mid, other.mid), torch.maximum(self.rad, other.rad)
        return Ball(torch.where(known, mid, least), torch.where(known, rad, most))

    def clamp(self, *, min: float | None = None, max: float | None = None) -> Ball:
        rad = self.rad
        if min is not None:
            rad = torch.where(self.upper <= min, 0.0, rad)  # every member becomes `min`
        if max is not None:
            rad = torch.where(self.lower >= max, 0.0, rad)
        return Ball(self.mid.clamp(min=min, max=max), rad)

    def square(self) -> Ball:
        return self * self

    def exp(self) -> Ball:
        mid = self.mid.exp()
        bound = self.mid.clamp(min=_EXP_LEAST).exp()
        rad = bound * (torch.expm1(self.rad) * (1 + _EXP_ULPS) + _EXP_ULPS)
        # All members, and the midpoint, lie between 0 and the largest: less where the exponent is known badly.
        largest = self.upper.clamp(min=_EXP_LEAST).exp() * (1 + _EXP_ULPS)
        return Ball(mid, _grow(torch.fmin(rad, largest)))  # -inf ± inf has no largest

    def log(self) -> Ball:
        """The logarithm of positive members; unbounded where a member may vanish."""
        mid = self.mid.log()
        least = self.mid - self.rad
        rad = _grow(self.rad / least + _EXP_ULPS * mid.abs())
        return Ball(mid, torch.where(least > 0, rad, torch.full_like(rad, math.inf)))

    def tanh(self) -> Ball:
        # The slope is 1/cosh² <= 4 exp(-2|t|), and at most 1.
        return self._saturate(Tensor.tanh, 1.0, 4.0, lambda t: -2.0 * t)

    def erf(self) -> Ball:
        # The slope is 2/√π exp(-t²), and 2/√π < 1.1284.
        return self._saturate(Tensor.erf, 1.1284, 1.1284, lambda t: -t * t)

    def _saturate(
        self, function: Callable[[Tensor], Tensor], steepest: float, factor: float, exponent: Callable[[Tensor], Tensor]
    ) -> Ball:
        """A function into [-1, 1], increasing, with slope at most min(steepest, factor · exp(exponent(|t|)))."""
        mid = function(self.mid)
        nearest = down(self.mid.abs() - self.rad).clamp(min=0.0)
        # The exponent may be large, so its rounding counts: 4 u · 690 < 1e-12.
        slope = factor * exponent(nearest).clamp(min=_EXP_LEAST).exp() * (1 + 1e-12)
        rad = slope.clamp(max=steepest) * self.rad + _EXP_ULPS * mid.abs()
        return Ball(mid, _grow(torch.fmin(rad, 1.0 + mid.abs())))

    def sqrt(self) -> Ball:
        """The square root of the non-negative members."""
        base = self.mid.clamp(min=0)
        rad = _grow(self.rad + (base - self.mid))
        mid = base.sqrt().abs()  # the root of -0 is -0, and a quotient by it -inf
        return Ball(mid, _grow(torch.minimum(rad.sqrt(), rad / mid) + UNIT * mid))

    def softmax(self, dim: int) -> Ball:
        """Softmax over `dim`; entries that are exactly -inf are masked and exactly zero."""
        masked = self._masked
        largest = self.mid.amax(dim, keepdim=True)  # any common shift leaves the exact softmax unchanged
        e = (self.masked_fill(masked, 0.0) - Ball.exact(largest)).exp().masked_fill(masked, 0.0)
        return (e / e.sum(dim, keepdim=True)).masked_fill(masked, 0.0)

    def log_softmax(self, dim: int) -> Ball:
        """The logarithm of softmax, accurate where the probability underflows; masked entries stay -inf."""
        masked = self._masked
        largest = self.mid.amax(dim, keepdim=True)
        shifted = self.masked_fill(masked, 0.0) - Ball.exact(largest)
        total = shifted.exp().masked_fill(masked, 0.0).sum(dim, keepdim=True)
        return (shifted - total.log()).masked_fill(masked, -math.inf)

    @property
    def _masked(self) -> Tensor:
        """Entries that are exactly -inf; the radius of a score that overflowed is infinite."""
        return (self.mid == -math.inf) & (self.rad == 0)

    def _lift(self, other: Ball | Tensor | Scalar) -> Ball:
        return other if isinstance(other, Ball) else Ball.exact(other, like=self.mid)


Array = TypeVar("Array", Tensor, Ball)


def as_ball(x: Tensor | Ball) -> Ball:
    """A tensor of any float dtype as a ball of radius zero; balls as they are."""
    return x if isinstance(x, Ball) else Ball(x, torch.zeros_like(x))


def lift(x: Tensor, like: Array) -> Array:
    """`x` in the arithmetic of `like`: a ball of radius zero, or a tensor of the same dtype and device."""
    if isinstance(like, Ball):
        return Ball.exact(x.to(like.device))
    return x.to(like)


def frobenius(x: Array, dims: tuple[int, ...] = (-2, -1)) -> Array:
    """The Frobenius norm over `dims`."""
    if isinstance(x, Ball):
        scale = power_of_two(x.mid, dims)
        terms = math.prod(x.shape[dim] for dim in dims)
        norm = (x.mid / scale).square().sum(dims).sqrt() * scale.squeeze(dims)
        # | ‖mid‖ - ‖Z‖ | <= ‖rad‖, and the norm itself is rounded.
        return Ball(norm, _grow(frobenius_upper(x.rad, dims) + gamma(terms + 4) * norm, terms))
    length: Tensor = torch.linalg.vector_norm(x, dim=dims)
    return length
