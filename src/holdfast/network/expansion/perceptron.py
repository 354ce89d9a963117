"""A perceptron r x + φ(x W₁ + b₁) W₂ + b₂, expanded in its pre-activations."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius_upper
from holdfast.network.expansion.directions import Directions, Triples
from holdfast.network.expansion.local import Local
from holdfast.network.expansion.norms import thin_gram_norm
from holdfast.network.mlp import Mlp


@final
class LocalPerceptron(Local):
    """A perceptron at ũ; h (b, n, units) is what its pre-activations t move by."""

    token_wise = True

    def __init__(self, piece: Mlp, u: Tensor, directions: Directions, order: int) -> None:
        super().__init__(u, directions, order)
        self._w1, self._w2, self._residual = piece.w1.to(u), piece.w2.to(u), piece.residual
        self._phi = piece.activation
        t = piece._before(Ball.exact(u))
        self._low, self._high = t.lower, t.upper
        slopes = [self._phi.derivative(k, t) for k in range(1, order + 1)]
        for slope in slopes:
            self._coefficient(Ball(slope.mid.abs().amax(-1), slope.rad.amax(-1)), (-1,))
        self._slopes = [slope.mid for slope in slopes]
        # What multiplies h^k/k!, from above.
        self._bends = [self._phi.range(k, self._low, self._high).magnitude for k in range(2, order + 1)]
        self._squares = u.new_zeros(len(u), u.shape[-2], self._w1.shape[-1])

    @property
    def output(self) -> torch.Size:
        return torch.Size((*self.u.shape[:-1], self._w2.shape[-1]))

    # -- jets

    def push(self, a: Tensor) -> Tensor:
        return self._out(self._slopes[0] * (a @ self._w1), a)

    def _first(self, J: Tensor) -> Tensor:
        self._h1 = h = J @ self._w1
        self._sizes = [torch.linalg.vector_norm(h, dim=0)]
        self._most = [h.abs().amax((0, -2, -1))]
        return self._out(self._slopes[0] * h, J)

    def _second(self, H: Tensor) -> Tensor:
        d, (i, j) = self.directions, (self.directions.first, self.directions.second)
        self._h2 = h = H @ self._w1
        # ½ h[G, G] is a quadratic form of every unit.
        self._sizes.append(torch.cat([self._form(part) for part in torch.split(h, 1, 2)], 1) / 2)
        self._most.append(h.abs().amax((0, -2, -1)))
        return self._out(self._slopes[0] * h + self._slopes[1] * self._h1[i] * self._h1[j], H)

    def _form(self, h: Tensor) -> Tensor:
        return thin_gram_norm(self.directions.full(h).permute(2, 3, 4, 0, 1), 2)

    def _third(self, T: Tensor, at: Triples) -> Tensor:
        h1, h2, h = self._h1, self._h2, T @ self._w1
        hq, hr, hs = h1[at.q : at.q + 1], h1[at.r], h1[at.s]
        bent = hq * h2[at.rs] + hr * h2[at.qs] + hs * h2[at.qr]
        first, second, third = self._slopes
        self._squares += torch.einsum("m,mbnu,mbnu->bnu", at.count, h, h)
        return self._out(first * h + second * bent + third * hq * hr * hs, T)

    def _out(self, hidden: Tensor, a: Tensor) -> Tensor:
        out = hidden @ self._w2
        return out + self._residual * a if self._residual else out

    def _error(self, k: int) -> Tensor:
        bends = [slope.abs().amax((-2, -1)) for slope in self._slopes]
        most = [m + self._slack() * self.largest(j) for j, m in enumerate(self._most, 1)]
        x = [self._length() * self.largest(j) for j in range(1, k + 1)]  # products with W₁, on absolute values
        inner = bends[0] * x[k - 1]
        if k == 2:
            inner = inner + bends[1] * most[0] * (most[0] + 2 * x[0])
        if k == 3:
            h1, h2 = most[0] + x[0], most[1] + x[1]
            inner = inner + 3 * bends[1] * h1 * h2 + bends[2] * h1**3
        units = math.sqrt(self._w1.shape[-1])
        return self.theta * (inner * units * frobenius_upper(self._w2) + abs(self._residual) * self.largest(k))

    def push_size(self) -> Tensor:
        bends = self._slopes[0].abs().amax((-2, -1))
        return bends * frobenius_upper(self._w1) * frobenius_upper(self._w2) + abs(self._residual)

    def _length(self) -> Tensor:
        """The longest column of W₁."""
        return torch.linalg.vector_norm(self._w1, dim=0).amax() * (1 + 1e-12)

    def _slack(self) -> Tensor:
        return self.theta * self._length()

    # -- the rest

    def rest(self, F: Tensor, eps: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(self._w1, dim=0) * (1 + 1e-12)
        sizes = list(self._sizes)
        if self.order == 3:
            sizes.append(self._squares.sqrt() / 6)
        p = self.directions.p
        slack = [(self._slack() * self.largest(k) * p ** (k / 2)).reshape(-1, 1, 1) for k in range(1, self.order + 1)]
        h = self.graded([s + e for s, e in zip(sizes, slack, strict=True)], eps, F.unsqueeze(-1) * lengths)
        total, K = h.total, self.order
        far = self._phi.range(K + 1, self._low - total, self._high + total).magnitude
        out, power, factorial = far * total ** (K + 1) / math.factorial(K + 1), h, 1
        for k, bend in enumerate(self._bends, 2):
            power, factorial = power * h, factorial * k
            out = out + bend * power.rest / factorial
        # ‖c W₂‖ in two ways, c being known entry by entry.
        joint = torch.linalg.vector_norm(out, dim=-1) * thin_gram_norm(self._w2, 3)
        apart = out @ (torch.linalg.vector_norm(self._w2, dim=-1) * (1 + 1e-12))
        return torch.minimum(joint, apart) * (1 + 1e-10)
