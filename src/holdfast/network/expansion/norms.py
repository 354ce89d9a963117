"""Proved norms of many small matrices at once, from above, by a few squarings."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma


def gram_norm(gram: Float64[Tensor, "*b m m"], error: Tensor, squarings: int = 2) -> Float64[Tensor, "*b"]:
    """An upper bound of √‖M‖ for every symmetric M within `error` of `gram`, in the Frobenius norm.

    ‖M‖^{2^k} <= ‖M^{2^k}‖_F. Every squaring of a matrix that is known within e leaves it known within
    γ‖M‖_F² + 2‖M‖_F e + e²; matrices are scaled to length 1 in between, by numbers whose rounding is paid for.
    """
    size = gram.shape[-1]
    length = frobenius_upper(gram) + error
    scale = torch.where(length > 0, length, 1.0)
    M, e, log = gram / scale[..., None, None], error / scale + 4 * UNIT, torch.log(scale)
    for k in range(squarings):
        norm = torch.linalg.matrix_norm(M)
        M, e = M @ M, (gamma(size + 8) * norm.square() + 2 * norm * e + e.square()) * (1 + 1e-12)
        now = torch.linalg.matrix_norm(M) * (1 + 1e-12) + e
        now = torch.where(now > 0, now, 1.0)
        M, e, log = M / now[..., None, None], e / now + 4 * UNIT, log + torch.log(now) / 2 ** (k + 1)
    top = (frobenius_upper(M) + e).clamp(min=1e-300)
    bound = torch.exp((log + torch.log(top) / 2**squarings) / 2) * (1 + 1e-12)
    return torch.where(length == 0, 0.0, torch.minimum(bound, length.sqrt() * (1 + 1e-15)))  # not a number stays so


def thin_gram_norm(rows: Float64[Tensor, "*b m k"], squarings: int = 2) -> Float64[Tensor, "*b"]:
    """An upper bound of the spectral norm of matrices (…, m, k), by the Gram matrix of the smaller side."""
    if rows.shape[-2] > rows.shape[-1]:
        rows = rows.mT
    error = gamma(rows.shape[-1]) * frobenius_upper(rows).square() * (1 + 1e-12)
    return gram_norm(rows @ rows.mT, error, squarings)
