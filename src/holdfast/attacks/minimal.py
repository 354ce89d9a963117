"""The smallest perturbation that changes a classifier's answer, as far as a search finds it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg.rounding import Ball
from holdfast.movement import distance
from holdfast.network.network import Network
from holdfast.results import Guarantee

Logits = Callable[[Tensor], Tensor]

_HALVINGS = 20  # of the interval on a ray in which the answer changes
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
        guarantee: "proved" if the change was re-evaluated in ball arithmetic, which needs a `Network` of few layers.
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

    From δ the next point is the nearest one to x at which the linearised margin vanishes,

        δ⁺ = ∇m (⟨∇m, δ⟩ - m) / ‖∇m‖²

    (Hasofer and Lind 1974, Rackwitz and Fiessler 1978): its fixed points are the stationary points of the problem. The
    step towards it is halved until ½‖δ‖² + c|m|, c > ‖δ‖/‖∇m‖, decreases (Zhang and Der Kiureghian 1995). At the end
    the answer is followed along the ray of every start. Perturbations are not clipped: they fill the whole l2 ball.

    Args:
        restarts: starts for every target: x itself, then random points as far away as the linearised margin vanishes.
        targets: classes that are tried for every input, those with the largest logits first.
        steps: gradient evaluations for every start.
    """

    restarts: int = 3
    targets: int = 9
    steps: int = 30

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if count < 1:
                raise InputError(f"{name} is {count}; expected at least 1")

    def __call__(self, logits: Logits, x: Tensor, prediction: Int64[Tensor, " b"], seed: int = 0) -> NearestChange:
        """Searches.

        Args:
            logits: a `Network`, or any differentiable function of (b, n, d) to logits (b, classes).
            x: (b, n, d) the inputs.
            prediction: the class of each input; another answer is a change, and so is a tie.
            seed: of the random starts, which are the same for every input.
        """
        began = time.perf_counter()
        x = x.detach().double()
        with torch.no_grad():
            others = logits(x).scatter(1, prediction[:, None], -torch.inf)
        targets = others.topk(min(self.targets, others.shape[1] - 1), dim=1).indices
        starts = self._starts(x, targets.shape[1], seed)
        # One row for each input, target and start.
        points = x[:, None, None].expand_as(starts).flatten(0, 2)
        answers = prediction[:, None, None].expand(starts.shape[:3]).flatten()
        goals = targets[:, :, None].expand(starts.shape[:3]).flatten()
        found = _descend(logits, points, answers, goals, starts.flatten(0, 2), self.steps)
        found, length = _shorten(logits, points, answers, found)
        length, best = length.reshape(len(x), -1).min(1)
        delta = found.reshape(len(x), -1, *x.shape[1:])[torch.arange(len(x)), best]
        radius, perturbation = _witness(logits, x, prediction, delta, torch.isfinite(length))
        proved = isinstance(logits, Network) and bool(_told(logits(Ball.exact(x))).all())
        guarantee: Guarantee = "proved" if proved else "numerical"
        return NearestChange(radius, perturbation, guarantee, time.perf_counter() - began)

    def _starts(self, x: Tensor, targets: int, seed: int) -> Tensor:
        """Directions (b, targets, restarts, n, d): zero, then random ones of length 1."""
        generator = torch.Generator().manual_seed(seed)
        shape = (targets, self.restarts, *x.shape[1:])
        directions = torch.randn(shape, generator=generator, dtype=torch.float64).to(x.device)
        directions /= _length(directions)[..., None, None]
        directions[:, 0] = 0.0
        return directions.expand(len(x), *shape)


def answer_changed(logits: Logits, x: Tensor, prediction: Tensor) -> Tensor:
    """Whether another class has a logit at least as large, (b).

    It is proved by balls if `logits` is a network; where balls are too wide to tell, which those of deep networks are,
    float64 decides, and the other class must lead by more than rounding plausibly hides.
    """
    with torch.no_grad():
        if not isinstance(logits, Network):
            found = logits(x)
            rival = found.scatter(1, prediction[:, None], -torch.inf).amax(1)
            return rival >= found.gather(1, prediction[:, None]).squeeze(1)
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


def _margin(logits: Logits, z: Tensor, answers: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
    """The margin of the answer over the goal at z, and its gradient."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        found = logits(z)
        margin = (found.gather(1, answers[:, None]) - found.gather(1, goals[:, None])).squeeze(1)
        (gradient,) = torch.autograd.grad(margin.sum(), z)
    return margin.detach(), gradient


def _descend(logits: Logits, x: Tensor, answers: Tensor, goals: Tensor, starts: Tensor, steps: int) -> Tensor:
    """δ after the iteration, for every row."""
    margin, gradient = _margin(logits, x, answers, goals)
    delta = starts * _column(margin.abs() / _length(gradient).clamp(min=1e-300))
    margin, gradient = _margin(logits, x + delta, answers, goals)
    step = torch.ones_like(margin)
    for _ in range(steps - 1):
        steepness = _length(gradient).clamp(min=1e-300)
        inner = (gradient * delta).sum((-2, -1))
        onto = gradient * _column((inner - margin) / steepness / steepness)
        trial = delta + _column(step) * (onto - delta)
        c = 2 * torch.maximum(_length(trial), _length(delta)) / steepness
        before = _length(delta).square() / 2 + c * margin.abs()
        tried_margin, tried_gradient = _margin(logits, x + trial, answers, goals)
        gained = _length(trial).square() / 2 + c * tried_margin.abs() < before
        delta = torch.where(_column(gained), trial, delta)
        margin = torch.where(gained, tried_margin, margin)
        gradient = torch.where(_column(gained), tried_gradient, gradient)
        step = torch.where(gained, (2 * step).clamp(max=1), step / 2)
    return delta


def _shorten(logits: Logits, x: Tensor, answers: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """δ scaled to where the answer changes on its ray, and its length; infinite where it does not up to 1.02 δ."""

    def changed(scale: Tensor) -> Tensor:
        with torch.no_grad():
            found = logits(x + _column(scale) * delta)
        rival = found.scatter(1, answers[:, None], -torch.inf).amax(1)
        return rival >= found.gather(1, answers[:, None]).squeeze(1)

    low, high = torch.zeros_like(delta[:, 0, 0]), torch.full_like(delta[:, 0, 0], 1.02)
    succeeded = changed(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = changed(middle)
        low, high = torch.where(inside, low, middle), torch.where(inside, middle, high)
    delta = _column(high) * delta
    return delta, torch.where(succeeded, _length(delta), torch.inf)


def _witness(logits: Logits, x: Tensor, prediction: Tensor, delta: Tensor, succeeded: Tensor) -> tuple[Tensor, Tensor]:
    """The radius, rounded up, and the float32 perturbation, both re-evaluated at what is kept."""
    tried = torch.stack([delta * (1 + longer) for longer in _LONGER]).float()
    moved = x + tried.double()
    changed = answer_changed(logits, moved.flatten(0, 1), prediction.repeat(len(tried))).reshape(len(tried), -1)
    first = changed.int().argmax(0)  # of equal values the first
    rows = torch.arange(len(x), device=x.device)
    kept = changed.any(0) & succeeded
    radius = torch.where(kept, distance(x, moved[first, rows]).upper, torch.inf)
    return radius, torch.where(_column(kept), tried[first, rows], 0.0)


def _length(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1))
    return length


def _column(value: Tensor) -> Tensor:
    """One number for each row, ready to multiply (…, n, d)."""
    return value[..., None, None]
