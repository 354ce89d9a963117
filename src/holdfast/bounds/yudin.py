"""Bounds through the norm of the softmax Jacobian (Yudin et al. 2025; docs/math/softmax.md).

Row i of DF(X)G is H g_i + Σ_l (Σ_j p_lij g_j C_l + V_lᵀ M_li (Q_l g_i + G a_li)): V_l = X C_l, Q_l has rows A_l x_j,
K_l has rows a_li, and ‖M_li‖ <= g_li = g_1(p_li). `yudin`, `yudin-b2` and `yudin-b3` bound ‖DF(X)‖ and differ in what
they make of the last two paths. They hold at X alone; `yudin-ball` takes the probabilities of a whole ball.
"""

from __future__ import annotations

import math
from typing import ClassVar, final

from torch import Tensor

from holdfast.attention import AttentionLayer, ValueOperator, fold
from holdfast.attention.covariances import ValueCovariance
from holdfast.attention.jacobian import Folded
from holdfast.attention.layer import Weights
from holdfast.attention.query_path import QueryBlocks
from holdfast.attention.softmax import covering_norm
from holdfast.bounds.base import Bound, Evaluation, register_bound
from holdfast.bounds.lipschitz import PointBound, register_lipschitz_bound
from holdfast.bounds.over_ball import OverBall
from holdfast.bounds.score_map import centred_rows, root, score_map
from holdfast.bounds.second_order import by_radius, nodes_for, on_nodes, widths
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import frobenius, up


class _AnyYudin(PointBound):
    """What the three have in common."""

    score_terms = ("rotary", "bias")  # a constant of the scores moves the probabilities at x, and nothing else

    @final
    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    @final
    def _zeta(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Array:
        """‖H ⊗ I + Σ_l P_l ⊗ C_lᵀ‖: the residual and the value path, all heads together."""
        return a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))

    @final
    def _softmax(self, a: Arithmetic[Array], f: Folded[Array]) -> Array:
        """(b…, h, n) g_li."""
        return a.lift(covering_norm(a.number(f.p), "g1"))


@final
@register_lipschitz_bound
class Yudin(_AnyYudin):
    """|H| + Σ_l ‖C_l‖ (‖P_l‖ + ‖X‖ (2 ‖X‖ ‖A_l‖ + √n ‖k_l‖) max_i g_li), k_l = scale · W_l^K b_l^Q (Theorem 2)."""

    name = "yudin"
    cost = "norms of n x n, n x d and d x d matrices"
    reference: ClassVar[str] = "yudin2025"

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        X = a.lift(x)
        f, w = fold(layer, X), layer.weights(X)
        g = self._softmax(a, f).amax(-1)
        C, P, A = a.matrix_norm(f.c), a.matrix_norm(f.p), a.matrix_norm(score_map(a, layer, f).forms[0])
        norm_X = a.matrix_norm(X).unsqueeze(-1)
        scores, tokens = norm_X * A * 2.0, up(math.sqrt(x.shape[-2]), 2**-50)
        for shift in _bias_shifts(a, layer, w):
            scores = scores + shift * tokens
        value = (C * (P + norm_X * scores * g)).sum(-1) + abs(layer.residual)
        return Evaluation(value, {"norm_P": P, "norm_C": C, "norm_A": A, "norm_X": norm_X.squeeze(-1), "g1": g})


def _bias_shifts(a: Arithmetic[Array], layer: AttentionLayer, w: Weights[Array]) -> list[Array]:
    """(h) what the biases add to ‖A_l‖ ‖X‖/√n: that of the queries; with rotary positions that of the keys too."""
    rotary = layer.rotary
    if rotary is None:
        return [] if w.b_q is None else [a.matrix_norm((w.b_q.unsqueeze(-2) @ w.w_k.mT) * layer.scale)]
    size = up(abs(layer.scale) * rotary.norm**2, 2**-48)
    crossed = ((w.b_q, w.w_k), (w.b_k, w.w_q))
    return [frobenius(bias, (-1,)) * a.matrix_norm(other) * size for bias, other in crossed if bias is not None]


@final
@register_lipschitz_bound
class YudinB2(_AnyYudin):
    """ζ + Σ_l ‖ΠV_l‖ (max_i g_li ‖ΠQ_l‖ + ‖diag(g_l) K_l‖), Π taking the mean of the tokens off (Theorem 3).

    All heads at once it is ‖[ΠV_1; …; ΠV_h]‖ times the length of the heads' second factors; the smaller one counts.
    """

    name = "yudin-b2"
    cost = "one norm of size nd x nd; norms of n x d matrices"
    reference: ClassVar[str] = "yudin2025; holdfast"

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        f = fold(layer, a.lift(x))
        g, zeta = self._softmax(a, f), self._zeta(a, layer, x)
        maps, V = score_map(a, layer, f), centred_rows(a, f.value_rows).multiplied()
        values = a.matrix_norm(V)
        query, key = g.amax(-1) * maps.query_norm(centred=True), maps.key_norm(g)
        apart = (values * (query + key)).sum(-1)
        together = a.matrix_norm(V.flatten(-3, -2)) * root((query + key).square().sum(-1))
        terms = {"zeta": zeta, "norm_XC": values, "query": query, "key": key, "g1": g.amax(-1)}
        return Evaluation(zeta + apart.minimum(together), terms)


