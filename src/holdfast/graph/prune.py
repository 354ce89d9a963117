"""Leaves out tokens that nothing needs: padding, and all but the class token after the last attention.

From the end of the chain to its beginning: which rows of a stage's output are needed decides which rows of its input
are. A token needs itself; a query needs the keys that it may attend to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.rotary import Rotary
from holdfast.graph.fuse import fused
from holdfast.graph.structure import choice
from holdfast.layers.activation.piece import KinkedEntries, SmoothEntries
from holdfast.layers.attention.piece import Attention
from holdfast.layers.linear.piece import Affine
from holdfast.layers.norm.piece import Normalisation
from holdfast.layers.perceptron.piece import KinkedMlp, Mlp
from holdfast.layers.piece import Piece
from holdfast.layers.product import Product
from holdfast.layers.tokens.embedding import AddPositions
from holdfast.layers.tokens.maxima import WindowMax
from holdfast.layers.tokens.pooling import ClassToken, TokenMean
from holdfast.layers.tokens.selection import Scale, Selection
from holdfast.network.network import Residual, run

Stage = Piece | Residual
Rows = Int64[Tensor, " rows"]

#: Pieces that treat every token alike, whatever the others are.
_ALIKE = (Affine, Mlp, KinkedMlp, Normalisation, SmoothEntries, KinkedEntries, Product)


def pruned(stages: Sequence[Stage], shape: tuple[int, int]) -> list[Stage]:
    """The same function of an input (n, d) of the shape, on the tokens that are needed alone."""
    sizes, u = [shape], torch.zeros(1, *shape, dtype=torch.float64)
    for stage in stages:
        u = run(stage, u)
        sizes.append((u.shape[-2], u.shape[-1]))
    kept: list[Stage] = []
    needed = torch.arange(sizes[-1][0])
    for place in range(len(stages) - 1, -1, -1):
        stage, (n, _) = stages[place], sizes[place]
        rows = _rows(stage, needed, n)
        if rows is None:  # all rows enter, and all leave
            kept = [stage, *_chosen(needed, sizes[place + 1]), *kept]
            needed = torch.arange(n)
        elif _pools(stage):
            kept = [*_pooled(stage, needed, rows, sizes[place]), *kept]
            needed = rows
        else:
            width = sizes[place + 1][1]
            places = torch.searchsorted(rows, needed)
            kept = [_cut(stage, rows, n), *_chosen(places, (len(rows), width)), *kept]
            needed = rows
    return fused([*_chosen(needed, shape), *kept])


def _rows(stage: Stage, needed: Rows, n: int) -> Rows | None:
    """The rows of the input behind these rows of the output, sorted; None where it is all of them."""
    if isinstance(stage, Residual):
        rows: Rows | None = needed
        for piece in reversed(stage.pieces):
            rows = None if rows is None or _pools(piece) else _rows(piece, rows, n)
        return None if rows is None else _distinct(rows, needed)
    if isinstance(stage, Attention):
        allowed = stage.layer.allowed(n)
        if allowed is None:
            return torch.arange(n)
        return _distinct(allowed[needed].any(0).nonzero().flatten(), needed)
    if isinstance(stage, (*_ALIKE, Scale, AddPositions)):
        return needed
    if isinstance(stage, ClassToken):
        return torch.tensor([stage.index])
    if isinstance(stage, Selection | WindowMax):
        entries = stage.index[needed].flatten()
        return _distinct(entries[entries >= 0] // stage.shape[1])
    return torch.arange(stage.skip, n) if isinstance(stage, TokenMean) else None


def _distinct(*rows: Rows) -> Rows:
    """All of them once, sorted."""
    distinct: Tensor = torch.unique(torch.cat(rows))
    return distinct


def _pools(stage: Stage) -> bool:
    return isinstance(stage, ClassToken | Selection | TokenMean | WindowMax)


def _pooled(stage: Stage, needed: Rows, rows: Rows, shape: tuple[int, int]) -> list[Stage]:
    """A stage that chooses tokens, on those that enter it now."""
    if isinstance(stage, TokenMean):
        return [TokenMean(len(rows))]
    d = shape[1]
    whole = rows.unsqueeze(-1) * d + torch.arange(d)
    index = stage.index[needed] if isinstance(stage, Selection | WindowMax) else whole
    row, column = index // d, index % d
    moved = torch.where(index < 0, -1, torch.searchsorted(rows, row.clamp(min=0).contiguous()) * d + column)
    return [WindowMax(moved, (len(rows), d))] if isinstance(stage, WindowMax) else [*choice(moved, (len(rows), d))]


def _chosen(rows: Rows, shape: tuple[int, int]) -> list[Stage]:
    """The piece that keeps these rows alone, if there are others."""
    return [*choice(rows.unsqueeze(-1) * shape[1] + torch.arange(shape[1]), shape)]


def _cut(stage: Stage, rows: Rows, n: int) -> Stage:
    """The stage on some of its n tokens."""
    if len(rows) == n:
        return stage
    if isinstance(stage, Residual):
        return Residual(tuple(_cut_piece(piece, rows) for piece in stage.pieces))
    return _cut_piece(stage, rows)


def _cut_piece(piece: Piece, rows: Rows) -> Piece:
    if isinstance(piece, Scale) and piece.factors.ndim == 2:
        return Scale(piece.factors[rows])
    if isinstance(piece, AddPositions) and piece.c.ndim == 2:
        return AddPositions(piece.c[rows])
    return Attention(_cut_layer(piece.layer, rows)) if isinstance(piece, Attention) else piece


def _cut_layer(layer: AttentionLayer, rows: Rows) -> AttentionLayer:
    mask = None if layer.mask is None else layer.mask[..., rows, :][..., rows]
    bias = None if layer.score_bias is None else layer.score_bias[..., rows, :][..., rows]
    turn = layer.rotary
    rotary = None if turn is None else Rotary(turn.cos[..., rows, :], turn.sin[..., rows, :], turn.pairing)
    if mask is not None and bool(mask.all()):
        mask = None
    return layer.replace(mask=mask, score_bias=bias, rotary=rotary)
