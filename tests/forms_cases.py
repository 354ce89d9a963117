"""Attacks on what forms claim: of margins, and of every scalar on which a later piece depends."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holdfast.compositions.forms import Margins, settled
from holdfast.compositions.forms.local import Problem
from holdfast.network import Network, Residual
from holdfast.testing.draw import Dice


def descend(
    objective: Callable[[Tensor], Tensor], start: Tensor, inside: Callable[[Tensor], Tensor], step: float
) -> Tensor:
    """Points of the region where the objective (of each of a batch) is small."""
    G = inside(start)
    best, found = torch.full((len(G),), math.inf).double(), G
    for k in range(14):
        G = G.detach().requires_grad_()
        with torch.enable_grad():
            value = objective(G)
            (slope,) = torch.autograd.grad(value.sum(), G)
        less = value.detach() < best
        best, found = torch.where(less, value.detach(), best), torch.where(less[:, None, None], G.detach(), found)
        length = slope.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-30)
        G = inside(G.detach() - step * 0.8**k * slope / length)
    return found


def region(
    x: Tensor, scale: float, shape: Tensor | None, seed: int, count: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Starts on the boundary, and the projection onto the region."""
    start = Dice(seed).normal(count, *x.shape[1:])
    if shape is None:
        return start / start.flatten(1).norm(dim=1)[
            :, None, None
        ] * scale, lambda G: G * (scale / G.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-300)).clamp(max=1.0)
    return start.sign() * shape * scale, lambda G: torch.maximum(torch.minimum(G, shape * scale), -shape * scale)


def worst_excess(forms: Margins, x: Tensor, scale: float, shape: Tensor | None, seed: int) -> float:
    """How far an attack gets beyond what is claimed of margins, and of all scalars; not positive if all holds."""
    network, walk = forms.walk.network, forms.walk
    lower, worst = forms.at(scale), -math.inf
    start, inside = region(x, scale, shape, seed, 4)
    length = float(start.flatten(1).norm(dim=1).max())
    for j in range(len(network.head.bias)):
        if j != forms.prediction:

            def margin(G: Tensor, j: int = j) -> Tensor:
                logits: Tensor = network(x + G)
                return logits[:, forms.prediction] - logits[:, j]

            G = descend(margin, start, inside, length)
            worst = max(worst, float(lower.margins[j] - margin(G).min()))
    before = {id(place.piece): i for i, place in enumerate(walk.places)}
    for i, (low, high) in forms.beyond.items():
        named, _ = walk.places[i].local.covectors(forms.tokens[i])  # type: ignore[union-attr]
        C = named.whole
        first = forms.first_order(i) @ forms.region.basis.mT
        pick = torch.linspace(0, len(C) - 1, 5).long()

        def rest(G: Tensor, i: int = i, C: Tensor = C[pick], first: Tensor = first[pick]) -> Tensor:
            moved = displacement(network, x + G, before, i) - walk.places[i].u
            sides = forms.region.sides
            flat = G.flatten(1) if shape is None or sides is None else G.flatten(1) / shape.flatten() * sides
            return torch.einsum("bnd,knd->bk", moved, C) - flat @ first.mT

        scattered = rest(inside(region(x, scale, shape, seed + 2, 200)[0]), i, C, first)  # before a kink nothing slopes
        worst = max(worst, float((scattered - high).max()), float((-scattered - low).max()))
        for sign, bound in ((1.0, high[pick]), (-1.0, low[pick])):
            many, within = region(x, scale, shape, seed + 1, len(pick))
            G = descend(lambda G, s=sign: -s * rest(G).diagonal(), many, within, length)  # type: ignore[misc]
            worst = max(worst, float((sign * rest(G).amax(0) if sign > 0 else -rest(G).amin(0)).sub(bound).max()))
    return worst


def displacement(network: Network, u: Tensor, before: dict[int, int], place: int) -> Tensor:
    """The input of one place."""
    for stage in network.stages:
        v = u
        for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
            if before.get(id(piece)) == place:
                return v
            v = piece.value(v)
        u = u + v if isinstance(stage, Residual) else v
    raise AssertionError(place)


def above_minorant(network: Network, x: Tensor, scale: float, seed: int) -> float:
    """How far a margin lies below its own minorant at some point of the ball; not positive if all holds.

    The minorant is the quadratic polynomial and the kinks whose least value is a bound: at every point it must be below
    the margin, so that a rest that is too small shows wherever it is.
    """
    problems: list[Problem] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = settled.Minorant
        patch.setattr(settled, "Minorant", lambda problem, *rest: (problems.append(problem), plain(problem, *rest))[1])
        forms = Margins(network, x[0])
        j = int(forms.at(scale).margins.argmin())
    gradient = forms.gradients[forms.walk.others.index(j)]
    problem = next((p for p in problems if torch.equal(p.gradient, gradient) and p.finite), None)
    if problem is None:
        return -math.inf  # nothing is claimed

    def above(G: Tensor) -> Tensor:
        logits, b = network(x + G), G.flatten(1) @ forms.region.basis
        kinks = (b @ problem.x.mT - problem.threshold).clamp(min=0.0) @ problem.weight
        minorant = problem.value + b @ problem.gradient + ((b @ problem.form) * b).sum(-1) - kinks
        return logits[:, forms.prediction] - logits[:, j] - minorant

    start, inside = region(x, scale, None, seed, 100)
    start = start * torch.linspace(0.1, 1.0, len(start), dtype=torch.float64)[:, None, None]
    return -float(above(descend(above, start, inside, scale / 4)).min())
