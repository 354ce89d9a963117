"""The derivative of a layer along one direction, apart for every head and every way in which the direction enters.

Row i of DF(X)G is residual · g_i + Σ_l Cᵀ( Σ_j p_ij g_j + Cov_i(x_j, s'_ij) ), where s'_ij is linear in g_i through the
query and in g_j through the key: the tokens move as values, as queries and as keys (notation as in `jacobian.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from holdfast.attention.layer import AttentionLayer, merge_heads, project
from holdfast.linalg.rounding import Array, as_ball


@dataclass(frozen=True)
class Paths(Generic[Array]):
    """DF(X)G = residual + Σ_l (value_l + query_l + key_l) W_l^O.

    Attributes:
        residual: (…, n, d_out), or None where the layer has none.
        value: (…, h, n, k) what each head's output gains because the values move, before the output map.
        query: the same because the queries move.
        key: the same because the keys move.
        w_o: (h, k, d_out) the output maps.
    """

    residual: Array | None
    value: Array
    query: Array
    key: Array
    w_o: Array

    @property
    def total(self) -> Array:
        """(…, n, d_out) DF(X)G."""
        out = merge_heads(self.value + self.query + self.key) @ self.w_o.flatten(0, 1)
        return out if self.residual is None else out + self.residual


def paths(layer: AttentionLayer, x: Array, g: Array) -> Paths[Array]:
    """The parts of DF(x)g, for a direction g (…, n, d) at x of the same shape, both tensors or both balls."""
    w, parts = layer.weights(x), layer.run(x)
    dq, dk, dv = (project(g, map_, None) for map_ in (w.w_q, w.w_k, w.w_v))
    placed_q, placed_k = layer.placed(x)
    dq, dk = placed_q.push(dq), placed_k.push(dk)
    slope = layer.cap_slope(parts)

    likeliest = as_ball(parts.p).mid.argmax(-1, keepdim=True)

    def as_scores_move(ds: Array) -> Array:
        if slope is not None:
            ds = ds * slope
        if layer.sinks is None:
            # A constant along the row drops out: that of its likeliest key spares the digits where scores are large.
            mid = as_ball(ds).mid
            ds = ds - mid.gather(-1, likeliest.expand(*mid.shape[:-1], 1))
        weighted = parts.p * ds * layer.scale
        return weighted @ parts.v - weighted.sum(-1, keepdim=True) * parts.y

    return Paths(
        residual=g * layer.residual if layer.residual else None,
        value=parts.p @ dv,
        query=as_scores_move(dq @ parts.k.mT),
        key=as_scores_move(parts.q @ dk.mT),
        w_o=w.w_o,
    )
