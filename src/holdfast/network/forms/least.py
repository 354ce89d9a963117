"""The least value of a margin's quadratic minorant, from below (docs/math/forms.md, section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import UNIT, frobenius_upper, gamma
from holdfast.network.forms.kinks import parabola
from holdfast.network.forms.local import THETA, Problem
from holdfast.network.forms.region import Region

_NEWTON = 12
_SMALL_DIMENSION = 256  # up to it an eigendecomposition costs less than a few Cholesky factors
_CUBE_STEPS = 60


@dataclass(frozen=True)
class Quadratic:
    """value + g·b + bᵀFb, with F known up to `rounding` times ‖b‖², and g up to `tilt` times ‖b‖."""

    value: float
    g: Tensor
    F: Tensor
    rounding: float
    tilt: float


def least(problem: Problem, region: Region, scale: float, steps: int) -> tuple[float, Tensor]:
    """A lower bound of the margin over the region at this scale, and a point b where the minorant is near its least.

    The free parameters of the kinks are improved step by step: a parabola that touches its kink at the last least
    point costs nothing there. The best of all steps is proved; any parameters are sound.
    """
    nowhere = -math.inf, torch.zeros_like(problem.gradient)
    if not problem.finite:
        return nowhere
    try:
        return _improved(problem, region, scale, steps)
    except RuntimeError:  # numbers near overflow, of which nothing can be proved
        return nowhere


def _improved(problem: Problem, region: Region, scale: float, steps: int) -> tuple[float, Tensor]:
    origin = torch.minimum(torch.zeros_like(problem.threshold), problem.threshold - 0.15 * problem.reach - 1e-12)
    best, found = -math.inf, _with_kinks(problem, origin)
    point = torch.zeros_like(problem.gradient)
    for _ in range(steps):
        quadratic = _with_kinks(problem, origin)
        value, b = _guess(quadratic, region, scale)
        if value > best:
            best, found, point = value, quadratic, b
        elif value < best - 1e-3 * abs(best):
            break
        x = problem.x @ b
        touching = torch.where(x > problem.threshold, 2 * problem.threshold - x, x)
        touching = torch.minimum(touching, problem.threshold - 0.02 * problem.reach - 1e-12)
        origin = (origin + touching) / 2
    return _proved(found, region, scale), point


def _with_kinks(problem: Problem, origin: Tensor) -> Quadratic:
    """The kinks' parabolas, taken into the form: -w κ(x·b - x₀)² for each."""
    x = problem.x
    v = problem.weight * parabola(problem.threshold, origin, problem.reach)
    form = (x * v.unsqueeze(-1)).mT @ x
    lengths = torch.linalg.vector_norm(x, dim=-1)
    value = problem.value - float((v * origin.square()).sum()) * (1 + 1e-12)
    value -= 1e-15 * abs(value)
    tilt = THETA * float((2 * v * origin.abs() * lengths).sum() + torch.linalg.vector_norm(problem.gradient))
    rounding = problem.rounding + THETA * 4 * (float(torch.trace(form)) + float(problem.form.abs().sum(-1).max()))
    return Quadratic(value, problem.gradient + 2 * (v * origin) @ x, problem.form - form, rounding, tilt)


def _guess(q: Quadratic, region: Region, scale: float) -> tuple[float, Tensor]:
    """About the least value, and where it is attained; plain float64, for the choice of parameters."""
    r = region.radius * scale
    if region.sides is not None:
        mu, y = _cube_point(q, region, region.sides * scale)
        b = region.basis.mT @ y
        Fb = q.F @ b
        slope = float((region.basis @ (q.g + 2 * Fb) + mu * y).abs() @ region.sides) * scale
        return q.value - slope - float(b @ Fb) - mu * (float(y @ y) + r * r) / 2, b
    mu, b = _ball_point(q, r)
    Fb = q.F @ b
    slope = float(torch.linalg.vector_norm(2 * Fb + mu * b + q.g)) * r
    return q.value - slope - float(b @ Fb) - mu * (float(b @ b) + r * r) / 2, b


def _ball_point(q: Quadratic, r: float) -> tuple[float, Tensor]:
    """μ with ‖(2F + μ)⁻¹g‖ = r, or 0 or the least that is possible, and b = -(2F + μ)⁻¹g."""
    if len(q.g) <= _SMALL_DIMENSION:
        w, U = torch.linalg.eigh(2 * q.F)
        c = U.mT @ q.g
        low = max(0.0, -float(w[0]))
        high = low + float(torch.linalg.vector_norm(c)) / r + 1e-300
        for _ in range(60):
            middle = (low + high) / 2
            if float(torch.linalg.vector_norm(c / (w + middle))) <= r:
                high = middle
            else:
                low = middle
        mu = high + 1e-13 * float(w.abs().max())
        return mu, -(U @ (c / (w + mu)))
    return _newton(2 * q.F, q.g, r)


