"""Sub-layers: each kind's piece, local expansion and trainable module are kept together.

A *piece* maps tokens to tokens and knows how steep and how curved it is on a ball; networks are chains of them. A
*module* is a torch layer whose gain can be proved, with the pieces of its certificate: `module.pieces()`. Weights keep
their limits by torch parametrisations, which `plain` removes, or by steps on the manifold, which `ManifoldStep` takes.
"""

from holdfast.layers.activation.module import Entrywise
from holdfast.layers.activation.piece import KinkedEntries, SmoothEntries
from holdfast.layers.attention.module import SelfAttention
from holdfast.layers.attention.piece import Attention
from holdfast.layers.beside import KinkedBeside, LinearBeside, SmoothBeside
from holdfast.layers.linear.convolution import Convolution
from holdfast.layers.linear.diagonal import sll_diagonal
from holdfast.layers.linear.manifold import ManifoldStep
from holdfast.layers.linear.module import Linear, UnitRowHead, manifold_parameters
from holdfast.layers.linear.piece import Affine
from holdfast.layers.maxmin import MaxMin, PairSort
from holdfast.layers.module import Chain, Layer, plain
from holdfast.layers.norm.piece import LayerNorm, RMSNorm
from holdfast.layers.perceptron.piece import KinkedMlp, Mlp
from holdfast.layers.perceptron.sll import Sll, sll
from holdfast.layers.piece import LinearPiece, Piece, SmoothPiece
from holdfast.layers.product import Product
from holdfast.layers.projection import HardProject, LayerProject, SmoothProject
from holdfast.layers.tokens.arrangement import (
    Flattened,
    MergedTokens,
    Neighbourhoods,
    Patches,
    Shifts,
    shift_scores,
)
from holdfast.layers.tokens.embedding import AddPositions, PatchEmbedding, Place, PositionCodes
from holdfast.layers.tokens.maxima import WindowMax
from holdfast.layers.tokens.normalise import Normalise
from holdfast.layers.tokens.pooling import ClassToken, Flatten, MeanPool, TokenMean
from holdfast.layers.tokens.selection import Rearrangement, Scale, Selection, WeightedSelection
from holdfast.layers.tokens.surroundings import Surroundings

__all__ = [
    "AddPositions",
    "Affine",
    "Attention",
    "Chain",
    "ClassToken",
    "Convolution",
    "Entrywise",
    "Flatten",
    "Flattened",
    "HardProject",
    "KinkedBeside",
    "KinkedEntries",
    "KinkedMlp",
    "Layer",
    "LayerNorm",
    "LayerProject",
    "Linear",
    "LinearBeside",
    "LinearPiece",
    "ManifoldStep",
    "MaxMin",
    "MeanPool",
    "MergedTokens",
    "Mlp",
    "Neighbourhoods",
    "Normalise",
    "PairSort",
    "PatchEmbedding",
    "Patches",
    "Piece",
    "Place",
    "PositionCodes",
    "Product",
    "RMSNorm",
    "Rearrangement",
    "Scale",
    "Selection",
    "SelfAttention",
    "Shifts",
    "Sll",
    "SmoothBeside",
    "SmoothEntries",
    "SmoothPiece",
    "SmoothProject",
    "Surroundings",
    "TokenMean",
    "UnitRowHead",
    "WeightedSelection",
    "WindowMax",
    "manifold_parameters",
    "plain",
    "shift_scores",
    "sll",
    "sll_diagonal",
]
