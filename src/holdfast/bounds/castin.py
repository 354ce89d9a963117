"""Lipschitz constants of attention on sequences of bounded tokens (after Castin, Ablin and Peyré 2024).

For head l: A_l = scale · W_l^Q W_l^Kᵀ, C_l = W_l^V W_l^O, a_l = ‖A_l‖, c_l = ‖C_l‖, β_l = |scale| ‖W_l^K b_l^Q‖. A
token of length at most R has a key vector a_li = A_lᵀx_i + scale · W_l^K b_l^Q of length at most α_l = a_l R + β_l, so
all scores of a row lie within 2 α_l R of each other. Biases other than b^Q add constants along rows and drop out.
Proofs: docs/math/regularity.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Generic, final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer, fold
from holdfast.attention.layer import Weights
from holdfast.attention.moments import RowMoments
from holdfast.attention.query_path import QueryBlocks
from holdfast.bounds.base import Evaluation
from holdfast.bounds.lipschitz import BallBound, PointBound, register_lipschitz_bound
from holdfast.bounds.score_map import score_map
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import as_ball, frobenius, up


@dataclass(frozen=True)
class Heads(Generic[Array]):
    """What the bounds on balls see of a layer, for radii (r).

    Attributes:
        w: the weights.
        maps: (h, d, d_out) C_l.
        c: (h, 1) ‖C_l‖.
        reach: (h, r) α_l R.
        spread: (h, r) half of how far the scores of a row can lie apart: α_l R, but for a key bias that is turned.
        joint_reach: (r) R times a bound of ‖[a_1i … a_hi]‖, the key vectors of one token in all heads; None where
            positions turn them.
        query_gain: (r) a bound of ‖Σ_l C_lᵀ Cov_l(x) A_lᵀ‖ for tokens in the ball, whatever the probabilities.
        query_gains: (h, r) a bound of ‖Cov_l(x) A_lᵀ‖ for each head.
        turned: whether there are rotary positions.
        terms: the norms, for the result.
    """

    w: Weights[Array]
    maps: Array
    c: Array
    reach: Array
    spread: Array
    joint_reach: Array | None
    query_gain: Array
    query_gains: Array
    turned: bool
    terms: dict[str, Array]


def heads_on_ball(a: Arithmetic[Array], layer: AttentionLayer, radius: Array) -> Heads[Array]:
    """Norms of the heads, computed once for all bounds."""
    return a.once("heads on ball", lambda: _heads_on_ball(a, layer, radius))


def _heads_on_ball(a: Arithmetic[Array], layer: AttentionLayer, radius: Array) -> Heads[Array]:
    w = layer.weights(radius)
    # A head that writes nothing may attend as it likes: without queries, its gain cannot overflow.
    idle = torch.stack([(as_ball(t).mid == 0).flatten(1).all(1) for t in (w.w_v, w.w_o)]).any(0)
    w_q, C = w.w_q.masked_fill(idle[:, None, None], 0.0), w.w_v @ w.w_o
    b_q = None if w.b_q is None else w.b_q.masked_fill(idle[:, None], 0.0)
    c = a.matrix_norm(C)
    if layer.rotary is not None:
        return _turned_heads(a, layer, radius, replace(w, w_q=w_q, b_q=b_q), C, c)
    A = w_q @ w.w_k.mT * layer.scale
    norm_A = a.matrix_norm(A)
    terms = {"norm_A": norm_A, "norm_C": c}
    alpha, joint_alpha = norm_A.unsqueeze(-1) * radius, a.matrix_norm(A.flatten(0, 1)) * radius
    if b_q is not None:
        keys = (w.w_k @ b_q.unsqueeze(-1)).squeeze(-1) * layer.scale
        terms["beta"] = frobenius(keys, (-1,))
        alpha, joint_alpha = alpha + terms["beta"].unsqueeze(-1), joint_alpha + a.matrix_norm(keys)
    # ‖Cov‖ <= R², and Σ_l C_lᵀ Cov_l A_lᵀ = [C_1ᵀ … C_hᵀ] diag(Cov_l) [A_1 … A_h]ᵀ.
    apart = (norm_A * c).sum(-1)
    together = a.matrix_norm(A.movedim(0, 1).flatten(1, 2)) * a.matrix_norm(C.flatten(0, 1))
    query_gain, query_gains = apart.minimum(together) * radius.square(), norm_A.unsqueeze(-1) * radius.square()
    reach = alpha * radius
    return Heads(w, C, c.unsqueeze(-1), reach, reach, joint_alpha * radius, query_gain, query_gains, False, terms)


def _turned_heads(
    a: Arithmetic[Array], layer: AttentionLayer, radius: Array, w: Weights[Array], C: Array, c: Array
) -> Heads[Array]:
    """The same with rotary positions: queries and keys are at most ρ(‖W‖R + |b|) long (docs/math/rotary.md)."""
    assert layer.rotary is not None
    size = up(abs(layer.scale) * layer.rotary.norm**2, 2**-48)
    query, key = a.matrix_norm(w.w_q).unsqueeze(-1), a.matrix_norm(w.w_k).unsqueeze(-1)
    longest, extra = query * radius, key * 0.0
    if w.b_q is not None:
        longest = longest + frobenius(w.b_q, (-1,)).unsqueeze(-1)
    if w.b_k is not None:
        extra = frobenius(w.b_k, (-1,)).unsqueeze(-1)
    alpha = longest * key * size
    query_gains = query * (key * radius + extra) * radius * size
    terms = {"norm_A": (query * key * size).squeeze(-1), "norm_C": c}
    apart = (query_gains * c.unsqueeze(-1)).sum(-2)
    reach, spread = alpha * radius, alpha * radius + longest * extra * size
    return Heads(w, C, c.unsqueeze(-1), reach, spread, None, apart, query_gains, True, terms)


def value_and_key_gain(a: Arithmetic[Array], heads: Heads[Array], log_columns: Array, p: float) -> Array:
    """(r) The gain of the value and key paths of all heads, where the columns of P_l sum to at most e^log_columns.

    Σ_l c_l g_l K_l^{1/p}; for p = 2 and many heads the least of this and of two forms that see them together (Lemma 3).
    """
    gains = (log_path_gain(heads.reach, p, turned=heads.turned) + log_columns / p).exp()
    apart = (gains * heads.c).sum(-2)
    if p != 2 or heads.maps.shape[0] == 1 or not bool(torch.isfinite(a.number(apart)).all()):
        return apart
    through_outputs = _gain_through_outputs(a, heads, gains)
    if heads.joint_reach is None:
        return apart.minimum(through_outputs)
    values = _gain_through_values(a, heads, heads.joint_reach, (log_columns * 0.5).exp())
    return apart.minimum(through_outputs).minimum(values)


def _gain_through_outputs(a: Arithmetic[Array], heads: Heads[Array], gains: Array) -> Array:
    """(Σ_l w_l)^½ ‖[g_l C_l / √w_l]_l‖: any w_l > 0 will do, and for w_l = g_l c_l it is not above Σ_l g_l c_l."""
    h, d, d_out = heads.maps.shape
    weights = a.number(gains * heads.c)
    largest = weights.amax(-2, keepdim=True)
    weights = (weights / torch.where(largest > 0, largest, 1.0)).clamp(min=1e-9)
    scaled = gains / a.lift(weights).sqrt()
    stacked = scaled.mT.unsqueeze(-1).unsqueeze(-1) * heads.maps
    return a.matrix_norm(stacked.reshape(-1, h * d, d_out)) * a.lift(weights).sum(-2).sqrt()


def _gain_through_values(a: Arithmetic[Array], heads: Heads[Array], joint_reach: Array, roots: Array) -> Array:
    """‖[W_1^O; …; W_h^O]‖ (‖[√K_1 W_1^V … √K_h W_h^V]‖ + max_l ‖W_l^V‖ · joint reach · max_l √K_l)."""
    w = heads.w
    scaled = roots.mT.unsqueeze(-1).unsqueeze(-1) * w.w_v  # (r, h, d, k)
    value = a.matrix_norm(scaled.movedim(-3, -2).flatten(-2, -1))
    key = joint_reach * a.matrix_norm(w.w_v).amax(-1) * roots.amax(-2)
    return a.matrix_norm(w.w_o.flatten(0, 1)) * (value + key)


def log_path_gain(reach: Array, p: float, *, turned: bool = False) -> Array:
    """The logarithm of the gain g of one row's value and key paths, where αR = reach (Lemma 2).

    |Σ_j p_ij (I + (x_j - m_i) a_iᵀ) ε_j| <= g (Σ_j p_ij |ε_j|^p)^(1/p). With rotary positions, `turned`, every j has
    an a_ij of its own, and 1 + αR takes the place of √(1 + α²R²).
    """
    spread = (reach + 1.0).log() * 2.0 if turned else (reach.square() + 1.0).log()
    if p >= 2:
        return spread * 0.5  # g = √(1 + α²R²)
    # g = (1 + 2αR)^(2/p - 1) (1 + α²R²)^(1 - 1/p); the differences are exact for 1 <= p <= 2.
    return (reach * 2.0 + 1.0).log() * (2 - p) / p + spread * (p - 1) / p


class _PublishedBall(BallBound):
    """√3 c (n + 4 n α²R² + a²R⁴)^½ for each head, summed, plus |residual|: without a query bias α = aR (Theorem 1)."""

    cost: ClassVar[str] = "norms of d x d matrices"
    reference: ClassVar[str] = "castin2024"
    score_terms = ("rotary",)

    @final
    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        heads, n = heads_on_ball(a, layer, radius), float(tokens)
        lengths = ((heads.reach.square() * 4.0 + 1.0) * n + heads.query_gains.square()) * 3.0
        value = (heads.c * lengths.sqrt()).sum(-2) + abs(layer.residual)
        return Evaluation(value, heads.terms)


@final
@register_lipschitz_bound
class CastinBall(_PublishedBall):
    """The bound of the paper for full attention: it grows like √n."""

    name = "castin-ball"
    assumptions = "no mask; p = 2"

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        if layer.causal or layer.mask is not None:
            return "the layer is masked; use castin-masked"
        return _only_two(p)


@final
@register_lipschitz_bound
class CastinMasked(_PublishedBall):
    """The bound of the paper for masked attention; the proof holds for any mask."""

    name = "castin-masked"
    assumptions = "causal or masked; p = 2"

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        if not layer.causal and layer.mask is None:
            return "the layer has no mask; use castin-ball"
        return _only_two(p)


def _only_two(p: float) -> str | None:
    return None if p == 2 else f"it is proved for p = 2, not for p = {p:g}; use castin-sharp"


@final
@register_lipschitz_bound
class CastinSharp(BallBound):
    """g K^(1/p) for each head and R² ‖Σ_l C_lᵀ · A_lᵀ‖, any mask, any p (Theorem 2): never above the other two.

    g = √(1 + α²R²) for p >= 2, and K >= max_j Σ_i p_ij is the largest column sum that scores within 2αR of each other
    allow: n / (1 + (n-1) e^{-2αR}) without a mask.
    """

    name = "castin-sharp"
    cost = "norms of d x d matrices, and of one hd x d matrix for each radius"
    reference = "holdfast"
    score_terms = ("rotary",)

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        return None

    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        heads = heads_on_ball(a, layer, radius)
        K = _column_sums(a, layer, heads.spread, tokens)
        value = value_and_key_gain(a, heads, K.log(), p)
        terms = heads.terms | {"column_sum": K, "query_gain": heads.query_gain}
        return Evaluation(value + heads.query_gain + abs(layer.residual), terms)


def _column_sums(a: Arithmetic[Array], layer: AttentionLayer, spread: Array, tokens: int) -> Array:
    """(h, r) K = max_j Σ_i 1 / (1 + (k_i - 1) e^{-2αR}) over the rows i that may attend to j and have k_i keys."""
    ratio = (spread * -2.0).exp()
    one = a.lift(torch.ones((), dtype=torch.float64, device=ratio.device))
    allowed = layer.allowed(tokens)
    if allowed is None:
        return one * float(tokens) / (ratio * float(tokens - 1) + 1.0)
    pairs = allowed.to(torch.float64).reshape(-1, tokens, tokens)
    others = pairs.sum(-1, keepdim=True).mT - 1
    largest = one / (ratio.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1) * others + 1.0)
    return (largest @ pairs).amax((-3, -2, -1))


@final
@register_lipschitz_bound
class CastinData(PointBound):
    """√(max_j Σ_i ρ_i² Σ_l w_l p_lij) + max_i ‖residual + Σ_l C_lᵀ Cov_li A_lᵀ‖ at x, any mask (Theorem 7).

    ρ_i² = ‖[C_l / √w_l]_l‖² + ‖Σ_l |a_li|² C_lᵀ Cov_li C_l / w_l‖ with w_l = ‖C_l‖: the value and key paths together;
    with rotary positions the square of the sum of the roots, |a_li| the largest of |a_lij|. The last term is the query
    path.
    """

    name = "castin-data"
    cost = "for every token, a norm of a d x d matrix and one of an hn x d matrix"
    reference = "holdfast"
    score_terms = ("rotary", "bias")

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        f = fold(layer, a.lift(x))
        h, d, d_out = f.c.shape
        norms = a.number(a.matrix_norm(f.c))
        largest = float(norms.max())
        w = a.lift((norms / largest).clamp(min=1e-9) if largest > 0 else torch.ones_like(norms))
        value = a.matrix_norm((f.c / w.sqrt().unsqueeze(-1).unsqueeze(-1)).reshape(h * d, d_out))
        key_squares = score_map(a, layer, f).key_lengths2  # (b…, h, n, 1)
        shares = w.unsqueeze(-1).unsqueeze(-1)
        key = a.norm(RowMoments(f.value_rows, f.p * key_squares / shares))  # (b…, n)
        rho_squares = value.square() + key.square() if layer.rotary is None else (key + value).square()
        columns = (rho_squares.unsqueeze(-2).unsqueeze(-2) @ (f.p * shares)).sum(-3).squeeze(-2).amax(-1)
        query = a.norm(QueryBlocks.of(f, layer.residual)).amax(-1)
        terms = {"value_gain": value, "key_gain": key.amax(-1), "query_gain": query, "column_sum": columns}
        return Evaluation(columns.sqrt() + query, terms)
