"""One affine map for all tokens."""

from __future__ import annotations

from typing import final

from jaxtyping import Float
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.piece import LinearPiece
from holdfast.layers.weights import double, weight
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
class Affine(LinearPiece):
    """x W + b for every token; its norm is that of W.

    Args:
        w: (d, c) W; the transpose of the weight of `nn.Linear`.
        b: (c), or None for no bias.
    """

    tokenwise = True

    def __init__(self, w: Float[Tensor, "d c"], b: Float[Tensor, " c"] | None = None) -> None:
        self.w = double(w, "w", 2)
        self.b = w.new_zeros(w.shape[-1]).double() if b is None else double(b, "b", 1)
        if len(self.b) != self.w.shape[-1]:
            raise InputError(f"w has shape {tuple(w.shape)} and b {len(self.b)} entries; expected one for each column")

    def value(self, u: Array) -> Array:
        return u @ weight(self.w, u) + weight(self.b, u)

    def push(self, u: Array, a: Array) -> Array:
        return a @ weight(self.w, u)

    def pull(self, u: Array, c: Array) -> Array:
        return c @ weight(self.w.mT, u)

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.of_weights("norm", [self.w], lambda: a.matrix_norm(a.lift(self.w)))
