"""Pieces of certificates that the layers here need beside those of every transformer."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from holdfast.bounds.arithmetic import Arithmetic
from holdfast.errors import InputError
from holdfast.linalg import Array
from holdfast.network.activations import Activation, SmoothActivation, Softplus
from holdfast.network.base import LinearPiece, Piece, SmoothPiece


@final
class Rearrangement(LinearPiece):
    """Entries of a token matrix in other places: patches, neighbours on a grid, flattening.

    Every entry stands in the output root² times, divided by root: ‖f(u)‖ = ‖u‖.

    Args:
        index: (m, c) where each entry of the output comes from, in the flattened input.
        shape: (n, d) of the input.
        root: of the number of places of an entry.
    """

    def __init__(self, index: Int64[Tensor, "m c"], shape: tuple[int, int], root: int = 1) -> None:
        places = torch.arange(math.prod(shape), device=index.device).repeat_interleave(root**2)
        order = index.flatten().sort(stable=True)
        if not torch.equal(order.values, places):
            times = f"{root**2} times" if root > 1 else "once"
            raise InputError(f"an index of shape {tuple(index.shape)} does not use every entry of {shape} {times}")
        self._index, self._root = index, root
        self._inverse = order.indices.reshape(*shape, root**2)

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(torch.ones((), dtype=torch.float64, device=self._index.device))

    def value(self, u: Array) -> Array:
        return self._shared(u).flatten(-2, -1)[..., self._index.to(u.device)]

    def push(self, u: Array, a: Array) -> Array:
        return self.value(a)

    def pull(self, u: Array, c: Array) -> Array:
        back = c.flatten(-2, -1)[..., self._inverse.to(c.device)]
        return back[..., 0] if self._root == 1 else self._shared(back.sum(-1))

    def _shared(self, u: Array) -> Array:
        return u if self._root == 1 else u / float(self._root)


@final
class KinkedEntries(Piece):
    """An activation φ on some channels; the others pass.

    Args:
        phi: with kinks.
        active: (d,) True where φ acts, False where the channel passes.
    """

    def __init__(self, phi: Activation, active: Bool[Tensor, " d"]) -> None:
        self._phi, self._active = phi, active

    def value(self, u: Array) -> Array:
        return _mixed(self._phi.value(u), u, self._active)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * _steepest(self._phi)


@final
class SmoothEntries(SmoothPiece):
    """A smooth activation φ on some channels; the others pass.

    D²f[g, g] = φ''(u) ∘ g ∘ g, and ‖g ∘ g‖_F <= ‖g‖_F²; so the curvature is at most sup |φ''|, wherever u is.

    Args:
        phi: with two continuous derivatives.
        active: (d,) True where φ acts, False where the channel passes.
    """

    def __init__(self, phi: SmoothActivation, active: Bool[Tensor, " d"]) -> None:
        self._phi, self._active = phi, active

    def value(self, u: Array) -> Array:
        return _mixed(self._phi.value(u), u, self._active)

    def push(self, u: Array, a: Array) -> Array:
        return _mixed(a * self._phi.derivative(1, u), a, self._active)

    def pull(self, u: Array, c: Array) -> Array:
        return self.push(u, c)

    def push2(self, u: Array, a: Array, b: Array) -> Array:
        return (a * b * self._phi.derivative(2, u)).masked_fill(~self._active.to(u.device), 0.0)

    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        return self.push2(u, c, a)

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * 0.0 + _steepest(self._phi)

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        ends = torch.tensor(math.inf, dtype=torch.float64)
        return rho * 0.0 + float(self._phi.supremum(2, -ends, ends))

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * _steepest(self._phi)


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
