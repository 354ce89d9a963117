"""The telescoped certificate: margins as cubic polynomials of the perturbation, and local remainders only."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.base import Composition, Curve, over_others, register_composition
from holdfast.compositions.telescoped.expansion import Expansion, refusal
from holdfast.compositions.telescoped.minimum import Cubic
from holdfast.errors import MemoryLimitError
from holdfast.linalg.curves import or_unbounded
from holdfast.network.centre import Centre
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
        return refusal(network)

    def _curve(self, centre: Centre) -> Curve:
        p = centre.x.shape[-2] * centre.x.shape[-1]
        if p > _LARGEST_INPUT:
            raise MemoryLimitError(
                f"telescoped needs third derivatives along {p} numbers and takes at most {_LARGEST_INPUT}; "
                "perturb a part of the input, or use margin-gradient"
            )
        at, cubic = _polynomials(centre)

        def margins(eps: Tensor) -> Tensor:
            return over_others(at.prediction, _left(at, cubic, eps))

        return margins

    def _losses(self, centre: Centre, eps: Tensor, half: Tensor | None, left: Tensor) -> tuple[dict[str, float], ...]:
        at, cubic = _polynomials(centre)
        own = torch.nn.functional.one_hot(at.prediction, at.margins.shape[-1]).bool()
        worst = _left(at, cubic, eps).masked_fill(own, torch.inf).argmin(-1).tolist()
        beyond = at.rests(eps) | {"rounding": at.rounding(eps)}
        return tuple(
            _orders(at, i, j, e) | {name: float(rest[i, j]) for name, rest in beyond.items()} if e > 0 else {}
            for i, (j, e) in enumerate(zip(worst, eps, strict=True))
        )


def _polynomials(centre: Centre) -> tuple[Expansion, Cubic]:
    at = _expansion(centre)
    return at, centre.a.once("cubic", lambda: Cubic(at.gradient, at.hessian, at.twist))


def _left(at: Expansion, cubic: Cubic, eps: Float64[Tensor, " b"]) -> Float64[Tensor, "b classes"]:
    """Lower bounds of all margins."""
    least = cubic.least(eps.unsqueeze(-1).expand(at.margins.shape))
    lost = or_unbounded(at.left_out(eps))
    return at.margins + least - lost - (at.margins.abs() + least.abs() + lost) * 2.0**-50


def _orders(at: Expansion, i: int, j: int, eps: Float64[Tensor, ""]) -> dict[str, float]:
    """What the polynomial of one margin loses on the ball, order by order: each with all that stand before it."""
    g, H, T = at.gradient[i, j], at.hessian[i, j], at.twist[i, j]
    first = float(eps * torch.linalg.vector_norm(g))
    second, third = (-float(Cubic(g, H, order * T).least(eps)) for order in (0.0, 1.0))
    return {"first order": first, "second order": second - first, "third order": third - second}


def _expansion(centre: Centre) -> Expansion:
    like = None if centre.like is None else _expansion(centre.like)
    return centre.a.once("expansion", lambda: Expansion(centre.network, centre.x, like))
