"""What may be perturbed: an l2 ball or a box, in coordinates of the directions that the network can tell apart.

G = scale · h ⊙ y, where y runs through the unit ball, or through a cube |y_k| <= s_k with Σ s_k² = 1. A network begins
with affine pieces, X ↦ L X + c. With V a basis of the rows of L diag(h), only a = Vᵀy counts (docs/math/forms.md,
section 2), and a function c·(L G) is scale · x·a with x = c J, J = L diag(h) V, up to an error that is bounded here.

A box with half-widths w is such a cube with h = w/s, for any s. The ball around the cube is an ellipsoid around the
box; coordinates that the network weighs more get a larger share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius_upper, gamma

_RANK = 1e-11  # singular values below it, relative, are left to the error


@final
@dataclass(frozen=True)
class Region:
    """The set of all y, the basis V, and J.

    Attributes:
        sides: (P) s for a cube; None for the ball.
        basis: (P, p) V.
        J: (N, p).
        missed: a bound of ‖L diag(h) - J Vᵀ‖; ‖y‖ <= 1.
    """

    sides: Float64[Tensor, " P"] | None
    basis: Float64[Tensor, "P p"]
    J: Float64[Tensor, "N p"]
    missed: float

    @classmethod
    def of(cls, L: Ball, half: Float64[Tensor, " P"] | None) -> Region:
        """The unit ball, or the box with these half-widths, for a network that begins with L, (N, P)."""
        sides, rows = None, L
        if half is not None:
            weight = torch.linalg.vector_norm(L.mid * half, dim=0)
            weight = weight + 1e-3 * weight.mean() + 1e-300
            sides = (weight / weight.sum()).sqrt() * (1 - 1e-10)  # so that ‖s‖ <= 1 in spite of rounding
            rows = L * (Ball.exact(half) / sides)
        if rows.shape[0] >= rows.shape[1]:
            V = torch.eye(rows.shape[1], dtype=torch.float64)
        else:
            _, values, vectors = torch.linalg.svd(rows.mid, full_matrices=False)
            rank = max(1, int((values > _RANK * values[0]).sum()))
            V = vectors[:rank].mT.contiguous()
        J = rows.mid @ V
        left = Ball.exact(J) @ V.mT - rows
        missed = float(frobenius_upper(left.mid) + frobenius_upper(left.rad)) * (1 + 1e-14)
        return cls(sides, V, J, missed)

    @property
    def p(self) -> int:
        return self.basis.shape[-1]

    @cached_property
    def radius(self) -> float:
        """R >= ‖a‖ on the region: ‖V‖² <= 1 + ‖VᵀV - I‖."""
        gram = Ball.exact(self.basis.mT) @ self.basis - torch.eye(self.p, dtype=torch.float64)
        stretch = (1 + frobenius_upper(gram.mid) + frobenius_upper(gram.rad)).sqrt()
        return float(stretch) * (1 + 1e-14)

    @cached_property
    def reach(self) -> float:
        """A bound of ‖L(h ⊙ y)‖ over the region."""
        return float(frobenius_upper(self.J)) * self.radius * (1 + 1e-14) + self.missed

    def reduced(self, covectors: Float64[Tensor, "K N"]) -> tuple[Tensor, Tensor]:
        """The rows x = c J (K, p), and (K) a bound of |c·L(h ⊙ y) - x·a| over the region."""
        rounding = gamma(self.J.shape[0]) * float(frobenius_upper(self.J)) * self.radius
        error = frobenius_upper(covectors, (-1,)) * (self.missed + rounding)
        return covectors @ self.J, error * (1 + 1e-12)

    def supremum(self, x: Float64[Tensor, "*K p"]) -> Float64[Tensor, "*K"]:
        """A bound of |x·a| over the region, for every row."""
        found: Tensor = torch.linalg.vector_norm(x, dim=-1) * self.radius
        if self.sides is not None:
            found = torch.minimum(found, (x @ self.basis.mT).abs() @ self.sides + found * 2.0**-40)
        return found * (1 + 1e-10)
