"""Units with one kink, relu and |·| and sorted pairs: quadratic majorants with a free parameter for every unit.

A unit φ(t + h) whose slope jumps by J at zero has, with its slope at t, the rest

    ε(h) = J (σh - |t|)₊,    σ = -sign t:

nothing until h carries t across zero. With h = x·b + r, r beyond first order and at most `rest` on the side of σ,
ε <= J (σx·b - t')₊, t' = |t| - rest. For every x₀ < t' a parabola κ(s - x₀)² lies above (s - t')₊ on |s| <= ρ: it
touches the line if it gets there, or meets its end (docs/math/forms.md, section 3).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import Local, Named, Problem, Rests, Size
from holdfast.compositions.forms.suprema import Squares, hinges, worth
from holdfast.compositions.forms.units import Links, Written
from holdfast.layers.activation.base import Activation
from holdfast.layers.activation.functions import Absolute, LeakyRelu, Relu
from holdfast.linalg import Ball
from holdfast.linalg.rounding import down, up

_FLAT = (0.1, 0.2, 0.4, 0.8)  # the least distance of x₀ from t', as shares of half the reach

_MANY = 128  # open units, for which fewer choices are tried


def bent_at_zero(activation: Activation) -> bool:
    """Whether the activation is linear on both sides of a kink at zero."""
    return isinstance(activation, Relu | LeakyRelu | Absolute)


def parabola(threshold: Tensor, origin: Tensor, reach: Tensor) -> Tensor:
    """κ with κ(s - x₀)² >= (s - t')₊ for |s| <= ρ, where x₀ < t': rounded up.

    If the parabola with κ = 1/(4(t' - x₀)) touches the line before ρ, at 2t' - x₀, it lies above it; otherwise the one
    through (ρ, ρ - t') does on [x₀, ρ], being above the chord's ends and convex with slope below 1 at most once.
    """
    touching = 1 / (4 * (threshold - origin))
    ending = (reach - threshold).clamp(min=0.0) / (reach - origin).square()
    return up(torch.where(reach >= 2 * threshold - origin, touching, torch.minimum(touching, ending)), 1e-12)


@final
class Kinks(Local):
    """Units of one piece that are linear on both sides of zero.

    Args:
        u: (n, d) the piece's input.
        wiring: where the units stand.
        slopes: left and right of zero.
    """

    def __init__(self, u: Tensor, wiring: Links, slopes: tuple[float, float]) -> None:
        self.u, self._wiring, self._sides = u, wiring, slopes
        self._t, (low, high) = wiring.before(u), slopes
        self._strength = up(high - low, 1e-15)
        self.positive = self._t.mid > 0

    @property
    def rest(self) -> str:
        return "kinks"

    @property
    def scalars(self) -> int:
        return self._t.mid.numel()

    @property
    def longest(self) -> int:
        return self.scalars

    @property
    def stride(self) -> int:
        return self._t.mid.shape[-1]

    @property
    def numbers(self) -> int:
        return len(self._tokens) * self.stride

    @property
    def kept(self) -> int:
        return 8 * self.numbers

    def touched(self, tokens: Tensor) -> Tensor:
        return self._wiring.touched(tokens)

    def pull(self, C: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.tensor(self._sides, dtype=torch.float64)
        return self._wiring.pull(C, Ball.exact(torch.where(self.positive, high, low)))

    def covectors(self, tokens: Tensor) -> tuple[Named, Tensor]:
        self._tokens = tokens
        self._side = torch.where(self.positive[tokens], -1.0, 1.0).double().flatten()
        t = self._t[tokens]
        self._distance = down(t.mid.abs() - t.rad).flatten()  # may be negative, by no more than rounding
        self._farthest = up(t.mid.abs() + t.rad).flatten()
        C = self._wiring.covectors(tokens, len(self.u))
        return C, torch.zeros(C.count, dtype=torch.float64)

    def functions(self, T: Tensor) -> Tensor:
        return self._wiring.functions(self._tokens, T)

    def most(self, y: Tensor) -> Tensor:
        return self._wiring.most(self._tokens, y)

    def place(self, X: Tensor, first: Tensor) -> None:
        self._x, self._first = X * self._side.unsqueeze(-1), first

    def prepare(self, mu: Tensor) -> Written:
        return Written.of(self._wiring, mu[:, self._tokens], self._strength)

    def settle(self, size: Size, rests: Rests, moved: float) -> float:
        self._size, low, high = size, rests.low, rests.high
        reach = self._first * size.scale
        rest = torch.where(self._side > 0, high, low)
        threshold = self._distance - rest - (self._distance.abs() + rest) * 1e-15
        self._open = (~(up(reach, 1e-12) <= threshold)).nonzero().squeeze(-1)
        self._threshold, self._reach = threshold[self._open], up(reach[self._open], 1e-12)
        other = torch.where(self._side > 0, low, high)
        ceiling = self._distance + other + (self._distance.abs() + other) * 1e-15
        self._ceiling, self._rows = ceiling[self._open], self._x[self._open]
        begin = self._farthest + other + (self._farthest + other) * 1e-15
        self._begin = begin[self._open]
        self._over = (self._reach - self._threshold).clamp(min=0.0)
        self._over = self._over.where(self._leading(self._over), 0.0)  # of units that share a rest, the largest counts
        self._sure = self._leading(self._reach - self._begin)
        self._cube = size.cube(self._rows)
        self._squares = Squares(self._rows, self._open // self.stride)
        self._wrong = (-self._distance).clamp(min=0.0)  # a unit on the other side of its kink than its slope says
        self._majorants = []
        for flat in _FLAT if len(self._open) <= _MANY else _FLAT[1::2]:
            origin = torch.minimum(torch.zeros_like(self._threshold), self._threshold - flat / 2 * self._reach - 1e-12)
            self._majorants.append((parabola(self._threshold, origin, self._reach), origin))
        steep = max(map(abs, self._sides))
        units = float(torch.linalg.vector_norm(reach + torch.maximum(low, high))) * steep
        return up(self._wiring.grown(moved, units), 1e-10)

    def _leading(self, size: Tensor) -> Tensor:
        """Which of the open units are the largest of those with which they share a rest."""
        every = size.new_full((self._x.shape[0],), -torch.inf)
        every[self._open] = size
        groups = every.reshape(-1, self._wiring.shared)
        chosen = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.argmax(1, keepdim=True), True)
        return chosen.flatten()[self._open]

    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        written = Written.of(self._wiring, mu[:, self._tokens])
        return written.c, written.size

    def range(
        self,
        prepared: Written | None,
        varying: Tensor | None,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        c = error = wrong = torch.zeros((), dtype=torch.float64)
        if prepared is not None:
            c, error = prepared.c[:, self._open], prepared.errors(self._open)
            if bool((self._wrong != 0).any()):
                wrong = prepared.c.abs() @ self._wrong + prepared.lost(self._wrong)
        if varying is not None:
            error = error + varying[:, self._open] * self._strength
            wrong = wrong + varying @ self._wrong * self._strength
        c = c.expand_as(error)
        low, high = (self._most((error + part).clamp(min=0.0), enough) + wrong for part in (-c, c))
        return low, high

    def _most(self, w: Tensor, enough: Tensor | None) -> Tensor:
        """Bounds of Σ_u w_u (x_u·b - t'_u)₊, the least of a few choices of the parabolas, and by subsets."""
        most: Tensor = up(w @ self._over, 1e-10)
        large = worth(most, enough)
        if len(large) and w.shape[-1]:
            most[large] = torch.minimum(most[large], self._joint(w[large]))
        return most

    def _joint(self, w: Tensor) -> Tensor:
        r, bounds = self._size.radius, []
        for kappa, origin in self._majorants:
            v = w * kappa
            linear = self._squares.length(v * (-2 * origin))
            bounds.append(self._squares.most(v, r, self._reach) + r * linear + v @ origin.square())
        bounds.append(hinges(w, self._squares, self._threshold, self._reach, r, self._cube))
        return up(torch.stack(bounds).amin(0), 1e-10)

    def take(self, prepared: Written, s: int, problem: Problem, varying: Tensor | None) -> None:
        wrong = prepared.c[s].abs() @ self._wrong + prepared.lost(self._wrong)[s]
        error = prepared.errors(self._open)[s]
        if varying is not None:
            error = error + varying[self._open] * self._strength
            wrong = wrong + varying @ self._wrong * self._strength
        problem.lose("rounding", up(float(wrong), 1e-10))
        w = error - prepared.c[s, self._open]
        used = ~(w <= 0)
        problem.weight = torch.cat([problem.weight, up(w[used], 1e-12)])
        problem.x = torch.cat([problem.x, self._rows[used]])
        problem.threshold = torch.cat([problem.threshold, self._threshold[used]])
        problem.reach = torch.cat([problem.reach, self._reach[used]])
        problem.ceiling = torch.cat([problem.ceiling, self._ceiling[used]])
        gain = down(prepared.c[s, self._open], 1e-12) - up(error, 1e-12)
        used = (gain > 0) & (self._reach > self._begin) & self._sure
        problem.gain = torch.cat([problem.gain, gain[used]])
        problem.rising = torch.cat([problem.rising, self._rows[used]])
        problem.begin = torch.cat([problem.begin, self._begin[used]])
