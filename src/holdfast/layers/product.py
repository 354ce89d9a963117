"""The product of two halves of the channels: what gates are made of."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.activation.functions import Square
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.perceptron.piece import Mlp
from holdfast.layers.piece import SmoothPiece
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.directions import Directions


@final
class Product(SmoothPiece):
    """(x, y) ↦ x ⊙ y for every token, x and y the two halves of its channels (…, n, 2c).

    Df[(g, h)] = y ⊙ g + x ⊙ h, entry by entry a row (y, x): the norm is the largest √(x² + y²), and on a ball of radius
    ρ at most ρ more. D²f[(g, h), (g, h)] = 2 g ⊙ h, and 2|g h| <= g² + h²: the curvature is at most 1.

    x y = ((x + y)² - (x - y)²)/4: a product is a perceptron whose activation is the square (`squares`).
    """

    tokenwise = True

    def squares(self, channels: int) -> Mlp:
        """The same map of 2c channels as 2c squares between two linear maps."""
        one = torch.eye(channels // 2, dtype=torch.float64)
        read = torch.cat([torch.cat([one, one], 1), torch.cat([one, -one], 1)])
        write = torch.cat([one, -one]) / 4
        return Mlp(read, torch.zeros(channels), Square(), write, torch.zeros(channels // 2))

    def without_expansion(self) -> str | None:
        return None

    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion:
        return self.squares(u.shape[-1]).expand(u, directions)

    def value(self, u: Array) -> Array:
        x, y = _halves(u)
        return x * y

    def push(self, u: Array, a: Array) -> Array:
        (x, y), (g, h) = _halves(u), _halves(a)
        return y * g + x * h

    def pull(self, u: Array, c: Array) -> Array:
        x, y = _halves(u)
        return _beside(y * c, x * c)

    def push2(self, u: Array, a: Array, b: Array) -> Array:
        (g, h), (k, m) = _halves(a), _halves(b)
        return g * m + h * k

    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        g, h = _halves(a)
        return _beside(h * c, g * c)

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return self._steepest(a, u).unsqueeze(-1) + rho

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho * 0.0 + 1.0

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return self._steepest(a, u).unsqueeze(-1) * rho + rho.square() * 0.5

    def _steepest(self, a: Arithmetic[Array], u: Tensor) -> Array:
        """(…) the largest √(x² + y²)."""
        x, y = _halves(a.lift(u))
        return (x.square() + y.square()).sqrt().amax(-1).amax(-1)


def _halves(u: Array) -> tuple[Array, Array]:
    c = u.shape[-1] // 2
    if u.shape[-1] != 2 * c:
        raise InputError(f"Product got {u.shape[-1]} channels; expected an even number")
    return u[..., :c], u[..., c:]


def _beside(x: Array, y: Array) -> Array:
    """(…, n, c) twice to (…, n, 2c)."""
    c = x.shape[-1]
    channels = torch.arange(2 * c, device=x.device)
    left = x[..., channels % c].masked_fill(channels >= c, 0.0)
    return left + y[..., channels % c].masked_fill(channels < c, 0.0)
