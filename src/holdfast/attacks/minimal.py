"""The smallest perturbation that changes a classifier's answer, as far as a search finds it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from holdfast.errors import check_counts
from holdfast.linalg.ball_map import BallMap
from holdfast.linalg.rounding import Ball, down, up
from holdfast.linalg.threat import L2, Threat
from holdfast.results import Guarantee

Logits = Callable[[Tensor], Tensor]

_HALVINGS = 20  # of the interval on a ray in which the answer changes
_SHRINK = 0.1  # of a box in which an answer changed, at first
_WIDE = 1e-3  # of the largest logit: balls with a larger radius say too little
_ALLOWANCE = 1e-9  # of the largest logit, for the rounding of float64
_LONGER = (0.0, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)  # a witness is stretched until its check succeeds


@final
@dataclass(frozen=True)
class NearestChange:
    """How near to each input a point with another answer was found.

    Attributes:
        radius: (b) the distance of the witness, rounded up; infinite where none was found.
        perturbation: (b, n, d) float32: the witness is x + perturbation, added in float64; zero where none was found.
        guarantee: "proved" if the change was re-evaluated in ball arithmetic, which needs a network of few layers.
        seconds: wall time.
    """

    radius: Float64[Tensor, " b"]
    perturbation: Float32[Tensor, "b n d"] = field(repr=False)
    guarantee: Guarantee
    seconds: float = 0.0


@final
@dataclass(frozen=True)
class MinimalAttack:
    """Solves min ‖δ‖ subject to m(x + δ) <= 0 for the margin m to every target, from several starts, all at once.

    From δ the next point is the nearest one to x at which the linearised margin vanishes: for l2

        δ⁺ = ∇m (⟨∇m, δ⟩ - m) / ‖∇m‖²

    (Hasofer and Lind 1974, Rackwitz and Fiessler 1978), for l-infinity -t sign ∇m, as far as the inputs' range
    permits, with the t at which it vanishes. Fixed points are the stationary points of the problem. The step towards
    it is halved until ½‖δ‖² + c|m|, c > ‖δ‖/‖∇m‖, decreases (Zhang and Der Kiureghian 1995); ‖∇m‖ is the dual norm. In
    the l-infinity norm, whose stationary points are corners, signed steps within a shrinking box follow. At the end the
    answer is followed along the ray of every start.

    Args:
        restarts: starts for every target: x itself, then random points as far away as the linearised margin vanishes;
            in the l-infinity norm, random corners.
        targets: classes that are tried for every input, those with the largest logits first.
        steps: gradient evaluations for every start.
    """

    restarts: int = 3
    targets: int = 9
    steps: int = 30

    def __post_init__(self) -> None:
        check_counts(**vars(self))

    def __call__(
        self,
        logits: Logits,
        x: Tensor,
        prediction: Int64[Tensor, " b"],
        seed: int = 0,
        *,
        threat: Threat = L2,
        seconds: float | None = None,
    ) -> NearestChange:
        """Searches.

        Args:
            logits: a network, or any differentiable function of (b, n, d) to logits (b, classes).
            x: (b, n, d) the inputs.
            prediction: the class of each input; another answer is a change, and so is a tie.
            seed: of the random starts, which are the same for every input.
            threat: the norm, and the range of inputs.
            seconds: time after which no step is begun; None for no limit.
        """
        began = time.perf_counter()
        x = x.detach().double()
        threat.check(x)
        with torch.no_grad():
            others = logits(x).scatter(1, prediction[:, None], -torch.inf)
        targets = others.topk(min(self.targets, others.shape[1] - 1), dim=1).indices
        starts = self._starts(x, targets.shape[1], seed, threat)
        # One row for each input, target and start.
        points = x[:, None, None].expand_as(starts).flatten(0, 2)
        answers = prediction[:, None, None].expand(starts.shape[:3]).flatten()
        goals = targets[:, :, None].expand(starts.shape[:3]).flatten()
        problem = _Ascents(logits, points, answers, goals, threat, began + (math.inf if seconds is None else seconds))
        move, length = problem.shorten(problem.descend(starts.flatten(0, 2), self.steps))
        if threat.boxed:
            move, length = problem.shrink(move, length, self.steps)
        length, best = length.reshape(len(x), -1).min(1)
        delta = move.reshape(len(x), -1, *x.shape[1:])[torch.arange(len(x)), best]
        radius, perturbation = _witness(logits, x, prediction, delta, torch.isfinite(length), threat)
        proved = isinstance(logits, BallMap) and bool(_told(logits(Ball.exact(x))).all())
        guarantee: Guarantee = "proved" if proved else "numerical"
        return NearestChange(radius, perturbation, guarantee, time.perf_counter() - began)

    def _starts(self, x: Tensor, targets: int, seed: int, threat: Threat) -> Tensor:
        """Directions (b, targets, restarts, n, d): zero, then random ones of length 1; corners in a box."""
        generator = torch.Generator().manual_seed(seed)
        shape = (targets, self.restarts, *x.shape[1:])
        directions = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device)
        directions = directions.sign() if threat.boxed else directions / _column(threat.length(directions))
        directions[:, 0] = 0.0
        return directions.expand(len(x), *shape)


def answer_changed(logits: Logits, x: Tensor, prediction: Tensor) -> Tensor:
    """Whether another class has a logit at least as large, (b).

    It is proved by balls if `logits` is a network; where balls are too wide to tell, as for deep networks,
    float64 decides, and the other class must lead by more than rounding can plausibly hide.
    """
    with torch.no_grad():
        if not isinstance(logits, BallMap):
            values = logits(x)
            rival = values.scatter(1, prediction[:, None], -torch.inf).amax(1)
            return rival >= values.gather(1, prediction[:, None]).squeeze(1)
        ball = logits(Ball.exact(x))
        rows = torch.arange(len(x), device=x.device)
        rival = ball.mid.scatter(1, prediction[:, None], -torch.inf).argmax(1)
        lead = ball[rows, rival] - ball[rows, prediction]
        return torch.where(_told(ball), lead.lower >= 0, lead.mid >= _ALLOWANCE * _largest(ball))


def _told(logits: Ball) -> Tensor:
    """Whether balls are narrow enough to tell, (b): those of deep networks are not."""
    return logits.rad.amax(1) <= _WIDE * _largest(logits)


def _largest(logits: Ball) -> Tensor:
    return logits.mid.abs().amax(1)


@final
@dataclass(frozen=True)
class _Ascents:
    """Rows (r) of points, with the class that answers there and the one that shall."""

    logits: Logits
    x: Tensor
    answers: Tensor
    goals: Tensor
    threat: Threat
    deadline: float

    @property
    def overdue(self) -> bool:
        return time.perf_counter() > self.deadline

    def margin(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The margin of the answer over the goal at x + δ, and its gradient."""
        with torch.enable_grad():
            z = (self.x + delta).detach().requires_grad_()
            values = self.logits(z)
            margin = (values.gather(1, self.answers[:, None]) - values.gather(1, self.goals[:, None])).squeeze(1)
            (gradient,) = torch.autograd.grad(margin.sum(), z)
        return margin.detach(), gradient

    def within(self, delta: Tensor) -> Tensor:
        """δ drawn in until x + δ is between the ends."""
        return delta if self.threat.clip is None else self.threat.inside(self.x + delta) - self.x

    def changed(self, delta: Tensor) -> Tensor:
        """Whether the answer at x + δ is another one, or a tie, in plain float64."""
        with torch.no_grad():
            values = self.logits(self.x + delta)
        rival = values.scatter(1, self.answers[:, None], -torch.inf).amax(1)
        return rival >= values.gather(1, self.answers[:, None]).squeeze(1)

    def descend(self, starts: Tensor, steps: int) -> Tensor:
        """δ after the iteration, for every row."""
        length, steep = self.threat.length, self.threat.steepness
        margin, gradient = self.margin(torch.zeros_like(self.x))
        delta = self.within(starts * _column(margin.abs() / steep(gradient).clamp(min=1e-300)))
        margin, gradient = self.margin(delta)
        step = torch.ones_like(margin)
        for _ in range(steps - 1):
            if self.overdue:
                break
            steepness = steep(gradient).clamp(min=1e-300)
            lack = margin - (gradient * delta).sum((-2, -1))  # how far the linearised margin must fall from x
            trial = delta + _column(step) * (self._onto(gradient, steepness, lack) - delta)
            c = 2 * torch.maximum(length(trial), length(delta)) / steepness
            before = length(delta).square() / 2 + c * margin.abs()
            tried_margin, tried_gradient = self.margin(trial)
            gained = length(trial).square() / 2 + c * tried_margin.abs() < before
            delta = torch.where(_column(gained), trial, delta)
            margin = torch.where(gained, tried_margin, margin)
            gradient = torch.where(_column(gained), tried_gradient, gradient)
            step = torch.where(gained, (2 * step).clamp(max=1), step / 2)
        return delta

    def _onto(self, gradient: Tensor, steepness: Tensor, lack: Tensor) -> Tensor:
        """The δ nearest to 0 with -⟨∇m, δ⟩ = lack; as near to that as the ends let it."""
        if not self.threat.boxed:
            return gradient * _column(-lack / steepness / steepness)
        towards = -gradient.sign() * _column(lack.sign())
        t = lack.abs() / steepness
        if self.threat.clip is None:
            return towards * _column(t)
        low, high = self.threat.clip
        room = torch.where(towards > 0, high - self.x, self.x - low)
        least, most = t, torch.full_like(t, high - low)
        for _ in range(_HALVINGS):
            t = (least + most) / 2
            short = (gradient.abs() * room.minimum(_column(t))).sum((-2, -1)) < lack.abs()
            least, most = torch.where(short, t, least), torch.where(short, most, t)
        return towards * room.minimum(_column(most))

    def shorten(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """δ scaled to where the answer changes on its ray, and its length; infinite where it does not up to 1.02 δ."""
        low, high = torch.zeros_like(delta[:, 0, 0]), torch.full_like(delta[:, 0, 0], 1.02)
        succeeded = self.changed(self.within(_column(high) * delta))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            inside = self.changed(self.within(_column(middle) * delta))
            low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
        delta = self.within(_column(high) * delta)
        return delta, torch.where(succeeded, self.threat.length(delta), torch.inf)

    def shrink(self, delta: Tensor, length: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Signed steps within a box that is a little smaller than what was found, and smaller again at each success."""
        best, best_length = delta, length
        radius = torch.where(torch.isfinite(length), length, self.threat.length(delta))
        for step in range(steps):
            if self.overdue:
                break
            share = _SHRINK * (1 - step / steps)
            radius = torch.where(torch.isfinite(best_length), best_length * (1 - share), radius * (1 + _SHRINK))
            _, gradient = self.margin(delta)
            size = radius * (1 - step / steps)
            moved = delta - _column(size) * gradient.sign()
            delta = self.within(torch.minimum(torch.maximum(moved, -_column(radius)), _column(radius)))
            reached = self.changed(delta) & (self.threat.length(delta) < best_length)
            best = torch.where(_column(reached), delta, best)
            best_length = torch.where(reached, self.threat.length(delta), best_length)
        return best, best_length


def _witness(
    logits: Logits, x: Tensor, prediction: Tensor, delta: Tensor, succeeded: Tensor, threat: Threat
) -> tuple[Tensor, Tensor]:
    """The radius, rounded up, and the float32 perturbation, both re-evaluated at what is kept."""
    tried = torch.stack([_stored(x, delta * (1 + longer), threat) for longer in _LONGER])
    moved = x + tried.double()
    changed = answer_changed(logits, moved.flatten(0, 1), prediction.repeat(len(tried))).reshape(len(tried), -1)
    first = changed.int().argmax(0)  # of equal values the first
    rows = torch.arange(len(x), device=x.device)
    kept = changed.any(0) & succeeded
    radius = torch.where(kept, threat.distance(x, moved[first, rows]), torch.inf)
    return radius, torch.where(_column(kept), tried[first, rows], 0.0)


def _stored(x: Tensor, delta: Tensor, threat: Threat) -> Tensor:
    """δ in float32, such that x + δ is between the ends."""
    kept = (threat.inside(x + delta) - x).float()
    if threat.clip is not None:
        moved = x + kept.double()
        nearer = torch.where(kept > 0, down(kept), up(kept))
        kept = torch.where((moved < threat.clip[0]) | (moved > threat.clip[1]), nearer, kept)
    return kept


def _column(value: Tensor) -> Tensor:
    """One number for each row, ready to multiply (…, n, d)."""
    return value[..., None, None]
