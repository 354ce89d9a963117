"""Linear maps that are applied, not stored; norms that know their side; arithmetic that knows its error."""

from holdfast.linalg.certified import upper
from holdfast.linalg.lanczos import estimate, estimated_norm, thin_norm
from holdfast.linalg.operator import (
    AssembledOperator,
    Enclosure,
    FunctionJacobian,
    Gram,
    LinearOperator,
    MatrixOperator,
    ProvableOperator,
)
from holdfast.linalg.rounding import Array, Ball

__all__ = [
    "Array",
    "AssembledOperator",
    "Ball",
    "Enclosure",
    "FunctionJacobian",
    "Gram",
    "LinearOperator",
    "MatrixOperator",
    "ProvableOperator",
    "estimate",
    "estimated_norm",
    "thin_norm",
    "upper",
]
