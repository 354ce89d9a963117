"""The least value of a margin over a cube, with kinks by lines and by branches (docs/math/forms.md, section 7).

On a cube |y_k| <= s_k a linear function has its least value in closed form, coordinate by coordinate; so kinks that are
bounded by lines cost nothing but the lines' gap. A kink that is open with |x·b| <= ρ lies below the chord of its ends.
A branch decides for some kinks whether they are on, x·b >= t', where they are linear, or off, x·b <= t'', where they
vanish; each condition enters with a multiplier η >= 0, and any multipliers are sound. The margin is at least the least
of all branches, and the worst branch is divided as long as it is not positive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import THETA, Problem
from holdfast.compositions.forms.region import Region

_MOST = 4096  # branches
_TOGETHER = 32  # that are divided at once
_ASCENT = 12  # steps on the multipliers
_AIM = 0.05  # what the steps aim at, as a share of the margin at the centre


@final
@dataclass(frozen=True)
class _Leaves:
    """Branches: states (B, K), 1 for on, -1 for off, 0 for open; multipliers (B, K); bounds (B); which kink is next."""

    state: Tensor
    eta: Tensor
    bound: Tensor
    following: Tensor

    def __getitem__(self, index: Tensor) -> _Leaves:
        return _Leaves(*(part[index] for part in vars(self).values()))

    def __add__(self, other: _Leaves) -> _Leaves:
        return _Leaves(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@final
class Branches:
    """A margin's problem over a cube of a region.

    Args:
        problem: what is taken off the margin.
        region: a cube.
        scale: its factor.
    """

    def __init__(self, problem: Problem, region: Region, scale: float) -> None:
        assert region.sides is not None
        V, self._sides = region.basis, region.sides * scale * (1 + 1e-12)
        self._problem, self._rows, self._slope = problem, region.spread(problem.x), V @ problem.gradient  # (K, P), (P)
        # (s - t')₊ <= gain s + start for |s| <= ρ: the chord of its ends, or the line itself where it is on throughout.
        reach, threshold = problem.reach, problem.threshold
        self._gain = ((reach - threshold) / (2 * reach).clamp(min=1e-300)).clamp(0.0, 1.0)
        self._start = torch.maximum(self._gain * reach, -threshold) * (1 + 1e-12)
        r = region.radius * scale * (1 + 1e-12)
        lengths = torch.linalg.vector_norm(problem.x, dim=-1)
        self._unsure = 64 * THETA * r * lengths  # of every row, for a coefficient 1
        tilted = 64 * THETA * r * float(torch.linalg.vector_norm(problem.gradient)) + problem.rounding * r * r
        self._value = problem.value - tilted * (1 + 1e-9)
        self._linearise(region, problem.form, r)

    def _linearise(self, region: Region, form: Tensor, r: float) -> None:
        """Takes the quadratic form in, by a linear function below it that is exact at one corner c of the cube.

        With B = VFVᵀ and y = c + e, yᵀBy = 2(Bc)·y - cᵀBc + eᵀBe, and |eᵀBe| <= Σ_k q_k|e_k|, q = 2|B|s, as |e| <= 2s.
        On the cube |e_k| = s_k - sign(c_k) y_k. The corner is where the minorant without the form is least.
        """
        signs = torch.where(self._slope - (self._problem.weight * self._gain) @ self._rows > 0, -1.0, 1.0).double()
        V = region.basis
        b = V.mT @ (signs * self._sides)
        turned = form @ b
        q = 2 * (region.spread(region.spread(form).mT).abs() @ self._sides) * (1 + 1e-9)
        self._slope = self._slope + 2 * (V @ turned) + q * signs
        at_corner, apart = float(b @ turned), float(q @ self._sides)
        unsure = 16 * THETA * len(form) * float(torch.linalg.matrix_norm(form)) * r * r
        self._value -= at_corner + apart + unsure + 1e-11 * (abs(at_corner) + apart)

    def least(self) -> tuple[float, Tensor, int]:
        """A lower bound of the margin, the first point y where its minorant is least, and the number of branches."""
        K = len(self._problem.weight)
        zero = torch.zeros(1, K, dtype=torch.float64)
        leaves, y = self._bounded(zero, zero)
        point = y[0]
        while len(leaves.bound) < _MOST:
            worst = (~(leaves.bound > 0)).nonzero().squeeze(-1)
            worst = worst[leaves.bound[worst].argsort()[:_TOGETHER]]
            if not len(worst) or bool((leaves.following[worst[:1]] < 0).any()):
                break
            parents = leaves[worst[leaves.following[worst] >= 0]]
            kept = torch.ones(len(leaves.bound), dtype=torch.bool)
            kept[worst[leaves.following[worst] >= 0]] = False
            state = parents.state.repeat(2, 1)
            half = torch.arange(len(state)) >= len(parents.bound)
            state[torch.arange(len(state)), parents.following.repeat(2)] = torch.where(half, 1.0, -1.0).double()
            new, _ = self._bounded(state, parents.eta.repeat(2, 1))
            new = _Leaves(new.state, new.eta, torch.maximum(new.bound, parents.bound.repeat(2)), new.following)
            leaves = leaves[kept.nonzero().squeeze(-1)] + new
        return float(leaves.bound.min()), point, len(leaves.bound)

    def _bounded(self, state: Tensor, eta: Tensor) -> tuple[_Leaves, Tensor]:
        """Bounds of branches, with multipliers improved step by step; and where the last minorants are least."""
        problem, best, chosen = self._problem, torch.full((len(state),), -math.inf, dtype=torch.float64), eta
        on, off = (state > 0).double(), (state < 0).double()
        aim = _AIM * abs(problem.value)
        for step in range(_ASCENT):
            value, y = self._values(on, off, eta)
            better = value > best
            best, chosen = torch.where(better, value, best), torch.where(better.unsqueeze(-1), eta, chosen)
            if step + 1 == _ASCENT or bool((best > 0).all()) or not bool((state != 0).any()):
                break
            seen = y @ self._rows.mT
            slope = off * (seen - problem.ceiling) + on * (problem.threshold - seen)
            length = slope.square().sum(-1).clamp(min=1e-300)
            eta = (eta + ((aim - value) / length).clamp(min=0.0).unsqueeze(-1) * slope).clamp(min=0.0)
        seen = y @ self._rows.mT
        gap = problem.weight * (self._gain * seen + self._start - (seen - problem.threshold).clamp(min=0.0))
        gap = torch.cat([torch.where(state == 0, gap, -math.inf), torch.zeros_like(best).unsqueeze(-1)], -1)
        largest = gap.argmax(-1)
        return _Leaves(state, chosen, best, torch.where(largest < state.shape[-1], largest, -1)), y

    def _values(self, on: Tensor, off: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
        """The least values (B) with these multipliers, rounded down, and where they are attained, (B, P)."""
        problem = self._problem
        w, t = problem.weight, problem.threshold
        lines = (1 - on - off) * (w * self._gain)
        coefficients = -lines - on * (w + eta) + off * eta  # of x·b
        numbers = (1 - on - off) * (w * self._start), on * (w + eta) * t, off * eta * problem.ceiling
        slope = self._slope + coefficients @ self._rows
        lost = slope.abs() @ self._sides * (1 + 1e-10) + coefficients.abs() @ self._unsure * (1 + 1e-9)
        value = self._value - numbers[0].sum(-1) + numbers[1].sum(-1) - numbers[2].sum(-1) - lost
        size = abs(self._value) + sum(part.abs().sum(-1) for part in numbers) + lost
        return value - 1e-11 * size, -slope.sign() * self._sides
