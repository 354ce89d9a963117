"""The recursion of Havens et al. 2024: one bound after the other, and Proposition 1 at the end."""

from __future__ import annotations

from typing import final

from torch import Tensor

from holdfast.bounds import bounds
from holdfast.bounds.lofast import Lofast, Splitting, score_movement
from holdfast.compositions.base import Composition, Curve, Reach, register_composition, smallest_margin, stage_reach
from holdfast.layers.attention.piece import Attention
from holdfast.linalg.rounding import ROOT2, outward
from holdfast.network.centre import Centre
from holdfast.network.network import Network
from holdfast.network.site import Site


@final
@register_composition
class LofastComposition(Composition):
    """margin - √2 ‖W‖ δ_K, where δ_{k+1} bounds the movement of stage k's output for movements δ_k of its input.

    Attention moves by Theorem 1, δ = ε ζ + Σ_l ε (‖M_l‖ + ε ‖A_l‖)(‖X C_l‖ + ε ‖C_l‖); every other piece by its own
    reach; W is the head (Havens et al. 2024, Proposition 1 and section 5.2).
    """

    name = "lofast"
    cost = "for every attention one norm of size nd x nd, and one of size n² x nd for every head"
    reference = "havens2024"

    def refusal(self, network: Network) -> str | None:
        layers = (piece.layer for piece in network.pieces() if isinstance(piece, Attention))
        return next((why for layer in layers if (why := bounds[Lofast.name].refusal(layer)) is not None), None)

    def _curve(self, centre: Centre) -> Curve:
        stages = [stage_reach(stage, _site_reach) for stage in centre.stages]
        a = centre.a
        head = a.number(a.matrix_norm(a.lift(centre.network.head.weight.to(centre.x))))

        def margins(eps: Tensor) -> Tensor:
            delta = eps.unsqueeze(-1)
            for reach in stages:
                delta = reach(delta)
            return smallest_margin(centre, ROOT2 * head * delta)

        return margins


def _site_reach(site: Site) -> Reach:
    """Theorem 1 as the polynomial that it is, with its norms computed once; ũ stands within r of the exact input."""
    if not isinstance(site.piece, Attention):
        return site.own_reach
    layer = site.piece.layer.to(device=site.u.device)
    terms = bounds[Lofast.name](layer, site.u, 1.0, guarantee=site.a.guarantee).terms
    zeta, heads = terms["zeta"], [terms[name] for name in ("norm_M", "norm_A", "norm_XC", "norm_C")]
    M, A, XC, C = (term.expand(*zeta.shape, -1) for term in heads)

    def theorem(rho: Tensor) -> Tensor:
        return outward(Splitting.of(zeta, score_movement(M, A, rho), XC, C, rho).total)

    return lambda rho: theorem(outward(rho + site.r.unsqueeze(-1))) + theorem(site.r.unsqueeze(-1))
