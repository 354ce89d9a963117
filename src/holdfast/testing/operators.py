"""What every linear operator must satisfy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.linalg import LinearOperator, ProvableOperator, estimate, estimated_norm, upper
from holdfast.testing.every import over
from holdfast.testing.layers import Case, cases, typical

_ROUNDING = 1e-12
_PROVED = 1e-6  # a proved norm comes from squares, so it keeps half of the digits of what cancels

_every = over(lambda kit: kit.cases())
_typical = over(lambda kit: typical(kit.cases()))


class OperatorConformance(ABC):
    """`mv` is linear, `rmv` is its adjoint, both agree with `dense`, and a batch is a loop.

    Attributes:
        fixed_basis: False where the operator chooses its coordinates, so that only its singular values mean something.
    """

    fixed_basis: ClassVar[bool] = True

    @abstractmethod
    def build(self, layer: AttentionLayer, x: Tensor) -> LinearOperator:
        """The operator for inputs (…, n, d); its batch begins with the batch of x."""

    def cases(self) -> Sequence[Case]:
        """Layers of every kind."""
        return cases()

    @_typical
    def test_mv_is_linear(self, typical: Case) -> None:
        op = self._build(typical)
        v, w = _arguments(op, 2)
        _same(op.mv(2 * v - 3 * w), 2 * op.mv(v) - 3 * op.mv(w), typical)

    @_every
    def test_rmv_is_the_adjoint(self, case: Case) -> None:
        op = self._build(case)
        v, u = _arguments(op, 1)[0], _values(op, 1)[0]
        forward = (op.mv(v) * u).flatten(len(op.batch)).sum(-1)
        backward = (v * op.rmv(u)).flatten(len(op.batch)).sum(-1)
        _same(forward, backward, case)

    @_every
    def test_dense_agrees_with_products(self, case: Case) -> None:
        op = self._build(case)
        v, u = _arguments(op, 1)[0], _values(op, 1)[0]
        matrix, batch = op.dense(), len(op.batch)
        assert matrix.shape == (*op.batch, op.codomain.numel(), op.domain.numel())
        _same(op.mv(v).flatten(batch), (matrix @ v.flatten(batch).unsqueeze(-1)).squeeze(-1), case)
        _same(op.rmv(u).flatten(batch), (matrix.mT @ u.flatten(batch).unsqueeze(-1)).squeeze(-1), case)

    @_every
    def test_squared_is_the_map_and_its_transpose(self, case: Case) -> None:
        op = self._build(case)
        product, v = op.squared(), _arguments(op, 1)[0]
        if product is not None:
            _same(product(v), op.rmv(op.mv(v)), case)

    @_every
    def test_the_estimated_norm_is_that_of_the_estimate(self, case: Case) -> None:
        op = self._build(case)
        slack = _PROVED * case.size if op.squared() is not None else _ROUNDING * case.size
        torch.testing.assert_close(estimated_norm(op, 1e-6), estimate(op).value, rtol=1e-5, atol=slack)

    @_typical
    def test_directions_stand_in_front(self, typical: Case) -> None:
        op = self._build(typical)
        v, u = _arguments(op, 6), _values(op, 6)
        for apply, vectors in ((op.mv, v), (op.rmv, u)):
            loop = torch.stack([apply(vector) for vector in vectors])
            _same(apply(vectors), loop, typical)
            nested = vectors.reshape(2, 3, *vectors.shape[1:])
            _same(apply(nested), loop.reshape(2, 3, *loop.shape[1:]), typical)

    @_every
    def test_batch_equals_loop(self, case: Case) -> None:
        op = self._build(case)
        assert op.batch[: case.x.ndim - 2] == case.x.shape[:-2]
        loop = [self._build(case.member(i)).dense() for i in range(len(case.x))]
        _same(op.dense(), torch.stack(loop), case)

    @_every
    def test_float32_agrees_with_float64(self, case: Case) -> None:
        op, single = self._build(case), self._build(case.float())
        assert single.dtype == torch.float32
        if not self.fixed_basis:
            _same(torch.linalg.svdvals(single.dense()).double(), torch.linalg.svdvals(op.dense()), case, tolerance=1e-5)
            return
        v, u = _arguments(op, 1)[0], _values(op, 1)[0]
        for single_product, expected in ((single.mv(v.float()), op.mv(v)), (single.rmv(u.float()), op.rmv(u))):
            assert single_product.dtype == torch.float32
            _same(single_product.double(), expected, case, tolerance=1e-5)

    @_every
    def test_estimate_is_the_norm_from_below(self, case: Case) -> None:
        op = self._build(case)
        norm_below, norm = estimate(op), torch.linalg.matrix_norm(op.dense(), ord=2)
        assert (norm_below.side, norm_below.guarantee) == ("estimate", "numerical")
        slack = _ROUNDING * case.size
        assert bool((norm_below.value <= norm * (1 + _ROUNDING) + slack).all())
        assert bool((norm_below.value >= norm * (1 - 1e-5) - slack).all())
        assert norm_below.left is not None
        assert norm_below.right is not None
        # The vectors are singular vectors, up to the residual that is stated.
        image = op.mv(norm_below.right).flatten(len(op.batch))
        reached = norm_below.value.unsqueeze(-1) * norm_below.left.flatten(len(op.batch))
        assert bool(((image - reached).norm(dim=-1) <= 1e-6 * norm + slack).all())

    def _build(self, case: Case) -> LinearOperator:
        return self.build(case.layer, case.x)


class ProvableConformance(OperatorConformance):
    """Beyond that, the norm can be proved: the Gram matrix is enclosed, and a part is a part."""

    @abstractmethod
    def build(self, layer: AttentionLayer, x: Tensor) -> ProvableOperator:
        """The operator for inputs (…, n, d); its batch begins with the batch of x."""

    @_every
    def test_upper_is_the_norm_from_above(self, case: Case) -> None:
        op = self.build(case.layer, case.x)
        norm_above, norm = upper(op), torch.linalg.matrix_norm(op.dense(), ord=2)
        assert (norm_above.side, norm_above.guarantee) == ("upper", "proved")
        assert bool((norm_above.value >= norm * (1 - _ROUNDING) - _ROUNDING * case.size).all())
        assert bool((norm_above.value <= norm * (1 + _PROVED) + _PROVED * case.size).all())

    @_typical
    def test_part_is_a_part(self, typical: Case) -> None:
        op = self.build(typical.layer, typical.x)
        matrices, count = op.dense().flatten(0, -3), op.batch.numel()
        for start, stop in ((0, count), (0, 1), (count - 1, count)):
            part = op.part(start, stop)
            assert part.batch == (stop - start,)
            _same(part.dense(), matrices[start:stop], typical)

    @_every
    def test_gram_is_enclosed(self, case: Case) -> None:
        """The eigenvalues are the squared singular values and zeros, up to the error that is stated."""
        op = self.build(case.layer, case.x)
        count = op.batch.numel()
        gram = op.part(0, count).gram()
        side = gram.matrix.shape[-1]
        assert side in (op.domain.numel(), op.codomain.numel())
        assert gram.matrix.shape == (count, side, side)
        assert gram.matrix.dtype == torch.float64
        assert op.doubles >= side * side
        squares = torch.linalg.svdvals(op.dense().flatten(0, -3)).square()
        squares = torch.cat([squares, squares.new_zeros(count, side - squares.shape[-1])], dim=-1)
        scale = gram.scale.square()
        difference = (torch.linalg.eigvalsh(gram.matrix).flip(-1) * scale[:, None] - squares).abs().amax(-1)
        rounding = _ROUNDING * squares[..., 0] + (_ROUNDING * case.size) ** 2
        assert bool((difference <= gram.error * scale + rounding).all())
        assert bool((gram.error * scale <= _PROVED * squares[..., 0] + (_PROVED * case.size) ** 2).all())

    @_typical
    def test_memory_limit_changes_nothing(self, typical: Case) -> None:
        op = self.build(typical.layer, typical.x)
        side = min(op.domain.numel(), op.codomain.numel())
        least = 8 * (op.doubles + 3 * side * side)
        torch.testing.assert_close(upper(op, memory_limit=least).value, upper(op).value, rtol=1e-7, atol=1e-100)


def _arguments(op: LinearOperator, count: int) -> Tensor:
    """Seeded directions (count, *batch, *domain)."""
    return _normal(0, count, *op.batch, *op.domain).to(op.dtype)


def _values(op: LinearOperator, count: int) -> Tensor:
    """Seeded directions (count, *batch, *codomain)."""
    return _normal(1, count, *op.batch, *op.codomain).to(op.dtype)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _same(values: Tensor, expected: Tensor, case: Case, tolerance: float = _ROUNDING) -> None:
    """Equal up to rounding, measured also against what the entries are made of."""
    size = 10 * float(expected.abs().max()) + case.size
    torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance * size)
