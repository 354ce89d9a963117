"""Softmax attention as a piece of a network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, ValueOperator
from holdfast.attention.derivatives import AttentionPass
from holdfast.attention.rotary import Rotary
from holdfast.bounds import bounds
from holdfast.bounds.base import Need
from holdfast.bounds.best import for_networks, smallest_of
from holdfast.bounds.second_order import direct_gain, every_direction, grown_gain, nodes_for, on_nodes
from holdfast.bounds.taylor import curvature_on_balls
from holdfast.bounds.yudin import slope_on_balls
from holdfast.errors import NotApplicableError
from holdfast.layers.attention.expansion import LocalAttention
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.piece import Piece, SmoothPiece
from holdfast.layers.tokens.rows import Rows, distinct
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.directions import Directions


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

    costly = True

    def __init__(self, layer: AttentionLayer) -> None:
        self.layer = layer.double()

    def rows_behind(self, rows: Rows, n: int) -> Rows:
        """A query needs the keys that it may attend to."""
        allowed = self.layer.allowed(n)
        return torch.arange(n) if allowed is None else distinct(allowed[rows].any(0).nonzero().flatten(), rows)

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        layer = self.layer
        mask = None if layer.mask is None else layer.mask[..., rows, :][..., rows]
        bias = None if layer.score_bias is None else layer.score_bias[..., rows, :][..., rows]
        turn = layer.rotary
        rotary = None if turn is None else Rotary(turn.cos[..., rows, :], turn.sin[..., rows, :], turn.pairing)
        if mask is not None and bool(mask.all()):
            mask = None
        return (Attention(layer.replace(mask=mask, score_bias=bias, rotary=rotary)),)

    def with_identity(self) -> Attention | None:
        return None if self.layer.residual else Attention(self.layer.replace(residual=1.0))

    def at(self, u: Array) -> AttentionPass[Array]:
        """The layer at u, with its derivatives there: for many derivatives at one point."""
        if self.layer.q_norm is not None or self.layer.k_norm is not None or self.layer.sinks is not None:
            raise NotApplicableError(f"the derivatives of a network do not cover {self.layer.beyond_dot_products}")
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

    def without_expansion(self) -> str | None:
        beyond = self.layer.beyond_dot_products
        return None if beyond is None else f"Attention has no expansion with {beyond}"

    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion:
        return LocalAttention(self, u, directions)

    def held_numbers(self, u: Tensor) -> int:
        tokens = u.shape[-2]
        asked = (bound for bound in bounds.values() if bound.in_networks)
        return max(u.numel(), self.layer.h * tokens**2, *(bound.held_numbers(self.layer, tokens) for bound in asked))

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array, need: Need = "smallest") -> Array:
        """A bound (…, e) of ‖F(u + δ) - F(u)‖_F over ‖δ‖_F <= rho, rho (…, e) or (e).

        Args:
            a: the arithmetic.
            u: (…, n, d) float64.
            rho: the radii.
            need: what for; the bound is the smallest of those that say that they serve it.
        """
        return smallest_of(for_networks(self.layer, need), a.at(self, u), self.layer, u, rho).value

    @property
    def _capped(self) -> bool:
        """Whether norms of scores alone bound the curvature."""
        return self.layer.soft_cap is not None

    def reach_for(self, need: Need) -> Callable[[Arithmetic[Any], Tensor, Any], Any]:
        return partial(self.reach, need=need)

    def slope(self, a: Arithmetic[Array], u: Tensor) -> Array:
        here = a.at(self, u)
        return here.once("jacobian", lambda: here.norm(AttentionJacobian(self.layer, u)))

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """L(rho): the smallest of ‖J(u)‖ + ∫_0^rho β, the direct bound of `mixed` and, for dot products, `yudin-ball`.

        With a soft cap ‖J(u)‖ + rho β.
        """
        if self._capped:
            return self.slope(a, u).unsqueeze(-1) + self.curvature(a, u, rho) * rho
        here, layer = a.at(self, u), self.layer
        radii = here.number(rho)
        grown = grown_gain(here, layer, u, nodes_for(radii))[..., -1]
        zeta = here.once("zeta", lambda: here.norm(ValueOperator(layer, u)))
        ball = on_nodes(here, layer, u, radii.unsqueeze(-1))
        direct = direct_gain(ball, layer, u)
        if layer.beyond_dot_products is None:
            direct = direct.minimum(slope_on_balls(ball, zeta, layer.residual))
        return grown.minimum(direct.movedim(0, -1))

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """β(rho) of docs/math/second-order.md, Theorem 4; with a soft cap that of docs/math/scores.md."""
        here = a.at(self, u)
        if self._capped:
            return curvature_on_balls(here, self.layer, u, rho)[0]
        curvatures = every_direction(on_nodes(here, self.layer, u, here.number(rho).unsqueeze(-1)))
        return curvatures.movedim(0, -1)
