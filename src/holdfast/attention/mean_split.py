"""The Jacobian on directions in which all tokens move alike, G = 1wᵀ/√n, on the rest, and what couples the two."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.jacobian import AttentionJacobian
from holdfast.linalg.operator import AssembledOperator, Enclosure
from holdfast.linalg.rounding import Ball, frobenius_upper, gamma


class _JacobianPart(AssembledOperator):
    """An operator made of a Jacobian."""

    def __init__(self, jacobian: AttentionJacobian, domain: torch.Size, codomain: torch.Size) -> None:
        self._jacobian = jacobian
        self._n = jacobian.domain[0]
        like = torch.empty(0, dtype=jacobian.dtype, device=jacobian.device)
        super().__init__(jacobian.batch, domain, codomain, like)

    @final
    def part(self, start: int, stop: int) -> _JacobianPart:
        return type(self)(self._jacobian.part(start, stop))  # type: ignore[call-arg]

    @final
    def _split(self) -> tuple[Enclosure, Enclosure]:
        """The enclosed matrices of J on common directions and on the rest; projections do not enlarge an error."""
        J = self._jacobian.enclose()
        blocks = J.matrix.reshape(*J.matrix.shape[:-1], *self._jacobian.domain)
        common = blocks.sum(-2) / math.sqrt(self._n)
        rest = blocks - blocks.mean(-2, keepdim=True)
        rounding = Ball.exact(frobenius_upper(J.matrix)) * (2 * gamma(self._n + 4)) + J.error
        return Enclosure(common, rounding.upper), Enclosure(rest.flatten(-2, -1), rounding.upper)


@final
class CommonPart(_JacobianPart):
    """w ↦ J(1wᵀ/√n): from (d) to (n, d_out)."""

    def __init__(self, jacobian: AttentionJacobian) -> None:
        super().__init__(jacobian, jacobian.domain[1:], jacobian.codomain)

    def mv(self, v: Float[Tensor, "*m d"]) -> Float[Tensor, "*m n d_out"]:
        spread = (v / math.sqrt(self._n)).unsqueeze(-2)
        return self._jacobian.mv(spread.expand(*v.shape[:-1], self._n, v.shape[-1]))

    def rmv(self, u: Float[Tensor, "*m n d_out"]) -> Float[Tensor, "*m d"]:
        return self._jacobian.rmv(u).sum(-2) / math.sqrt(self._n)

    def enclose(self) -> Enclosure:
        return self._split()[0]


@final
class OtherPart(_JacobianPart):
    """G ↦ J(G - common part of G): from (n, d) to (n, d_out)."""

    def __init__(self, jacobian: AttentionJacobian) -> None:
        super().__init__(jacobian, jacobian.domain, jacobian.codomain)

    def mv(self, v: Float[Tensor, "*m n d"]) -> Float[Tensor, "*m n d_out"]:
        return self._jacobian.mv(v - v.mean(-2, keepdim=True))

    def rmv(self, u: Float[Tensor, "*m n d_out"]) -> Float[Tensor, "*m n d"]:
        v = self._jacobian.rmv(u)
        return v - v.mean(-2, keepdim=True)

    def enclose(self) -> Enclosure:
        return self._split()[1]


@final
class Coupling(_JacobianPart):
    """G ↦ (the common part of JᵀJ applied to the rest of G): from (n, d) to (d)."""

    def __init__(self, jacobian: AttentionJacobian) -> None:
        super().__init__(jacobian, jacobian.domain, jacobian.domain[1:])

    def mv(self, v: Float[Tensor, "*m n d"]) -> Float[Tensor, "*m d"]:
        rest = v - v.mean(-2, keepdim=True)
        return self._jacobian.rmv(self._jacobian.mv(rest)).sum(-2) / math.sqrt(self._n)

    def rmv(self, u: Float[Tensor, "*m d"]) -> Float[Tensor, "*m n d"]:
        spread = (u / math.sqrt(self._n)).unsqueeze(-2).expand(*u.shape[:-1], self._n, u.shape[-1])
        v = self._jacobian.rmv(self._jacobian.mv(spread))
        return v - v.mean(-2, keepdim=True)

    def enclose(self) -> Enclosure:
        common, rest = self._split()
        c, r = Ball.exact(frobenius_upper(common.matrix)), Ball.exact(frobenius_upper(rest.matrix))
        error = c * r * gamma(common.matrix.shape[-2]) + c * rest.error + (r + rest.error) * common.error
        return Enclosure(common.matrix.mT @ rest.matrix, error.upper)
