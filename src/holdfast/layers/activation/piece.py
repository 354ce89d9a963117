"""Activations by themselves, on all channels or on some."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Bool
from torch import Tensor

from holdfast.layers.activation.base import Activation, SmoothActivation
from holdfast.layers.activation.functions import Softplus
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.perceptron.expansion import LocalPerceptron
from holdfast.layers.piece import Piece, SmoothPiece
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.directions import Directions


@final
class KinkedEntries(Piece):
    """An activation φ on some channels; the others pass.

    Args:
        phi: with kinks.
        active: (d,) True where φ acts, False where the channel passes.
    """

    tokenwise = True

    def __init__(self, phi: Activation, active: Bool[Tensor, " d"]) -> None:
        self.phi, self.active = phi, active

    def on(self, active: Bool[Tensor, " d"]) -> KinkedEntries:
        """The same activation on other channels."""
        return KinkedEntries(self.phi, active)

    def value(self, u: Array) -> Array:
        return _mixed(self.phi.value(u), u, self.active)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * _steepest(self.phi)


@final
class SmoothEntries(SmoothPiece):
    """A smooth activation φ on some channels; the others pass.

    D²f[g, g] = φ''(u) ∘ g ∘ g, and ‖g ∘ g‖_F <= ‖g‖_F²; so the curvature is at most sup |φ''|, wherever u is.

    Args:
        phi: with two continuous derivatives.
        active: (d,) True where φ acts, False where the channel passes.
    """

    tokenwise = True

    def __init__(self, phi: SmoothActivation, active: Bool[Tensor, " d"]) -> None:
        self.phi, self.active = phi, active

    def on(self, active: Bool[Tensor, " d"]) -> SmoothEntries:
        """The same activation on other channels."""
        return SmoothEntries(self.phi, active)

    def without_expansion(self) -> str | None:
        return None

    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion:
        read = torch.eye(u.shape[-1], dtype=torch.float64)[self.active]
        t = Ball.exact(u[..., self.active.to(u.device)])
        return LocalPerceptron(u, directions, t, read.mT, self.phi, read, (~self.active).double())

    def value(self, u: Array) -> Array:
        return _mixed(self.phi.value(u), u, self.active)

    def push(self, u: Array, a: Array) -> Array:
        return _mixed(a * self.phi.derivative(1, u), a, self.active)

    def pull(self, u: Array, c: Array) -> Array:
        return self.push(u, c)

    def push2(self, u: Array, a: Array, b: Array) -> Array:
        return (a * b * self.phi.derivative(2, u)).masked_fill(~self.active.to(u.device), 0.0)

    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        return self.push2(u, c, a)

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * 0.0 + _steepest(self.phi)

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        ends = torch.tensor(math.inf, dtype=torch.float64)
        return rho * 0.0 + float(self.phi.supremum(2, -ends, ends))

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * _steepest(self.phi)


@final
class SmoothAbs(SmoothActivation):
    """2/s · log cosh(s t/2), a smooth |t|: |φ'| < 1 and 0 < φ'' <= s/2.

    Args:
        sharpness: s.
    """

    limits = (-1.0, 1.0)

    def __init__(self, sharpness: float = 1.0) -> None:
        self._softplus = Softplus(sharpness, centred=True)
        self.unit = self._softplus.unit
        self.name = f"smooth-abs({sharpness:g})"

    def derivative(self, k: int, t: Array) -> Array:
        # log cosh(s t/2) = log(1 + e^{st}) - log 2 - s t/2
        twice = self._softplus.derivative(k, t) * 2.0
        if k == 0:
            return twice - t
        return twice - 1.0 if k == 1 else twice


def _mixed(on: Array, off: Array, active: Tensor) -> Array:
    chosen = active.to(on.device)
    return on.masked_fill(~chosen, 0.0) + off.masked_fill(chosen, 0.0)


def _steepest(phi: Activation) -> float:
    """The gain of φ on some channels beside channels that pass."""
    return max(1.0, *(abs(slope) for slope in phi.all_slopes))
