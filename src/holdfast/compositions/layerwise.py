"""Stage by stage, each with its best bound."""

from __future__ import annotations

from typing import final

from torch import Tensor

from holdfast.compositions.base import Composition, Curve, linear_end, register_composition, smallest_margin
from holdfast.network.centre import Centre
from holdfast.network.network import Network


@final
@register_composition
class Layerwise(Composition):
    """min_j m_j - ‖T_jᵀ‖ δ_K, where δ_{k+1} is the reach of stage k for movements δ_k of its input.

    T_j is the row w_y - w_j of the head together with the linear stages before it, such as the mean over tokens.
    """

    name = "layerwise"
    cost = "the best bound of every stage, at a few radii"
    reference = "holdfast"

    def refusal(self, network: Network) -> str | None:
        return None

    def _curve(self, centre: Centre) -> Curve:
        stages, slopes = linear_end(centre)

        def margins(eps: Tensor) -> Tensor:
            delta = eps.unsqueeze(-1)
            for stage in stages:
                delta = stage.reach(delta)
            return smallest_margin(centre, slopes * delta)

        return margins
