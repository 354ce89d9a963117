"""Layers whose gain can be proved, for transformers that are trained to be certified.

Each is a torch module with the pieces of its certificate: `layer.pieces()`. Weights keep their limits by torch
parametrisations, which `plain` removes, or by steps on the manifold, which `ManifoldStep` takes.
"""

from holdfast.nn.activations import Entrywise, MaxMin
from holdfast.nn.arrangement import Flattened, MergedTokens, Neighbourhoods, Patches, Shifts, shift_scores
from holdfast.nn.attention import SelfAttention
from holdfast.nn.convolution import Convolution
from holdfast.nn.layer import Chain, Layer, plain
from holdfast.nn.linear import Linear, UnitRowHead, manifold_parameters
from holdfast.nn.manifold import ManifoldStep
from holdfast.nn.project import LayerProject
from holdfast.nn.sll import Sll
from holdfast.nn.tokens import MeanPool, PositionCodes

__all__ = [
    "Chain",
    "Convolution",
    "Entrywise",
    "Flattened",
    "Layer",
    "LayerProject",
    "Linear",
    "ManifoldStep",
    "MaxMin",
    "MeanPool",
    "MergedTokens",
    "Neighbourhoods",
    "Patches",
    "PositionCodes",
    "SelfAttention",
    "Shifts",
    "Sll",
    "UnitRowHead",
    "manifold_parameters",
    "plain",
    "shift_scores",
]
