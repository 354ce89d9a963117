"""The activation functions: each is its derivatives, and what is left of them far from zero."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.activation.base import Activation, Interval, SmoothActivation
from holdfast.linalg import Array, Ball
from holdfast.linalg.rounding import lift
from holdfast.registry import Registry


def _tanh(k: int, t: Array) -> Array:
    """tanh⁽ᵏ⁾ = (1 - y²) p_k(y) with y = tanh t; 1 - y² = 4z/(1 + z)², z = exp(-2|t|), keeps its relative accuracy."""
    y = t.tanh()
    if k == 0:
        return y
    z = (t.abs() * -2.0).exp()
    y2, sech2 = y.square(), z * 4.0 / (z + 1.0).square()
    if k == 1:
        return sech2
    if k == 2:
        return sech2 * y * -2.0
    if k == 3:
        return sech2 * (y2 * 6.0 - 2.0)
    if k == 4:
        return sech2 * y * (y2 * -24.0 + 16.0)
    return sech2 * ((y2 * 120.0 - 120.0) * y2 + 16.0)


def _logistic(k: int, t: Array) -> Array:
    """The k-th derivative of 1/(1 + e^-t) = (1 + tanh(t/2))/2."""
    half = _tanh(k, t * 0.5) * 0.5 ** (k + 1)
    return half + 0.5 if k == 0 else half


@final
class Tanh(SmoothActivation):
    """tanh(t)."""

    name = "tanh"
    restricted = True
    limits = (0.0, 0.0)

    def derivative(self, k: int, t: Array) -> Array:
        return _tanh(k, t)


@final
class Gelu(SmoothActivation):
    """t Φ(t), with Φ the normal distribution function and p its density.

    φ' = Φ + t p, φ'' = p (2 - t²), φ''' = p (t³ - 4t), φ⁗ = p (-t⁴ + 7t² - 4), φ⁽⁵⁾ = p (t⁵ - 11t³ + 18t).
    """

    name = "gelu"

    def derivative(self, k: int, t: Array) -> Array:
        t2 = t.square()
        if k < 2:
            below = (t / _root(2.0, t)).erf() * 0.5 + 0.5
            return t * below if k == 0 else below + t * self._density(t2)
        p = self._density(t2)
        if k == 2:
            return p * (-t2 + 2.0)
        if k == 3:
            return p * t * (t2 - 4.0)
        if k == 4:
            return p * ((-t2 + 7.0) * t2 - 4.0)
        return p * t * ((t2 - 11.0) * t2 + 18.0)

    @staticmethod
    def _density(t2: Array) -> Array:
        # 2π lies within 2 u · 2π of the float64.
        return (t2 * -0.5).exp() / _near(2 * math.pi, t2).sqrt()


@final
class GeluTanh(SmoothActivation):
    """t (1 + tanh v)/2 with v = √(2/π) (t + 0.044715 t³): the common approximation of GELU.

    With Y = tanh(v(t)), φ⁽ᵏ⁾ = (t Y⁽ᵏ⁾ + k Y⁽ᵏ⁻¹⁾)/2 from k = 2 on; Y⁽ᵏ⁾ by Faà di Bruno's formula, v⁗ = 0.
    """

    name = "gelu-tanh"

    def derivative(self, k: int, t: Array) -> Array:
        if k == 0:
            return t * (self._composed(0, t) + 1.0) * 0.5
        before = self._composed(k - 1, t)
        return (t * self._composed(k, t) + (before + 1.0 if k == 1 else before * float(k))) * 0.5

    @staticmethod
    def _composed(k: int, t: Array) -> Array:
        """Y⁽ᵏ⁾(t)."""
        alpha, kappa, t2 = _near(2 / math.pi, t).sqrt(), 0.044715, t.square()
        v = alpha * t * (t2 * kappa + 1.0)
        y = [_tanh(j, v) for j in range(k + 1)]
        if k == 0:
            return y[0]
        v1, v2, v3 = alpha * (t2 * kappa * 3.0 + 1.0), alpha * t * kappa * 6.0, alpha * kappa * 6.0
        if k == 1:
            return y[1] * v1
        if k == 2:
            return y[2] * v1.square() + y[1] * v2
        if k == 3:
            return y[3] * v1 * v1.square() + y[2] * v1 * v2 * 3.0 + y[1] * v3
        v1_2, v2_2 = v1.square(), v2.square()
        if k == 4:
            return y[4] * v1_2.square() + y[3] * v1_2 * v2 * 6.0 + y[2] * (v2_2 * 3.0 + v1 * v3 * 4.0)
        third = y[3] * (v1 * v2_2 * 15.0 + v1_2 * v3 * 10.0)
        return y[5] * v1 * v1_2.square() + y[4] * v1 * v1_2 * v2 * 10.0 + third + y[2] * v2 * v3 * 10.0


@final
class Silu(SmoothActivation):
    """t S(t) with S(t) = 1/(1 + e^-t): φ⁽ᵏ⁾ = t S⁽ᵏ⁾ + k S⁽ᵏ⁻¹⁾."""

    name = "silu"

    def derivative(self, k: int, t: Array) -> Array:
        first = t * _logistic(k, t)
        return first if k == 0 else first + _logistic(k - 1, t) * float(k)


@final
class Softplus(SmoothActivation):
    """(log(1 + e^{st}) - c)/s, a smooth relu; c is 0, or log 2 so that φ(0) = 0.

    Args:
        sharpness: s.
        centred: whether φ(0) = 0.
    """

    restricted = True

    def __init__(self, sharpness: float = 1.0, *, centred: bool = False) -> None:
        if not (math.isfinite(sharpness) and sharpness > 0):
            raise InputError(f"sharpness is {sharpness!r}; expected a positive number")
        self.sharpness, self.centred, self.unit = float(sharpness), centred, 1 / sharpness
        self.name = ("centred-" if centred else "") + "softplus" + (f"({sharpness:g})" if sharpness != 1 else "")

    def derivative(self, k: int, t: Array) -> Array:
        s = self.sharpness
        scaled = t * s
        if k == 0:
            # log(1 + e^t) = (t + |t|)/2 + log(1 + e^-|t|): the exponent does not overflow.
            value = (scaled + scaled.abs()) * 0.5 + ((-scaled.abs()).exp() + 1.0).log()
            return (value - lift(torch.tensor(2.0, dtype=torch.float64), t).log() if self.centred else value) / s
        slope = _logistic(k - 1, scaled)
        for _ in range(k - 1):
            slope = slope * s
        return slope


@final
class Square(SmoothActivation):
    """t²: not a network's activation, its slopes have no bound, but what products are made of."""

    name = "square"
    limits = (-math.inf, math.inf)

    def derivative(self, k: int, t: Array) -> Array:
        if k < 2:
            return t.square() if k == 0 else t * 2.0
        return t * 0.0 + 2.0 if k == 2 else t * 0.0

    def range(self, k: int, low: Tensor, high: Tensor) -> Interval:
        if k == 1:
            return Interval(low * 2.0, high * 2.0)
        return Interval(*(torch.full_like(low, 2.0 if k == 2 else 0.0) for _ in range(2)))


