"""How rests pass through a residual branch token by token: a normalisation, and attention or units behind it.

F′ = (I + A N)F + A(scale ⊙ z) + e, with N the normalisation's derivative, A that of what stands behind it, and e its
rest. Of the last two the length of every token is bounded (docs/math/forms.md, section 12).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.heads import HeadRows
from holdfast.compositions.forms.normalised import Normalised
from holdfast.compositions.forms.single import NormalisedTokens, TokenMoves
from holdfast.compositions.forms.smooth import SmoothUnits
from holdfast.compositions.forms.softmax import Softmax
from holdfast.linalg.rounding import UNIT, up
from holdfast.linalg.squarings import gram_norm, thin_gram_norm

_SQUARINGS = 4


class Passing(ABC):
    """A place behind a normalisation, for one input.

    Attributes:
        steep: a bound of its derivative.
    """

    steep: float

    @abstractmethod
    def functions(self, moves: TokenMoves) -> Tensor:
        """(K) what the place's functions have beyond first order."""

    @abstractmethod
    def added(self, moves: TokenMoves) -> Tensor:
        """(n) what the branch adds to the stream's rest, but for rounding; no number at tokens that do not matter."""


@final
class UnitsPassing(Passing):
    """Units, token by token.

    Attributes:
        blocks: (n, d, d) the derivative of the branch and the identity; `off` what all were rounded by.
        grown: (n) their norms.
    """

    def __init__(self, units: SmoothUnits, norm: Normalised, tokens: NormalisedTokens) -> None:
        self._units, self._tokens = units, tokens.tokens
        n, d = norm.u.shape
        self._count = n
        read = units.wiring.read()
        self._singles = tokens.singles(read.expand(len(tokens.tokens), *read.shape))
        back, lost = units.pull(torch.eye(d, dtype=torch.float64).unsqueeze(1).expand(d, n, d))
        through, more = norm.pull(back)
        off, A = float(torch.linalg.vector_norm(lost)), back[:, tokens.tokens].transpose(0, 1)
        # I + A N at every token, as rows of its output, and what these were rounded by.
        self.blocks = through.transpose(0, 1) + torch.eye(d, dtype=torch.float64)
        summed = 2 * UNIT * float(torch.linalg.vector_norm(self.blocks))
        self.off = up(off * tokens.steep + float(torch.linalg.vector_norm(more)) + summed, 1e-9)
        self.grown = up(thin_gram_norm(self.blocks, _SQUARINGS) + self.off, 1e-9)
        self.steep = up(float((thin_gram_norm(A, _SQUARINGS) + off).amax()), 1e-9)
        self._scaled = up(thin_gram_norm(A * tokens.scale, _SQUARINGS) + off * float(tokens.scale.abs().amax()), 1e-9)
        self._outer = float(
            thin_gram_norm(units.wiring.write(torch.eye(units.stride, dtype=torch.float64)), _SQUARINGS)
        )
        # All units of a token together: the norm of R Y, from the inner products of Y.
        gram, length = norm.output_gram()
        error = 64 * tokens.theta * (float(torch.linalg.matrix_norm(read)) * length).square()
        self._together = up(gram_norm(read @ gram @ read.mT, error, _SQUARINGS), 1e-9)

    def functions(self, moves: TokenMoves) -> Tensor:
        return moves.of(self._singles).flatten()

    def added(self, moves: TokenMoves) -> Tensor:
        steep, reach, rest = self._units.bends  # (t, U)
        joint = moves.radius * self._together + torch.linalg.vector_norm(rest, dim=-1)
        joint = torch.minimum(joint, torch.linalg.vector_norm(reach, dim=-1))
        bent = torch.minimum(
            (steep / reach.clamp(min=1e-150)).amax(-1) * joint, torch.linalg.vector_norm(steep, dim=-1)
        )
        added = torch.full((self._count,), torch.nan, dtype=torch.float64)
        added[self._tokens] = self._scaled * moves.own + self._outer * bent
        return up(added, 1e-9)


