"""The scores of attention as a graph writes them: a product of tensors that move, what is done to it, softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.graph.head_norms import UnknownAttentionError
from holdfast.graph.values import FIXED, Moving, broadcast

#: A score that is not above this is out of reach for any other: the pair is masked.
FORBIDDEN = -1e30
_SMALL = 1e-6  # what may be done to masked scores, relative to how far they are out of reach


def refuse_attention(why: str) -> NoReturn:
    """What stands in the way of attention, in words that follow the operator's name."""
    raise UnknownAttentionError(why)


@final
@dataclass(frozen=True, eq=False)
class Scores:
    """scale · q kᵀ + bias for heads q (H, n, k) and k (H, m, k), or its softmax over the keys.

    Attributes:
        index: which entry of the (H, n, m) scores stands where; `FIXED` for one that does not move, the bias alone.
        bias: what is added to each entry that stands there; -inf where a pair is masked.
        cap: c, where scores s have become c · tanh(s / c) before the bias was added.
        sinks: (H, n) the logit that takes part in the softmax of each row as one more key.
        lowered: whether something unknown has been taken off each row, which softmax does not see.
        normalised: whether softmax has been taken.
    """

    q: Moving
    k: Moving
    index: Int64[Tensor, "*shape"]
    bias: Float64[Tensor, "*shape"]
    scale: float = 1.0
    cap: float | None = None
    sinks: Float64[Tensor, "H n"] | None = None
    lowered: bool = False
    normalised: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.index.shape

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, n, m."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    def rearranged(self, move: Callable[[Tensor], Tensor]) -> Scores:
        return replace(self, index=move(self.index), bias=move(self.bias))

    def scaled(self, factor: Tensor | float, *, divide: bool = False) -> Scores:
        factor = torch.as_tensor(factor, dtype=torch.float64)
        if self.normalised or factor.numel() != 1:
            refuse_attention("multiplies scores after softmax, or by more than one number; put these on the queries")
        number = float(factor)
        scale = self.scale / number if divide else self.scale * number
        if scale < _SMALL * self.scale and bool(self.bias.isinf().any()):
            refuse_attention("masked scores are multiplied by a number that is not positive, or brings them into reach")
        cap = None if self.cap is None else abs(self.cap * scale / self.scale)
        return replace(self, scale=scale, cap=cap, bias=self.bias / number if divide else self.bias * number)

    def capped(self) -> Scores:
        """Tanh of the scores."""
        if self.normalised or self.cap is not None or self.lowered or bool(self.bias.any()):
            refuse_attention(
                "takes tanh of scores that are capped, masked or shifted already; expected a soft cap before these"
            )
        return replace(self, cap=1.0)

    def with_sinks(self, join: Callable[[list[Tensor]], Tensor], parts: list[Scores | Tensor]) -> Scores:
        """Joined by `join` with what does not move."""
        if self.normalised or self.lowered or sum(isinstance(part, Scores) for part in parts) > 1:
            refuse_attention("scores are put beside each other, or beside something after softmax")
        index = join([torch.full(p.shape, FIXED) if isinstance(p, Tensor) else p.index for p in parts])
        return replace(self, index=index, bias=join([p.double() if isinstance(p, Tensor) else p.bias for p in parts]))

    def less_a_maximum(self, dim: int) -> Scores:
        """With the same taken off every key of a query."""
        self._keys(dim)
        return replace(self, lowered=True)

    def shifted(self, term: Tensor | float) -> Scores:
        term = torch.as_tensor(term, dtype=torch.float64)
        if self.normalised or broadcast(self.shape, term.shape) != self.shape:
            refuse_attention("something is added to attention probabilities, or scores are repeated")
        if float(term.max()) > -_SMALL * FORBIDDEN:
            refuse_attention("a number is added to scores that may bring masked ones into reach")
        return replace(self, bias=_forbid(self.bias + term))

    def filled(self, mask: Tensor, value: float) -> Scores:
        """With a number in the place of masked scores."""
        if not bool(mask.any()):
            return self
        if self.normalised or value > FORBIDDEN or broadcast(self.shape, mask.shape) != self.shape:
            refuse_attention(f"{value:g} is put in the place of scores; expected -inf or the least number of the dtype")
        return replace(self, bias=self.bias.masked_fill(mask, -torch.inf))

    def softmax(self, dim: int) -> Scores:
        H, n, m = self.sizes
        row = self._keys(dim)
        sinks = None
        if self.index.shape[dim] > m:
            logits = self.bias.movedim(dim, -1)[..., m]
            sinks = torch.full((H * n,), torch.nan, dtype=torch.float64)
            sinks[(row // m).flatten()] = logits.flatten()
            sinks = sinks.reshape(H, n)
        return replace(self, normalised=True, sinks=sinks)

    def _keys(self, dim: int) -> Int64[Tensor, "*rows"]:
        """The first key of each row, where the dimension holds all keys of a query in order, and perhaps one sink."""
        m = self.sizes[2]
        keys = self.index.movedim(dim, -1)
        row, rest = keys[..., 0], keys[..., m:]
        whole = torch.equal(keys[..., :m], row.unsqueeze(-1) + torch.arange(m)) and bool((row % m == 0).all())
        if self.normalised or not whole or rest.shape[-1] > 1 or not bool((rest == FIXED).all()):
            refuse_attention("softmax is taken over something other than the keys of a query")
        return row

    def in_order(self) -> Scores:
        """The scores as (H, n, m), if that is what they are but for views."""
        H, n, m = self.sizes
        if not torch.equal(self.index.flatten(), torch.arange(H * n * m)):
            refuse_attention("attention probabilities are permuted or cut before they meet the values")
        return self.rearranged(lambda t: t.reshape(H, n, m))


def _forbid(bias: Tensor) -> Tensor:
    return torch.where(bias <= FORBIDDEN, -torch.inf, bias)


def product(q: Moving, k: Moving) -> Scores:
    """The scores of q (…, n, k) and k (…, m, k)."""
    lead = broadcast(q.shape[:-2], k.shape[:-2])
    heads = [t.expand((*lead, *t.shape[-2:])).reshape(-1, *t.shape[-2:]) for t in (q, k)]
    (H, n, _), m = heads[0].shape, heads[1].shape[1]
    index = torch.arange(H * n * m).reshape(*lead, n, m)
    return Scores(heads[0], heads[1], index, torch.zeros(index.shape, dtype=torch.float64))
