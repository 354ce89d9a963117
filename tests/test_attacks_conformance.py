"""The table of attacks: each with every objective inherits the conformance kit."""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.attacks import Attack, Objective, ProjectedAscent, objectives
from holdfast.testing import AttackConformance
from tables import concrete, in_the_table


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


class _Slight(Attack):
    """Moves every number by its last digit, which no rounding lets see."""

    name = "slight"

    def _search(self, objective: Objective, eps: Tensor, seed: int) -> Tensor:
        return torch.nextafter(objective.centre, objective.centre + 1).expand(1, len(eps), *objective.centre.shape)


class _SlightKit(AttackConformance):
    def attack(self, steps: int) -> Attack:
        return _Slight()

    def objective(self) -> str:
        return "output"


def test_an_attack_that_moves_nothing_to_speak_of_is_one() -> None:
    _SlightKit().test_value_is_that_of_the_witness()


def test_every_objective_and_attack_is_in_the_table() -> None:
    rows = in_the_table(AttackConformance, globals())
    pairs = {(type(row.attack(1)), row.objective()) for row in rows}
    assert pairs == {(attack, name) for attack in concrete(Attack) for name in objectives}
