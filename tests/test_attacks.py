"""The attack is strong: it reaches what many steps of plain ascent reach, and the Jacobian's norm for small radii."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer
from holdfast.attacks import Attack, Objective, ProjectedAscent, objectives
from holdfast.testing import Case, cases, gaussian_case
from holdfast.testing.bounds import dense_jacobian

RADII = (0.1, 1.0)
SEEDS = (0, 1, 2, 8, 11)  # at 8 and 11 plain ascent is slow, at 1 and 8 it has several maxima to choose from


def plain_ascent(
    layer: AttentionLayer, x: Tensor, radii: tuple[float, ...], steps: int = 200, starts: int = 10
) -> Tensor:
    """(e) the best value on the way of G ← eps ∇/‖∇‖ from random starts, for one input."""
    generator = torch.Generator().manual_seed(2024)
    eps = torch.tensor(radii, dtype=torch.float64).reshape(-1, 1, 1)
    direction = torch.randn(starts, len(radii), *x.shape, generator=generator, dtype=torch.float64)
    before, best = layer(x), torch.zeros(len(radii), dtype=torch.float64)
    for _ in range(steps + 1):
        G = eps * direction / direction.norm(dim=(-2, -1), keepdim=True)
        z = (x + G).requires_grad_()
        value = (layer(z) - before).norm(dim=(-2, -1))
        (direction,) = torch.autograd.grad(value.sum(), z)
        best = torch.maximum(best, value.detach().amax(0))
    return best


def assert_reaches_plain_ascent(case: Case) -> None:
    reached = holdfast.attack(case.layer, case.x[0], RADII).lower
    assert bool((reached >= (1 - 1e-9) * plain_ascent(case.layer, case.x[0], RADII)).all())


@pytest.mark.parametrize("seed", SEEDS[3:4])
@pytest.mark.parametrize("row", [1.0, 32**0.5], ids=["unit rows", "long rows"])
@pytest.mark.parametrize("norm", [1.0, 3.0])
def test_reaches_plain_ascent(norm: float, row: float, seed: int) -> None:
    assert_reaches_plain_ascent(gaussian_case(seed, n=16, d=32, h=4, norm=norm, row=row))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("row", [1.0, 8.0], ids=["unit rows", "long rows"])
@pytest.mark.parametrize("norm", [1.0, 3.0])
def test_reaches_plain_ascent_for_a_larger_layer(norm: float, row: float, seed: int) -> None:
    assert_reaches_plain_ascent(gaussian_case(seed, n=64, d=64, h=8, norm=norm, row=row))


@pytest.mark.parametrize("case", cases()[::3], ids=lambda case: case.name)
def test_small_radius_gives_the_norm_of_the_jacobian(case: Case) -> None:
    """The movement is eps ‖DF(x)‖, up to a relative error of second order."""
    eps = 1e-5
    found = holdfast.attack(case.layer, case.x, eps, restarts=2, steps=60).lower
    for i in range(len(case.x)):
        member = case.member(i)
        norm = torch.linalg.matrix_norm(dense_jacobian(member.layer, member.x), ord=2)
        assert eps * norm * (1 - 1e-3) <= found[i] <= eps * norm * (1 + 1e-3)


def test_linear_objective_is_solved_exactly() -> None:
    """With one token there is nothing to attend to, and F is linear."""
    case = next(case for case in cases() if case.name == "one token")
    norm = holdfast.local_lipschitz(case.layer, case.x, side="upper").value
    for eps in (1e-3, 1.0, 1e3):
        found = holdfast.attack(case.layer, case.x, eps).lower
        torch.testing.assert_close(found, eps * norm, rtol=1e-7, atol=0.0)


def test_gradients_of_the_caller_are_left_alone() -> None:
    case = cases()[0]
    x = case.x.clone().requires_grad_()
    layer = AttentionLayer(*(getattr(case.layer, f"w_{name}").clone().requires_grad_() for name in "qkvo"))
    result = holdfast.attack(layer, x, 0.1, restarts=1, steps=12)
    assert not result.lower.requires_grad
    assert not result.witness.requires_grad
    assert x.grad is None
    assert layer.w_q.grad is None
    with torch.no_grad():
        again = holdfast.attack(layer, x, 0.1, restarts=1, steps=12)
    assert torch.equal(again.lower, result.lower)


class Outside(Attack):
    """Returns points far outside the ball, and just outside."""

    name = "outside"

    def _search(self, objective: Objective, eps: Tensor, seed: int) -> Tensor:
        direction = torch.ones_like(objective.centre) / objective.centre.numel() ** 0.5
        return torch.stack([objective.centre + factor * eps * direction for factor in (7.0, 1 + 1e-9, 0.5)])


def test_points_outside_the_ball_are_pulled_in() -> None:
    case = cases()[0].member(0)
    result = Outside()(case.layer, case.x, (0.1, 2.0))
    distance = (result.witness - case.x).norm(dim=(-2, -1))
    assert bool((distance <= torch.tensor([0.1, 2.0])).all())
    # The best of the three is returned, with the value at the point after it was pulled in.
    values = objectives["output"](case.layer, case.x).values(result.witness)
    torch.testing.assert_close(result.lower, values, rtol=1e-10, atol=0.0)
    half = objectives["output"](case.layer, case.x).values(case.x + 0.05 / case.x.numel() ** 0.5)
    assert result.lower[0] > half


def test_seed_decides_the_starts() -> None:
    case = next(case for case in cases() if case.name == "peaked attention")
    runs = [ProjectedAscent(restarts=1, steps=1)(case.layer, case.x, 1.0, seed=seed).witness for seed in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
