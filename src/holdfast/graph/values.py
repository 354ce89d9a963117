"""What a tensor of a model's graph is, as a function of what moves.

A graph is read operator by operator. A tensor that does not depend on what moves is a plain `Tensor`. One that does is
a `Moving`: every entry an affine function of one row of a point, a matrix (n, d) that a step of the network computes,

    value[e] = Σ_t gain_t[e] · (⟨point[row[e], :], matrix[:, column_t[e]]⟩ + bias[column_t[e]]) + constant[e].

Operators that only rearrange entries (views, permutations, slices, concatenations) act on the four index tensors, so
that no layout has to be guessed: which head, token and channel an entry belongs to is read off them in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.layers.piece import Piece

#: The row of an entry that does not move.
FIXED = -1


@final
@dataclass(frozen=True, eq=False)
class Step:
    """How a point comes about: pieces, one after the other, behind one source; or several sources added or joined.

    Attributes:
        sources: what enters; several where `join` says how they become one.
        pieces: what is applied then.
        join: "add", or "channels": the sources side by side, token by token.
        label: what a message calls it.
    """

    sources: tuple[Point, ...]
    pieces: tuple[Piece, ...] = ()
    join: str | None = None
    label: str = ""


@final
@dataclass(frozen=True, eq=False)
class Point:
    """A matrix (n, d) that moves: what enters the network, where `step` is None, or what a step computes.

    Attributes:
        origin: the tensor (n, d) whose matrix it is, as a function of an earlier point, where it was made of one.
    """

    shape: tuple[int, int]
    step: Step | None = None
    origin: Moving | None = None
    memory: list[tuple[Moving, Point]] = field(default_factory=list, repr=False)  # points that were made from it

    def view(self, shape: Sequence[int]) -> Moving:
        """Its entries, row after row, as a tensor of the shape."""
        entries = torch.arange(self.shape[0] * self.shape[1]).reshape(tuple(shape))
        row, column = entries // self.shape[1], entries % self.shape[1]
        ones = torch.ones((), dtype=torch.float64).expand(entries.shape)
        return Moving(self, row, (Term(column, ones),), None, torch.zeros_like(ones))


@final
@dataclass(frozen=True, eq=False)
class Term:
    """Which column of the matrix an entry takes, and how often."""

    column: Int64[Tensor, "*shape"]
    gain: Float64[Tensor, "*shape"]


@final
@dataclass(frozen=True, eq=False)
class Map:
    """One affine map for all rows: the columns of the matrix, each with its bias."""

    matrix: Float64[Tensor, "d c"]
    bias: Float64[Tensor, " c"]

    @classmethod
    def identity(cls, d: int) -> Map:
        return cls(torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64))


@final
@dataclass(frozen=True, eq=False)
class Moving:
    """A tensor whose entries are affine functions of the rows of a point; see the module.

    Attributes:
        point: what it depends on.
        row: of the point, or `FIXED` where the entry is the constant alone.
        terms: at least one.
        map: matrix and bias, or None for the identity.
        constant: what is added.
    """

    point: Point
    row: Int64[Tensor, "*shape"]
    terms: tuple[Term, ...]
    map: Map | None
    constant: Float64[Tensor, "*shape"]
    memory: dict[str, Any] = field(default_factory=dict, repr=False)  # what has been made of it

    @property
    def shape(self) -> torch.Size:
        return self.row.shape

    def rearranged(self, move: Callable[[Tensor], Tensor]) -> Moving:
        """The entries in other places; `move` must treat all dtypes alike."""
        terms = tuple(Term(move(t.column), move(t.gain)) for t in self.terms)
        return Moving(self.point, move(self.row), terms, self.map, move(self.constant))

    def reshape(self, *shape: int) -> Moving:
        return self.rearranged(lambda t: t.reshape(shape))

    def expand(self, shape: Sequence[int]) -> Moving:
        return self if self.shape == tuple(shape) else self.rearranged(lambda t: t.expand(tuple(shape)))

    def scaled(self, factor: Tensor | float, *, divide: bool = False) -> Moving:
        """Entry by entry multiplied, or divided, by what does not move."""
        factor = torch.as_tensor(factor, dtype=torch.float64)
        shape = broadcast(self.shape, factor.shape)
        wide = self.expand(shape)

        def times(t: Tensor) -> Tensor:
            return t / factor if divide else t * factor

        terms = tuple(Term(t.column, times(t.gain).expand(shape)) for t in wide.terms)
        return replace(wide, terms=terms, constant=times(wide.constant).expand(shape), memory={})

    def shifted(self, constant: Tensor | float) -> Moving:
        """With something added that does not move."""
        constant = torch.as_tensor(constant, dtype=torch.float64)
        wide = self.expand(broadcast(self.shape, constant.shape))
        bias = wide._as_bias(constant.expand(wide.shape))
        if bias is not None and wide.map is not None:
            return replace(wide, map=Map(wide.map.matrix, wide.map.bias + bias), memory={})
        return replace(wide, constant=wide.constant + constant, memory={})

    def _as_bias(self, constant: Float64[Tensor, "*shape"]) -> Float64[Tensor, " c"] | None:
        """A constant as a bias of the map's columns, where it is one; it then takes part in what follows."""
        if self.map is None or len(self.terms) > 1 or bool((self.row == FIXED).any()):
            return None
        if bool(self.map.bias.any()) or not bool((self.terms[0].gain == 1).all()):
            return None
        column = self.terms[0].column
        bias = torch.zeros_like(self.map.bias)
        bias[column.flatten()] = constant.flatten()
        return bias if torch.equal(bias[column], constant) else None

    @property
    def plain(self) -> bool:
        """Whether the entries are entries of the point, or constants."""
        if self.map is not None or len(self.terms) > 1:
            return False
        moving = self.row != FIXED
        return bool((self.terms[0].gain[moving] == 1).all()) and not bool(self.constant[moving].any())

    @property
    def entries(self) -> Int64[Tensor, "*shape"]:
        """Where each entry stands in the flattened point, for one that is `plain`; `FIXED` for constants."""
        return torch.where(self.row == FIXED, FIXED, self.row * self.point.shape[1] + self.terms[0].column)

    def is_point(self) -> bool:
        """Whether it is the point itself, row after row, whatever its shape."""
        if not self.plain or self.row.numel() != self.point.shape[0] * self.point.shape[1]:
            return False
        return torch.equal(self.entries.flatten(), torch.arange(self.row.numel()))


