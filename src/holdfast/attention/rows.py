"""Rows of tokens, one set for each head, as products of two thin factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from holdfast.attention.layer import merge_heads, split_heads
from holdfast.linalg.rounding import Array, Ball


@dataclass(frozen=True)
class Rows(Generic[Array]):
    """Rows V_lj = left_lj @ right_l: (…, h, n, m) through a head width k that is smaller than m.

    Attributes:
        left: (…, h, n, k).
        right: (h, k, m), or None where left is the rows themselves.
    """

    left: Array
    right: Array | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(h, n, m)."""
        h, n, k = self.left.shape[-3:]
        return h, n, k if self.right is None else self.right.shape[-1]

    def multiplied(self) -> Array:
        """The rows themselves, (…, h, n, m)."""
        return self.left if self.right is None else self.left @ self.right

    def dots(self, v: Tensor) -> Tensor:
        """V_lj · v_i for every vector: (…, i, m) to (…, h, i, n)."""
        left, right = _plain(self.left), self.right
        if right is None:
            return v.unsqueeze(-3) @ left.mT
        joined = _plain(right).flatten(0, 1).mT
        return split_heads(v @ joined, right.shape[0]) @ left.mT

    def mix(self, t: Tensor) -> Tensor:
        """Σ_l Σ_j t_lij V_lj: (…, h, i, n) to (…, i, m)."""
        left, right = _plain(self.left), self.right
        if right is None:
            return (t @ left).sum(-3)
        return merge_heads(t @ left) @ _plain(right).flatten(0, 1)


AnyRows = Rows[Tensor] | Rows[Ball] | Tensor | Ball


def as_rows(rows: AnyRows) -> Rows[Tensor] | Rows[Ball]:
    """Rows as they are, or rows that were given multiplied out."""
    if isinstance(rows, Rows):
        return rows
    return Rows[Ball](rows) if isinstance(rows, Ball) else Rows[Tensor](rows)


def _plain(t: Tensor | Ball) -> Tensor:
    return t.mid if isinstance(t, Ball) else t
