"""Lipschitz constants of attention that hold for every number of tokens (after Castin, Ablin and Peyré 2024).

Attention is a map of measures: Σ_i μ_i δ_{x_i} goes to Σ_i μ_i δ_{F(X)_i}, and tokens enter a row with the density
ρ(x, y) = e^{s(x,y)} / ∫ e^{s(x,z)} dμ(z) <= e^{2αR}. Notation as in `castin.py`; proofs: docs/math/regularity.md.
"""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch

from holdfast.attention import AttentionLayer
from holdfast.bounds.base import Evaluation
from holdfast.bounds.castin import heads_on_ball, log_path_gain, value_and_key_gain
from holdfast.bounds.lipschitz import BallBound, register_lipschitz_bound
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic

_EXPONENTS = 12  # the r that are tried: 1, then half as far from p each time


@final
@register_lipschitz_bound
class MeanField(BallBound):
    """c [g e^{2αR/p} + aR²], heads together, plus |residual|: for W_p, every p and every measure (Theorem 3).

    Never above the paper's c (1 + 3aR²) e^{2aR²}. At p = 2, g = √(1 + α²R²); g as in `castin.log_path_gain`.
    """

    name = "mean-field"
    cost: ClassVar[str] = "norms of d x d matrices, and of one hd x d matrix for each radius"
    reference = "castin2024"
    assumptions = "no mask"

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        masked = layer.causal or layer.mask is not None
        return "the layer is masked, and the constant is false then" if masked else None

    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        heads = heads_on_ball(a, layer, radius)
        value = value_and_key_gain(a, heads, heads.reach * 2.0, p)
        return Evaluation(value + heads.query_gain + abs(layer.residual), heads.terms)


@final
@register_lipschitz_bound
class MeanFieldMasked(BallBound):
    """Σ_l c_l g_l (p/(p-r) e^{2αR})^{1/r} with the best r in [1, p), plus the query path: for d_p, causal (Theorem 4).

    Hardy's inequality bounds the running means. For r = 1 this is c [p/(p-1) (1 + 2αR) e^{2αR} + aR²]. There is nothing
    at p = 1, where running means are unbounded.
    """

    name = "mean-field-masked"
    cost: ClassVar[str] = "norms of d x d matrices"
    reference = "holdfast"
    assumptions = "causal, no other mask; p > 1"

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        if not layer.causal:
            return "the layer is not causal; use mean-field"
        if layer.mask is not None:
            return "the layer has a mask beside the causal one"
        return None if p > 1 else "there is no such constant at p = 1, where running means are unbounded"

    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        heads = heads_on_ball(a, layer, radius)
        gains = _log_running_gain(a, heads.reach, p).exp()
        return Evaluation((heads.c * gains).sum(-2) + heads.query_gain + abs(layer.residual), heads.terms)


def _log_running_gain(a: Arithmetic[Array], reach: Array, p: float) -> Array:
    """The least log g_r + (log p/(p-r) + 2αR) / r: every r in [1, p) is sound. At p = inf nothing is averaged."""
    if math.isinf(p):
        return log_path_gain(reach, p)
    smallest = None
    for k in range(_EXPONENTS):
        r = max(1.0, p - (p - 1) * 2.0**-k)
        if r >= p:  # p is so near 1 that nothing lies between
            break
        top = a.lift(torch.tensor(p, dtype=torch.float64, device=reach.device))
        log_gain = log_path_gain(reach, r) + ((top / (top - r)).log() + reach * 2.0) / r
        smallest = log_gain if smallest is None else smallest.minimum(log_gain)
    assert smallest is not None
    return smallest
