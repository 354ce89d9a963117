"""A kink at zero: its rest is bounded on the side to which the unit must move."""

from __future__ import annotations

import pytest
import torch

from holdfast.compositions.forms.kinds import local_at
from holdfast.compositions.forms.kinks import Kinks
from holdfast.compositions.forms.local import Problem, Rests, Size
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.units import Entries
from holdfast.layers import WindowMax
from holdfast.linalg import Ball


@pytest.mark.parametrize("slopes", [(0.0, 1.0), (-1.0, 1.0)], ids=["relu", "abs"])
@pytest.mark.parametrize("at", [0.5, -0.5])
@pytest.mark.parametrize("rise", [True, False], ids=["up", "down"])
def test_what_lies_beyond_first_order_counts_on_its_side(at: float, slopes: tuple[float, float], rise: bool) -> None:
    """To first order the unit moves by 1/8 at most, and beyond that by up to 1, to one side alone."""
    left, right = slopes
    unit = Kinks(torch.tensor([[at]]).double(), Entries(torch.tensor([True])), slopes)
    unit.covectors(torch.tensor([0]))
    first, beyond, nothing = torch.full((1,), 0.125).double(), torch.ones(1).double(), torch.zeros(1).double()
    unit.place(first.unsqueeze(0), first)
    low, high = (nothing, beyond) if rise else (beyond, nothing)
    region = Region.of(Ball.exact(torch.eye(1).double()), None)
    unit.settle(Size.of(region, 1.0), Rests(low, high, nothing), 1.125)
    least, most = unit.range(unit.prepare(torch.ones(1, 1, 1).double()), None)

    h = torch.linspace(-0.125 - float(low), 0.125 + float(high), 201).double()
    t = at + h
    bent = torch.where(t > 0, right * t, left * t) - torch.where(h.new_tensor(at) > 0, right * at, left * at)
    rest = bent - (right if at > 0 else left) * h
    assert bool((-least - 1e-12 <= rest).all())
    assert bool((rest <= most + 1e-12).all())
    crosses = (at < 0) == rise
    assert (float(most) > 0) == crosses


@pytest.mark.parametrize("coefficient", [1.0, -1.0], ids=["gains", "costs"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_of_a_maximum_is_below_it(seed: int, coefficient: float) -> None:
    """Windows of four and three entries, all of which may win, some in both windows."""
    draw = torch.Generator().manual_seed(seed)
    u = 0.3 * torch.randn(1, 5, generator=draw).double()
    piece = WindowMax(torch.tensor([[[0, 1, 2, 3], [2, 3, 4, -1]]]), (1, 5))
    local = local_at(piece, u)
    mu = coefficient * torch.rand(1, 1, 2, generator=draw).double()
    pulled, _ = local.pull(mu)
    named, error = local.covectors(torch.tensor([0]))
    assert not bool(error.any())
    C = named.whole
    X, nothing = C.flatten(1), torch.zeros(len(C)).double()
    local.place(X, X.norm(dim=1))
    region = Region.of(Ball.exact(torch.eye(5).double()), None)
    moves = local.settle(Size.of(region, 1.0), Rests(nothing, nothing, nothing), 1.0)
    prepared = local.prepare(mu)
    (low,), (high,) = local.range(prepared, None)
    problem = Problem.of(0.0, torch.zeros(5).double())
    local.take(prepared, 0, problem, None)

    b = torch.randn(4000, 5, generator=draw).double()
    b = b / b.norm(dim=1, keepdim=True) * torch.rand(4000, 1, generator=draw).double()
    moved = piece.value(u + b.unsqueeze(1)) - piece.value(u)
    rest = (moved * mu).sum((1, 2)) - b @ pulled.flatten()
    costs = (b @ problem.x.mT - problem.threshold).clamp(min=0.0) @ problem.weight
    gains = (b @ problem.rising.mT - problem.begin).clamp(min=0.0) @ problem.gain
    assert float((-costs + gains - rest).max()) <= 1e-12
    assert -float(low) - 1e-12 <= float(rest.min()) <= float(rest.max()) <= float(high) + 1e-12
    assert float(moved.flatten(1).norm(dim=1).max()) <= moves
    assert (coefficient > 0) == bool((rest > 1e-3).any())
