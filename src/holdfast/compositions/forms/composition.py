"""Margins by quadratic forms: kinks as parabolas, attention's exact second order, and rests carried by scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.base import Aim, Composition, Curve, register_composition
from holdfast.compositions.forms import Lower, Margins, refusal
from holdfast.compositions.search import Reached, decided
from holdfast.errors import MemoryLimitError, TimeLimitError
from holdfast.linalg.threat import Threat
from holdfast.network.centre import Centre
from holdfast.network.network import Network

_STEP = 1e-2  # of a radius, where its rests are settled
_LONG = 3e8  # numbers of third orders of all functions: what takes seconds


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
    assumptions = "activations that are smooth or bend at zero; normalisations; affine pieces"
    shapes = frozenset({"ball", "box"})
    for_large = one_by_one = needs_no_guess = True
    most_inputs = 4096
    instead = "telescoped"
    precision = 0.05  # rests are settled for a few radii only

    def refusal(self, network: Network) -> str | None:
        return refusal(network)

    def takes_long(self, centre: Centre) -> bool:
        walk, p = (one := Margins(centre.network, centre.x[0])).walk, one.region.p
        return p**3 * sum(walk.local(i).scalars for i in walk.curved) > _LONG

    def lead(self, centre: Centre) -> Float64[Tensor, " b"]:
        """By forms, too: they count rounding piece by piece, where balls of the whole network may hide the lead."""
        if bool((centre.margin > 0).all()):
            return centre.margin
        try:
            with torch.no_grad(), centre.a.timed():
                own = _least(centre, _margins(centre, None), Margins.decide)(torch.zeros_like(centre.margin))
        except (TimeLimitError, MemoryLimitError):
            return centre.margin
        return torch.maximum(centre.margin, own)

    def _curve(self, centre: Centre) -> Curve:
        return _least(centre, _margins(centre, None))

    def _box_curve(self, centre: Centre, half: Float64[Tensor, "b n d"]) -> Curve:
        return _least(centre, _margins(centre, half))

    def _largest(
        self, centre: Centre, threat: Threat, begin: Tensor, least: Tensor, most: Tensor, stride: float
    ) -> Reached:
        """Rests are settled for a few radii only; what is not worth a look below `least` is 0."""
        try:
            with centre.a.timed():
                forms = _margins(centre, torch.ones_like(centre.x) if threat.boxed else None)
                radii = [one.largest(_STEP, known) for one, known in zip(forms, least.tolist(), strict=True)]
        except TimeLimitError:
            return Reached(torch.zeros_like(begin), centre.margin, cut=True)
        margin = [one.decide(r).least if r > 0 else 0.0 for one, r in zip(forms, radii, strict=True)]  # known by now
        radius = torch.where(begin > 0, begin.new_tensor(radii).minimum(most), 0.0)
        return Reached(radius, begin.new_tensor(margin), cut=centre.a.overdue())

    def _decide(self, centre: Centre, lead: Tensor, known: Tensor, aim: Aim) -> Reached:
        """At given radii no more is bounded than their answers need."""

        def over(around: Centre, half: Tensor | None) -> Curve:
            return _least(around, _margins(around, half), Margins.decide)

        return decided(self._followed(centre, aim.threat, over), None, lead, aim.at, known)

    def _losses(self, centre: Centre, eps: Tensor, half: Tensor | None, left: Tensor) -> tuple[dict[str, float], ...]:
        pairs = zip(_margins(centre, half), eps.tolist(), strict=True)
        return tuple(one.decide(scale).losses if scale > 0 else {} for one, scale in pairs)


def _least(centre: Centre, forms: list[Margins], lower: Callable[[Margins, float], Lower] = Margins.at) -> Curve:
    """Of the class that the centre predicts: where rounding leaves no lead, forms may have taken another one."""
    same = centre.prediction == torch.tensor([one.prediction for one in forms], device=centre.prediction.device)

    def margins(eps: Tensor) -> Tensor:
        least = eps.new_tensor([lower(one, scale).least for one, scale in zip(forms, eps.tolist(), strict=True)])
        return least.masked_fill(~same, -torch.inf)

    return margins


def _margins(centre: Centre, half: Tensor | None) -> list[Margins]:
    """At every input of the centre; what was asked for last is kept."""
    shapes = [None] * len(centre.x) if half is None else list(half)
    name = "forms" if half is None else "forms of boxes"

    def at_every_input() -> list[Margins]:
        pairs = zip(centre.x, shapes, strict=True)
        return [Margins(centre.network, x, shape, centre.a.overdue) for x, shape in pairs]

    return centre.a.once(name, at_every_input, half)
