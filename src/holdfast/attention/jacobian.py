"""The Jacobian of an attention layer in closed form, and the two linear maps of the LoFAST splitting.

With s_ij the scores and p_i their softmax, a_i = ∂s_ij/∂x_j (the key side; the same for all j), A x_j = ∂s_ij/∂x_i up
to a term that is constant along the row and that softmax ignores, C = W^V W^O and ȳ_i = Σ_j p_ij x_j:

    J_ij = residual δ_ij I + Σ_l p_ij Cᵀ (I + (x_j - ȳ_i) a_iᵀ) + δ_ij Σ_l Cᵀ Cov_i(x) Aᵀ.

Products with J need no such block: `mv` is the derivative of one pass, `rmv` its transpose. With rotary positions
a_i depends on j too (`dense_rows.py`), and so does what the key bias adds to the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from holdfast.attention.dense_rows import PlainScores, TurnedScores, enclose_columns, enclose_rows
from holdfast.attention.layer import AttentionLayer, join_heads, merge_heads, project, split_heads
from holdfast.attention.moments import ScoreMoments
from holdfast.attention.rows import Rows
from holdfast.attention.tangents import HeadTangents
from holdfast.linalg.operator import AssembledOperator, Enclosure, Gram, ProvableOperator
from holdfast.linalg.rounding import UNIT, Array, Ball, as_ball, frobenius_upper, gamma, up


@dataclass(frozen=True)
class FoldedValues(Generic[Array]):
    """The layer at x with its value and output maps folded together; biases that cancel are left out.

    Attributes:
        p: (…,h,n,n) probabilities.
        c: (h,d,d_out) C = W^V W^O.
        value_rows: (…,h,n,d_out) the tokens' values X C, also as `v`.
    """

    p: Array
    c: Array
    value_rows: Rows[Array]

    @cached_property
    def v(self) -> Array:
        return self.value_rows.multiplied()

    @cached_property
    def y(self) -> Array:
        """(…,h,n,d_out) P X C."""
        return self.p @ self.v


@dataclass(frozen=True)
class Folded(FoldedValues[Array]):
    """The layer at x with all its maps folded together; biases that cancel in every derivative are left out.

    Attributes:
        scores: (…,h,n,n) scores up to a constant along each row, -inf where masked.
        key_rows: (…,h,n,d) row i is a_i = ∂s_ij/∂x_j = Aᵀx_i + scale · W^K b^Q, also as `key`.
        query_rows: (…,h,n,d) row j is A x_j, which is ∂s_ij/∂x_i up to a constant along the row, also as `query`.

    With rotary positions both are others for every pair: a_ij = scale · W^K R_jᵀ R_i q_i, and u_ij = scale · W^Q R_iᵀ
    R_j k_j takes the place of A x_j. Of the key bias the mean of R_j b^K is constant along the row, and left out.
    """

    scores: Array
    key_rows: Rows[Array]
    query_rows: Rows[Array]

    @cached_property
    def key(self) -> Array:
        return self.key_rows.multiplied()

    @cached_property
    def query(self) -> Array:
        return self.query_rows.multiplied()


def fold(layer: AttentionLayer, x: Array) -> Folded[Array]:
    """Multiplies the maps of the layer out at x."""
    w, rotary = layer.weights(x), layer.rotary
    if layer.beyond_dot_products is not None:
        # Neither a constant along a row of scores nor one of the values drops out.
        placed_q, placed_k = layer.placed(x)
        q, k, v = placed_q.value, placed_k.value, project(x, w.w_v, w.b_v)
    else:
        q, v = project(x, w.w_q, w.b_q), project(x, w.w_v, None)
        k = project(x, w.w_k, None)  # the key bias adds q_i · b_k to every score of row i, which softmax ignores
        if rotary is not None:
            q, k = rotary.turn(q), rotary.turn_keys(k, w.b_k)
    scores = layer.complete(q @ k.mT * layer.scale)
    return Folded(
        layer.softmax(scores),
        c=w.w_v @ w.w_o,
        value_rows=Rows(v, w.w_o),
        scores=scores,
        key_rows=Rows(q * layer.scale, w.w_k.mT, rotary),
        query_rows=Rows(k * layer.scale, w.w_q.mT, rotary),
    )


@final
class AttentionJacobian(AssembledOperator):
    """DF(x) as an operator from (n, d) to (n, d_out); the batch is that of x.

    `mv` costs two attention passes, `rmv` two and a half; the pass at x itself is kept.
    """

    def __init__(self, layer: AttentionLayer, x: Float[Tensor, "*b n d"]) -> None:
        self._layer, self._x = layer, x
        self._part: tuple[tuple[int, int], AttentionJacobian] | None = None
        w, parts = layer.weights(x), layer.run(x)
        self._heads = heads = HeadTangents(layer, x, parts)
        maps = (w.w_q, w.w_k, w.w_v)
        if x.ndim == 2 and len(x) < layer.k and not heads.placed:
            # Few tokens: dq meets nothing but the n keys, and dk the n queries, so these join the maps.
            maps = (w.w_q @ heads.k.mT, w.w_k @ heads.q.mT, w.w_v)
            heads.join_scores()
        self._w_in, self._w_out = [join_heads(m) for m in maps], w.w_o.flatten(0, 1)
        super().__init__(x.shape[:-2], x.shape[-2:], torch.Size((x.shape[-2], layer.d_out)), x)

    def mv(self, v: Float[Tensor, "*m n d"]) -> Float[Tensor, "*m n d_out"]:
        dq, dk, dv = (split_heads(v @ w, self._layer.h) for w in self._w_in)
        out = merge_heads(self._heads.push(dq, dk, dv)) @ self._w_out
        return out + self._layer.residual * v if self._layer.residual else out

    def rmv(self, u: Float[Tensor, "*m n d_out"]) -> Float[Tensor, "*m n d"]:
        parts = [u.new_zeros(*u.shape[:-1], w.shape[-1]) for w in self._w_in]
        dq, dk, dv = (split_heads(t, self._layer.h) for t in parts)
        self._heads.pull(split_heads(u @ self._w_out.mT, self._layer.h), (dq, dk, dv))
        through_q, through_k, through_v = (t @ w.mT for t, w in zip(parts, self._w_in, strict=True))
        out = through_q + through_k + through_v
        return out + self._layer.residual * u if self._layer.residual else out

    def part(self, start: int, stop: int) -> AttentionJacobian:
        """The last part is kept, and its matrix with it: several norms are made of the same one."""
        if self._part is None or self._part[0] != (start, stop):
            x = self._x.reshape(-1, *self.domain)[start:stop]
            self._part = (start, stop), AttentionJacobian(self._layer.part(self.batch, start, stop), x)
        return self._part[1]

    def enclose(self) -> Enclosure:
        return self._enclosure

    @cached_property
    def _enclosure(self) -> Enclosure:
        X = Ball.exact(self._x)
        if self._layer.beyond_dot_products is not None:
            return enclose_columns(self._layer, X)
        if self._layer.rotary is not None:
            turned = TurnedScores(self._layer, self._layer.rotary, X)
            return enclose_rows(fold(self._layer, X), self._layer.residual, turned)
        folded = fold(self._layer, X)
        return enclose_rows(folded, self._layer.residual, PlainScores(folded))


@final
class ValueOperator(AssembledOperator):
    """H ⊗ I + Σ_l P_l ⊗ (W_l^V W_l^O)ᵀ: G ↦ HG + Σ_l P_l G W_l^V W_l^O (LoFAST, Lemma 1).

    The output moves by its image when the probabilities are held fixed; its norm is ζ(X).
    """

    def __init__(self, layer: AttentionLayer, x: Float[Tensor, "*b n d"]) -> None:
        self._layer, self._x = layer, x
        w = layer.weights(x)
        self._w_v, self._w_out = join_heads(w.w_v), w.w_o.flatten(0, 1)
        self._p = layer.run(x).p
        super().__init__(x.shape[:-2], x.shape[-2:], torch.Size((x.shape[-2], layer.d_out)), x)

    def mv(self, v: Float[Tensor, "*m n d"]) -> Float[Tensor, "*m n d_out"]:
        out = merge_heads(self._p @ split_heads(v @ self._w_v, self._layer.h)) @ self._w_out
        return out + self._layer.residual * v if self._layer.residual else out

    def rmv(self, u: Float[Tensor, "*m n d_out"]) -> Float[Tensor, "*m n d"]:
        out = merge_heads(self._p.mT @ split_heads(u @ self._w_out.mT, self._layer.h)) @ self._w_v.mT
        return out + self._layer.residual * u if self._layer.residual else out

    def part(self, start: int, stop: int) -> ValueOperator:
        x = self._x.reshape(-1, *self.domain)[start:stop]
        return ValueOperator(self._layer.part(self.batch, start, stop), x)

    def enclose(self) -> Enclosure:
        return enclose_rows(fold(self._layer, Ball.exact(self._x)), self._layer.residual, scores=None)


@final
class ScoreOperator(ProvableOperator):
    """G ↦ G A_l Xᵀ + X A_l Gᵀ on the allowed pairs: how the scores move (LoFAST, Lemma 2).

    T_ij = g_i · (A x_j) + a_i · g_j. The n² × nd matrix M_l(X) of the paper is never formed: its Gram matrix has a
    closed form on both sides, and the smaller one is taken.

    Args:
        query: (*batch, n, d) rows A x_j, exact or enclosed.
        key: (*batch, n, d) rows a_i.
        allowed: (*batch, n, n) bool, or None where every pair is allowed.
    """

    def __init__(self, query: Tensor | Ball, key: Tensor | Ball, allowed: Tensor | None = None) -> None:
        self._query, self._key = as_ball(query), as_ball(key)
        values, n = self._query.mid, query.shape[-2]
        pairs = values.new_ones(n, n) if allowed is None else allowed.to(values)
        self._allowed = pairs.expand(*query.shape[:-2], n, n)
        super().__init__(query.shape[:-2], query.shape[-2:], torch.Size((n, n)), values)

    def mv(self, v: Float[Tensor, "*m n d"]) -> Float[Tensor, "*m n n"]:
        return (v @ self._query.mid.mT + self._key.mid @ v.mT) * self._allowed

    def rmv(self, u: Float[Tensor, "*m n n"]) -> Float[Tensor, "*m n d"]:
        u = u * self._allowed
        return u @ self._query.mid + u.mT @ self._key.mid

    @property
    def doubles(self) -> int:
        return 2 * min(self.domain.numel(), self.codomain.numel()) ** 2

    def part(self, start: int, stop: int) -> ScoreOperator:
        n, d = self.domain
        query, key = (t.reshape(-1, n, d)[start:stop].double() for t in (self._query, self._key))
        return ScoreOperator(query, key, self._allowed.reshape(-1, n, n)[start:stop])

    def gram(self) -> Gram:
        n, d = self.domain
        matrix, error = self._gram_of_scores() if n < d else self._gram_of_tokens()
        return Gram(matrix, error, torch.ones_like(error))

    def _gram_of_scores(self) -> tuple[Tensor, Tensor]:
        """M M*: ((i,j),(k,l)) ↦ δ_ik Ax_j·Ax_l + δ_jl a_i·a_k + δ_il a_k·Ax_j + δ_jk a_i·Ax_l on allowed pairs."""
        n = self.domain[0]
        qq, kk, kq = self._query @ self._query.mT, self._key @ self._key.mT, self._key @ self._query.mT
        eye = torch.eye(n, dtype=torch.float64, device=self.device)
        G = torch.einsum("ik,bjl->bijkl", eye, qq.mid)
        G = G + torch.einsum("jl,bik->bijkl", eye, kk.mid)
        G = G + torch.einsum("il,bkj->bijkl", eye, kq.mid)
        G = G + torch.einsum("jk,bil->bijkl", eye, kq.mid)
        pairs = self._allowed.flatten(-2)
        matrix = G.reshape(-1, n * n, n * n) * pairs.unsqueeze(-1) * pairs.unsqueeze(-2)
        # Each of the four parts stands n times; their sum is rounded three times.
        radius = Ball.exact(torch.zeros_like(G[:, 0, 0, 0, 0]))
        for part in (qq, kk, kq, kq):
            radius = radius + frobenius_upper(part.rad) + Ball.exact(frobenius_upper(part.mid)) * gamma(4)
        return matrix, (radius * up(math.sqrt(n), 4 * UNIT)).upper

    def _gram_of_tokens(self) -> tuple[Tensor, Tensor]:
        """M* M: block (i,j) is δ_ij (Σ_k m_ik Ax_k (Ax_k)ᵀ + m_ki a_k a_kᵀ) + m_ij Ax_j a_iᵀ + m_ji a_j (Ax_i)ᵀ."""
        n, d = self.domain
        Q, K, m = self._query, self._key, self._allowed
        own = _outer_sums(m, Q) + _outer_sums(m.mT, K)
        cross = torch.einsum("bij,bjc,bie->bicje", m, Q.mid, K.mid)
        G = cross + torch.einsum("bji,bjc,bie->bicje", m, K.mid, Q.mid)
        tokens = torch.arange(n, device=self.device)
        G[:, tokens, :, tokens, :] += own.mid.movedim(1, 0)
        q, k = Ball.exact(frobenius_upper(Q.mid)), Ball.exact(frobenius_upper(K.mid))
        dq, dk = Ball.exact(frobenius_upper(Q.rad)), Ball.exact(frobenius_upper(K.rad))
        # ‖(m_ij q_j k_iᵀ)_ij‖_F <= ‖Q‖_F ‖K‖_F, in exact and in rounded form; each product and sum is rounded.
        products = (dq * (k + dk) + q * dk + q * k * gamma(4)) * 2.0
        diagonal = Ball.exact(frobenius_upper(own.rad, (-3, -2, -1)))
        diagonal = diagonal + Ball.exact(frobenius_upper(own.mid, (-3, -2, -1))) * gamma(4)
        return G.reshape(-1, n * d, n * d), (products + diagonal).upper


def score_operator(layer: AttentionLayer, x: Array) -> ProvableOperator:
    """The operator of Lemma 2 for every head of the layer at x: the batch is that of x, then the heads."""
    return score_operator_of(fold(layer, x), layer.allowed(x.shape[-2]))


def score_operator_of(f: Folded[Tensor] | Folded[Ball], allowed: Bool[Tensor, "*b n n"] | None) -> ProvableOperator:
    """The same of a folded layer."""
    pairs = None if allowed is None else allowed.unsqueeze(-3)
    if f.query_rows.rotary is None:
        return ScoreOperator(f.query, f.key, pairs)
    weights = torch.ones_like(as_ball(f.p).mid) if pairs is None else pairs.to(as_ball(f.p).mid).expand(*f.p.shape)
    return ScoreMoments(f.query_rows.by_head(), f.key_rows.by_head(), weights.unsqueeze(-3), centred=False)


def _outer_sums(weights: Tensor, rows: Ball) -> Ball:
    """Σ_j w_ij r_j r_jᵀ for every i: (b, n, d, d); one product where all rows of the weights agree."""
    if bool((weights == 1).all()):
        return (rows.mT @ rows).unsqueeze(-3) * torch.ones_like(weights[..., 0]).unsqueeze(-1).unsqueeze(-1)
    d = rows.shape[-1]
    outer = (rows.unsqueeze(-1) * rows.unsqueeze(-2)).flatten(-2, -1)
    return (Ball.exact(weights) @ outer).reshape(*weights.shape[:-1], d, d)
