"""The gradients of the margins at the input, and a bound of their second derivatives (docs/math/network.md, Theorem 2).

Along X + tG, D²m[G, G] = Σ_k ⟨λ_k, D²f_k(u_k)[u̇_k, u̇_k]⟩, where λ_k is the margin's gradient after site k. The forward
constants are those of `segments.py`; backward, Λ_k(r) >= ‖λ_k‖ and c_k(r) >= ‖dλ_k/dt‖ for unit G:

    c ← L_k c + β_k Λ G_k,   Λ ← min(‖λ(X)‖ + ∫_0^r c, L_k Λ)        from behind site k to before it.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.base import Composition, Curve, register_composition, smallest_margin
from holdfast.compositions.segments import NODES, Journey, Run, arrive, parts
from holdfast.layers.piece import SmoothPiece
from holdfast.linalg.rounding import outward
from holdfast.network.centre import Centre, lengths
from holdfast.network.network import Network, Residual


@final
@register_composition
class MarginGradient(Composition):
    """min_j m_j - eps ‖∇m_j(X)‖ - ∫_0^eps (eps - r) Σ_k Λ_k(r) β_k G_k(r)² dr, or from slopes alone where that is more.

    Where there is a kink this holds for the smooth stages behind the last one, over the ball that reaches them. Of many
    classes those that the features reach first are followed back to the input; the others are as in `end-to-end`.
    """

    name = "margin-gradient"
    dense = True
    cost = "that of end-to-end, and one backward pass for every class"
    reference = "holdfast"
    assumptions = "two derivatives from the last stage backwards"

    def refusal(self, network: Network) -> str | None:
        if not network.stages:
            return "it has no stage; use layerwise"
        last = network.stages[-1]
        pieces = last.pieces if isinstance(last, Residual) else (last,)
        kinked = next((type(piece).__name__ for piece in pieces if not isinstance(piece, SmoothPiece)), None)
        return None if kinked is None else f"its last stage has a kink ({kinked}); use layerwise or end-to-end"

    def _curve(self, centre: Centre) -> Curve:
        *way, tail = parts(centre)
        assert isinstance(tail, Run)

        def margins(eps: Tensor) -> Tensor:
            return smallest_margin(centre, _lost(tail, tail.travel(arrive(way, eps))))

        return margins


def _lost(run: Run, journey: Journey) -> Float64[Tensor, "b classes"]:
    """A bound of m_j(X) - m_j(Z) over the ball of radius r around the exact input X of the run."""
    head = lengths(run.centre.pairs)
    slope = head[:, run.rivals].expand(-1, -1, NODES)
    turn, bend = torch.zeros_like(slope), torch.zeros_like(slope)
    for stage, passage, (before, ahead) in zip(
        reversed(run.stages), reversed(journey.passages), reversed(run.adjoint_lengths), strict=True
    ):
        end_slope, end_turn = slope, turn
        steps = zip(passage.sites, passage.gains, passage.curvatures, before, strict=True)
        for at, L, beta, length in reversed(list(steps)):
            L, beta, G = L.unsqueeze(-2), beta.unsqueeze(-2), at.gain.unsqueeze(-2)
            pull = outward(slope * beta * G)
            bend = outward(bend + pull * G)
            turn = outward(L * turn + pull)
            slope = outward(torch.minimum(length + journey.running(turn), L * slope))
        if stage.skip:
            L, beta = passage.stage_gain.unsqueeze(-2), passage.stage_curvature.unsqueeze(-2)
            G = passage.sites[0].gain.unsqueeze(-2)
            turn = outward(torch.minimum(end_turn + turn, L * end_turn + beta * end_slope * G))
            slope = torch.minimum(torch.minimum(end_slope + slope, L * end_slope), ahead + journey.running(turn))
            slope = outward(slope)
    gradient, step = run.adjoint_lengths[0][1].squeeze(-1), (journey.r / NODES).unsqueeze(-1)
    weights = torch.arange(NODES - 0.5, 0, -1, dtype=torch.float64, device=slope.device)
    bent = gradient * journey.r.unsqueeze(-1) + (torch.minimum(bend, turn) @ weights) * step.square()
    moved = head.squeeze(-1) * journey.end.rho[:, -1:]
    near = torch.minimum(torch.minimum(bent, slope.sum(-1) * step), moved[:, run.rivals])
    return outward(moved.index_copy(-1, run.rivals, near))
