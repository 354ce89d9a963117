"""How far the features move, from exact Jacobians at the input and the curvature of all stages."""

from __future__ import annotations

from typing import final

from torch import Tensor

from holdfast.compositions.base import Composition, Curve, register_composition, smallest_margin
from holdfast.compositions.segments import arrive, parts
from holdfast.layers.piece import SmoothPiece
from holdfast.network.centre import Centre, lengths
from holdfast.network.network import Network


@final
@register_composition
class EndToEnd(Composition):
    """min_j m_j - ‖w_y - w_j‖ ρ(eps), ρ <= eps ‖Dz(X)‖ + ∫_0^eps (eps - r) C(r) dr for the features z.

    Dz(X) is assembled at the input, and C bounds the second derivative of z (docs/math/network.md, Theorem 1). At a
    kink the recursion starts afresh with the ball that the kinked stage gives.
    """

    name = "end-to-end"
    cost = "for every piece its curvature at a few radii, and one norm of a dense prefix Jacobian"
    reference = "holdfast"
    assumptions = "a piece with two derivatives"

    def refusal(self, network: Network) -> str | None:
        smooth = any(isinstance(piece, SmoothPiece) for piece in network.pieces())
        return None if smooth else "every piece has a kink, and there is no curvature to use; use layerwise"

    def _curve(self, centre: Centre) -> Curve:
        way, slopes = parts(centre), lengths(centre.pairs).squeeze(-1)

        def margins(eps: Tensor) -> Tensor:
            return smallest_margin(centre, slopes * arrive(way, eps).unsqueeze(-1))

        return margins