@final
class Relu(Activation):
    """max(t, 0)."""

    name = "relu"
    restricted = True
    all_slopes = (0.0, 1.0)

    def value(self, t: Array) -> Array:
        return t.clamp(min=0.0)

    def slope(self, t: Array) -> Array:
        return _where_positive(t, 0.0)

    def slopes(self, low: Tensor, high: Tensor) -> Interval:
        right = high > 0
        return Interval(((low >= 0) & right).to(low), right.to(low))


@final
class LeakyRelu(Activation):
    """t for t > 0, and a fraction of it below.

    Args:
        slope: of the left side, between -1 and 1.
    """

    def __init__(self, slope: float = 0.01) -> None:
        if not -1 <= slope <= 1:
            raise InputError(f"slope is {slope!r}; expected a number between -1 and 1")
        self.left, self.restricted = float(slope), slope >= 0
        self.name = f"leaky-relu({slope:g})"

    @property
    def all_slopes(self) -> tuple[float, float]:
        return self.left, 1.0

    def value(self, t: Array) -> Array:
        return t.clamp(min=0.0) - (-t).clamp(min=0.0) * self.left

    def slope(self, t: Array) -> Array:
        return _where_positive(t, self.left)

    def slopes(self, low: Tensor, high: Tensor) -> Interval:
        inside = torch.full_like(low, self.left)
        return Interval(torch.where((low >= 0) & (high > 0), 1.0, inside), torch.where(high > 0, 1.0, inside))


@final
class Absolute(Activation):
    """|t|."""

    name = "abs"
    all_slopes = (-1.0, 1.0)

    def value(self, t: Array) -> Array:
        return t.abs()

    def slope(self, t: Array) -> Array:
        return _where_positive(t, -1.0)

    def slopes(self, low: Tensor, high: Tensor) -> Interval:
        right = high > 0
        return Interval(((low >= 0) & right).to(low) * 2 - 1, right.to(low) * 2 - 1)


#: Every activation that needs no argument.
activations: Registry[Activation] = Registry("activation")
for _kind in (Gelu(), GeluTanh(), Silu(), Tanh(), Softplus(), Softplus(centred=True), Relu(), Absolute()):
    activations.add(_kind.name)(_kind)


def _where_positive(t: Array, otherwise: float) -> Array:
    middle = t.mid if isinstance(t, Ball) else t
    return lift(torch.where(middle > 0, 1.0, torch.tensor(otherwise, dtype=torch.float64)), t)


def _near(x: float, like: Array) -> Array:
    """A real number within 4 u of the float64 x, relatively, in the arithmetic of `like`."""
    value = torch.tensor(x, dtype=torch.float64, device=like.device)
    return Ball(value, value.abs() * 2.0**-51) if isinstance(like, Ball) else value.to(like)


def _root(x: float, like: Array) -> Array:
    return lift(torch.tensor(x, dtype=torch.float64), like).sqrt()
