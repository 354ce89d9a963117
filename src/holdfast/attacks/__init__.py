"""Lower bounds with a witness: searches over balls, and explicit constructions."""

from holdfast.attacks.base import Attack
from holdfast.attacks.configurations import adversarial_configuration, two_diracs
from holdfast.attacks.lipschitz_ascent import LipschitzAscent
from holdfast.attacks.objectives import Objective, objectives
from holdfast.attacks.pgd import ProjectedAscent
from holdfast.attacks.splitting import split_attack

__all__ = [
    "Attack",
    "LipschitzAscent",
    "Objective",
    "ProjectedAscent",
    "adversarial_configuration",
    "objectives",
    "split_attack",
    "two_diracs",
]
