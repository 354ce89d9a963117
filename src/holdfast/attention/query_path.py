"""How a token's own output moves through its query alone, for every token apart."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.common import centred_product
from holdfast.attention.jacobian import Folded
from holdfast.attention.rows import AnyRows, as_rows
from holdfast.linalg.operator import Gram, MatrixOperator, ProvableOperator, members
from holdfast.linalg.rounding import Ball, as_ball


@final
class QueryBlocks(ProvableOperator):
    """w ↦ residual · w + Σ_l C_lᵀ Cov_li(x) A_lᵀ w for every token i: from (d) to (d_out), the batch is (b…, n).

    What moves token i's output when the tokens it attends to stay where they are. These are the parts of the diagonal
    blocks of the Jacobian that mass splitting sees by themselves (docs/math/regularity.md, Theorem 8).

    Args:
        p: (b…, h, n, n) probabilities.
        values: (b…, h, n, d_out) rows x_j C_l, factored or not.
        query: (b…, h, n, d) rows A_l x_j, factored or not; with rotary positions others for every token.
        residual: of the layer.
    """

    def __init__(self, p: Tensor | Ball, values: AnyRows, query: AnyRows, residual: float = 0.0) -> None:
        self._p, self._values, self._query, self._residual = as_ball(p), as_rows(values), as_rows(query), residual
        shape = self._p.shape
        domain, codomain = (torch.Size((rows.shape[-1],)) for rows in (self._query, self._values))
        super().__init__(torch.Size((*shape[:-3], shape[-2])), domain, codomain, self._p.mid)

    @classmethod
    def of(cls, f: Folded[Tensor] | Folded[Ball], residual: float = 0.0) -> QueryBlocks:
        """Those of a folded layer."""
        return cls(f.p, f.value_rows, f.query_rows, residual)

    def mv(self, v: Float[Tensor, "*batch i d"]) -> Float[Tensor, "*batch i d_out"]:
        out = self._values.mix(centred_product(self._p.mid, self._query.dots(v)))
        return out + self._residual * v if self._residual else out

    def rmv(self, u: Float[Tensor, "*batch i d_out"]) -> Float[Tensor, "*batch i d"]:
        out = self._query.mix(centred_product(self._p.mid, self._values.dots(u)))
        return out + self._residual * u if self._residual else out

    @property
    def doubles(self) -> int:
        h, n = self._p.shape[-3], self._p.shape[-1]
        return (
            8 * h * n * (self.domain.numel() + self.codomain.numel()) + 3 * self.domain.numel() * self.codomain.numel()
        )

    def part(self, start: int, stop: int) -> MatrixOperator:
        index = members(start, stop, self.batch, self.device)
        (d,), (d_out,) = self.domain, self.codomain
        p = self._p.movedim(-3, -2)[index]
        values, query = (rows.of_queries(self.batch[:-1], index) for rows in (self._values, self._query))
        moved = p.unsqueeze(-1) * (values - p.unsqueeze(-2) @ values)
        blocks = moved.flatten(1, 2).mT @ query.flatten(1, 2)
        return MatrixOperator(blocks + self._residual * torch.eye(d_out, d, dtype=torch.float64, device=self.device))

    def gram(self) -> Gram:
        return self.part(0, self.batch.numel()).gram()
