"""The telescoped certificate: margins as cubic polynomials of the perturbation, and local remainders only."""

from __future__ import annotations

from typing import final

from torch import Tensor

from holdfast.errors import MemoryLimitError
from holdfast.network import expansion
from holdfast.network.centre import Centre
from holdfast.network.compositions.base import Composition, Curve, over_others, register_composition
from holdfast.network.curves import or_unbounded
from holdfast.network.expansion import Cubic, Expansion
from holdfast.network.network import Network

_LARGEST_INPUT = 160  # numbers that may move: the cubic polynomials have its third power


@final
@register_composition
class Telescoped(Composition):
    """The network's own first three derivatives, minimised over the ball, less a bound of all that they leave out.

    docs/math/telescoped.md proves it. Derivatives at the input are exact; nothing is carried from piece to piece by
    norms but the local remainders, and these by the exact Jacobians in between.
    """

    name = "telescoped"
    cost = "p²/2 passes for p input numbers, one Jacobian for every piece; each radius is cheap after that"
    reference = "docs/math/telescoped.md"
    assumptions = "smooth pieces, at most 160 numbers that may move"
    for_large = one_by_one = needs_no_guess = True
    most_inputs = _LARGEST_INPUT

    def refusal(self, network: Network) -> str | None:
        return expansion.refusal(network)

    def _curve(self, centre: Centre) -> Curve:
        p = centre.x.shape[-2] * centre.x.shape[-1]
        if p > _LARGEST_INPUT:
            raise MemoryLimitError(
                f"telescoped needs third derivatives along {p} numbers and takes at most {_LARGEST_INPUT}; "
                "perturb a part of the input, or use margin-gradient"
            )
        at = _expansion(centre)
        cubic = Cubic(at.gradient, at.hessian, at.twist)

        def margins(eps: Tensor) -> Tensor:
            least = cubic.least(eps.unsqueeze(-1).expand(at.margins.shape))
            lost = or_unbounded(at.left_out(eps))
            left = at.margins + least - lost - (at.margins.abs() + least.abs() + lost) * 2.0**-50
            return over_others(at.prediction, left)

        return margins


def _expansion(centre: Centre) -> Expansion:
    like = None if centre.like is None else _expansion(centre.like)
    return centre.a.once("expansion", lambda: Expansion(centre.network, centre.x, like))
