"""What every bound of a slope must satisfy: at a point, or on a ball around 0."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import final

import torch
from torch import Tensor

from holdfast.api import lipschitz_attack
from holdfast.attention import AttentionJacobian
from holdfast.bounds import BallBound, LipschitzBound, PointBound, ball_bounds, point_bounds
from holdfast.results import Guarantee, LipschitzResult
from holdfast.testing.bounds import dense_jacobian
from holdfast.testing.every import over
from holdfast.testing.layers import Case, elsewhere, members, typical
from holdfast.testing.methods import MethodConformance

RADII = (0.0, 0.1, 2.5)
EXPONENTS = (1.0, 1.5, 2.0, 4.0, math.inf)
_AGREE = 1e-6  # proved norms lie within about 1e-8 of the true ones
_NOTHING = 1e-100  # what proved arithmetic makes of zero stays far below
_POINTS = 16


_every = over(lambda kit: kit._applicable())
_typical = over(lambda kit: typical(kit._applicable()))


class _SlopeConformance(MethodConformance):
    """What both kinds have in common; the tests run over the cases that the bound does not refuse."""

    @abstractmethod
    def _bound(self) -> PointBound | BallBound:
        """The registered bound."""

    @abstractmethod
    def _call(self, case: Case, guarantee: Guarantee = "proved") -> LipschitzResult:
        """The bound at the case."""

    def _registered(self) -> Sequence[LipschitzBound]:
        return [*point_bounds.values(), *ball_bounds.values()]

    def _applicable(self) -> list[Case]:
        return [case for case in self.cases() if self._bound().refusal(case.layer) is None]

    # -- what it says about itself

    @_typical
    def test_result_says_what_it_is(self, typical: Case) -> None:
        for guarantee in self._bound().guarantees:
            result = _result(type(self), typical, guarantee)
            assert (result.method, result.side, result.guarantee) == (self.name(), "upper", guarantee)
            assert result.scope == self._bound().scope
            assert result.value.dtype == torch.float64
            assert all(bool(torch.isfinite(term).all()) for term in result.terms.values())
            json.dumps(result.to_dict(), allow_nan=False)

    # -- size

    @_every
    def test_finite_and_not_negative(self, case: Case) -> None:
        value = self._value(case)
        assert bool(torch.isfinite(value).all())
        assert bool((value >= 0).all())

    @_typical
    def test_proved_is_above_numerical_and_close(self, typical: Case) -> None:
        if set(self._bound().guarantees) >= {"proved", "numerical"}:
            proved, numerical = self._value(typical, "proved"), self._value(typical, "numerical")
            assert bool((proved >= numerical * (1 - _AGREE)).all())
            assert bool((proved <= numerical * (1 + 1e-3) + _NOTHING).all())

    @_typical
    def test_float32_is_computed_in_float64(self, typical: Case) -> None:
        single = typical.float()
        widened = Case(single.name, single.layer.double(), single.x.double())
        assert torch.equal(self._value(single), self._value(widened))
        self._same(widened, self._value(typical), tolerance=1e-3)

    # -- helpers

    def _value(self, case: Case, guarantee: Guarantee | None = None) -> Tensor:
        return _result(type(self), case, guarantee or self._bound().guarantees[0]).value

    def _same(self, case: Case, expected: Tensor, tolerance: float = _AGREE) -> None:
        torch.testing.assert_close(self._value(case), expected, rtol=tolerance, atol=_NOTHING)


class PointBoundConformance(_SlopeConformance):
    """A bound at a point is not below the norm of the Jacobian there, and follows the symmetries of attention."""

    @final
    def _bound(self) -> PointBound:
        return point_bounds[self.name()]

    @final
    def _call(self, case: Case, guarantee: Guarantee = "proved") -> LipschitzResult:
        return self._bound()(case.layer, case.x, guarantee=guarantee)

    @_every
    def test_not_below_the_exact_norm(self, case: Case) -> None:
        assert bool((self._value(case) >= _exact(case) * (1 - 1e-9)).all())

    @_typical
    def test_batch_equals_loop(self, typical: Case) -> None:
        loop = torch.stack([self._value(member) for member in members(typical)])
        self._same(typical, loop)
        self._same(Case(typical.name, typical.layer, typical.x.unsqueeze(0)), loop.unsqueeze(0))

    @_typical
    def test_order_basis_and_units_do_not_matter(self, typical: Case) -> None:
        there = elsewhere(typical)
        self._same(there.case, self._value(typical) * there.values / there.inputs)


class BallBoundConformance(_SlopeConformance):
    """A bound on a ball around 0 is not below any slope in it, and grows with the radius.

    The number of tokens is that of a case; the tokens are drawn anew. Radii are in a unit in which the scores stay
    moderate, since a bound may be exponential in them.
    """

    @final
    def _bound(self) -> BallBound:
        return ball_bounds[self.name()]

    @final
    def _call(
        self, case: Case, guarantee: Guarantee = "proved", radii: float | Sequence[float] | None = None, p: float = 2.0
    ) -> LipschitzResult:
        return self._bound()(case.layer, radii or _radii(case), case.x.shape[-2], p, guarantee=guarantee)

    @_every
    def test_grows_with_the_radius(self, case: Case) -> None:
        value = self._value(case)
        assert bool((value[1:] >= value[:-1] * (1 - 1e-12)).all())

    @_every
    def test_not_below_any_slope_that_is_found(self, case: Case) -> None:
        assert bool((self._value(case) >= _found(case) * (1 - 1e-9)).all())

    @_typical
    def test_holds_for_every_exponent(self, typical: Case) -> None:
        """In the norm (Σ_i |ε_i|^p)^(1/p) of tokens, which is the W_p distance of near sequences times n^(1/p)."""
        radius, tried = _radii(typical)[-1], 0
        for p in EXPONENTS:
            if self._bound().refusal(typical.layer, p) is None:
                tried += 1
                value = self._call(typical, radii=radius, p=p).value
                assert bool((value >= _gains(typical, radius, p) * (1 - 1e-9)).all())
        assert tried

    @_typical
    def test_shape_follows_the_radius(self, typical: Case) -> None:
        one, several = self._call(typical, radii=0.5), self._call(typical)
        assert (one.value.shape, one.radius) == ((), 0.5)
        assert (several.value.shape, several.radius) == ((len(RADII),), _radii(typical))
        assert (one.tokens, one.p) == (typical.x.shape[-2], 2.0)

    @_typical
    def test_units_do_not_matter(self, typical: Case) -> None:
        """X → cX with W → W/c for the inner maps is the same layer, in another unit; values have one of their own."""
        layer, c = typical.layer.replace(residual=0.0), 5.0
        maps = {name: getattr(layer, name) / c for name in ("w_q", "w_k", "w_v")}
        other = Case("other units", layer.replace(**maps, w_o=3 * layer.w_o), typical.x)
        radii = [c * radius for radius in _radii(typical)]
        here = self._call(Case("no residual", layer, typical.x)).value
        torch.testing.assert_close(self._call(other, radii=radii).value, 3 * here / c, rtol=_AGREE, atol=_NOTHING)


@cache
def _result(kit: type[_SlopeConformance], case: Case, guarantee: Guarantee) -> LipschitzResult:
    return kit()._call(case, guarantee)  # pytest makes an instance for every test


@cache
def _exact(case: Case) -> Tensor:
    """(b) ‖DF(x)‖ from the dense Jacobian, by reverse differentiation."""
    jacobians = (dense_jacobian(member.layer, member.x) for member in members(case))
    norms = [torch.linalg.matrix_norm(jacobian, ord=2) for jacobian in jacobians]
    return torch.stack(norms).reshape(case.x.shape[:-2])


def _radii(case: Case) -> tuple[float, ...]:
    """Radii at which no score exceeds about 100."""
    layer = case.layer.double()
    maps = layer.w_q @ layer.w_k.repeat_interleave(layer.h // layer.g, 0).mT * layer.scale
    largest = float(torch.linalg.matrix_norm(maps, ord=2).max())
    return tuple(radius * min(1.0, (16 / max(largest, 1e-9)) ** 0.5) for radius in RADII)


@cache
def _tokens(case: Case, radius: float) -> Tensor:
    """(points, n, d) tokens of length at most `radius`, most of them on the sphere."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_POINTS, *case.x.shape[-2:], generator=generator, dtype=torch.float64)
    directions: Tensor = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inside = torch.rand(_POINTS, case.x.shape[-2], 1, generator=generator, dtype=torch.float64)
    return radius * (1 - 1e-12) * torch.where(inside < 0.3, inside, 1.0) * directions


