"""Sizes as quadratic forms of the perturbation, so that different tokens share one budget.

A size x(G) >= 0 is held by a positive semidefinite matrix A (p, p) with x(tg)² <= eps² gᵀAg for all unit g, t <= eps; a
product of two sizes by a matrix with x y <= eps² gᵀAg. So (c/eps)² I holds a constant c. A sum over tokens is at most
eps² times one largest eigenvalue, where a sum of suprema would let every token have the whole perturbation for itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg.squarings import gram_norm

_ROUNDING = 2.0**-32  # relative to the trace: pays for sums of up to 2²⁰ products
_LEAST = 1e-200


def firm(A: Float64[Tensor, "*b p p"], size: Tensor | None = None) -> Float64[Tensor, "*b p p"]:
    """A form that is not below A's exact value: what rounding may have taken is added, relative to the trace.

    Where terms of A cancel, `size` is the trace of the same formula on absolute values.
    """
    return A + wide(_ROUNDING * (trace(A) if size is None else size) + _LEAST) * _eye(A)


def trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(-1)


def product(A: Tensor, B: Tensor) -> Tensor:
    """Of two sizes: √(GᵀAG · GᵀBG) <= Gᵀ(κA + B/κ)G/2 for every κ."""
    kappa = _balance(A, B)
    return (kappa * A + B / kappa) / 2


def plus(A: Tensor, B: Tensor) -> Tensor:
    """The sum of two sizes: (x + y)² <= (1 + κ) x² + (1 + 1/κ) y² for every κ."""
    kappa = _balance(A, B)
    return (1 + kappa) * A + (1 + 1 / kappa) * B


def root(A: Tensor) -> Tensor:
    """√λ_max(A), from above: a size is at most eps times it."""
    return gram_norm(A, 4 * _ROUNDING * trace(A), 3)


def square(A: Tensor, eps: Tensor) -> Tensor:
    """What is bounded by GᵀAG, as a size: (GᵀAG)² <= eps² λ_max(A) GᵀAG."""
    return wide(eps.reshape(-1, *(1 for _ in A.shape[1:-2])) * root(A)).square() * A


def wide(x: Tensor) -> Tensor:
    """Numbers (…) as factors of forms."""
    return x.unsqueeze(-1).unsqueeze(-1)


def unit(A: Tensor, x: Tensor) -> Tensor:
    """The form x² times the identity."""
    return wide(x.square()) * _eye(A)


def of_rows(rows: Float64[Tensor, "*b m p"]) -> Float64[Tensor, "*b p p"]:
    """The length of a vector whose entries are linear forms."""
    return firm(rows.mT @ rows)


def _balance(A: Tensor, B: Tensor) -> Tensor:
    """κ: any positive number serves."""
    ratio = (torch.linalg.matrix_norm(B) + _LEAST) / (torch.linalg.matrix_norm(A) + _LEAST)
    return wide(ratio.sqrt().clamp(1e-100, 1e100))


def _eye(A: Tensor) -> Tensor:
    return torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
