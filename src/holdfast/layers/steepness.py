"""Estimates, for training, of how steep and how curved a layer is: cheap, differentiable, and no bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

_STEPS = 16  # of power iteration


@final
@dataclass(frozen=True)
class Steepness:
    """Estimates of the norms of the first two derivatives of a layer at its inputs."""

    gain: Tensor | float
    curvature: Tensor | float


def norm_estimate(w: Float[Tensor, "*layers m n"]) -> Float[Tensor, "*layers"]:
    """‖W‖ from below, differentiable; the start is the same every time."""
    with torch.no_grad(), torch.autocast(w.device.type, enabled=False):
        v = torch.cos(torch.arange(w.shape[-1], device=w.device, dtype=w.dtype) ** 2)  # in no direction of its own
        v = v.unsqueeze(-1)
        for _ in range(_STEPS):
            v = unit(w.mT @ (w @ v), -2)
    with torch.autocast(w.device.type, enabled=False):
        return length(w @ v, -2).squeeze(-1)


def length(t: Tensor, dim: int = -1, *, keepdim: bool = False) -> Tensor:
    """The l2 norm along a dimension; its derivative at 0 is 0."""
    norms: Tensor = torch.linalg.vector_norm(t, dim=dim, keepdim=keepdim)
    return norms


def unit(v: Tensor, dim: int = -1) -> Tensor:
    """Vectors of length 1 along a dimension; 0 stays 0."""
    return v / length(v, dim, keepdim=True).clamp(min=1e-30)
