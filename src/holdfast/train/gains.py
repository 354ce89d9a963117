r"""How steep and how curved an attention layer is at an input: closed forms that are cheap to differentiate.

For F(X) = residual · X + [P_l X W_l^V]_l W^O the derivative along Γ is residual · Γ + [P_l Γ W_l^V]_l W^O + [U_l]_l W^O
with rows u_li = Σ_j p_lij s°_lij v_lj, where v_lj = x_j W_l^V and s°_lij is the change of the scores minus its mean
under p_li. The blocks of the second term are independent, so it is at most c_V c_O max_l ‖P_l‖ ‖Γ‖ for c_V = ‖W^V‖,
c_O = ‖W^O‖. In the third, by Cauchy and Schwarz under p_li,

    ‖u_li‖ <= Ω_li · Var_li(s)^½,   Ω_li² = λ_max Cov_li(v_l),   k_lj, q_li scaled by the root of the scale,
    Var_li(s)^½ <= κ_li ‖γ_i W_l^Q‖ + (Σ_j p_lij (q_li · γ_j W_l^K)²)^½,   κ_li² = λ_max Cov_li(k_l),

so that over all rows and heads its norm is at most

    c_O S_Ω,  S_Ω = max_li Ω_li κ_li ‖W^Q‖ + max_lj λ_max(Σ_i Ω_li² p_lij q_li q_liᵀ)^½ ‖W^K‖.

The second derivative along Γ has the rows Σ_j p_lij (s°_lij² + s''_lij)° v_lj + 2 Σ_j p_lij s°_lij γ_j W_l^V with
s''_lij = 2 γ_i W_l^Q · γ_j W_l^K. Let S be S_Ω with 1 for Ω; and as ‖e_j - p_li‖ <= √2, |s°_lij| <= T ‖Γ‖ with

    T = max ‖k_lj - E_li k_l‖ ‖W^Q‖ + √2 max ‖q_li‖ ‖W^K‖.

Then the three parts have norms of at most T S_Ω, 2 max Ω ‖W^Q‖ ‖W^K‖ and 2 S c_V, all times c_O.

Norms and λ_max come from a few steps of power iteration, which approach from below: an estimate, for training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.layer import split_heads
from holdfast.layers import Linear, SelfAttention
from holdfast.layers.steepness import Steepness, length, norm_estimate, unit
from holdfast.train.jasmin import widened

_STEPS = 3  # of power iteration for the many matrices of a batch


def attention_steepness(
    attentions: Sequence[SelfAttention], entering: Sequence[Float[Tensor, "b n d"]], *, curved: bool = True
) -> Steepness:
    """Estimates (layers, b) of the right-hand sides above, for layers of equal shape at the inputs that enter them.

    Differentiable in the inputs and the weights; the layers are taken together, as one more batch dimension. Without
    `curved` the curvature is left at infinity.
    """
    q, k, v = (
        torch.stack(
            [
                widened(split_heads(getattr(attention, name)(x), attention.heads))
                for attention, x in zip(attentions, entering, strict=True)
            ]
        )
        for name in ("query", "key", "value")
    )
    with torch.autocast(q.device.type, enabled=False):
        root = q.shape[-1] ** -0.25
        q, k, v = q * root, _centred(k) * root, _centred(v)
        scores = q @ k.mT  # softmax does not see that the keys were centred
        positions: list[Tensor] = [layer.position_scores for layer in attentions if layer.position_scores is not None]
        if positions:
            scores = scores + torch.stack(positions).unsqueeze(1)
        p = scores.softmax(-1)
        W_Q, W_K, c_V, c_O = (_map_gains(attentions, name) for name in ("query", "key", "value", "output"))
        W_Q, W_K = W_Q * root, W_K * root
        omega, kappa = _largest_covariance(p, v), _largest_covariance(p, k)
        S_omega = _peak(omega * kappa) * W_Q + _peak(largest_moment(p.mT * omega.unsqueeze(-2), q)) * W_K
        fixed = c_V * norm_of_rows(p).amax(-1)
        gain = abs(attentions[0].residual) + c_O * (fixed + S_omega)
        if not curved:
            return Steepness(gain, math.inf)
        S = _peak(kappa) * W_Q + _peak(largest_moment(p.mT, q)) * W_K
        mean = p @ k
        apart = k.square().sum(-1).unsqueeze(-2) - 2 * mean @ k.mT + mean.square().sum(-1, keepdim=True)
        T = _peak(apart.amax(-1)) * W_Q + math.sqrt(2) * _peak(q.square().sum(-1)) * W_K
        return Steepness(gain, c_O * (T * S_omega + 2 * _peak(omega) * W_Q * W_K + 2 * S * c_V))


def norm_of_rows(p: Float[Tensor, "*b h n n"]) -> Float[Tensor, "*b h"]:
    """‖P‖ of matrices without negative entries: the top vectors have none, and neither does the start."""
    with torch.no_grad():
        v = torch.ones_like(p[..., :1])
        for _ in range(_STEPS):
            v = unit(p.mT @ (p @ v), -2)
    return length(p @ v, -2).squeeze(-1)


def each_length(t: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
    """The l2 norm of every input of a batch, in float32 at least, in a shape that divides it."""
    return length(widened(t.flatten(1)), 1).reshape(-1, *[1] * (t.ndim - 1))


def _map_gains(attentions: Sequence[SelfAttention], name: str) -> Float[Tensor, "layers 1"] | float:
    """‖W‖ of the same map of every layer."""
    maps: list[Linear] = [getattr(attention, name) for attention in attentions]
    if math.isfinite(maps[0].gain):
        return maps[0].gain
    return norm_estimate(torch.stack([linear.weight for linear in maps])).unsqueeze(-1)


def _largest_covariance(p: Float[Tensor, "*b h n n"], z: Float[Tensor, "*b h n k"]) -> Float[Tensor, "*b h n"]:
    """λ_max of the covariance of z under every row of p."""
    mean = p @ z
    with torch.no_grad():
        w = unit(mean + _start(z))
        for _ in range(_STEPS):
            w = unit((p * (w @ z.mT)) @ z - mean * (mean * w).sum(-1, keepdim=True))
    along = w @ z.mT
    return (p * (along - (p * along).sum(-1, keepdim=True)).square()).sum(-1)


def largest_moment(weights: Float[Tensor, "*b h n n"], z: Float[Tensor, "*b h n k"]) -> Float[Tensor, "*b h n"]:
    """λ_max of Σ_j weights_ij z_j z_jᵀ for every i."""
    with torch.no_grad():
        w = unit(weights @ z + _start(z))
        for _ in range(_STEPS):
            w = unit((weights * (w @ z.mT)) @ z)
    return (weights * (w @ z.mT).square()).sum(-1)


def _peak(squares: Float[Tensor, "*b h n"]) -> Float[Tensor, "*b"]:
    """The largest root over heads and rows."""
    return squares.clamp(min=1e-20).sqrt().amax((-2, -1))


def _start(z: Tensor) -> Tensor:
    """A little of every direction."""
    return 1e-3 * z.abs().mean((-2, -1), keepdim=True)


def _centred(z: Tensor) -> Tensor:
    """Less a common row, which no covariance sees."""
    return z - z.mean(-2, keepdim=True)
