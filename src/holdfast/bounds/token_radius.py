"""How long a token can be after a normalisation: the radius that bounds on balls need."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention import checks
from holdfast.errors import InputError
from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius, up

_TRIALS = 200  # multipliers that are tried; each of them gives a bound


def rms_norm_radius(weight: Float[Tensor, " d"]) -> float:
    """A proved bound of the length of w ∘ x / √(mean x² + eps): √d max|w|, which no smaller number is."""
    w = _vector(weight, "weight")
    return float((Ball.exact(w.abs().amax()) * Ball.exact(torch.full_like(w[0], len(w))).sqrt()).upper)


def layer_norm_radius(weight: Float[Tensor, " d"], bias: Float[Tensor, " d"] | None = None) -> float:
    """A proved bound of the length of w ∘ z + b over |z|² <= d, and so after LayerNorm; at most √d max|w| + |b|.

    For every λ > max w², Σ_i (w_i z_i + b_i)² <= λ |z|² + Σ_i b_i² λ / (λ - w_i²), the maximum over each z_i of the
    difference. The least right side over λ is the exact maximum over |z|² <= d (docs/math/regularity.md, Theorem 9).

    Args:
        weight: the scale of the norm layer.
        bias: its shift, if it has one.
    """
    w = _vector(weight, "weight")
    if bias is None:
        return rms_norm_radius(weight)
    b = _vector(bias, "bias")
    if b.shape != w.shape:
        raise InputError(f"bias has shape {tuple(b.shape)} and weight {tuple(w.shape)}; expected the same")
    largest = w.square().amax()
    # The λ with which the plain bound would be met, if every |w_i| were the largest, in the middle of the trials.
    start = largest.sqrt() * b.norm() / math.sqrt(len(w))
    start = torch.where(start > 0, start, torch.finfo(torch.float64).eps * (1 + largest))
    multipliers = up(largest + start * torch.logspace(-4, 2, _TRIALS, dtype=torch.float64, device=w.device))
    lam, w2 = Ball.exact(multipliers).unsqueeze(-1), Ball.exact(w).square()
    squares = lam.squeeze(-1) * float(len(w)) + (Ball.exact(b).square() * (lam / (lam - w2))).sum(-1)
    plain = Ball.exact(torch.full_like(largest, rms_norm_radius(weight))) + frobenius(Ball.exact(b), (-1,))
    return min(float(squares.sqrt().upper.nan_to_num(nan=math.inf).amin()), float(plain.upper))


def _vector(t: Tensor, name: str) -> Tensor:
    if not isinstance(t, Tensor) or t.ndim != 1 or not t.is_floating_point() or not len(t):
        given = f"shape {tuple(t.shape)}, {t.dtype}" if isinstance(t, Tensor) else type(t).__name__
        raise InputError(f"{name} is {given}; expected a vector of numbers")
    checks.finite(t, name)
    return t.detach().double()
