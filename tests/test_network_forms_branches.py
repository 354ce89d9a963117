"""Branches of a cube: kinks that cost, kinks that are gained, and ranges where a margin may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from holdfast.compositions.forms import margins_over_box
from holdfast.compositions.forms.branches import Branches, _Leaves
from holdfast.compositions.forms.local import Problem
from holdfast.compositions.forms.region import IndependentBlock, Region
from holdfast.graph import to_network
from holdfast.testing.draw import Dice

SCALE = 1.5


def drawn(seed: int, gains: int, bent: bool) -> tuple[Problem, Region, Callable[[Tensor], Tensor]]:
    """A problem of seven numbers and nine kinks, and the least margin that it leaves open at points (B, 7)."""
    dice, K, P = Dice(seed), 9, 7
    share = torch.Generator().manual_seed(seed)
    sides = dice.normal(P).abs() + 0.1
    sides = sides / sides.norm()
    eye, every = torch.eye(P).double(), torch.arange(P)
    region = Region(sides, eye, eye, 0.0, (IndependentBlock(every, every, slice(0, P)),))
    x, rising = dice.normal(K, P), dice.normal(gains, P)
    reach, far = (SCALE * rows.abs() @ sides * (1 + 1e-12) for rows in (x, rising))
    threshold = reach * (torch.rand(K, generator=share).double() * 2.2 - 1.2)
    problem = replace(
        Problem.of(1.0, dice.normal(P)),
        weight=dice.normal(K).abs(),
        x=x,
        threshold=threshold,
        reach=reach,
        ceiling=threshold + 0.1 * torch.rand(K, generator=share).double(),
        gain=dice.normal(gains).abs(),
        rising=rising,
        begin=far * torch.rand(gains, generator=share).double(),
    )
    A = dice.normal(P, P)
    problem.form = -0.02 * A @ A.mT if bent else problem.form

    def margin(y: Tensor) -> Tensor:
        cost = (y @ problem.x.mT - problem.threshold).clamp(min=0.0) @ problem.weight
        gained = (y @ problem.rising.mT - problem.begin).clamp(min=0.0) @ problem.gain
        bend = ((y @ problem.form) * y).sum(-1)
        value: Tensor = problem.value + y @ problem.gradient + bend - cost + gained
        return value

    return problem, region, margin


def low_points(margin: Callable[[Tensor], Tensor], sides: Tensor) -> Tensor:
    """Points of the cube where a margin is small: corners, and what descends from them and from the inside."""
    P, found = len(sides), []
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * P) * sides
    y = torch.cat([corners, (2 * torch.rand(300, P, generator=torch.Generator().manual_seed(0)).double() - 1) * sides])
    for step in range(60):
        found.append(y)
        y = y.detach().requires_grad_()
        (slope,) = torch.autograd.grad(margin(y).sum(), y)
        y = (y.detach() - 0.3 * 0.93**step * slope.sign() * sides).clamp(-sides, sides)
    return torch.cat(found).detach()


def never_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are divided even where a point shows that no number of them will do."""
    bounded = Branches._bounded

    def hopeful(self: Branches, *args: object) -> object:
        leaves = bounded(self, *args)  # type: ignore[arg-type]
        return replace(leaves, model=torch.full_like(leaves.model, torch.inf))

    monkeypatch.setattr(Branches, "_bounded", hopeful)


