"""The table of attacks: each with every objective inherits the conformance kit."""

from __future__ import annotations

from holdfast.attacks import Attack, ProjectedAscent, objectives
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


def test_every_objective_and_attack_is_in_the_table() -> None:
    rows = in_the_table(AttackConformance, globals())
    pairs = {(type(row.attack(1)), row.objective()) for row in rows}
    assert pairs == {(attack, name) for attack in concrete(Attack) for name in objectives}