@cache
def _found(case: Case) -> Tensor:
    """(r) the steepest slopes at random tokens, and for the largest radius along a short ascent."""
    layer, radii = case.member(0).layer, _radii(case)
    matrices = (AttentionJacobian(layer, _tokens(case, radius)).dense() for radius in radii)
    slopes = torch.stack([torch.linalg.matrix_norm(matrix, ord=2).max() for matrix in matrices])
    climbed = lipschitz_attack(layer, radii[-1], case.x.shape[-2], restarts=2, steps=6).lower
    return torch.cat([slopes[:-1], torch.maximum(slopes[-1], climbed).unsqueeze(0)])


def _gains(case: Case, radius: float, p: float) -> Tensor:
    """The largest ratio of the norms (Σ_i |·|^p)^(1/p) of DF(X)G and G, over some X and G."""
    x = _tokens(case, radius)
    generator = torch.Generator().manual_seed(1)
    g = torch.randn(8, *x.shape, generator=generator, dtype=torch.float64)
    g[:4] *= torch.nn.functional.one_hot(torch.arange(4) % x.shape[-2], x.shape[-2])[:, None, :, None]
    moved = AttentionJacobian(case.member(0).layer, x).mv(g)
    gains: Tensor = _length(moved, p) / _length(g, p)
    return gains.max()


def _length(g: Tensor, p: float) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(torch.linalg.vector_norm(g, dim=-1), ord=p, dim=-1)
    return lengths
