"""Networks as polynomials in the perturbation, with a proved bound of what the polynomials leave out."""

from holdfast.network.expansion.expansion import Expansion, refusal
from holdfast.network.expansion.minimum import Cubic

__all__ = ["Cubic", "Expansion", "refusal"]
