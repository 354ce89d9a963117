"""Softmax attention as a piece of a network."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer, ValueOperator
from holdfast.bounds import bounds
from holdfast.bounds.arithmetic import Arithmetic
from holdfast.bounds.best import smallest_of
from holdfast.bounds.second_order import curvature, direct_gain, grown_gain, nodes_for, on_nodes
from holdfast.bounds.yudin import slope_on_balls
from holdfast.linalg import Array
from holdfast.network.attention_derivatives import AttentionPass
from holdfast.network.base import SmoothPiece
from holdfast.network.curves import or_unbounded

#: The bounds whose minimum `reach` takes: all that hold for radii of each input, but those that another one improves.
_METHODS = ("lofast", "lofast-xi", "plus", "cov", "second-order", "mixed", "rows", "yudin-ball")


@final
class Attention(SmoothPiece):
    """F(u) = residual · u + Σ_l P_l(u) u W_l^V W_l^O, biases, masks and all: unmodified softmax attention.

    The layer's residual is bounded jointly with its heads. What does not depend on the radii (norms at u) is computed
    once for an arithmetic and the input tensor u.

    Args:
        layer: computed in float64.

    Example:
        >>> piece = Attention(holdfast.AttentionLayer.from_module(torch.nn.MultiheadAttention(8, 2)))
        >>> u, directions = torch.randn(4, 5, 8).double(), torch.randn(40, 4, 5, 8).double()
        >>> piece.at(u).push(directions).shape
        torch.Size([40, 4, 5, 8])
    """

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer.double()

    def at(self, u: Array) -> AttentionPass[Array]:
        """The layer at u, with its derivatives there: for many derivatives at one point."""
        return AttentionPass(self.layer, u)

    def value(self, u: Array) -> Array:
        return self.at(u).value

    def push(self, u: Array, a: Array) -> Array:
        return self.at(u).push(a)

    def pull(self, u: Array, c: Array) -> Array:
        return self.at(u).pull(c)

    def push2(self, u: Array, a: Array, b: Array) -> Array:
        return self.at(u).push2(a, b)

    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        return self.at(u).pull2(c, a)

    def push3(self, u: Array, a: Array, b: Array, c: Array) -> Array:
        """D³F(u)[a, b, c]."""
        return self.at(u).push3(a, b, c)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array, method: str = "best") -> Array:
        """A bound (…, e) of ‖F(u + δ) - F(u)‖_F over ‖δ‖_F <= rho, rho (…, e) or (e).

        Args:
            a: the arithmetic.
            u: (…, n, d) float64.
            rho: the radii.
            method: a name of `holdfast.bound`; "best" is the smallest of them.
        """
        here = a.at(self, u)
        methods = [bounds[name] for name in (_METHODS if method == "best" else (method,))]
        return _settled(here, smallest_of(methods, here, self.layer, u, rho).value, rho)

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """L(rho): the smallest of ‖J(u)‖ + ∫_0^rho β and the direct bounds of `mixed` and `yudin-ball`."""
        here, layer = a.at(self, u), self.layer
        radii = here.number(rho)
        grown = grown_gain(here, layer, u, nodes_for(radii), radii)
        zeta = here.once("zeta", lambda: here.norm(ValueOperator(layer, u)))
        ball = on_nodes(here, layer, u, radii)
        direct = direct_gain(ball, layer, u).minimum(slope_on_balls(ball, zeta, layer.residual))
        return _settled(here, grown.minimum(direct.movedim(0, -1)), rho)

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """β(rho) of docs/math/second-order.md, Theorem 4."""
        here = a.at(self, u)
        found = curvature(on_nodes(here, self.layer, u, here.number(rho))).every
        return _settled(here, found.movedim(0, -1), rho)


def _settled(a: Arithmetic[Array], found: Array, rho: Array) -> Array:
    """For every rho the smallest bound (…, e) found at a radius not below it: no bound then decreases with rho."""
    radii, known = a.number(rho), or_unbounded(a.number(found))
    larger = radii.unsqueeze(-2) >= radii.unsqueeze(-1)
    return a.lift(torch.where(larger, known.unsqueeze(-2), torch.inf).amin(-1))
