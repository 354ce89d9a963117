"""A kink at zero: its rest is bounded on the side to which the unit must move."""

from __future__ import annotations

import pytest
import torch

from holdfast.compositions.forms.kinks import Kinks
from holdfast.compositions.forms.local import Rests, Size
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.units import Entries
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
