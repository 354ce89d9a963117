"""First-order exact bounds: the Jacobian at x, plus a bound of the curvature over the ball (docs/math/second-order.md).

For a unit direction G, F(X + εG) - F(X) = ε J(X)G + ∫_0^ε (ε - r) D²F(X + rG)[G, G] dr. With β(r) >= ‖D²F(Z)[G, G]‖_F
on the ball of radius r, δ = ε ‖J(X)‖ + ∫_0^ε (ε - r) β(r) dr; its ratio to the truth tends to 1 as ε tends to 0.
"""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, ValueOperator
from holdfast.attention.mean_split import CommonPart, Coupling, OtherPart
from holdfast.bounds.base import Bound, Evaluation, register_bound
from holdfast.bounds.over_ball import OverBall, refuses
from holdfast.bounds.score_map import root
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import ROOT2, down, up

_CELLS = 512
_LARGE = 2**13  # numbers in one input, beyond which the curvature is evaluated at the asked radii alone …
_NODES = ((2**10, 6), (_LARGE, 3), (math.inf, 1))  # … (the most numbers, and nodes up to each radius) …
_LITTLE = 0.7  # … and directions in which all tokens move alike are told apart where they have this share of ‖J‖


def every_direction(ball: OverBall[Array]) -> Array:
    """(r, b…) ‖D²F[G, G]‖ for any G: Theorem 4, from the rows y'' = 2 Cov(s', g) + Cov(s'', z) + κ₃(s', s', z)."""
    a, sigma, third = ball.a, ball.score_spread, ball.third_spread
    first2 = ball.softmax_norm * (ball.stacked_C * ball.stacked_C) * 4.0
    # Row i is at most u + v, u² = Σ_l first_l² Var(s'_l), v = third · (third moments)^½; with any t > 0,
    # (u + v)² <= (1 + t) u² + (1 + 1/t) v². This t is best where the heads agree.
    best = a.number(third).square() / (a.number(sigma) * a.number(first2).amax(-2).sqrt())
    t = a.lift(best.nan_to_num(nan=1.0).clamp(1e-6, 1e6)).unsqueeze(-2)
    cubic = third.square().unsqueeze(-2)
    weights = (first2 * (t + 1.0)).unsqueeze(-1) * ball.q + (cubic + cubic / t).unsqueeze(-1) * ball.third_weights
    beta = ball.score_movement(weights) + (ball.damping * ball.value_spread).amax(-1) * ball.joint_A * 2.0
    bend = ball.map.bend(ball.value_spread.square().unsqueeze(-1).unsqueeze(-3) * ball.q)
    return beta if bend is None else beta + bend


def where_tokens_agree(ball: OverBall[Array]) -> tuple[Array, Array]:
    """(r, b…) ‖D²F[G, G]‖ for G = 1wᵀ, where all tokens move alike, and ‖D²F[G, G']‖ with such a G and any G'."""
    sigma, eta = ball.score_spread, ball.common_spread
    third, D = ball.third_spread, ball.value_reach.amax(-1).amax(-2)
    damped = ball.damping * ball.value_spread
    # All tokens alike: g does not vary, so that Cov(s', g) vanishes; without rotary positions Cov(s'', z) does too.
    alike = D * eta.square()
    mixed = _rms(ball.damping * eta) * ball.stacked_C + _rms(damped) * ball.rows_A
    if ball.linear.key_variations2 is not None:
        alike = alike + ball.value_spread * ball.joint_A * 2.0
        mixed = mixed + ball.value_spread.amax(-1) * ball.joint_A / down(math.sqrt(D.shape[-1]), 2**-50)
    common = root(alike.square().sum(-1)) / D.shape[-1]
    return common, mixed + _rms(root(D) * eta * third.minimum(root(D) * sigma))


def _rms(rows: Array) -> Array:
    """(Σ_i x_i² / n)^½ over the rows i."""
    return root(rows.square().sum(-1) / rows.shape[-1])


def nodes_for(radii: Tensor, size: int = 0) -> Tensor:
    """(…, e, k) where the curvature is evaluated for each radius (…, e): equal parts of it, itself the last.

    No radius has a part in the nodes of another, so that no value depends on what else is asked. For inputs of a larger
    size there are fewer: every node costs as much as the Jacobian.
    """
    pieces = next(count for most, count in _NODES if size <= most)
    return radii.unsqueeze(-1) * (torch.arange(1, pieces + 1, dtype=torch.float64, device=radii.device) / pieces)


