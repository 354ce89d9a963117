"""The derivative of a layer along one direction, apart for every head and every way in which the direction enters.

Row i of DF(X)G is residual · g_i + Σ_l Cᵀ( Σ_j p_ij g_j + Cov_i(x_j, s'_ij) ), where s'_ij is linear in g_i through the
query and in g_j through the key: the tokens move as values, as queries and as keys (notation as in `jacobian.py`; the
formulas are those of `derivatives.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from holdfast.attention.derivatives import AttentionPass
from holdfast.attention.layer import AttentionLayer, merge_heads
from holdfast.linalg.rounding import Array


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
    value, query, key = AttentionPass(layer, x).paths(g)
    return Paths(g * layer.residual if layer.residual else None, value, query, key, layer.weights(x).w_o)
