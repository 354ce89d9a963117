"""What the expansion of a network asks of one curved piece at the float64 point where it stands.

Derivatives of the network's activations with respect to the input are *jets*: J (p, b, n, d) along every direction, H
along every pair, T along every triple. A piece turns the jets at its input into those at its output, in closed form,
and remembers how large the jets of its inner quantities (logits, pre-activations, …) are. From these sizes it bounds
its local rest: what f(ũ + δ) has beyond degree K when δ is the jets' polynomial plus an unknown F with known token
norms (docs/math/telescoped.md).

Rounding. Jets are computed in plain float64. With inner products of at most 2¹² terms and at most 2¹² operations in a
row, every computed number is within γ = 2¹³ · 2⁻⁵³ of the exact one, relative to the same formula evaluated on absolute
values; coefficients that depend on ũ bring their own relative error η, by balls. So θ = γ + 16 η times a bound of the
formula on absolute values bounds the local defect of every jet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius_upper
from holdfast.network.expansion.directions import Directions, Triples
from holdfast.network.expansion.graded import Graded

GAMMA = 2.0**-40
_COEFFICIENTS = 16.0


class Local(ABC):
    """One curved piece at ũ (b, n, d), a tensor that is taken as exact.

    Attributes:
        directions: of the network's input.
        order: K, the highest degree that is exact.
    """

    token_wise: ClassVar[bool]

    def __init__(self, u: Float64[Tensor, "b n d"], directions: Directions, order: int) -> None:
        self.u, self.directions, self.order = u, directions, order
        self.theta = torch.full(u.shape[:1], GAMMA, dtype=torch.float64, device=u.device)
        self._largest = [u.new_zeros(len(u)) for _ in range(3)]  # token norms of the jets at the input

    # -- what a kind writes

    @abstractmethod
    def push(self, a: Tensor) -> Tensor:
        """Df(ũ)[a] for tangents (t, b, n, d)."""

    @abstractmethod
    def _first(self, J: Tensor) -> Tensor:
        """Jets along directions at the output, those at the input being given."""

    @abstractmethod
    def _second(self, H: Tensor) -> Tensor:
        """Jets along pairs."""

    @abstractmethod
    def _third(self, T: Tensor, at: Triples) -> Tensor:
        """Jets along some triples."""

    @abstractmethod
    def _error(self, k: int) -> Tensor:
        """(b) a bound of the rounding error of a jet of degree k at the output: of every token's, in its norm."""

    @abstractmethod
    def push_size(self) -> Tensor:
        """(b) the same for `push`, of a tangent of length 1, in the Frobenius norm."""

    @abstractmethod
    def rest(self, F: Float64[Tensor, "b n"], eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b m"]:
        """A bound of the local rest of every token of the output, before `scale`."""

    def scale(self) -> Float64[Tensor, " c"] | None:
        """The factors of the output's channels that `rest` leaves out, or None where they are 1."""
        return None

    @property
    def output(self) -> torch.Size:
        """The shape (b, m, c) of the output."""
        return self.u.shape

    # -- what all share

    @final
    def jets(self, k: int, jets: Tensor, at: Triples | None) -> Tensor:
        """Jets of degree k at the output; degrees must come in order, and triples in any number of parts."""
        longest = torch.linalg.vector_norm(jets, dim=-1).amax((0, -1))
        self._largest[k - 1] = torch.maximum(self._largest[k - 1], longest * (1 + 1e-12))
        if at is not None:
            return self._third(jets, at)
        return self._first(jets) if k == 1 else self._second(jets)

    @final
    def defects(self) -> list[Tensor]:
        """(b) bounds of the Frobenius norms of the local defects of the jets of degree 1 to K, k! included."""
        tokens = self.output[-2]
        out, factorial = [], 1
        for k in range(1, self.order + 1):
            factorial *= k
            many = (tokens * self.directions.p**k) ** 0.5 / factorial
            out.append(self._error(k) * many)
        return out

    @final
    def largest(self, k: int) -> Tensor:
        """(b) the largest token norm of a jet of degree k at the input."""
        return self._largest[k - 1]

    def _coefficient(self, ball: Ball, dims: tuple[int, ...]) -> None:
        """Takes note of the relative error of a coefficient."""
        size = frobenius_upper(ball.mid, dims)
        error = frobenius_upper(ball.rad, dims) / torch.where(size > 0, size, 1.0)
        self.theta = self.theta + _COEFFICIENTS * error

    @final
    def graded(self, sizes: list[Tensor], eps: Tensor, rest: Tensor) -> Graded:
        """The quantity whose parts have the given coefficients (b, …)."""
        e = eps.reshape(-1, *(1 for _ in sizes[0].shape[1:]))
        parts = tuple(size * e**k * (1 + 1e-12) for k, size in enumerate(sizes[: self.order], 1))
        return Graded(parts, rest.expand_as(parts[0]))