@final
@register_lipschitz_bound
class YudinB3(_AnyYudin):
    """ζ + max_i ‖Σ_l V_lᵀ M_li Q_l‖ + Σ_l ‖diag(σ_l) K_l‖ with σ_li = ‖M_li V_l‖ (Theorem 4).

    All heads at once the last term is ‖[diag(σ) K_1; …; diag(σ) K_h]‖ with σ_i = ‖[M_1i V_1; …; M_hi V_h]‖; the smaller
    one counts.
    """

    name = "yudin-b3"
    cost = "one norm of size nd x nd; for every token one of size d x d, one of size hn x d and h of size n x d"
    reference: ClassVar[str] = "yudin2025; holdfast"

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        f = fold(layer, a.lift(x))
        zeta = self._zeta(a, layer, x)
        V, Q = centred_rows(a, f.value_rows), centred_rows(a, f.query_rows)  # spares digits
        maps = score_map(a, layer, f)
        query = a.norm(QueryBlocks(f.p, V, Q)).amax(-1)
        sigma = a.norm(ValueCovariance(V, f.p))  # (b…, n), all heads together
        sigmas = a.norm(ValueCovariance(V.multiplied().unsqueeze(-3), f.p.unsqueeze(-3)))  # (b…, h, n)
        key = maps.key_norm(sigmas).sum(-1).minimum(maps.joint_key_norm(sigma))
        return Evaluation(zeta + query + key, {"zeta": zeta, "query": query, "key": key, "sigma": sigmas.amax(-1)})


@final
@register_bound
class YudinBall(Bound):
    """∫_0^ε L(r) dr with L(r) >= ‖DF(Z)‖ for ‖Z - X‖ <= r: `yudin-b2` with upper probabilities (Theorem 5).

    L = min(ζ + r Σ_l ‖C_l‖ m_l, |H| + Σ_l ‖C_l‖ π_l) + Σ_l (‖ΠV_l‖ + r ‖C_l‖) m_l, or the last term with all heads at
    once; m_l = max_i λ_li (‖ΠQ_l‖ + 2r ‖A_l‖) + ‖diag(λ_l) K_l‖, λ_li >= ‖M_li‖ and π_l >= ‖P_l‖ on the ball.
    """

    name = "yudin-ball"
    in_networks = ("smallest",)
    score_terms = ("rotary", "bias")
    cost = "one norm of size nd x nd; for every node (about 6) norms of n x n and n x d matrices"
    reference: ClassVar[str] = "yudin2025; holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        nodes = nodes_for(a.number(eps), x.shape[-2:].numel())
        ball = on_nodes(a, layer, x, nodes)
        zeta = a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))
        slope = by_radius(slope_on_balls(ball, zeta, layer.residual), nodes)
        value = (slope * a.lift(widths(nodes))).sum(-1)
        return Evaluation(value, {"zeta": zeta, "norm_C": ball.norm_C, "norm_A": ball.norm_A})


def slope_on_balls(ball: OverBall[Array], zeta: Array, residual: float) -> Array:
    """(r, b…) L(r) >= ‖DF(Z)‖ (Theorem 5)."""
    a, f, r, C = ball.a, ball.f, ball.r(1), ball.norm_C
    V = centred_rows(a, f.value_rows).multiplied()
    moved = attention_movement(ball)
    values = value_path_on_balls(ball, zeta, residual, moved)
    apart = ((a.matrix_norm(V) + C * r) * moved).sum(-1)
    stacked = a.matrix_norm(V.flatten(-3, -2)) + ball.stacked_C * ball.r(0)
    return values + apart.minimum(stacked * root(moved.square().sum(-1)))


def attention_movement(ball: OverBall[Array]) -> Array:
    """(r, b…, h) m_l."""
    lam, keys = ball.softmax_norm, ball.linear.key_norm(ball.softmax_norm)
    return lam.amax(-1) * (ball.linear.query_norm(centred=True) + ball.norm_A * ball.r(1) * 2.0) + keys


def value_path_on_balls(ball: OverBall[Array], zeta: Array, residual: float, moved: Array) -> Array:
    """(r, b…) a bound of ‖H ⊗ I + Σ_l P_l(Z) ⊗ C_lᵀ‖, for m_l = moved (r, b…, h): P_l moves by at most r m_l."""
    a, r, C = ball.a, ball.r(1), ball.norm_C
    q = a.lift(ball.q)
    attention = a.matrix_norm(q).minimum(root(q.sum(-2).amax(-1)))  # rows of P sum to 1
    grown = zeta + (C * moved * r).sum(-1)
    return grown.minimum((C * attention).sum(-1) + abs(residual))
