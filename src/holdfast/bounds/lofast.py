"""The local sensitivity bounds of LoFAST (Havens et al. 2024, sections 4 and 5.1), for one layer.

F(X') - F(X) = [H Γ + Σ_l P_l Γ C_l] + Σ_l (P_l' - P_l) X' C_l with Γ = X' - X and C_l = W_l^V W_l^O. The first part is
linear, with norm ζ(X); in the second, softmax is 1-Lipschitz and the scores move by Γ A Xᵀ + X A Γᵀ + Γ A Γᵀ. So

    δ = ε ζ(X) + Σ_l δ₂₁ δ₂₂,  δ₂₁ = ε (‖M_l(X)‖ + ε ‖A_l‖) or ε (ξ_l(X) + ε ‖A_l‖),  δ₂₂ = ‖X C_l‖ + ε ‖C_l‖.

The scale of the scores is folded into A_l, M_l and ξ_l. Score terms that are constant along a row are dropped (softmax
ignores them), so of the biases only b^Q counts, through the rows of X A_l; a mask restricts M_l to the allowed pairs.

Terms of a result, (b) or (b, h), with (e) behind where they depend on eps:
    zeta (12) or naive_gain (9); norm_M (20) or xi (21); norm_A; norm_XC; norm_C; norm_X; norm_P for (9);
    delta_1 the linear part; delta_21; delta_22; delta_22_naive, the second form of (22); delta_2 = Σ_l δ₂₁ δ₂₂.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, final

from torch import Tensor

from holdfast.attention import AttentionLayer, ValueOperator, fold
from holdfast.attention.jacobian import Folded, score_operator_of
from holdfast.bounds.base import EVERY_TERM, Bound, Evaluation, register_bound
from holdfast.bounds.placed import placed_gains
from holdfast.bounds.score_map import ScoreMap, score_map
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


class _LofastBound(Bound):
    """δ = δ₁ + Σ_l δ₂₁ δ₂₂; the methods differ in the gain of the linear part and in the norm of the score map."""

    reference: ClassVar[str] = "havens2024"
    score_terms = EVERY_TERM

    @abstractmethod
    def _linear_gain(
        self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, f: Folded[Array]
    ) -> dict[str, Array]:
        """The gain of the linear part, last, after the terms it is made of."""

    @abstractmethod
    def _score_gain(self, a: Arithmetic[Array], layer: AttentionLayer, maps: ScoreMap[Array]) -> dict[str, Array]:
        """A bound of ‖M_l(X)‖ for every head; not asked where queries or keys are normalised."""

    @final
    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    @final
    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        X = a.lift(x)
        f = fold(layer, X)
        maps = a.once("score map", lambda: score_map(a, layer, f))
        gain = a.once(f"{self.name} linear", lambda: self._linear_gain(a, layer, x, f))
        normed = layer.q_norm is not None or layer.k_norm is not None
        score = {} if normed else a.once(f"{self.name} score", lambda: self._score_gain(a, layer, maps))
        A = a.once("norm_A", lambda: a.matrix_norm(maps.forms[0]))
        C, XC = a.once("norm_C", lambda: a.matrix_norm(f.c)), a.once("norm_XC", lambda: a.matrix_norm(f.v))
        norm_X = a.once("norm_X", lambda: a.matrix_norm(X))

        heads = eps.unsqueeze(-2)
        if normed:
            delta_21 = normed_movement(a, layer, X, f, heads)
        else:
            delta_21 = score_movement(list(score.values())[-1], A, eps)
        moved = Splitting.of(list(gain.values())[-1], delta_21, XC, C, eps)
        delta_22_naive = C.unsqueeze(-1) * (norm_X.unsqueeze(-1).unsqueeze(-1) + heads)
        terms = {**gain, **score, "norm_A": A, "norm_XC": XC, "norm_C": C, "norm_X": norm_X}
        terms |= {"delta_1": moved.delta_1, "delta_21": delta_21, "delta_22": moved.delta_22}
        terms |= {"delta_2": moved.delta_2} | ({"delta_22_naive": delta_22_naive} if layer.sinks is None else {})
        return Evaluation(moved.total, terms)


@final
@dataclass(frozen=True)
class Splitting(Generic[Array]):
    """The parts of δ, for radii (e): delta_1 and delta_2 (b…, e), delta_22 (b…, h, e)."""

    delta_1: Array
    delta_22: Array
    delta_2: Array

    @classmethod
    def of(cls, gain: Array, delta_21: Array, XC: Array, C: Array, eps: Array) -> Splitting[Array]:
        """From the gain (b…), how far the scores move (b…, h, e), and ‖X C_l‖ and ‖C_l‖ (b…, h)."""
        delta_22 = XC.unsqueeze(-1) + C.unsqueeze(-1) * eps.unsqueeze(-2)
        return cls(gain.unsqueeze(-1) * eps, delta_22, (delta_21 * delta_22).sum(-2))

    @property
    def total(self) -> Array:
        """δ."""
        return self.delta_1 + self.delta_2


def score_movement(score: Array, A: Array, eps: Array) -> Array:
    """(b…, h, e) δ₂₁, from ‖M_l(X)‖ or ξ_l(X), and ‖A_l‖."""
    heads = eps.unsqueeze(-2)
    return (score.unsqueeze(-1) + A.unsqueeze(-1) * heads) * heads


def normed_movement(a: Arithmetic[Array], layer: AttentionLayer, X: Array, f: Folded[Array], eps: Array) -> Array:
    """(b…, h, e) how far the scores move where queries or keys are normalised (docs/math/scores.md).

    The rows of Q̂ move by at most ρ L_i |γ_i W^Q|, L_i the largest gain of the norm within ε‖W^Q‖ of the raw query, and
    those of K̂ likewise.
    """
    by_query, by_key = (side.slope * eps for side in placed_gains(a, layer, X, eps))
    query, key = (a.matrix_norm(rows.left).unsqueeze(-1) for rows in (f.key_rows, f.query_rows))  # with the scale
    return by_query * key + query * by_key + by_query * by_key * abs(layer.scale)


def _zeta(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> dict[str, Array]:
    return {"zeta": a.once("zeta", lambda: a.norm(ValueOperator(layer, x)))}


def _xi(maps: ScoreMap[Array]) -> dict[str, Array]:
    """ξ_l = ‖A Xᵀ‖ + ‖X A‖ >= ‖M_l(X)‖ (21); with rotary positions docs/math/rotary.md."""
    return {"xi": maps.query_norm(centred=False) + maps.key_norm()}


@final
@register_bound
class Naive(_LofastBound):
    """Equation (23) with (9), ‖H‖ + Σ_l ‖C_l‖ ‖P_l‖, in the place of ζ(X)."""

    name = "naive"
    cost = "norms of n x n and n x d matrices"

    def _linear_gain(
        self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, f: Folded[Array]
    ) -> dict[str, Array]:
        P = a.matrix_norm(f.p)
        return {"norm_P": P, "naive_gain": (P * a.matrix_norm(f.c)).sum(-1) + abs(layer.residual)}

    def _score_gain(self, a: Arithmetic[Array], layer: AttentionLayer, maps: ScoreMap[Array]) -> dict[str, Array]:
        return _xi(maps)


@final
@register_bound
class LofastXi(_LofastBound):
    """Theorem 1, second form, which is equation (23): ζ(X) and ξ_l(X)."""

    name = "lofast-xi"
    in_networks = ("smallest",)
    cost = "one norm of size nd x nd; norms of n x d matrices"

    def _linear_gain(
        self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, f: Folded[Array]
    ) -> dict[str, Array]:
        return _zeta(a, layer, x)

    def _score_gain(self, a: Arithmetic[Array], layer: AttentionLayer, maps: ScoreMap[Array]) -> dict[str, Array]:
        return _xi(maps)


@final
@register_bound
class Lofast(_LofastBound):
    """Theorem 1, first form: ζ(X) and ‖M_l(X)‖."""

    name = "lofast"
    in_networks = ("smallest",)
    score_terms = ("rotary", "bias", "cap", "sinks")
    cost = "one norm of size nd x nd, and one of size n² x nd for every head"

    def _linear_gain(
        self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, f: Folded[Array]
    ) -> dict[str, Array]:
        return _zeta(a, layer, x)

    def _score_gain(self, a: Arithmetic[Array], layer: AttentionLayer, maps: ScoreMap[Array]) -> dict[str, Array]:
        return {"norm_M": a.norm(score_operator_of(maps.f, layer.allowed(maps.f.p.shape[-1])))}
