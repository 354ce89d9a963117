"""Second and third orders of normalisations and attention, and what is beyond (docs/math/forms.md, section 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.covered import Covered, Four
from holdfast.compositions.forms.heads import HeadRows
from holdfast.compositions.forms.local import THETA, second_lengths
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import up

_NARROW = 2.0**-22  # what float32 takes of a number, and more


#: A bilinear form of a first order at some directions and a second order at some pairs, (…, directions, pairs).
Outer = Callable[[slice, Tensor], Tensor]


@final
@dataclass(frozen=True)
class Triples:
    """Triples q <= r <= s of directions with one q and r from `begin` on: r, s, and which pairs rs, qs, qr they make.

    `beside` has the pairs of q with every r, `beyond` those with every direction from `begin` on.
    """

    q: int
    begin: int
    r: Tensor
    s: Tensor
    rs: Tensor
    qs: Tensor
    qr: Tensor
    beside: Tensor
    beyond: Tensor

    @classmethod
    def parts(cls, q: int, directions: Directions, most: int) -> Iterator[Triples]:
        """All with one q, so many at a time, or those of one r."""
        p, place, begin = directions.p, directions.place, q
        while begin < p:
            end = min(p, begin + max(1, most // (p - begin)))
            r, s = torch.triu_indices(end - begin, p - begin) + begin
            yield cls(q, begin, r, s, place[r, s], place[q, s], place[q, r], place[q, begin:end], place[q, begin:])
            begin = end

    @property
    def count(self) -> Tensor:
        """How many ordered triples each stands for."""
        same = (self.r == self.q).double() + (self.s == self.r).double()
        return torch.where(same == 0, 6.0, torch.where(same == 1, 3.0, 1.0)).double()

    def symmetric(self, outer: Outer) -> Tensor:
        """What a form gives of r and the pair qs, and of s and the pair qr, added."""
        r, s, rows = self.r - self.begin, self.s - self.begin, slice(self.begin, self.begin + len(self.beside))
        one, other = outer(rows, self.beyond), outer(slice(self.begin, None), self.beside)
        return one[..., r, s] + other[..., s, r]

    def added(self, first: Tensor, second: Tensor) -> Tensor:
        """first_q second_rs + first_r second_qs + first_s second_qr, for (…, p) and (…, pairs)."""
        out = first[..., self.q, None] * second[..., self.rs]
        out += first[..., self.r] * second[..., self.qs]
        out += first[..., self.s] * second[..., self.qr]
        return out


@final
@dataclass
class TokenOrders:
    """The second or third order of every token's w: inner products (i, d, d) of its coordinates, and a joint norm.

    What is computed of a coordinate is accurate within `unsure`.
    """

    gram: Tensor
    norm: Tensor
    unsure: float

    @classmethod
    def of(cls, w: Tensor) -> TokenOrders:
        count, d, _ = w.shape
        return cls(torch.zeros(count, d, d, dtype=torch.float64), torch.zeros(count, dtype=torch.float64), 0.0)

    def add(self, w: Tensor, count: Tensor, unsure: float) -> None:
        """A part (i, d, m) of the coefficients, each of which stands for so many."""
        self.gram += (w * count) @ w.mT
        if not (unsure <= self.unsure or math.isnan(self.unsure)):  # what is not a number stays so
            self.unsure = unsure

    def most(self, tokens: Tensor, m: Tensor, size: Tensor) -> Tensor:
        """(S, i) bounds of |m·w| on the unit ball, for m of these lengths at most."""
        gram = self.gram[tokens]
        square = torch.einsum("sic,ice,sie->si", m, gram, m).clamp(min=0.0)
        traces = torch.einsum("icc->i", gram)
        rounding = size * (gram.shape[-1] ** 0.5 * self.unsure)
        most: Tensor = (square + (8 * THETA + _NARROW) * size.square() * traces).sqrt() + rounding
        return up(most, 1e-9)


def second_order(heads: HeadRows, i: int, directions: Directions) -> Tensor:
    """(h, k, pairs) Q₂ of every coordinate of the heads' outputs at row i."""
    first, second = directions.first, directions.second
    Q, K, V, L = heads.rows
    p, logits = heads.soft.p[:, i], L[:, i]
    bent = torch.einsum("hkp,hjkq->hjpq", Q[:, i], K)
    forms = (bent[..., first, second] + bent[..., second, first] + logits[..., first] * logits[..., second]) / 2
    carried = torch.einsum("hjp,hjkq->hkpq", p.unsqueeze(-1) * logits, V)
    weights = (p.unsqueeze(-1) * heads.soft.spread[:, i]).mT  # (h, k, j)
    return weights @ forms + (carried[..., first, second] + carried[..., second, first]) / 2


