"""Inputs of a network, certified."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final, get_args

import torch
from torch import Tensor

from holdfast.compositions.base import Aim, Composition, compositions
from holdfast.errors import InputError
from holdfast.linalg.certified import GIB
from holdfast.linalg.threat import L2, Threat
from holdfast.network.centre import Centre
from holdfast.network.network import Network
from holdfast.results import Guarantee

_MANY = 2**10  # numbers of a batch


@final
@dataclass(frozen=True)
class Certified:
    """One input: its prediction, and how far it may move before that can change.

    Attributes:
        prediction: the class of the largest logit, in float64.
        decided: whether that class is proved to win at the input itself.
        margin: a lower bound of its logit's lead at the input itself, whatever the radius.
        radius: no perturbation of this length or less changes the prediction; 0 where nothing is proved.
        method: the composition that proved it.
        through: "ball" where boxes were requested and the composition proved it over the balls around them.
        guarantee: "proved", or "numerical" where norms are iterated.
        seconds: wall time, shared equally among the inputs of a batch.
        notes: what did not apply.
        losses: what was taken off the margin at that radius, by name; empty where nothing is proved, or the time was
            over before it was known.
        unfinished: what was left out for lack of time.
    """

    prediction: int
    decided: bool
    margin: float
    radius: float
    method: str
    guarantee: Guarantee
    seconds: float
    notes: tuple[str, ...] = ()
    losses: dict[str, float] = field(default_factory=dict)
    through: str | None = None
    unfinished: tuple[str, ...] = ()


def certify_inputs(
    network: Network,
    x: Tensor,
    *,
    method: str = "best",
    guarantee: Guarantee = "proved",
    memory_limit: float = 4 * GIB,
    threat: Threat = L2,
    at: Sequence[float] = (),
    seconds: float | None = None,
) -> list[Certified]:
    """The largest proved radius of every input, or the largest of some radii.

    Args:
        network: the classifier.
        x: (b, n, d) the inputs, float32 or float64.
        method: a composition's name.
        guarantee: "proved" or "numerical".
        memory_limit: bytes that one dense Jacobian, or one proved norm, may use.
        threat: what may become of an input.
        at: decide only at these radii, which is quicker than finding the largest.
        seconds: for each input; after that nothing is begun, and the best so far counts. None for no limit.

    Example:
        >>> [record.radius for record in certify_inputs(network, x)]
        [0.117, 0.093]
    """
    began = time.perf_counter()
    chosen = compositions[method]
    if guarantee not in get_args(Guarantee):
        raise InputError(f'guarantee is {guarantee!r}; expected "proved" or "numerical"')
    deadline = math.inf if seconds is None else time.monotonic() + seconds * len(x)
    centre = Centre(network, x, guarantee=guarantee, memory_limit=memory_limit, deadline=deadline, dense=chosen.dense)
    radii = chosen(centre, None, Aim(threat, tuple(at)))
    per_input = (time.perf_counter() - began) / max(1, len(x))
    losses = radii.losses or ({},) * len(x)
    columns = (centre.prediction.tolist(), radii.lead.tolist(), radii.radius.tolist(), radii.methods, losses)
    records = [
        Certified(
            prediction,
            margin > 0,
            margin,
            radius,
            name,
            guarantee,
            per_input,
            radii.notes,
            lost,
            compositions[name].through(threat),
            radii.unfinished,
        )
        for prediction, margin, radius, name, lost in zip(*columns, strict=True)
    ]
    if x.numel() >= _MANY:
        del centre  # parts of some compositions refer to each other: cycles, which Python collects too seldom
        gc.collect()
    return records


def proves(
    network: Network,
    x: Tensor,
    place: int,
    radius: float,
    *,
    method: str,
    guarantee: Guarantee,
    threat: Threat = L2,
) -> bool:
    """Whether a composition proves this very radius for one input of a batch, without a search."""
    chosen = compositions[method]
    if not isinstance(chosen, Composition):
        return False
    centre = Centre(network, x, guarantee=guarantee, dense=chosen.dense)
    if centre.separable:
        centre, place = Centre(network, x[place : place + 1], guarantee=guarantee, dense=chosen.dense), 0
    eps = torch.full_like(centre.margin, radius)
    return bool((chosen.curve(centre, threat)(eps) > 0)[place] & (chosen.lead(centre) > 0)[place])
