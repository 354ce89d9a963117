"""Softmax attention, for covectors at all of its rows or at one of them (docs/math/forms.md, section 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from holdfast.attention.common import less_common
from holdfast.attention.layer import project
from holdfast.attention.rotary import Rotary
from holdfast.compositions.forms.covered import Covered, Four, Softened, at_rows
from holdfast.compositions.forms.heads import HeadRows
from holdfast.compositions.forms.local import (
    NARROW,
    THETA,
    Named,
    Problem,
    Rests,
    Size,
    SmoothLocal,
    Twist,
    second_lengths,
    token_lengths,
)
from holdfast.compositions.forms.suprema import length
from holdfast.compositions.forms.third import HeadTwists, Triples, beyond_third, second_order
from holdfast.layers.attention.piece import Attention
from holdfast.linalg import Ball
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import frobenius_upper, up

_MANY = 256  # logits, from which on covectors at one row are treated apart


@final
@dataclass
class AttentionRows:
    """Covectors (S) at an attention's output: those at one row by row, and all others; which of the S they are."""

    count: int
    parts: list[tuple[Tensor, HeadRows, Covered]] = field(default_factory=list)

    def turn(self) -> None:
        """Says that the products of first order and rests in Q₂ are carried as turned covectors."""
        for _, _, covered in self.parts:
            covered.turned = True


