"""What may be perturbed: an l2 ball or a box, in coordinates of the directions that the network can tell apart.

G = scale · h ⊙ y, where y runs through the unit ball, or through a cube |y_k| <= s_k with Σ s_k² = 1. A network begins
with affine pieces, X ↦ L X + c. With V a basis of the rows of L diag(h), only a = Vᵀy counts (docs/math/forms.md,
section 2), and a function c·(L G) is scale · x·a with x = c J, J = L diag(h) V, up to an error that is bounded here.

A box with half-widths w is such a cube with h = w/s, for any s. The ball around the cube is an ellipsoid around the
box; coordinates that the network weighs more get a larger share of it.

An embedding of patches has a block for every patch, and nothing between them: V and J are made and multiplied block by
block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import down, frobenius_upper, gamma, up

_RANK = 1e-11  # singular values below it, relative, are left to the error
_ROUNDS = 8  # in which blocks are told apart


@final
@dataclass(frozen=True)
class IndependentBlock:
    """Which outputs depend on which inputs alone, and which coordinates stand for these."""

    outputs: Tensor
    inputs: Tensor
    coordinates: slice


@final
@dataclass(frozen=True)
class Region:
    """The set of all y, the basis V, and J.

    Attributes:
        sides: (P) s for a cube; None for the ball.
        basis: (P, p) V.
        J: (N, p).
        missed: a bound of ‖L diag(h) - J Vᵀ‖; ‖y‖ <= 1.
        blocks: outside of which V and J vanish.
    """

    sides: Float64[Tensor, " P"] | None
    basis: Float64[Tensor, "P p"]
    J: Float64[Tensor, "N p"]
    missed: float
    blocks: tuple[IndependentBlock, ...]

    @classmethod
    def of(cls, L: Ball, half: Float64[Tensor, " P"] | None) -> Region:
        """The unit ball, or the box with these half-widths, for a network that begins with L, (N, P)."""
        sides, rows = None, L
        if half is not None:
            weight = torch.linalg.vector_norm(L.mid * half, dim=0)
            weight = weight + 1e-3 * weight.mean() + 1e-300
            sides = down((weight / weight.sum()).sqrt(), 1e-10)  # so that ‖s‖ <= 1 in spite of rounding
            rows = L * (Ball.exact(half) / sides)
        blocks, bases, p = [], [], 0
        outside = rows.rad.clone()
        missed = 0.0
        for outputs, inputs in _components(rows.mid != 0):
            outside[outputs.unsqueeze(-1), inputs] = 0.0
            part = rows[outputs][:, inputs]
            V = _basis(part.mid)
            J = part.mid @ V
            left = Ball.exact(J) @ V.mT - part
            missed += float(frobenius_upper(left.mid) + frobenius_upper(left.rad))
            bases.append((V, J))
            blocks.append(IndependentBlock(outputs, inputs, slice(p, p + V.shape[1])))
            p += V.shape[1]
        basis, J = (torch.zeros(size, p, dtype=torch.float64) for size in (rows.shape[1], rows.shape[0]))
        for block, (V, image) in zip(blocks, bases, strict=True):
            basis[block.inputs, block.coordinates], J[block.outputs, block.coordinates] = V, image
        missed += float(frobenius_upper(outside))
        return cls(sides, basis, J, up(missed, 1e-12), tuple(blocks))

    @property
    def p(self) -> int:
        return self.basis.shape[-1]

    @cached_property
    def radius(self) -> float:
        """R >= ‖a‖ on the region: ‖V‖² <= 1 + ‖VᵀV - I‖, for every block."""
        stretch = 1.0
        for block in self.blocks:
            V = self.basis[block.inputs, block.coordinates]
            gram = Ball.exact(V.mT) @ V - torch.eye(V.shape[1], dtype=torch.float64)
            stretch = max(stretch, float((1 + frobenius_upper(gram.mid) + frobenius_upper(gram.rad)).sqrt()))
        return up(stretch, 1e-14)

    @cached_property
    def reach(self) -> float:
        """A bound of ‖L(h ⊙ y)‖ over the region."""
        return up(float(frobenius_upper(self.J)) * self.radius, 1e-14) + self.missed

    def reduced(self, covectors: Float64[Tensor, "K N"]) -> tuple[Tensor, Tensor]:
        """The rows x = c J (K, p), and (K) a bound of |c·L(h ⊙ y) - x·a| over the region."""
        rounding = gamma(self.J.shape[0]) * float(frobenius_upper(self.J)) * self.radius
        error = frobenius_upper(covectors, (-1,)) * (self.missed + rounding)
        rows = covectors.new_zeros(len(covectors), self.p)
        for block in self.blocks:
            rows[:, block.coordinates] = covectors[:, block.outputs] @ self.J[block.outputs, block.coordinates]
        return rows, up(error, 1e-12)

    def spread(self, x: Float64[Tensor, "K p"]) -> Float64[Tensor, "K P"]:
        """The rows x Vᵀ: functions x·a as functions of y."""
        rows = x.new_zeros(len(x), len(self.basis))
        for block in self.blocks:
            rows[:, block.inputs] = x[:, block.coordinates] @ self.basis[block.inputs, block.coordinates].mT
        return rows

    def supremum(self, x: Float64[Tensor, "K p"]) -> Float64[Tensor, " K"]:
        """A bound of |x·a| over the region, for every row."""
        most: Tensor = torch.linalg.vector_norm(x, dim=-1) * self.radius
        if self.sides is not None:
            rounding = 2 * gamma(self.p) * self.p**0.5  # √p is about the norm of |V| at most
            most = torch.minimum(most, self.spread(x).abs() @ self.sides + most * rounding)
        return up(most, 1e-10)


def _basis(rows: Float64[Tensor, "N P"]) -> Float64[Tensor, "P p"]:
    """Orthonormal columns that span the rows."""
    if rows.shape[0] >= rows.shape[1]:
        return torch.eye(rows.shape[1], dtype=torch.float64)
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    rank = max(1, int((values > _RANK * values[0]).sum()))
    basis: Tensor = vectors[:rank].mT.contiguous()
    return basis


def _components(linked: Bool[Tensor, "N P"]) -> list[tuple[Tensor, Tensor]]:
    """Outputs and inputs of every block, none of which is linked to another; of all together, where that is not seen.

    Inputs take the least label of the inputs that they share an output with, until nothing changes.
    """
    N, P = linked.shape
    labels, none = torch.arange(P), P
    for _ in range(_ROUNDS):
        by_output = torch.where(linked, labels, none).amin(1)
        new = torch.where(linked, by_output.unsqueeze(1), none).amin(0)
        if torch.equal(new, labels):
            break
        labels = new
    else:
        return [(torch.arange(N), torch.arange(P))]
    names = torch.unique(labels[labels < none])
    if not len(names):
        return [(torch.arange(N), torch.arange(P))]
    return [((by_output == name).nonzero().squeeze(-1), (labels == name).nonzero().squeeze(-1)) for name in names]
