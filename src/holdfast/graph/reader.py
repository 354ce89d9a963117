"""The operators of a network, on tensors that move and tensors that do not: what every kind of graph is read by.

A front end walks a graph (`holdfast.graph.export`) and calls these methods. Each returns what the operator computes
as a function of what moves, or refuses; nothing depends on names of classes or attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import ConversionError
from holdfast.graph import structure
from holdfast.graph.entrywise import FUNCTIONS, Entrywise, Polynomial, X, recognise
from holdfast.graph.scores import Attended, Scores, attend, product
from holdfast.graph.values import Map, Moving, Point, Step, Term, added, broadcast, joined, multiple, same
from holdfast.network.activations import Activation, SmoothActivation
from holdfast.network.base import Piece
from holdfast.network.embedding import PatchEmbedding
from holdfast.network.entries import KinkedEntries, SmoothEntries
from holdfast.network.norms import LayerNorm, RMSNorm
from holdfast.network.pooling import MeanPool
from holdfast.network.product import Product


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


#: What an operator takes and returns.
Value = Tensor | Moving | Entrywise | Scores | MeanSquare


class UnknownOperatorError(ConversionError):
    """An operator, or how it is used, has no counterpart among the pieces of networks."""


def refuse(why: str) -> NoReturn:
    """What stands in the way, in words that follow the operator's name."""
    raise UnknownOperatorError(why)


