"""Units with one kink, relu and |·| and sorted pairs: quadratic majorants with a free parameter for every unit.

A unit φ(t + h) whose slope jumps by J at zero has, with its slope at t, the rest

    ε(h) = J (σh - |t|)₊,    σ = -sign t:

nothing until h carries t across zero. With h = x·b + r, r beyond first order and at most `rest` on the side of σ,
ε <= J (σx·b - t')₊, t' = |t| - rest. For every x₀ < t' a parabola κ(s - x₀)² lies above (s - t')₊ on |s| <= ρ: it
touches the line if it gets there, or meets its end (docs/math/forms.md, section 3).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius_upper
from holdfast.network.activations import Absolute, Activation, Relu
from holdfast.network.forms.local import THETA, Local, Problem, Size
from holdfast.network.forms.suprema import Squares, hinges
from holdfast.network.mlp import KinkedMlp

_FLAT = (0.1, 0.2, 0.4, 0.8)  # the least distance of x₀ from t', as shares of half the reach

_MANY = 128  # open units, for which fewer choices are tried


def jump(activation: Activation) -> float | None:
    """How much the slope grows at the kink at zero; None for an activation that is not of that kind."""
    return {Relu: 1.0, Absolute: 2.0}.get(type(activation))


def parabola(threshold: Tensor, origin: Tensor, reach: Tensor) -> Tensor:
    """κ with κ(s - x₀)² >= (s - t')₊ for |s| <= ρ, where x₀ < t': rounded up.

    If the parabola with κ = 1/(4(t' - x₀)) touches the line before ρ, at 2t' - x₀, it lies above it; otherwise the one
    through (ρ, ρ - t') does on [x₀, ρ], being above the chord's ends and convex with slope below 1 at most once.
    """
    touching = 1 / (4 * (threshold - origin))
    ending = (reach - threshold).clamp(min=0.0) / (reach - origin).square()
    return torch.where(reach >= 2 * threshold - origin, touching, torch.minimum(touching, ending)) * (1 + 1e-12)


@dataclass(frozen=True)
class Coefficients:
    """(S, K) what each unit's rest counts in ⟨μ, e⟩, and what of it may be rounding."""

    c: Tensor
    error: Tensor


class Kinks(Local):
    """Units of one piece; a kind says how they are read from δ and written to the output."""

    def __init__(self, u: Tensor, t: Ball, strength: float) -> None:
        self.u, self._t, self._strength = u, t, strength
        self.positive = t.mid > 0

    @final
    def covectors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self._tokens = tokens
        self._side = torch.where(self.positive[tokens], -1.0, 1.0).double().flatten()
        t = self._t[tokens]
        self._distance = ((t.mid.abs() - t.rad) * (1 - 1e-15)).flatten()  # may be negative, by no more than rounding
        C = self._read(tokens)
        return C, torch.zeros(len(C), dtype=torch.float64)

    @abstractmethod
    def _read(self, tokens: Tensor) -> Tensor:
        """(K, n, d) the units of these tokens as functions of δ, exactly."""

    @abstractmethod
    def _written(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        """(S, K) coefficients of the units in the output's covectors, and their rounding."""

    @abstractmethod
    def _grown(self, moved: float, reach: Tensor) -> float:
        """A bound of the output's movement, for units that move by at most `reach`."""

    @final
    def place(self, X: Tensor, first: Tensor) -> None:
        self._x, self._first = X * self._side.unsqueeze(-1), first

    @final
    def prepare(self, mu: Tensor) -> Coefficients:
        c, error = self._written(mu)
        return Coefficients(c * self._strength, error * self._strength)

    @final
    def settle(self, size: Size, low: Tensor, high: Tensor, tiny: Tensor, moved: float) -> float:
        self._size = size
        reach = self._first * size.scale
        rest = torch.where(self._side > 0, high, low)
        threshold = self._distance - rest - (self._distance.abs() + rest) * 1e-15
        self._open = (~(reach * (1 + 1e-12) <= threshold)).nonzero().squeeze(-1)
        self._threshold, self._reach = threshold[self._open], reach[self._open] * (1 + 1e-12)
        self._rows = self._x[self._open]
        self._cube = size.cube(self._rows)
        per_token = max(1, len(self._side) // max(1, len(self._tokens)))
        self._squares = Squares(self._rows, self._open // per_token)
        self._wrong = (-self._distance).clamp(min=0.0)  # a unit on the other side of its kink than its slope says
        self._majorants = []
        for flat in _FLAT if len(self._open) <= _MANY else _FLAT[1::2]:
            origin = torch.minimum(torch.zeros_like(self._threshold), self._threshold - flat / 2 * self._reach - 1e-12)
            self._majorants.append((parabola(self._threshold, origin, self._reach), origin))
        return self._grown(moved, reach + torch.maximum(low, high))

    @final
    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        found, error = self._written(mu)
        return found, float(torch.linalg.vector_norm(error)) / THETA

    @final
    def range(self, prepared: Coefficients | None, varying: Tensor | None) -> tuple[Tensor, Tensor]:
        if prepared is None:
            assert varying is not None
            prepared = Coefficients(torch.zeros_like(varying), torch.zeros_like(varying))
        c, error = prepared.c, prepared.error
        if varying is not None:
            error = error + varying * self._strength
        wrong = (c.abs() + error) @ self._wrong
        c, error = c[:, self._open], error[:, self._open]
        return self._most((error - c).clamp(min=0.0)) + wrong, self._most((error + c).clamp(min=0.0)) + wrong

    def _most(self, w: Tensor) -> Tensor:
        """Bounds of Σ_u w_u (x_u·b - t'_u)₊, the least of a few choices of the parabolas, and by subsets."""
        if not w.shape[-1]:
            return torch.zeros(len(w), dtype=torch.float64)
        r, found = self._size.radius, []
        for kappa, origin in self._majorants:
            v = w * kappa
            linear = self._squares.length(v * (-2 * origin))
            found.append(self._squares.most(v, r, self._reach) + r * linear + v @ origin.square())
        found.append(hinges(w, self._squares, self._threshold, self._reach, r, self._cube))
        return torch.stack(found).amin(0) * (1 + 1e-10)

    @final
    def take(self, prepared: Coefficients, s: int, problem: Problem, varying: Tensor | None) -> None:
        c, error = prepared.c[s], prepared.error[s]
        problem.lose("rounding", float((c.abs() + error) @ self._wrong) * (1 + 1e-10))
        w = error - c if varying is None else error - c + varying * self._strength
        w = w[self._open]
        used = ~(w <= 0)
        problem.weight = torch.cat([problem.weight, w[used] * (1 + 1e-12)])
        problem.x = torch.cat([problem.x, self._rows[used]])
        problem.threshold = torch.cat([problem.threshold, self._threshold[used]])
        problem.reach = torch.cat([problem.reach, self._reach[used]])


@final
class KinkedPerceptron(Kinks):
    """r x + φ(x W₁ + b₁) W₂ + b₂ with a kinked φ."""

    def __init__(self, piece: KinkedMlp, u: Tensor) -> None:
        strength = jump(piece.activation)
        assert strength is not None
        super().__init__(u, piece.before(Ball.exact(u)), strength)
        self._piece = piece
        low, high = piece.activation.all_slopes
        self._slopes = torch.where(self.positive, high, low).double()

    def pull(self, C: Tensor) -> Ball:
        piece = self._piece
        back = (Ball.exact(C) @ piece.w2.mT) * self._slopes @ Ball.exact(piece.w1.mT)
        return back + Ball.exact(C) * piece.residual if piece.residual else back

    def _read(self, tokens: Tensor) -> Tensor:
        m, n, (d, units) = len(tokens), self.u.shape[0], self._piece.w1.shape
        C = torch.zeros(m, units, n, d, dtype=torch.float64)
        C[torch.arange(m), :, tokens] = self._piece.w1.mT
        return C.reshape(m * units, n, d)

    def _written(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        mu = mu[:, self._tokens]
        error = THETA * torch.linalg.vector_norm(mu, dim=-1).unsqueeze(-1) * frobenius_upper(self._piece.w2, (-1,))
        return (mu @ self._piece.w2.mT).flatten(1), error.flatten(1)

    def _grown(self, moved: float, reach: Tensor) -> float:
        low, high = self._piece.activation.all_slopes
        steep = max(abs(low), abs(high)) * float(frobenius_upper(self._piece.w2))
        return (float(torch.linalg.vector_norm(reach)) * steep + abs(self._piece.residual) * moved) * (1 + 1e-10)
