"""Normalisations of every token: LayerNorm, RMSNorm, and what the smooth projection shares (docs/math/pieces.md).

All are f(x) = γ ⊙ N + β with N = x̃/s, s² = ‖x̃‖²/m + κ, where x̃ is x, centred for LayerNorm. With h̃, k̃ likewise,

    Df[h]     = γ ⊙ (h̃ - N ⟨N,h̃⟩/m) / s,
    D²f[h, k] = -γ ⊙ (h̃ ⟨N,k̃⟩ + k̃ ⟨N,h̃⟩ + N (⟨h̃,k̃⟩ - 3 ⟨N,h̃⟩⟨N,k̃⟩/m)) / (m s²).

On a ball of radius ρ the deviation σ = ‖x̃‖/√m is at least σ₀ - ρ/√m, and nothing of the token counts but σ:

    ‖Df‖ <= |γ|∞/s,    ‖D²f[h, h]‖ <= √(4/3) |γ|∞/(√m s²) for unit h, where σ² may be taken to be at least κ/4.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.norm.expansion import LocalNormalisation
from holdfast.layers.piece import SmoothPiece
from holdfast.layers.weights import double, number, weight
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import down, lift

_EXACT_WIDTH = 256  # up to this many channels, the norm of every token's Jacobian is computed
_JUMP = 0.5858  # above 2 - √2


@dataclass(frozen=True)
class _Parts(Generic[Array]):
    """At a token: N (…, n, d), s (…, n, 1), σ (…, n, 1); and m, γ."""

    N: Array
    s: Array
    sigma: Array
    m: Array
    gamma: Array


class Normalisation(SmoothPiece):
    """f(x) = γ ⊙ x̃/√(‖x̃‖²/m + κ) + β for every token; a kind says what m is."""

    tokenwise = True

    def __init__(self, gamma: Tensor, beta: Tensor, kappa: float, *, centred: bool) -> None:
        if not (math.isfinite(kappa) and kappa > 0):
            raise InputError(f"eps is {kappa!r}; expected a positive number: without it the slope has no bound")
        self.gamma, self.beta = double(gamma, "gamma", 1), double(beta, "beta", 1)
        if self.gamma.shape != self.beta.shape:
            raise InputError(
                f"gamma has {len(gamma)} entries and beta {len(beta)}; expected one of each for every channel"
            )
        self.kappa, self._is_centred = float(kappa), centred

    @abstractmethod
    def _length(self, x: Array) -> Array:
        """The number m."""

    @final
    def without_expansion(self) -> str | None:
        return None

    @final
    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion:
        return LocalNormalisation(self, u, directions)

    # -- the map and its derivatives

    @final
    def value(self, u: Array) -> Array:
        p = self.parts(u)
        return p.gamma * p.N + weight(self.beta, u)

    @final
    def push(self, u: Array, a: Array) -> Array:
        p, h = self.parts(u), self.centred(a)
        return p.gamma * (h - p.N * (_dot(p.N, h) / p.m)) / p.s

    @final
    def pull(self, u: Array, c: Array) -> Array:
        p = self.parts(u)
        C = self.centred(p.gamma * c)
        return (C - p.N * (_dot(p.N, C) / p.m)) / p.s

    @final
    def push2(self, u: Array, a: Array, b: Array) -> Array:
        p, h, k = self.parts(u), self.centred(a), self.centred(b)
        Nh, Nk = _dot(p.N, h), _dot(p.N, k)
        bent = h * Nk + k * Nh + p.N * (_dot(h, k) - Nh * Nk * 3.0 / p.m)
        return -(p.gamma * bent) / (p.m * p.s.square())

    @final
    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        p, h = self.parts(u), self.centred(a)
        C = self.centred(p.gamma * c)
        Nh, NC = _dot(p.N, h), _dot(p.N, C)
        bent = p.N * (_dot(C, h) - Nh * NC * 3.0 / p.m) + C * Nh + h * NC
        return -bent / (p.m * p.s.square())

    def centred(self, x: Array) -> Array:
        """x̃: an orthogonal projection of every token."""
        return x - x.sum(-1, keepdim=True) / float(x.shape[-1]) if self._is_centred else x

    def parts(self, u: Array) -> _Parts[Array]:
        x, m = self.centred(u), self._length(u)
        variance = _dot(x, x) / m
        s = (variance + self.kappa).sqrt()
        return _Parts(x / s, s, variance.sqrt(), m, weight(self.gamma, u))

    # -- on a ball

    @final
    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """The largest over tokens of min(|γ|∞/s(ρ), ‖Df(u)‖ + ρ β(ρ))."""
        p = self.parts(a.lift(u))
        near = self._slope(a, p).unsqueeze(-2) + rho.unsqueeze(-1) * self._curvatures(p, rho)
        return near.minimum(self._steepest(p, rho)).amax(-1)

    @final
    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """The largest over tokens of √(4/3) |γ|∞/(√m s(ρ)²)."""
        return self._curvatures(self.parts(a.lift(u)), rho).amax(-1)

    @final
    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """ρ times the largest over tokens of min(‖Df(u)‖ + ρ β(ρ)/2, |γ|∞/s(ρ), k |γ|∞/s₀); at most 2 √(nm) |γ|∞.

        With x̂ = (x̃, √(mκ)), of length √m s₀, the output is a part of x̂/‖x̂‖, times √m γ. A point at the distance
        τ ‖x̂‖ <= ‖x̂‖ is seen from the origin under an angle of at most arcsin τ; so the chord between the two
        directions is at most τ k, k² = 2/(1 + √(1 - τ²)). Farther away it is at most 2 <= 2τ.
        """
        p, r = self.parts(a.lift(u)), rho.unsqueeze(-1)
        s = _beside_radii(p.s)
        tau = r / (s * p.m.sqrt())
        cosine = (-tau.clamp(max=1.0).square() + 1.0).clamp(min=0.0).sqrt()
        beyond = lift((a.number(tau) >= 1).to(u) * _JUMP, cosine)
        k = (cosine * 0.5 + 0.5).sqrt()
        chord = _largest(p) / s * (beyond + number(1.0, k) / k)
        near = self._slope(a, p).unsqueeze(-2) + r * self._curvatures(p, rho) * 0.5
        moved = near.minimum(chord).minimum(self._steepest(p, rho)).amax(-1) * rho
        return moved.minimum(moved * 0.0 + _largest(p) * (p.m * float(u.shape[-2])).sqrt() * 2.0)

    def _steepest(self, p: _Parts[Array], rho: Array) -> Array:
        """(…, e, n) |γ|∞/s for every token."""
        return _largest(p) / self._least(p, rho, 0.0).sqrt()

    def _curvatures(self, p: _Parts[Array], rho: Array) -> Array:
        """(…, e, n) √(4/3) |γ|∞/(√m s²) for every token."""
        half = down(math.sqrt(self.kappa) / 2, 2.0**-50)
        return _largest(p) * (number(4.0, p.m) / (p.m * 3.0)).sqrt() / self._least(p, rho, half)

    def _least(self, p: _Parts[Array], rho: Array, sigma: float) -> Array:
        """(…, e, n) the least s² = σ² + κ on the ball, with σ at least the given one."""
        left = (_beside_radii(p.sigma) - rho.unsqueeze(-1) / p.m.sqrt()).clamp(min=sigma)
        return left.square() + self.kappa

    def _slope(self, a: Arithmetic[Array], p: _Parts[Array]) -> Array:
        """(…, n) ‖Df(u)‖ of every token; wide ones: a bound of it."""
        d, s = p.N.shape[-1], p.s.squeeze(-1)
        if d > _EXACT_WIDTH or len(self.gamma) == 1 < d:  # of one γ, γ/s is the norm itself
            return _largest(p) / s
        P = self.centred(lift(torch.eye(d, dtype=torch.float64), p.N))
        return a.matrix_norm(p.gamma * (P - p.N.unsqueeze(-1) * p.N.unsqueeze(-2) / p.m)) / s


@final
class LayerNorm(Normalisation):
    """γ ⊙ (x - mean)/√(var + eps) + β over the channels of every token.

    Args:
        gamma: (d) γ.
        beta: (d) β.
        eps: added to the variance.
    """

    def __init__(self, gamma: Float[Tensor, " d"], beta: Float[Tensor, " d"], eps: float) -> None:
        super().__init__(gamma, beta, eps, centred=True)

    def _length(self, x: Array) -> Array:
        return number(float(len(self.gamma)), x)


@final
class RMSNorm(Normalisation):
    """γ ⊙ x/√(mean of squares + eps) over the channels of every token.

    Args:
        gamma: (d) γ.
        eps: added to the mean.
    """

    def __init__(self, gamma: Float[Tensor, " d"], eps: float) -> None:
        super().__init__(gamma, torch.zeros_like(gamma), eps, centred=False)

    def _length(self, x: Array) -> Array:
        return number(float(len(self.gamma)), x)


def _dot(x: Array, y: Array) -> Array:
    """⟨x, y⟩ of every token, (…, n, 1)."""
    return (x * y).sum(-1, keepdim=True)


def _largest(p: _Parts[Array]) -> Array:
    """|γ|∞."""
    return p.gamma.abs().amax(-1)


def _beside_radii(x: Array) -> Array:
    """(…, n, 1) to (…, 1, n)."""
    return x.squeeze(-1).unsqueeze(-2)
