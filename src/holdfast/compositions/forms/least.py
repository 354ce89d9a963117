"""The least value of a margin's quadratic minorant, from below (docs/math/forms.md, section 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.branches import Branches
from holdfast.compositions.forms.kinks import parabola
from holdfast.compositions.forms.krylov import extremes, trust_region
from holdfast.compositions.forms.local import THETA, Problem
from holdfast.compositions.forms.region import Region
from holdfast.linalg import Ball
from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma, up

_CUBE_STEPS = 60
_NEAR = 1e-4  # of the margin at the centre: how far a guess may be from what is then proved
_BUMPS = (0.0, 1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.1)  # of the matrix, where it is not semidefinite as guessed


@dataclass(frozen=True)
class Quadratic:
    """value + g·b + bᵀ(F - Σ_u v_u x_u x_uᵀ)b, F known up to `rounding` times ‖b‖², and g up to `tilt` times ‖b‖."""

    value: float
    g: Tensor
    F: Tensor
    rounding: float
    tilt: float
    v: Tensor | None = None
    x: Tensor | None = None

    def turned(self, b: Tensor) -> Tensor:
        """The matrix, applied to a vector."""
        Fb = self.F @ b
        return Fb if self.v is None or self.x is None else Fb - (self.v * (self.x @ b)) @ self.x

    def whole(self) -> Quadratic:
        """With all in one matrix."""
        if self.v is None or self.x is None:
            return self
        form = (self.x * self.v.unsqueeze(-1)).mT @ self.x
        rounding = self.rounding + THETA * 4 * (float(torch.trace(form)) + float(self.F.abs().sum(-1).max()))
        return Quadratic(self.value, self.g, self.F - form, rounding, self.tilt)


@dataclass(frozen=True)
class Least:
    """A lower bound of the margin, a point b where its minorant is near its least, and the parts of the region.

    Where no proof was asked for, the value is a guess.
    """

    value: float
    point: Tensor
    parts: int = 1


@final
class Minorant:
    """What is known about one margin over a region.

    Kinks are bounded by parabolas whose free parameters are improved step by step: one that touches its kink at the
    last least point costs nothing there. The best of all steps is proved; any parameters are sound. In a cube kinks
    are first bounded by lines, and in branches; the parabolas are tried where that does not suffice.
    """

    def __init__(self, problem: Problem, region: Region) -> None:
        self.problem, self._region, self._nowhere = problem, region, torch.zeros_like(problem.gradient)
        threshold = problem.threshold
        self._origin = torch.minimum(torch.zeros_like(threshold), threshold - 0.15 * problem.reach - 1e-12)
        self._last = self._origin  # of the last guess, from which the next one begins

    def least(self, scale: float, steps: int, branches: int, *, prove: bool = True) -> Least:
        """A lower bound of the margin over the region at this scale, or a guess of what would be proved."""
        nowhere = Least(-math.inf, self._nowhere)
        if not self.problem.finite:
            return nowhere
        try:
            branched = nowhere if self._region.sides is None else self._branched(scale, branches)
            if branched.value > 0:
                return branched
            return max(branched, self._improved(scale, steps, prove), key=lambda bound: bound.value)
        except RuntimeError:  # numbers near overflow, of which nothing can be proved
            return nowhere

    def _branched(self, scale: float, branches: int) -> Least:
        value, y, parts = Branches(self.problem, self._region, scale).least(branches)
        return Least(value if math.isfinite(value) else -math.inf, self._region.basis.mT @ y, parts)

    def _improved(self, scale: float, steps: int, prove: bool) -> Least:
        problem, basis, best = self.problem, self._region.basis, -math.inf
        origin = chosen = self._origin if prove else self._last
        boxed = self._region.sides is not None
        mu, z = 0.0, torch.zeros(len(basis) if boxed else len(problem.gradient), dtype=torch.float64)
        for _ in range(steps):
            value, new_mu, new_z = _guess(_with_kinks(problem, origin), self._region, scale)
            gain = value - best
            if gain > 0:
                best, mu, z, chosen = value, new_mu, new_z, origin
            if not gain > _NEAR / 10 * abs(best):
                break
            x = problem.x @ (basis.mT @ new_z if boxed else new_z)
            touching = torch.where(x > problem.threshold, 2 * problem.threshold - x, x)
            touching = torch.minimum(touching, problem.threshold - 0.02 * problem.reach - 1e-12)
            origin = (origin + touching) / 2
        point = basis.mT @ z if boxed else z
        if not prove:
            self._last = chosen
            return Least(best - _NEAR * abs(problem.value), point)
        return Least(proved(_with_kinks(problem, chosen).whole(), mu, z, self._region, scale), point)


def _with_kinks(problem: Problem, origin: Tensor) -> Quadratic:
    """With the kinks' parabolas: -w κ(x·b - x₀)² for each."""
    x = problem.x
    v = problem.weight * parabola(problem.threshold, origin, problem.reach)
    lengths = torch.linalg.vector_norm(x, dim=-1)
    value = problem.value - up(float((v * origin.square()).sum()), 1e-12)
    value -= 1e-15 * abs(value)
    tilt = THETA * float((2 * v * origin.abs() * lengths).sum() + torch.linalg.vector_norm(problem.gradient))
    return Quadratic(value, problem.gradient + 2 * (v * origin) @ x, problem.form, problem.rounding, tilt, v, x)


