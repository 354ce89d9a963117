"""Proved norms of many small matrices at once, from above, by a few squarings."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg.rounding import FLOOR, UNIT, frobenius_upper, gamma, up


def gram_norm(
    gram: Float64[Tensor, "*b m m"], error: Tensor, squarings: int = 2, tolerance: float = 0.0
) -> Float64[Tensor, "*b"]:
    """An upper bound of √‖M‖ for every symmetric M within `error` of `gram`, in the Frobenius norm.

    ‖M‖^{2^k} <= ‖M^{2^k}‖_F. Every squaring of a matrix that is known within e leaves it known within
    γ‖M‖_F² + 2‖M‖_F e + e²; matrices are scaled to length 1 before it, by numbers whose rounding is paid for. As then
    ‖M²‖_F² <= ‖M²‖ <= ‖M²‖_F, one squaring also says how far the bound may be from the norm: a matrix for which that is
    less than the tolerance is done, whatever becomes of the others.

    Args:
        gram: the matrices.
        error: (*b) how far M may be from each.
        squarings: how many, at most.
        tolerance: relative, of the result.
    """
    size = gram.shape[-1]
    length = frobenius_upper(gram) + error
    scale = torch.where(length > 0, length, 1.0)
    M, e, log = gram / scale[..., None, None], error / scale + 4 * UNIT, torch.log(scale)
    bound, open_ = up(length.sqrt(), 1e-15), torch.ones_like(length, dtype=torch.bool)
    for k in range(squarings):
        M, e = M @ M, up(gamma(size + 8) + 2 * e + e.square(), 1e-12)
        now = up(torch.linalg.matrix_norm(M), (size * size + 16) * UNIT) + e
        now = torch.where(now > 0, now, 1.0)
        shorter = torch.log(now) / 2 ** (k + 1)
        log = log + shorter
        candidate = up(torch.exp(log / 2), 1e-12)
        bound = torch.where(open_ & (candidate < bound), candidate, bound)  # not a number stays so
        open_ = open_ & (shorter < -2 * tolerance)
        if k + 1 == squarings or (tolerance and not bool(open_.any())):
            break
        M, e = M.div_(now[..., None, None]), e / now + 4 * UNIT
    return torch.where(length == 0, 0.0, bound)


def thin_gram_norm(rows: Float64[Tensor, "*b m k"], squarings: int = 2) -> Float64[Tensor, "*b"]:
    """An upper bound of the spectral norm of matrices (…, m, k), by the Gram matrix of the smaller side."""
    if rows.shape[-2] > rows.shape[-1]:
        rows = rows.mT
    underflow = rows.shape[-2] * rows.shape[-1] * FLOOR
    error = up(gamma(rows.shape[-1]) * frobenius_upper(rows).square(), 1e-12) + underflow
    return gram_norm(rows @ rows.mT, error, squarings)
