"""From index tensors back to pieces: a tensor of the graph as a matrix that pieces compute."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.graph.values import FIXED, Map, Moving, Point, Step, Term, same
from holdfast.layers.activation.piece import KinkedEntries, SmoothEntries
from holdfast.layers.linear.piece import Affine
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.embedding import AddPositions
from holdfast.layers.tokens.selection import Scale, choice


def matrix_of(value: Moving, shape: tuple[int, int] | None = None) -> Point:
    """The point whose matrix is the tensor, of the shape (n, d); by default, its last dimension are the channels.

    A tensor that a model computes twice, or rearranges to and fro, has one point.
    """
    n, d = shape or (math.prod(value.shape[:-1]), value.shape[-1] if value.shape else 1)
    key = f"matrix {n} {d}"
    if key not in value.memory:
        flat = value.reshape(n, d)
        made = next((point for known, point in value.point.memory if same(known, flat)), None)
        if made is None:
            made = _matrix_of(flat)
            made = made if made is value.point else replace(made, origin=flat)
            value.point.memory.append((flat, made))
        value.memory[key] = made
    point: Point = value.memory[key]
    return point


def through(point: Point, shape: tuple[int, int], *pieces: Piece, label: str = "") -> Point:
    """The point behind some more pieces."""
    return Point(shape, Step((point,), pieces, label=label)) if pieces else point


def sum_of(values: list[Moving]) -> Point:
    """The point whose matrix is the sum of tensors of one shape that depend on different points."""
    points = [matrix_of(value) for value in values]
    return Point(points[0].shape, Step(tuple(points), join="add"))


def beside(values: list[Moving]) -> Point:
    """The point with the channels of several tensors side by side, token by token."""
    points = [matrix_of(value) for value in values]
    width = sum(point.shape[1] for point in points)
    return Point((points[0].shape[0], width), Step(tuple(points), join="channels"))


def _matrix_of(value: Moving) -> Point:
    """The point of a tensor (n, d)."""
    value = _folded(value)
    if value.is_point() and value.point.shape == value.shape:
        return value.point
    if len(value.terms) > 1:
        zero = torch.zeros_like(value.constant)
        parts = [Moving(value.point, value.row, (t,), value.map, zero) for t in value.terms]
        return through(sum_of(parts), _size(value), *_shift(value.constant))
    base, chosen = value.point, value
    if value.map is not None:
        rows = _rows(value)
        columns = None if rows is None else _columns(value.row, value.terms[0].column)
        if rows is not None and columns is not None:
            return _tokenwise(value, rows, Map(value.map.matrix[:, columns], value.map.bias[columns]))
        size = (value.point.shape[0], len(value.map.bias))
        base = through(value.point, size, Affine(value.map.matrix, value.map.bias))
        chosen = Moving(base, value.row, value.terms, None, value.constant)
    gain = torch.where(value.row == FIXED, 1.0, value.terms[0].gain)
    pieces = (*choice(chosen.entries, base.shape), *_scale(gain), *_shift(value.constant))
    return through(base, _size(value), *pieces)


def _tokenwise(value: Moving, rows: Int64[Tensor, " n"], own: Map) -> Point:
    """One affine map for all rows that move; the others are constants."""
    point, (n, c) = value.point, _size(value)
    fixed = (rows == FIXED).unsqueeze(-1)
    if not torch.equal(rows, torch.arange(point.shape[0])):
        d = point.shape[1]
        index = torch.where(fixed, FIXED, rows.unsqueeze(-1) * d + torch.arange(d))
        point = through(point, (n, d), *choice(index, point.shape))
    gain = torch.where(fixed, 1.0, value.terms[0].gain)
    if not bool(fixed.any()):
        return through(point, (n, c), Affine(own.matrix, own.bias), *_scale(gain), *_shift(value.constant))
    constant = value.constant + torch.where(fixed, 0.0, gain * own.bias)
    return through(point, (n, c), Affine(own.matrix), *_scale(gain), *_shift(constant))


def _folded(value: Moving) -> Moving:
    """Several terms as one, where every row that moves takes the same columns equally often."""
    if len(value.terms) == 1:
        return value
    rows = _rows(value)
    columns = [_columns(value.row, t.column) for t in value.terms]
    gains = [_columns(value.row, t.gain) for t in value.terms]
    if rows is None or any(c is None for c in columns) or any(g is None for g in gains):
        return value
    own = value.map or Map.identity(value.point.shape[1])
    pairs = [(c, g) for c, g in zip(columns, gains, strict=True) if c is not None and g is not None]
    matrix = torch.stack([own.matrix[:, c] * g for c, g in pairs]).sum(0)
    bias = torch.stack([own.bias[c] * g for c, g in pairs]).sum(0)
    column = torch.arange(value.shape[-1]).expand(value.shape)
    moving = torch.where(value.row == FIXED, 0.0, 1.0).to(torch.float64)
    return Moving(value.point, value.row, (Term(column, moving),), Map(matrix, bias), value.constant)


def _rows(value: Moving) -> Int64[Tensor, " n"] | None:
    """The row of the point behind each row of the tensor, where all entries of a row agree."""
    rows = value.row.amax(-1)
    return rows if bool((value.row == rows.unsqueeze(-1)).all()) else None


def _columns(row: Int64[Tensor, "n d"], given: Tensor) -> Tensor | None:
    """What each column has, where all rows that move agree."""
    moving = row[:, 0] != FIXED
    if not bool(moving.any()):
        return given[0]
    kept = given[moving]
    return kept[0] if bool((kept == kept[:1]).all()) else None


def _scale(gain: Float64[Tensor, "n d"]) -> tuple[Piece, ...]:
    return () if bool((gain == 1).all()) else (Scale(_alike(gain)),)


def _shift(constant: Float64[Tensor, "n d"]) -> tuple[Piece, ...]:
    return (AddPositions(_alike(constant)),) if bool(constant.any()) else ()


def _alike(rows: Float64[Tensor, "n d"]) -> Tensor:
    """One row, where all are equal."""
    return rows[0].clone() if len(rows) > 1 and bool((rows == rows[:1]).all()) else rows.contiguous()


def _size(value: Moving) -> tuple[int, int]:
    return value.shape[0], value.shape[1]


def token_view(value: Moving) -> tuple[Int64[Tensor, " n"] | None, Int64[Tensor, " d"] | None]:
    """Rows and columns of a tensor (…, d) that shows whole tokens of a point, the same channels of each.

    Two Nones where it is anything else.
    """
    if value.plain and value.shape:
        flat = value.reshape(-1, value.shape[-1])
        rows, columns = _rows(flat), _columns(flat.row, flat.terms[0].column)
        moving = rows is not None and not bool((rows == FIXED).any())
        if moving and columns is not None and len(torch.unique(columns)) == len(columns):
            return rows, columns
    return None, None


def centred(value: Moving) -> tuple[Point, bool]:
    """The point x whose matrix minus the mean of each row is the tensor, and True; or the tensor's own, and False."""
    flat = _folded(value.reshape(-1, value.shape[-1]))
    d = value.shape[-1]
    if flat.map is not None and len(flat.terms) == 1 and d == value.point.shape[1]:
        column, gain = flat.terms[0].column, flat.terms[0].gain
        whole = torch.equal(column, torch.arange(d).expand(column.shape)) and bool((gain == 1).all())
        projection = torch.eye(d, dtype=torch.float64) - 1 / d
        exact = torch.allclose(flat.map.matrix, projection, rtol=0, atol=1e-15)
        if whole and exact and not bool(flat.map.bias.any()) and not bool(flat.constant.any()):
            rows = _rows(flat)
            if rows is not None and torch.equal(rows, torch.arange(value.point.shape[0])):
                return value.point, True
    return matrix_of(value), False


def gate(a: Moving, b: Moving) -> Point | None:
    """φ(x W) and x V side by side, from x in one chain, where that is what a and b are."""
    inner = matrix_of(a)
    step = inner.step
    if step is None or len(step.sources) != 1 or len(step.pieces) != 1 or not _is_activation(step.pieces[0]):
        return None
    before = step.sources[0].step
    if before is None or len(before.sources) != 1 or len(before.pieces) != 1:
        return None
    first, outer = before.pieces[0], matrix_of(b).step
    if not isinstance(first, Affine) or outer is None or outer.sources != before.sources or len(outer.pieces) != 1:
        return None
    second = outer.pieces[0]
    if not isinstance(second, Affine) or second.w.shape != first.w.shape:
        return None
    n, c = inner.shape
    whole = Affine(torch.cat([first.w, second.w], 1), torch.cat([first.b, second.b]))
    active = torch.arange(2 * c) < c
    piece = step.pieces[0]
    assert isinstance(piece, SmoothEntries | KinkedEntries)
    return through(before.sources[0], (n, 2 * c), whole, piece.on(active), label="gate")


def _is_activation(piece: Piece) -> bool:
    return isinstance(piece, SmoothEntries | KinkedEntries)
