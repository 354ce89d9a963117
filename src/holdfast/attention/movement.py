"""How far a layer's output really moved between two inputs, with the rounding of that number known."""

from __future__ import annotations

from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.linalg.rounding import Ball, frobenius


def distance(x: Tensor, moved: Tensor) -> Ball:
    """‖X' - X‖_F for float64 inputs (…, n, d)."""
    return frobenius(Ball.exact(moved) - Ball.exact(x))


def movement(layer: AttentionLayer, x: Tensor, moved: Tensor) -> Ball:
    """‖F(X') - F(X)‖_F of the layer in exact arithmetic."""
    before, after = Ball.exact(x), Ball.exact(moved)
    return frobenius(layer.output(after, layer.run(after)) - layer.output(before, layer.run(before)))
