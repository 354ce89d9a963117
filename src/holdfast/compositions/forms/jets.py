"""The second and third orders of every function of a place, each as one form: those of all earlier places together.

With q_l and c_l the second and third orders of place l in its own functions, whose first and second orders are X b and
Y[b, b], a place's input moves by J b + T[b, b] + U[b, b, b] and what is of fourth order, where

    T ↦ A_l T + q_l(X, X),    U ↦ A_l U + 2q_l(X, Y) + c_l(X, X, X)

along the network. In a function's forms all places meet before anything is bounded (docs/math/forms.md, section 9).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.local import NARROW, THETA, SmoothLocal, second_lengths, token_lengths
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.third import Triples
from holdfast.compositions.forms.walk import CentreWalk, Covectors
from holdfast.layers.piece import LinearPiece
from holdfast.linalg import Ball
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import UNIT, frobenius_upper, up
from holdfast.linalg.squarings import gram_norm
from holdfast.usage import give_back_memory

_NUMBERS = 2**25  # of T at one place, at most
_PRODUCTS = 2e11  # for the norms of all functions' second orders, at most
_TWISTS = 3e9  # numbers of all functions' third orders, at most
_CHUNK = 2**20
_SQUARINGS = 2
_TRIPLES = 256  # or pairs, that are examined together


@final
class Jets:
    """T and U at the places of a network; places are asked for in order, and each must have its first order by then.

    Both are symmetric, T kept for pairs of directions and U for some triples at a time.

    Attributes:
        second, third: for every place that is not affine, bounds of its functions' second and third orders, for
            ‖b‖ <= 1; the margins are at the number of places. There is no third where that would cost too much.
        forms, unsure: (classes - 1, p, p) the margins' second order, and (classes - 1) what it was rounded by.
    """

    def __init__(self, walk: CentreWalk, region: Region, in_time: Callable[[], None]) -> None:
        self._walk, self._in_time, self._directions = walk, in_time, Directions(region.p, torch.device("cpu"))
        functions = sum(walk.local(i).scalars for i in walk.curved)
        p, self.second, self.third = region.p, dict[int, Tensor](), dict[int, Tensor]()
        self._twisted = p * (p + 1) * (p + 2) / 6 * functions <= _TWISTS
        self._kept: dict[int, Tensor] = {}  # second orders of all functions, in float32
        # At degrees 2 and 3: sizes at the inputs of all places, and what rounding did in each.
        self._sizes, self._defects = torch.zeros(2, 2, len(walk.places) + 1, dtype=torch.float64)
        self._accuracy: dict[int, Tensor] = {}
        self._longest: dict[int, float] = {}  # covectors
        self._steps = self._walked()

    @staticmethod
    def affordable(walk: CentreWalk, region: Region) -> bool:
        """Whether all places are smooth, T fits into memory, and the norms of all functions into a minute."""
        if not all(isinstance(walk.local(i), SmoothLocal) for i in walk.curved):
            return False
        widest = max((place.u.numel() for place in walk.places), default=0)
        functions = sum(walk.local(i).scalars for i in walk.curved)
        fits = region.p * (region.p + 1) // 2 * widest <= _NUMBERS
        return fits and functions * 2.0 * (_SQUARINGS + 1) * region.p**3 <= _PRODUCTS

    def reach(self, i: int, lengths: Float64[Tensor, " K"], error: Tensor) -> None:
        """Goes on to place i, whose functions are covectors of these lengths, rounded by `error`."""
        place, T = next(self._steps)
        assert place == i
        # Functions are computed in another order than by their covectors, within this of ‖T‖.
        self._accuracy[i], self._longest[i] = 4 * error + 8 * THETA * lengths, float(lengths.amax())
        self._kept[i] = seen = torch.zeros(len(lengths), len(self._directions.first), dtype=torch.float32)
        error = self._accuracy[i] * self._sizes[0, i]
        if T is not None:
            for part in torch.split(torch.arange(len(T)), _TRIPLES):
                seen[:, part] = self._local(i).functions(T[part]).float()
            error = error + NARROW * second_lengths(seen)
        self._local(i).meet(2, seen, self._directions.count, float(error.amax()), self._directions)
        self.second[i] = self._norms(seen, error)

    def finish(self) -> None:
        """The margins' second order, and all third orders."""
        end, T = next(self._steps)
        del self._steps  # which holds this, in a cycle, and the last T
        rows = self._walk.rows.flatten(1)
        pairs = torch.zeros(len(rows), len(self._directions.first)).double() if T is None else rows @ T.flatten(1).mT
        self.forms = pairs[:, self._directions.place]
        self._sizes[0, end] = 0.0 if T is None else self._length(T)
        self._accuracy[end] = 8 * THETA * frobenius_upper(rows, (-1,))
        self.unsure = up(self._accuracy[end] * self._sizes[0, end], 1e-9)
        self.second[end] = self._norms(pairs, self.unsure)
        if self._twisted:
            self._twist(end)
        self._kept.clear()

    def _local(self, i: int) -> SmoothLocal:
        local = self._walk.local(i)
        assert isinstance(local, SmoothLocal)
        return local

    def _norms(self, pairs: Tensor, error: Tensor) -> Tensor:
        """(K) bounds of the norms of forms (K, pairs) that are known up to an error."""
        parts = [
            up(gram_norm(some[:, self._directions.place].double(), unsure, _SQUARINGS).square(), 1e-9)
            for some, unsure in zip(
                *(torch.split(x, max(1, _CHUNK // self._directions.p**2)) for x in (pairs, error)), strict=True
            )
        ]
        return torch.cat(parts)

    def tiny(self, functions: Covectors, radius: float) -> tuple[Tensor, Tensor]:
        """(K) bounds of what rounding may have done to the functions' second and third orders."""
        lost = functions.lengths @ self._defects[:, :-1].mT + functions.moving @ self._sizes[:, :-1].mT
        second, third = lost.unbind(-1)
        return second * up(radius * radius, 1e-9), third * up(radius * radius * radius, 1e-9)

    # -- T

    def _walked(self) -> Iterator[tuple[int, Tensor | None]]:
        """Every place that is not affine, and the features, with T there; None stands for zero."""
        T: Tensor | None = None
        for members, skip, _ in self._walk.stages:
            stream = T
            for i in members:
                place = self._walk.places[i]
                if T is not None:
                    self._sizes[0, i] = self._length(T)
                if place.local is not None:
                    yield i, T
                    T = self._through(i, self._local(i), T)
                elif T is not None:
                    T, lost = _through_linear(place.piece, place.u, T)
                    self._defects[0, i] = self._length(lost)
            if skip and stream is not None:
                assert T is not None
                T = stream + T
                self._defects[0, members[-1]] += 2 * UNIT * self._length(T)
        yield len(self._walk.places), T

    def _through(self, i: int, local: SmoothLocal, T: Tensor | None) -> Tensor:
        new, defect = local.second_order(self._directions)
        self._defects[0, i] = defect
        if T is None:
            return new
        lost = []
        for part in torch.split(torch.arange(len(T)), max(1, _CHUNK // (8 * new[0].numel()))):
            self._in_time()
            pushed, error = local.push(T[part])
            new[part] += pushed
            lost.append(error)
        weight = self._directions.count.sqrt()
        self._defects[0, i] += up(torch.linalg.vector_norm(torch.cat(lost) * weight), 1e-9)
        self._defects[0, i] += 2 * UNIT * self._length(new)
        return new

    def _length(self, T: Tensor) -> Tensor:
        """A bound of the Frobenius norm of T for ordered pairs, and so of ‖T[b, b]‖ for ‖b‖ <= 1."""
        length: Tensor = torch.linalg.vector_norm(token_lengths(T) * self._directions.count.sqrt())
        return up(length, 1e-9)

    # -- U

    def _twist(self, end: int) -> None:
        """Third orders, some triples after the others; squares of all norms are added."""
        walk, twists = self._walk, {}
        for i in list(self._kept):
            size = up(float(self._sizes[0, i]) * self._longest[i], 1e-9)
            twists[i], self._defects[1, i] = self._local(i).third_order(self._kept.pop(i), size, self._directions)
        squares = {i: torch.zeros(len(x), dtype=torch.float64) for i, x in self.second.items()}
        sizes, defects = torch.zeros_like(self._sizes)
        some = (Triples.parts(q, self._directions, _TRIPLES) for q in range(self._directions.p))
        give_back_memory()
        for triples in itertools.chain.from_iterable(some):
            self._in_time()
            count = triples.count
            U: Tensor | None = None
            for members, skip, _ in walk.stages:
                stream = U
                for i in members:
                    place = walk.places[i]
                    if U is not None:
                        sizes[i] += count @ token_lengths(U).square()
                    if place.local is not None:
                        new = twists[i](triples) / 3
                        if U is not None:
                            seen = self._local(i).functions(U)
                            squares[i] += seen.square() @ count
                            self._local(i).meet(3, seen, count, 0.0, self._directions)
                            pushed, lost = self._local(i).push(U)
                            new += pushed
                            defects[i] += count @ (lost + 4 * UNIT * token_lengths(new)).square()
                        U = new
                    elif U is not None:
                        U, rounded = _through_linear(place.piece, place.u, U)
                        defects[i] += count @ token_lengths(rounded).square()
                if skip and stream is not None:
                    assert U is not None
                    U = stream + U
                    defects[members[-1]] += count @ (2 * UNIT * token_lengths(U)).square()
            if U is not None:
                sizes[end] += count @ token_lengths(U).square()
                squares[end] += (walk.rows.flatten(1) @ U.flatten(1).mT).square() @ count
        self._sizes[1] = up(sizes.sqrt(), 1e-9)
        # What was added at one place in three ways is at most √3 of its length.
        self._defects[1] += up((3 * defects).sqrt(), 1e-9)
        for i, square in squares.items():
            unsure = self._accuracy[i] * self._sizes[1, i]
            self.third[i] = up(square.sqrt() + unsure, 1e-9)
            if i < end:
                nothing = torch.zeros(len(square), 1, dtype=torch.float64)
                self._local(i).meet(3, nothing, nothing[0], float(unsure.amax()), self._directions)


def _through_linear(piece: object, u: Tensor, T: Tensor) -> tuple[Tensor, Tensor]:
    """What an affine piece makes of T, and what rounding did to it."""
    assert isinstance(piece, LinearPiece)
    out = piece.push(Ball.exact(u), Ball.exact(T))
    return out.mid, out.rad
