"""What every bound must satisfy."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from holdfast.api import attack
from holdfast.attention import AttentionLayer
from holdfast.bounds import Bound, bounds
from holdfast.errors import NotApplicableError
from holdfast.results import BoundResult, Guarantee
from holdfast.testing.layers import Case, cases, changed, parametrize

if TYPE_CHECKING:
    import pytest

RADII = (0.0, 1e-6, 0.03, 1.0, 10.0)
SOME = (0.03, 1.0)  # for what holds at each radius alike
_AGREE = 1e-6  # proved norms lie within about 1e-8 of the true ones
_NOTHING = 1e-100  # what proved arithmetic makes of zero stays far below


class BoundConformance(ABC):
    """A bound is not below what is attained, grows with the radius, and follows the symmetries of attention.

    The tests run over the cases that the bound does not refuse.
    """

    @abstractmethod
    def name(self) -> str:
        """The name under which the bound is registered."""

    @final
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        parametrize(metafunc, self._applicable())

    # -- what it says of itself

    def test_metadata_is_complete(self) -> None:
        bound = self._bound()
        assert bound in bounds.values()
        assert bound.name == self.name()
        assert bound.side == "upper"
        assert bound.scope in ("ball at x", "point", "ball at 0")
        assert bound.guarantees
        for text in (bound.cost, bound.reference, bound.assumptions, type(bound).__doc__):
            assert text is not None
            assert text.strip()

    def test_applies_somewhere_and_refuses_the_rest(self) -> None:
        assert self._applicable()
        for case in cases():
            if case not in self._applicable():
                try:
                    self._call(case)
                except NotApplicableError as error:
                    assert self.name() in str(error)  # noqa: PT017 - the kit does without pytest
                else:
                    raise AssertionError(f"{case.name} was refused and yet bounded")

    def test_result_says_what_it_is(self, typical: Case) -> None:
        for guarantee in self._bound().guarantees:
            result = self._call(typical, SOME, guarantee)
            assert (result.method, result.side, result.guarantee) == (self.name(), "upper", guarantee)
            assert result.scope == self._bound().scope
            assert result.eps == SOME
            assert result.value.dtype == torch.float64
            assert all(bool(torch.isfinite(term).all()) for term in result.terms.values())
            json.dumps(result.to_dict())

    # -- size

    def test_finite_and_not_negative(self, case: Case) -> None:
        value = self._values(case)
        assert bool(torch.isfinite(value).all())
        assert bool((value >= 0).all())

    def test_zero_radius_gives_zero(self, case: Case) -> None:
        value = self._values(case)
        assert RADII[0] == 0
        assert bool((value[..., 0] <= 1e-12 * value[..., -1] + _NOTHING).all())

    def test_monotone_in_eps(self, case: Case) -> None:
        value = self._values(case)
        assert bool((value[..., 1:] >= value[..., :-1] * (1 - 1e-12)).all())

    def test_not_below_the_attack(self, case: Case) -> None:
        assert bool((self._values(case) >= _attained(case)).all())

    def test_not_below_the_exact_gain(self, case: Case) -> None:
        """As eps vanishes, the output moves by eps ‖DF(x)‖, up to a relative error of second order in eps."""
        least = RADII[1]
        assert bool((self._values(case)[..., 1] >= least * _gain(case) * (1 - 1e-6)).all())

    def test_proved_is_above_numerical_and_close(self, typical: Case) -> None:
        if set(self._bound().guarantees) >= {"proved", "numerical"}:
            proved, numerical = (self._values(typical, SOME, each) for each in ("proved", "numerical"))
            assert bool((proved >= numerical * (1 - _AGREE)).all())
            assert bool((proved <= numerical * (1 + 1e-3) + _NOTHING).all())

    # -- shapes and symmetries

    def test_shape_follows_x_and_eps(self, typical: Case) -> None:
        batch, one = typical.x.shape[:-2], typical.member(0)
        assert self._values(typical, SOME).shape == (*batch, len(SOME))
        assert self._values(one, SOME).shape == (len(SOME),)
        assert self._call(typical, 0.3).value.shape == batch
        alone = self._call(one, 0.3)
        assert alone.value.shape == ()
        assert alone.eps == 0.3

    def test_batch_equals_loop(self, typical: Case) -> None:
        loop = torch.stack([self._values(typical.member(i), SOME) for i in range(len(typical.x))])
        self._same(typical, loop)
        nested = Case(typical.name, typical.layer, typical.x.unsqueeze(0))
        self._same(nested, loop.unsqueeze(0))

    def test_order_of_tokens_does_not_matter(self, typical: Case) -> None:
        n = typical.x.shape[-2]
        self._same(typical.permuted([(i + 1) % n for i in range(n)][::-1]), self._values(typical, SOME))

    def test_scales_with_the_values(self, typical: Case) -> None:
        case = _without_residual(typical)
        larger = changed(case.layer, w_o=3 * case.layer.w_o)
        self._same(Case("values times 3", larger, case.x), 3 * self._values(case, SOME))

    def test_unit_of_the_input_does_not_matter(self, typical: Case) -> None:
        """X → cX with W_Q, W_K, W_V → W/c is the same layer, in another unit of length."""
        case, c = _without_residual(typical), 5.0
        maps = {name: getattr(case.layer, name) / c for name in ("w_q", "w_k", "w_v")}
        other = Case("other unit", changed(case.layer, **maps), case.x * c)
        self._same(other, self._values(case, SOME), [c * eps for eps in SOME])

    def test_basis_of_the_input_does_not_matter(self, typical: Case) -> None:
        """X → XU with W → UᵀW for an orthogonal U; the residual needs the output in the same basis."""
        layer, d = typical.layer, typical.layer.d
        U = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
        maps = {name: U.mT @ getattr(layer, name) for name in ("w_q", "w_k", "w_v")}
        if layer.d_out == d:
            maps["w_o"] = layer.w_o @ U
        self._same(Case("turned", changed(layer, **maps), typical.x @ U), self._values(typical, SOME))

    def test_float32_is_computed_in_float64(self, typical: Case) -> None:
        single = typical.float()
        widened = Case(single.name, single.layer.double(), single.x.double())
        assert torch.equal(self._values(single, SOME), self._values(widened, SOME))
        self._same(widened, self._values(typical, SOME), tolerance=1e-3)

    # -- helpers

    def _bound(self) -> Bound:
        return bounds[self.name()]

    def _applicable(self) -> list[Case]:
        return [case for case in cases() if self._bound().refusal(case.layer) is None]

    def _call(
        self, case: Case, eps: float | Sequence[float] = RADII, guarantee: Guarantee | None = None
    ) -> BoundResult:
        chosen = guarantee or self._bound().guarantees[0]
        return self._bound()(case.layer, case.x, eps, guarantee=chosen)

    def _values(self, case: Case, eps: Sequence[float] = RADII, guarantee: Guarantee | None = None) -> Tensor:
        return _value(self._bound(), case, tuple(eps), guarantee or self._bound().guarantees[0])

    def _same(self, case: Case, expected: Tensor, eps: Sequence[float] = SOME, tolerance: float = _AGREE) -> None:
        torch.testing.assert_close(self._values(case, eps), expected, rtol=tolerance, atol=_NOTHING)


@cache
def _value(bound: Bound, case: Case, eps: tuple[float, ...], guarantee: Guarantee) -> Tensor:
    return bound(case.layer, case.x, eps, guarantee=guarantee).value


@cache
def _without_residual(case: Case) -> Case:
    return Case(f"{case.name}, no residual", changed(case.layer, residual=0.0), case.x)


@cache
def _attained(case: Case) -> Tensor:
    """(b, e) what an attack reaches."""
    return attack(case.layer, case.x, RADII, restarts=3, steps=40).lower


@cache
def _gain(case: Case) -> Tensor:
    """(b) ‖DF(x)‖ from the dense Jacobian, by reverse differentiation."""
    members = [case.member(i) for i in range(len(case.x))]
    return torch.stack([torch.linalg.matrix_norm(dense_jacobian(each.layer, each.x), ord=2) for each in members])


def dense_jacobian(layer: AttentionLayer, x: Tensor) -> Tensor:
    """DF(x) for one input (n, d), as a matrix, by reverse differentiation."""
    jacobian: Tensor = torch.func.jacrev(layer)(x)
    return jacobian.reshape(x.shape[-2] * layer.d_out, x.numel())
