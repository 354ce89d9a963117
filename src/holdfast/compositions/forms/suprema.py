"""Suprema of weighted sums of squares, for many weights at once (docs/math/forms.md, section 4)."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.local import THETA
from holdfast.linalg.rounding import up
from holdfast.linalg.squarings import gram_norm, thin_gram_norm

_CHUNK = 2**18
_GROUP = 6  # hinges whose subsets are all tried
_CUBE_GROUP = 6  # the same in a cube, where a subset costs more
_SHARPER, _ROUNDS = 8, 3  # subsets of a group that are examined in the cube, and how often
_REST = 0.02  # a share that is not worth another group
_LARGE = 1024  # rows from which on their norm is bounded with less care


def worth(most: Float64[Tensor, " S"], enough: Float64[Tensor, " S"] | None) -> Tensor:
    """Which bounds are worth a sharper one; one that is not a number is, unless any number is enough."""
    every = torch.ones_like(most, dtype=torch.bool) if enough is None else ~(most <= enough) & (enough < torch.inf)
    return every.nonzero().squeeze(-1)


class Squares:
    """Σ_k w_k ‖X_k a‖² over a ball, for fixed matrices X_k of one row or more and many non-negative weights w.

    The supremum over ‖a‖ <= 1 is the norm of the Gram matrix M of all rows √w_k x. With the k in blocks, ‖M‖ is at most
    the norm of the matrix of the Frobenius norms of its blocks, whose squares are Σ w_k w_l ‖X_k X_lᵀ‖_F².

    Args:
        rows: (R, p) the rows of all matrices.
        blocks: (K) the block of every matrix, from 0 on.
        members: (R) the matrix of every row; one row each where it is left out.
    """

    def __init__(self, rows: Float64[Tensor, "R p"], blocks: Tensor, members: Tensor | None = None) -> None:
        self._rows, self._members = rows, members
        self._blocks, self._count = blocks, int(blocks.max()) + 1 if len(blocks) else 0
        self._lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1)
        self.lengths = up(self._lengths, 1e-12)

    @cached_property
    def gram(self) -> Tensor:
        """(R, R) the inner products of all rows, which cost more than all else: only where somebody asks."""
        return self._rows @ self._rows.mT

    @cached_property
    def _squares(self) -> Tensor:
        """(K, K) of the norms of X_k X_lᵀ: every entry is within its rounding, and its square then only too large."""
        squares = (self.gram.abs() + THETA * self._lengths.unsqueeze(-1) * self._lengths).square()
        if self._members is None:
            return squares
        one = torch.zeros(len(self._blocks), len(self._rows), dtype=torch.float64)
        one[self._members, torch.arange(len(self._rows))] = 1.0
        return one @ squares @ one.mT

    def most(
        self,
        weights: Float64[Tensor, "S K"],
        radius: float,
        suprema: Float64[Tensor, " K"],
        enough: Float64[Tensor, " S"] | None = None,
    ) -> Float64[Tensor, " S"]:
        """Bounds of the supremum over ‖a‖ <= radius, where also |x_k·a| <= sup_k.

        Where the sum of the terms' own suprema is below `enough`, it is not made any smaller.
        """
        most: Tensor = up(weights @ suprema.square(), 1e-10)
        if self._count == 0:
            return most
        large = worth(most, enough)
        if not len(large):  # a split of nothing would have one part, and ask for all inner products
            return most
        for part in torch.split(large, max(1, _CHUNK // weights.shape[-1])):
            joint = self._most(weights[part]) * up(radius * radius, 1e-10)
            most[part] = torch.minimum(most[part], joint)
        return most

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
        N = up(N.clamp(min=0.0).sqrt(), 1e-10)
        norms: Tensor = up(gram_norm(N, 1e-12 * torch.linalg.matrix_norm(N), 4).square(), 1e-10)
        return norms

    def forget(self) -> None:
        """Drops the rows; from here on sums of suprema have to be enough."""
        self._rows = self._rows.new_zeros(0, self._rows.shape[1])

    def length(self, coefficients: Float64[Tensor, "S K"]) -> Float64[Tensor, " S"]:
        """Bounds of ‖Σ_k c_k x_k‖, for coefficients of either sign."""
        square = ((coefficients @ self.gram) * coefficients).sum(-1).clamp(min=0.0)
        size = coefficients.abs() @ self.lengths
        lengths: Tensor = up((square + THETA * size.square()).sqrt(), 1e-10)
        return lengths


def hinges(
    weights: Float64[Tensor, "S K"],
    squares: Squares,
    threshold: Float64[Tensor, " K"],
    suprema: Float64[Tensor, " K"],
    radius: float,
    cube: Float64[Tensor, "K P"] | None = None,
) -> Float64[Tensor, " S"]:
    """Bounds of Σ_k w_k (x_k·a - t_k)₊ over ‖a‖ <= radius, |x_k·a| <= sup_k, for w >= 0.

    Where the region is a cube, x_k·a = Σ_i cube_ki y_i with |y_i| <= radius, up to θ₀√P of ‖x_k‖ radius.

    A sum of positive parts is the largest of the sums over subsets, each of which is linear in a. So the supremum of a
    few terms is found by trying all subsets A: ‖Σ_A w_k x_k‖ radius, or Σ_A w_k sup_k, or the sum of absolute values
    of Σ_A w_k cube_k, less Σ_A w_k t_k. Terms are taken in groups, those with the largest suprema first, and the
    groups' suprema are added.
    """
    group = _GROUP if cube is None else _CUBE_GROUP
    own = weights * (suprema - threshold).clamp(min=0.0)  # (S, K)
    order = own.argsort(-1, descending=True)
    count = order.shape[-1]
    subsets = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * group)  # (2^g, g)
    total = torch.zeros(len(weights), dtype=torch.float64)
    sorted_own = own.gather(1, order)
    for start in range(0, count, group):
        chosen = order[:, start : start + group]
        size = chosen.shape[1]
        tried = subsets if size == group else subsets[: 2**size, group - size :]
        w = weights.gather(1, chosen)
        for part in torch.split(
            torch.arange(len(w)), max(1, _CHUNK // (len(tried) * size if cube is None else _SHARPER * cube.shape[1]))
        ):
            v, k = w[part], chosen[part]
            gram = v.unsqueeze(-1) * squares.gram[k.unsqueeze(-1), k.unsqueeze(-2)] * v.unsqueeze(-2)
            long = (v * squares.lengths[k]).sum(-1, keepdim=True).square()
            square = ((tried @ gram) * tried).sum(-1).clamp(min=0.0) + THETA * long  # (S, 2^g)
            most = up(torch.minimum(square.sqrt() * radius, (v * suprema[k]) @ tried.mT), 1e-10)
            lost = (v * threshold[k]) @ tried.mT
            for _ in range(_ROUNDS if cube is not None else 0):  # the largest ones are worth a sharper bound
                assert cube is not None
                top = (most - lost).topk(min(_SHARPER, len(tried)), -1).indices  # (S, top)
                sharp = (tried[top] * v.unsqueeze(-2)) @ cube[k]  # (S, top, P)
                sharp = torch.linalg.vector_norm(sharp, 1, -1) * up(radius, 1e-10)
                sharp = sharp + THETA * cube.shape[1] ** 0.5 * long.sqrt() * radius
                most = most.scatter(-1, top, torch.minimum(most.gather(-1, top), sharp))
            largest = (most - lost + 1e-12 * (most + lost.abs())).amax(-1).clamp(min=0.0)
            total[part] += up(torch.minimum(largest, sorted_own[part, start : start + size].sum(-1)), 1e-10)
        left = sorted_own[:, start + group :].sum(-1)
        if not bool((left > _REST * total).any()):
            return up(total + left, 1e-10)
    return up(total, 1e-10)


class QuadraticSums:
    """‖Σ_k c_k A_k‖_F for matrices that are known by their inner products (K, K), and coefficients of either sign.

    Args:
        inner: (K, K) the computed ⟨A_k, A_l⟩.
        lengths: (K) bounds of ‖A_k‖_F, relative to which the inner products are accurate.
    """

    def __init__(self, inner: Float64[Tensor, "K K"], lengths: Float64[Tensor, " K"]) -> None:
        self._inner, self._lengths = inner, lengths

    def at(self, chosen: Tensor) -> QuadraticSums:
        """The same for some of the matrices."""
        return QuadraticSums(self._inner[chosen][:, chosen], self._lengths[chosen])

    def most(self, coefficients: Float64[Tensor, "S K"]) -> Float64[Tensor, " S"]:
        square = ((coefficients @ self._inner) * coefficients).sum(-1).clamp(min=0.0)
        size = coefficients.abs() @ self._lengths
        return up((square + THETA * size.square()).sqrt(), 1e-10)


def shared(
    weights: Float64[Tensor, "S K"], suprema: Float64[Tensor, " K"], lengths: Float64[Tensor, " K"], together: float
) -> Float64[Tensor, " S"]:
    """Bounds of Σ_k w_k |x_k·a| over ‖a‖ <= 1.

    Args:
        weights: w.
        suprema: bounds of |x_k·a|.
        lengths: of the rows x_k.
        together: at least the norm of the matrix of the rows x_k/‖x_k‖.
    """
    joint = torch.linalg.vector_norm(weights * lengths, dim=-1) * together
    return up(torch.minimum(weights @ suprema, joint), 1e-10)


def length(x: Tensor, dims: int) -> Tensor:
    """Bounds of Frobenius norms over the last dimensions."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(-dims, 0)))
    return up(norms, 1e-12)


def together(rows: Float64[Tensor, "K p"]) -> tuple[Float64[Tensor, " K"], float]:
    """The lengths of the rows, and the norm of the matrix of rows of length 1."""
    lengths = length(rows, 1)
    units = rows / lengths.clamp(min=1e-100).unsqueeze(-1)
    squarings = 3 if min(units.shape) <= _LARGE else 1  # which cost more than all else where there are many rows
    return lengths, up(float(thin_gram_norm(units, squarings)), 1e-9)
