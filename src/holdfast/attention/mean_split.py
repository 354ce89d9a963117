"""The Jacobian on directions in which all tokens move alike, G = 1wᵀ/√n, on the rest, and what couples the two."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.jacobian import AttentionJacobian
from holdfast.linalg.operator import AssembledOperator, Enclosure, Gram, ProvableOperator
from holdfast.linalg.rounding import Ball, frobenius_upper, gamma, up

_LARGE = 512  # numbers of an input, from which on a Gram matrix is worth keeping for the next norm


class _JacobianPart(ProvableOperator):
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
    def _common(self) -> Enclosure:
        """The enclosed matrix of J on common directions; projections do not enlarge an error."""
        J = self._jacobian.enclose()
        return Enclosure(self._blocks().sum(-2) / math.sqrt(self._n), self._rounding(J))

    @final
    def _rest(self) -> Enclosure:
        """The same on the rest."""
        J, blocks = self._jacobian.enclose(), self._blocks()
        return Enclosure((blocks - blocks.mean(-2, keepdim=True)).flatten(-2, -1), self._rounding(J))

    def _blocks(self) -> Tensor:
        J = self._jacobian.enclose().matrix
        return J.reshape(*J.shape[:-1], *self._jacobian.domain)

    def _rounding(self, J: Enclosure) -> Tensor:
        return (Ball.exact(J.length) * (2 * gamma(self._n + 4)) + J.error).upper


@final
class CommonPart(_JacobianPart, AssembledOperator):
    """w ↦ J(1wᵀ/√n): from (d) to (n, d_out)."""

    def __init__(self, jacobian: AttentionJacobian) -> None:
        super().__init__(jacobian, jacobian.domain[1:], jacobian.codomain)

    def mv(self, v: Float[Tensor, "*m d"]) -> Float[Tensor, "*m n d_out"]:
        spread = (v / math.sqrt(self._n)).unsqueeze(-2)
        return self._jacobian.mv(spread.expand(*v.shape[:-1], self._n, v.shape[-1]))

    def rmv(self, u: Float[Tensor, "*m n d_out"]) -> Float[Tensor, "*m d"]:
        return self._jacobian.rmv(u).sum(-2) / math.sqrt(self._n)

    def enclose(self) -> Enclosure:
        return self._common()


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

    @property
    def doubles(self) -> int:
        return 4 * self.codomain.numel() * self.domain.numel()

    def gram(self) -> Gram:
        """J_s J_sᵀ = JJᵀ - J_c J_cᵀ, from the Gram matrix of J where that is on the left and worth keeping."""
        if not _LARGE < self.codomain.numel() <= self.domain.numel():
            return self._rest().gram
        whole, common = self._jacobian.gram(), self._common()
        C, e = common.matrix / whole.scale[..., None, None], Ball.exact(common.scaled_error(whole.scale))
        size = Ball.exact(up(common.length / whole.scale))
        rounding = (size.square() + frobenius_upper(whole.matrix)) * gamma(C.shape[-1] + 4)
        error = rounding + size * e * 2.0 + e.square() + whole.error
        return Gram(torch.baddbmm(whole.matrix, C, C.mT, alpha=-1.0), error.upper, whole.scale)


@final
class Coupling(_JacobianPart, AssembledOperator):
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
        common, rest = self._common(), self._rest()
        c, r = Ball.exact(common.length), Ball.exact(rest.length)
        error = c * r * gamma(common.matrix.shape[-2]) + c * rest.error + (r + rest.error) * common.error
        return Enclosure(common.matrix.mT @ rest.matrix, error.upper)
