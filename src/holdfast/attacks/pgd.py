"""Projected ascent over the ball."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

import torch
from torch import Tensor

from holdfast.attacks.base import Attack
from holdfast.attacks.objectives import Objective
from holdfast.linalg import estimate

_LONGEST_STEP = 4.0  # in units of eps: with it the next point is nearly eps · gradient / ‖gradient‖
_GROWTH = 1.2  # of a step that gained; slower than the halving of one that lost, so that momentum can build up
_TRIED, _TRIAL = 4, 10  # starts that are tried for each that goes on, and for how many steps
_HALVING = 50  # steps after which the better half goes on: by then most starts have met


@final
class ProjectedAscent(Attack):
    """Monotone projected gradient ascent with momentum and a step length for every start, all inputs at once.

    From the best point z a gradient step leads to t = Π(z + eps · step · ∇/‖∇‖); the trial is t + m (t - t_before),
    projected, where m = a/(a+3) grows with the number a of gains in a row (Nesterov 1983). A trial that gains is kept;
    one that loses is undone, halves the step and drops the momentum (restarts as in O'Donoghue and Candès 2015).

    Starts: ± the top singular vector of the linearised objective, then random directions. Four times as many as
    `restarts` are tried for 10 steps; the best `restarts` of each input go on, and after 50 steps the better half.
    This does not depend on `steps`, so more steps are never worse.

    Args:
        restarts: starts for every input that go beyond the trial; that many are held in memory at once.
        steps: gradient evaluations for every start.
    """

    name = "pgd"

    def __init__(self, restarts: int = 10, steps: int = 100) -> None:
        self.restarts, self.steps = restarts, steps

    def _search(self, objective: Objective, eps: Tensor, seed: int) -> Tensor:
        directions = self._directions(objective, seed).unsqueeze(1)
        tried = []
        for first in range(0, len(directions), self.restarts):
            start = _start(objective, eps, directions[first : first + self.restarts])
            tried.append(_climb(objective, eps, start, min(self.steps, _TRIAL)))
        climbers = _best_of(tried, self.restarts)
        climbers = _climb(objective, eps, climbers, min(self.steps, _HALVING) - _TRIAL)
        climbers = _best_of([climbers], (self.restarts + 1) // 2)
        return _climb(objective, eps, climbers, self.steps - _HALVING).point

    def _directions(self, objective: Objective, seed: int) -> Tensor:
        """Unit directions (r, b…, n, d), the same for every input but for the singular vectors."""
        centre = objective.centre
        top = estimate(objective.linear(), tolerance=1e-3, max_iterations=40, seed=seed).right
        assert top is not None
        generator = torch.Generator().manual_seed(seed)
        shape = (_TRIED * self.restarts - 2, *centre.shape[-2:])
        random = torch.randn(shape, generator=generator, dtype=torch.float64).to(centre)
        random = random.reshape(shape[0], *(1 for _ in centre.shape[:-2]), *shape[1:]).expand(shape[0], *centre.shape)
        return _unit(torch.cat([torch.stack([top, -top]), random]))


@dataclass(frozen=True)
class _Climbers:
    """Points (r, e, b…, n, d) that climb side by side, with numbers (r, e, b…) for each.

    Attributes:
        point: the best so far.
        value: the objective there.
        gradient: its unit direction there.
        stepped: where the last gradient step that gained led.
        step: length of the next gradient step, in units of eps.
        gains: how many trials gained in a row.
    """

    point: Tensor
    value: Tensor
    gradient: Tensor
    stepped: Tensor
    step: Tensor
    gains: Tensor


def _start(objective: Objective, eps: Tensor, directions: Tensor) -> _Climbers:
    point = objective.centre + eps * directions
    value, gradient = _ascent(objective, point)
    return _Climbers(point, value, gradient, point, torch.full_like(value, _LONGEST_STEP), torch.zeros_like(value))


def _climb(objective: Objective, eps: Tensor, c: _Climbers, steps: int) -> _Climbers:
    centre = objective.centre
    for _ in range(steps):
        stepped = centre + _onto_ball(c.point - centre + eps * c.step[..., None, None] * c.gradient, eps)
        momentum = (c.gains / (c.gains + 3))[..., None, None]
        trial = centre + _onto_ball(stepped - centre + momentum * (stepped - c.stepped), eps)
        value, gradient = _ascent(objective, trial)
        gained = value > c.value
        moved = gained[..., None, None]
        c = _Climbers(
            point=torch.where(moved, trial, c.point),
            value=torch.where(gained, value, c.value),
            gradient=torch.where(moved, gradient, c.gradient),
            stepped=torch.where(moved, stepped, c.stepped),
            step=torch.where(gained, (_GROWTH * c.step).clamp(max=_LONGEST_STEP), c.step / 2),
            gains=torch.where(gained, c.gains + 1, 0.0),
        )
    return c


def _best_of(groups: list[_Climbers], count: int) -> _Climbers:
    """The `count` best climbers of each input and radius."""
    index = torch.cat([group.value for group in groups]).topk(count, dim=0).indices

    def pick(name: str) -> Tensor:
        t = torch.cat([getattr(group, name) for group in groups])
        which = index if t.ndim == index.ndim else index[..., None, None].expand(count, *t.shape[1:])
        return t.gather(0, which)

    return _Climbers(*(pick(field.name) for field in fields(_Climbers)))


def _ascent(objective: Objective, z: Tensor) -> tuple[Tensor, Tensor]:
    """The objective at z and the direction of its gradient."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        value = objective.values(z)
        (gradient,) = torch.autograd.grad(value.sum(), z)
    return value.detach(), _unit(gradient)


def _unit(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    unit: Tensor = v / torch.where(length > 0, length, torch.inf)
    return unit


def _onto_ball(move: Tensor, eps: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(move, dim=(-2, -1), keepdim=True)
    return move * (eps / length).clamp(max=1).nan_to_num(nan=1.0)
