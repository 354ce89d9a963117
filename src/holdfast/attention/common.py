"""What all keys, or all values, have in common: it drops out of every change of softmax attention.

A row of probabilities p changes by (diag(p) - p pᵀ) s' = p ∘ (s' - E_p s') when its scores change by s'.
"""

from __future__ import annotations

import torch

from holdfast.linalg import Array, Ball

_LITTLE = 2.0**-20  # what is left of rows that agree up to this share is mostly rounding


def less_common(x: Ball) -> Ball:
    """Rows (…, n, k) minus their mean, so that numbers are smaller; as they are where all of them agree."""
    mean = x.mid.mean(-2, keepdim=True)
    left, whole = (torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True) for part in (x.mid - mean, x.mid))
    return x - mean.where(left > _LITTLE * whole, 0.0)


def centred(p: Array, f: Array) -> Array:
    """f° = f - E_p f along each row."""
    return f - (p * f).sum(-1, keepdim=True)


def centred_product(p: Array, f: Array) -> Array:
    """(diag(p) - p pᵀ) f = p ∘ f°."""
    return p * centred(p, f)
