"""Operators that act entry by entry, on tensors that move and tensors that do not.

Rearrangements, sums and products, functions of one variable, and division by the root of mean squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, final

import torch
from torch import Tensor

from holdfast.errors import ConversionError
from holdfast.graph import structure
from holdfast.graph.entrywise import FUNCTIONS, EntryFormula, Polynomial, X, recognise
from holdfast.graph.head_norms import weighs_norm
from holdfast.graph.scores import Scores
from holdfast.graph.values import Moving, Point, Step, added, broadcast, joined, multiple, ratio, same
from holdfast.layers.activation.base import Activation, SmoothActivation
from holdfast.layers.activation.piece import KinkedEntries, SmoothEntries
from holdfast.layers.norm.piece import LayerNorm, RMSNorm
from holdfast.layers.piece import Piece
from holdfast.layers.product import Product


@final
@dataclass(frozen=True, eq=False)
class MeanSquare:
    """factor · mean of the squares of the last dimension of a tensor + eps, (…, 1); or a power of that.

    Attributes:
        value: whose squares.
        keepdim: whether the last dimension stays, with one entry.
        power: 1, 1/2 or -1/2.
    """

    value: Moving
    factor: float
    eps: float
    keepdim: bool
    power: float = 1.0

    @property
    def shape(self) -> torch.Size:
        lead = self.value.shape[:-1]
        return torch.Size((*lead, 1)) if self.keepdim else lead


@final
@dataclass(frozen=True, eq=False)
class RowMaximum:
    """The largest score of each query, which models subtract before softmax."""

    scores: Scores
    dim: int
    keepdim: bool

    @property
    def shape(self) -> torch.Size:
        return self.scores.index.select(self.dim, 0).shape

    def rearranged(self, move: Callable[[Tensor], Tensor]) -> RowMaximum:
        refuse("rearranges the largest scores")


#: What an operator takes and returns.
Value = Tensor | Moving | EntryFormula | Scores | MeanSquare | RowMaximum


class UnknownOperatorError(ConversionError):
    """An operator, or how it is used, has no counterpart among the pieces of networks."""


def refuse(why: str) -> NoReturn:
    """What stands in the way, in words that follow the operator's name."""
    raise UnknownOperatorError(why)