def _newton(H: Tensor, g: Tensor, r: float) -> tuple[float, Tensor]:
    """The same for many numbers: Newton's method for 1/‖(H + μ)⁻¹g‖ = 1/r, by Cholesky factors."""
    length = float(torch.linalg.vector_norm(g))
    low, high = 0.0, float(torch.linalg.matrix_norm(H)) + length / r
    mu, b, best = length / r, -g * (r / length), high
    for _ in range(_NEWTON):
        L, info = torch.linalg.cholesky_ex(_plus(H, mu))
        if int(info) != 0:
            low = mu
            mu = (mu + best) / 2 if best < high else mu * 2
            continue
        best = min(best, mu)
        b = -torch.cholesky_solve(g.unsqueeze(-1), L).squeeze(-1)
        size = float(torch.linalg.vector_norm(b))
        if size < r and mu <= 1e-12 * high:
            break
        half = torch.linalg.solve_triangular(L, b.unsqueeze(-1), upper=False)
        step = (size / float(torch.linalg.vector_norm(half))) ** 2 * (size - r) / r
        new = max(mu + step, 0.0)
        if abs(new - mu) <= 1e-4 * mu:
            break
        mu = new if new > low else (low + mu) / 2
    L, info = torch.linalg.cholesky_ex(_plus(H, mu))
    while int(info) != 0:
        mu = mu * 1.1 + 1e-12 * high
        L, info = torch.linalg.cholesky_ex(_plus(H, mu))
    return mu, -torch.cholesky_solve(g.unsqueeze(-1), L).squeeze(-1)


def _cube_point(q: Quadratic, region: Region, sides: Tensor) -> tuple[float, Tensor]:
    """μ with 2F + μ ⪰ 0, and a point y of the cube where the convex quadratic g·Vᵀy + yᵀVFVᵀy + μ‖y‖²/2 is small."""
    w = torch.linalg.eigvalsh(2 * q.F)
    mu = max(0.0, -float(w[0]))
    mu += 1e-12 * float(w.abs().max())
    V, step = region.basis, 1 / (float(w[-1]) + mu + 1e-300)
    y = torch.zeros(len(V), dtype=torch.float64)
    ahead, t = y, 1.0
    for _ in range(_CUBE_STEPS):  # accelerated projected gradient
        b = V.mT @ ahead
        slope = V @ (q.g + 2 * (q.F @ b)) + mu * ahead
        new = (ahead - step * slope).clamp(-sides, sides)
        after = (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead, y, t = new + (t - 1) / after * (new - y), new, after
    return mu, y


def _plus(H: Tensor, mu: float) -> Tensor:
    A = H.clone()
    A.diagonal().add_(mu)
    return A


def _proved(q: Quadratic, region: Region, scale: float) -> float:
    """The value at any μ >= 0 with 2F + μ ⪰ 0 and at any point, with all roundings.

    On the ball, g·b + bᵀFb >= (Cz + g)·b - ½zᵀCz - ½μ‖b‖² with C = 2F + μ and any z. On the cube the same is said of
    y, with V(2F)Vᵀ + μ in the place of C, so that the first term is bounded coordinate by coordinate; ‖y‖ <= scale.
    """
    if not bool(torch.isfinite(q.F).all() & torch.isfinite(q.g).all()) or not math.isfinite(q.value):
        return -math.inf
    r = region.radius * scale * (1 + 1e-14)
    sides = None if region.sides is None else region.sides * scale
    mu, point = _ball_point(q, r) if sides is None else _cube_point(q, region, sides)
    H = q.F + q.F.mT
    mu, defect = _semidefinite(H, mu)
    V, z = Ball.exact(region.basis), Ball.exact(point.unsqueeze(-1))
    b = z if sides is None else V.mT @ z
    Hb = Ball.exact(H) @ b
    bent = (b.mT @ Hb + z.mT @ z * mu).squeeze(-1).squeeze(-1)
    if sides is None:
        left = Hb + q.g.unsqueeze(-1) + z * mu
        slope = float(frobenius_upper(left.mid) + frobenius_upper(left.rad)) * r
    else:
        left = V @ (Hb + q.g.unsqueeze(-1)) + z * mu
        slope = float((left.mid.abs() + left.rad).squeeze(-1) @ sides) * (1 + 1e-10)
    bowl = mu * r * r
    unsure = (defect + 2 * q.rounding) * r * r
    lost = slope + q.tilt * r + float(bent.upper) / 2 + (bowl + unsure) / 2
    return q.value - lost - 1e-13 * (abs(q.value) + abs(slope) + abs(float(bent.upper)) + bowl)


def _semidefinite(H: Tensor, mu: float) -> tuple[float, float]:
    """A μ at or a little above the given one, and a bound of how far H + μ may reach below zero."""
    size = float(H.diagonal().abs().max()) + abs(mu)
    for attempt in range(10):
        A = _plus(H, mu)
        L, info = torch.linalg.cholesky_ex(A)
        if int(info) == 0 and bool(torch.isfinite(L).all()):
            L = L.tril()
            residual, product = float(frobenius_upper(A - L @ L.mT)), float(frobenius_upper(L)) ** 2
            rounded = 2 * UNIT * float(A.diagonal().abs().max())  # the diagonal of A
            return mu, (residual + gamma(len(A) + 2) * (product + residual) + rounded) * (1 + 1e-12)
        mu += size * 10.0 ** (attempt - 13)
    return mu, math.inf
