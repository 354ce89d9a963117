"""What the expansion of a network needs from one curved piece at its float64 input.

Derivatives of the network's activations with respect to its input are *jets*: J (p, b, n, d) along every direction and
H (pairs, b, n, d) along every pair. A piece turns the jets at its input into those at its output, in closed form, and
keeps the jets of its inner quantities (logits, pre-activations, …). With δ = J[G] + H[G, G]/2 + F at its input, F known
by token-wise forms, it bounds what its output has beyond (docs/math/telescoped.md):

    third    degree 3 and more, by forms: it feeds F of the later pieces;
    fourth   degree 4 and more, by numbers: it is what the margins' cubic polynomials leave out;
    twist    degree 3, exactly, seen by an adjoint: it makes these polynomials.

Rounding. Jets are computed in plain float64. With at most N roundings in a row, counting an inner product by its terms,
a computed number is within γ_N of the exact one, relative to the same formula on absolute values; and coefficients that
depend on ũ bring their own relative error, by balls. θ is above both together, and θ times the formula on absolute
values, bounded by the sizes that occurred, bounds the local defect of every jet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg import forms
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import up
from holdfast.linalg.squarings import thin_gram_norm

GAMMA = 2.0**-40  # of N = 2¹², twice
_COEFFICIENTS = 16.0
_PAIRS = 256  # pairs of directions that are examined together


class LocalExpansion(ABC):
    """One curved piece at ũ (b, n, d), a tensor that is taken as exact.

    Args:
        u: ũ.
        directions: those of the network's input.
        terms: N.

    Attributes:
        theta: (b) θ.
        largest: (b) the largest token norms of the jets at the input, of degree 1 and 2.
    """

    def __init__(self, u: Float64[Tensor, "b n d"], directions: Directions, terms: int) -> None:
        self.u, self.directions = u, directions
        self.theta = torch.full(u.shape[:1], GAMMA * max(1.0, terms / 2**12), dtype=torch.float64, device=u.device)
        self.largest: list[Tensor] = []

    # -- what a kind writes

    @property
    @abstractmethod
    def rest(self) -> str:
        """What it leaves out is called so among the losses of a margin."""

    @property
    @abstractmethod
    def output(self) -> torch.Size:
        """The shape (b, m, c) of the output."""

    @abstractmethod
    def push(self, a: Float64[Tensor, "t b n d"]) -> Float64[Tensor, "t b m c"]:
        """Df(ũ)[a]."""

    @abstractmethod
    def _first(self, J: Float64[Tensor, "p b n d"]) -> Float64[Tensor, "p b m c"]:
        """Jets along directions at the output."""

    @abstractmethod
    def _second(self, H: Float64[Tensor, "pairs b n d"]) -> Float64[Tensor, "pairs b m c"]:
        """Jets along pairs at the output."""

    @abstractmethod
    def third(self, F: Float64[Tensor, "b n p p"], eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b m p p"]:
        """Forms of the norms of every token of the output, before `scale`, beyond degree 2 and beyond Df[F]."""

    @abstractmethod
    def fourth(self, F: Float64[Tensor, "b n"], eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b m"]:
        """The same beyond degree 3, where F is of degree 3 and known by a bound of every token's norm."""

    @abstractmethod
    def twist(self, c: Float64[Tensor, "j b m c"]) -> Float64[Tensor, "j b p pairs"]:
        """Z with Z[q, rs] + Z[r, qs] + Z[s, qr] the third derivative of ⟨c, f⟩ along the jets, without Df's part."""

    @abstractmethod
    def forget(self) -> None:
        """Drops what only `twist` needs: jets along pairs."""

    @abstractmethod
    def _error(self, k: int) -> Tensor:
        """(b) a bound of the rounding error of a jet of degree k <= 3 at the output: of every token's, in its norm."""

    @abstractmethod
    def push_size(self) -> Tensor:
        """(b) the norm of `push` on absolute values."""

    def scale(self) -> Float64[Tensor, " c"] | None:
        """The factors of the output's channels that `third` and `fourth` leave out, or None where they are 1."""
        return None

    # -- what all share

    @final
    def jets(self, k: int, jets: Tensor) -> Tensor:
        """Jets of degree k at the output; the first degree comes first."""
        self.largest.append(up(torch.linalg.vector_norm(jets, dim=-1).amax((0, -1)), 1e-12))
        if k == 1:
            self.theta = torch.where(self.theta < 1, self.theta, torch.inf)  # errors are counted to first order
            return self._first(jets)
        self._bend = self._bent(jets)
        return self._second(jets)

    @final
    def defect(self, k: int) -> Tensor:
        """(b) a bound of the local error of the polynomial's part of degree k, divided by eps^k."""
        factorial = (1.0, 1.0, 2.0, 6.0)[k]
        error: Tensor = self._error(k) * (self.output[-2] * self.directions.p**k) ** 0.5 / factorial
        return error

    @final
    def moved(self, F: Tensor, eps: Tensor) -> Tensor:
        """(b, n, p, p) the size of δ - J[G] for every token."""
        return forms.plus(self._bend * eps.square().reshape(-1, 1, 1, 1), F)

    def _bent(self, H: Tensor) -> Tensor:
        """H[G, G]/2 of every token: by Σ_d H_d² along G, or by the norm of the unfolding d × p² where it is smaller."""
        full = self.directions.full(H).permute(2, 3, 4, 0, 1)  # (b, n, d, p, p)
        along = forms.firm((full.mT @ full).sum(2))
        wide = thin_gram_norm((H * self.directions.count.sqrt().reshape(-1, 1, 1, 1)).movedim(0, -1))
        smaller = forms.wide(forms.root(along) <= wide)
        return torch.where(smaller, along, forms.unit(along, wide)) / 4

    @final
    def _some_pairs(self) -> tuple[Tensor, ...]:
        """All pairs of directions, a few at a time: what is formed along all of them at once holds the most memory."""
        return torch.split(torch.arange(len(self.directions.first), device=self.u.device), _PAIRS)

    def _coefficient(self, error: Tensor, size: Tensor) -> None:
        """Takes note of the error of a coefficient, relative to the size with which formulas count it."""
        # Coefficients that vanish all have the radius 1e-306 of underflow, which is nothing.
        self.theta = self.theta + _COEFFICIENTS * error / size.clamp(min=1e-280)
