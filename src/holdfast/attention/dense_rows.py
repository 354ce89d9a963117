"""Rows of the Jacobian's matrix, enclosed, in pieces that stay small; notation as in `jacobian.py`.

Column by column, as derivatives along unit vectors (`derivatives.py`), a matrix takes n d passes over all scores. Plain
and rotary scores are linear in both tokens, so there its blocks are written down by themselves, for one pass in all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, final

import torch

from holdfast.attention.layer import AttentionLayer
from holdfast.attention.paths import paths
from holdfast.attention.rotary import Rotary
from holdfast.linalg.operator import Enclosure
from holdfast.linalg.rounding import Ball, frobenius_upper, product_error

if TYPE_CHECKING:
    from holdfast.attention.jacobian import Folded, FoldedValues

_CHUNK_DOUBLES = 2**23  # a matrix is assembled in pieces of about this size …
_CACHED = {"cpu": 2**18}  # … or of this, which stays in the cache, where the pieces are rows


class ScoreRows(ABC):
    """What the movement of the scores adds to the rows of the matrix.

    `moved` is p_ij Cᵀ(x_j - ȳ_i) for the queries `rows`: (b, r, h, n, d_out).
    """

    @abstractmethod
    def key_factors(self, moved: Ball, rows: slice) -> tuple[Ball, Ball]:
        """Of Σ_l p_ij Cᵀ(x_j - ȳ_i) (∂s_ij/∂x_j)ᵀ, (b, r, n, d_out, d): (b, r, n, d_out, h) and (b, r, n, h, d).

        Where the second is the same for all j, (b, r, 1, n d_out, h) and (b, r, 1, h, d).
        """

    @abstractmethod
    def query_blocks(self, moved: Ball, rows: slice) -> Ball:
        """Σ_l Σ_j p_ij Cᵀ(x_j - ȳ_i) (∂s_ij/∂x_i)ᵀ, a part of the diagonal blocks: (b, r, d_out, d)."""


@final
class PlainScores(ScoreRows):
    """Without rotary positions: ∂s_ij/∂x_j = a_i for all j, and ∂s_ij/∂x_i = A x_j for all i."""

    def __init__(self, f: Folded[Ball]) -> None:
        self._f = f

    def key_factors(self, moved: Ball, rows: slice) -> tuple[Ball, Ball]:
        b, r, h, n, d_out = moved.shape
        key = self._f.key[..., rows, :].movedim(-3, -2)
        return moved.reshape(b, r, 1, h, n * d_out).mT, key.unsqueeze(2)

    def query_blocks(self, moved: Ball, rows: slice) -> Ball:
        b, r, h, n, d_out = moved.shape
        return moved.reshape(b, r, h * n, d_out).mT @ self._f.query.reshape(b, 1, h * n, -1)


@final
class TurnedScores(ScoreRows):
    """With rotary positions: s_ij = scale · q̂_i · k̂_j, q̂_i = R_i q_i, k̂_j = R_j k_j, the key bias included.

    ∂s_ij/∂x_j = scale · W^K R_jᵀ q̂_i and ∂s_ij/∂x_i = scale · W^Q R_iᵀ k̂_j.
    """

    def __init__(self, layer: AttentionLayer, rotary: Rotary, x: Ball) -> None:
        parts, self._w, self._rotary = layer.run(x), layer.weights(x), rotary
        self._q, self._k = parts.q * layer.scale, parts.k * layer.scale

    def key_factors(self, moved: Ball, rows: slice) -> tuple[Ball, Ball]:
        b, r, h, n, _ = moved.shape
        q = self._q[..., rows, :].movedim(-3, -2).reshape(b, r, h, 1, -1).expand(b, r, h, n, self._q.shape[-1])
        back = self._rotary.turn_back(q.movedim(1, 0)).movedim(0, 1)
        return moved.movedim(2, 3).mT, (back @ self._w.w_k.mT).movedim(2, 3)

    def query_blocks(self, moved: Ball, rows: slice) -> Ball:
        b, r, h, _, d_out = moved.shape
        summed = (moved.mT @ self._k.unsqueeze(1)).movedim(1, -2)  # (b, h, d_out, r, k)
        turned = self._rotary.turn_back(summed.reshape(b, h * d_out, r, -1), rows)
        return (turned.reshape(b, h, d_out * r, -1) @ self._w.w_q.mT).sum(1).reshape(b, d_out, r, -1).movedim(1, 2)


def enclose_rows(f: FoldedValues[Ball], residual: float, scores: ScoreRows | None) -> Enclosure:
    """The matrix of the Jacobian, or, without scores, of its part with the probabilities held fixed."""
    b, h, n, _ = f.p.shape
    _, d, d_out = f.c.shape
    J = f.p.mid.new_empty(b, n, d_out, n, d)
    c = f.c.mT.reshape(h, d_out * d)
    squares = Ball.exact(J.new_zeros(b))
    at_once = min(_CHUNK_DOUBLES, _CACHED.get(J.device.type, _CHUNK_DOUBLES))
    step = max(1, at_once // (b * n * max(d_out * d, h * d_out, h * d)))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        p = f.p[..., rows, :].movedim(-3, -1)
        block = p.mid @ c.mid  # Σ_l p_ij C_l
        error = product_error(p, c, roundings=h)  # it may be summed with the h terms of the next one
        own = Ball.exact(residual * torch.eye(d_out, d, dtype=torch.float64, device=J.device))
        if scores is not None:
            moved = _moved(f, rows)
            left, right = scores.key_factors(moved, rows)
            blocks = block.view(-1, left.shape[-2], d)
            blocks.baddbmm_(left.mid.flatten(0, 2), right.mid.flatten(0, 2))
            error = error + frobenius_upper(product_error(left, right, roundings=1).upper, (-1,))
            own = own + scores.query_blocks(moved, rows)
        block = block.reshape(b, -1, n, d_out, d)
        index = torch.arange(rows.stop - start, device=J.device)
        own = own + block[:, index, index + start]
        block[:, index, index + start] = own.mid
        J[:, rows] = block.movedim(-2, -3)
        squares = squares + (error + frobenius_upper(own.rad)).square().sum(-1)
    return Enclosure(J.reshape(b, n * d_out, n * d), squares.sqrt().upper)


def enclose_columns(layer: AttentionLayer, x: Ball) -> Enclosure:
    """The matrix of the Jacobian of any layer, column by column: its derivative along every unit vector, in balls."""
    b, n, d = x.shape
    J = x.mid.new_empty(b, n * layer.d_out, n * d)
    squares = Ball.exact(J.new_zeros(b))
    step = max(1, _CHUNK_DOUBLES // (8 * b * layer.h * n * max(n, layer.k)))
    for start in range(0, n * d, step):
        stop = min(start + step, n * d)
        basis = torch.eye(n * d, dtype=torch.float64, device=J.device)[start:stop]
        columns = paths(layer, x, Ball.exact(basis.reshape(-1, 1, n, d).expand(-1, b, n, d))).total
        J[..., start:stop] = columns.mid.flatten(2).movedim(0, -1)
        squares = squares + Ball.exact(frobenius_upper(columns.rad, (-4, -2, -1))).square()
    return Enclosure(J, squares.sqrt().upper)


def _moved(f: FoldedValues[Ball], rows: slice) -> Ball:
    """p_ij Cᵀ(x_j - ȳ_i): (b, r, h, n, d_out)."""
    deviation = f.v.unsqueeze(-3) - f.y[..., rows, :].unsqueeze(-2)
    return (f.p[..., rows, :].unsqueeze(-1) * deviation).movedim(1, 2)
