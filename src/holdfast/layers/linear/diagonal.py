"""The diagonal that makes W T^(-1/2) a contraction (Araujo et al. 2023)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def sll_diagonal(w: Float[Tensor, "d units"], q: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
    """T_u = Σ_v |WᵀW|_uv q_v/q_u for any positive numbers q; then T ⪰ WᵀW.

    diag(q) (T - WᵀW) diag(q) is diagonally dominant with a non-negative diagonal, hence positive semidefinite.
    """
    with torch.autocast(w.device.type, enabled=False):
        q = q.to(w.dtype)
        tiny = torch.finfo(w.dtype).tiny
        return ((w.mT @ w).abs() @ q / q).clamp(min=tiny)  # a column of zeros stays one
