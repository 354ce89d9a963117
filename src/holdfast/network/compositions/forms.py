"""Margins by quadratic forms: kinks as parabolas, attention's exact second order, and rests carried by scalars."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from holdfast.network.centre import Centre
from holdfast.network.compositions.base import Composition, Curve, register_composition
from holdfast.network.forms import Margins, refusal
from holdfast.network.network import Network


@final
@register_composition
class Forms(Composition):
    """One trust-region problem for every margin: its gradient, its Hessian and the forms of all that these leave out.

    docs/math/forms.md proves it. Every number on which a later piece depends (a pre-activation, a logit, a coordinate
    of a query, key or value) is followed back to the input by its own covector.
    """

    name = "forms"
    cost = "a pass for every pre-activation, logit, query, key and value; matrices of the rank of the first affine map"
    reference = "docs/math/forms.md"
    assumptions = "attention without rotary positions, perceptrons with relu or |·|, affine pieces"
    for_large = one_by_one = needs_no_guess = True
    most_inputs = 4096
    precision = 1e-2

    def refusal(self, network: Network) -> str | None:
        return refusal(network)

    def _curve(self, centre: Centre) -> Curve:
        forms = _margins(centre)

        def margins(eps: Tensor) -> Tensor:
            return torch.tensor([one.at(float(e)).least for one, e in zip(forms, eps, strict=True)], dtype=eps.dtype)

        return margins

    def _losses(self, centre: Centre, radius: Tensor) -> tuple[dict[str, float], ...]:
        return tuple(
            one.at(float(e)).losses if float(e) > 0 else {} for one, e in zip(_margins(centre), radius, strict=True)
        )


def _margins(centre: Centre) -> list[Margins]:
    return centre.a.once("forms", lambda: [Margins(centre.network, x) for x in centre.x])