def broadcast(*shapes: Sequence[int]) -> torch.Size:
    """The shape of tensors of these shapes together."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def same(a: Moving, b: Moving) -> bool:
    """Whether two tensors are the same function of the same point."""
    if a is b:
        return True
    if a.point is not b.point or a.shape != b.shape or len(a.terms) != len(b.terms):
        return False
    pairs = [(a.row, b.row), (a.constant, b.constant)]
    if a.map is not b.map:
        if a.map is None or b.map is None or a.map.matrix.shape != b.map.matrix.shape:
            return False
        pairs += [(a.map.matrix, b.map.matrix), (a.map.bias, b.map.bias)]
    pairs += [
        (x, y) for s, t in zip(a.terms, b.terms, strict=True) for x, y in ((s.column, t.column), (s.gain, t.gain))
    ]
    return all(torch.equal(x, y) for x, y in pairs)


def multiple(a: Moving, b: Moving) -> float | None:
    """The number c with a = c b, up to the rounding of c b; None where there is none."""
    if same(a, b):
        return 1.0
    largest = int(b.terms[0].gain.abs().argmax())
    size = float(b.terms[0].gain.flatten()[largest])
    if a.point is not b.point or a.shape != b.shape or size == 0:
        return None
    c = float(a.terms[0].gain.flatten()[largest]) / size

    def snapped(x: Tensor, y: Tensor) -> Tensor:
        """X, with what differs by rounding from c y put in its place."""
        return torch.where((x - c * y).abs() <= 1e-15 * x.abs(), c * y, x)

    pairs = zip(a.terms, b.terms, strict=False)
    terms = tuple(replace(s, gain=snapped(s.gain, t.gain)) for s, t in pairs)
    close = replace(a, terms=terms, constant=snapped(a.constant, b.constant), memory={})
    return c if len(a.terms) == len(b.terms) and same(close, b.scaled(c)) else None


def ratio(a: Moving, b: Moving) -> Float64[Tensor, " d"] | None:
    """The numbers w with a = w ∘ b, the same along the last dimension of all rows; None where there are none."""
    if a.shape != b.shape:
        return None
    of, by = (value.terms[0].gain.reshape(-1, value.shape[-1]) for value in (a, b))
    largest = by.abs().argmax(0, keepdim=True)  # padding does not move, and has gain 0
    of, by = of.gather(0, largest), by.gather(0, largest)
    w = torch.where(by == 0, 1.0, of / by).squeeze(0)
    return w if same(a, b.scaled(w)) else None


def added(a: Moving, b: Moving) -> Moving | None:
    """The sum of two functions of the same rows of one point; None where they are of different ones."""
    shape = broadcast(a.shape, b.shape)
    a, b = a.expand(shape), b.expand(shape)
    both = (a.row != FIXED) & (b.row != FIXED)
    if a.point is not b.point or not torch.equal(a.row[both], b.row[both]):
        return None
    whole, offsets = _maps([a, b])
    terms = [Term(t.column, torch.where(a.row == FIXED, 0.0, t.gain)) for t in a.terms]
    terms += [Term(t.column + offsets[1], torch.where(b.row == FIXED, 0.0, t.gain)) for t in b.terms]
    return Moving(a.point, torch.maximum(a.row, b.row), tuple(terms), whole, a.constant + b.constant)


def _maps(parts: Sequence[Moving]) -> tuple[Map | None, list[int]]:
    """The maps of all parts in one, and where the columns of each begin; one that they share stands there once."""
    kept: dict[int, tuple[int, Map]] = {}
    width = 0
    for part in parts:
        if id(part.map) not in kept:
            own = part.map or Map.identity(part.point.shape[1])
            kept[id(part.map)] = width, own
            width += len(own.bias)
    offsets = [kept[id(part.map)][0] for part in parts]
    if len(kept) == 1:
        return parts[0].map, offsets
    maps = [own for _, own in kept.values()]
    return Map(torch.cat([m.matrix for m in maps], 1), torch.cat([m.bias for m in maps])), offsets


def joined(parts: Sequence[Moving | Tensor], join: Callable[[list[Tensor]], Tensor]) -> Moving | None:
    """A concatenation or a stack, by `join`, of functions of one point and of constants; None for several points."""
    moving = [part for part in parts if isinstance(part, Moving)]
    first = moving[0]
    if any(m.point is not first.point for m in moving):
        return None
    whole, offsets = _maps(moving)
    shifts = iter(offsets)

    def fixed(part: Tensor) -> Moving:
        none = torch.full(part.shape, FIXED)
        zero = torch.zeros(part.shape, dtype=torch.float64)
        return Moving(first.point, none, (Term(torch.zeros_like(none), zero),), None, part.double())

    def term(m: Moving, i: int, shift: int) -> Term:
        if i < len(m.terms):
            return Term(m.terms[i].column + shift, m.terms[i].gain)
        return Term(torch.zeros_like(m.row), torch.zeros_like(m.constant))

    full = [(m, next(shifts)) if isinstance(m, Moving) else (fixed(m), 0) for m in parts]
    terms = []
    for i in range(max(len(m.terms) for m in moving)):
        ith_terms = [term(m, i, shift) for m, shift in full]
        terms.append(Term(join([t.column for t in ith_terms]), join([t.gain for t in ith_terms])))
    row, constant = join([m.row for m, _ in full]), join([m.constant for m, _ in full])
    return Moving(first.point, row, tuple(terms), whole, constant)
