"""What every attack must satisfy, for every objective."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from holdfast.api import bound
from holdfast.attacks import Attack, objectives
from holdfast.results import AttackResult
from holdfast.testing.every import over
from holdfast.testing.layers import Case, cases, typical

RADII = (1e-3, 0.3, 3.0)
_STEPS = 10
_NOISE = 0.1  # two searches may end at different maxima of the same function

_every = over(lambda kit: kit.cases())
_typical = over(lambda kit: typical(cases()))


class AttackConformance(ABC):
    """A witness lies in the ball, its value is what was claimed, and no proof is contradicted."""

    @abstractmethod
    def attack(self, steps: int) -> Attack:
        """The attack, with about so many steps."""

    @abstractmethod
    def objective(self) -> str:
        """The name of what it maximises."""

    def cases(self) -> Sequence[Case]:
        """Layers of every kind; every other one where an inner quantity is maximised."""
        return cases() if self.objective() == "output" else cases()[::2]

    @_typical
    def test_result_says_what_it_is(self, typical: Case) -> None:
        result = self._searched(typical)
        assert (result.side, result.guarantee, result.objective) == ("lower", "proved", self.objective())
        assert result.eps == RADII
        json.dumps(result.to_dict())

    @_every
    def test_witness_is_inside_the_ball(self, case: Case) -> None:
        """In exact arithmetic."""
        for eps, witness in zip(RADII, self._searched(case).witness.unbind(-3), strict=True):
            move = zip(witness.flatten(0, -3), self._centre(case).flatten(0, -3), strict=True)
            assert all(_exact_distance_squared(z, x) <= Fraction(eps) ** 2 for z, x in move)

    @_every
    def test_value_is_that_of_the_witness(self, case: Case) -> None:
        goal = objectives[self.objective()](case.layer, case.x)
        result = self._searched(case)
        value = goal.values(result.witness.movedim(-3, 0)).movedim(0, -1)
        assert bool((result.lower <= value * (1 + 1e-12)).all())
        # A movement is a difference of values, and keeps their rounding: slight beside the radius, it is only that.
        rounding = 1e-9 * (value.amax() + torch.tensor(RADII, dtype=torch.float64))
        assert bool((result.lower >= value * (1 - 1e-6) - rounding).all())

    @_every
    def test_never_above_a_proved_bound(self, case: Case) -> None:
        if self.objective() == "output":
            assert bool((self._searched(case).lower <= bound(case.layer, case.x, RADII, "lofast-xi").value).all())

    @_typical
    def test_zero_radius_moves_nothing(self, typical: Case) -> None:
        assert torch.equal(self._run(typical, 0.0, steps=2).witness, self._centre(typical))

    @_typical
    def test_shape_follows_x_and_eps(self, typical: Case) -> None:
        places, tokens = self._centre(typical).shape[:-2], typical.x.shape[-2:]
        result = self._searched(typical)
        assert result.lower.shape == (*places, len(RADII))
        assert result.witness.shape == (*places, len(RADII), *tokens)
        one = self._run(typical.member(0), 0.3, steps=2)
        assert one.eps == 0.3
        assert one.lower.shape == places[1:]
        assert one.witness.shape == (*places[1:], *tokens)

    @_typical
    def test_deterministic_for_a_seed(self, typical: Case) -> None:
        state = torch.get_rng_state()
        first, again = self._run(typical, steps=4), self._run(typical, steps=4)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(again.lower, first.lower)
        assert torch.equal(again.witness, first.witness)

    @_typical
    def test_more_steps_are_not_worse(self, typical: Case) -> None:
        before, after = self._searched(typical).lower, self._run(typical, steps=2 * _STEPS).lower
        assert bool((after >= before * (1 - 1e-9) - 1e-12 * before.amax()).all())

    @_typical
    def test_batch_and_sequence_of_radii_equal_loops(self, typical: Case) -> None:
        lower = self._searched(typical).lower
        for place, eps in enumerate(RADII):
            member = place % len(typical.x)
            _close_searches(lower[member, ..., place], self._run(typical.member(member), eps).lower)

    @_typical
    def test_float32_is_searched_in_float64(self, typical: Case) -> None:
        single = typical.float()
        widened = Case(single.name, single.layer.double(), single.x.double())
        assert torch.equal(self._run(single, steps=4).lower, self._run(widened, steps=4).lower)

    # -- helpers

    def _run(self, case: Case, eps: float | Sequence[float] = RADII, steps: int = _STEPS) -> AttackResult:
        return self.attack(steps)(case.layer, case.x, eps, objective=self.objective(), seed=1)

    def _searched(self, case: Case) -> AttackResult:
        return _search(type(self), case)

    def _centre(self, case: Case) -> Tensor:
        return objectives[self.objective()](case.layer, case.x).centre


@cache
def _search(kind: type[AttackConformance], case: Case) -> AttackResult:
    return kind()._run(case)


def _exact_distance_squared(z: Tensor, x: Tensor) -> Fraction:
    pairs = zip(z.flatten().tolist(), x.flatten().tolist(), strict=True)
    return sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs), Fraction(0))


def _close_searches(reached: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(reached, expected, rtol=_NOISE, atol=1e-12 * float(expected.max()) + 1e-100)
