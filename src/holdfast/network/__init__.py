"""Networks as chains of pieces that know how steep and how curved they are on a ball."""

from holdfast.network.affine import Affine
from holdfast.network.attention import Attention
from holdfast.network.base import LinearPiece, Piece, SmoothPiece
from holdfast.network.beside import KinkedBeside, LinearBeside, SmoothBeside
from holdfast.network.embedding import AddPositions, PatchEmbedding, Place
from holdfast.network.entries import KinkedEntries, SmoothEntries
from holdfast.network.mlp import KinkedMlp, Mlp
from holdfast.network.network import Head, Network, Residual
from holdfast.network.normalise import Normalise
from holdfast.network.norms import LayerNorm, RMSNorm
from holdfast.network.pooling import ClassToken, Flatten, MeanPool
from holdfast.network.product import Product
from holdfast.network.projection import HardProject, MaxMin, SmoothProject
from holdfast.network.selection import Rearrangement, Scale, Selection
from holdfast.network.sll import sll, sll_diagonal

__all__ = [
    "AddPositions",
    "Affine",
    "Attention",
    "ClassToken",
    "Flatten",
    "HardProject",
    "Head",
    "KinkedBeside",
    "KinkedEntries",
    "KinkedMlp",
    "LayerNorm",
    "LinearBeside",
    "LinearPiece",
    "MaxMin",
    "MeanPool",
    "Mlp",
    "Network",
    "Normalise",
    "PatchEmbedding",
    "Piece",
    "Place",
    "Product",
    "RMSNorm",
    "Rearrangement",
    "Residual",
    "Scale",
    "Selection",
    "SmoothBeside",
    "SmoothEntries",
    "SmoothPiece",
    "SmoothProject",
    "sll",
    "sll_diagonal",
]
