"""LayerNorm, RMSNorm and the smooth projection, expanded.

With n = x̃/(√m s), ‖n‖ <= 1, and w = δ̃/(√m s), f(x + δ) - β = √m γ ⊙ (n + w) g, g = (1 + 2 n·w + ‖w‖²)^{-1/2}.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from holdfast.layers.expansion import LocalExpansion
from holdfast.linalg import Ball, forms
from holdfast.linalg.directions import Directions
from holdfast.linalg.graded import Graded
from holdfast.linalg.rounding import frobenius_upper, up
from holdfast.linalg.squarings import thin_gram_norm

if TYPE_CHECKING:
    from holdfast.layers.norm.piece import Normalisation

_BENT = up(math.sqrt(4 / 3), 1e-15)


@final
class LocalNormalisation(LocalExpansion):
    """A normalisation at ũ."""

    def __init__(self, piece: Normalisation, u: Tensor, directions: Directions) -> None:
        super().__init__(u, directions, (u.shape[-2] + 8) * u.shape[-1])
        parts = piece.parts(Ball.exact(u))
        self._piece = piece
        length = parts.m.sqrt()
        n, c = parts.N / length, Ball.exact(torch.ones_like(u[..., :1])) / (parts.s * length)
        scale = parts.gamma * length
        self._coefficient(frobenius_upper(n.rad, (-1,)).amax(-1), torch.ones_like(self.theta))
        self._coefficient((c.rad / c.mid).amax((-2, -1)), torch.ones_like(self.theta))
        self._n, self._c, self._scale = n.mid, c.mid, scale.mid.expand(u.shape[-1])  # rounded within 4 ulps
        self._most_c = c.upper.squeeze(-1)

    @property
    def rest(self) -> str:
        return "normalisation rest"

    @property
    def output(self) -> torch.Size:
        return self.u.shape

    def scale(self) -> Tensor | None:
        return self._scale

    # -- jets

    def push(self, a: Tensor) -> Tensor:
        w = self._w(a)
        return self._scale * (w - self._n * _dot(self._n, w))

    def _first(self, J: Tensor) -> Tensor:
        self._w1 = w = self._w(J)
        self._a1 = a = _dot(self._n, w)
        return self._scale * (w - self._n * a)

    def _second(self, H: Tensor) -> Tensor:
        i, j = self.directions.first, self.directions.second
        self._w2 = w = self._w(H)
        w1, a1, a = self._w1, self._a1, _dot(self._n, w)
        self._a2 = a
        self._dots = _dot(w1[i], w1[j])
        self._g2 = g = 3 * a1[i] * a1[j] - a - self._dots
        self._sizes()
        return self._scale * (w - w1[i] * a1[j] - w1[j] * a1[i] + self._n * g)

    def _w(self, a: Tensor) -> Tensor:
        return self._piece.centred(a) * self._c

    def _sizes(self) -> None:
        """Forms of w_1, sizes of w_1, w_2/2, a_1, a_2/2 for every token, with what rounding may have taken."""
        lost1, lost2 = (8 * self.theta * x for x in self.largest)
        p, c = self.directions.p, self._most_c
        lost1, lost2 = lost1.unsqueeze(-1) * c * p**0.5, lost2.unsqueeze(-1) * c * p
        linear = forms.of_rows(self._w1.permute(1, 2, 3, 0))
        self._linear = forms.plus(linear, forms.unit(linear, lost1))
        self._size_w = [forms.root(linear) + lost1, forms.root(self._bend) * c + lost2]
        across = self.directions.full(self._a2.squeeze(-1)).permute(2, 3, 0, 1)
        a1 = up(torch.linalg.vector_norm(self._a1.squeeze(-1), dim=0), 1e-12)
        self._size_a = [a1 + lost1, thin_gram_norm(across, 3) / 2 + lost2]

    # -- beyond

    def third(self, F: Tensor, eps: Tensor) -> Tensor:
        """½‖w‖³/(1 - α)³ beyond degree 2 in w, and √(4/3)(‖w_1‖‖w - w_1‖ + ‖w - w_1‖²/2) inside it."""
        c, e = self._most_c, eps.unsqueeze(-1)
        E = self.moved(F, eps) * forms.wide(c.square())
        B = forms.plus(self._linear, E)
        far = forms.root(F) * c * e
        alpha = up(self._size_a[0] * e + self._size_a[1] * e.square() + far, 1e-12)
        beyond = e * forms.root(B) / torch.where(alpha < 1, 1 - alpha, 0.0) ** 3 / 2
        return up(forms.wide(beyond) * B + _BENT * (forms.product(self._linear, E) + E / 2), 1e-10)

    def fourth(self, F: Tensor, eps: Tensor) -> Tensor:
        """Of n g and w g beyond degree 3, ‖n‖ <= 1."""
        e, away = eps.unsqueeze(-1), F * self._most_c
        w = Graded.of(self._size_w[0] * e, self._size_w[1] * e.square(), away)
        a = Graded.of(self._size_a[0] * e, self._size_a[1] * e.square(), away)
        along = inverse_root(a, w * w)
        return up(along.rest + (w * (a + along)).rest, 1e-10)

    def twist(self, c: Tensor) -> Tensor:
        c = c * self._scale
        i, j = self.directions.first, self.directions.second
        w1, w2, a1, g2 = self._w1, self._w2, self._a1, self._g2
        mu = _dot(c, self._n)  # (j, b, n, 1)
        nu = 2 * (self._a2 + self._dots)
        apart = 1.5 * nu - 5 * a1[i] * a1[j]  # (pairs, b, n, 1)
        seen1, seen2 = (torch.einsum("jbnd,tbnd->jtbn", c, w) for w in (w1, w2))
        flat = torch.cat([mu.unsqueeze(1) * a1, seen1.unsqueeze(-1)], -1)
        right = torch.cat([apart, g2], -1)
        Z = _pair(flat, right) - torch.einsum("tbn,jsbn->jbts", a1.squeeze(-1), seen2)
        return Z - _pair(mu.unsqueeze(1) * w1, w2)

    def forget(self) -> None:
        del self._w2, self._a2, self._g2, self._dots

    def _error(self, k: int) -> Tensor:
        c, length = self._c.amax((-2, -1)), self._scale.abs().amax()
        x1, x2 = (c * x for x in self.largest)
        return 2 * self.theta * length * (2 * x1, 2 * x2 + 6 * x1**2, 18 * x1 * x2 + 36 * x1**3)[k - 1]

    def push_size(self) -> Tensor:
        return 4 * self._scale.abs().amax() * self._c.amax((-2, -1))


def inverse_root(a: Graded, b: Graded) -> Graded:
    """Bounds of g - 1 + n·w by degree, where |n·w| <= a and ‖w‖² <= b.

    With x = 2 n·w + ‖w‖², g = (1 + x)^{-1/2} = 1 - x/2 + 3x²/8 - 5x³/16 + 35x⁴/128 (1 + θx)^{-9/2}, and
    1 + θx >= (1 - α)² for α >= |n·w|.
    """
    x = a.times(2.0) + b
    square = x * x
    cube = square * x
    alpha = up(a.total, 1e-12)
    tail = Graded.of(x.total).all_rest().each(lambda t: t**4 / torch.where(alpha < 1, 1 - alpha, 0.0) ** 9)
    return b.times(0.5) + square.times(0.375) + cube.times(0.3125) + tail.times(35 / 128)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _pair(left: Tensor, right: Tensor) -> Tensor:
    """Σ over tokens and channels of left (j, p, b, n, d) times right (pairs, b, n, d), (j, b, p, pairs)."""
    rows = left.permute(0, 2, 1, 3, 4).flatten(-2, -1)  # (j, b, p, nd)
    return rows @ right.movedim(0, 1).flatten(-2, -1).mT
