"""Inputs of a network, certified."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import final, get_args

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg.certified import GIB
from holdfast.network.centre import Centre
from holdfast.network.compositions.base import Composition, compositions
from holdfast.network.network import Network
from holdfast.results import Guarantee

_MANY = 2**13  # numbers of a batch


@final
@dataclass(frozen=True)
class Certified:
    """One input: what is predicted, and how far it may move before that can change.

    Attributes:
        prediction: the class of the largest logit, in float64.
        decided: whether that class is proved to win at the input itself.
        margin: a lower bound of its logit's lead at the input.
        radius: no perturbation of this l2 length or less changes the prediction; 0 where nothing is proved.
        method: the composition that proved it.
        guarantee: "proved", or "numerical" where norms are iterated.
        seconds: wall time, shared equally among the inputs of a batch.
        notes: what did not apply.
        losses: what was taken off the margin at that radius, by name; empty where the composition cannot tell.
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


def certify_inputs(
    network: Network,
    x: Tensor,
    *,
    method: str = "best",
    guarantee: Guarantee = "proved",
    memory_limit: float = 4 * GIB,
) -> list[Certified]:
    """The largest proved radius of every input.

    Args:
        network: the classifier.
        x: (b, n, d) the inputs, float32 or float64.
        method: a composition's name.
        guarantee: "proved" or "numerical".
        memory_limit: bytes that one dense Jacobian, or one proved norm, may hold.

    Example:
        >>> [record.radius for record in certify_inputs(network, x)]
        [0.117, 0.093]
    """
    began = time.perf_counter()
    chosen = compositions[method]
    if guarantee not in get_args(Guarantee):
        raise InputError(f'guarantee is {guarantee!r}; expected "proved" or "numerical"')
    centre = Centre(network, x, guarantee=guarantee, memory_limit=memory_limit)
    radii = chosen(centre)
    each = (time.perf_counter() - began) / max(1, len(x))
    losses = radii.losses or ({},) * len(x)
    columns = (centre.prediction.tolist(), centre.margin.tolist(), radii.radius.tolist(), radii.methods, losses)
    found = [
        Certified(prediction, margin > 0, margin, radius, name, guarantee, each, radii.notes, lost)
        for prediction, margin, radius, name, lost in zip(*columns, strict=True)
    ]
    if x.numel() >= _MANY:
        del centre  # its parts know each other, and Python looks for such cycles too seldom where tensors are large
        gc.collect()
    return found


def proves(network: Network, x: Tensor, place: int, radius: float, *, method: str, guarantee: Guarantee) -> bool:
    """Whether a composition proves this very radius of the input at one place of a batch: there is no search."""
    chosen = compositions[method]
    if not isinstance(chosen, Composition):
        return False
    centre = Centre(network, x, guarantee=guarantee)
    if centre.separable:
        centre, place = Centre(network, x[place : place + 1], guarantee=guarantee), 0
    eps = torch.full_like(centre.margin, radius)
    return bool((chosen.curve(centre)(eps) > 0)[place] & (centre.margin > 0)[place])
