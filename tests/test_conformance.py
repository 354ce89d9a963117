"""The table: every registered bound, every operator and every objective inherits the conformance kit."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer, Bound
from holdfast.attacks import Attack, Objective, ProjectedAscent, objectives
from holdfast.attention import AttentionJacobian, ValueOperator, fold, score_operator
from holdfast.attention.covariances import ValueCovariance
from holdfast.attention.heads import HeadJacobians
from holdfast.attention.mean_split import CommonPart, Coupling, OtherPart
from holdfast.attention.measure import WeightedJacobian
from holdfast.attention.moments import RowMoments, ScoreMoments
from holdfast.attention.query_path import QueryBlocks
from holdfast.bounds import bounds
from holdfast.bounds.arithmetic import Arithmetic
from holdfast.bounds.base import Evaluation
from holdfast.linalg import Array, Ball, FunctionJacobian, LinearOperator, MatrixOperator, ProvableOperator
from holdfast.registry import Registry
from holdfast.testing import (
    AttackConformance,
    BoundConformance,
    OperatorConformance,
    ProvableConformance,
    cases,
)
from holdfast.testing.layers import Case

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

    def test_order_of_tokens_does_not_matter(self, typical: Case) -> None:
        """Much: of keys with equal probabilities the first one is taken."""
        order = [(i + 1) % typical.x.shape[-2] for i in range(typical.x.shape[-2])][::-1]
        self._same(typical.permuted(order), self._values(typical, (0.03, 1.0)), (0.03, 1.0), tolerance=1e-3)


class TestYudinBall(BoundConformance):
    def name(self) -> str:
        return "yudin-ball"


class TestBest(BoundConformance):
    def name(self) -> str:
        return "best"


# -- operators


class TestAttentionJacobian(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> AttentionJacobian:
        return AttentionJacobian(layer, x)


class TestValueOperator(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> ValueOperator:
        return ValueOperator(layer, x)


class TestScoreOperator(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> ProvableOperator:
        return score_operator(layer, x)


class TestQueryBlocks(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> QueryBlocks:
        return QueryBlocks.of(fold(layer, x), layer.residual)


class TestWeightedJacobian(OperatorConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> WeightedJacobian:
        return WeightedJacobian(layer, x, 1 / torch.arange(1, x.shape[-2] + 1).to(x))


class TestHeadJacobians(OperatorConformance):
    fixed_basis = False

    def build(self, layer: AttentionLayer, x: Tensor) -> HeadJacobians:
        return HeadJacobians(layer, x)


class TestCommonPart(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> CommonPart:
        return CommonPart(AttentionJacobian(layer, x))


class TestOtherPart(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> OtherPart:
        return OtherPart(AttentionJacobian(layer, x))


class TestCoupling(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> Coupling:
        return Coupling(AttentionJacobian(layer, x))


class TestScoreMoments(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> ScoreMoments:
        f = fold(layer, x)
        return ScoreMoments(f.query_rows, f.key_rows, f.p)


class TestRowMoments(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> RowMoments:
        f = fold(layer, x)
        return RowMoments(f.query_rows, f.p, own=fold(layer.replace(rotary=None), x).key)


class TestScoreMomentsNotCentred(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> ScoreMoments:
        f = fold(layer, x)
        return ScoreMoments(f.query_rows, f.key_rows, f.p, centred=False)


class TestRowMomentsNotCentred(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> RowMoments:
        f = fold(layer, x)
        return RowMoments(f.v, f.p, centred=False)


class TestValueCovariance(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> ValueCovariance:
        f = fold(layer, x)
        return ValueCovariance(f.value_rows, f.p)


class TestMatrixOperator(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> MatrixOperator:
        return MatrixOperator(x)


class TestEnclosedMatrix(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> MatrixOperator:
        return MatrixOperator(Ball(x, x.abs() * 2.0**-50))


class TestFunctionJacobian(OperatorConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> FunctionJacobian:
        return FunctionJacobian(layer, x, batch_dims=x.ndim - 2)


# -- attacks


class TestOutputAttack(AttackConformance):
    def attack(self, steps: int) -> Attack:
        return ProjectedAscent(restarts=2, steps=steps)

    def objective(self) -> str:
        return "output"


class TestDelta2Attack(AttackConformance):
    def attack(self, steps: int) -> Attack:
        return ProjectedAscent(restarts=2, steps=steps)

    def objective(self) -> str:
        return "delta-2"


class TestDelta21Attack(AttackConformance):
    def attack(self, steps: int) -> Attack:
        return ProjectedAscent(restarts=2, steps=steps)

    def objective(self) -> str:
        return "delta-21"


class TestScoresAttack(AttackConformance):
    def attack(self, steps: int) -> Attack:
        return ProjectedAscent(restarts=2, steps=steps)

    def objective(self) -> str:
        return "scores"


class TestDelta22Attack(AttackConformance):
    def attack(self, steps: int) -> Attack:
        return ProjectedAscent(restarts=2, steps=steps)

    def objective(self) -> str:
        return "delta-22"


# -- nothing is missing from the table

Kind = TypeVar("Kind")


def in_the_table(kit: type[Kind]) -> list[Kind]:
    rows = [item for name, item in globals().items() if name.startswith("Test") and issubclass(item, kit)]
    return [row() for row in rows]


def concrete(base: type[Kind]) -> set[type[Kind]]:
    """Every concrete class of the package below `base`."""
    below = [base, *(sub for direct in base.__subclasses__() for sub in concrete(direct))]
    return {kind for kind in below if not inspect.isabstract(kind) and kind.__module__.startswith("holdfast.")}


def own_bounds() -> list[Bound]:
    return [bound for bound in bounds.values() if type(bound).__module__.startswith("holdfast.")]


def test_every_registered_bound_is_in_the_table() -> None:
    names = [row.name() for row in in_the_table(BoundConformance)]
    assert sorted(names) == sorted(bound.name for bound in own_bounds())


def test_every_operator_is_in_the_table() -> None:
    case = cases()[0]
    built = {type(row.build(case.layer, case.x)) for row in in_the_table(OperatorConformance)}
    assert built == concrete(LinearOperator)


def test_every_objective_and_attack_is_in_the_table() -> None:
    rows = in_the_table(AttackConformance)
    pairs = {(type(row.attack(1)), row.objective()) for row in rows}
    assert pairs == {(attack, name) for attack in concrete(Attack) for name in objectives}


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


class NotTransposed(LinearOperator):
    """An operator whose `rmv` forgets the transpose."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        super().__init__(matrix.shape[:-2], matrix.shape[-1:], matrix.shape[-2:-1], matrix)

    def mv(self, v: Tensor) -> Tensor:
        return (self._matrix @ v.unsqueeze(-1)).squeeze(-1)

    rmv = mv


class KitForNotTransposed(OperatorConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> NotTransposed:
        return NotTransposed(x)


def test_kit_catches_a_wrong_transpose() -> None:
    square = cases()[0]
    kit = KitForNotTransposed()
    kit.test_mv_is_linear(square)
    with pytest.raises(AssertionError):
        kit.test_rmv_is_the_adjoint(square)
    with pytest.raises(AssertionError):
        kit.test_dense_agrees_with_products(square)
