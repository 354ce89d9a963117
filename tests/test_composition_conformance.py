"""The table of compositions: every registered one inherits the conformance kit."""

from __future__ import annotations

import pytest
import torch

from holdfast.compositions import Composition, compositions
from holdfast.compositions.base import Curve
from holdfast.layers import Mlp
from holdfast.network import Head, Network
from holdfast.network.centre import Centre
from holdfast.testing import CompositionConformance, network_cases


class TestLofast(CompositionConformance):
    def name(self) -> str:
        return "lofast"


class TestGains(CompositionConformance):
    def name(self) -> str:
        return "gains"


class TestLayerwise(CompositionConformance):
    def name(self) -> str:
        return "layerwise"


class TestEndToEnd(CompositionConformance):
    def name(self) -> str:
        return "end-to-end"


class TestMarginGradient(CompositionConformance):
    def name(self) -> str:
        return "margin-gradient"


class TestTelescoped(CompositionConformance):
    def name(self) -> str:
        return "telescoped"


class TestForms(CompositionConformance):
    def name(self) -> str:
        return "forms"


class TestBest(CompositionConformance):
    def name(self) -> str:
        return "best"

    def test_no_other_composition_reaches_farther(self) -> None:
        for kit in table():
            for case in network_cases():
                if compositions[kit.name()].refusal(case.network) is None:
                    most = self._numerical(case).radius * (1 + 2 * self._precision())
                    assert bool((kit._numerical(case).radius <= most).all()), (kit, case.name)


def table() -> list[CompositionConformance]:
    return [row() for row in CompositionConformance.__subclasses__() if row.__name__.startswith("Test")]


def test_every_registered_composition_is_in_the_table() -> None:
    own = [method.name for method in compositions.values() if type(method).__module__.startswith("holdfast.")]
    assert sorted(row.name() for row in table()) == sorted(own)


def test_telescoped_pays_for_the_fourth_order() -> None:
    """gelu(t) = t/2 + t²/√(2π) - t⁴/(6√(2π)) + …: it falls below its cubic polynomial, to -0.16997 at t = -0.7518."""
    one, none = torch.ones(1, 1).double(), torch.zeros(1).double()
    head = Head(torch.tensor([[1.0], [0.0]]).double(), torch.tensor([1.0, 0.0]).double())
    network = Network([Mlp(one, none, "gelu", one, none)], head)
    method = compositions["telescoped"]
    assert isinstance(method, Composition)
    margin = method.curve(Centre(network, torch.zeros(1, 1, 1)))(torch.tensor([0.8]).double())
    assert 0.5 < float(margin) <= 1 - 0.16997


# -- the kit can fail


class Optimist(Composition):
    """min_j m_j - eps ‖∇m_j(X)‖, which is the margin to first order and no bound of it."""

    name, cost, reference = "optimist", "one backward pass", "none"

    def refusal(self, network: Network) -> str | None:
        return None

    def _curve(self, centre: Centre) -> Curve:
        return lambda eps: centre.margin * (1 - eps / centre.first_order_radius)


class KitForOptimist(CompositionConformance):
    def name(self) -> str:
        return "optimist"


def test_kit_catches_a_radius_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compositions, "_items", compositions._items | {"optimist": Optimist()})
    kit = KitForOptimist()
    kit.test_metadata_is_complete()
    kit.test_a_radius_is_where_the_margin_ends()
    kit.test_not_above_the_exact_radius()
    with pytest.raises(AssertionError, match="is above"):
        kit.test_margins_are_lower_bounds_and_do_not_increase()


def test_kit_catches_a_radius_of_one_percent_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    class More(Optimist):
        def _curve(self, centre: Centre) -> Curve:
            return lambda eps: centre.margin * (1 - 0.99 * eps / centre.first_order_radius)

    monkeypatch.setattr(compositions, "_items", compositions._items | {"optimist": More()})
    with pytest.raises(AssertionError, match="2 of 2 cases fail\n  linear: "):
        KitForOptimist().test_not_above_the_exact_radius()
