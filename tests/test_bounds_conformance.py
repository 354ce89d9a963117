"""The table of bounds: every registered one inherits the conformance kit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from holdfast import AttentionLayer, Bound
from holdfast.attacks import Objective, objectives
from holdfast.attention import AttentionJacobian
from holdfast.bounds import bounds
from holdfast.bounds.base import Evaluation
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.registry import Registry
from holdfast.testing import BoundConformance, cases
from holdfast.testing.layers import Case, typical
from tables import in_the_table

BIBLIOGRAPHY = Path(__file__).parents[1] / "docs" / "references.bib"
OWN_WORK = "holdfast"

# -- bounds


class TestNaive(BoundConformance):
    def name(self) -> str:
        return "naive"


class TestLofastXi(BoundConformance):
    def name(self) -> str:
        return "lofast-xi"


class TestLofast(BoundConformance):
    def name(self) -> str:
        return "lofast"


class TestPlus(BoundConformance):
    def name(self) -> str:
        return "plus"


class TestCovariance(BoundConformance):
    def name(self) -> str:
        return "cov"


class TestSecondOrder(BoundConformance):
    def name(self) -> str:
        return "second-order"


class TestMixed(BoundConformance):
    def name(self) -> str:
        return "mixed"


class TestRows(BoundConformance):
    def name(self) -> str:
        return "rows"


class TestPairs(BoundConformance):
    def name(self) -> str:
        return "pairs"

    def _symmetry(self) -> float:
        """Of keys with equal probabilities the first one is taken, so that the order matters a little."""
        return 1e-3


class TestTaylor(BoundConformance):
    def name(self) -> str:
        return "taylor"


class TestYudinBall(BoundConformance):
    def name(self) -> str:
        return "yudin-ball"


class TestBest(BoundConformance):
    def name(self) -> str:
        return "best"

    def cases(self) -> Sequence[Case]:
        """Some, and all typical ones: it takes the smallest of bounds that are tried with every case."""
        return [case for i, case in enumerate(cases()) if i % 4 == 0 or case in typical(cases())]


# -- nothing is missing from the table


def own_bounds() -> list[Bound]:
    return [bound for bound in bounds.values() if type(bound).__module__.startswith("holdfast.")]


def test_every_registered_bound_is_in_the_table() -> None:
    names = [row.name() for row in in_the_table(BoundConformance, globals())]
    assert sorted(names) == sorted(bound.name for bound in own_bounds())


REFERENCED = [*own_bounds(), *(objectives[name] for name in objectives)]


@pytest.mark.parametrize("item", REFERENCED, ids=[item.name for item in REFERENCED])
def test_reference_is_in_the_bibliography(item: Bound | type[Objective]) -> None:
    keys = re.findall(r"^@\w+\{([^,\s]+),", BIBLIOGRAPHY.read_text(encoding="utf-8"), re.MULTILINE)
    assert keys
    assert len(set(keys)) == len(keys)
    for reference in item.reference.split(";"):
        assert reference.split(",")[0].strip() in {*keys, OWN_WORK}


# -- other packages


def test_other_packages_register_through_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: Registry[int] = Registry("figure", group="holdfast.figures")

    class Entry:
        @staticmethod
        def load() -> None:
            figures.add("theirs")(1)

    asked: list[str] = []
    monkeypatch.setattr("holdfast.registry.entry_points", lambda group: asked.append(group) or [Entry()])
    figures.add("ours")(0)
    assert sorted(figures) == ["ours", "theirs"]
    assert figures["theirs"] == 1
    assert asked == ["holdfast.figures"]


# -- the kit can fail


class FirstOrder(Bound):
    """ε ‖DF(X)‖, which is the movement to first order and no bound of it."""

    name, cost, reference = "first-order", "one norm", OWN_WORK

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return "it has no mask" if layer.mask is None else None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        return Evaluation(a.norm(AttentionJacobian(layer, x)).unsqueeze(-1) * eps, {})


class KitForFirstOrder(BoundConformance):
    def name(self) -> str:
        return "first-order"


def test_kit_catches_a_value_that_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_items", bounds._items | {"first-order": FirstOrder()})
    monkeypatch.setattr(Bound, "_doubt", lambda *_: None)
    kit = KitForFirstOrder()
    masked = next(case for case in cases() if case.name == "mask for each input")
    kit.test_metadata_is_complete()
    kit.test_applies_somewhere_and_refuses_the_rest()
    kit.test_not_below_the_exact_gain(masked)
    kit.test_batch_equals_loop(masked)
    with pytest.raises(AssertionError):
        kit.test_not_below_the_attack(masked)
