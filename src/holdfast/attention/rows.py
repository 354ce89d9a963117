"""Rows of tokens, one set for each head, as products of two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from holdfast.attention.layer import merge_heads, split_heads
from holdfast.attention.rotary import Rotary
from holdfast.errors import NotApplicableError
from holdfast.linalg.rounding import Array, Ball, as_ball


@dataclass(frozen=True)
class Rows(Generic[Array]):
    """Rows V_lj = left_lj @ right_l: (…, h, n, m) through a head width k that is smaller than m.

    With rotary positions the query i counts as well: V_lij = (R_iᵀ left_lj) @ right_l. So it does where queries or keys
    are normalised: V_lij = left_lj @ maps_li @ right_l.

    Attributes:
        left: (…, h, n, k).
        right: (…, h, k, m), or None where left is the rows themselves.
        rotary: R_i, or None.
        maps: (…, h, n, k, k'), or None; right is (…, h, k', m) then.
    """

    left: Array
    right: Array | None = None
    rotary: Rotary | None = None
    maps: Array | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(h, n, m)."""
        h, n, k = self.left.shape[-3:]
        return h, n, k if self.right is None else self.right.shape[-1]

    def multiplied(self) -> Array:
        """The rows themselves, (…, h, n, m)."""
        if self.rotary is not None or self.maps is not None:
            raise NotApplicableError("with rotary positions or norms these rows are others for every query")
        return self.left if self.right is None else self.left @ self.right

    def asked(self, v: Tensor) -> Tensor:
        """(…, h, i, k) vectors whose product with the row left_lj is V_lij · v_i, from (…, i, m)."""
        if self.right is None:
            return v.unsqueeze(-3)
        asked = split_heads(v @ plain(self.right).flatten(-3, -2).mT, self.right.shape[-3])
        if self.maps is not None:
            return (plain(self.maps) @ asked.unsqueeze(-1)).squeeze(-1)
        return asked if self.rotary is None else self.rotary.turn(asked)

    def answered(self, mixed: Tensor) -> Tensor:
        """The transpose of `asked`: (…, h, i, k) to (…, i, m)."""
        if self.right is None:
            return mixed.sum(-3)
        turned = mixed if self.rotary is None else self.rotary.turn_back(mixed)
        if self.maps is not None:
            turned = (mixed.unsqueeze(-2) @ plain(self.maps)).squeeze(-2)
        return merge_heads(turned) @ plain(self.right).flatten(-3, -2)

    def dots(self, v: Tensor) -> Tensor:
        """V_lij · v_i for every vector: (…, i, m) to (…, h, i, n)."""
        return self.asked(v) @ plain(self.left).mT

    def mix(self, t: Tensor) -> Tensor:
        """Σ_l Σ_j t_lij V_lij: (…, h, i, n) to (…, i, m)."""
        return self.answered(t @ plain(self.left))

    def by_head(self) -> Rows[Array]:
        """The same with the heads as the last part of the batch, one head each."""
        right = None if self.right is None else self.right.unsqueeze(-3)
        rotary = None if self.rotary is None else self.rotary.by_head()
        return Rows(self.left.unsqueeze(-3), right, rotary, None if self.maps is None else self.maps.unsqueeze(-4))

    # -- multiplied out, for proofs

    def members(self, batch: torch.Size, index: tuple[Tensor, ...]) -> Rows[Ball]:
        """The rows of the members `index` of a batch, (members, h, n, m)."""
        left = as_ball(self.left)
        left = left.expand(*batch, *left.shape[-3:])[index]
        right = None if self.right is None else as_ball(self.right)
        if right is not None and right.ndim > 3:
            right = right.expand(*batch, *right.shape[-3:])[index]
        rotary, maps = None if self.rotary is None else self.rotary.members(batch, index), self._maps(batch)
        return Rows(left, right, rotary, None if maps is None else maps[index])

    def of_queries(self, batch: torch.Size, index: tuple[Tensor, ...]) -> Ball:
        """(members, h, n, m) V_lij for some members of (batch…, n): the last index is the query i."""
        maps = self._maps(batch)
        if self.rotary is None and maps is None:
            rows = as_ball(self.multiplied())
            return rows.expand(*batch, *rows.shape[-3:])[index[:-1]].expand(len(index[-1]), *rows.shape[-3:])
        left = as_ball(self.left)
        h, n, k = left.shape[-3:]
        left = left.expand(*batch, h, n, k)[index[:-1]].expand(len(index[-1]), h, n, k)
        if maps is not None:
            assert self.right is not None
            return left @ maps.movedim(-3, -4)[index] @ as_ball(self.right)
        assert self.rotary is not None
        turned = self.rotary.at(batch, index).turn_back(left.reshape(-1, h * n, 1, k)).reshape(-1, h, n, k)
        assert self.right is not None
        return turned @ as_ball(self.right)

    def for_every_query(self) -> Array:
        """(…, h, i, n, m) V_lij; one row of queries, (…, h, 1, n, m), where they are the same for all."""
        if self.maps is not None:
            assert self.right is not None
            return self.left.unsqueeze(-3) @ self.maps @ self.right.unsqueeze(-3)
        if self.rotary is None:
            return self.multiplied().unsqueeze(-3)
        n, k = self.left.shape[-2:]
        copies = self.left.unsqueeze(-2).expand(*self.left.shape[:-1], n, k)  # (…, h, j, i, k)
        turned = self.rotary.turn_back(copies.flatten(-4, -3)).reshape(*copies.shape).movedim(-3, -2)
        assert self.right is not None
        return turned @ self.right.unsqueeze(-3)

    def _maps(self, batch: torch.Size) -> Ball | None:
        """The maps for every member of a batch."""
        if self.maps is None:
            return None
        maps = as_ball(self.maps)
        return maps.expand(*batch, *maps.shape[-4:])


AnyRows = Rows[Tensor] | Rows[Ball] | Tensor | Ball


def as_rows(rows: AnyRows) -> Rows[Tensor] | Rows[Ball]:
    """Rows as they are, or rows that were given multiplied out."""
    if isinstance(rows, Rows):
        return rows
    return Rows[Ball](rows) if isinstance(rows, Ball) else Rows[Tensor](rows)


def plain(t: Tensor | Ball) -> Tensor:
    """The numbers alone."""
    return t.mid if isinstance(t, Ball) else t