class EntryReader:
    """Reads the operators that act entry by entry."""

    # -- what only rearranges entries

    def rearranged(self, x: Value, move: Callable[[Tensor], Tensor]) -> Value:
        """A view, permutation, slice or repetition."""
        if isinstance(x, Tensor):
            return move(x)
        if isinstance(x, EntryFormula):
            return replace(x, value=x.value.rearranged(move))
        if isinstance(x, MeanSquare):
            return self._squeezed(x, move)
        return x.rearranged(move)

    def _squeezed(self, x: MeanSquare, move: Callable[[Tensor], Tensor]) -> Value:
        """A view of the mean squares that adds or removes the last dimension, and nothing else."""
        marks = torch.arange(math.prod(x.shape)).reshape(x.shape)
        moved = move(marks)
        kept = replace(x, keepdim=True)
        if moved.shape == kept.shape and torch.equal(moved.flatten(), marks.flatten()):
            return kept
        refuse("rearranges mean squares before they divide anything")

    def joined(self, parts: Sequence[Value], join: Callable[[list[Tensor]], Tensor]) -> Value:
        """A concatenation or a stack."""
        if all(isinstance(part, Tensor) for part in parts):
            return join([part for part in parts if isinstance(part, Tensor)])
        scores = next((part for part in parts if isinstance(part, Scores)), None)
        if scores is not None:
            constant = [part for part in parts if isinstance(part, Scores | Tensor)]
            if len(constant) < len(parts):
                refuse("puts something that moves beside attention scores")
            return scores.with_sinks(join, constant)
        settled = [part if isinstance(part, Tensor) else self.moving(part) for part in parts]
        whole = joined(settled, join)
        return whole if whole is not None else self._joined_points(settled, join)

    def _joined_points(self, parts: Sequence[Moving | Tensor], join: Callable[[list[Tensor]], Tensor]) -> Moving:
        """A concatenation of tensors that depend on different points: these in one row, then their entries."""
        rows = [structure.matrix_of(part, (1, part.row.numel())) for part in parts if isinstance(part, Moving)]
        width = sum(row.shape[1] for row in rows)
        whole = Point((1, width), Step(tuple(rows), join="channels")).view((width,))
        start, settled = 0, list[Moving | Tensor]()
        for part in parts:
            if isinstance(part, Moving):
                stop = start + part.row.numel()
                settled.append(whole.rearranged(lambda t, a=start, b=stop, s=part.shape: t[a:b].reshape(s)))  # type: ignore[misc]
                start = stop
            else:
                settled.append(part)
        concatenated = joined(settled, join)
        assert concatenated is not None
        return concatenated

    def settled(self, x: Value) -> Value:
        """Tokens (1, n, d) as a point of their own, so that a branch and what it is added to begin at the same one."""
        if isinstance(x, EntryFormula) and len(x.value.shape) == 3 and recognise(x.formula) is not None:
            x = self._activated(x)
        if not isinstance(x, Moving) or len(x.shape) != 3 or x.is_point():
            return x
        return structure.matrix_of(x).view(x.shape)

    # -- sums and products

    def add(self, a: Value, b: Value, alpha: float = 1.0) -> Value:
        """A + alpha b."""
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a + alpha * b
        if alpha != 1.0:
            b = self.multiply(b, torch.tensor(alpha, dtype=torch.float64))
        if isinstance(a, Tensor):
            a, b = b, a
        if isinstance(b, Tensor):
            return self._shifted(a, b)
        if isinstance(a, EntryFormula) or isinstance(b, EntryFormula):
            pair = self._formulas(a, b)
            if pair is not None:
                return EntryFormula(pair[0].value, pair[0].formula + pair[1].formula)
        left, right = self.moving(a), self.moving(b)
        total = added(left, right) or self._added_behind(left, right) or self._added_behind(right, left)
        if total is not None:
            return total
        shape = broadcast(left.shape, right.shape)
        point = structure.sum_of([left.expand(shape), right.expand(shape)])
        return point.view(shape)

    def _added_behind(self, a: Moving, b: Moving) -> Moving | None:
        """A + b, where b is a function of the point that a itself has become."""
        point = structure.matrix_of(a)
        return added(point.view(a.shape), b) if point is b.point else None

    def _shifted(self, a: Value, b: Tensor) -> Value:
        assert not isinstance(a, Tensor)
        if isinstance(a, RowMaximum):
            refuse("shifts the largest scores")
        if isinstance(a, MeanSquare):
            if b.numel() != 1 or a.power != 1:
                refuse("adds several numbers to mean squares, or one to their root; add one eps under the root")
            return replace(a, eps=a.eps + float(b))
        if isinstance(a, EntryFormula):
            if b.numel() == 1 and b.ndim <= len(a.value.shape):
                return replace(a, formula=a.formula + Polynomial.number(float(b)))
            a = self.moving(a)
        return self._behind_norm(a.shifted(b), a, b)

    def _behind_norm(self, changed: Moving | Scores, before: Moving | Scores, by: Tensor) -> Moving | Scores:
        """The weights of a norm of queries or keys are a point behind it; positions that turn it are not."""
        if not isinstance(before, Moving) or not isinstance(changed, Moving):
            return changed
        if changed.shape != before.shape or not before.is_point() or not weighs_norm(before.point, by, before.shape):
            return changed
        return structure.matrix_of(changed, before.point.shape).view(changed.shape)

    def subtract(self, a: Value, b: Value, alpha: float = 1.0) -> Value:
        """A - alpha b."""
        if isinstance(b, RowMaximum):
            if not isinstance(a, Scores) or b.scores is not a or not b.keepdim or alpha != 1.0:
                refuse("uses the largest score for anything but subtracting it from its query's scores")
            return a.less_a_maximum(b.dim)
        if isinstance(b, Tensor):
            return self.add(a, -b, alpha) if not isinstance(a, Tensor) else a - alpha * b
        return self.add(a, self.negative(b), alpha)

    def negative(self, x: Value) -> Value:
        return self.multiply(x, torch.tensor(-1.0, dtype=torch.float64))

    def multiply(self, a: Value, b: Value) -> Value:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a * b
        if isinstance(a, Tensor):
            a, b = b, a
        if isinstance(b, Tensor):
            return self._scaled(a, b)
        if isinstance(a, MeanSquare) or isinstance(b, MeanSquare):
            value, squares = (a, b) if isinstance(b, MeanSquare) else (b, a)
            assert isinstance(squares, MeanSquare)
            return self._normalised(value, squares, -0.5)
        pair = self._formulas(a, b)
        if pair is not None:
            return EntryFormula(pair[0].value, pair[0].formula * pair[1].formula)
        return self._product(self.moving(a), self.moving(b))

    def divide(self, a: Value, b: Value) -> Value:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a / b
        if isinstance(b, Tensor):
            return self._scaled(a, b, divide=True)
        if isinstance(b, MeanSquare):
            if isinstance(a, Tensor):
                if a.numel() == 1 and float(a) == 1.0 and b.power == 0.5:
                    return replace(b, power=-0.5)
                refuse("divides a constant by mean squares")
            return self._normalised(a, b, 0.5)
        refuse("divides by something that moves")

    def _scaled(self, a: Value, b: Tensor, *, divide: bool = False) -> Value:
        assert not isinstance(a, Tensor)
        if isinstance(a, RowMaximum):
            refuse("scales the largest scores")
        if isinstance(a, MeanSquare):
            if b.numel() != 1 or a.power != 1:
                refuse("multiplies mean squares by more than one number")
            c = 1 / float(b) if divide else float(b)
            return replace(a, factor=a.factor * c, eps=a.eps * c)
        if isinstance(a, EntryFormula):
            if b.numel() == 1 and b.ndim <= len(a.value.shape):
                return replace(a, formula=a.formula.scaled(float(b), divide=divide))
            a = self.moving(a)
        return self._behind_norm(a.scaled(b, divide=divide), a, b)

    def _formulas(self, a: Value, b: Value) -> tuple[EntryFormula, EntryFormula] | None:
        """Both as formulas in the entries of one tensor, where they are."""
        value = a.value if isinstance(a, EntryFormula) else b.value if isinstance(b, EntryFormula) else None
        if value is None:
            if isinstance(a, Moving) and isinstance(b, Moving) and same(a, b):
                return EntryFormula(a, X), EntryFormula(a, X)
            return None
        formulas = []
        for term in (a, b):
            if not isinstance(term, Moving | EntryFormula):
                return None
            own = term if isinstance(term, EntryFormula) else EntryFormula(term, X)
            c = multiple(own.value, value)
            if c is None:
                return None
            formulas.append(EntryFormula(value, own.formula.at(c)))
        return formulas[0], formulas[1]

    def _product(self, a: Moving, b: Moving) -> Moving:
        """Entry by entry, of two tensors that move."""
        shape = broadcast(a.shape, b.shape)
        a, b = a.expand(shape), b.expand(shape)
        tokens = structure.matrix_of(a)
        gated = structure.gate(a, b) or structure.gate(b, a) or structure.beside([a, b])
        return structure.through(gated, tokens.shape, Product(), label="product").view(shape)

    # -- functions of one variable

    def function(self, name: str, x: Value) -> Value:
        """One of `FUNCTIONS`, entry by entry."""
        if isinstance(x, Scores) and name == "tanh":
            return x.capped()
        entries = self._entries(x)
        return replace(entries, formula=FUNCTIONS[name](entries.formula))

    def formula(self, x: Value, write: Callable[[Polynomial], Polynomial]) -> Value:
        """Any formula, entry by entry."""
        entries = self._entries(x)
        return replace(entries, formula=write(entries.formula))

    def _entries(self, x: Value) -> EntryFormula:
        if isinstance(x, EntryFormula) and not x.formula.composed:
            return x
        return EntryFormula(self.moving(x), X)

    def power(self, x: Value, exponent: float) -> Value:
        if isinstance(x, Tensor):
            return x**exponent
        if isinstance(x, MeanSquare):
            if x.power == 1 and exponent in (0.5, -0.5):
                return replace(x, power=exponent)
            refuse(f"takes the power {exponent:g} of mean squares")
        if exponent != int(exponent) or not 1 <= exponent <= 8:
            refuse(f"takes the power {exponent:g} of something that moves")
        entries = x if isinstance(x, EntryFormula) else EntryFormula(self.moving(x), X)
        formula = entries.formula
        for _ in range(int(exponent) - 1):
            formula = formula * entries.formula
        return replace(entries, formula=formula)

    def moving(self, x: Value) -> Moving:
        """The tensor as a function of a point: a formula must be that of a known activation by now."""
        if isinstance(x, Moving):
            return x
        if isinstance(x, EntryFormula):
            return self._activated(x)
        if isinstance(x, Scores | RowMaximum):
            refuse("changes attention scores or probabilities in an unknown way")
        refuse("uses mean squares other than to divide by their root" if isinstance(x, MeanSquare) else "does not move")

    def _activated(self, x: EntryFormula) -> Moving:
        if x.formula == X:
            return x.value
        known = recognise(x.formula)
        if known is None:
            refuse("ends a formula that is not a known activation: " + ", ".join(_names(x.formula)))
        if known.beside:  # c x + f(x) is a residual branch, and c times it
            x = replace(x, value=structure.matrix_of(x.value).view(x.value.shape))
        value = x.value if known.before == 1.0 else x.value.scaled(known.before)
        shape = value.shape
        point = structure.matrix_of(value)
        active = torch.ones(point.shape[1], dtype=torch.bool)
        out = structure.through(point, point.shape, _on_channels(known.phi, active), label=known.phi.name).view(shape)
        after = known.after / (known.beside or 1.0)
        out = out if after == 1.0 else out.scaled(after)
        if known.beside:
            out = structure.sum_of([x.value, out]).view(shape).scaled(known.beside)
        return out.shifted(known.constant) if known.constant else out

    # -- divided by the root of mean squares

    def _normalised(self, value: Value, squares: MeanSquare, power: float) -> Value:
        """Value / √(factor · mean square + eps), which RMSNorm computes; its weights may stand in the value."""
        numerator = self.moving(value)
        weight = ratio(numerator, squares.value)
        if squares.power != power or not squares.keepdim or weight is None:
            refuse("divides by the root of mean squares of something other than what it divides")
        if squares.factor <= 0 or squares.eps <= 0:
            refuse("divides by the root of mean squares without a positive eps added, so that its slope has no bound")
        kappa = squares.eps / squares.factor
        point, centred = structure.centred(squares.value)
        d = numerator.shape[-1]
        ones = torch.ones(d, dtype=torch.float64)
        norm: Piece = LayerNorm(ones, ones * 0, kappa) if centred else RMSNorm(ones, kappa)
        out = structure.through(point, point.shape, norm, label="normalisation").view(numerator.shape)
        out = out if squares.factor == 1 else out.scaled(1 / math.sqrt(squares.factor))
        return out if bool((weight == 1).all()) else self._scaled(out, weight)


def _on_channels(phi: Activation, active: Tensor) -> Piece:
    """An activation on some channels."""
    return SmoothEntries(phi, active) if isinstance(phi, SmoothActivation) else KinkedEntries(phi, active)


def _names(formula: Polynomial) -> list[str]:
    """The functions in a formula."""
    names = {name for monomial, _ in formula.terms for (name, _), _ in monomial if name != "x"}
    return sorted(names) or ["a polynomial"]
