"""The pairs of keys that `pairs` takes with their directions, as one quadratic form joined with the values."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.layer import Weights
from holdfast.bounds import rows
from holdfast.bounds.rows import AtPoint
from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius, frobenius_upper, gamma, outward, up

_ABOVE, _MUCH = 1.02, 1.26  # times ‖P‖² ‖W^V‖² and ‖W^V‖²: between them μ follows the price of content
_AT_ONCE = {
    "cpu": 2**17,
    "cuda": 2**27,
}  # numbers of a few rows of the matrix of all pairs: the cache of a CPU is small


def quadratic_form(
    layer: AttentionLayer,
    here: AtPoint,
    query: Ball,
    key: Ball,
    head: Int64[Tensor, "B N"],
    row: Int64[Tensor, "B N"],
    j: Int64[Tensor, "B N"],
    m: Int64[Tensor, "B N"],
) -> tuple[Tensor, ...]:
    """μ, and ⟨c_s, R c_s'⟩ for c_s = e_i ⊗ W_l^Q(k_lj - k_lm) + (e_j - e_m) ⊗ W_l^K q_li, with what its rounding needs.

    With rotary positions c_s = e_i ⊗ W_l^Q R_iᵀ(k_lj - k_lm) + e_j ⊗ W_l^K R_jᵀ q_li - e_m ⊗ W_l^K R_mᵀ q_li.

    With θ = ‖W^V‖²/μ and R_v = (I - θ P_vᵀP_v)⁻¹, R is 1 + Σ_v (R_v - 1) ⊗ W_v^V W_v^Vᵀ/‖W^V‖². An inverse that is
    computed as S, with Z = I - (I - θPᵀP) S, is within ‖S‖ ‖Z‖/(1 - ‖Z‖) of S.
    """
    w = layer.weights(key)
    n = here.P.shape[-1]
    c2 = outward(here.maps.value.norm[0].square())
    norm2 = here.norms.amax(-1).square()
    price = rows.gain(here.terms(norm2.new_zeros(1))).squeeze(-1) / here.fixed - 1
    theta = 1 / (norm2 * (1 + price / 2)).clamp(max=_MUCH).maximum(norm2 * _ABOVE)  # any below 1/‖P‖² serves
    P, eye = Ball(here.p, here.rad), torch.eye(n, dtype=torch.float64, device=head.device)
    A = -((P.mT @ P) * theta[:, None, None, None]) + eye
    S = torch.linalg.inv(A.mid)
    S = (S + S.mT) / 2
    miss = frobenius(-(A @ Ball.exact(S)) + eye).upper
    told = (miss < 0.5) & (c2 > 1e-200)  # below, products of weights underflow
    off = torch.where(told, up(frobenius_upper(S) * miss / (1 - miss), 1e-9), torch.inf)
    identity = eye.expand(len(head), n, n)
    vectors = _vectors(layer, w, query, key, head, row, j, m)  # (B, N, d), with the tokens (B, N, n) where they stand
    gram = here.p.new_zeros(*head.shape, head.shape[-1])
    lengths: list[Tensor] = []
    radii: list[Tensor] = []
    rounding, size = [], []
    for v in range(-1, layer.h):  # all tokens as they are, then what R makes of them in the values of each head
        T = identity if v < 0 else (S[:, v] - eye) / c2
        onto = None if v < 0 else w.w_v[v]
        parts = [(tokens @ T, tokens, z if onto is None else z @ onto) for tokens, z in vectors]
        for turned, _, z in parts:
            for _, tokens, y in parts:
                _add_products(gram, turned, tokens, z.mid, y.mid)
        for collected, attribute in ((lengths, "mid"), (radii, "rad")):
            sizes = [row_norms(getattr(z, attribute)) * _reach(tokens) for _, tokens, z in parts]
            collected.append(torch.stack(sizes).sum(0))
        largest, unknown = (identity.new_full((len(head),), fill) for fill in (1.0, 0.0))
        if v >= 0:
            largest, unknown = S[:, v].abs().amax((-2, -1)) / c2, off[:, v] / c2
        size.append(outward(largest + unknown))
        rounding.append(outward(largest * gamma(max(layer.d, layer.k) + 12 * layer.h + 4 * n + 64) + unknown))
    stacked = (torch.stack(numbers, 1) for numbers in (lengths, radii, rounding, size))
    return outward(c2 / theta), gram.tril() + gram.tril(-1).mT, *stacked


def _add_products(gram: Tensor, turned: Tensor, tokens: Tensor, z: Tensor, y: Tensor) -> None:
    """Adds ⟨turned_s, tokens_s'⟩ ⟨z_s, y_s'⟩ to the lower triangle of the matrices, a few rows at a time."""
    B, N = gram.shape[:2]
    step = max(1, _AT_ONCE.get(gram.device.type, 2**24) // (B * N))
    for start in range(0, N, step):
        rows, stop = slice(start, start + step), min(start + step, N)
        product = (turned[:, rows] @ tokens[:, :stop].mT).mul_(z[:, rows] @ y[:, :stop].mT)
        gram[:, rows, :stop].add_(product)


def _vectors(
    layer: AttentionLayer, w: Weights[Ball], query: Ball, key: Ball, head: Tensor, row: Tensor, j: Tensor, m: Tensor
) -> list[tuple[Tensor, Ball]]:
    """The parts of c_s: what stands at which tokens."""
    rotary, n = layer.rotary, key.shape[-2]
    every = torch.arange(len(head), device=head.device).unsqueeze(-1)
    identity = torch.eye(n, dtype=torch.float64, device=head.device).expand(len(head), n, n)
    w_q = w.w_q * layer.scale
    if rotary is None:
        asked, drawn = key @ w_q.mT, query @ w.w_k.mT  # (B, h, n, d): W^Q k and W^K q
        asked, drawn = asked[every, head, j] - asked[every, head, m], drawn[every, head, row]
        return [(identity[every, row], asked), (identity[every, j] - identity[every, m], drawn)]

    def at(position: Tensor, z: Ball, maps: Ball) -> tuple[Tensor, Ball]:
        """Vectors z (B, N, k) turned back from a position, and through the map of their head."""
        turned = rotary.at(head.shape[:1], (every.expand_as(position), position)).turn_back(
            z.unsqueeze(-2).unsqueeze(-2)
        )
        return identity[every, position], (turned.squeeze(-2) @ maps.mT[head]).squeeze(-2)

    query = query[every, head, row]
    return [
        at(row, key[every, head, j] - key[every, head, m], w_q),
        at(j, query, w.w_k),
        at(m, -query, w.w_k),
    ]


def _reach(tokens: Tensor) -> float:
    """How many tokens a vector stands at, at most."""
    return float(tokens.abs().sum(-1).max())


def row_norms(z: Tensor) -> Tensor:
    """Lengths over the last dimension, from above."""
    return frobenius_upper(z, (-1,))
