"""What holds at every point of a ball: upper probabilities, spreads of values and scores (docs/math/second-order.md).

Z is any point with ‖Z - X‖_F <= r, G any direction with ‖G‖_F = 1. All constants are non-decreasing in r, and are
computed for many radii at once: shapes begin with (r, b…), where r is the number of radii. Radii themselves come as
(r), or as (b…, r) where each input has its own.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Generic, final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer, fold
from holdfast.attention.jacobian import Folded
from holdfast.attention.moments import RowMoments, ScoreMoments
from holdfast.attention.sink_token import with_sink_token
from holdfast.bounds.normed_map import NormedMaps
from holdfast.bounds.score_map import AnyScoreMap, ScoreMap, distances2, root, score_map, side_by_side
from holdfast.errors import InputError
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import ROOT2, up

_CURVED = up((1 + math.sqrt(2.0)) / 2, 2**-50)  # not below the exact value
_FRACTIONS = (0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@final
class OverBall(Generic[Array]):
    """Constants of a layer on balls around x.

    Args:
        a: the arithmetic.
        layer: float64.
        x: (b…, n, d) float64.
        radii: (r) the radii of the balls, or (b…, r).

    Sinks are one more token, the last one, that may move too: all constants are then those of n + 1 tokens.
    """

    def __init__(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, radii: Array) -> None:
        self.a: Arithmetic[Array] = a
        own = radii.shape[:-1]
        if own not in (torch.Size(), x.shape[:-2]):
            raise InputError(f"radii have shape {tuple(radii.shape)}; expected (r) or {(*x.shape[:-2], 'r')}")
        self._radii: Array = radii.movedim(-1, 0).reshape(-1, *(own or (1 for _ in x.shape[:-2])))
        if layer.sinks is not None:
            layer, x = with_sink_token(layer, x)
        X = a.lift(x)
        w = layer.weights(X)
        self.f: Folded[Array] = fold(layer, X)
        linear = layer.q_norm is None and layer.k_norm is None
        self.map: AnyScoreMap[Array] = (
            score_map(a, layer, self.f) if linear else NormedMaps(a, layer, X, self.f, self._radii)
        )
        self._A: Array = self.map.forms[0]
        self._A_transposed: Array = self.map.forms[1]
        self._C_transposed: Array = a.product(w.w_o.mT, w.w_v)  # up to an isometry on the right
        self.norm_A: Array = a.matrix_norm(self._A)
        n = x.shape[-2]
        allowed = layer.allowed(n)
        every = torch.ones(n, n, dtype=torch.bool, device=x.device)
        #: (b…, 1, n, n) the pairs that no head attends to.
        self.masked: Tensor = ~(every if allowed is None else allowed.to(x.device)).unsqueeze(-3)

    @property
    def linear(self) -> ScoreMap[Array]:
        """The scores of linear queries and keys: what is told of common movements has no proof for others."""
        assert isinstance(self.map, ScoreMap)
        return self.map

    def r(self, dims: int) -> Array:
        """The radii, ready for a tensor with `dims` dimensions behind the batch."""
        return self._radii.reshape(*self._radii.shape, *(1 for _ in range(dims)))

    @cached_property
    def norm_C(self) -> Array:
        """(h) ‖C_l‖."""
        return self.a.matrix_norm(self._C_transposed)

    # -- norms of all heads together

    @cached_property
    def stacked_C(self) -> Array:
        """‖[C_1; …; C_h]‖."""
        return self.a.matrix_norm(side_by_side(self._C_transposed))

    @cached_property
    def rows_A(self) -> Array:
        """‖[A_1, …, A_h]‖, a bound of (Σ_l ‖A_lᵀ w‖²)^½ for unit w."""
        return self.a.matrix_norm(side_by_side(self._A))

    @cached_property
    def joint_A(self) -> Array:
        """A bound of (Σ_l ‖G A_l G'ᵀ‖_F²)^½ for ‖G‖_F = ‖G'‖_F = 1: heads side by side, or one above the other."""
        return self.rows_A.minimum(self.a.matrix_norm(side_by_side(self._A_transposed)))

    def joint_bilinear(self, squares: Array) -> Array:
        """A bound of (Σ_l w_l² ‖G A_l G'ᵀ‖_F²)^½, for weights with the given squares (…, h): the same with w_l A_l."""
        w = root(squares).unsqueeze(-1).unsqueeze(-1)
        rows, columns = (self.a.matrix_norm(side_by_side(w * A), rough=True) for A in (self._A, self._A_transposed))
        return rows.minimum(columns)

    # -- probabilities

    @cached_property
    def q(self) -> Tensor:
        """(r, b…, h, n, n) q_ij >= p_ij(Z) for all Z, also on the segment between the scores of X and Z (Lemma 3)."""
        a, f, r, masked = self.a, self.f, self.r(3), self.masked
        log_p = f.scores.log_softmax(-1).masked_fill(masked, 0.0)
        norm_A = self.norm_A.unsqueeze(-1).unsqueeze(-1)
        # (a) log p_ij is concave in the scores, so it grows at most by its linear part.
        slope, bend = self.map.growth(norm_A)
        q = a.number((log_p + slope * r + bend * (r * r)).clamp(max=0.0).exp())
        # (b) every other score gains at most this much on score j; says nothing where p underflows.
        gain = root(self.map.key_lengths2) * r * ROOT2 + norm_A * (r * r) * _CURVED
        apart = self.map.apart
        rest = f.p @ (-(apart * r)).exp() - f.p
        ratio = a.number(f.p / (f.p + (-gain).exp() * rest))
        usable = (a.number(f.p) > 1e-290) & torch.isfinite(ratio)
        return torch.where(usable, torch.minimum(q, ratio), q).clamp(max=1.0).masked_fill(masked, 0.0)

    @cached_property
    def softmax_norm(self) -> Array:
        """(r, b…, h, n) λ_i >= ‖diag(p) - pp^T‖ for all p in the ball (Lemma 2)."""
        return _covered_norm(self.a, self.q).clamp(max=0.5)

    # -- movement of all scores together

    def score_movement(self, weights: Array) -> Array:
        """(r, b…) a bound of (Σ_i Σ_l Var_w(s'_li))^½ at Z, for weights (r, b…, h, n, n) that cover the probabilities.

        s'(Z) - s'(X) = G A_l (Z - X)ᵀ + (Z - X) A_l Gᵀ is bounded by the largest weight of each head.
        """
        weights = self.a.lift(self.a.number(weights))  # larger weights cover as well; from here on they are exact
        at_x = self.a.norm(ScoreMoments(self.map.query_rows, self.map.key_rows, weights), rough=True)
        moved = at_x + self.joint_bilinear(weights.amax((-2, -1))) * self.r(0) * 2.0
        bend = self.map.bend(weights)
        return moved if bend is None else moved + bend * self.r(0)

    def second_movement(self, bilinear: Array, weights: Array) -> Array:
        """(r, b…) r² times this bounds what of the movement of all scores is not linear, from its bilinear part."""
        bend = self.map.bend(weights)
        return bilinear if bend is None else bilinear + bend * 0.5

    # -- spreads of values and scores, all heads together

    @cached_property
    def value_spread(self) -> Array:
        """(r, b…, n) Ω_i >= (Σ_l Var(C_lᵀz · u))^½ for unit u."""
        q = self.a.lift(self.q)
        return self.a.norm(RowMoments(self.f.value_rows, q), rough=True) + self._moved(q.amax(-1)) * self.stacked_C

    @cached_property
    def query_spread(self) -> Array:
        """(r, b…, n) η_i >= (Σ_l Var(A_l z_j · w))^½ for unit w."""
        q = self.a.lift(self.q)
        at_x = self.a.norm(RowMoments(self.linear.query_rows, q), rough=True)
        return at_x + self._moved(q.amax(-1)) * self.rows_A

    @cached_property
    def damping(self) -> Array:
        """(r, b…, n) max_l √λ_li: ‖M(p_i) f‖ is at most this times the standard deviation of f."""
        return root(self.softmax_norm.amax(-2))

    @cached_property
    def score_spread(self) -> Array:
        """(r, b…, n) σ_i >= (Σ_l Var(s'_li))^½: how far the scores of row i spread in one direction G."""
        return self._score_spread(self.q, self.softmax_norm)

    @cached_property
    def third_spread(self) -> Array:
        """(r, b…, n) σ̃_i, the same with `third_weights`: the third moments of row i are at most σ̃_i²."""
        return self._score_spread(self.third_weights, _covered_norm(self.a, self.third_weights))

    def _score_spread(self, weights: Tensor, norm: Array) -> Array:
        """(r, b…, n) a bound of (Σ_lj w_lij (s'_lij - c_li)²)^½ for the best c, given ‖diag(w) - ww^T/S‖ <= norm.

        g_i enters through the query and, at key i, through the key; the other tokens through the key alone.
        """
        a = self.a
        own = a.norm(RowMoments(self.map.query_rows, weights, own=self.map.own_keys), rough=True)
        own = own + self._moved(a.lift(weights.amax(-1))) * (self.rows_A + self.joint_A).unsqueeze(-1)
        others = self.map.other_keys(root(norm))
        others = others + self._moved(norm) * self.joint_A.unsqueeze(-1)
        bent = self.map.row_bend(weights, norm)
        if bent is not None:
            own, others = own + bent[0] * self.r(1), others + bent[1] * self.r(1)
        return root(own.square() + others.square())

    @cached_property
    def value_distance(self) -> Array:
        """(b…, h, n, n) ‖C_lᵀ(x_j - ȳ_i)‖ at x, 0 where masked."""
        return root(distances2(self.f.p @ self._centred_values, self._centred_values).masked_fill(self.masked, 0.0))

    @cached_property
    def value_reach(self) -> Array:
        """(r, b…, h, n, n) D_lij >= ‖C_lᵀ(z_j - ȳ_i(Z))‖ for every allowed key, 0 where masked."""
        r, C = self.r(2), self.norm_C.unsqueeze(-1)
        diameter = root(distances2(self._centred_values, self._centred_values).amax((-2, -1))).unsqueeze(-1)
        shift = (self.a.lift(self.q) - self.f.p).sum(-1).clamp(max=1.0) * diameter
        drawn = (self.value_spread * self.score_spread).unsqueeze(-2) * r
        near = self.value_distance + (shift.minimum(drawn) + C * r * ROOT2).unsqueeze(-1)
        return near.minimum((diameter + C * r * ROOT2).unsqueeze(-1)).masked_fill(self.masked, 0.0)

    @cached_property
    def third_weights(self) -> Tensor:
        """(r, b…, h, n, n) weights w with Σ_j p_j D_j (f_j - E f)² <= Σ_j w_j (f_j - c)² for all f and c (Lemma 4).

        w = q (τ + (D - τ)_+ τ / (τ - ω)) with ω = Σ_j q_j (D_j - τ)_+ < τ.
        """
        a, D = self.a, self.a.number(self.value_reach)
        threshold = self._threshold(D)
        tau, over = a.lift(threshold), (a.lift(D) - threshold).masked_fill(threshold >= D, 0.0)
        room = tau - (over * self.q).sum(-1, keepdim=True)
        weights = (tau + over * (tau / room)) * self.q
        return a.number(weights).masked_fill(self.masked | (threshold <= 0), 0.0)

    def _threshold(self, D: Tensor) -> Tensor:
        """(r, b…, h, n, 1) τ: of some fractions of the largest D that leave ω < τ, the one with the smallest moments.

        Any choice is sound; the largest D itself has ω = 0.
        """
        q, moments = self.q, self.map.moments
        tau = largest = D.amax(-1, keepdim=True)
        least = (q * largest * moments).sum(-1, keepdim=True)
        for fraction in _FRACTIONS:
            tried = largest * fraction
            over = (D - tried).clamp(min=0)
            room = tried - (q * over).sum(-1, keepdim=True)
            moment = (q * (tried + over * (tried / room)) * moments).sum(-1, keepdim=True)
            better = (room > 1e-3 * tried) & (moment < least)
            tau, least = torch.where(better, tried, tau), torch.where(better, moment, least)
        return tau

    def _moved(self, weights: Array) -> Array:
        """What the movement of the tokens adds to a spread with weights (r, b…, h, n): r max_l √w_li per unit norm."""
        return self.r(1) * root(weights.amax(-2))

    @cached_property
    def common_spread(self) -> Array:
        """(r, b…, n) a bound of (Σ_l Var(s'_li))^½ where all tokens move alike, by a unit vector w.

        Without rotary positions the keys then move the scores of a row alike, and what is left is `query_spread`.
        """
        variations = self.linear.key_variations2
        if variations is None:
            return self.query_spread
        keys = root((self.a.lift(self.q) * variations).sum(-1).sum(-2))
        return self.query_spread + keys + self.joint_A * self.r(1)

    @cached_property
    def _centred_values(self) -> Array:
        """Rows x_j C with a common constant taken off, which leaves differences alone and spares digits."""
        return self.f.v - self.a.number(self.f.v).mean(-2, keepdim=True)


def refuses(layer: AttentionLayer) -> str | None:
    """Why constants over a ball have no proof for the layer, or None."""
    normed = layer.q_norm is not None or layer.k_norm is not None
    if normed and layer.sinks is not None:
        return "the layer has sinks and normalises queries or keys, and the proof does not cover both together"
    return None


def _covered_norm(a: Arithmetic[Array], w: Tensor) -> Array:
    """(…) a bound of ‖diag(w) - ww^T/S‖, S = Σ_j w_j, for exact weights (…, n): w_1 (S - w_1 + w_2) / S (Lemma 1)."""
    top = torch.cat([w, torch.zeros_like(w[..., :1])], -1).topk(2, -1).values
    first, second, total = a.lift(top[..., 0]), a.lift(top[..., 1]), a.lift(w).sum(-1)
    return (first * (total - first + second) / total).masked_fill(top[..., 0] <= 0, 0.0).minimum(first)
