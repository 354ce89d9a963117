"""How little is left of the margins of a network within reach of some points: no composition may claim more."""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.threat import Threat
from holdfast.network import Network

_STARTS, _STEPS, _SHRINKING = 3, 15, 0.8
_INSIDE = 1 - 1e-12  # of a radius, for what is rounded


def least_margins(
    network: Network,
    x: Float64[Tensor, "b n d"],
    answers: Int64[Tensor, " b"],
    eps: Float64[Tensor, " b"],
    threat: Threat,
    seed: int,
) -> Float64[Tensor, " b"]:
    """Upper bounds of the smallest margin of the answers within eps: by descent from random points, for every class.

    Every point counts by its logits in ball arithmetic, and only if it is within eps.
    """
    classes = len(network.head.bias)
    generator = torch.Generator().manual_seed(seed)
    least = torch.full_like(eps, torch.inf)
    for target in range(1, classes):
        other = (answers + target) % classes
        for _ in range(_STARTS):
            moved = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            step = 1.0
            for _ in range(_STEPS):
                z = _within(x, moved, eps, threat)
                least = torch.minimum(least, _margins(network, z, answers, other, threat.distance(x, z) <= eps))
                slope = _slope(network, z, answers, other)
                ahead = slope.sign() if threat.boxed else slope / _column(threat.length(slope).clamp(min=1e-300))
                moved = z - x - step * _column(eps) * ahead
                step *= _SHRINKING
    return least


def _within(x: Tensor, moved: Tensor, eps: Tensor, threat: Threat) -> Tensor:
    """The points brought into the region; the first ones, which are long, to its boundary."""
    r = _column(eps * _INSIDE)
    if threat.boxed:
        return threat.inside(x + torch.maximum(torch.minimum(moved, r), -r))
    return x + moved * (r / _column(threat.length(moved).clamp(min=1e-300))).clamp(max=1.0)


def _margins(network: Network, z: Tensor, answers: Tensor, other: Tensor, counts: Tensor) -> Tensor:
    with torch.no_grad():
        logits = network(Ball.exact(z))
    own, others = (logits[torch.arange(len(z)), which] for which in (answers, other))
    return torch.where(counts, (own - others).upper, torch.inf)


def _slope(network: Network, z: Tensor, answers: Tensor, other: Tensor) -> Tensor:
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        logits = network(z)
        lead = logits.gather(1, answers.unsqueeze(1)) - logits.gather(1, other.unsqueeze(1))
        (slope,) = torch.autograd.grad(lead.sum(), z)
    return slope


def _column(t: Tensor) -> Tensor:
    return t[:, None, None]
