"""Linear maps that are applied, not stored.

An operator stands for a batch of maps from tensors of shape `domain` to tensors of shape `codomain`. Vectors have the
shape (directions…, batch…, domain…), with any number of directions in front.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.errors import InputError
from holdfast.linalg.rounding import Ball, frobenius_upper, gamma, power_of_two, up


class LinearOperator(ABC):
    """A batch of linear maps with their transposes.

    Args:
        batch: shape of the batch; () for a single map.
        domain: shape of one argument.
        codomain: shape of one value.
        like: a tensor whose dtype and device the vectors have.
    """

    def __init__(self, batch: torch.Size, domain: torch.Size, codomain: torch.Size, like: Tensor) -> None:
        self.batch, self.domain, self.codomain = batch, domain, codomain
        self.dtype, self.device = like.dtype, like.device

    @abstractmethod
    def mv(self, v: Tensor) -> Tensor:
        """The map applied to directions: (…, *batch, *domain) to (…, *batch, *codomain)."""

    @abstractmethod
    def rmv(self, u: Tensor) -> Tensor:
        """The transposed map: (…, *batch, *codomain) to (…, *batch, *domain)."""

    def squared(self) -> Callable[[Tensor], Tensor] | None:
        """The map and then its transpose, (*batch, *domain) to the same, if that is cheaper than applying both."""
        return None

    @final
    def dense(self) -> Tensor:
        """The matrices (*batch, codomain, domain), column by column; for small operators and for tests."""
        size = self.domain.numel()
        basis = torch.eye(size, dtype=self.dtype, device=self.device)
        basis = basis.reshape(size, *(1 for _ in self.batch), *self.domain)
        columns = self.mv(basis.expand(size, *self.batch, *self.domain))
        return columns.reshape(size, *self.batch, self.codomain.numel()).movedim(0, -1)


@dataclass(frozen=True)
class Gram:
    """A float64 symmetric matrix G within `error`, in the spectral norm, of that of map/scale, for members of a batch.

    Only the lower triangle counts; the upper one mirrors it.
    """

    matrix: Tensor
    error: Tensor
    scale: Tensor


class ProvableOperator(LinearOperator):
    """An operator whose Gram matrix on the smaller side can be enclosed, so that its norm can be proved."""

    @property
    @abstractmethod
    def doubles(self) -> int:
        """How many float64 numbers `gram` holds at once for one member of the batch."""

    @abstractmethod
    def part(self, start: int, stop: int) -> ProvableOperator:
        """The members `start` to `stop` of the flattened batch, as an operator with one batch dimension."""

    @abstractmethod
    def gram(self) -> Gram:
        """The enclosed Gram matrices of an operator with one batch dimension."""


def members(start: int, stop: int, batch: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """Where the members `start` to `stop` of the flattened batch stand in it, an index for each of its dimensions."""
    flat, index = torch.arange(start, stop, device=device), []
    for size in reversed(batch):
        index.append(flat % size)
        flat = flat // size
    return tuple(reversed(index))


class AssembledOperator(ProvableOperator):
    """A provable operator whose matrix itself can be enclosed."""

    @abstractmethod
    def enclose(self) -> Enclosure:
        """The enclosed matrices of an operator with one batch dimension."""

    @property
    @final
    def doubles(self) -> int:
        # The matrix, the scaled matrix, and a copy in passing or the Gram matrix.
        return 3 * self.codomain.numel() * self.domain.numel()

    @final
    def gram(self) -> Gram:
        return self.enclose().gram


@dataclass(frozen=True)
class Enclosure:
    """A float64 matrix and a bound of its distance, in the Frobenius norm, from the exact one."""

    matrix: Tensor
    error: Tensor

    @cached_property
    def gram(self) -> Gram:
        """G = J Jᵀ or JᵀJ, whichever is smaller.

        With Ĵ the computed matrix, ‖Ĵ - J‖_F <= e and K the inner length,
        ‖fl(ĴĴᵀ) - JJᵀ‖ <= γ_K ‖Ĵ‖_F² + 2 e ‖Ĵ‖_F + e² (Higham 2002, section 3.5, and ‖|Ĵ|‖ <= ‖Ĵ‖_F).
        Ĵ is first divided by a power of two, so that nothing overflows; what underflows is below the last term.
        """
        J, e = self.matrix, self.error
        if J.shape[-2] > J.shape[-1]:
            J = J.mT
        # The error may be larger than the matrix, where that nearly vanishes.
        largest = torch.linalg.vector_norm(J, math.inf, (-2, -1), keepdim=True)
        scale = power_of_two(torch.maximum(largest, e[..., None, None]), (-2, -1))
        J, scale = J / scale, scale.squeeze((-2, -1))
        norm = Ball.exact(up(self.length / scale))
        e_scaled = Ball.exact(self.scaled_error(scale))
        error = norm.square() * gamma(J.shape[-1] + 2) + norm * e_scaled * 2.0 + e_scaled.square()
        return Gram(_symmetric_product(J), error.upper, scale)

    @cached_property
    def length(self) -> Tensor:
        """A bound of the Frobenius norm of the float64 matrix."""
        return frobenius_upper(self.matrix)

    def scaled_error(self, scale: Tensor) -> Tensor:
        """The error of the matrix divided by a power of two, with what underflows then."""
        return up(up(self.error / scale) + self.matrix.shape[-2] * self.matrix.shape[-1] * 2.0**-1022)


def _symmetric_product(J: Tensor, block: int = 1024) -> Tensor:
    """J Jᵀ at half the cost: block rows of the lower triangle, mirrored."""
    size = J.shape[-2]
    if size <= block:
        return J @ J.mT
    G = J.new_empty(*J.shape[:-2], size, size)
    for start in range(0, size, block):
        stop = min(start + block, size)
        row = J[..., start:stop, :] @ J[..., :stop, :].mT
        G[..., start:stop, :stop] = row
        G[..., :start, start:stop] = row[..., :start].mT
    return G


@final
class MatrixOperator(AssembledOperator):
    """Stored matrices (*batch, m, n), exact or enclosed."""

    def __init__(self, matrix: Tensor | Ball) -> None:
        self.matrix = matrix
        values = self._values
        super().__init__(values.shape[:-2], values.shape[-1:], values.shape[-2:-1], values)

    @cached_property
    def _values(self) -> Tensor:
        return self.matrix.mid if isinstance(self.matrix, Ball) else self.matrix

    def mv(self, v: Tensor) -> Tensor:
        return (self._values @ v.unsqueeze(-1)).squeeze(-1)

    def rmv(self, u: Tensor) -> Tensor:
        return (self._values.mT @ u.unsqueeze(-1)).squeeze(-1)

    def part(self, start: int, stop: int) -> MatrixOperator:
        return MatrixOperator(self.matrix.reshape(-1, *self.matrix.shape[-2:])[start:stop])

    def enclose(self) -> Enclosure:
        ball = self.matrix if isinstance(self.matrix, Ball) else Ball.exact(self.matrix)
        return Enclosure(ball.mid, frobenius_upper(ball.rad))


@final
class FunctionJacobian(LinearOperator):
    """The Jacobian of any differentiable function at x, by forward and reverse differentiation.

    Args:
        function: maps (*batch, …) to (*batch, …), each member of the batch by itself.
        x: where to differentiate.
        batch_dims: how many leading dimensions of x are the batch.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, batch_dims: int = 0) -> None:
        self._function, self._x = function, x
        # Forward differentiation has no rule for the fused attention kernels.
        with sdpa_kernel(SDPBackend.MATH):
            y, self._pull = torch.func.vjp(function, x)[:2]
        if not isinstance(y, Tensor):
            raise InputError(f"the function returned {type(y).__name__}; expected one tensor")
        if y.shape[:batch_dims] != x.shape[:batch_dims]:
            raise InputError(
                f"the function maps {tuple(x.shape)} to {tuple(y.shape)}; with batch_dims={batch_dims} "
                "both must begin with the same batch dimensions"
            )
        super().__init__(x.shape[:batch_dims], x.shape[batch_dims:], y.shape[batch_dims:], x)

    def mv(self, v: Tensor) -> Tensor:
        def push(direction: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                tangent: Tensor = torch.func.jvp(self._function, (self._x,), (direction,))[1]
            return tangent

        return self._over_directions(push, v, self._x.ndim)

    def rmv(self, u: Tensor) -> Tensor:
        return self._over_directions(lambda w: self._pull(w)[0], u, len(self.batch) + len(self.codomain))

    @staticmethod
    def _over_directions(map_one: Callable[[Tensor], Tensor], vectors: Tensor, ndim: int) -> Tensor:
        directions = vectors.shape[: vectors.ndim - ndim]
        if not directions:
            return map_one(vectors)
        flat = vectors.reshape(-1, *vectors.shape[len(directions) :])
        result: Tensor = torch.func.vmap(map_one)(flat)
        return result.reshape(*directions, *result.shape[1:])
