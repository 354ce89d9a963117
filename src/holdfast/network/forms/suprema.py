"""Suprema of weighted sums of squares, for many weights at once (docs/math/forms.md, section 4)."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg.squarings import gram_norm
from holdfast.network.forms.local import THETA

_CHUNK = 2**22


class Squares:
    """Σ_k w_k (x_k·a)² over ‖a‖ <= 1, for fixed rows x_k (K, p) and many non-negative weights w.

    The supremum is the norm of the Gram matrix M = (√w_k √w_l x_k·x_l). With the K rows in blocks, ‖M‖ is at most the
    norm of the matrix of the Frobenius norms of its blocks, whose squares are Σ w_k w_l (x_k·x_l)².

    Args:
        rows: (K, p).
        blocks: (K) the block of every row, from 0 on.
    """

    def __init__(self, rows: Float64[Tensor, "K p"], blocks: Tensor) -> None:
        self._gram = rows @ rows.mT
        lengths = torch.linalg.vector_norm(rows, dim=-1)
        # Every entry is within its rounding; the square may then only be too large.
        self._squares = (self._gram.abs() + THETA * lengths.unsqueeze(-1) * lengths).square()
        self._blocks, self._count = blocks, int(blocks.max()) + 1 if len(blocks) else 0
        self.lengths = lengths * (1 + 1e-12)

    def chosen(self, index: Tensor) -> Squares:
        """The same for some of the rows."""
        new = object.__new__(Squares)
        new._gram, new._squares = self._gram[index][:, index], self._squares[index][:, index]
        new.lengths = self.lengths[index]
        _, new._blocks = self._blocks[index].unique(return_inverse=True)
        new._count = int(new._blocks.max()) + 1 if len(index) else 0
        return new

    def most(self, weights: Float64[Tensor, "S K"], radius: float, each: Float64[Tensor, " K"]) -> Float64[Tensor, " S"]:
        """Bounds of the supremum over ‖a‖ <= radius, where also |x_k·a| <= each_k."""
        if self._count == 0:
            return torch.zeros(len(weights), dtype=torch.float64)
        found = [self._most(w) for w in torch.split(weights, max(1, _CHUNK // weights.shape[-1]))]
        return torch.minimum(torch.cat(found) * radius**2, weights @ each.square()) * (1 + 1e-10)

    def _most(self, w: Tensor) -> Tensor:
        S, nb = len(w), self._count
        if nb == w.shape[-1]:
            N = w.unsqueeze(-1) * self._squares * w.unsqueeze(-2)
        else:
            N = torch.zeros(S, nb, nb, dtype=torch.float64)
            for b in range(nb):
                inside = self._blocks == b
                seen = (w[:, inside] @ self._squares[inside]) * w  # (S, K)
                N[:, b] = torch.zeros(S, nb, dtype=torch.float64).index_add_(1, self._blocks, seen)
        N = N.clamp(min=0.0).sqrt() * (1 + 1e-10)
        return gram_norm(N, 1e-12 * torch.linalg.matrix_norm(N), 4).square() * (1 + 1e-10)

    def length(self, coefficients: Float64[Tensor, "S K"]) -> Float64[Tensor, " S"]:
        """Bounds of ‖Σ_k c_k x_k‖, for coefficients of either sign."""
        square = ((coefficients @ self._gram) * coefficients).sum(-1).clamp(min=0.0)
        size = coefficients.abs() @ self.lengths
        return (square + THETA * size.square()).sqrt() * (1 + 1e-10)


class Quadratic:
    """‖Σ_k c_k A_k‖_F for matrices that are known by their inner products (K, K), and coefficients of either sign.

    Args:
        inner: (K, K) the computed ⟨A_k, A_l⟩.
        lengths: (K) bounds of ‖A_k‖_F, relative to which the inner products are accurate.
    """

    def __init__(self, inner: Float64[Tensor, "K K"], lengths: Float64[Tensor, " K"]) -> None:
        self._inner, self._lengths = inner, lengths

    def most(self, coefficients: Float64[Tensor, "S K"]) -> Float64[Tensor, " S"]:
        square = ((coefficients @ self._inner) * coefficients).sum(-1).clamp(min=0.0)
        size = coefficients.abs() @ self._lengths
        return (square + THETA * size.square()).sqrt() * (1 + 1e-10)


def shared(
    weights: Float64[Tensor, "S K"], each: Float64[Tensor, " K"], lengths: Float64[Tensor, " K"], together: float
) -> Float64[Tensor, " S"]:
    """Bounds of Σ_k w_k |x_k·a| over ‖a‖ <= 1.

    Args:
        weights: w.
        each: bounds of |x_k·a|.
        lengths: of the rows x_k.
        together: at least the norm of the matrix of the rows x_k/‖x_k‖.
    """
    joint = torch.linalg.vector_norm(weights * lengths, dim=-1) * together
    return torch.minimum(weights @ each, joint) * (1 + 1e-10)
