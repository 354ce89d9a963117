"""How the values vary under the rows of probabilities: what a change of the scores meets."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.common import centred_product
from holdfast.attention.rows import AnyRows, as_rows
from holdfast.linalg.operator import Gram, MatrixOperator, ProvableOperator, members
from holdfast.linalg.rounding import Ball, as_ball


@final
class ValueCovariance(ProvableOperator):
    """u ↦ M_li V_l u, all heads l together, for every row i: from (m) to (h, n), the batch is (b…, n).

    M_li = diag(p_li) - p_li p_liᵀ: the entries are p_lij (v_lj - y_li) · u, y_li the mean of the values under p_li.

    Args:
        values: (b…, h, n, m) rows v_lj, factored or not.
        p: (b…, h, n, n) probabilities.
    """

    def __init__(self, values: AnyRows, p: Tensor | Ball) -> None:
        self._values, self._p = as_rows(values), as_ball(p)
        mid = self._p.mid
        h, n, m = self._values.shape
        super().__init__(torch.Size((*mid.shape[:-3], mid.shape[-2])), torch.Size((m,)), torch.Size((h, n)), mid)

    def mv(self, v: Float[Tensor, "*batch i m"]) -> Float[Tensor, "*batch i h n"]:
        return centred_product(self._p.mid, self._values.dots(v)).movedim(-3, -2)

    def rmv(self, u: Float[Tensor, "*batch i h n"]) -> Float[Tensor, "*batch i m"]:
        return self._values.mix(centred_product(self._p.mid, u.movedim(-2, -3)))

    @property
    def doubles(self) -> int:
        return 8 * self.codomain.numel() * self.domain.numel()

    def part(self, start: int, stop: int) -> MatrixOperator:
        index = members(start, stop, self.batch, self.device)
        p = self._p.movedim(-3, -2)[index]
        values = as_ball(self._values.multiplied())
        values = values.expand(*self.batch[:-1], *values.shape[-3:])[index[:-1]]
        return MatrixOperator((p.unsqueeze(-1) * (values - p.unsqueeze(-2) @ values)).flatten(1, 2))

    def gram(self) -> Gram:
        return self.part(0, self.batch.numel()).gram()
