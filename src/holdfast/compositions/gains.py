"""Stage by stage, with nothing that grows faster than a pass: for images and other large inputs."""

from __future__ import annotations

from functools import partial
from typing import final

from torch import Tensor

from holdfast.bounds.best import refusal_in_networks
from holdfast.compositions.base import (
    Composition,
    Curve,
    Reach,
    linear_end,
    register_composition,
    smallest_margin,
    stage_reach,
)
from holdfast.layers.attention.piece import Attention
from holdfast.network.centre import Centre
from holdfast.network.network import Network
from holdfast.network.site import LARGE, Site


@final
@register_composition
class Gains(Composition):
    """min_j m_j - ‖T_jᵀ‖ δ_K as in `layerwise`, where attention moves by bounds that are quick, at the very radii δ_k.

    The quick bound is `pairs`. No norm of a map on all tokens is taken, and norms of weights once for a network.
    """

    name = "gains"
    cost = "for every attention 3hn norms of size k x k, and for some radii an eigenvalue of size 3hn"
    reference = "docs/math/second-order.md, Theorem 9"
    quick = for_large = needs_no_guess = needs_no_slope = True
    precision = 1e-4

    def refusal(self, network: Network) -> str | None:
        layers = (piece.layer for piece in network.pieces() if isinstance(piece, Attention))
        return next((why for layer in layers if (why := refusal_in_networks(layer, "quick")) is not None), None)

    def _curve(self, centre: Centre) -> Curve:
        before, slopes = linear_end(centre, LARGE)
        stages = [stage_reach(stage, _site_reach) for stage in before]

        def margins(eps: Tensor) -> Tensor:
            delta = eps.unsqueeze(-1)
            for reach in stages:
                delta = reach(delta)
            return smallest_margin(centre, slopes * delta)

        return margins


def _site_reach(site: Site) -> Reach:
    return partial(site.own_reach, need="quick")