def on_nodes(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, nodes: Tensor) -> OverBall[Array]:
    """The constants on the balls of all nodes (…, e, k), in one row."""
    return a.once("nodes", lambda: OverBall(a, layer, x, a.lift(nodes.flatten(-2, -1))), nodes)


def by_radius(values: Array, nodes: Tensor) -> Array:
    """(b…, e, k) what is known at all nodes, (e k, b…)."""
    in_a_row = values.movedim(0, -1)
    return in_a_row.reshape(*in_a_row.shape[:-1], *nodes.shape[-2:])


def widths(nodes: Tensor) -> Tensor:
    """(…, e, k) lengths of the intervals that end at the nodes, rounded up."""
    return up(torch.diff(nodes, dim=-1, prepend=torch.zeros_like(nodes[..., :1])), 1e-12)


def integrate(a: Arithmetic[Array], values: Array, nodes: Tensor) -> Array:
    """(b…, e) a bound of ∫_0^ε (ε - r) f(r) dr, for values (e k, b…) at the nodes that bound f up to there."""
    starts = torch.cat([torch.zeros_like(nodes[..., :1]), nodes[..., :-1]], -1)
    to_go = (nodes[..., -1:] - starts) + (nodes[..., -1:] - nodes)
    # The factor is more than the rounding of four sums and products.
    return (by_radius(values, nodes) * a.lift(up((nodes - starts) * to_go / 2, 1e-12))).sum(-1)


@final
@register_bound
class SecondOrder(Bound):
    """δ = max over s of ε j(s) + ∫_0^ε (ε - r) b(r, s) dr (Theorem 5).

    A direction has a part c in which all tokens move alike and a rest s, c² + s² = 1. With J the Jacobian at X,
    j(s)² = min(‖J‖², ‖J_c‖² c² + 2 ‖J_cᵀ J_s‖ cs + ‖J_s‖² s²) and b = min(β, β_c c² + 2 β_cs cs + β s²). The maximum is
    bounded on small intervals of s.
    """

    name = "second-order"
    in_networks = ("smallest",)
    score_terms = ("rotary", "bias", "sinks", "norms")
    cost = "three norms of size nd x nd; for every node (about 6) one of size nd x hn², and n of size hn x d"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return refuses(layer)

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        J = AttentionJacobian(layer, x)
        gain, size = a.once("jacobian", lambda: a.norm(J)), x.shape[-2:].numel()
        nodes = nodes_for(a.number(eps), size)
        ball = on_nodes(a, layer, x, nodes)
        every = integrate(a, a.once("every", lambda: every_direction(ball), nodes), nodes)
        plain = gain.unsqueeze(-1) * eps + every
        # A common movement of the tokens moves them all against a sink, and normed queries and keys in many ways.
        if layer.beyond_dot_products is not None:
            return Evaluation(plain, {"jacobian": gain, "curved": every})
        little = torch.zeros_like(a.number(gain), dtype=torch.bool)
        if size > _LARGE:
            about = a.once("about common", lambda: a.norm(CommonPart(J), rough=True))
            little = a.number(about) < _LITTLE * a.number(gain)
            if bool(little.all()):
                return Evaluation(plain, {"jacobian": gain, "common": about, "curved": every})
        common = a.once("common", lambda: a.norm(CommonPart(J)))
        other, coupling = a.once("other", lambda: a.norm(OtherPart(J))), a.once("coupling", lambda: a.norm(Coupling(J)))
        alike, mixed = (integrate(a, part, nodes) for part in where_tokens_agree(ball))

        # Cells of s, finer near 0; (b…, e, cell).
        edges = torch.linspace(0, 1, _CELLS + 1, dtype=torch.float64, device=x.device).square()
        low, high = a.lift(edges[:-1]), a.lift(edges[1:])
        cc, ss = -(low.square() - 1.0), high.square()
        cs = high * root(cc)
        gain2 = (common * common)[..., None] * cc + coupling[..., None] * cs * 2.0 + (other * other)[..., None] * ss
        slope = root(gain2).minimum(gain[..., None])[..., None, :]
        bend = alike[..., None] * cc + mixed[..., None] * cs * 2.0 + every[..., None] * ss
        told = (slope * eps[..., None] + bend.minimum(every[..., None])).amax(-1)
        value = a.lift(torch.where(little.unsqueeze(-1), a.number(plain), a.number(told)))
        terms = {"jacobian": gain, "common": common, "other": other, "coupling": coupling, "curved": every}
        return Evaluation(value, terms | {"curved_common": alike, "curved_mixed": mixed})


