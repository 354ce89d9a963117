"""Rearranged entries: chosen, repeated, left out, or scaled one by one."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.layers.tokens.pooling import ClassToken
from holdfast.layers.tokens.rows import Rows, distinct, entries_among
from holdfast.layers.weights import double, weight
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import outward


@final
class Rearrangement(LinearPiece):
    """Entries of a token matrix in other places: patches, neighbours on a grid, flattening.

    Every entry stands in the output root² times, divided by root: ‖f(u)‖ = ‖u‖.

    Args:
        index: (m, c) where each entry of the output comes from, in the flattened input.
        shape: (n, d) of the input.
        root: of the number of places of an entry.
    """

    def __init__(self, index: Int64[Tensor, "m c"], shape: tuple[int, int], root: int = 1) -> None:
        places = torch.arange(math.prod(shape), device=index.device).repeat_interleave(root**2)
        order = index.flatten().sort(stable=True)
        if not torch.equal(order.values, places):
            times = f"{root**2} times" if root > 1 else "once"
            raise InputError(f"an index of shape {tuple(index.shape)} does not use every entry of {shape} {times}")
        self._index, self._root = index, root
        self._inverse = order.indices.reshape(*shape, root**2)

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(torch.ones((), dtype=torch.float64, device=self._index.device))

    def value(self, u: Array) -> Array:
        return self._shared(u).flatten(-2, -1)[..., self._index.to(u.device)]

    def push(self, u: Array, a: Array) -> Array:
        return self.value(a)

    def pull(self, u: Array, c: Array) -> Array:
        back = c.flatten(-2, -1)[..., self._inverse.to(c.device)]
        return back[..., 0] if self._root == 1 else self._shared(back.sum(-1))

    def _shared(self, u: Array) -> Array:
        return u if self._root == 1 else u / float(self._root)


@final
class Selection(LinearPiece):
    """Chosen entries of a token matrix, in any places and any number of times; zero where none is chosen.

    An entry that stands in the output m times at most gives the norm √m.

    Args:
        index: (m, c) where each entry of the output comes from, in the flattened input; -1 for zero.
        shape: (n, d) of the input.
    """

    pools = True

    def __init__(self, index: Int64[Tensor, "m c"], shape: tuple[int, int]) -> None:
        whole = index.dtype == torch.int64 and index.ndim == 2 and index.numel() > 0
        if not whole or int(index.min()) < -1 or int(index.max()) >= math.prod(shape):
            given = f"{index.dtype} {tuple(index.shape)}"
            raise InputError(f"an index of {given} does not choose entries of {shape}")
        self.index, self.shape = index, shape
        self._places = places(index, math.prod(shape))

    @property
    def most(self) -> int:
        """How often an entry stands in the output, at most."""
        return len(self._places)

    def rows_behind(self, rows: Rows, n: int) -> Rows:
        entries = self.index[rows].flatten()
        return distinct(entries[entries >= 0] // self.shape[1])

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        d = self.shape[1]
        return choice(entries_among(self.index[needed], rows, d), (len(rows), d))

    def value(self, u: Array) -> Array:
        return self.push(u, u)

    def push(self, u: Array, a: Array) -> Array:
        return gathered(a.flatten(-2, -1), self.index)

    def pull(self, u: Array, c: Array) -> Array:
        back = gathered(c.flatten(-2, -1), self._places)
        back = back[..., 0, :] if len(self._places) == 1 else back.sum(-2)
        return back.reshape(*back.shape[:-1], *self.shape)

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(torch.tensor(float(self.most), dtype=torch.float64)).sqrt()


@final
class WeightedSelection(LinearPiece):
    """Chosen entries of a token matrix, each times a weight; zero where none is chosen.

    Column j of its matrix holds the weights in the places of entry j, and its rows hold one number each: the norm is
    the length of the longest column.

    Args:
        index: see `Selection`.
        weights: (m, c) of the places in the output.
        shape: (n, d) of the input.
    """

    def __init__(self, index: Int64[Tensor, "m c"], weights: Float[Tensor, "m c"], shape: tuple[int, int]) -> None:
        self._chosen, self._weights = Selection(index, shape), double(weights, "weights", 2)
        if index.shape != weights.shape:
            raise InputError(f"weights have shape {tuple(weights.shape)}; expected {tuple(index.shape)}, as the index")

    def value(self, u: Array) -> Array:
        return self.push(u, u)

    def push(self, u: Array, a: Array) -> Array:
        return self._chosen.push(u, a) * weight(self._weights, u)

    def pull(self, u: Array, c: Array) -> Array:
        return self._chosen.pull(u, c * weight(self._weights, u))

    def norm(self, a: Arithmetic[Array]) -> Array:
        squares = self._chosen.pull(self._weights, self._weights.square())
        return a.lift(outward(squares.amax(), self._chosen.most)).sqrt()


@final
class Scale(LinearPiece):
    """Every entry times a number of its own; the norm is the largest of them.

    Args:
        factors: (n, d), or (d) for every token alike.
    """

    tokenwise = True

    def __init__(self, factors: Float[Tensor, "*n d"]) -> None:
        self.factors = double(factors, "factors", 1, 2)

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        return (Scale(self.factors[rows]) if self.factors.ndim == 2 else self,)

    def value(self, u: Array) -> Array:
        return u * weight(self.factors, u)

    def push(self, u: Array, a: Array) -> Array:
        return a * weight(self.factors, u)

    def pull(self, u: Array, c: Array) -> Array:
        return c * weight(self.factors, u)

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(self.factors.abs().amax())


def gathered(x: Array, index: Tensor) -> Array:
    """The entries of x (…, k) at the index; zero where it is negative."""
    index = index.to(x.device)
    return x[..., index.clamp(min=0)].masked_fill(index < 0, 0.0)


def places(chosen: Tensor, entries: int) -> Tensor:
    """(most, entries) where in a choice of entries each of them stands; -1 where it stands there less often."""
    flat = chosen.flatten()
    where = (flat >= 0).nonzero().squeeze(-1)
    order = flat[where].argsort(stable=True)
    taken, where = flat[where][order], where[order]
    count = torch.bincount(taken, minlength=entries)
    rank = torch.arange(len(taken)) - (count.cumsum(0) - count)[taken]
    stands = torch.full((max(1, int(count.max())), entries), -1)
    stands[rank, taken] = where
    return stands


def choice(index: Int64[Tensor, "n d"], shape: tuple[int, int]) -> tuple[Piece, ...]:
    """The piece that puts entries into these places."""
    everything = torch.arange(shape[0] * shape[1]).reshape(shape)
    if index.shape == everything.shape and torch.equal(index, everything):
        return ()
    if len(index) == 1 and index.shape[1] == shape[1]:
        token = int(index[0, 0]) // shape[1]
        if torch.equal(index[0], everything[token]):
            return (ClassToken(token),)
    return (Selection(index.contiguous(), shape),)
