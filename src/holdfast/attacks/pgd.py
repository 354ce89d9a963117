"""Projected ascent over the ball."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.attacks.base import Attack
from holdfast.attacks.objectives import Objective
from holdfast.linalg import estimate

_LONGEST_STEP = 64.0  # in units of eps: with it the next point is nearly eps · gradient / ‖gradient‖


@final
class ProjectedAscent(Attack):
    """Monotone projected gradient ascent with a step length for every restart, all restarts and inputs at once.

    A step that gains is kept and the next is twice as long, up to the conditional-gradient step eps ∇/‖∇‖; one that
    loses is undone and halved. Starts: ± the top singular vector of the linearised objective, then random directions.

    Args:
        restarts: starting points for every input.
        steps: gradient evaluations for every start.
    """

    name = "pgd"

    def __init__(self, restarts: int = 10, steps: int = 100) -> None:
        self.restarts, self.steps = restarts, steps

    def _search(self, objective: Objective, eps: Tensor, seed: int) -> Tensor:
        centre = objective.centre
        best = centre + eps * self._directions(objective, seed).unsqueeze(1)
        value, gradient = _climb(objective, best)
        step = torch.full_like(value, _LONGEST_STEP)
        for _ in range(self.steps):
            trial = centre + _onto_ball(best - centre + eps * step[..., None, None] * gradient, eps)
            trial_value, trial_gradient = _climb(objective, trial)
            gained = trial_value > value
            value = torch.where(gained, trial_value, value)
            best = torch.where(gained[..., None, None], trial, best)
            gradient = torch.where(gained[..., None, None], trial_gradient, gradient)
            step = torch.where(gained, (2 * step).clamp(max=_LONGEST_STEP), step / 2)
        return best

    def _directions(self, objective: Objective, seed: int) -> Tensor:
        """Unit directions (r, b…, n, d), the same for every input but for the singular vectors."""
        centre = objective.centre
        top = estimate(objective.linear(), tolerance=1e-3, max_iterations=40, seed=seed).right
        assert top is not None
        generator = torch.Generator().manual_seed(seed)
        shape = (max(self.restarts - 2, 0), *centre.shape[-2:])
        random = torch.randn(shape, generator=generator, dtype=torch.float64).to(centre)
        random = random.reshape(shape[0], *(1 for _ in centre.shape[:-2]), *shape[1:]).expand(shape[0], *centre.shape)
        starts = torch.cat([torch.stack([top, -top]), random])[: self.restarts]
        return _unit(starts)


def _climb(objective: Objective, z: Tensor) -> tuple[Tensor, Tensor]:
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
