"""The largest radius of all compositions."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import MemoryLimitError, NotApplicableError
from holdfast.network.attention import Attention
from holdfast.network.centre import Centre
from holdfast.network.compositions.base import Method, Radii, compositions, register_composition
from holdfast.network.network import Network


@final
@register_composition
class BestComposition(Method):
    """The largest radius of every composition that applies, and which one it was.

    The one that reaches farthest as a rule goes first. Another one is then asked whether it certifies more, which it
    finds out without a proof (see `Composition`), and proves only if so. Every radius that is returned is proved; one
    that a guess misses is lost, and nothing else.
    """

    name = "best"
    cost = "that of the winner as a rule; the others are tried in plain float64"
    reference = "holdfast"

    def refusal(self, network: Network) -> str | None:
        return None

    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None) -> Radii:
        found: list[Radii] = []
        notes: list[str] = []
        methods = [method for method in compositions.values() if method is not self]
        if (sizes := _large(centre)) is not None:
            moving = centre.x[0].numel()
            fit = [method for method in methods if method.for_large and moving <= method.most_inputs]
            left_out = ", ".join(method.name for method in methods if method not in fit)
            notes.append(f"attention on {sizes} numbers was too large for {left_out}; call one by its name to insist")
            methods = fit
        # The later ones reach farther as a rule.
        for method in reversed(methods):
            try:
                found.append(method(centre, beyond))
            except (MemoryLimitError, NotApplicableError) as reason:
                notes.append(str(reason))
            else:
                beyond = found[-1].radius if beyond is None else torch.maximum(beyond, found[-1].radius)
        if not found:
            raise NotApplicableError("no composition applies: " + "; ".join(notes))
        radius, winner = torch.stack([one.radius for one in found]).max(0)
        margin = torch.stack([one.margin for one in found]).gather(0, winner.unsqueeze(0)).squeeze(0)
        winners = tuple(found[which].methods[i] for i, which in enumerate(winner.tolist()))
        losses = tuple(found[which].losses[i] if found[which].losses else {} for i, which in enumerate(winner.tolist()))
        return Radii(radius, margin, winners, tuple(notes), losses)


def _large(centre: Centre) -> str | None:
    """The tokens and width at the first attention on many numbers, or None."""
    sites = (site for stage in centre.stages for site in stage.sites)
    return next(("x".join(map(str, s.u.shape[-2:])) for s in sites if s.large and isinstance(s.piece, Attention)), None)
