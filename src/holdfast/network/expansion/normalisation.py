"""LayerNorm, RMSNorm and the smooth projection, expanded.

With n = x̃/(√m s), ‖n‖ <= 1, and w = δ̃/(√m s), f(x + δ) - β = √m γ ⊙ (n + w) g, g = (1 + 2 n·w + ‖w‖²)^{-1/2}.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import gamma
from holdfast.network.expansion.directions import Directions, Triples
from holdfast.network.expansion.graded import series
from holdfast.network.expansion.local import Local
from holdfast.network.expansion.norms import gram_norm, thin_gram_norm
from holdfast.network.norms import Normalisation

_BINOMIAL = (0.375, 0.3125, 35 / 128)  # |coefficients| of x², x³, x⁴ in (1 + x)^{-1/2}


@final
class LocalNormalisation(Local):
    """A normalisation at ũ."""

    token_wise = True

    def __init__(self, piece: Normalisation, u: Tensor, directions: Directions, order: int) -> None:
        super().__init__(u, directions, order)
        parts = piece._parts(Ball.exact(u))
        self._piece = piece
        root = parts.m.sqrt()
        n, c = parts.N / root, Ball.exact(torch.ones_like(u[..., :1])) / (parts.s * root)
        scale = parts.gamma * root
        for ball, dims in ((n, (-2, -1)), (c, (-2, -1)), (scale, (-1,))):
            self._coefficient(ball, dims)
        self._n, self._c, self._scale = n.mid, c.mid, scale.mid.expand(u.shape[-1])
        self._across = u.new_zeros(len(u), u.shape[-2])
        self._gram = u.new_zeros(len(u), u.shape[-2], u.shape[-1], u.shape[-1])

    # -- jets

    def push(self, a: Tensor) -> Tensor:
        w = self._w(a)
        return self._scale * (w - self._n * _dot(self._n, w))

    def _first(self, J: Tensor) -> Tensor:
        self._w1 = w = self._w(J)
        self._a1 = a = _dot(self._n, w)
        self._sizes_w = [thin_gram_norm(w.movedim(0, -2))]
        self._sizes_a = [torch.linalg.vector_norm(a.squeeze(-1), dim=0)]
        return self._scale * (w - self._n * a)

    def _second(self, H: Tensor) -> Tensor:
        d, (i, j) = self.directions, (self.directions.first, self.directions.second)
        self._w2 = w = self._w(H)
        a, w1, a1 = _dot(self._n, w), self._w1, self._a1
        nu = 2 * (a + _dot(w1[i], w1[j]))
        self._g2 = g = -nu / 2 + 3 * a1[i] * a1[j]
        self._nu2 = nu
        # ½ H[G, G]: the smaller of two unfoldings, d × p² and p × dp.
        weighted = w * d.pair_count.sqrt().reshape(-1, 1, 1, 1)
        full = d.full(w)  # (p, p, b, n, d)
        wide = thin_gram_norm(weighted.movedim(0, -1))
        tall = thin_gram_norm(full.permute(2, 3, 0, 1, 4).flatten(-2, -1))
        self._sizes_w.append(torch.minimum(wide, tall) / 2)
        self._sizes_a.append(thin_gram_norm(d.full(a.squeeze(-1)).permute(2, 3, 0, 1), 3) / 2)
        return self._scale * (w - w1[i] * a1[j] - w1[j] * a1[i] + self._n * g)

    def _third(self, T: Tensor, at: Triples) -> Tensor:
        w, n, w1, w2, g2, nu2 = self._w(T), self._n, self._w1, self._w2, self._g2, self._nu2
        q, r, s = slice(at.q, at.q + 1), at.r, at.s
        wq, wr, ws, wqr, wqs, wrs = w1[q], w1[r], w1[s], w2[at.qr], w2[at.qs], w2[at.rs]
        aq, ar, a_s = self._a1[q], self._a1[r], self._a1[s]
        a = _dot(n, w)
        nu = 2 * (a + _dot(wq, wrs) + _dot(wr, wqs) + _dot(ws, wqr))
        bend = aq * nu2[at.rs] + ar * nu2[at.qs] + a_s * nu2[at.qr]
        g = -nu / 2 + 1.5 * bend - 15 * aq * ar * a_s
        out = w + n * g + wq * g2[at.rs] + wr * g2[at.qs] + ws * g2[at.qr] - wqr * a_s - wqs * ar - wrs * aq
        count = at.count.reshape(-1, 1, 1)
        self._across += (count * a.squeeze(-1).square()).sum(0)
        rows = (w * at.count.sqrt().reshape(-1, 1, 1, 1)).movedim(0, -1)
        self._gram += rows @ rows.mT
        return self._scale * out

    def _error(self, k: int) -> Tensor:
        c, root = self._c.amax((-2, -1)), self._scale.abs().amax()
        x1, x2, x3 = (c * self.largest(k) for k in (1, 2, 3))
        return 2 * self.theta * root * (2 * x1, 2 * x2 + 6 * x1**2, 2 * x3 + 18 * x1 * x2 + 36 * x1**3)[k - 1]

    def push_size(self) -> Tensor:
        return 4 * self._scale.abs().amax() * self._c.amax((-2, -1))

    # -- the rest

    def rest(self, F: Tensor, eps: Tensor) -> Tensor:
        c = self._c.squeeze(-1)
        away = F * c
        w = self.graded(self._coefficients(self._sizes_w), eps, away)
        a = self.graded(self._coefficients(self._sizes_a, across=True), eps, away)
        b = w * w
        x = a.times(2.0) + b
        alpha, K = a.total, self.order
        least = torch.where(alpha < 1, 1 - alpha, 0.0)
        tail = _BINOMIAL[K - 1] * x.total ** (K + 1) / least ** (2 * K + 3)
        higher = series(x, _BINOMIAL, tail)
        along = b.times(0.5) + higher
        return (along.rest + (w * (a + along)).rest) * (1 + 1e-10)

    def scale(self) -> Tensor | None:
        """The rest is √m γ ⊙ a vector, whose length is bounded."""
        return self._scale

    def _coefficients(self, sizes: list[Tensor], *, across: bool = False) -> list[Tensor]:
        """Sizes of the parts, with what rounding may have taken from them."""
        out = list(sizes)
        if self.order == 3:
            cube = self._across.sqrt() if across else self._cube()
            out.append(cube / 6)
        slack = self.theta.unsqueeze(-1) * self._c.squeeze(-1) * 8
        p = self.directions.p
        return [size + slack * self.largest(k).unsqueeze(-1) * p ** (k / 2) for k, size in enumerate(out, 1)]

    def _cube(self) -> Tensor:
        trace = self._gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        return gram_norm(self._gram, gamma(self.directions.p**3 + 64) * trace * 2)

    def _w(self, a: Tensor) -> Tensor:
        return self._piece._centred(a) * self._c


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


