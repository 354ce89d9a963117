"""What all keys, or all values, have in common: it drops out of every change of softmax attention."""

from __future__ import annotations

import torch

from holdfast.linalg import Ball

_LITTLE = 2.0**-20  # what is left of rows that agree up to this share is mostly rounding


def less_common(x: Ball) -> Ball:
    """Rows (…, n, k) minus their mean, so that numbers are smaller; as they are where all of them agree."""
    mean = x.mid.mean(-2, keepdim=True)
    left, whole = (torch.linalg.vector_norm(part, dim=(-2, -1), keepdim=True) for part in (x.mid - mean, x.mid))
    return x - mean.where(left > _LITTLE * whole, 0.0)
