"""Runs of smooth stages: gain and curvature from the start of a run on (docs/math/network.md, sections 3 and 4).

X is the exact input of the run and u_k(Z) the input of its site k for an input Z of the run. For ‖Z - X‖ <= r,

    ρ_k(r) >= ‖u_k(Z) - u_k(X)‖,   G_k(r) >= ‖Du_k(Z)‖,   C_k(r) >= sup ‖D²u_k(Z)[g, g]‖ over unit g,

and with L_k, β_k the gain and the curvature of site k on the ball of radius ρ_k,

    C_{k+1} = β_k G_k² + L_k C_k,   G_{k+1} = min(‖Du_{k+1}(X)‖ + ∫_0^r C_{k+1}, L_k G_k),
    ρ_{k+1} = min(r ‖Du_{k+1}(X)‖ + ∫_0^r (r - s) C_{k+1}(s) ds, ∫_0^r G_{k+1}, reach_k(ρ_k)).

Functions of r are kept at the radii r/M, 2r/M, …, r; the value at the end of an interval bounds the function on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.linalg.rounding import outward
from holdfast.network.centre import Centre, Enclosed, Stage, added, lengths, pulled, pushed

NODES = 6
RIVALS = 256  # classes whose margins have gradients of their own


@dataclass(frozen=True)
class Spread:
    """What is known about u_k over the balls of radius r/M, …, r, all (b, M): ρ_k, G_k and C_k."""

    rho: Float64[Tensor, "b m"]
    gain: Float64[Tensor, "b m"]
    curvature: Float64[Tensor, "b m"]


@dataclass(frozen=True)
class Transit:
    """A stage on the way: the spread at each of its sites, and the constants of both."""

    sites: tuple[Spread, ...]
    gains: tuple[Tensor, ...]
    curvatures: tuple[Tensor, ...]
    stage_gain: Tensor
    stage_curvature: Tensor


@dataclass(frozen=True)
class Journey:
    """The way through a run for one radius r (b): every stage, and the spread at the end."""

    r: Float64[Tensor, " b"]
    passages: tuple[Transit, ...]
    end: Spread

    def running(self, values: Float64[Tensor, "*b m"]) -> Float64[Tensor, "*b m"]:
        """∫_0^s f at each node s; f is bounded by its value at the end of each interval."""
        return outward(values.cumsum(-1) * self.step(values))

    def step(self, values: Tensor) -> Tensor:
        return (self.r / NODES).reshape(-1, *(1 for _ in values.shape[1:]))


@final
class Run:
    """The stages `first` to `last` of a centre, all smooth, and the derivatives at the centre that they need."""

    def __init__(self, centre: Centre, first: int, last: int) -> None:
        self.centre, self.stages = centre, centre.stages[first:last]
        self._first = first

    @cached_property
    def prefix_norms(self) -> list[tuple[list[Tensor], Tensor]]:
        """For every stage, ‖Du(X)‖ behind each of its sites, and behind the stage; each (b, 1)."""
        J, norms = self.centre.identity(self._first), []
        for stage in self.stages:
            start, behind = J, []
            for site in stage.sites:
                J = pushed(site, J)
                behind.append(self.centre.norm(J))
            J = added(start, J) if stage.skip else J
            norms.append((behind, self.centre.norm(J) if stage.skip else behind[-1]))
        return norms

    @cached_property
    def rivals(self) -> Int64[Tensor, " rivals"]:
        """The classes whose margins are followed back: all, or of many those that the features reach first."""
        away = (self.centre.margins / lengths(self.centre.pairs).squeeze(-1)).amin(0).nan_to_num(nan=torch.inf)
        return away.topk(min(RIVALS, len(away)), largest=False).indices.sort().values

    @cached_property
    def adjoint_lengths(self) -> list[tuple[list[Tensor], Tensor]]:
        """For every stage, the lengths of the margins' gradients before each of its sites, and before the stage.

        They are (b, rivals, 1); inside a residual stage they are those that come through the branch.
        """
        pairs, gradients = self.centre.pairs, list[tuple[list[Tensor], Tensor]]()
        adjoint = Enclosed(pairs.value[self.rivals], pairs.error[self.rivals])
        for stage in reversed(self.stages):
            end, before = adjoint, []
            for site in reversed(stage.sites):
                adjoint = pulled(site, adjoint)
                before.append(lengths(adjoint))
            adjoint = added(end, adjoint) if stage.skip else adjoint
            gradients.append((before[::-1], lengths(adjoint)))
        return gradients[::-1]

    def travel(self, r: Float64[Tensor, " b"]) -> Journey:
        """The spreads on the way, for inputs of the run within r of X."""
        fractions = torch.arange(1, NODES + 1, dtype=torch.float64, device=r.device) / NODES
        journey = Journey(r, (), Spread(outward(r.unsqueeze(-1) * fractions), *_unit(r)))
        for stage, (behind, after) in zip(self.stages, self.prefix_norms, strict=True):
            journey = self._pass(journey, stage, behind, after)
        return journey

    def _pass(self, journey: Journey, stage: Stage, behind: Sequence[Tensor], after: Tensor) -> Journey:
        start = at = journey.end
        spreads, gains, curvatures = [], [], []
        for site, norm in zip(stage.sites, behind, strict=True):
            L, beta = site.gain(at.rho), site.curvature(at.rho)
            spreads.append(at)
            gains.append(L)
            curvatures.append(beta)
            C = outward(beta * at.gain.square() + L * at.curvature)
            at = _spread(journey, norm, C, outward(L * at.gain), site.reach(at.rho))
        L, beta = gains[0], curvatures[0]
        if stage.skip:
            L, beta = stage.gain(start.rho), stage.curvature(start.rho)
            C = torch.minimum(start.curvature + at.curvature, beta * start.gain.square() + L * start.curvature)
            G = torch.minimum(start.gain + at.gain, L * start.gain)
            at = _spread(journey, after, outward(C), outward(G), outward(start.rho + at.rho))
        passage = Transit(tuple(spreads), tuple(gains), tuple(curvatures), L, beta)
        return Journey(journey.r, (*journey.passages, passage), at)


def _unit(r: Tensor) -> tuple[Tensor, Tensor]:
    """Gain 1 and curvature 0: the identity."""
    ones = torch.ones(len(r), NODES, dtype=torch.float64, device=r.device)
    return ones, torch.zeros_like(ones)


def _spread(journey: Journey, norm: Tensor, C: Tensor, G: Tensor, rho: Tensor) -> Spread:
    """The spread from ‖Du(X)‖, the curvature, and bounds of gain and distance that come from the stage before."""
    G = torch.minimum(norm + journey.running(C), G)
    step = journey.step(C)
    nodes = torch.arange(1, NODES + 1, dtype=torch.float64, device=C.device)
    weights = (nodes - nodes.unsqueeze(-1) + 0.5).clamp(min=0)  # (from, to): ∫ over one interval of (r - s) ds
    weights = torch.where(nodes >= nodes.unsqueeze(-1), weights, 0.0)
    bent = norm * (nodes * step) + (C @ weights) * step.square()
    rho = torch.minimum(rho, torch.minimum(bent, journey.running(G)))
    return Spread(outward(rho), outward(G), C)


def parts(centre: Centre) -> list[Run | Stage]:
    """The network as maximal runs of smooth stages and, between them, stages with a kink; the same at every call."""
    return centre.a.once("parts", lambda: _parts(centre))


def _parts(centre: Centre) -> list[Run | Stage]:
    parts: list[Run | Stage] = []
    first = None
    for k, stage in enumerate(centre.stages):
        if stage.smooth and first is None:
            first = k
        if not stage.smooth:
            parts += [] if first is None else [Run(centre, first, k)]
            parts.append(stage)
            first = None
    return parts if first is None else [*parts, Run(centre, first, len(centre.stages))]


def arrive(way: Sequence[Run | Stage], eps: Float64[Tensor, " b"]) -> Float64[Tensor, " b"]:
    """How far the input of what follows can move: each part takes the ball that the last one gave."""
    for part in way:
        eps = part.travel(eps).end.rho[:, -1] if isinstance(part, Run) else part.reach(eps.unsqueeze(-1)).squeeze(-1)
    return eps
