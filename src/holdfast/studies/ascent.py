"""Projected gradient ascent on the cross entropy, in l2 balls around a batch of inputs of any shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def ascended(
    model: Callable[[Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    radius: float,
    steps: int,
    start: Tensor | None = None,
    box: tuple[float, float] | None = None,
) -> Tensor:
    """The last points (b, …), none farther from its input than the radius.

    Args:
        model: from points to logits.
        x: the inputs.
        y: the right answers.
        radius: of the balls.
        steps: of the ascent.
        start: in which direction to begin.
        box: the least and the largest value of an entry; the inputs lie in it.
    """
    delta = torch.zeros_like(x) if start is None else radius * unit(start)
    for _ in range(steps):
        at = (x + delta).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(model(at), y, reduction="sum"), at)
        delta = delta + 2.5 * radius / steps * unit(gradient)
        delta = delta * (radius / _length(delta)).clamp(max=1)
        if box is not None:  # it keeps the ball: every entry comes nearer to the input's own
            delta = (x + delta).clamp(*box) - x
    return (x + delta).detach()


def unit(t: Tensor) -> Tensor:
    """Every input of a batch, of length 1."""
    direction: Tensor = t / _length(t)
    return direction


def _length(t: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim)), keepdim=True)
    return length.clamp(min=1e-12)
