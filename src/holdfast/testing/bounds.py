"""What every bound must satisfy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from holdfast.api import attack
from holdfast.attention import AttentionLayer
from holdfast.bounds import Bound, bounds
from holdfast.results import BoundResult, Guarantee
from holdfast.testing.every import over
from holdfast.testing.layers import Case, elsewhere, members, typical
from holdfast.testing.methods import MethodConformance

RADII = (0.0, 1e-6, 0.03, 1.0, 10.0)
SOME = (0.03, 1.0)  # for what holds at each radius alike
_AGREE = 1e-6  # proved norms lie within about 1e-8 of the true ones
_ALIKE = 1e-8  # where the same norms are proved, beside other ones
_NOTHING = 1e-100  # what proved arithmetic makes of zero stays far below


_every = over(lambda kit: kit._applicable())
_typical = over(lambda kit: typical(kit._applicable()))


class BoundConformance(MethodConformance):
    """A bound is not below what is attained, grows with the radius, and follows the symmetries of attention.

    The tests run over the cases that the bound does not refuse.
    """

    # -- what it says about itself

    @_typical
    def test_result_says_what_it_is(self, typical: Case) -> None:
        for guarantee in self._bound().guarantees:
            result = self._result(typical, SOME, guarantee)
            assert (result.method, result.side, result.guarantee) == (self.name(), "upper", guarantee)
            assert result.scope == self._bound().scope
            assert result.eps == SOME
            assert result.value.dtype == torch.float64
            assert all(bool(torch.isfinite(term).all()) for term in result.terms.values())
            json.dumps(result.to_dict())

    # -- size

    @_every
    def test_finite_and_not_negative(self, case: Case) -> None:
        value = self._values(case)
        assert bool(torch.isfinite(value).all())
        assert bool((value >= 0).all())

    @_every
    def test_zero_radius_gives_zero(self, case: Case) -> None:
        value = self._values(case)
        assert RADII[0] == 0
        assert bool((value[..., 0] <= 1e-12 * value[..., -1] + _NOTHING).all())

    @_every
    def test_monotone_in_eps(self, case: Case) -> None:
        value = self._values(case)
        assert bool((value[..., 1:] >= value[..., :-1] * (1 - 1e-12)).all())

    @_every
    def test_not_below_the_attack(self, case: Case) -> None:
        assert bool((self._values(case) >= _attained(case)).all())

    @_every
    def test_not_below_the_exact_gain(self, case: Case) -> None:
        """As eps vanishes, the output moves by eps ‖DF(x)‖, up to a relative error of second order in eps."""
        least = RADII[1]
        assert bool((self._values(case)[..., 1] >= least * _gain(case) * (1 - 1e-6)).all())

    @_typical
    def test_proved_is_above_numerical_and_close(self, typical: Case) -> None:
        if set(self._bound().guarantees) >= {"proved", "numerical"}:
            proved, numerical = self._values(typical, SOME, "proved"), self._values(typical, SOME, "numerical")
            assert bool((proved >= numerical * (1 - _AGREE)).all())
            assert bool((proved <= numerical * (1 + 1e-3) + _NOTHING).all())

    @_typical
    def test_a_value_does_not_depend_on_the_other_radii(self, typical: Case) -> None:
        """Nor on those that were asked before, nor on their order."""
        expected = torch.cat([self._values(typical, (eps,)) for eps in SOME], -1)
        self._same(typical, expected, tolerance=_ALIKE)
        others = (SOME[1] * 3, SOME[1], 0.0, SOME[0] / 7, SOME[0])
        torch.testing.assert_close(self._values(typical, others)[..., [4, 1]], expected, rtol=_ALIKE, atol=_NOTHING)

    # -- shapes and symmetries

    @_typical
    def test_shape_follows_x_and_eps(self, typical: Case) -> None:
        batch, one = typical.x.shape[:-2], members(typical)[0]
        assert self._values(typical, SOME).shape == (*batch, len(SOME))
        assert self._values(one, SOME).shape == (len(SOME),)
        alone = self._bound()(one.layer, one.x, SOME[0], guarantee=self._bound().guarantees[0])
        assert alone.value.shape == ()
        assert alone.eps == SOME[0]

    @_typical
    def test_batch_equals_loop(self, typical: Case) -> None:
        loop = torch.stack([self._values(member, SOME) for member in members(typical)])
        self._same(typical, loop)
        nested = Case(typical.name, typical.layer, typical.x.unsqueeze(0))
        self._same(nested, loop.unsqueeze(0))

    @_typical
    def test_order_basis_and_units_do_not_matter(self, typical: Case) -> None:
        there = elsewhere(typical)
        radii = [there.inputs * eps for eps in SOME]
        self._same(there.case, there.values * self._values(typical, SOME), radii, self._symmetry())

    @_typical
    def test_float32_is_computed_in_float64(self, typical: Case) -> None:
        single = typical.float()
        widened = Case(single.name, single.layer.double(), single.x.double())
        assert torch.equal(self._values(single, SOME), self._values(widened, SOME))
        self._same(widened, self._values(typical, SOME), tolerance=1e-3)

    # -- helpers

    def _bound(self) -> Bound:
        return bounds[self.name()]

    def _registered(self) -> Sequence[Bound]:
        return bounds.values()

    def _applicable(self) -> list[Case]:
        return [case for case in self.cases() if self._bound().refusal(case.layer) is None]

    def _call(self, case: Case) -> BoundResult:
        return self._result(case)

    def _symmetry(self) -> float:
        """To which relative precision a layer in other coordinates has the same bound."""
        return _AGREE

    def _result(self, case: Case, eps: Sequence[float] = RADII, guarantee: Guarantee | None = None) -> BoundResult:
        return _evaluated(self._bound(), case, tuple(eps), guarantee or self._bound().guarantees[0])

    def _values(self, case: Case, eps: Sequence[float] = RADII, guarantee: Guarantee | None = None) -> Tensor:
        return self._result(case, eps, guarantee).value

    def _same(self, case: Case, expected: Tensor, eps: Sequence[float] = SOME, tolerance: float = _AGREE) -> None:
        torch.testing.assert_close(self._values(case, eps), expected, rtol=tolerance, atol=_NOTHING)


@cache
def _evaluated(bound: Bound, case: Case, eps: tuple[float, ...], guarantee: Guarantee) -> BoundResult:
    return bound(case.layer, case.x, eps, guarantee=guarantee)


@cache
def _attained(case: Case) -> Tensor:
    """(b, e) what an attack reaches."""
    return attack(case.layer, case.x, RADII, restarts=3, steps=40).lower


@cache
def _gain(case: Case) -> Tensor:
    """(b) ‖DF(x)‖ from the dense Jacobian, by reverse differentiation."""
    jacobians = (dense_jacobian(member.layer, member.x) for member in members(case))
    return torch.stack([torch.linalg.matrix_norm(jacobian, ord=2) for jacobian in jacobians])


def dense_jacobian(layer: AttentionLayer, x: Tensor) -> Tensor:
    """DF(x) for one input (n, d), as a matrix, by reverse differentiation."""
    jacobian: Tensor = torch.func.jacrev(layer)(x)
    return jacobian.reshape(x.shape[-2] * layer.d_out, x.numel())
