"""The operators of a network, on tensors that move and tensors that do not: what every kind of graph is read by.

A front end walks a graph (`holdfast.graph.walk`) and calls these methods. Each returns what the operator computes
as a function of what moves, or refuses; nothing depends on names of classes or attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.graph import structure
from holdfast.graph.attend import Attended, attend
from holdfast.graph.entries import EntryReader, MeanSquare, RowMaximum, Value, refuse
from holdfast.graph.entrywise import EntryFormula, X, rising
from holdfast.graph.memory import remembered
from holdfast.graph.scores import Scores, product, refuse_attention
from holdfast.graph.values import FIXED, Map, Moving, Term, broadcast
from holdfast.graph.windows import Table, together
from holdfast.layers.norm.piece import LayerNorm, RMSNorm
from holdfast.layers.tokens.embedding import PatchEmbedding
from holdfast.layers.tokens.maxima import WindowMax
from holdfast.layers.tokens.pooling import TokenMean


@final
class Reader(EntryReader):
    """Reads the operators of one graph.

    Args:
        batch: the number of inputs, where the layers of a running model are to be traced; None for one input, whose
            network is read.
    """

    def __init__(self, batch: int | None = None) -> None:
        self._batch = batch
        self.attended: list[Attended] = []

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
        if isinstance(x, EntryFormula) and not x.formula.composed:
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
        pooled = structure.through(point, (1, point.shape[1]), TokenMean(count), label="mean").view(shape)
        return pooled.scaled(float(count)) if total else pooled

    def _mean_square(self, x: EntryFormula, dims: Sequence[int], keepdim: bool, *, total: bool) -> MeanSquare | None:
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

    def pixel_map(self, x: Value, pool: Callable[[Tensor], Tensor]) -> Value:
        """A linear map of the pixels of (1, channels, …), the same for all channels, by what it does to single ones."""
        value = self.moving(x)
        pixels = value.shape[2:]
        ones = torch.eye(math.prod(pixels), dtype=torch.float64).reshape(-1, 1, *pixels)
        pooled = pool(ones)
        flat = self.linear(value.rearranged(lambda t: t.flatten(2)), pooled.flatten(1).mT)
        return self.rearranged(flat, lambda t: t.reshape(*t.shape[:2], *pooled.shape[2:]))

    # -- maxima

    def maximum(self, x: Value, dims: Sequence[int], keepdim: bool) -> Value:
        """The largest entries along some dimensions; along all of them where none is named."""
        if isinstance(x, Scores) and not x.normalised and len(dims) == 1:
            return RowMaximum(x, dims[0], keepdim)
        shape = x.value.shape if isinstance(x, EntryFormula) else x.shape
        gone = sorted({dim % len(shape) for dim in dims}) or list(range(len(shape)))
        kept = [dim for dim in range(len(shape)) if dim not in gone]
        index = torch.arange(math.prod(shape)).reshape(shape).permute(*kept, *gone)
        index = index.reshape(*(shape[dim] for dim in kept), -1)
        out = [1 if dim in gone else size for dim, size in enumerate(shape) if keepdim or dim in kept]
        return self.rearranged(self._largest(x, index), lambda t: t.reshape(out))

    def max_pool(self, x: Value, tables: Sequence[Table]) -> Value:
        """The largest entries of windows of (b, channels, …): of the places that they take along each dimension."""
        last = self.rearranged(x, lambda t: t.movedim(1, -1))
        shape = last.value.shape if isinstance(last, EntryFormula) else last.shape
        windows = together(tables, shape[1:-1]).unsqueeze(-2)
        channels = torch.arange(shape[-1]).unsqueeze(-1)
        every = torch.arange(shape[0]).reshape(-1, *(1 for _ in windows.shape))
        index = (every * math.prod(shape[1:-1]) + windows) * shape[-1] + channels
        return self.rearranged(self._largest(last, index.where(windows >= 0, -1)), lambda t: t.movedim(-1, 1))

    def _largest(self, x: Value, index: Int64[Tensor, "*shape w"]) -> Value:
        """The largest of some entries of the flattened tensor; -1 for none."""
        if isinstance(x, EntryFormula) and rising(x.formula):  # a function that never falls may come afterwards
            pooled = self._largest(x.value, index)
            assert isinstance(pooled, Moving)
            return EntryFormula(pooled, x.formula)
        value = self.moving(x)
        if index.shape[-1] == 1:
            return value.rearranged(lambda t: t.flatten()[index.squeeze(-1)])
        never = (value.row == FIXED) & (value.constant == -math.inf)
        if bool(never.any()):  # what a model pads by
            index = index.where((index >= 0) & ~never.flatten()[index], -1)
            value = replace(value, constant=value.constant.masked_fill(never, 0.0), memory={})
        point = value.point
        if value.plain and not bool((value.row == FIXED).any()):
            index = index.where(index < 0, value.entries.flatten()[index])
        else:
            point = structure.matrix_of(value)
        *lead, w = index.shape
        windows = index.reshape(-1, lead[-1] if lead else 1, w)
        piece = WindowMax(windows, point.shape)
        size = (windows.shape[0], windows.shape[1])
        return structure.through(point, size, piece, label="maximum").view(lead)

    # -- normalisations

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
        refuse(
            "takes softmax of something other than attention scores; a classifier should return logits, and "
            "cross-attention to a fixed memory is read where it is written as scaled_dot_product_attention"
        )

    def attention(self, q: Value, k: Value, v: Value, mask: Value | None, scale: float | None, causal: bool) -> Value:
        """Scaled dot-product attention (…, n, k); key-value heads are repeated where there are fewer."""
        if isinstance(k, Tensor) and isinstance(v, Tensor) and not isinstance(q, Tensor):
            return self._remembered(self.moving(q), k.double(), v.double(), mask, scale, causal)
        fixed = [name for name, t in (("queries", q), ("keys", k), ("values", v)) if isinstance(t, Tensor)]
        if fixed:
            refuse_attention(
                f"has {' and '.join(fixed)} that do not move beside others that do; expected all of the same tokens, "
                "to which learned ones may be added as a class token is, or fixed keys and values"
            )
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

    def _remembered(
        self, q: Moving, k: Tensor, v: Tensor, mask: Value | None, scale: float | None, causal: bool
    ) -> Moving:
        """Attention to keys and values that do not move."""
        if self._batch is not None:
            refuse_attention(
                "is cross-attention to a fixed memory: its keys and values do not depend on the input, and an "
                "AttentionLayer is self-attention. Networks have it: holdfast.certify, to_network"
            )
        if not isinstance(mask, Tensor | None):
            refuse("has a mask that depends on what moves")
        (*lead, n, width), m = q.shape, k.shape[-2]
        bias = torch.zeros(*lead, n, m, dtype=torch.float64)
        if mask is not None:
            bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
        if causal:
            bias = bias.masked_fill(torch.ones(n, m, dtype=torch.bool).tril().logical_not(), -math.inf)
        k, v = (t.repeat_interleave(lead[-1] // t.shape[-3], -3).expand(*lead, -1, -1).flatten(0, -3) for t in (k, v))
        scale = 1 / math.sqrt(width) if scale is None else scale
        out = remembered(q.reshape(-1, n, width), k, v, bias.flatten(0, -3), scale)
        return out.reshape(*lead, n, v.shape[-1])

    def _weighed(self, scores: Scores, value: Moving) -> Moving:
        if not scores.normalised:
            refuse("multiplies scores by something that moves before softmax")
        lead = scores.shape[:-2]
        value = value.expand((*lead, *value.shape[-2:]))
        attended = attend(scores, value, batch=self._batch)
        self.attended.append(attended)
        return attended.value.reshape(*lead, *attended.value.shape[-2:])

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
        shape = broadcast(condition.shape, *(part.shape for part in parts if not isinstance(part, EntryFormula)))
        wide = [self.rearranged(part, lambda t: t.expand(shape)) for part in parts]
        if bool(condition.all()) or not bool(condition.any()):
            return wide[0] if bool(condition.all()) else wide[1]
        return self.joined(wide, lambda pair: torch.where(condition, pair[0], pair[1]))


def _fixed(weight: Value | None) -> Tensor | None:
    """A weight in float64, which must not move."""
    if not isinstance(weight, Tensor | None):
        refuse("has weights that depend on what moves")
    return None if weight is None else weight.double()


def _dense_kernel(w: Float64[Tensor, "d c p q"], groups: int, dilation: Sequence[int]) -> Float64[Tensor, "d c p q"]:
    """The same convolution without groups and dilation: with zeros."""
    d, c, p, q = w.shape
    dense = w.new_zeros(d, c * groups, dilation[0] * (p - 1) + 1, dilation[1] * (q - 1) + 1)
    for group in range(groups):
        own = slice(group * (d // groups), (group + 1) * (d // groups))
        dense[own, group * c : (group + 1) * c, :: dilation[0], :: dilation[1]] = w[own]
    return dense
