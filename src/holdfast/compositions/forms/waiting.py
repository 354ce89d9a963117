"""A piece on a part of the state while the rest waits: its rest is that of the piece itself.

The output is (K u, f(C u)) (`layers/beside.py`), so that e(δ) = (0, e_f(Cδ)): of a covector only the part that belongs
to f counts, and a function of f's input is one of the state, given back by Cᵀ.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import Local, Named, Problem, Rests, Size, SmoothLocal, Twist
from holdfast.compositions.forms.softmax import Softmax
from holdfast.compositions.forms.third import Triples
from holdfast.layers.beside import KinkedBeside, SmoothBeside
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import UNIT, frobenius_upper, up


class Waiting(Local):
    """A piece beside others, at ũ.

    Args:
        u: (1, S) the state.
        piece: what acts on a part of it.
        inner: the local of its piece there.
    """

    def __init__(self, u: Tensor, piece: KinkedBeside | SmoothBeside, inner: Local) -> None:
        self.u, self._part, self._inner = u, piece.part, inner
        self._root = up(float(piece.part.times) ** 0.5, 1e-15)  # ‖C‖

    @property
    def rest(self) -> str:
        return self._inner.rest

    @property
    def scalars(self) -> int:
        return self._inner.scalars

    @property
    def longest(self) -> int:
        return self._inner.longest

    @property
    def stride(self) -> int:
        return self._inner.stride

    @property
    def numbers(self) -> int:
        return self._inner.numbers

    @property
    def kept(self) -> int:
        return self._inner.kept

    @property
    def attention(self) -> Softmax | None:
        return self._inner.attention

    def pull(self, C: Tensor) -> tuple[Tensor, Tensor]:
        pulled, lost = self._inner.pull(self._part.new(C))
        added = (frobenius_upper(C) + frobenius_upper(pulled) * self._root) * ((self._part.times + 2) * UNIT)
        return self._part.back(C, pulled), up(lost * self._root + added, 1e-12)

    def covectors(self, tokens: Tensor) -> tuple[Named, Tensor]:
        C, error = self._inner.covectors(torch.arange(self._part.outputs[0]))
        lengths = torch.cat([frobenius_upper(some) for some in C.parts(self._inner.stride)])
        added = lengths * (self._part.times * UNIT)
        named = Named(C.count, lambda index: self._part.give(C.made(index)))
        return named, up((error + added) * self._root, 1e-12)

    def functions(self, T: Tensor) -> Tensor:
        return self._inner.functions(self._part.take(T))

    def most(self, y: Tensor) -> Tensor:
        return self._inner.most(self._part.take(y))

    def place(self, X: Tensor, first: Tensor) -> None:
        self._inner.place(X, first)

    def prepare(self, mu: Tensor) -> Any:
        return self._inner.prepare(self._part.new(mu))

    def settle(self, size: Size, rests: Rests, moved: float) -> float:
        out = self._inner.settle(size, rests, up(moved * self._root, 1e-12))
        return up(moved + out, 1e-12)

    def range(
        self,
        prepared: Any | None,
        varying: Tensor | None,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._inner.range(prepared, varying, enough, bent=bent)  # what waits goes another way

    def take(self, prepared: Any, s: int, problem: Problem, varying: Tensor | None) -> None:
        self._inner.take(prepared, s, problem, varying)

    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        return self._inner.seen(self._part.new(mu))


@final
class SmoothWaiting(Waiting, SmoothLocal):
    """A smooth piece beside others."""

    def __init__(self, u: Tensor, piece: SmoothBeside, inner: Local) -> None:
        super().__init__(u, piece, inner)
        assert isinstance(inner, SmoothLocal)
        self._smooth = inner

    def push(self, T: Tensor) -> tuple[Tensor, Tensor]:
        pushed, lost = self._smooth.push(self._part.take(T))
        return self._part.join(T, pushed), up(lost + (frobenius_upper(T) + frobenius_upper(pushed)) * UNIT, 1e-12)

    def second_order(self, directions: Directions) -> tuple[Tensor, float]:
        new, defect = self._smooth.second_order(directions)
        return self._part.join(new.new_zeros(len(new), *self.u.shape), new), defect

    def meet(self, degree: int, order: Tensor, count: Tensor, unsure: float, directions: Directions) -> None:
        self._smooth.meet(degree, order, count, unsure, directions)

    def third_order(self, second: Tensor, size: float, directions: Directions) -> tuple[Twist, float]:
        twist, defect = self._smooth.third_order(second, size, directions)

        def at(triples: Triples) -> Tensor:
            new = twist(triples)
            return self._part.join(new.new_zeros(len(new), *self.u.shape), new)

        return at, defect
