"""Units between two linear maps, r x + φ(x W₁ + b₁) W₂ + b₂, expanded in what they take; that moves by h (b, n, units).

Perceptrons are such maps; so are entrywise functions, and products by way of squares. r is a number, or one for every
channel.
"""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.layers.activation.base import SmoothActivation
from holdfast.layers.expansion import LocalExpansion
from holdfast.linalg import Ball, forms
from holdfast.linalg.directions import Directions
from holdfast.linalg.graded import Graded
from holdfast.linalg.rounding import down, frobenius_upper, up
from holdfast.linalg.squarings import gram_norm, thin_gram_norm
from holdfast.usage import give_back_memory


@final
class LocalPerceptron(LocalExpansion):
    """A map of units at ũ.

    Args:
        u: ũ.
        directions: those of the network's input.
        t: (b, n, units) what the units take at ũ.
        w1: (d, units) W₁.
        phi: φ.
        w2: (units, c) W₂.
        residual: r.
    """

    def __init__(
        self,
        u: Float64[Tensor, "b n d"],
        directions: Directions,
        t: Ball,
        w1: Float64[Tensor, "d units"],
        phi: SmoothActivation,
        w2: Float64[Tensor, "units c"],
        residual: float | Float64[Tensor, " d"] = 0.0,
    ) -> None:
        super().__init__(u, directions, u.shape[-2] * len(w2) + 4 * (sum(w1.shape) + w2.shape[-1]))
        self._w1, self._w2, self._phi = w1.to(u), w2.to(u), phi
        self._residual = torch.as_tensor(residual, dtype=u.dtype, device=u.device)
        self._straight = float(self._residual.abs().max())
        self._low, self._high = t.lower, t.upper
        slopes = [self._phi.derivative(k, t) for k in (1, 2, 3)]
        for slope in slopes:
            self._coefficient(slope.rad.amax((-2, -1)), slope.mid.abs().amax((-2, -1)))
        self._slopes = [slope.mid for slope in slopes]
        self._bends = [self._phi.range(k, self._low, self._high).magnitude for k in (2, 3)]  # |φ''|, |φ'''| at t
        self._lengths = up(torch.linalg.vector_norm(self._w1, dim=0), 1e-12)
        self._outer = up(torch.linalg.vector_norm(self._w2, dim=-1), 1e-12)

    @property
    def rest(self) -> str:
        return "activation rest"

    @property
    def output(self) -> torch.Size:
        return torch.Size((*self.u.shape[:-1], self._w2.shape[-1]))

    # -- jets

    def push(self, a: Tensor) -> Tensor:
        return self._out(self._slopes[0] * (a @ self._w1), a)

    def _first(self, J: Tensor) -> Tensor:
        self._h1 = h = J @ self._w1
        return self._out(self._slopes[0] * h, J)

    def _second(self, H: Tensor) -> Tensor:
        self._h2 = H @ self._w1
        self._sizes()
        give_back_memory()
        return torch.cat([self._out(self._along(pairs, *self._slopes[:2]), H[pairs]) for pairs in self._some_pairs()])

    def _along(self, pairs: Tensor, slope: Tensor, bend: Tensor) -> Tensor:
        """Of every unit, for some pairs: slope · h_2 + bend · h_1 h_1."""
        i, j = self.directions.first[pairs], self.directions.second[pairs]
        return slope * self._h2[pairs] + bend * self._h1[i] * self._h1[j]

    def _out(self, hidden: Tensor, a: Tensor) -> Tensor:
        out = hidden @ self._w2
        return out + self._residual * a if self._straight else out

    def _sizes(self) -> None:
        """Sizes of h_1 and h_2/2 of every unit, and the forms that do not depend on the radius."""
        p = self.directions.p
        lost = [4 * self.theta * x * self._lengths.amax() * p ** (k / 2) for k, x in enumerate(self.largest, 1)]
        lost1, lost2 = (x.reshape(-1, 1, 1) for x in lost)
        quadratic = [thin_gram_norm(self._quadratic(part)) for part in torch.split(self._h2, 1, 2)]
        self._size_h = [
            up(torch.linalg.vector_norm(self._h1, dim=0), 1e-12) + lost1,
            torch.cat(quadratic, 1) / 2 + lost2,
        ]
        self._lost1 = lost1
        # ‖D²f[J[G], ·]‖_F: the Gram matrices of the columns of W₁ and of the rows of W₂, entry by entry.
        h1 = self._h1.permute(1, 2, 3, 0)  # (b, n, units, p)
        bent = self._slopes[1].unsqueeze(-1) * h1
        gram = (self._w1.mT @ self._w1) * (self._w2 @ self._w2.mT)
        size = (self._lengths * self._outer @ bent.abs()).square().sum(-1)
        along = forms.firm(bent.mT @ (gram @ bent), size)
        bend = self._bends[0].amax((-2, -1)).unsqueeze(-1)
        lost = lost1.squeeze(-1) * bend * frobenius_upper(self._w1) * frobenius_upper(self._w2)
        self._crossed = forms.plus(along, forms.unit(along, lost.expand(along.shape[:2])))
        # ‖D²f‖ from the Khatri-Rao Gram matrix, as in docs/math/pieces.md.
        exact = self._slopes[1].unsqueeze(-1) * self._w2
        K = (self._w1.mT @ self._w1).square()
        size = (bend * frobenius_upper(self._w2)).square() * K.diagonal().sum()
        error = (self.theta.unsqueeze(-1) * 8 * size).expand(exact.shape[:2])
        self._curvature = gram_norm(exact.mT @ (K @ exact), error)

    def _quadratic(self, h: Tensor) -> Tensor:
        """(pairs, b, n, units) as (b, n, units, p, p)."""
        return self.directions.full(h).permute(2, 3, 4, 0, 1)

    # -- beyond

    def _largest(self, k: int, total: Tensor) -> Tensor:
        """The largest |φ⁽ᵏ⁾| that is reached by units that move by at most `total`."""
        total = up(total, 1e-12)
        return self._phi.range(k, down(self._low - total), up(self._high + total)).magnitude

    def third(self, F: Tensor, eps: Tensor) -> Tensor:
        """|φ'''| |h|³/6 of every unit, D²f[h_1, h - h_1] and D²f[h - h_1, h - h_1]/2 of all together."""
        e = eps.reshape(-1, 1, 1)
        E = self.moved(F, eps)
        away = self._size_h[1] * e.square() + self._lengths * (forms.root(F) * eps.unsqueeze(-1)).unsqueeze(-1)
        total = self._size_h[0] * e + away
        far = self._largest(3, total)
        weight = self._outer * far * total / 6
        h1 = self._h1.permute(1, 2, 3, 0)
        linear = forms.firm((weight.sqrt().unsqueeze(-1) * h1).mT @ (weight.sqrt().unsqueeze(-1) * h1))
        constant = (weight * ((away + self._lost1 * e) / e).square()).sum(-1).sqrt()
        cubic = forms.plus(linear, forms.unit(linear, constant))
        bent = forms.product(self._crossed, E) + forms.wide(self._curvature) * E / 2
        return up(cubic + bent, 1e-10)

    def fourth(self, F: Tensor, eps: Tensor) -> Tensor:
        e = eps.reshape(-1, 1, 1)
        h = Graded.of(self._size_h[0] * e, self._size_h[1] * e.square(), F.unsqueeze(-1) * self._lengths)
        total = h.total
        far = self._largest(4, total)
        square = h * h
        lost = self._bends[0] * square.rest / 2 + self._bends[1] * (square * h).rest / 6 + far * total**4 / 24
        # ‖c W₂‖ in two ways, c being known entry by entry.
        joint = torch.linalg.vector_norm(lost, dim=-1) * thin_gram_norm(self._w2, 3)
        return up(torch.minimum(joint, lost @ self._outer), 1e-10)

    def twist(self, c: Tensor) -> Tensor:
        seen = c @ self._w2.mT  # (j, b, n, units)
        left = (seen.unsqueeze(1) * self._h1).permute(0, 2, 1, 3, 4).flatten(-2, -1)
        bends = self._slopes[1], self._slopes[2] / 3
        rights = (self._along(pairs, *bends).movedim(0, 1).flatten(-2, -1) for pairs in self._some_pairs())
        return torch.cat([left @ right.mT for right in rights], -1)

    def forget(self) -> None:
        del self._h2

    def _error(self, k: int) -> Tensor:
        bends = [slope.abs().amax((-2, -1)) for slope in self._slopes]
        h1, h2 = (self._lengths.amax() * x for x in self.largest)
        inner = (bends[0] * h1, bends[0] * h2 + bends[1] * h1**2, 3 * bends[1] * h1 * h2 + bends[2] * h1**3)[k - 1]
        units = math.sqrt(self._w1.shape[-1])
        straight = self._straight * self.largest[k - 1] if k < 3 else 0.0
        error: Tensor = 4 * self.theta * (inner * units * frobenius_upper(self._w2) + straight)
        return error

    def push_size(self) -> Tensor:
        bends = self._slopes[0].abs().amax((-2, -1))
        return bends * frobenius_upper(self._w1) * frobenius_upper(self._w2) + self._straight