@final
class Reader:
    """Reads the operators of one graph.

    Args:
        batch: the number of inputs, where the layers of a running model are to be traced; None for one input, whose
            network is read.
    """

    def __init__(self, batch: int | None = None) -> None:
        self._batch = batch
        self.attended: list[Attended] = []

    # -- what only moves entries about

    def rearranged(self, x: Value, move: Callable[[Tensor], Tensor]) -> Value:
        """A view, permutation, slice or repetition."""
        if isinstance(x, Tensor):
            return move(x)
        if isinstance(x, Entrywise):
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
        settled = [part if isinstance(part, Tensor) else self.moving(part) for part in parts]
        found = joined(settled, join)
        return found if found is not None else self._joined_points(settled, join)

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
        found = joined(settled, join)
        assert found is not None
        return found

    def settled(self, x: Value) -> Value:
        """Tokens (1, n, d) as a point of their own, so that a branch and what it is added to begin at the same one."""
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
        if isinstance(a, Entrywise) or isinstance(b, Entrywise):
            pair = self._formulas(a, b)
            if pair is not None:
                return Entrywise(pair[0].value, pair[0].formula + pair[1].formula)
        left, right = self.moving(a), self.moving(b)
        found = added(left, right) or self._added_behind(left, right) or self._added_behind(right, left)
        if found is not None:
            return found
        shape = broadcast(left.shape, right.shape)
        point = structure.sum_of([left.expand(shape), right.expand(shape)])
        return point.view(shape)

    def _added_behind(self, a: Moving, b: Moving) -> Moving | None:
        """A + b, where b is a function of the point that a itself has become."""
        point = structure.matrix_of(a)
        return added(point.view(a.shape), b) if point is b.point else None

    def _shifted(self, a: Value, b: Tensor) -> Value:
        assert not isinstance(a, Tensor)
        if isinstance(a, MeanSquare):
            if b.numel() != 1 or a.power != 1:
                refuse("adds several numbers to mean squares, or one to their root; add one eps under the root")
            return replace(a, eps=a.eps + float(b))
        if isinstance(a, Entrywise):
            if b.numel() == 1 and b.ndim <= len(a.value.shape):
                return replace(a, formula=a.formula + Polynomial.number(float(b)))
            a = self.moving(a)
        return a.shifted(b)

    def subtract(self, a: Value, b: Value, alpha: float = 1.0) -> Value:
        """A - alpha b."""
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
            return Entrywise(pair[0].value, pair[0].formula * pair[1].formula)
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
        if isinstance(a, MeanSquare):
            if b.numel() != 1 or a.power != 1:
                refuse("multiplies mean squares by more than one number")
            c = 1 / float(b) if divide else float(b)
            return replace(a, factor=a.factor * c, eps=a.eps * c)
        if isinstance(a, Entrywise):
            if b.numel() == 1 and b.ndim <= len(a.value.shape):
                return replace(a, formula=a.formula.scaled(float(b), divide=divide))
            a = self.moving(a)
        return a.scaled(b, divide=divide)

    def _formulas(self, a: Value, b: Value) -> tuple[Entrywise, Entrywise] | None:
        """Both as formulas in the entries of one tensor, where they are."""
        value = a.value if isinstance(a, Entrywise) else b.value if isinstance(b, Entrywise) else None
        if value is None:
            if isinstance(a, Moving) and isinstance(b, Moving) and same(a, b):
                return Entrywise(a, X), Entrywise(a, X)
            return None
        found = []
        for each in (a, b):
            if not isinstance(each, Moving | Entrywise):
                return None
            own = each if isinstance(each, Entrywise) else Entrywise(each, X)
            c = multiple(own.value, value)
            if c is None:
                return None
            found.append(Entrywise(value, own.formula.at(c)))
        return found[0], found[1]

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
        entries = self._entries(x)
        return replace(entries, formula=FUNCTIONS[name](entries.formula))

    def formula(self, x: Value, write: Callable[[Polynomial], Polynomial]) -> Value:
        """Any formula, entry by entry."""
        entries = self._entries(x)
        return replace(entries, formula=write(entries.formula))

    def _entries(self, x: Value) -> Entrywise:
        if isinstance(x, Entrywise) and not x.formula.composed:
            return x
        return Entrywise(self.moving(x), X)

    def power(self, x: Value, exponent: float) -> Value:
        if isinstance(x, Tensor):
            return x**exponent
        if isinstance(x, MeanSquare):
            if x.power == 1 and exponent in (0.5, -0.5):
                return replace(x, power=exponent)
            refuse(f"takes the power {exponent:g} of mean squares")
        if exponent != int(exponent) or not 1 <= exponent <= 8:
            refuse(f"takes the power {exponent:g} of something that moves")
        entries = x if isinstance(x, Entrywise) else Entrywise(self.moving(x), X)
        formula = entries.formula
        for _ in range(int(exponent) - 1):
            formula = formula * entries.formula
        return replace(entries, formula=formula)

    def moving(self, x: Value) -> Moving:
        """The tensor as a function of a point: a formula must be that of a known activation by now."""
        if isinstance(x, Moving):
            return x
        if isinstance(x, Entrywise):
            return self._activated(x)
        if isinstance(x, Scores):
            refuse("changes attention scores or probabilities in a way that is not known, such as a soft cap")
        refuse("uses mean squares other than to divide by their root" if isinstance(x, MeanSquare) else "does not move")

    def _activated(self, x: Entrywise) -> Moving:
        if x.formula == X:
            return x.value
        found = recognise(x.formula)
        if found is None:
            refuse("is the end of a formula that is no known activation: " + ", ".join(_names(x.formula)))
        value = x.value if found.before == 1.0 else x.value.scaled(found.before)
        shape = value.shape
        point = structure.matrix_of(value)
        active = torch.ones(point.shape[1], dtype=torch.bool)
        out = structure.through(point, point.shape, entries(found.phi, active), label=found.phi.name).view(shape)
        out = out if found.after == 1.0 else out.scaled(found.after)
        return out.shifted(found.constant) if found.constant else out

    # -- maps

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """X Aᵀ + b over the last dimension."""
        matrix, own = _fixed(weight), _fixed(bias)
        assert matrix is not None
        if isinstance(x, Tensor):
            return torch.nn.functional.linear(x.double(), matrix, own)
        c = len(matrix)
        shift = torch.zeros(c, dtype=torch.float64) if own is None else own
        value = self.moving(x)
        rows, columns = structure.token_view(value)
        d = value.point.shape[1]
        if rows is None or columns is None:
            point = structure.matrix_of(value)
            value = point.view(value.shape)
            rows, columns, d = torch.arange(point.shape[0]), torch.arange(point.shape[1]), point.shape[1]
        wide = torch.zeros(d, c, dtype=torch.float64)
        wide[columns] = matrix.mT
        shape = (*value.shape[:-1], c)
        row = rows.reshape(*shape[:-1], 1).expand(shape)
        ones = torch.ones(1, dtype=torch.float64).expand(shape)
        term = Term(torch.arange(c).expand(shape), ones)
        return Moving(value.point, row, (term,), Map(wide, shift), torch.zeros_like(ones))

    def matmul(self, a: Value, b: Value) -> Value:
        """The product of the last two dimensions, broadcast over the others."""
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a @ b
        if isinstance(a, Scores) and not isinstance(b, Tensor):
            return self._weighed(a, self.moving(b))
        if isinstance(b, Tensor):
            return self._by_matrices(self.moving(a), b)
        if isinstance(a, Tensor):
            if a.ndim < 2 or len(self.moving(b).shape) < 2:
                refuse("multiplies vectors by something that moves")
            turned = self.matmul(self.rearranged(b, lambda t: t.mT), a.mT)
            return self.rearranged(turned, lambda t: t.mT)
        q, k = self.moving(a), self.moving(b)
        if len(q.shape) < 2 or len(k.shape) < 2:
            refuse("multiplies vectors that move")
        return product(q, k.rearranged(lambda t: t.mT))

    def _by_matrices(self, x: Moving, w: Tensor) -> Value:
        """X w, w one matrix or one for each of the leading dimensions."""
        if w.ndim == 1:
            return self.rearranged(self.linear(x, w.unsqueeze(0)), lambda t: t.squeeze(-1))
        if w.ndim == 2:
            return self.linear(x, w.mT)
        lead = broadcast(x.shape[:-2], w.shape[:-2])
        x, w = x.expand((*lead, *x.shape[-2:])), w.expand(*lead, *w.shape[-2:])
        kinds, which = torch.unique(w.reshape(-1, w.shape[-2] * w.shape[-1]), dim=0, return_inverse=True)
        n, c = x.shape[-2], w.shape[-1]
        every = self.linear(x, kinds.reshape(-1, *w.shape[-2:]).mT.flatten(0, 1))  # all matrices side by side
        chosen = (which.reshape(*lead, 1, 1) * c + torch.arange(c)).expand(*lead, n, c)
        return self.rearranged(every, lambda t: t.gather(-1, chosen))

    def convolution(
        self,
        x: Value,
        weight: Value,
        bias: Value | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Value:
        """Over one or two dimensions of (1, channels, …)."""
        kernel, own = _fixed(weight), _fixed(bias)
        assert kernel is not None
        value = self.moving(x)
        if value.shape[0] != 1 or len(value.shape) not in (3, 4):
            refuse(f"convolves a tensor of shape {tuple(value.shape)}; expected one input in one or two dimensions")
        flat = len(value.shape) == 3
        w = kernel.unsqueeze(-2) if flat else kernel
        stride, padding, dilation = ([1, *o] if flat else [*o] for o in (stride, padding, dilation))
        padding = [0, padding[1]] if flat else padding
        dense = _dense_kernel(w, groups, dilation)
        channels, size = dense.shape[1], (1, value.shape[2]) if flat else (value.shape[2], value.shape[3])
        image = structure.matrix_of(value, (channels, size[0] * size[1]))
        piece = PatchEmbedding(dense, own, size, (stride[0], stride[1]), (padding[0], padding[1]))
        grid = [(size[i] + 2 * padding[i] - dense.shape[2 + i]) // stride[i] + 1 for i in (0, 1)]
        d = len(dense)
        point = structure.through(image, (grid[0] * grid[1], d), piece, label="convolution")
        shape = (1, d, grid[1]) if flat else (1, d, *grid)
        return point.view((grid[0] * grid[1], d)).rearranged(lambda t: t.mT.reshape(shape))

    def mean(self, x: Value, dims: Sequence[int], keepdim: bool, *, total: bool = False) -> Value:
        """The mean over some dimensions, or the sum."""
        if isinstance(x, Tensor):
            return x.sum(tuple(dims), keepdim) if total else x.mean(tuple(dims), keepdim)
        if isinstance(x, Entrywise) and not x.formula.composed:
            squares = self._mean_square(x, dims, keepdim, total=total)
            if squares is not None:
                return squares
        value = self.moving(x)
        ndim = len(value.shape)
        gone = sorted(dim % ndim for dim in dims) or list(range(ndim))
        kept = [dim for dim in range(ndim) if dim not in gone]
        shape = [1 if dim in gone else value.shape[dim] for dim in range(ndim) if keepdim or dim in kept]
        count = math.prod(value.shape[dim] for dim in gone)
        if gone == [ndim - 1]:
            ones = torch.full((1, count), 1.0 if total else 1 / count, dtype=torch.float64)
            return self.rearranged(self.linear(value, ones), lambda t: t.reshape(shape))
        grouped = value.rearranged(lambda t: t.permute(*gone, *kept).reshape(count, -1))
        point = structure.matrix_of(grouped)
        pooled = structure.through(point, (1, point.shape[1]), MeanPool(count), label="mean").view(shape)
        return pooled.scaled(float(count)) if total else pooled

    def _mean_square(self, x: Entrywise, dims: Sequence[int], keepdim: bool, *, total: bool) -> MeanSquare | None:
        terms = x.formula.terms
        squares = dict((X * X).terms)
        last = [dim % len(x.value.shape) for dim in dims] == [len(x.value.shape) - 1]
        if not last or len(terms) != 1 or terms[0][0] not in squares:
            return None
        factor = terms[0][1] * (x.value.shape[-1] if total else 1)
        return MeanSquare(x.value, factor, 0.0, keepdim)

    def variance(self, x: Value, dims: Sequence[int], correction: float, keepdim: bool) -> Value:
        value = self.moving(x)
        d = value.shape[-1]
        if [dim % len(value.shape) for dim in dims] != [len(value.shape) - 1] or d <= correction:
            refuse("takes a variance over other dimensions than the last")
        centred = self.moving(self.subtract(value, self.mean(value, [-1], True)))
        return MeanSquare(centred, d / (d - correction), 0.0, keepdim)

    # -- normalisations

    def _normalised(self, value: Value, squares: MeanSquare, power: float) -> Value:
        """Value / √(factor · mean square + eps), which RMSNorm computes."""
        numerator = self.moving(value)
        if squares.power != power or not squares.keepdim or not same(numerator, squares.value):
            refuse("divides by the root of mean squares of something else than what it divides")
        if squares.factor <= 0 or squares.eps <= 0:
            refuse("divides by the root of mean squares without a positive eps added, so that its slope has no bound")
        kappa = squares.eps / squares.factor
        point, centred = structure.centred(numerator)
        d = numerator.shape[-1]
        ones = torch.ones(d, dtype=torch.float64)
        norm: Piece = LayerNorm(ones, ones * 0, kappa) if centred else RMSNorm(ones, kappa)
        out = structure.through(point, point.shape, norm, label="normalisation").view(numerator.shape)
        return out if squares.factor == 1 else out.scaled(1 / math.sqrt(squares.factor))

    def layer_norm(self, x: Value, size: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Value:
        """Over the last dimensions, `size` numbers together."""
        value = self.moving(x)
        d, factor, shift = size, _fixed(weight), _fixed(bias)
        gamma = torch.ones(d, dtype=torch.float64) if factor is None else factor.flatten()
        beta = torch.zeros(d, dtype=torch.float64) if shift is None else shift.flatten()
        point = structure.matrix_of(value, (value.row.numel() // d, d))
        return structure.through(point, point.shape, LayerNorm(gamma, beta, eps), label="layer norm").view(value.shape)

    def rms_norm(self, x: Value, size: int, weight: Tensor | None, eps: float | None) -> Value:
        value, factor = self.moving(x), _fixed(weight)
        if eps is None:
            refuse("has no eps, so that its value depends on the dtype; set it")
        gamma = torch.ones(size, dtype=torch.float64) if factor is None else factor.flatten()
        point = structure.matrix_of(value, (value.row.numel() // size, size))
        return structure.through(point, point.shape, RMSNorm(gamma, eps), label="RMS norm").view(value.shape)

    def group_norm(self, x: Value, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Value:
        """(1, channels, …): groups of channels normalised, then one factor and shift for each channel."""
        value = self.moving(x)
        if value.shape[0] != 1:
            refuse("normalises several inputs; expected one")
        normed = self.layer_norm(x, value.row.numel() // groups, None, None, eps)
        return self.channels(normed, weight, bias)

    def channels(self, x: Value, factor: Tensor | None, shift: Tensor | None) -> Value:
        """One factor and one shift for each channel of (1, channels, …): BatchNorm in evaluation."""
        value, factor, shift = self.moving(x), _fixed(factor), _fixed(shift)
        last = value.rearranged(lambda t: t.movedim(1, -1))
        tokens = structure.matrix_of(last).view(last.shape)  # a residual branch may begin here
        value = tokens.rearranged(lambda t: t.movedim(-1, 1))
        shape = (-1, *(1 for _ in value.shape[2:]))
        value = value if factor is None else value.scaled(factor.reshape(shape))
        return value if shift is None else value.shifted(shift.reshape(shape))

    # -- attention

    def softmax(self, x: Value, dim: int) -> Value:
        if isinstance(x, Tensor):
            return x.softmax(dim)
        if isinstance(x, Scores):
            return x.softmax(dim)
        refuse("takes softmax of something else than attention scores; a classifier should return logits")

    def attention(self, q: Value, k: Value, v: Value, mask: Value | None, scale: float | None, causal: bool) -> Value:
        """Scaled dot-product attention (…, n, k); key-value heads are repeated where there are fewer."""
        query, key, value = self.moving(q), self.moving(k), self.moving(v)
        h, g = query.shape[-3], key.shape[-3]
        if h != g:
            key, value = (t.rearranged(lambda s: s.repeat_interleave(h // g, -3)) for t in (key, value))
        scores = product(query, key).scaled(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if mask is not None:
            if not isinstance(mask, Tensor):
                refuse("has a mask that depends on what moves")
            filled = scores.filled(~mask, -math.inf) if mask.dtype == torch.bool else scores.shifted(mask)
            scores = filled
        if causal:
            n, m = scores.shape[-2:]
            scores = scores.filled(torch.ones(n, m, dtype=torch.bool).tril().logical_not(), -math.inf)
        return self._weighed(scores.softmax(-1), value)

    def _weighed(self, scores: Scores, value: Moving) -> Moving:
        if not scores.normalised:
            refuse("multiplies scores by something that moves before softmax")
        lead = scores.shape[:-2]
        value = value.expand((*lead, *value.shape[-2:]))
        found = attend(scores, value, batch=self._batch)
        self.attended.append(found)
        return found.value.reshape(*lead, *found.value.shape[-2:])

    def filled(self, x: Value, mask: Tensor, number: float) -> Value:
        """`number` where the mask is True."""
        if isinstance(x, Tensor):
            return x.masked_fill(mask, number)
        if isinstance(x, Scores):
            return x.filled(mask, number)
        value = self.moving(x)
        shape = broadcast(value.shape, mask.shape)
        return self.where(mask.expand(shape), torch.tensor(number, dtype=torch.float64).expand(shape), value)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """A where the condition holds, b elsewhere; the condition must not move."""
        if not isinstance(condition, Tensor):
            refuse("chooses by something that moves")
        if isinstance(a, Scores) and isinstance(b, Tensor) and b.numel() == 1:
            return a.filled(~condition, float(b))
        if isinstance(b, Scores) and isinstance(a, Tensor) and a.numel() == 1:
            return b.filled(condition, float(a))
        parts: list[Value] = [part if isinstance(part, Tensor) else self.moving(part) for part in (a, b)]
        shape = broadcast(condition.shape, *(part.shape for part in parts if not isinstance(part, Entrywise)))
        wide = [self.rearranged(part, lambda t: t.expand(shape)) for part in parts]
        if bool(condition.all()) or not bool(condition.any()):
            return wide[0] if bool(condition.all()) else wide[1]
        return self.joined(wide, lambda pair: torch.where(condition, pair[0], pair[1]))


def _fixed(weight: Value | None) -> Tensor | None:
    """A weight in float64, which must not move."""
    if not isinstance(weight, Tensor | None):
        refuse("has weights that depend on what moves")
    return None if weight is None else weight.double()


def entries(phi: Activation, active: Tensor) -> Piece:
    """An activation on some channels."""
    return SmoothEntries(phi, active) if isinstance(phi, SmoothActivation) else KinkedEntries(phi, active)


def _names(formula: Polynomial) -> list[str]:
    """The functions in a formula."""
    found = {name for monomial, _ in formula.terms for (name, _), _ in monomial if name != "x"}
    return sorted(found) or ["a polynomial"]


def _dense_kernel(w: Float64[Tensor, "d c p q"], groups: int, dilation: Sequence[int]) -> Float64[Tensor, "d c p q"]:
    """The same convolution without groups and dilation: with zeros."""
    d, c, p, q = w.shape
    dense = w.new_zeros(d, c * groups, dilation[0] * (p - 1) + 1, dilation[1] * (q - 1) + 1)
    for group in range(groups):
        own = slice(group * (d // groups), (group + 1) * (d // groups))
        dense[own, group * c : (group + 1) * c, :: dilation[0], :: dilation[1]] = w[own]
    return dense
