"""One way in: what a model executes becomes a network of pieces, or the attention layers that it runs."""

from holdfast.graph.convert import Converted, Readings, to_network
from holdfast.graph.perturbation import Perturbation

__all__ = ["Converted", "Perturbation", "Readings", "to_network"]
