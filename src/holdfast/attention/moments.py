"""Weighted second moments of token rows and of score movements, as operators.

Var_p(f) <= Σ_j w_j (f_j - c)² for p <= w entry by entry and any c; the best c is the w-mean. With weights that cover
all probabilities in a ball, the norms of these operators bound standard deviations everywhere in it.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.rows import AnyRows, as_rows
from holdfast.linalg.operator import Gram, MatrixOperator, ProvableOperator
from holdfast.linalg.rounding import Ball, as_ball, frobenius_upper, gamma


@final
class RowMoments(ProvableOperator):
    """v ↦ √w_lij (V_lij · v - their w-mean over j), V_lij = V_lj + δ_ij O_li, for every row i: from (m) to (h, n).

    Its norm is the largest weighted standard deviation of V_lij · v over unit v, all heads l together.

    Args:
        values: (b…, h, n, m) rows V_lj, factored or not.
        weights: (r…, b…, h, n, n) weights w_lij >= 0; the batch of the operator is (r…, b…, n).
        own: (b…, h, n, m) rows O_li, for what token i adds at itself.
        centred: whether the mean is taken off.
    """

    def __init__(
        self,
        values: AnyRows,
        weights: Tensor | Ball,
        *,
        own: Tensor | Ball | None = None,
        centred: bool = True,
    ) -> None:
        self._rows, self._w, self._centred = as_rows(values), as_ball(weights), centred
        self._own = None if own is None else as_ball(own)
        w = self._w.mid
        self._root, self._share = w.sqrt(), _shares(w)
        h, n, m = self._rows.shape
        super().__init__(torch.Size((*w.shape[:-3], w.shape[-2])), torch.Size((m,)), torch.Size((h, n)), w)

    def mv(self, v: Float[Tensor, "*batch i m"]) -> Float[Tensor, "*batch i h n"]:
        f = self._rows.dots(v)
        if self._own is not None:
            f = f + torch.diag_embed((self._own.mid * v.unsqueeze(-3)).sum(-1))
        if self._centred:
            f = f - (self._share * f).sum(-1, keepdim=True)
        return (self._root * f).movedim(-3, -2)

    def rmv(self, u: Float[Tensor, "*batch i h n"]) -> Float[Tensor, "*batch i m"]:
        t = self._root * u.movedim(-2, -3)
        if self._centred:
            t = t - self._share * t.sum(-1, keepdim=True)
        out = self._rows.mix(t)
        if self._own is not None:
            out = out + (t.diagonal(0, -2, -1).unsqueeze(-1) * self._own.mid).sum(-3)
        return out

    @property
    def doubles(self) -> int:
        return 8 * self.codomain.numel() * self.domain.numel()

    def part(self, start: int, stop: int) -> MatrixOperator:
        """The rows as matrices: any centre gives an upper bound, so the rounded mean serves as an exact one."""
        index = torch.unravel_index(torch.arange(start, stop, device=self.device), self.batch)
        h, n = self.codomain
        V = as_ball(self._rows.multiplied()).expand(*self.batch[:-1], h, n, *self.domain)[index[:-1]]
        w = self._w.movedim(-3, -2)[index]
        if self._own is not None:
            here = torch.nn.functional.one_hot(index[-1], n).to(w.mid)[:, None, :, None]
            own = self._own.movedim(-3, -2).expand(*self.batch, h, *self.domain)[index]
            V = V + own.unsqueeze(-2) * here
        if self._centred:
            share = self._share.movedim(-3, -2)[index]
            V = V - (share.unsqueeze(-2) @ V.mid)
        return MatrixOperator((w.sqrt().unsqueeze(-1) * V).flatten(1, 2))

    def gram(self) -> Gram:
        return self.part(0, self.batch.numel()).gram()


@final
class ScoreMoments(ProvableOperator):
    """G ↦ √w_lij (τ_lij - their w-mean over j), τ_lij = g_i · query_lj + key_li · g_j: from (n, d) to (h, n, n).

    With weights ρ_li² q_lij its norm bounds (Σ_i Σ_l ρ_li² Var(s'_li))^½, the weighted movement of all scores together.

    Args:
        query: (b…, h, n, d) rows A_l x_j, factored or not.
        key: (b…, h, n, d) rows a_li.
        weights: (r…, b…, h, n, n) weights w_lij >= 0; the batch of the operator is (r…, b…).
    """

    def __init__(self, query: AnyRows, key: AnyRows, weights: Tensor | Ball) -> None:
        self._query, self._key, self._w = as_rows(query), as_rows(key), as_ball(weights)
        w = self._w.mid
        self._root, self._share = w.sqrt(), _shares(w)
        super().__init__(w.shape[:-3], torch.Size(self._query.shape[1:]), w.shape[-3:], w)

    def mv(self, v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch h n n"]:
        t = self._query.dots(v) + self._key.dots(v).mT
        return self._root * (t - (self._share * t).sum(-1, keepdim=True))

    def rmv(self, u: Float[Tensor, "*batch h n n"]) -> Float[Tensor, "*batch n d"]:
        t = self._root * u
        t = t - self._share * t.sum(-1, keepdim=True)
        return self._query.mix(t) + self._key.mix(t.mT)

    @property
    def doubles(self) -> int:
        n, d = self.domain
        h = self.codomain[0]
        return 3 * (n * d) ** 2 + 8 * h * n * n * d

    def part(self, start: int, stop: int) -> ScoreMoments:
        batch = self.batch or torch.Size((1,))
        index = torch.unravel_index(torch.arange(start, stop, device=self.device), batch)
        h, n, _ = self.codomain
        rows = (as_ball(t.multiplied()) for t in (self._query, self._key))
        query, key = (t.expand(*batch, h, n, self.domain[1])[index] for t in rows)
        return ScoreMoments(query, key, self._w.expand(*batch, h, n, n)[index])

    def gram(self) -> Gram:
        """On (n, d), from Σ_j w_j (τ_j - mean)² = Σ_j w_j τ_j² - (Σ_j w_j τ_j)² / S with S = Σ_j w_j.

        With q̃_lij = A_l x_j - (its w-mean), block (i,j) of the Gram matrix is
        δ_ij Σ_l Σ_k (w_lik q̃_lik q̃_likᵀ + w_lki a_lk a_lkᵀ) + Σ_l (w_lij q̃_lij a_liᵀ + w_lji a_lj q̃_ljiᵀ)
        - Σ_l Σ_k w_lki w_lkj a_lk a_lkᵀ / S_lk. A row whose S is lost in rounding is not centred, which only adds.
        """
        n, d = self.domain
        w, a, query = self._w, as_ball(self._key.multiplied()), as_ball(self._query.multiplied())
        total = w.sum(-1, keepdim=True)
        uncentred = (total.mid <= 1e3 * total.rad).to(torch.float64)
        share = w * (1.0 - uncentred) / (total + uncentred)
        tilde = query.unsqueeze(-3) - (share @ query).unsqueeze(-2)  # (b, h, i, j, d)
        weighted = w.unsqueeze(-1) * tilde
        keys = w.mT.unsqueeze(-1) * a.unsqueeze(-3)  # (b, h, j, i, d): w_lij a_li
        own = tilde.movedim(1, 2).flatten(2, 3).mT @ weighted.movedim(1, 2).flatten(2, 3)
        own = own + a.flatten(1, 2).unsqueeze(1).mT @ keys.movedim(1, 2).flatten(2, 3)
        cross = weighted.movedim(1, -1) @ a.movedim(1, 2).unsqueeze(-3)  # (b, i, j, d, d): Σ_l w_lij q̃_lij a_liᵀ
        # Columns w_li ⊗ a_li / √S_li, (b, n d, n h): their outer products centre the key part.
        lever = w * (1.0 - uncentred) / (total + uncentred).sqrt()
        pulled = (lever.mT.unsqueeze(-1) * a.unsqueeze(-3)).movedim(1, -1).movedim(2, -1).flatten(1, 2).flatten(2, 3)
        G = cross.mid.movedim(-2, -3)
        G = G + G.movedim((1, 2), (3, 4))
        tokens = torch.arange(n, device=self.device)
        G[:, tokens, :, tokens, :] += own.mid.movedim(1, 0)
        G = G.reshape(-1, n * d, n * d) - pulled.mid @ pulled.mid.mT
        dims = (-4, -3, -2, -1)
        size, slack = Ball.exact(frobenius_upper(pulled.mid)), Ball.exact(frobenius_upper(pulled.rad))
        error = size.square() * gamma(pulled.shape[-1] + 4) + size * slack * 2.0 + slack.square()
        error = error + Ball.exact(frobenius_upper(cross.rad, dims)) * 2.0 + frobenius_upper(own.rad, dims[1:])
        size = Ball.exact(frobenius_upper(cross.mid, dims)) * 2.0 + frobenius_upper(own.mid, dims[1:])
        bound = (error + size * gamma(8)).upper
        return Gram(G, bound, torch.ones_like(bound))


def _shares(w: Tensor) -> Tensor:
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total > 0, total, torch.ones_like(total))
