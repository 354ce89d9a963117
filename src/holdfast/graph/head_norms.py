"""Normalised queries and keys in a graph: the norm, its weights, and the linear maps that stand before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.attention.head_norm import HeadNorm, Kind
from holdfast.errors import ConversionError
from holdfast.graph.values import FIXED, Moving, Point, Term
from holdfast.layers.norm.piece import LayerNorm, RMSNorm
from holdfast.layers.tokens.embedding import AddPositions
from holdfast.layers.tokens.selection import Scale


class UnknownAttentionError(ConversionError):
    """A product of tensors that move is not a known kind of attention; the message says what is in the way."""


@final
@dataclass(frozen=True, eq=False)
class Normed:
    """The norm of queries or keys (H, n, k): weight ∘ u / √(mean u² + eps) + bias.

    Attributes:
        weight: for every entry.
        bias: likewise.
        eps: what is added to the mean square.
        kind: "layer" where the mean is taken off first.
        across: whether one norm is taken over all heads of a token.
        after_rotation: whether u is turned by positions already.
    """

    weight: Float64[Tensor, "H n k"]
    bias: Float64[Tensor, "H n k"]
    eps: float
    kind: Kind
    across: bool
    after_rotation: bool

    def of_heads(self, windows: int, heads: int) -> HeadNorm:
        """The norm of a layer with so many heads of this kind, for tokens in so many windows."""
        tensors = []
        for t in (self.weight, self.bias):
            whole = t.reshape(windows, -1, *t.shape[1:])
            if bool((whole != whole[:1, :, :1]).any()):
                raise UnknownAttentionError("the norm of queries or keys has different weights for different tokens")
            tensors.append(whole[0, :: whole.shape[1] // heads, 0].contiguous())
        if not self.across and all(bool((t == t[:1]).all()) for t in tensors):
            tensors = [t[0] for t in tensors]
        weight, bias = tensors
        return HeadNorm(
            weight, bias if bool(bias.any()) else None, self.eps, self.kind, self.across, self.after_rotation
        )


def without_norm(part: Moving) -> tuple[Moving, Normed | None]:
    """Queries or keys (H, n, k) as they would be without their norm, and the norm; None where they have none."""
    last = _last_norm(part.point)
    if last is None or last.source.origin is None or part.map is not None or bool((part.row == FIXED).any()):
        return part, None
    raw, width, k = last.source.origin, last.source.shape[1], part.shape[-1]
    places = [part.row * width + term.column for term in part.terms]
    across = width != k
    if across and not torch.equal(torch.unique(part.terms[0].column), torch.arange(width)):
        raise UnknownAttentionError("queries or keys are normalised in parts that are neither a head nor all heads")
    weight, bias = (t.expand(last.source.shape).reshape(-1)[places[0]] for t in (last.weight, last.bias))
    turned = len(raw.terms) > 1
    normed = Normed(weight, bias, last.eps, last.kind, across, turned)
    if len(part.terms) == 1 and bool((part.terms[0].gain == 1).all()):
        return raw.rearranged(lambda t: t.reshape(-1)[places[0]]), normed
    column, gain = raw.terms[0].column.reshape(-1), raw.terms[0].gain
    if turned or not bool((gain == 1).all()) or bool(raw.constant.any()) or bool(part.constant.any()):
        raise UnknownAttentionError("queries or keys are scaled, shifted or turned on both sides of their norm")
    terms = tuple(Term(column[place], term.gain) for place, term in zip(places, part.terms, strict=True))
    row = raw.row.reshape(-1)[places[0]]
    return Moving(raw.point, row, terms, raw.map, part.constant), normed


def weighs_norm(point: Point, weight: Tensor, shape: torch.Size) -> bool:
    """Whether the point is a norm, seen in some shape, and numbers of that shape are the same for every token."""
    last = _last_norm(point)
    if last is None or last.source.origin is None:
        return False
    column = last.source.origin.terms[0].column.flatten()
    numbers = weight.double().expand(shape).flatten()
    by_column = torch.zeros(int(column.max()) + 1, dtype=torch.float64)
    by_column[column] = numbers
    return torch.equal(by_column[column], numbers)


@final
@dataclass(frozen=True, eq=False)
class _NormPoint:
    """A point as weight ∘ (the norm of the rows of its source) + bias."""

    source: Point
    weight: Tensor
    bias: Tensor
    eps: float
    kind: Kind


def _last_norm(point: Point) -> _NormPoint | None:
    """The norm that a point is, but for factors and shifts behind it; None where it is anything else."""
    weight, bias = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    while (step := point.step) is not None and len(step.sources) == 1 and len(step.pieces) == 1:
        (piece,), point = step.pieces, step.sources[0]
        match piece:
            case Scale():
                weight = weight * piece.factors
            case AddPositions():
                bias = bias + weight * piece.c
            case LayerNorm() | RMSNorm():
                kind: Kind = "layer" if isinstance(piece, LayerNorm) else "rms"
                return _NormPoint(point, weight * piece.gamma, bias + weight * piece.beta, piece.kappa, kind)
            case _:
                return None
    return None
