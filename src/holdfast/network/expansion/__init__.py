"""Networks as polynomials in the perturbation, with a proved bound of what the polynomials leave out."""

from holdfast.network.expansion.expansion import Expansion, refusal

__all__ = ["Expansion", "refusal"]
