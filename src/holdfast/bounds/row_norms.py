"""Norms that `rows` is made of, all from above: of many small moment matrices, of probabilities, of paths together.

Tensors hold numbers that are not negative, and every formula is rounded up (docs/math/second-order.md, lemmas 5 to 7).
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg import Array
from holdfast.linalg.rounding import FLOOR, UNIT, as_ball, gamma, outward, up
from holdfast.linalg.squarings import gram_norm

_SQUARINGS, _TOLERANCE = 5, 0.01  # of the norms of small matrices; five leave 3 % where 48 eigenvalues are equal
_STEPS = 12  # of the iterations that propose weights, for every radius …
_FIRST_STEPS = 24  # … and for ‖P_l‖, once
_FEW = 128  # tokens for which ‖P_l‖ is worth squarings
_BLOCK = {"cpu": 2**18, "cuda": 2**27}  # numbers that small matrices take at a time: the cache of a CPU is small
_LEAST_SHARE = 0.4  # of a row among those that draw on a key
_TINY = 1e-60  # its square is far above all that underflows
_SOME = 1e-4  # a key with less than this share in a row counts by its length alone


def covariance_norms(p: Float64[Tensor, "*b n m"], z: Array) -> Float64[Tensor, "*b n"]:
    """λ_max(Σ_j p_ij (z_j - c_i)(z_j - c_i)ᵀ), c_i = Σ_j p_ij z_j, for rows z (…, m, k) and probabilities p."""
    return moment_norms(p, z, off=(p.sum(-1) - 1).abs())


def moment_norms(weights: Float64[Tensor, "*b n m"], z: Array, off: Tensor | None = None) -> Float64[Tensor, "*b n"]:
    """λ_max(Σ_j w_ij z_j z_jᵀ) for rows z (…, m, k) and weights that are not negative.

    Where the weights are probabilities, whose sum is `off` (…, n) from 1, of z_j - c_i with c_i = Σ_j w_ij z_j: that is
    Σ_j w_ij z_j z_jᵀ - (2 - S_i) c_i c_iᵀ for the sum S_i.

    With T = Σ_j w_ij ‖z_j‖² and E the same of the radii of z, the first part is known within γT + 2√(TE) + E, in the
    Frobenius norm, and the second within twice that and `off` T.
    """
    ball = as_ball(z)
    batch, (n, m), k = weights.shape[:-2], weights.shape[-2:], z.shape[-1]
    length, radius = ball.mid.square().sum(-1), ball.rad.square().sum(-1) + k * FLOOR
    T, E = ((weights @ t.unsqueeze(-1)).squeeze(-1) for t in (length, radius))
    error = gamma(m + 8) * T + 2 * T.sqrt() * E.sqrt() + E
    if off is not None:
        error = 4 * error + off * T
    error = error * 1.01
    rows, flat_weights = ball.mid.expand(*batch, m, k).flatten(0, -3), weights.flatten(0, -3)
    norms, step = [], max(1, _BLOCK.get(rows.device.type, 2**22) // (max(n, m) * k * k))
    for start in range(0, len(rows), step):
        block, w = rows[start : start + step], flat_weights[start : start + step]
        moments = (w @ (block.unsqueeze(-1) * block.unsqueeze(-2)).flatten(-2, -1)).reshape(-1, n, k, k)
        if off is not None:
            mean = w @ block
            moments -= mean.unsqueeze(-1) * mean.unsqueeze(-2)
        at = error.flatten(0, -2)[start : start + step]
        norms.append(gram_norm(moments, at, _SQUARINGS, _TOLERANCE))
    return outward(torch.cat(norms).square()).reshape(*batch, n)


def norm_of_probabilities(P: Float64[Tensor, "*b n n"]) -> Float64[Tensor, "*b"]:
    """A bound of ‖P‖ for entries that are not negative: ‖P‖² <= max_j (PᵀPw)_j / w_j for every w > 0.

    (Collatz and Wielandt; w = 1 gives ‖P‖_1 ‖P‖_∞.) Powers of PᵀP on 1 make it smaller and smaller.
    """
    w = torch.ones_like(P[..., :1])
    best = torch.full_like(P[..., 0, 0], torch.inf)
    for _ in range(_FIRST_STEPS):
        grown = P.mT @ (P @ w)
        best = torch.minimum(best, (grown / w).amax((-2, -1)))
        w = (grown / grown.amax((-2, -1), keepdim=True)).clamp(min=1e-12)
    bound = up(outward(best, 2 * P.shape[-1]).sqrt(), 2 * UNIT)
    if P.shape[-1] > _FEW:
        return bound
    # Rows on a grid that hardly see each other make the iteration slow; squarings of PᵀP do not mind.
    error = gamma(P.shape[-1] + 8) * P.square().sum((-2, -1)) * 1.01 + P.shape[-1] ** 2 * FLOOR
    return torch.minimum(bound, gram_norm(P.mT @ P, error, 10, 1e-4))


def shares(drawn: Float64[Tensor, "*b n n"]) -> Float64[Tensor, "*b n n"]:
    """A row that a key hardly draws counts less than the row that it draws most, which counts 1."""
    return (drawn / drawn.amax(-1, keepdim=True)).nan_to_num(nan=1.0).sqrt().sqrt().clamp(_LEAST_SHARE, 1.0)


def norm_of_paths(
    P: Float64[Tensor, "*b h n n"],
    norms: Float64[Tensor, "*b h"],
    share: Float64[Tensor, "*b h n n"],
    values: Float64[Tensor, "e *b h"],
    queries: Float64[Tensor, "e *b h n"],
    keys: Float64[Tensor, "e *b h n"],
) -> Float64[Tensor, "*e"]:
    """A bound of the norm of all rows and heads, each moved by its values, its query and its keys (Lemma 7).

    It is that of c_l² P_l diag(1/θ) P_lᵀ + diag_i(a_li²/θ'_i + max_j s_lji b_lj²/θ''_j), θ + θ' + θ'' = 1, which has no
    negative entries (Collatz and Wielandt, as for P alone). Any θ serve; each is as large as its path.
    """
    through = (values * norms).amax(-1)[..., None, None].clamp(min=_TINY)
    by_query, by_keys = (t.amax(-2, keepdim=True).clamp(min=_TINY) for t in (queries, keys))
    whole = through + by_query + by_keys
    drawn = (share * (keys.square() * (whole / by_keys)).unsqueeze(-1)).amax(-2)
    diagonal = (queries.square() * (whole / by_query) + drawn).movedim(0, -1)
    weight, c2 = (whole / through).movedim(0, -1), values.square().unsqueeze(-1).movedim(0, -1)
    w, best = torch.ones_like(diagonal), torch.full_like(diagonal[..., 0, :], torch.inf)
    for _ in range(_STEPS):
        grown = c2 * (P @ ((P.mT @ w) * weight)) + diagonal * w
        best = torch.minimum(best, (grown / w).amax(-2))
        w = (grown / grown.amax(-2, keepdim=True).clamp(min=_TINY)).clamp(min=1e-12)
    bound = up(outward(best.amax(-2), 4 * P.shape[-1]).sqrt().movedim(-1, 0), 2 * UNIT)
    return bound.masked_fill(bound.isnan(), torch.inf)  # beyond the range of float64


# -- from the norms at X to those on a ball


def cover(q: Float64[Tensor, "*b n"]) -> Float64[Tensor, "*b n"]:
    """Weights d with Var_p(f) <= Σ_j d_j f_j² for all probabilities p <= q (docs/math/second-order.md, Lemma 5).

    It is q, or where one key has more than R, the sum of the others: 2 q_1 R/(q_1 + R) there, q_j 2 q_1/(q_1 + R) else.
    """
    first, index = q.max(-1, keepdim=True)
    rest = (outward(q.sum(-1, keepdim=True), q.shape[-1]) - first).clamp(0.0, 1.0)
    t = ((first - rest) / (first + rest)).clamp(min=0.0)  # any number from 0 on serves
    own = first / (first / (rest * (1 / t + 1)) + 1)
    return outward((q * (1 + t)).scatter(-1, index, own))


def grown(top: Tensor, base: Tensor, weights: Tensor, size: Tensor) -> Tensor:
    """A bound of λ_max(Σ_j w_j z_j z_jᵀ) from top >= λ_max(Σ_j base_j z_j z_jᵀ) and size_j >= ‖z_j‖².

    w <= ρ base + (w - ρ base)_+ for every ρ, so ρ top + Σ_j (w_j - ρ base_j)_+ size_j is one; the best of a few ρ.
    """
    weights = up(weights, 2.0**-44)  # pays for the difference
    part = base * size
    whole = part.sum(-1)
    mean = (weights * size).sum(-1) / whole
    most = (weights / base).masked_fill_(part <= _SOME * whole.unsqueeze(-1), 0.0).amax(-1)
    best = (weights * size).sum(-1)
    for rho in (mean, (mean * most).sqrt(), most):
        rho = rho.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        beyond = torch.addcmul(weights, base, rho.unsqueeze(-1), value=-1.0).clamp_(min=0.0).mul_(size).sum(-1)
        best = torch.minimum(best, rho * top + beyond)
    return outward(best, size.shape[-1])
