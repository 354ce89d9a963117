"""The table of linear operators: every one inherits the conformance kit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer
from holdfast.attention import AttentionJacobian, ValueOperator, fold, score_operator
from holdfast.attention.covariances import ValueCovariance
from holdfast.attention.heads import HeadJacobians
from holdfast.attention.mean_split import CommonPart, Coupling, OtherPart
from holdfast.attention.measure import WeightedJacobian
from holdfast.attention.moments import RowMoments, ScoreMoments
from holdfast.attention.query_path import QueryBlocks
from holdfast.linalg import Ball, FunctionJacobian, LinearOperator, MatrixOperator, ProvableOperator
from holdfast.testing import OperatorConformance, ProvableConformance, cases
from holdfast.testing.layers import Case
from tables import concrete, in_the_table


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

    def cases(self) -> Sequence[Case]:
        """All but one: a norm over all heads leaves no head alone."""
        return [case for case in cases() if case.layer.q_norm is None or not case.layer.q_norm.across]

    def build(self, layer: AttentionLayer, x: Tensor) -> HeadJacobians:
        return HeadJacobians(layer, x)


class TestCommonPart(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> CommonPart:
        return CommonPart(AttentionJacobian(layer, x))


class TestOtherPart(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> OtherPart:
        return OtherPart(AttentionJacobian(layer, x))


class TestOtherPartFromTheWhole(TestOtherPart):
    """As for large inputs."""

    @pytest.fixture(autouse=True)
    def _large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("holdfast.attention.mean_split._LARGE", 0)


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


def test_every_operator_is_in_the_table() -> None:
    case = cases()[0]
    built = {type(row.build(case.layer, case.x)) for row in in_the_table(OperatorConformance, globals())}
    assert built == concrete(LinearOperator)


# -- the kit can fail


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
