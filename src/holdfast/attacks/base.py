"""What every attack shares: it checks, promotes, searches, and then trusts only what it can re-evaluate."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, final

import torch
from torch import Tensor

from holdfast.attacks.objectives import Objective, objectives
from holdfast.attention import AttentionLayer, checks
from holdfast.attention.movement import distance
from holdfast.errors import SoundnessError
from holdfast.linalg import Ball
from holdfast.radii import GivenRadii, as_numbers, check_radii
from holdfast.results import AttackResult


class Attack(ABC):
    """Searches for a perturbation within eps that makes an objective large. A method writes `_search`."""

    name: ClassVar[str]

    @abstractmethod
    def _search(self, objective: Objective, eps: Tensor, seed: int) -> Tensor:
        """Perturbed inputs (r, e, b…, n, d), heads before n where the objective has them; eps is (e, 1…)."""

    @final
    def __call__(
        self,
        layer: AttentionLayer,
        x: Tensor,
        eps: GivenRadii,
        *,
        objective: str = "output",
        seed: int = 0,
    ) -> AttackResult:
        """Attacks, and returns the best witness with the value that was re-evaluated at it, rounded down.

        Args:
            layer: the layer.
            x: (…, n, d) the points, float32 or float64; the search runs in float64.
            eps: one radius, or a sequence of them.
            objective: what to maximise.
            seed: for everything random.
        """
        began = time.perf_counter()
        checks.input(layer, x)
        eps = as_numbers(eps)
        radii = check_radii(eps)
        goal = objectives[objective](layer.double(), x.detach().double())
        centre = goal.centre
        eps_ = centre.new_tensor(radii).reshape(-1, *(1 for _ in centre.shape))
        with torch.no_grad():
            points = self._search(goal, eps_, seed)
            witnesses = _pull_inside(centre, points, eps_)
            reached = goal.values(Ball.exact(witnesses)).lower.clamp(min=0)
            best = reached.argmax(0)
            index = best[None, ..., None, None].expand(1, *witnesses.shape[1:])
            witness = witnesses.gather(0, index).squeeze(0)
            lower = reached.amax(0)
        scalar = not isinstance(eps, Sequence)
        tail = centre.ndim - 2
        return AttackResult(
            lower=lower.squeeze(0) if scalar else lower.movedim(0, -1),
            witness=witness.squeeze(0) if scalar else witness.movedim(0, tail),
            objective=objective,
            eps=radii[0] if scalar else tuple(radii),
            guarantee="proved",
            seconds=time.perf_counter() - began,
        )


def _pull_inside(centre: Tensor, points: Tensor, eps: Tensor) -> Tensor:
    """Moves points towards the centre until their exact distance is at most eps."""
    for shrink in (0.0, *(2.0**-k for k in range(50, -1, -2)), 1.0):
        length = distance(centre, points).upper[..., None, None]
        # The computed distance of a point from itself is rounded up, above a radius of zero.
        inside = (length <= eps) | (points == centre).all(-1, keepdim=True).all(-2, keepdim=True)
        if bool(inside.all()):
            return points
        points = torch.where(inside, points, centre + (points - centre) * ((eps / length).clamp(max=1) * (1 - shrink)))
    raise SoundnessError("an attack left the ball and could not be pulled back; please report the layer and the input")
