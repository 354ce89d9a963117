"""The smallest bound that applies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import ClassVar, final, get_args

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.bounds.base import EVERY_TERM, Bound, Evaluation, Need, bounds, register_bound, score_terms_of
from holdfast.bounds.lipschitz import BallBound, PointBound, ball_bounds, point_bounds, register_lipschitz_bound
from holdfast.errors import InputError, MemoryLimitError, NotApplicableError, NotFiniteError
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic

Candidate = tuple[str, str | None, Callable[[], Evaluation[Array]]]


def smallest(a: Arithmetic[Array], candidates: Iterator[Candidate[Array]]) -> Evaluation[Array]:
    """The minimum over bounds: each is its name, why it does not apply if so, and how to evaluate it.

    `terms` holds each one's value, `notes` who won and who did not apply.
    """
    values: dict[str, Tensor] = {}
    notes: list[str] = []
    for name, reason, evaluate in candidates:
        if reason is None:
            try:
                values[name] = a.number(evaluate().value).nan_to_num(nan=torch.inf, posinf=torch.inf)
            except (MemoryLimitError, NotFiniteError) as error:
                reason = str(error)
        if reason is not None:
            notes.append(f"{name} was left out: {reason}")
    if not values:
        raise NotApplicableError("no bound applies: " + "; ".join(notes))
    least = torch.stack(list(values.values())).amin(0)
    for name, value in values.items():
        if count := int((value == least).sum()):
            notes.append(f"{name} is smallest at {count} of {least.numel()} values")
        if count := int(torch.isinf(value).sum()):
            notes.append(f"{name} overflowed float64 at {count} of {least.numel()} values")
    terms = {name: a.lift(value) for name, value in values.items() if bool(torch.isfinite(value).all())}
    return Evaluation(a.lift(least), terms, tuple(notes))


@final
@register_bound
class Best(Bound):
    """The minimum of the other bounds but `pairs`.

    `terms` holds each one's value, `notes` who won and who did not apply. `pairs` is made for networks, and would take
    half as long as all others. Where eps is large it may be smaller, on about one random layer in a hundred, by up to
    a fifth: ask for it by name.
    """

    name = "best"
    score_terms = EVERY_TERM
    cost = "that of all these bounds together"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        others = (bound for bound in bounds.values() if bound.in_best and bound is not self)
        return smallest_of(others, a, layer, x, eps)


def for_networks(layer: AttentionLayer, need: Need) -> list[Bound]:
    """The bounds that attention in a network asks: those for the need, or, where none applies, the smallest ones."""
    if need not in get_args(Need):
        raise InputError(f"need is {need!r}; expected one of {get_args(Need)}")
    return _offered(layer, need) or _offered(layer, "smallest")


def refusal_in_networks(layer: AttentionLayer, need: Need) -> str | None:
    """Why no bound for the need applies to the layer, or None where one does."""
    if _offered(layer, need):
        return None
    reasons = {bound.name: bound.refusal(layer) for bound in bounds.values() if need in bound.in_networks}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _offered(layer: AttentionLayer, need: Need) -> list[Bound]:
    terms = (None, *score_terms_of(layer))
    asked = (bound for bound in bounds.values() if need in bound.in_networks and bound.in_networks_with in terms)
    return [bound for bound in asked if bound.refusal(layer) is None]


def smallest_of(
    methods: Iterable[Bound], a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array
) -> Evaluation[Array]:
    """The minimum of the given bounds, for radii as in `Bound._evaluate`."""
    return smallest(
        a, ((method.name, method.refusal(layer), partial(method._evaluate, a, layer, x, eps)) for method in methods)
    )


@final
@register_lipschitz_bound
class BestAtPoint(PointBound):
    """The minimum of the other bounds at a point; `terms` holds each one's value."""

    name = "best"
    score_terms = EVERY_TERM  # each bound speaks for itself
    cost = "that of all bounds at a point together"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        others = (bound for bound in point_bounds.values() if bound is not self)
        return smallest(
            a, ((bound.name, bound.refusal(layer), partial(bound._evaluate, a, layer, x)) for bound in others)
        )


@final
@register_lipschitz_bound
class BestOnBall(BallBound):
    """The minimum of the other bounds on a ball around 0; `terms` holds each one's value."""

    name = "best"
    score_terms = ("rotary",)
    cost = "that of all bounds on a ball around 0 together"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        return None

    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        others = (bound for bound in ball_bounds.values() if bound is not self)
        return smallest(
            a,
            (
                (bound.name, bound.refusal(layer, p), partial(bound._evaluate, a, layer, radius, tokens, p))
                for bound in others
            ),
        )