@final
class HeadsPassing(Passing):
    """Attention at some rows."""

    def __init__(self, attention: Softmax, tokens: NormalisedTokens) -> None:
        at = attention.parts
        self._heads, self._rows = at.heads, at.rows
        soft, scale = at.heads.soft, tokens.scale
        n = soft.p.shape[-1]
        by_query, by_key = at.logit_maps
        keys = [at.w_k.permute(1, 0, 3, 2).flatten(1, 2), at.w_v.mT.flatten(0, 1).expand(n, -1, -1)]
        self._keys = tokens.singles(torch.cat([*keys, by_key.permute(2, 0, 1, 3).flatten(1, 2)], 1))
        queries = at.w_q[:, at.rows].permute(1, 0, 3, 2).flatten(1, 2)
        own = torch.cat([queries, by_query.permute(1, 0, 2, 3).flatten(1, 2)], 1)
        self._queries = tokens.at(at.rows).singles(own)
        self._counts = queries.shape[1], keys[0].shape[1]
        self._p, self._values = soft.most, at.heads.value_norms
        self.steep = attention.steep
        scaled, c = [], at.w_o.shape[-1]
        for row in at.rows.tolist():
            C = torch.zeros(c, n, c, dtype=torch.float64)
            C[:, row] = torch.eye(c, dtype=torch.float64)
            back, lost = attention.pull(C)
            off = float(torch.linalg.vector_norm(lost)) * float(scale.abs().amax())
            scaled.append(thin_gram_norm(back.transpose(0, 1) * scale, 1) + off)
        self._scaled = up(torch.stack(scaled), 1e-9)  # (i, n)
        self._outer = up(thin_gram_norm(at.w_o, _SQUARINGS), 1e-9)

    def functions(self, moves: TokenMoves) -> Tensor:
        (h, rows, n), (queries, keys) = self._p.shape, self._counts
        k, v, by_key = torch.split(moves.of(self._keys), [keys, keys, h * rows], 1)
        q, by_query = torch.split(moves.at(self._rows).of(self._queries), [queries, h * n], 1)
        by_key = by_key.reshape(n, h, rows).permute(1, 2, 0)
        logits = by_query.reshape(rows, h, n).transpose(0, 1) + by_key + (self._p * by_key).sum(-1, keepdim=True)
        return up(torch.cat([q.flatten(), k.flatten(), v.flatten(), logits.transpose(0, 1).flatten()]), 1e-11)

    def added(self, moves: TokenMoves) -> Tensor:
        added = torch.full((len(moves.own),), torch.nan, dtype=torch.float64)
        own = self._outer.unsqueeze(-1) * vector_rests(self._heads, self._values)
        added[self._rows] = self._scaled @ moves.own + own.sum(0)
        return up(added, 1e-9)


def vector_rests(heads: HeadRows, values: Tensor) -> Tensor:
    """(h, i) bounds of the length of a head's own rest at the last scale; `values` (h, i, j) are norms of ñ's rows.

    e = E[b ṽ] + E[t ñ] + E[α(ṽ + ñ)] - N E[α]/(1 + E[α]) with ṽ = v - E[v] and ñ = Δv - E[Δv].
    """
    s, p, seen = heads.settled, heads.soft.most, heads.soft.seen
    value = torch.linalg.vector_norm(heads.soft.spread, dim=-1) + 8 * heads.soft.theta * heads.soft.value
    rest = torch.linalg.vector_norm(s.rests[2], dim=-1)
    moved = (s.radius * values + rest.unsqueeze(1) + (p * rest.unsqueeze(1)).sum(-1, keepdim=True)) * seen
    alpha = (1 + s.beyond) / 2 * s.tau.square()
    turned = (p * (s.tau * moved + alpha * (value + moved))).sum(-1)
    N = (p * s.tau * value).sum(-1) + turned
    total: Tensor = up((p * s.most_b * value).sum(-1) + turned + N * (p * alpha).sum(-1), 1e-9)
    return total


def passing(local: Softmax | SmoothUnits, norm: Normalised, tokens: NormalisedTokens) -> Passing:
    """How rests pass through a place behind a normalisation."""
    return HeadsPassing(local, tokens) if isinstance(local, Softmax) else UnitsPassing(local, norm, tokens)