def _guess(q: Quadratic, region: Region, scale: float) -> tuple[float, float, Tensor]:
    """About the least value, the μ that shows it, and where it is attained; for the choice of parameters."""
    r = region.radius * scale
    if region.sides is None:
        mu, z = trust_region(lambda b: 2 * q.turned(b), q.g, r)
        b, Fb = z, q.turned(z)
        slope = float(torch.linalg.vector_norm(2 * Fb + mu * z + q.g)) * r
    else:
        mu, z = _cube_point(q, region, region.sides * scale)
        b = region.basis.mT @ z
        Fb = q.turned(b)
        slope = float((region.basis @ (q.g + 2 * Fb) + mu * z).abs() @ region.sides) * scale
    return q.value - slope - float(b @ Fb) - mu * (float(z @ z) + r * r) / 2, mu, z


def _cube_point(q: Quadratic, region: Region, sides: Tensor) -> tuple[float, Tensor]:
    """μ with 2F + μ ⪰ 0, and a point y of the cube where the convex quadratic g·Vᵀy + yᵀVFVᵀy + μ‖y‖²/2 is small."""
    low, high = extremes(lambda b: 2 * q.turned(b), len(q.g))
    mu = max(0.0, -low) + 1e-3 * max(abs(low), abs(high))
    V, step = region.basis, 1 / (max(high, 0.0) + mu + 1e-300)
    y = torch.zeros(len(V), dtype=torch.float64)
    ahead, t = y, 1.0
    for _ in range(_CUBE_STEPS):  # accelerated projected gradient
        b = V.mT @ ahead
        slope = V @ (q.g + 2 * q.turned(b)) + mu * ahead
        new = (ahead - step * slope).clamp(-sides, sides)
        after = (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead, y, t = new + (t - 1) / after * (new - y), new, after
    return mu, y


def proved(q: Quadratic, mu: float, z: Tensor, region: Region, scale: float) -> float:
    """A lower bound over the region with all roundings, from any μ >= 0 and any point z; on a ball μ says a better one.

    It is -inf where nothing is proved.
    """
    if not bool(torch.isfinite(q.F).all() & torch.isfinite(q.g).all()) or not math.isfinite(q.value):
        return -math.inf
    mu, defect, factor = _semidefinite(q.F + q.F.mT, mu)
    if factor is not None and region.sides is None:
        z = -torch.cholesky_solve(q.g.unsqueeze(-1), factor).squeeze(-1)
    return _value(q, mu, defect, z, region, scale)


def _value(q: Quadratic, mu: float, defect: float, z: Tensor, region: Region, scale: float) -> float:
    """The bound at μ >= 0 with 2F + μ ⪰ -defect and at any point, with all roundings.

    On the ball, g·b + bᵀFb >= (Cz + g)·b - ½zᵀCz - ½μ‖b‖² with C = 2F + μ and any z. On the cube the same is said of
    y, with V(2F)Vᵀ + μ in the place of C, so that the first term is bounded coordinate by coordinate; ‖y‖ <= scale.
    Where C may reach below zero by a defect, that takes ½ defect ‖b - z‖² more.
    """
    r = up(region.radius * scale, 1e-14)
    sides = None if region.sides is None else region.sides * scale
    V, at, H = Ball.exact(region.basis), Ball.exact(z.unsqueeze(-1)), q.F + q.F.mT
    b = at if sides is None else V.mT @ at
    Hb = Ball.exact(H) @ b
    bent = (b.mT @ Hb + at.mT @ at * mu).squeeze(-1).squeeze(-1)
    if sides is None:
        left = Hb + q.g.unsqueeze(-1) + at * mu
        slope = float(frobenius_upper(left.mid) + frobenius_upper(left.rad)) * r
    else:
        left = V @ (Hb + q.g.unsqueeze(-1)) + at * mu
        slope = up(float((left.mid.abs() + left.rad).squeeze(-1) @ sides), 1e-10)
    bowl = mu * r * r
    if sides is not None:  # of y, whose projection Vᵀy may be longer than it
        stretch = (region.radius - 1) * (region.radius + 1)
        defect = defect * (1 + stretch) + mu * stretch
    apart = r + float(frobenius_upper(at.mid))
    unsure = up(defect * apart * apart + 2 * q.rounding * r * r, 1e-12)
    lost = slope + q.tilt * r + float(bent.upper) / 2 + (bowl + unsure) / 2
    value = q.value - lost - 1e-13 * (abs(q.value) + abs(slope) + abs(float(bent.upper)) + bowl)
    return value if math.isfinite(value) else -math.inf


def _semidefinite(H: Tensor, mu: float) -> tuple[float, float, Tensor | None]:
    """A μ at or above the given one, a bound of how far H + μ may reach below zero, and its Cholesky factor."""
    size = float(H.diagonal().abs().max()) + abs(mu)
    for bump in _BUMPS:
        raised, A = mu + size * bump, H.clone()
        A.diagonal().add_(raised)
        L, info = torch.linalg.cholesky_ex(A)
        if int(info) == 0 and bool(torch.isfinite(L).all()):
            L = L.tril()
            residual, product = float(frobenius_upper(A - L @ L.mT)), float(frobenius_upper(L).square())
            rounded = 2 * UNIT * float(A.diagonal().abs().max())  # the diagonal of A
            return raised, up(residual + gamma(len(A) + 2) * (product + residual) + rounded, 1e-12), L
    return mu, math.inf, None