@final
@dataclass(frozen=True)
class HeadParts:
    """An attention layer's maps to queries and keys (h, n, d, k), values (h, d, k) and from values (h, k, c).

    And the maps from a row's token and from a key's to logits (h, i, j, d), the rows, and the heads there.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    logit_maps: tuple[Tensor, Tensor]
    rows: Tensor
    heads: HeadRows


@final
class Softmax(SmoothLocal):
    """An attention layer at ũ; h heads, rows i that matter, keys j."""

    def __init__(self, piece: Attention, u: Tensor) -> None:
        layer, ball = piece.layer, Ball.exact(u)
        self._piece, self.u, self._h, self._residual = piece, u, layer.h, layer.residual
        self._at = piece.at(u.unsqueeze(0))
        w = layer.weights(ball)
        q, k = project(ball, w.w_q, w.b_q) * layer.scale, project(ball, w.w_k, w.b_k)
        if layer.rotary is not None:
            q, k = layer.rotary.turn(q), layer.rotary.turn(k)
        v = project(ball, w.w_v, w.b_v)
        k, v = less_common(k), less_common(v)
        p = layer.probabilities(q @ k.mT)
        w_q, w_k = (_at_tokens(map_, layer.rotary, len(u)) for map_ in (w.w_q * layer.scale, w.w_k))
        self._theta = THETA + 16 * sum(map(_relative, (q, k, v, w_q, w_k, w.w_v, w.w_o)))
        self._theta += 16 * float(p.rad.sum(-1).amax())
        self._w_q, self._w_k = w_q.mid, w_k.mid  # (h, n, d, k)
        self._w_v, self._w_o = w.w_v.mid, w.w_o.mid  # (h, d, k), (h, k, c)
        self._q, self._k, self._v, self._p = q.mid, k.mid, v.mid, p.mid
        self._largest_p = torch.where(p.rad > 0, p.upper, p.mid)  # 0 for masked keys
        self._seen = ((p.mid != 0) | (p.rad != 0)).double()
        self._outer = float(frobenius_upper(self._w_o, (-3, -2, -1)))
        self._value = up(float(torch.linalg.vector_norm(self._v, dim=-1).amax()), 1e-12)

    @property
    def rest(self) -> str:
        return "attention rest"

    @property
    def scalars(self) -> int:
        return 3 * self._q.numel() + self._p.numel()

    @property
    def longest(self) -> int:
        return self._p.numel()

    @property
    def stride(self) -> int:
        return self._h * self._q.shape[-1]

    @property
    def numbers(self) -> int:
        return len(self._rows) * self._w_o.shape[-1]

    @property
    def kept(self) -> int:
        return 8 * self.numbers + 12 * self._h * len(self._rows) * len(self.u)

    @property
    def attention(self) -> Softmax:
        return self

    def touched(self, tokens: Tensor) -> Tensor:
        return torch.arange(len(self.u))

    def pull(self, C: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.pull(C.unsqueeze(1)).squeeze(1), frobenius_upper(C) * (8 * self._theta * self._pull_size())

    def _pull_size(self) -> float:
        """The derivative's norm on absolute values: rows of p have norms of at most 1, centring at most doubles."""
        w_q, w_k, w_v = self._map_sizes()
        q, k = (float(length(x, 3)) for x in (self._q, self._k))
        heads = self._outer * (len(self.u) ** 0.5 * w_v + 2 * self._value * (k * w_q + q * w_k))
        return float(heads + abs(self._residual))

    def push(self, T: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.push(T.unsqueeze(1)).squeeze(1), token_lengths(T) * (8 * self._theta * self._pull_size())

    def second_order(self, directions: Directions) -> tuple[Tensor, float]:
        heads = self._heads[None]
        out = torch.zeros(len(directions.first), len(self.u), self._w_o.shape[-1], dtype=torch.float64)
        for i, row in enumerate(self._rows.tolist()):
            out[:, row] = torch.einsum("hkx,hkc->xc", second_order(heads, i, directions), self._w_o)
        size = float(torch.linalg.vector_norm(heads.second_size().sum(0))) * self._outer
        return out, up(32 * self._theta * size, 1e-9)

    @property
    def steep(self) -> float:
        """A bound of the derivative's norm."""
        return self._pull_size() * (1 + 8 * self._theta)

    @property
    def parts(self) -> HeadParts:
        """What stands at ũ, for covectors at one token."""
        return HeadParts(self._w_q, self._w_k, self._w_v, self._w_o, self._logit_maps, self._rows, self._heads[None])

    def forget(self) -> None:
        """Drops the first-order rows, which sums of suprema do without."""
        for heads in self._heads.values():
            heads.forget()

    def functions(self, T: Tensor) -> Tensor:
        rows, p = self._rows, self._p[:, self._rows]
        q = torch.einsum("mid,hidk->hikm", T[:, rows], self._w_q[:, rows])
        k = torch.einsum("mjd,hjdk->hjkm", T, self._w_k)
        v = torch.einsum("mjd,hdk->hjkm", T, self._w_v)
        logits = torch.einsum("hikm,hjk->hijm", q, self._k) + torch.einsum("hik,hjkm->hijm", self._q[:, rows], k)
        logits = logits - (p.unsqueeze(-1) * logits).sum(2, keepdim=True)
        return torch.cat([part.transpose(0, 1).flatten(0, 2) for part in (q, k, v, logits)])

    def third_order(self, second: Tensor, size: float, directions: Directions) -> tuple[Twist, float]:
        heads = self._heads[None]
        twists = HeadTwists(heads, self._split(second), directions)

        def at(t: Triples) -> Tensor:
            out = torch.zeros(len(t.r), len(self.u), self._w_o.shape[-1], dtype=torch.float64)
            out[:, self._rows] = torch.einsum("hikm,hkc->mic", twists.at(t), self._w_o)
            return out

        q, k, v, logits = (float(length(x.reshape(-1, x.shape[-1]), 2)) for x in heads.rows)
        many = size * second.shape[0] ** 0.5  # the length of all second orders together
        on_g = (q + k) * many + logits * (many + 2 * q * k + logits**2)
        total = self._value * on_g + 2 * (logits**2 + 2 * q * k + many) * v + logits * many
        own = float(torch.linalg.vector_norm(second_lengths(second)))
        kept = own * (2 * self._value * (q + k + logits) + 2 * v + logits)
        kept += 2 * self._value * logits * twists.grown + v * twists.carried
        return at, up((64 * self._theta * total + NARROW * kept) * self._outer, 1e-9)

    def covectors(self, tokens: Tensor) -> tuple[Named, Tensor]:
        """Queries of the rows, keys, values and centred logits."""
        self._rows = tokens
        n = len(self.u)
        h, _, k = self._w_v.shape
        rows = len(tokens)
        self._shapes = [(rows, h, k), (n, h, k), (n, h, k), (rows, h, n)]  # all of a token one after the other
        counts = [a * b * c for a, b, c in self._shapes]
        sizes = list(self._map_sizes())
        largest_q, largest_k = (float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (self._q, self._k))
        sizes.append(2 * sizes[0] * largest_k + 2 * sizes[1] * largest_q)
        error = torch.cat(
            [torch.full((c,), 4 * self._theta * s, dtype=torch.float64) for c, s in zip(counts, sizes, strict=True)]
        )
        # (h, i, j, d) of the row's token and of every key, before centring: q_δ·(k_j - E[k]) and q·k_δj.
        centred_k = self._k.unsqueeze(1) - (self._p[:, tokens] @ self._k).unsqueeze(2)  # (h, i, j, k)
        by_query = torch.einsum("hijk,hidk->hijd", centred_k, self._w_q[:, tokens])
        self._logit_maps = by_query, torch.einsum("hik,hjdk->hijd", self._q[:, tokens], self._w_k)
        return Named(sum(counts), self._made), error

    def _made(self, index: Tensor) -> Tensor:
        """Some of the covectors, (…, n, d)."""
        C, begin = torch.zeros(len(index), *self.u.shape, dtype=torch.float64), 0
        by_query, by_key = self._logit_maps
        for kind, (count, h, size) in enumerate(self._shapes):
            own = ((begin <= index) & (index < begin + count * h * size)).nonzero().squeeze(-1)
            place, begin = index[own] - begin, begin + count * h * size
            token, head, entry = place // (h * size), place // size % h, place % size
            if kind == 0:
                C[own, self._rows[token]] = self._w_q[head, self._rows[token], :, entry]
            elif kind == 1:
                C[own, token] = self._w_k[head, token, :, entry]
            elif kind == 2:
                C[own, token] = self._w_v[head, :, entry]
            else:
                apart = -self._p[head, self._rows[token]]
                apart[torch.arange(len(own)), entry] += 1
                C[own] = apart.unsqueeze(-1) * by_key[head, token]
                C[own, self._rows[token]] += by_query[head, token, entry]
        return C

    def most(self, y: Tensor) -> Tensor:
        rows, (by_query, by_key) = self._rows, self._logit_maps
        q = torch.einsum("id,hidk->hik", y[rows], self._w_q[:, rows].abs())
        k = torch.einsum("jd,hjdk->hjk", y, self._w_k.abs())
        v = torch.einsum("jd,hdk->hjk", y, self._w_v.abs())
        # Of logits the row's own token takes two parts, and every other one its key's.
        own, count = torch.arange(len(rows)), len(y)
        apart = torch.eye(count, dtype=torch.float64) - self._p[:, rows].unsqueeze(2)  # (h, i, j, j')
        both = apart[:, own, :, rows].transpose(0, 1).unsqueeze(-1) * by_key[:, own, rows].unsqueeze(2) + by_query
        apart[:, own, :, rows] = 0.0
        logits = torch.einsum("hijl,hil->hij", apart.abs(), torch.einsum("hijd,jd->hij", by_key.abs(), y))
        logits += torch.einsum("hijd,id->hij", both.abs(), y[rows])
        return up(torch.cat([part.transpose(0, 1).flatten() for part in (q, k, v, logits)]), 1e-9)

    def _map_sizes(self) -> tuple[float, float, float]:
        """Bounds of the maps to queries and keys at every token, and to values."""
        q, k = (float(frobenius_upper(w, (-4, -2, -1)).amax()) for w in (self._w_q, self._w_k))
        return q, k, float(frobenius_upper(self._w_v, (-3, -2, -1)))

    def _split(self, x: Tensor) -> Four:
        """Numbers of the functions as (h, i, k, …), (h, j, k, …), (h, j, k, …) and (h, i, j, …)."""
        counts = [a * b * c for a, b, c in self._shapes]
        parts = zip(torch.split(x, counts), self._shapes, strict=True)
        q, k, v, logits = (part.reshape(*shape, *x.shape[1:]).transpose(0, 1).contiguous() for part, shape in parts)
        return q, k, v, logits

    def place(self, X: Tensor, first: Tensor) -> None:
        self.output_rests = torch.zeros(0, dtype=torch.float64)
        self.bending: Tensor | None = None
        p, most, seen = (x[:, self._rows] for x in (self._p, self._largest_p, self._seen))
        spread = (self._v.unsqueeze(1) - (p @ self._v).unsqueeze(2)) * seen.unsqueeze(-1)
        soft = Softened(p, most, seen, spread, self._value, self._theta)
        self._settled: tuple[Size, Four, Four, Tensor | None] | None = None
        self._heads: dict[int | None, HeadRows] = {None: HeadRows(soft, self._split(X), self._split(first))}

    def _heads_at(self, row: int | None) -> HeadRows:
        """The heads at one of the rows, or at all of them."""
        if row not in self._heads:
            self._heads[row] = self._heads[None].at(torch.tensor([row]))
            self._settle_row(row)
        return self._heads[row]

    def _settle_row(self, row: int | None) -> None:
        """Tells one row what is known at the last scale, if there was one."""
        if row is not None and self._settled is not None:
            chosen, (size, rests, small, bending) = torch.tensor([row]), self._settled
            own = None if bending is None else bending[:, chosen]
            self._heads[row].settle(size, at_rows(rests, chosen), at_rows(small, chosen), own)

    def prepare(self, mu: Tensor) -> AttentionRows:
        mu = mu[:, self._rows]
        size = up(torch.linalg.vector_norm(mu, dim=-1) * self._outer, 1e-12)  # (S, i)
        rows = size != 0
        single = (rows.sum(-1) == 1) & (self._p[:, self._rows].numel() > _MANY)
        groups: list[tuple[int | None, Tensor, slice]] = [(None, ~single & rows.any(-1), slice(None))]
        groups += [(i, single & rows[:, i], slice(i, i + 1)) for i in range(rows.shape[1])]
        prepared = AttentionRows(len(mu))
        for row, members, at in groups:
            index = members.nonzero().squeeze(-1)
            if len(index):
                heads, some = self._heads_at(row), mu[index, at]
                m = torch.einsum("sid,hkd->shik", some, self._w_o)
                prepared.parts.append((index, heads, heads.cover(m, size[index, at])))
        return prepared

    # -- at a scale

    def settle(self, size: Size, rests: Rests, moved: float) -> float:
        all_rests, small = self._split(rests.most), self._split(rests.tiny)
        self._third = None if rests.third is None else self._split(rests.third)
        whole = self._heads[None]
        bending = None if self.bending is None else self.bending.reshape(all_rests[3].shape)
        turned = whole.settle(size, all_rests, small, bending)
        self._settled = size, all_rests, small, bending
        for row in self._heads:
            self._settle_row(row)
        out = torch.linalg.vector_norm(turned) * self._outer
        return float(up(out + abs(self._residual) * moved, 1e-9))

    def range(
        self,
        prepared: AttentionRows | None,
        varying: Tensor | None,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        most = torch.zeros((), dtype=torch.float64)
        if prepared is not None:
            most = torch.zeros(prepared.count, dtype=torch.float64)
            for index, heads, covered in prepared.parts:
                if not bent and self._third is not None:
                    most[index] = beyond_third(heads, covered.some(slice(None)), heads.of_rows(self._third))
                else:
                    most[index] = heads.range(covered, None if enough is None else enough[index], bent)
        if varying is not None:
            most = most + varying @ self.output_rests
        return up(most, 1e-9), up(most, 1e-9)

    def take(self, prepared: AttentionRows, s: int, problem: Problem, varying: Tensor | None) -> None:
        for index, heads, covered in prepared.parts:
            for place in (index == s).nonzero().flatten().tolist():
                heads.take(covered, place, problem)
        if varying is not None:
            problem.lose("carried rests", up(float(varying @ self.output_rests), 1e-9))

    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        """The coordinates of the rows' outputs; `output_rests` bounds the rest of every one."""
        return mu[:, self._rows].flatten(1), 0.0

    def identity(self) -> Tensor:
        """(M, n, c) the covectors of these coordinates."""
        n, c = self.u.shape[0], self._w_o.shape[-1]
        return torch.eye(n * c, dtype=torch.float64).reshape(n, c, n, c)[self._rows].flatten(0, 1)

    # -- covectors that vary

    def turns(self, numbers: int, budget: float) -> bool:
        """Whether one covector's turning at earlier places is affordable, where so many numbers of it count."""
        h, n, _ = self._p.shape
        return 4.0 * h * len(self._rows) * (self._q.shape[-1] + n) * self.u.numel() * numbers <= budget

    def turned(
        self, prepared: AttentionRows, functions: dict[int, tuple[Tensor, float]], budget: float
    ) -> dict[int, Tensor] | None:
        """How the covectors of a batch turn at earlier places as G moves the keys, queries and values here.

        Q₂(δ) with δ = JG + F has the part ⟨ΨG, F⟩. With F = Σ_l S_l e_l and `functions` (K, M) at an earlier place the
        numbers that count of this layer's functions there, the M numbers of that part are linear in G: their norms
        (S, M) are given back, for scale 1. None where that costs more than the budget, in products.
        """
        h, n, _ = self._p.shape
        numbers, width = sum(M.shape[1] for M, _ in functions.values()), self._heads[None].rows[3].shape[-1]
        cost = sum(len(index) * len(chosen) for _, _, covered in prepared.parts for index, chosen in covered.groups())
        if 4.0 * cost * h * (self._q.shape[-1] + n) * width * numbers > budget:
            return None
        norms = {source: torch.zeros(prepared.count, M.shape[1]).double() for source, (M, _) in functions.items()}
        for members, heads, covered in prepared.parts:
            for index, chosen in covered.groups():
                left, right = heads.pair(covered, index, chosen, heads.rows)
                for source, (M, accuracy) in functions.items():
                    parts = heads.of_rows(self._split(M))
                    other_left, other_right = heads.pair(covered, index, chosen, parts)
                    turned = other_left.mT @ right + other_right.mT @ left  # (S, M, p)
                    size = heads.turning_size(covered, index, float(torch.linalg.vector_norm(M)) + accuracy)
                    error = 32 * self._theta * size.unsqueeze(-1)
                    norms[source][members[index]] = torch.linalg.vector_norm(turned, dim=-1) + error
        return {source: up(x, 1e-9) for source, x in norms.items()}

    def bent(self, functions: dict[int, tuple[Tensor, float]], budget: float) -> dict[int, Tensor] | None:
        """How b_ij varies with earlier rests: (h i j, M) norms of its part that is linear in G and in them."""
        heads = self._heads[None]
        Q, K, _, L = heads.rows
        (h, rows, n, width), k = L.shape, Q.shape[2]
        if 4.0 * h * rows * n * k * width * sum(M.shape[1] for M, _ in functions.values()) > budget:
            return None
        p, norms = self._p[:, self._rows], {}
        centred = [heads.centred_keys(i) for i in range(rows)]
        for source, (M, accuracy) in functions.items():
            q, keys, _, _ = self._split(M)  # (h, i, k, M), (h, j, k, M)
            keys = keys.unsqueeze(1) - torch.einsum("hij,hjkm->hikm", p, keys).unsqueeze(2)
            lengths = [
                torch.linalg.vector_norm(q[a, i].mT.unsqueeze(0) @ centred[i][a] + keys[a, i].mT @ Q[a, i], dim=-1)
                for a in range(h)
                for i in range(rows)
            ]
            size = (float(torch.linalg.vector_norm(M)) + accuracy) * float(length(Q, 2).amax() + length(K, 2).amax())
            norms[source] = up(torch.cat(lengths), 1e-9) + 32 * self._theta * size
        return norms


def _at_tokens(maps: Ball, rotary: Rotary | None, n: int) -> Ball:
    """(h, n, d, k) what maps (h, d, k) do at every token, with rotary positions if there are any."""
    h, d, k = maps.shape
    if rotary is None:
        return maps.unsqueeze(1).expand(h, n, d, k)
    turned = rotary.turn(maps.movedim(0, 1).unsqueeze(2).expand(d, h, n, k))
    return turned.movedim(0, 2)


def _relative(x: Ball) -> float:
    """The largest error of a row, relative to the largest row."""
    error, size = (float(frobenius_upper(part, (-1,)).amax()) for part in (x.rad, x.mid))
    return error / max(size, 1e-280)  # what vanishes has the radius 1e-306 of underflow, which is nothing
