"""Bounds that improve LoFAST's splitting: `plus` in closed form, `cov` with the probabilities of the whole ball.

F(X') - F(X) = [H Γ + Σ_l P_l Γ C_l] + Σ_l (P_l' - P_l) X' C_l as in LoFAST; the first part is ζ(X) ε. In the second,
all heads are bounded together in the output space, and rows of P_l' - P_l sum to zero, so a common value drops out of
X' C_l and a common score out of each row (docs/math/second-order.md, theorems 1 and 2).
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer, ValueOperator
from holdfast.attention.moments import ScoreMoments
from holdfast.bounds.base import Bound, Evaluation, register_bound
from holdfast.bounds.over_ball import OverBall, refuses
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
@register_bound
class Plus(Bound):
    """LoFAST's Theorem 1 with the tight constant ½ of softmax, centred values and scores, and all heads at once.

    δ = ε ζ + ½ (‖[ΠXC_1; …; ΠXC_h]‖ + ε ‖[C_1; …; C_h]‖) (ε ‖stack_l M_l Π‖ + ε² ‖[A_1, …, A_h]‖).
    """

    name = "plus"
    in_networks = ("smallest",)
    score_terms = ("rotary", "bias", "sinks", "norms")
    cost = "two norms of size nd x nd"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return refuses(layer)

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        ball = OverBall(a, layer, x, eps)
        f = ball.f
        zeta = a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))
        centred = f.v - a.number(f.v).mean(-2, keepdim=True)
        values = a.matrix_norm(centred.flatten(-3, -2))
        pairs = (~ball.masked).to(torch.float64).expand(f.p.shape)
        scores = a.once("scores", lambda: a.norm(ScoreMoments(ball.map.query_rows, ball.map.key_rows, pairs)))
        spread = values.unsqueeze(-1) + ball.stacked_C * eps
        curved = ball.second_movement(ball.joint_A, a.lift(pairs))
        moved = scores.unsqueeze(-1) * eps + (curved.movedim(0, -1) if curved.ndim else curved) * (eps * eps)
        value = zeta.unsqueeze(-1) * eps + spread * moved * 0.5
        terms = {"zeta": zeta, "norm_XC": values, "norm_M": scores, "norm_C": ball.stacked_C, "norm_A": ball.joint_A}
        return Evaluation(value, terms)


@final
@register_bound
class Covariance(Bound):
    """The change of the probabilities as a covariance, with upper probabilities over the ball.

    δ = ε ζ + ε ‖stack_l Ω_i √q_lij (M_l - mean)‖ + ε² ‖[w_1 A_1, …, w_h A_h]‖, w_l = max_ij Ω_i √q_lij, at radius ε.
    """

    name = "cov"
    in_networks = ("smallest",)
    score_terms = ("rotary", "bias", "sinks", "norms")
    cost = "for every eps one norm of size nd x hn², and n of size hn x d"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return refuses(layer)

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        ball = OverBall(a, layer, x, eps)
        zeta = a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))
        weights = ball.value_spread.square().unsqueeze(-1).unsqueeze(-3) * ball.q
        scores = a.norm(ScoreMoments(ball.map.query_rows, ball.map.key_rows, a.lift(a.number(weights)))).movedim(0, -1)
        bilinear = ball.second_movement(ball.joint_bilinear(weights.amax((-2, -1))), weights).movedim(0, -1)
        value = (zeta.unsqueeze(-1) + scores + bilinear * eps) * eps
        return Evaluation(value, {"zeta": zeta, "scores": scores, "bilinear": bilinear})
