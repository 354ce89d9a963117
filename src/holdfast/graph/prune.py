"""Leaves out tokens that nothing needs: padding, and all but the class token after the last attention.

From the end of the chain to its beginning: which rows of a stage's output are needed decides which rows of its input
are. A token needs itself; a query needs the keys that it may attend to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.graph.fuse import fused
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.rows import Rows, distinct
from holdfast.layers.tokens.selection import choice
from holdfast.network.network import Residual, run

Stage = Piece | Residual


def pruned(stages: Sequence[Stage], shape: tuple[int, int]) -> list[Stage] | None:
    """The same function of an input (n, d) of the shape, on the tokens that are needed alone; None if none is."""
    sizes, u = [shape], torch.zeros(1, *shape, dtype=torch.float64)
    for stage in stages:
        u = run(stage, u)
        sizes.append((u.shape[-2], u.shape[-1]))
    kept: list[Stage] = []
    needed = torch.arange(sizes[-1][0])
    for place in range(len(stages) - 1, -1, -1):
        stage, (n, _) = stages[place], sizes[place]
        rows = _rows(stage, needed, n)
        if rows is not None and not len(rows):
            return None
        if rows is None:  # all rows enter, and all leave
            kept = [stage, *_chosen(needed, sizes[place + 1]), *kept]
            needed = torch.arange(n)
        elif isinstance(stage, Piece) and stage.pools:
            kept = [*stage.on_rows(rows, needed), *kept]
            needed = rows
        else:
            width = sizes[place + 1][1]
            places = torch.searchsorted(rows, needed)
            kept = [*_cut(stage, rows, n), *_chosen(places, (len(rows), width)), *kept]
            needed = rows
    return fused([*_chosen(needed, shape), *kept])


def _rows(stage: Stage, needed: Rows, n: int) -> Rows | None:
    """The rows of the input behind these rows of the output, sorted; None where it is all of them."""
    if isinstance(stage, Piece):
        return stage.rows_behind(needed, n)
    rows: Rows | None = needed
    for piece in reversed(stage.pieces):
        rows = None if rows is None or piece.pools else piece.rows_behind(rows, n)
    return None if rows is None else distinct(rows, needed)


def _chosen(rows: Rows, shape: tuple[int, int]) -> list[Stage]:
    """The piece that keeps these rows alone, if there are others."""
    return [*choice(rows.unsqueeze(-1) * shape[1] + torch.arange(shape[1]), shape)]


def _cut(stage: Stage, rows: Rows, n: int) -> Sequence[Stage]:
    """The stage on some of its n tokens."""
    if len(rows) == n:
        return [stage]
    if isinstance(stage, Piece):
        return stage.on_rows(rows, rows)
    return [Residual(tuple(cut for piece in stage.pieces for cut in piece.on_rows(rows, rows)))]
