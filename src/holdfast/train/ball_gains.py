r"""How far attention moves over a ball around an input, relative to its radius: an estimate to train through.

`gains` looks at the input alone. Over a ball of radius r the scores move, probabilities grow and values spread. This is
the bound `rows` (docs/math/second-order.md, Theorem 8 and Lemma 7) at r, in the same letters:

    log p_lij grows by at most g_lij = ℓ_lij r + κ_lij r² (Lemma 3), so the mean of p_lij along the way is at most
    q_lij = ∫_0^1 min(1, p_lij e^(t g_lij)) dt;
    d_li covers q_li (Lemma 5), λ_li = min(1/2, max_j d_lij);
    Ω_li, κ_li are the spreads of values and keys under q_li, the first with √λ_li r ‖W_l^V‖ added;
    Λ_lj² = λ_max(Σ_i Ω_li² d_lij q_li q_liᵀ);

and the three paths are joined by the largest eigenvalue of one matrix without negative entries for each head. Norms and
eigenvalues come from a few steps of power iteration, which approach from below: an estimate, for training.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.layer import merge_heads, split_heads
from holdfast.layers import Linear, SelfAttention
from holdfast.layers.steepness import norm_estimate, unit
from holdfast.train.gains import largest_moment, norm_of_rows
from holdfast.train.jasmin import widened

_STEPS = 3  # of power iteration for the many matrices of a batch
_TINY = 1e-12


def gain_over_ball(
    attention: SelfAttention, x: Float[Tensor, "b n d"], radius: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """An estimate of sup ‖F(X') - F(X)‖/r over ‖X' - X‖_F <= r, from above but for the power iteration.

    Args:
        attention: the layer.
        x: what enters it.
        radius: how far that may move, for every input.
    """
    q, k, v = (widened(split_heads(getattr(attention, name)(x), attention.heads)) for name in ("query", "key", "value"))
    with torch.autocast(x.device.type, enabled=False):
        root, r = q.shape[-1] ** -0.25, radius[:, None, None, None]
        q, k, v = q * root, (k - k.mean(-2, keepdim=True)) * root, v - v.mean(-2, keepdim=True)
        W_Q, W_K, W_V = (_map(attention, name) for name in ("query", "key", "value"))
        W_Q, W_K = W_Q * root, W_K * root
        scores = q @ k.mT if attention.position_scores is None else q @ k.mT + attention.position_scores
        p, log_p = scores.softmax(-1), scores.log_softmax(-1)
        upper = _upper_probabilities(p, log_p, _growth(p, q, k, W_Q, W_K, r))
        d = _cover(upper)
        damping = d.amax(-1).clamp(_TINY, 0.5).sqrt()
        near = damping * r.squeeze(-1)
        omega = _spread(upper, v, p @ v) + near * norm_estimate(W_V).unsqueeze(-1)
        kappa = _spread(upper, k, p @ k) + near * norm_estimate(W_K).unsqueeze(-1)
        drawn = omega.square().unsqueeze(-2) * d.mT  # (j, i)
        share = (drawn * q.square().sum(-1).unsqueeze(-2)).detach()
        share = (share / share.amax(-1, keepdim=True).clamp(min=_TINY)).clamp(0.0256, 1.0).sqrt().sqrt()
        keys = _root(largest_moment(drawn / share, q))
        value, query, key = (norm_estimate(merge_heads(w)) for w in (W_V, W_Q, W_K))
        paths = _paths(p, share, value, query * omega * kappa, key * keys)
        gain: Tensor = abs(attention.residual) + norm_estimate(attention.output.weight) * paths
        return gain


def _map(attention: SelfAttention, name: str) -> Float[Tensor, "h d k"]:
    """A map of every head."""
    linear: Linear = getattr(attention, name)
    return split_heads(linear.weight.mT, attention.heads)


def _growth(p: Tensor, q: Tensor, k: Tensor, W_Q: Tensor, W_K: Tensor, r: Tensor) -> Float[Tensor, "b h n n"]:
    """ℓ r + κ r² of Lemma 3 (a)."""
    products = k @ (W_Q.mT @ W_Q) @ k.mT
    mixed = p @ products
    apart = (mixed * p).sum(-1, keepdim=True) - 2 * mixed + products.diagonal(0, -2, -1).unsqueeze(-2)
    turn = q @ (W_K.mT @ W_Q) @ k.mT
    turn = turn - (p * turn).sum(-1, keepdim=True)
    own = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device) - p.diagonal(0, -2, -1).unsqueeze(
        -1
    )  # e_j - p_i, at i
    size2 = p.square().sum(-1, keepdim=True) - 2 * p + 1
    lengths2 = ((q @ (W_K.mT @ W_K)) * q).sum(-1, keepdim=True)
    slope = _root(apart + 2 * turn * own + size2 * lengths2)
    bend = (own.abs() + _root(size2)) * norm_estimate(W_Q @ W_K.mT)[:, None, None] / 2
    return (slope + bend * r) * r


def _upper_probabilities(p: Tensor, log_p: Tensor, growth: Tensor) -> Float[Tensor, "b h n n"]:
    """∫_0^1 min(1, p e^(t g)) dt."""
    g = growth.clamp(min=1e-4)
    until = torch.minimum(g, -log_p)
    return ((p * torch.expm1(until) + g - until) / g).clamp(max=1.0)


def _cover(q: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """What Lemma 5 calls d."""
    first, index = q.max(-1, keepdim=True)
    rest = (q.sum(-1, keepdim=True) - first).clamp(_TINY, 1.0)
    t = ((first - rest) / (first + rest)).clamp(min=0.0)
    own = first * rest * (1 + t) / (first * t + rest * (1 + t))
    return (q * (1 + t)).scatter(-1, index, own)


def _spread(weights: Tensor, z: Tensor, c: Tensor) -> Float[Tensor, "b h n"]:
    """λ_max(Σ_j w_ij (z_j - c_i)(z_j - c_i)ᵀ)^½."""

    def along(w: Tensor) -> Tensor:
        return w @ z.mT - (w * c).sum(-1, keepdim=True)

    with torch.no_grad():
        w = unit(c + 1e-3 * z.abs().mean((-2, -1), keepdim=True))
        for _ in range(_STEPS):
            drawn = weights * along(w)
            w = unit(drawn @ z - drawn.sum(-1, keepdim=True) * c)
    return _root((weights * along(w).square()).sum(-1))


def _paths(p: Tensor, share: Tensor, value: Tensor, queries: Tensor, keys: Tensor) -> Float[Tensor, " b"]:
    """The norm of all rows and heads, each moved by its values, its query and its keys together (Lemma 7)."""
    through = (value * norm_of_rows(p)).amax(-1)[:, None, None]
    by_query, by_keys = (t.amax(-2, keepdim=True).clamp(min=_TINY) for t in (queries, keys))
    whole = through + by_query + by_keys
    drawn = (share * (keys.square() * (whole / by_keys)).unsqueeze(-1)).amax(-2)
    diagonal = queries.square() * (whole / by_query) + drawn
    weight = (whole / through).expand_as(diagonal)
    with torch.no_grad():
        y = torch.ones_like(diagonal)
        for _ in range(4 * _STEPS):
            y = unit(value**2 * (p @ ((p.mT @ y.unsqueeze(-1)) * weight.unsqueeze(-1))).squeeze(-1) + diagonal * y)
    passed = (p.mT @ y.unsqueeze(-1)).squeeze(-1)
    square = value**2 * (passed.square() * weight).sum(-1) + (diagonal * y.square()).sum(-1)
    return _root(square.amax(-1))


def _root(square: Tensor) -> Tensor:
    return square.clamp(min=_TINY**2).sqrt()
