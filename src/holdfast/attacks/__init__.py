"""Lower bounds with a witness: searches over the ball."""

from holdfast.attacks.base import Attack
from holdfast.attacks.objectives import Objective, objectives
from holdfast.attacks.pgd import ProjectedAscent

__all__ = ["Attack", "Objective", "ProjectedAscent", "objectives"]
