"""From points to stages: the chain of pieces and residual branches that computes one point from another.

Every path from the input to the output passes through certain points. Between two neighbouring ones lies one step, or
a region of branches that end in a sum. A sum of the region's first point and one branch is a residual stage; any other
region is run as a chain on one row of all numbers that are still needed (`holdfast.layers.beside`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.graph.fuse import fused, fused_residual
from holdfast.graph.values import Point
from holdfast.layers.beside import Part, beside
from holdfast.layers.linear.piece import Affine
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.selection import Selection
from holdfast.network.network import Residual

Stage = Piece | Residual


def stages(start: Point, end: Point) -> list[Stage]:
    """The stages that compute `end` from `start`, on which alone it depends."""
    return fused(_chain(start, end))


def _chain(start: Point, end: Point) -> list[Stage]:
    parts: list[list[Stage]] = []
    order = _order(start, end)
    while end is not start:
        step = end.step
        assert step is not None
        if len(step.sources) == 1:
            parts.append([*step.pieces])
            end = step.sources[0]
        else:
            first = _gate(start, end, order)
            parts.append(_region(first, end))
            end = first
    return [stage for part in reversed(parts) for stage in part]


def _order(start: Point, end: Point) -> list[Point]:
    """Every point between the two, `start` first, each after what it depends on."""
    order: list[Point] = []
    seen: set[Point] = set()
    pending: list[tuple[Point, bool]] = [(end, False)]
    while pending:
        point, ready = pending.pop()
        if ready:
            order.append(point)
        elif point not in seen:
            seen.add(point)
            pending.append((point, True))
            if point is not start and point.step is not None:
                pending += [(source, False) for source in point.step.sources]
    return order


def _gate(start: Point, end: Point, order: Sequence[Point]) -> Point:
    """The last point before `end` that every path from `start` to `end` passes."""
    places = {point: place for place, point in enumerate(order)}
    waiting = {end}
    while True:
        last = max(waiting, key=places.__getitem__)
        if last is not end and len(waiting) == 1:
            return last
        waiting.remove(last)
        assert last.step is not None
        waiting.update(last.step.sources)


def _region(first: Point, end: Point) -> list[Stage]:
    """The stages from `first` to `end`, which joins several branches."""
    step = end.step
    assert step is not None
    if step.join == "add":
        terms = _terms(first, end)
        branches = [_chain(first, term) for term in terms if term is not first]
        plain = [piece for branch in branches for piece in branch if isinstance(piece, Piece)]
        if len(terms) == 2 and len(branches) == 1 and len(plain) == len(branches[0]):
            return [fused_residual(plain), *step.pieces]
    return _wide(first, end)


def _terms(first: Point, end: Point) -> list[Point]:
    """What the sum at `end` adds up; nested sums that nothing else needs are flattened."""
    assert end.step is not None
    users: dict[Point, int] = {}
    for point in _order(first, end):
        if point is not first and point.step is not None:
            for source in point.step.sources:
                users[source] = users.get(source, 0) + 1
    terms: list[Point] = []
    pending = list(end.step.sources)
    while pending:
        term = pending.pop(0)
        inner = None if term is first else term.step
        if inner is not None and inner.join == "add" and not inner.pieces and users[term] == 1:
            pending = [*inner.sources, *pending]
        else:
            terms.append(term)
    return terms


def _wide(first: Point, end: Point) -> list[Stage]:
    """A region of any shape: step by step on one row of all points that are still needed."""
    order = _order(first, end)
    needed = dict.fromkeys(order, 0)
    for point in order[1:]:
        assert point.step is not None
        for source in point.step.sources:
            needed[source] += 1
    size = math.prod(first.shape)
    state: dict[Point, Tensor] = {first: torch.arange(size).reshape(first.shape)}
    wide: list[Stage] = [] if first.shape[0] == 1 else [Selection(torch.arange(size).unsqueeze(0), first.shape)]
    for point in order[1:]:
        assert point.step is not None
        sources = [state[source] for source in point.step.sources]
        for source in point.step.sources:
            needed[source] -= 1
        alive = [other for other in state if needed[other] or other is end]
        taken, pieces = _entered(sources, point.step.join, point.step.pieces)
        waiting = torch.cat([state[other].flatten() for other in alive]) if alive else torch.zeros(0, dtype=torch.long)
        state, start = {}, 0
        for other in alive:
            count = math.prod(other.shape)
            state[other] = torch.arange(start, start + count).reshape(other.shape)
            start += count
        for place, piece in enumerate(pieces):
            shape = _output(piece, taken)
            wide.append(beside(piece, Part(taken, waiting if place == 0 else torch.arange(start), shape, size)))
            taken = torch.arange(start, start + math.prod(shape)).reshape(shape)
            size = start + math.prod(shape)
        state[point] = taken.reshape(point.shape)
    return [*wide, Selection(state[end], (1, size))]


def _entered(sources: Sequence[Tensor], join: str | None, pieces: Sequence[Piece]) -> tuple[Tensor, Sequence[Piece]]:
    """Where the entries stand that a step takes, and its pieces: with the sum or the choice in front of them."""
    if join == "add":
        columns = torch.stack([source.flatten() for source in sources], -1)
        total = Affine(torch.ones(len(sources), 1, dtype=torch.float64))
        shape = tuple(sources[0].shape)
        back = Selection(torch.arange(math.prod(shape)).reshape(shape), (math.prod(shape), 1))
        return columns, (total, back, *pieces)
    taken = torch.cat(list(sources), -1)
    if pieces:
        return taken, pieces
    return taken, (Selection(torch.arange(taken.numel()).reshape(taken.shape), (taken.shape[0], taken.shape[1])),)


def _output(piece: Piece, taken: Tensor) -> tuple[int, int]:
    with torch.no_grad():
        out = piece.value(torch.zeros(1, *taken.shape, dtype=torch.float64))
    return out.shape[-2], out.shape[-1]