@final
@register_bound
class Mixed(Bound):
    """For large eps: the gain along a segment is bounded in two ways, and the output cannot leave the values' hull.

    δ = min(∫_0^ε min(‖J(X)‖ + ∫_0^r β, L(r)) dr, ε ζ + saturation) (Theorems 6 and 7), where
    L(r) = |H| + ‖W^O‖ ‖[π_1 B_1, …, π_h B_h]‖ + ‖stack_l Ω_i √q_lij (M_l - mean)‖ + drift, π_l² = max_j Σ_i q_lij,
    bounds ‖J(Z)‖, and row i of (P_l' - P_l) X' C_l is at most max_j ‖C_lᵀ(x_j - ȳ_i)‖ + √2 ε ‖C_l‖.
    """

    name = "mixed"
    in_networks = ("smallest",)
    score_terms = ("rotary", "bias", "sinks", "norms")
    cost = "that of second-order, and for every node one norm of size nd x hn²"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return refuses(layer)

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        nodes = nodes_for(a.number(eps), x.shape[-2:].numel())
        direct = by_radius(direct_gain(on_nodes(a, layer, x, nodes), layer, x), nodes)
        slope = grown_gain(a, layer, x, nodes).minimum(direct)
        integral = (slope * a.lift(widths(nodes))).sum(-1)
        saturated = _saturated(a, layer, x, eps)
        terms = {"jacobian": _jacobian(a, layer, x), "integral": integral, "saturated": saturated}
        return Evaluation(a.least(integral, saturated), terms)


def grown_gain(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, nodes: Tensor) -> Array:
    """(b…, e, k) ‖J(X)‖ + ∫_0^r β, a bound of ‖J(Z)‖ on the ball of each node."""
    ball = on_nodes(a, layer, x, nodes)
    beta = by_radius(a.once("every", lambda: every_direction(ball), nodes), nodes)
    up_to = torch.ones(nodes.shape[-1], nodes.shape[-1], dtype=torch.float64, device=x.device).triu()
    return (beta * a.lift(widths(nodes))) @ a.lift(up_to) + _jacobian(a, layer, x).unsqueeze(-1).unsqueeze(-1)


def _jacobian(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Array:
    return a.once("jacobian", lambda: a.norm(AttentionJacobian(layer, x)))


def direct_gain(ball: OverBall[Array], layer: AttentionLayer, x: Tensor) -> Array:
    """(r, b…) L(r) >= ‖J(Z)‖."""
    a, q = ball.a, ball.a.lift(ball.q)
    w = layer.weights(a.lift(x))
    received = q[..., : x.shape[-2]].sum(-2).amax(-1)  # (r, b…, h): π_l², of the keys that move
    h, d, _ = w.w_v.shape
    gram = (received @ (w.w_v @ w.w_v.mT).reshape(h, d * d)).reshape(*received.shape[:-1], d, d)
    values = root(a.matrix_norm(gram)) * a.matrix_norm(w.w_o.flatten(0, 1)) + abs(layer.residual)
    return values + ball.score_movement(ball.value_spread.square().unsqueeze(-1).unsqueeze(-3) * q)


def _saturated(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Array:
    """(b…, e) ε ζ and the farthest that the attention outputs can go, however the probabilities change."""
    ball = OverBall(a, layer, x, a.lift(torch.zeros(1, dtype=torch.float64, device=x.device)))
    drift = ball.norm_C.unsqueeze(-1).unsqueeze(-1) * eps.unsqueeze(-2).unsqueeze(-2) * ROOT2
    reach = ball.value_distance.amax(-1).unsqueeze(-1) + drift
    zeta = a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))
    return zeta.unsqueeze(-1) * eps + root(reach.sum(-3).square().sum(-2))