@pytest.mark.parametrize("gains", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_enough_branches_prove_what_holds_and_nothing_else(
    seed: int, gains: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its least value moved a bit above zero, a margin of kinks alone is proved; a bit below, it never is."""
    problem, region, margin = drawn(seed, gains, bent=False)
    assert region.sides is not None
    truth = float(margin(low_points(margin, region.sides * SCALE)).min())
    value = problem.value - truth
    lead = 0.3 if gains else 0.02  # slopes of gains are found step by step, and in seven dimensions slowly
    problem.value = value + lead
    found, _, _ = Branches(problem, region, SCALE).least(4096)
    assert 0 < found <= lead
    problem.value = value - 1e-7
    if not gains:  # the least value is at a corner, which shows that branches are in vain
        assert Branches(problem, region, SCALE).least(4096)[2] == 1
    never_give_up(monkeypatch)
    found, _, parts = Branches(problem, region, SCALE).least(1024)
    assert found <= -1e-7 + 1e-12
    assert parts > 1


@pytest.mark.parametrize("seed", range(6))
def test_a_form_beside_the_kinks_is_not_forgotten(seed: int) -> None:
    problem, region, margin = drawn(seed, 3, bent=True)
    assert region.sides is not None
    truth = float(margin(low_points(margin, region.sides * SCALE)).min())
    problem.value -= truth + 1e-7
    found, _, _ = Branches(problem, region, SCALE).least(256)
    assert -0.5 < found <= -1e-7 + 1e-12  # the form is exact at one corner alone


@pytest.mark.parametrize("seed", range(4))
def test_ranges_hold_where_the_margin_may_fail(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range of every branch is met by the points of that branch at which the margin is not positive."""
    problem, region, margin = drawn(seed, 4, bent=False)
    assert region.sides is not None
    points = low_points(margin, region.sides * SCALE)
    problem.value -= float(margin(points).min()) + 0.2
    y = points[margin(points) <= 0]
    assert len(y) > 50
    seen, checked, shorter = y @ problem.x.mT, 0, 0
    shortened = Branches._shortened

    def watched(self: Branches, *args: object) -> object:
        nonlocal checked, shorter
        leaves = shortened(self, *args)  # type: ignore[arg-type]
        for state, low, high in zip(leaves.state, leaves.low, leaves.high, strict=True):
            inside = ((state >= 0) | (seen <= problem.ceiling)) & ((state <= 0) | (seen >= problem.threshold))
            own = seen[inside.all(-1)]
            assert bool((own >= low - 1e-9).all() & (own <= high + 1e-9).all())
            checked += len(own)
            shorter += int((high - low < 1.9 * problem.reach).sum())
        return leaves

    monkeypatch.setattr(Branches, "_shortened", watched)
    never_give_up(monkeypatch)
    assert Branches(problem, region, SCALE).least(64)[0] <= -0.2 + 1e-9
    assert checked > 50
    assert shorter > 0


@pytest.mark.parametrize("seed", range(3))
def test_lines_of_any_multipliers_lie_below_the_margin(seed: int) -> None:
    """On the points of their branch, where two or three kinks are decided."""
    problem, region, margin = drawn(seed, 4, bent=False)
    assert region.sides is not None
    dice, B, K = Dice(seed), 40, len(problem.weight)
    state = dice.integers(-1, 2, (B, K)).double() * (dice.integers(0, 3, (B, K)) == 0)
    low, high = -problem.reach.expand(B, K), problem.reach.expand(B, K)
    eta, alpha = dice.normal(B, K).abs(), dice.normal(B, 4).abs().clamp(max=1.0)
    nothing = torch.zeros(B).double()
    leaves = _Leaves(state, low, high, eta, alpha, nothing, nothing, nothing)
    lines = Branches(problem, region, SCALE)._lines(leaves, eta, alpha)
    points = low_points(margin, region.sides * SCALE)
    seen, truth, checked = points @ problem.x.mT, margin(points), 0
    for i in range(B):
        inside = ((state[i] >= 0) | (seen <= problem.ceiling)) & ((state[i] <= 0) | (seen >= problem.threshold))
        inside = inside.all(-1)
        line = lines.value[i] + points[inside] @ lines.slope[i]
        assert bool((line <= truth[inside] + 1e-12).all())
        checked += bool(inside.any())
    assert checked > 20


@pytest.mark.parametrize("slope", [-1.5, -2.6])
def test_what_a_margin_gains_counts(slope: float) -> None:
    """1 + slope·y + 2 relu(y - 1/2) on |y| <= 1: least at 1/2 where it is positive or not, and not at its far end."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2)).double().eval()
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0], [1.0]]).double(), torch.tensor([5.0, -0.5]).double()
    model[2].weight.data = torch.tensor([[slope, 2.0], [0.0, 0.0]]).double()
    model[2].bias.data = torch.tensor([1 - 5 * slope, 0.0]).double()
    lower = torch.full((1, 1), -1.0).double()
    converted = to_network(model, torch.zeros(1, 1).double())
    bounds = margins_over_box(converted.network, lower, -lower)
    y = torch.linspace(-1, 1, 2001).double().unsqueeze(-1)
    with torch.no_grad():
        truth = float((model(y)[:, 0] - model(y)[:, 1]).min())
    assert bounds.least <= truth + 1e-9
    assert (bounds.least > 0) == (truth > 0) == (slope == -1.5)
