"""The scores where queries or keys are normalised, on balls of given radii (docs/math/scores.md, "Normed scores").

At X the derivatives of queries and keys are matrices T_li: u_lij = M_l^Q T_liᵀ k̂_lj and a_lij = M_l^K T_ljᵀ q̂_li
are exact for every pair. On the ball a token moves q̂_li by at most L_li ‖γ_i M_l^Q‖, and the derivative by at most
S_li ‖δ_i M_l^Q‖ ‖g_i M_l^Q‖; likewise the keys. The scale of the scores is in q̂ and in u.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.head_norm import HeadNorm, Placed
from holdfast.attention.jacobian import Folded
from holdfast.attention.rows import Rows
from holdfast.bounds.placed import PlacedSide, placed_sides
from holdfast.bounds.score_map import (
    AnyScoreMap,
    blocks,
    distances2,
    distances_from_means,
    joined,
    log_growth,
    root,
    side_by_side,
)
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import lift, up


@final
class NormedMaps(AnyScoreMap[Array]):
    """With norms of queries or keys: what holds for all pairs alike is in L, in S and in norms of M_l.

    Args:
        a: the arithmetic.
        layer: float64, without sinks.
        X: (b…, n, d).
        f: the layer at X, folded.
        radii: (r, b…) of the balls, or (r, 1…).
    """

    def __init__(self, a: Arithmetic[Array], layer: AttentionLayer, X: Array, f: Folded[Array], radii: Array) -> None:
        AnyScoreMap.__init__(self, a, f)
        self._radii: Array = radii.unsqueeze(-1)
        sides = placed_sides(a, layer, X, radii.movedim(0, -1).unsqueeze(-2))
        self._q: PlacedSide[Array] = sides[0]
        self._k: PlacedSide[Array] = sides[1]
        self._scale = up(abs(layer.scale), 2**-50)
        self._asked: Array = f.key_rows.left  # q̂, with the scale
        placed = layer.placed(X)
        keys = placed[1].value
        self._keys: Array = keys - a.number(keys).mean(-2, keepdim=True)
        self._T: tuple[Array, Array] = _derivative(placed[0], layer.q_norm, X), _derivative(placed[1], layer.k_norm, X)
        scaled = self._keys * layer.scale
        self._query_rows: Rows[Array] = Rows(scaled, self._q.maps.mT, None, self._T[0])
        self._key_rows: Rows[Array] = Rows(self._asked, self._k.maps.mT, None, self._T[1])

    @property
    def query_rows(self) -> Rows[Array]:
        return self._query_rows

    @property
    def key_rows(self) -> Rows[Array]:
        return self._key_rows

    # -- the bilinear part

    @cached_property
    def _most(self) -> tuple[Array, Array]:
        """(r, b…, h) max_i L_li of queries, with the scale, and of keys, times ‖M_l‖."""
        return tuple(side.slope.amax(-1) * side.size * size for side, size in ((self._q, self._scale), (self._k, 1.0)))  # type: ignore[return-value]

    @cached_property
    def forms(self) -> tuple[Array, Array]:
        """(r, b…, h, d, m) L^Q L^K |scale| ‖M_l^K‖ M_l^Q, and the same with the roles exchanged."""
        (query, key), (q, k) = self._most, (self._q, self._k)
        by_query = key * (q.slope.amax(-1) * self._scale)
        by_key = query * k.slope.amax(-1)
        return by_query.unsqueeze(-1).unsqueeze(-1) * q.maps, by_key.unsqueeze(-1).unsqueeze(-1) * k.maps

    # -- upper probabilities

    def growth(self, norm_A: Array) -> tuple[Array, Array]:
        p, (T_q, T_k), q, k = self.f.p, self._T, self._q, self._k
        keys = self._query_rows.left
        G_q, G_k = (
            T @ (side.maps.mT @ side.maps).unsqueeze(-3) @ T.mT for T, side in zip(self._T, (q, k), strict=True)
        )
        distances = []
        for rows in blocks(keys):
            z = keys.unsqueeze(-3) - (p[..., rows, :] @ keys).unsqueeze(-2)  # (…, h, i, j, k)
            distances.append(((z @ G_q[..., rows, :, :]) * z).sum(-1))
        own = self._asked.unsqueeze(-2) @ T_k @ (k.maps.mT @ q.maps).unsqueeze(-3) @ T_q.mT
        slope, bend = log_growth(p, joined(distances), own.squeeze(-2) @ keys.mT, self._lengths2(G_k), norm_A)
        # What the derivative leaves out: ½ S ‖γ M‖² of the query, and of the keys together.
        by_query = (q.bend * (q.size.square() * (self._scale / 2)).unsqueeze(-1)).unsqueeze(-1) * self._key_distances
        by_keys = (k.bend.amax(-1) * k.size.square() * 0.5).unsqueeze(-1) * self._asked_lengths
        return slope, bend + by_query + by_keys.unsqueeze(-1)

    def _lengths2(self, gram: Array) -> Array:
        """(b…, h, n, n) ‖a_lij‖² = q̂_i G_j q̂_i."""
        squares = []
        for rows in blocks(self._asked):
            z = self._asked[..., rows, :].unsqueeze(-3)  # (…, h, 1, i, k)
            squares.append(((z @ gram) * z).sum(-1).mT)
        return joined(squares)

    @cached_property
    def apart(self) -> Array:
        return root(distances2(self._keys, self._keys)) * self._most[0].unsqueeze(-1).unsqueeze(-1)

    @cached_property
    def key_lengths2(self) -> Array:
        return (self._asked_lengths * self._most[1].unsqueeze(-1)).square().unsqueeze(-1)

    # -- spreads of scores

    @cached_property
    def own_keys(self) -> Array:
        return (self._asked.unsqueeze(-2) @ self._T[1]).squeeze(-2) @ self._k.maps.mT

    @property
    def moments(self) -> Tensor:
        number, (query, key) = self.a.number, self._most
        turned = (number(self._key_distances) * number(query)[..., None, None]).square()
        return turned + (number(self._asked_lengths) * number(key)[..., None]).square()[..., None]

    def other_keys(self, factors: Array) -> Array:
        slope = self._k.slope.amax(-1).unsqueeze(-1)
        return (factors * self._asked_lengths * slope).amax(-2) * self._joint[1]

    # -- what is not linear

    def bend(self, weights: Array) -> Array:
        weights = self.a.lift(self.a.number(weights))
        asked = self._asked_lengths + self._q.slope * (self._q.size * self._scale).unsqueeze(
            -1
        ) * self._radii.unsqueeze(-1)
        drawn = root((weights * asked.square().unsqueeze(-1)).sum(-2))
        by_key = (self._k.bend * self._k.size.unsqueeze(-1) * drawn).amax(-1).amax(-1)
        return self._query_bend(weights).amax(-1) * self._joint[0] + by_key * self._joint[1]

    def row_bend(self, weights: Tensor, norm: Array) -> tuple[Array, Array]:
        query, key = self._joint
        lifted = self.a.lift(weights)
        sizes = self._k.size.unsqueeze(-1) * self._asked_lengths
        here = root(lifted.diagonal(0, -2, -1)) * self._k.bend * sizes
        own = self._query_bend(lifted) * query + here.amax(-2) * key
        return own, (root(norm) * self._k.bend.amax(-1).unsqueeze(-1) * sizes).amax(-2) * key

    def _query_bend(self, weights: Array) -> Array:
        """(r, b…, n) max_l S_li ‖M_l^Q‖ (Σ_j w_lij ‖k̂_lj - c_li‖²)^½, wherever in the ball the keys are."""
        spread = root((weights * self._key_distances.square()).sum(-1))
        drift = root(weights.amax(-1)) * (self._most[1] * self._radii).unsqueeze(-1)
        return (self._q.bend * (self._q.size * self._scale).unsqueeze(-1) * (spread + drift)).amax(-2)

    @cached_property
    def _joint(self) -> tuple[Array, Array]:
        """‖[M_1, …, M_h]‖ of queries and of keys."""
        query, key = (self.a.matrix_norm(side_by_side(side.maps)) for side in (self._q, self._k))
        return query, key

    @cached_property
    def _asked_lengths(self) -> Array:
        """(b…, h, n) ‖q̂_li‖."""
        return root(self._asked.square().sum(-1))

    @cached_property
    def _key_distances(self) -> Array:
        """(b…, h, n, n) ‖k̂_lj - Σ_m p_lim k̂_lm‖."""
        return root(distances_from_means(self.f.p, self._keys @ self._keys.mT))


def _derivative(placed: Placed[Array], norm: HeadNorm | None, X: Array) -> Array:
    """(b…, h, n, k, m) T: how a query or key moves with the raw ones, of all heads where one norm is over them all."""
    shape = placed.value.shape
    (h, n, k), across = shape[-3:], norm is not None and norm.across
    heads = h if across else 1
    basis = torch.eye(heads * k, dtype=torch.float64, device=X.device)
    basis = basis.reshape(heads * k, *(1 for _ in shape[:-3]), heads, 1, k)
    pulled = placed.pull(lift(basis.expand(heads * k, *shape[:-3], h, n, k), X))  # (heads k, b…, h, n, k)
    if not across:
        return pulled.movedim(0, -2)
    flat = pulled.movedim(-3, -2).flatten(-2, -1).movedim(0, -2)  # (b…, n, h k, h k)
    return flat.reshape(*flat.shape[:-2], h, k, h * k).movedim(-4, -3)
