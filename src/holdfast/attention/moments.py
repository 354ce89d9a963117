"""Weighted second moments of token rows and of score movements, as operators.

Var_p(f) <= Σ_j w_j (f_j - c)² for p <= w entry by entry and any c; the best c is the w-mean. With weights that cover
all probabilities in a ball, the norms of these operators bound standard deviations everywhere in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.rows import AnyRows, as_rows, plain
from holdfast.linalg.operator import Gram, MatrixOperator, ProvableOperator, members
from holdfast.linalg.rounding import Ball, as_ball, frobenius_upper, gamma, product_error

_CHUNK = {"cpu": 2**18, "cuda": 2**27}  # numbers of a few rows of blocks


@final
class RowMoments(ProvableOperator):
    """v ↦ √w_lij (V'_lij · v - their w-mean over j), V'_lij = V_lij + δ_ij O_li, for every row i: from (m) to (h, n).

    Its norm is the largest weighted standard deviation of V'_lij · v over unit v, all heads l together.

    Args:
        values: (b…, h, n, m) rows V_lj, factored or not; V_lij with rotary positions.
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

    def squared(self) -> Callable[[Tensor], Tensor] | None:
        """For narrow heads: covariances of their rows take the place of the rows, k² numbers that of n.

        With f = V_lij · v and o = O_li · v at the key i, Σ_j w_j (f_j - mean)² becomes
        vᵀ Cov v + 2 o w_i (V_lii - mean) · v + (w_i - w_i²/S) o².
        """
        rows, right = self._rows, self._rows.right
        if right is None or not self._centred or right.shape[-2] ** 2 > rows.shape[1]:
            return None
        w = self._w.mid
        covariances, apart = _covariances(plain(rows.left), w, self._share)
        own = None if self._own is None else self._own.mid.movedim(-3, -2)  # (b…, n, h, m)
        lever = (apart * w.diagonal(0, -2, -1).unsqueeze(-1)).movedim(-3, -2)  # (…, n, h, k)
        weight = (w * (1 - self._share)).diagonal(0, -2, -1).mT  # (…, n, h)

        def product(v: Tensor) -> Tensor:
            asked = rows.asked(v)
            moved = (covariances @ asked.unsqueeze(-1)).squeeze(-1)
            added: Tensor | float = 0.0
            if own is not None:
                o = (own @ v.unsqueeze(-1)).squeeze(-1)
                moved = moved + (lever * o.unsqueeze(-1)).movedim(-2, -3)
                pull = (lever * asked.movedim(-3, -2)).sum(-1) + weight * o
                added = (pull.unsqueeze(-2) @ own).squeeze(-2)
            return rows.answered(moved) + added

        return product

    @property
    def doubles(self) -> int:
        return 8 * self.codomain.numel() * self.domain.numel()

    def part(self, start: int, stop: int) -> MatrixOperator:
        """The rows as matrices: any centre gives an upper bound, so the rounded mean serves as an exact one."""
        index = members(start, stop, self.batch, self.device)
        h, n = self.codomain
        V = self._rows.of_queries(self.batch[:-1], index)
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
    """G ↦ √w_lij (τ_lij - their w-mean over j), τ_lij = g_i · u_lij + a_lij · g_j: from (n, d) to (h, n, n).

    With weights ρ_li² q_lij its norm bounds (Σ_i Σ_l ρ_li² Var(s'_li))^½, the weighted movement of all scores together.

    Args:
        query: (b…, h, n, d) rows u_lij = A_l x_j, factored or not; with rotary positions others for every i.
        key: (b…, h, n, d) rows a_lij = a_li; with rotary positions others for every j.
        weights: (r…, b…, h, n, n) weights w_lij >= 0; the batch of the operator is (r…, b…).
        centred: whether the mean is taken off.
    """

    def __init__(self, query: AnyRows, key: AnyRows, weights: Tensor | Ball, *, centred: bool = True) -> None:
        self._query, self._key, self._w, self._centred = as_rows(query), as_rows(key), as_ball(weights), centred
        w = self._w.mid
        self._root, self._share = w.sqrt(), _shares(w) if centred else None
        super().__init__(w.shape[:-3], torch.Size(self._query.shape[1:]), w.shape[-3:], w)

    # Means are taken in the width of the heads, so that few passes are made over (h, n, n) numbers.

    def mv(self, v: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch h n n"]:
        of_queries = _beside(self._query.asked(v), plain(self._key.left))
        of_keys = _beside(plain(self._query.left), self._key.asked(v))
        t = of_queries @ of_keys.mT
        if self._share is not None:
            t -= (of_queries * (self._share @ of_keys)).sum(-1, keepdim=True)
        return t.mul_(self._root) if t.shape == self._root.shape else t * self._root

    def rmv(self, u: Float[Tensor, "*batch h n n"]) -> Float[Tensor, "*batch n d"]:
        t, query, key = self._root * u, plain(self._query.left), plain(self._key.left)
        if self._share is None:
            return self._query.mix(t) + self._key.mix(t.mT)
        sums = t.sum(-1, keepdim=True)
        through_query = t @ query - sums * self._mean_query
        through_key = t.mT @ key - self._share.mT @ (sums * key)
        return self._query.answered(through_query) + self._key.answered(through_key)

    @cached_property
    def _mean_query(self) -> Tensor:
        assert self._share is not None
        return self._share @ plain(self._query.left)

    @property
    def doubles(self) -> int:
        n, d = self.domain
        h = self.codomain[0]
        return (n * d) ** 2 + 12 * h * n * n * d

    def part(self, start: int, stop: int) -> ScoreMoments:
        batch = self.batch or torch.Size((1,))
        index = members(start, stop, batch, self.device)
        h, n, _ = self.codomain
        query, key = (rows.members(batch, index) for rows in (self._query, self._key))
        return ScoreMoments(query, key, self._w.expand(*batch, h, n, n)[index], centred=self._centred)

    def gram(self) -> Gram:
        """On (n, d), from Σ_j w_j (τ_j - mean)² = Σ_j w_j τ_j² - (Σ_j w_j τ_j)² / S with S = Σ_j w_j.

        With ũ_lij = u_lij - (its w-mean over j), block (i,j) of the Gram matrix is
        δ_ij Σ_l Σ_k (w_lik ũ_lik ũ_likᵀ + w_lki a_lki a_lkiᵀ) + Σ_l (w_lij ũ_lij a_lijᵀ + w_lji a_lji ũ_ljiᵀ)
        - Σ_l Σ_k w_lki w_lkj a_lki a_lkjᵀ / S_lk. A row whose S is lost in rounding is not centred, which only adds.
        """
        n, d = self.domain
        w, u, a = self._w, self._query.for_every_query(), self._key.for_every_query()
        u, a = as_ball(u), as_ball(a)  # (b, h, i or 1, j, d) and (b, h, j or 1, i, d)
        total = w.sum(-1, keepdim=True)
        uncentred = (total.mid <= 1e3 * total.rad).to(torch.float64)
        if not self._centred:
            uncentred = torch.ones_like(uncentred)
        share = w * (1.0 - uncentred) / (total + uncentred)
        alike = u.shape[-3] == 1  # for all queries
        tilde = u - ((share @ u.squeeze(-3)).unsqueeze(-2) if alike else share.unsqueeze(-2) @ u)  # (b, h, i, j, d)
        weighted = w.unsqueeze(-1) * tilde
        keys = w.mT.unsqueeze(-1) * a  # (b, h, j, i, d): w_lij a_lij
        own = tilde.movedim(1, 2).flatten(2, 3).mT @ weighted.movedim(1, 2).flatten(2, 3)
        every = a.expand(*keys.shape)
        own = own + every.movedim(1, 2).flatten(2, 3).mT @ keys.movedim(1, 2).flatten(2, 3)
        # Columns (w_lij a_lij)_j / √S_li, (b, n d, n h): their outer products centre the key part.
        lever = w * (1.0 - uncentred) / (total + uncentred).sqrt()
        pulled = (lever.mT.unsqueeze(-1) * a).movedim(1, -1).movedim(2, -1).flatten(1, 2).flatten(2, 3)
        left, right = weighted.movedim(1, -1), every.movedim(2, 3).movedim(1, -2)  # (b, i, j, d, h), (b, i, j, h, d)
        G = _with_transpose(left.mid, right.mid)
        tokens = torch.arange(n, device=self.device)
        G[:, tokens, :, tokens, :] += own.mid.movedim(1, 0)
        G = G.reshape(-1, n * d, n * d).baddbmm_(pulled.mid, pulled.mid.mT, alpha=-1.0)
        size, slack = Ball.exact(frobenius_upper(pulled.mid)), Ball.exact(frobenius_upper(pulled.rad))
        error = size.square() * gamma(pulled.shape[-1] + 4) + size * slack * 2.0 + slack.square()
        # The blocks left @ right and `own` are summed, and then with all terms of the last product, in any order.
        sums = pulled.shape[-1] + 4
        blocks = frobenius_upper(product_error(left, right, roundings=sums).upper)
        diagonal = Ball.exact(frobenius_upper(own.mid, (-3, -2, -1))) * gamma(sums)
        diagonal = diagonal + frobenius_upper(own.rad, (-3, -2, -1))
        bound = (error + Ball.exact(blocks) * 2.0 + diagonal).upper
        return Gram(G, bound, torch.ones_like(bound))


def _shares(w: Tensor) -> Tensor:
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total > 0, total, torch.ones_like(total))


def _covariances(left: Tensor, w: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(…, h, n, k, k) covariances of rows (b…, h, n, k) by the weights of every query, and its own row, centred.

    Means are taken off before anything is squared, for a few queries at a time.
    """
    means = share @ left
    step = max(1, _CHUNK.get(left.device.type, 2**24) // (w[..., 0, :].numel() * left.shape[-1]))
    parts = []
    for mean, weights in zip(torch.split(means, step, -2), torch.split(w, step, -2), strict=True):
        apart = left.unsqueeze(-3) - mean.unsqueeze(-2)  # (…, h, i, j, k)
        parts.append((weights.unsqueeze(-1) * apart).mT @ apart)
    return torch.cat(parts, -3), left - means


def _beside(left: Tensor, right: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(left.shape[:-1], right.shape[:-1])  # type: ignore[no-untyped-call]
    return torch.cat([left.expand(*shape, -1), right.expand(*shape, -1)], -1)


def _with_transpose(left: Float[Tensor, "b n n d h"], right: Float[Tensor, "b n n h d"]) -> Float[Tensor, "b n d n d"]:
    """M + Mᵀ for the matrix M with blocks left_ij @ right_ij, a few rows of blocks at a time."""
    b, n, _, d, _ = left.shape
    G = left.new_empty(b, n, d, n, d)
    step = max(1, _CHUNK.get(left.device.type, 2**24) // (b * n * d * d))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        blocks = left[:, rows] @ right[:, rows] + (left[:, :, rows] @ right[:, :, rows]).transpose(1, 2).mT
        G[:, rows] = blocks.movedim(2, 3)
    return G
