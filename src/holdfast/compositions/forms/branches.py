"""The least value of a margin over a cube, with kinks by lines and by branches (docs/math/forms.md, section 7).

On a cube |y_k| <= s_k a linear function has its least value in closed form, coordinate by coordinate; so kinks that
are bounded by lines cost nothing but the lines' gap. A kink that is open with low <= x·b <= high lies below the chord
of its ends. A kink that the margin gains lies above every line α(x·b - t), 0 <= α <= 1. A branch decides for some kinks
whether they are on, x·b >= t', where they are linear, or off, x·b <= t'', where they vanish; each condition enters with
a multiplier η >= 0. Any α and η are sound. The margin is at least the least of all branches, and the worst branch is
divided as long as it is not positive.

To see that a margin exceeds a small number θ it suffices to look where it may not: a linear function below the margin
is at most θ there, which leaves a cap of the cube. On the cap kinks have shorter ranges, so chords are closer to them,
and the cap becomes smaller. What is found so is a bound of the margin as far as it is at most θ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import THETA, Problem
from holdfast.compositions.forms.region import Region
from holdfast.linalg.rounding import up

_TOGETHER = 32  # that are divided at once
_ASCENT = 12  # steps on the multipliers
_AIM = 0.02  # what the steps aim at, as a share of the margin at the centre
_ENOUGH = 1e-4  # the same of θ
_ROUNDS = 12  # of shorter ranges on the whole cube
_SHORTER = 16  # kinks of a branch whose ranges are made shorter
_HALVINGS = 8  # to find how much of the margin's line counts in a range
_CHUNK = 2**22  # numbers of a matrix on all coordinates that are held at once
_SMALL = 1e-300


@final
@dataclass(frozen=True)
class _Leaves:
    """B branches of K kinks, V of which the margin gains.

    Attributes:
        state: (B, K) 1 for on, -1 for off, 0 for open.
        low, high: (B, K) the ranges of x·b where the margin may be at most θ.
        eta: (B, K) multipliers, as shares of the kinks' weights.
        alpha: (B, V) slopes of the kinks that are gained.
        bound: (B) lower bounds of the margin, as far as it is at most θ.
        following: (B) the kink at which to divide, -1 for none.
        model: (B) what kinks, gains and the linear function are together where the branch's minorant is least.
    """

    state: Tensor
    low: Tensor
    high: Tensor
    eta: Tensor
    alpha: Tensor
    bound: Tensor
    following: Tensor
    model: Tensor

    def __getitem__(self, index: Tensor) -> _Leaves:
        return _Leaves(*(part[index] for part in vars(self).values()))

    def __add__(self, other: _Leaves) -> _Leaves:
        return _Leaves(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@final
@dataclass(frozen=True)
class _Lines:
    """Linear functions below a margin, value + slope·y, on B branches."""

    value: Tensor  # (B) with all roundings taken off
    slope: Tensor  # (B, P)
    least: Tensor  # (B) over the cube


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
        V, self._sides = region.basis, up(region.sides * scale, 1e-12)
        self._problem, self._slope = problem, V @ problem.gradient  # (P)
        self._enough = _ENOUGH * abs(problem.value)  # θ
        self._rows, self._rising = region.spread(problem.x), region.spread(problem.rising)  # (K, P), (V, P)
        r = up(region.radius * scale, 1e-12)
        # What rows may be wrong by, for a coefficient 1.
        self._unsure, self._rising_unsure = (
            64 * THETA * r * torch.linalg.vector_norm(x, dim=-1) for x in (problem.x, problem.rising)
        )
        tilted = 64 * THETA * r * float(torch.linalg.vector_norm(problem.gradient)) + problem.rounding * r * r
        self._value = problem.value - up(tilted, 1e-9)
        self._linearise(region, problem.form, r)

    def _linearise(self, region: Region, form: Tensor, r: float) -> None:
        """Takes the quadratic form in, by a linear function below it that is exact at one corner c of the cube.

        With B = VFVᵀ and y = c + e, yᵀBy = 2(Bc)·y - cᵀBc + eᵀBe, and |eᵀBe| <= Σ_k q_k|e_k|, q = 2|B|s, as |e| <= 2s.
        On the cube |e_k| = s_k - sign(c_k) y_k. The corner is where the minorant without the form is least.
        """
        problem = self._problem
        gain, _ = self._chords(-problem.reach, problem.reach)
        signs = torch.where(self._slope - (problem.weight * gain) @ self._rows > 0, -1.0, 1.0).double()
        V = region.basis
        b = V.mT @ (signs * self._sides)
        turned = form @ b
        rows = torch.split(region.spread(form).mT, max(1, _CHUNK // len(V)))  # of VF; all of B might not fit the memory
        q = up(2 * torch.cat([region.spread(some).abs() @ self._sides for some in rows]), 1e-9)
        self._slope = self._slope + 2 * (V @ turned) + q * signs
        at_corner, apart = float(b @ turned), float(q @ self._sides)
        unsure = 16 * THETA * len(form) * float(torch.linalg.matrix_norm(form)) * r * r
        self._value -= at_corner + apart + unsure + 1e-11 * (abs(at_corner) + apart)

    def least(self, most: int) -> tuple[float, Tensor, int]:
        """A lower bound of the margin, the first point y where its minorant is least, and how many branches it took.

        Args:
            most: branches, about, after which the search ends.
        """
        problem = self._problem
        K, V = len(problem.weight), len(problem.gain)
        zero, none = torch.zeros(1, K, dtype=torch.float64), torch.full((1,), -math.inf, dtype=torch.float64)
        reach, alpha = problem.reach.unsqueeze(0), torch.full((1, V), 0.5, dtype=torch.float64)
        leaves = _Leaves(zero, -reach, reach, zero, alpha, none, torch.full((1,), -1), -none)
        whole, lines = self._ascended(leaves)
        point = self._corners(lines)[0]
        if bool(whole.bound > self._enough):
            return float(whole.bound), point, 1
        leaves = self._bounded(whole, _ROUNDS, K)
        # At every point some branch has at least the cost that all kinks have there together.
        while len(leaves.bound) < most and bool((leaves.model > self._enough).all()):
            worst = self._open(leaves)
            worst = worst[leaves.bound[worst].argsort()[:_TOGETHER]]
            if not len(worst) or bool((leaves.following[worst[:1]] < 0).any()):
                break
            worst = worst[leaves.following[worst] >= 0]
            kept = torch.ones(len(leaves.bound), dtype=torch.bool)
            kept[worst] = False
            leaves = leaves[kept.nonzero().squeeze(-1)] + self._bounded(self._divided(leaves[worst]), 1, _SHORTER)
        return min(float(leaves.bound.min()), self._enough), point, len(leaves.bound)

    def _open(self, leaves: _Leaves) -> Tensor:
        """Which are not proved; one that is not a number is not."""
        return (~(leaves.bound > self._enough)).nonzero().squeeze(-1)

    def _corners(self, lines: _Lines) -> Tensor:
        """(B, P) where they are least."""
        return -lines.slope.sign() * self._sides

    def _divided(self, leaves: _Leaves) -> _Leaves:
        """Each branch with the next kink off, then each with it on."""
        every, kink = torch.arange(len(leaves.bound)), leaves.following
        off, on = leaves.state.clone(), leaves.state.clone()
        off[every, kink], on[every, kink] = -1.0, 1.0
        low, high = leaves.low.clone(), leaves.high.clone()
        low[every, kink] = torch.maximum(low[every, kink], self._problem.threshold[kink])
        high[every, kink] = torch.minimum(high[every, kink], self._problem.ceiling[kink])
        return replace(leaves, state=off, high=high) + replace(leaves, state=on, low=low)

    def _bounded(self, leaves: _Leaves, rounds: int, kinks: int) -> _Leaves:
        """Bounds of branches, with multipliers and ranges improved, and where to divide them."""
        leaves, lines = self._ascended(leaves)
        for _ in range(rounds):
            if not len(self._open(leaves)):
                break
            leaves, lines = self._ascended(self._shortened(leaves, lines, kinks))
        problem, y = self._problem, self._corners(lines)
        seen = y @ self._rows.mT
        cost = problem.weight * (seen - problem.threshold).clamp(min=0.0)
        gained = problem.gain * (y @ self._rising.mT - problem.begin).clamp(min=0.0)
        model = self._value + y @ self._slope - cost.sum(-1) + gained.sum(-1)
        gain, start = self._chords(leaves.low, leaves.high)
        gap = problem.weight * (gain * seen + start) - cost
        gap = torch.cat(
            [torch.where(leaves.state == 0, gap, -math.inf), torch.zeros_like(leaves.bound).unsqueeze(-1)], -1
        )
        largest = gap.argmax(-1)
        following = torch.where(largest < leaves.state.shape[-1], largest, -1)
        return replace(leaves, following=following, model=model)

    def _ascended(self, leaves: _Leaves) -> tuple[_Leaves, _Lines]:
        """Multipliers improved step by step, and the lines of the best ones."""
        problem, state = self._problem, leaves.state
        aim = _AIM * abs(problem.value)
        eta, alpha = leaves.eta, leaves.alpha
        best, chosen = None, (eta, alpha)
        for step in range(_ASCENT):
            lines = self._lines(leaves, eta, alpha)
            if best is None:
                best = lines
            else:
                better = lines.least > best.least
                pairs = zip(vars(lines).values(), vars(best).values(), strict=True)
                best = _Lines(*(_where(better, *pair) for pair in pairs))
                chosen = _where(better, eta, chosen[0]), _where(better, alpha, chosen[1])
            if step + 1 == _ASCENT or bool((best.least > self._enough).all()):
                break
            y = self._corners(lines)
            seen = y @ self._rows.mT
            by_eta = problem.weight * (
                (state < 0) * (seen - problem.ceiling) + (state > 0) * (problem.threshold - seen)
            )
            by_alpha = problem.gain * (y @ self._rising.mT - problem.begin)
            length = by_eta.square().sum(-1) + by_alpha.square().sum(-1)
            size = ((aim - lines.least) / length.clamp(min=_SMALL)).clamp(min=0.0).unsqueeze(-1)
            eta, alpha = (eta + size * by_eta).clamp(min=0.0), (alpha + size * by_alpha).clamp(0.0, 1.0)
        assert best is not None
        return replace(leaves, eta=chosen[0], alpha=chosen[1], bound=torch.maximum(leaves.bound, best.least)), best

    def _chords(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Gain and start with (s - t')₊ <= gain s + start for low <= s <= high: above both ends, hence between."""
        t = self._problem.threshold
        top, bottom = (high - t).clamp(min=0.0), (low - t).clamp(min=0.0)
        gain = ((top - bottom) / (high - low).clamp(min=_SMALL)).clamp(0.0, 1.0)
        return gain, torch.maximum(bottom - gain * low, top - gain * high) + 1e-14 * (low.abs() + high.abs() + t.abs())

    def _lines(self, leaves: _Leaves, eta: Tensor, alpha: Tensor) -> _Lines:
        """The minorants with these multipliers."""
        problem = self._problem
        w, off, on = problem.weight, (leaves.state < 0).double(), (leaves.state > 0).double()
        gain, start = self._chords(leaves.low, leaves.high)
        line, eta, alpha = (1 - off) * w, w * eta, problem.gain * alpha
        coefficients = (off - on) * eta - line * gain  # of x·b
        slope = self._slope + coefficients @ self._rows + alpha @ self._rising
        numbers = line * start, on * eta * problem.threshold, off * eta * problem.ceiling, alpha * problem.begin
        taken, on_number, off_number, gained = (part.sum(-1) for part in numbers)
        lost = up(slope.abs() @ self._sides, 1e-10)
        unsure = up(coefficients.abs() @ self._unsure + alpha @ self._rising_unsure, 1e-9)
        size = abs(self._value) + sum(part.abs().sum(-1) for part in numbers) + lost
        value = self._value - taken + on_number - off_number - gained - unsure - 1e-11 * size
        return _Lines(value, slope, value - lost)

    def _shortened(self, leaves: _Leaves, lines: _Lines, kinks: int) -> _Leaves:
        """Shorter ranges of the kinks whose chords are farthest from them, where the margin is at most θ."""
        problem = self._problem
        low, high, bound = leaves.low.clone(), leaves.high.clone(), leaves.bound.clone()
        t = problem.threshold
        gap = (high - t).clamp(min=0.0) * (t - low).clamp(min=0.0) / (high - low).clamp(min=_SMALL) * problem.weight
        chosen = torch.where(leaves.state < 0, 0.0, gap).topk(min(kinks, gap.shape[-1]), -1).indices  # (B, T)
        for i in self._open(leaves).tolist():
            of = chosen[i]
            x = torch.cat([self._rows[of], -self._rows[of]])
            most = self._most(x, self._unsure[of].repeat(2), lines.value[i] - self._enough, lines.slope[i])
            above, below = most.chunk(2)
            high[i, of] = torch.where(above < high[i, of], above, high[i, of])
            low[i, of] = torch.where(-below > low[i, of], -below, low[i, of])
            if bool((low[i, of] > high[i, of]).any()):  # the margin exceeds θ everywhere
                bound[i] = math.inf
        return replace(leaves, low=low, high=high, bound=bound)

    def _most(self, x: Tensor, unsure: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        """(T) bounds of x·y, for rows (T, P), where value + slope·y <= 0.

        For every λ >= 0 it is at most x·y - λ(value + slope·y), whose supremum over the cube is convex in λ.
        """
        s = self._sides
        size, length = x.abs() @ s, slope.abs() @ s
        least, most = torch.zeros_like(size), 4 * size / length.clamp(min=_SMALL)
        weighted = slope * s
        for _ in range(_HALVINGS):  # the derivative is -value - slope·y at the corner y of x - λ slope
            middle = (least + most) / 2
            rising = -value - (x - middle.unsqueeze(-1) * slope).sign() @ weighted > 0
            least, most = torch.where(rising, least, middle), torch.where(rising, middle, most)
        factor = (least + most) / 2
        reached = up((x - factor.unsqueeze(-1) * slope).abs() @ s, 1e-10)
        return reached - factor * value + unsure + 1e-11 * (size + factor * (length + value.abs()))


def _where(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Row by row."""
    return torch.where(condition.reshape(-1, *(1,) * (first.ndim - 1)), first, second)
