"""One batch of inputs: what is proved of them, and what an attack finds. It depends on nothing else."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.certification.examples import Batch, Entered, enter
from holdfast.certification.lines import Record
from holdfast.certification.settings import Settings
from holdfast.graph import Readings
from holdfast.network.compositions import certify_inputs
from holdfast.network.network import Network
from holdfast.results import UNDECIDED, Certificate, RadiusEstimate


def examine(
    model: Network | nn.Module,
    batch: Batch,
    settings: Settings,
    device: str = "cpu",
    readings: Readings | None = None,
) -> list[Record]:
    """One record for each input of a batch, computed on the device; a model that was read before is not read again."""
    entered = enter(model, batch.inputs, settings, readings).to(device)
    found = certify_inputs(entered.network, entered.x, method=settings.method, guarantee=settings.guarantee)
    predictions = [each.prediction if each.decided else UNDECIDED for each in found]
    attacks = _attack(entered, predictions, settings)
    kind = Certificate if settings.guarantee == "proved" else RadiusEstimate
    return [
        kind(
            index=index,
            label=label,
            prediction=prediction,
            margin=each.margin if math.isfinite(each.margin) else -sys.float_info.max,
            radius=each.radius,
            method=each.method,
            guarantee=each.guarantee,
            attack_radius=nearest.radius,
            seconds=each.seconds + nearest.seconds,
            perturbation=nearest.perturbation,
        )
        for index, label, prediction, each, nearest in zip(
            batch.indices, batch.labels, predictions, found, attacks, strict=True
        )
    ]


@dataclass(frozen=True)
class _Nearest:
    """The perturbation that was found for one input; no radius where none was searched."""

    radius: float | None = None
    perturbation: Tensor | None = None
    seconds: float = 0.0


def _attack(entered: Entered, predictions: list[int], settings: Settings) -> list[_Nearest]:
    x = entered.x
    if settings.attack is None:
        return [_Nearest()] * len(x)
    nearest = [_Nearest(0.0)] * len(x)  # where no class is ahead, no perturbation is needed
    decided = [i for i, prediction in enumerate(predictions) if prediction != UNDECIDED]
    if decided:
        answers = torch.tensor([predictions[i] for i in decided], device=x.device)
        change = settings.attack(entered.network, x[decided], answers, settings.seed)
        each = change.seconds / len(decided)
        for i, radius, perturbation in zip(decided, change.radius.tolist(), change.perturbation.cpu(), strict=True):
            nearest[i] = _Nearest(radius, perturbation.clone(), each)
    return nearest
