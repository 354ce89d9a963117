"""What is not a number, or infinite, is the worst case: no bound and no margin gains by it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from certify_cases import WIDTH, linear_network
from holdfast.compositions import Composition, certify_inputs, compositions
from holdfast.compositions.base import smallest_margin
from holdfast.compositions.telescoped import composition as telescoped
from holdfast.layers.linear.piece import Affine
from holdfast.linalg.arithmetic import Numerical, Proved
from holdfast.linalg.curves import Curve, Grid
from holdfast.network.centre import Centre
from holdfast.network.network import Head, Network
from holdfast.network.site import Site

WORST = (-math.inf, math.nan)
NO_BOUND = (-math.inf, -1.0, math.nan, math.inf)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def centre(margins: Tensor) -> Any:
    """A centre that predicts class 0."""
    return SimpleNamespace(margins=margins.unsqueeze(0), prediction=torch.tensor([0]))


@pytest.mark.parametrize("worst", WORST)
@pytest.mark.parametrize("own", [math.inf, 0.0, math.nan])
def test_the_worst_margin_of_another_class_stays_the_worst(worst: float, own: float) -> None:
    assert smallest_margin(centre(doubles(own, 1.0, 2.0)), doubles(math.inf, 0.25, 0.25)).item() == pytest.approx(0.75)
    for lost in (0.0, 1.0, math.inf, math.nan):
        assert not smallest_margin(centre(doubles(own, 1.0, worst)), torch.full((1, 3), lost).double()).item() > 0


@pytest.mark.parametrize("lost", NO_BOUND)
def test_what_is_no_loss_leaves_nothing(lost: float) -> None:
    for margin in (1.0, math.inf):
        assert not smallest_margin(centre(doubles(math.inf, margin, 2.0)), doubles(0.0, lost, 0.0)).item() > 0


class Claimed(Composition):
    """A composition that claims whatever margins it is given."""

    name, cost, reference = "claimed", "none", "none"

    def __init__(self, *margins: float) -> None:
        self.margins = doubles(*margins)

    def refusal(self, network: Network) -> str | None:
        return None

    def _curve(self, centre: Centre) -> Any:
        return lambda eps: self.margins


def test_a_curve_is_positive_only_where_it_is_a_finite_number() -> None:
    at = Centre(linear_network(), torch.randn(5, 1, WIDTH, generator=torch.Generator().manual_seed(0)))
    found = Claimed(math.nan, -math.inf, math.inf, -2.0, 0.5).curve(at)(torch.ones(5).double())
    assert found.tolist() == [-math.inf, -math.inf, -math.inf, -2.0, 0.5]
    for margin in (math.nan, math.inf, -math.inf):
        assert Claimed(*[margin] * 5)(at).radius.tolist() == [0.0] * 5


@pytest.mark.parametrize("worst", WORST)
def test_telescoped_gains_nothing_by_the_worst(worst: float, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = {"gradient": torch.zeros(1, 3, 2), "hessian": torch.zeros(1, 3, 2, 2), "twist": torch.zeros(1, 3, 2, 2, 2)}
    at: dict[str, Any] = {name: tensor.double() for name, tensor in flat.items()}

    def curve(margins: Tensor, lost: float) -> float:
        left_out = lambda eps: torch.full((1, 3), lost).double()  # noqa: E731
        expansion = SimpleNamespace(**at, margins=margins[None], prediction=torch.tensor([0]), left_out=left_out)
        monkeypatch.setattr(telescoped, "_expansion", lambda centre: expansion)
        centre = SimpleNamespace(x=torch.zeros(1, 1, 2), a=Proved())
        curve = telescoped.Telescoped()._curve(centre)  # type: ignore[arg-type]
        return float(curve(doubles(0.5)))

    assert curve(doubles(0.0, 1.0, 2.0), 0.25) == pytest.approx(0.75)
    assert not curve(doubles(0.0, 1.0, worst), 0.25) > 0
    for lost in NO_BOUND:
        assert not curve(doubles(0.0, 1.0, 2.0), lost) > 0


@pytest.mark.parametrize("bound", NO_BOUND)
def test_what_bounds_nothing_is_infinite(bound: float) -> None:
    grid = Grid(lambda: doubles(1.0), doubles(10.0))
    assert Curve(grid, lambda rho: torch.full_like(rho, bound))(grid.level(doubles(2.0)[None])).item() == math.inf
    site = Site(
        Affine(torch.eye(3), torch.zeros(3)),
        torch.ones(1, 2, 3).double(),
        doubles(bound),
        lambda: doubles(1.0),
        Numerical(),
    )
    assert not site.reach(doubles(1.0)[None]).item() < math.inf
    assert not site.own_reach(doubles(1.0)[None]).item() < math.inf
    rho = doubles(1.0, 2.0)[None]
    assert site._around(lambda a, u, radii: torch.full_like(radii, bound))(rho).tolist() == [[math.inf, math.inf]]


@pytest.mark.parametrize("method", sorted(compositions))
@pytest.mark.parametrize("size", [1e308, 1e200])
def test_logits_that_overflow_prove_nothing(method: str, size: float) -> None:
    weight = size * torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
    stage = Affine(1e150 * torch.eye(2).double(), torch.zeros(2))
    network = Network((stage,), Head(weight, torch.zeros(3).double()))
    (found,) = certify_inputs(network, torch.ones(1, 1, 2), method=method)
    assert found.radius == 0.0
    assert not found.decided