@final
class HeadTwists:
    """The third order of attention's heads, from first and second orders of queries, keys, values and logits.

    Args:
        heads: all rows.
        second: (…, pairs) of queries, keys, values and logits, in float32.

    Attributes:
        grown, carried: lengths of what stands beside ℓ and beside the values' first order, which is kept in float32.
    """

    def __init__(self, heads: HeadRows, second: Four, directions: Directions) -> None:
        self._heads, self._second = heads, second[:3]
        first, other = directions.first, directions.second
        p, (Q, _, _, L) = heads.soft.p, heads.rows
        self._grown, self._carried = torch.empty(2, *L.shape[:3], len(first), dtype=torch.float32)
        for i in range(L.shape[1]):
            weights, logits = p[:, i].unsqueeze(-1), L[:, i]
            bent = torch.einsum("hkp,hjkq->hjpq", Q[:, i], heads.centred_keys(i))
            both = (bent[..., first, other] + bent[..., other, first]) / 2 + second[3][:, i]  # b + ℓ₂
            squares = logits[..., first] * logits[..., other]
            self._grown[:, i] = both + squares / 6 - (weights * squares).sum(1, keepdim=True) / 2
            both += squares / 2
            self._carried[:, i] = weights * (both - (weights * both).sum(1, keepdim=True))
        self.grown, self.carried = (
            float(torch.linalg.vector_norm(second_lengths(x.flatten(0, 2)))) for x in (self._grown, self._carried)
        )
        self._spread = (p.unsqueeze(-1) * heads.soft.spread).mT.contiguous()  # (h, i, k, j)

    def at(self, t: Triples) -> Tensor:
        """(h, i, k, triples) three times the symmetric coefficients of the heads' outputs."""
        (Q, K, V, L), (Q2, K2, V2) = self._heads.rows, self._second
        q, p, carried = t.q, self._heads.soft.p, self._carried

        def crossed(first: slice, pairs: Tensor) -> Tensor:
            made = torch.einsum("hikr,hjks->hijrs", Q[..., first], K2[..., pairs].double())
            made += torch.einsum("hiks,hjkr->hijrs", Q2[..., pairs].double(), K[..., first])
            return made

        def in_values(first: slice, pairs: Tensor) -> Tensor:
            made = torch.einsum("hijs,hjkr->hikrs", carried[..., pairs].double(), V[..., first])
            made += torch.einsum("hijr,hjks->hikrs", p.unsqueeze(-1) * L[..., first], V2[..., pairs].double())
            return made

        # (v - E[v]) times q·k₂ + q₂·k + ℓ(ℓ₂ + b + ℓ²/6 - ½E[ℓ²])
        on = torch.einsum("hik,hjkm->hijm", Q[..., q], K2[..., t.rs].double())
        on += torch.einsum("hikm,hjk->hijm", Q2[..., t.rs].double(), K[..., q])
        on += t.symmetric(crossed) + t.added(L, self._grown)
        out = self._spread @ on
        # (b + ℓ₂ + ½ℓ²) times the values' first order, ℓ times their second
        out += torch.einsum("hijm,hjk->hikm", carried[..., t.rs].double(), V[..., q])
        out += torch.einsum("hij,hjkm->hikm", p * L[..., q], V2[..., t.rs].double())
        out += t.symmetric(in_values)
        return out


def beyond_third(heads: HeadRows, one: Covered, third: Four) -> Tensor:
    """(S) bounds of what covectors see of the heads beyond third order; `third` has the functions' rests from there on.

    The terms are those of docs/math/forms.md, section 9, in their order.
    """
    s = heads.settled
    p, seen, r = heads.soft.most, heads.soft.seen, s.radius
    g, n = one.most_g, r * one.n
    carried = torch.einsum("shik,hjk->shij", one.m.abs(), s.rests[2])
    n_rest = (carried + (p * carried).sum(-1, keepdim=True)) * seen
    n_all = n + n_rest
    off = s.rest_l + s.most_b  # |t - ℓ| to first order
    square = s.beyond / 2 * s.tau.square() + (s.tau + s.logit) / 2 * off  # |α - ½ℓ²|
    quartic = s.tau**4 * s.tau.exp() / 24 + s.tau.square() / 2 * off  # |α - ½t² - ℓ³/6|
    on_g = quartic + s.rest_l * s.most_b + s.logit * s.rest_b + s.most_b.square() / 2
    most = p * (on_g * g + s.most_b * n_rest + s.rest_b * n + square * n_all + s.logit.square() / 2 * n_rest)
    # E[½ℓ²] to first order, where all keys share the budget, and E[α]
    first = torch.minimum((p * s.logit.square()).sum(-1), (r * heads.mean_norm).square()) / 2
    root = (2 * first).sqrt() + (p * off.square()).sum(-1).sqrt()
    mean = torch.minimum((p * (1 + s.beyond) * s.tau.square()).sum(-1), (1 + s.beyond.amax(-1)) * root.square()) / 2
    N = r * one.slope
    N_off = (p * (off * g + s.tau * n_all)).sum(-1) + mean * (g + n_all).amax(-1)
    divided = (N + N_off) * ((p * square).sum(-1) + mean.square()) + N_off * first
    return up(most.sum((1, 2, 3)) + divided.sum((1, 2)) + heads.crossed(one, third), 1e-9)
