"""Projected gradient ascent on a classifier's margin in l2 balls, with steps that find their own length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from holdfast.errors import check_counts

Logits = Callable[[Tensor], Tensor]

_MOMENTUM = 0.75
_FEWEST_GAINS = 0.75  # share of a phase's steps that must gain; else the step is halved
_FIRST_PHASE, _PHASE_SHRINKS, _SHORTEST_PHASE = 0.22, 0.03, 0.06  # shares of all steps


@final
@dataclass(frozen=True)
class AutoPgd:
    """Auto-PGD (Croce and Hein 2020) on the lead f_t - f_y of every target t, all at once, each with its own steps.

    From z the ascent leads to t = Π(z + η ∇/‖∇‖), then to Π(z + 0.75 (t - z) + 0.25 (z - z_before)). η starts at twice
    the radius. At the end of each phase η is halved, and the input goes on from its best point, where too few steps of
    the phase gained, or where neither η nor the best point has changed since the phase before.

    Args:
        steps: gradient evaluations.
        targets: classes that are tried for every input, those with the largest logits first.
        restarts: starts; the first is x itself, the others are random.
    """

    steps: int = 50
    targets: int = 3
    restarts: int = 1

    def __post_init__(self) -> None:
        check_counts(**vars(self))

    def __call__(
        self,
        logits: Logits,
        x: Float[Tensor, "b n d"],
        labels: Int64[Tensor, " b"],
        radius: Float[Tensor, " b"],
        seed: int = 0,
    ) -> Bool[Tensor, " b"]:
        """Whether a point was found within the radius whose answer is not the label, or a tie; re-evaluated there.

        Args:
            logits: any differentiable function of (b, n, d) to (b, classes).
            x: the inputs.
            labels: the right answers.
            radius: of the ball around each input.
            seed: of the random starts.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            others = logits(x).scatter(1, labels[:, None], -torch.inf)
        targets = others.topk(min(self.targets, others.shape[1] - 1), dim=1).indices
        count = targets.shape[1]
        centre, answers = x.repeat_interleave(count, 0), labels.repeat_interleave(count)
        r = radius.to(x).repeat_interleave(count)[:, None, None]
        changed = torch.zeros_like(answers, dtype=torch.bool)
        for start in range(self.restarts):
            delta = torch.zeros_like(centre)
            if start:
                random = torch.randn(delta.shape, generator=generator, dtype=torch.float64).to(x)
                delta = r * random / _length(random)
            moved = _within(centre, self._climb(_Lead(logits, answers, targets.flatten()), centre, r, delta), r)
            with torch.no_grad():
                reached = logits(moved)
            rival = reached.scatter(1, answers[:, None], -torch.inf).amax(1)
            inside = _length(moved.double() - centre.double()) <= r.double()
            changed |= inside.flatten() & (rival >= reached.gather(1, answers[:, None]).squeeze(1))
        return changed.reshape(-1, count).any(1)

    def _climb(self, lead: _Lead, x: Tensor, r: Tensor, delta: Tensor) -> Tensor:
        """The perturbation with the largest lead of the target."""
        value, gradient = lead.ascent(x + delta)
        best, best_value, best_gradient = delta, value, gradient
        before, step = delta, 2 * r
        gains = torch.zeros_like(value)
        known_value, halved = value, torch.ones_like(value, dtype=torch.bool)  # at the last end of a phase
        phase, length = 0, max(1, round(_FIRST_PHASE * self.steps))
        for _ in range(self.steps - 1):
            trial = _onto(delta + step * gradient, r)
            trial = _onto(delta + _MOMENTUM * (trial - delta) + (1 - _MOMENTUM) * (delta - before), r)
            before, delta = delta, trial
            last, (value, gradient) = value, lead.ascent(x + delta)
            gains = gains + (value > last)
            gained = value > best_value
            best, best_gradient = _chosen(gained, delta, best), _chosen(gained, gradient, best_gradient)
            best_value = torch.where(gained, value, best_value)
            phase += 1
            if phase == length:
                stuck = (gains < _FEWEST_GAINS * length) | (~halved & (best_value <= known_value))
                step = torch.where(stuck[:, None, None], step / 2, step)
                delta, before = _chosen(stuck, best, delta), _chosen(stuck, best, before)
                gradient, value = _chosen(stuck, best_gradient, gradient), torch.where(stuck, best_value, value)
                known_value, halved, gains = best_value, stuck, torch.zeros_like(gains)
                least = max(1, round(_SHORTEST_PHASE * self.steps))
                phase, length = 0, max(least, length - round(_PHASE_SHRINKS * self.steps))
        return best


@final
@dataclass(frozen=True)
class _Lead:
    """How far the targets are ahead of the right answers."""

    logits: Logits
    answers: Tensor
    targets: Tensor

    def ascent(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The lead at z, and the direction in which it grows fastest."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            logits = self.logits(z)
            lead = (logits.gather(1, self.targets[:, None]) - logits.gather(1, self.answers[:, None])).squeeze(1)
            (gradient,) = torch.autograd.grad(lead.sum(), z)
        return lead.detach(), gradient / _length(gradient)


def _within(x: Tensor, delta: Tensor, r: Tensor) -> Tensor:
    """The point x + δ, drawn in by what its rounding may add."""
    slack = torch.finfo(x.dtype).eps * (16 + _length(x) / r)
    return x + delta * ((r / _length(delta)).clamp(max=1.0) - slack).clamp(min=0.0)


def _onto(delta: Tensor, r: Tensor) -> Tensor:
    return delta * (r / _length(delta)).clamp(max=1.0)


def _chosen(which: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(which[:, None, None], yes, no)


def _length(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    return length.clamp(min=torch.finfo(v.dtype).tiny)
