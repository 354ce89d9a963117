"""One batch of inputs: what is proved about them, and what an attack finds. It depends on nothing else."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.certification.examples import Batch, Entered, enter
from holdfast.certification.lines import Record
from holdfast.certification.settings import Settings
from holdfast.compositions import certify_inputs
from holdfast.graph import Readings
from holdfast.network.network import Network
from holdfast.results import UNDECIDED, Certificate, RadiusEstimate


def examine(
    model: Network | nn.Module,
    batch: Batch,
    settings: Settings,
    device: str = "cpu",
    readings: Readings | None = None,
) -> list[Record]:
    """One record per input of a batch, computed on the device; a model that was read before is not read again."""
    entered = enter(model, batch.inputs, settings, readings, device)
    proofs = certify_inputs(
        entered.network,
        entered.x,
        method=settings.method,
        guarantee=settings.guarantee,
        threat=settings.threat,
        at=settings.at,
        seconds=settings.seconds,
    )
    predictions = [proof.prediction if proof.decided else UNDECIDED for proof in proofs]
    attacks = _attack(entered, predictions, settings)
    kind = Certificate if settings.guarantee == "proved" else RadiusEstimate
    return [
        kind(
            index=index,
            label=label,
            prediction=prediction,
            margin=proof.margin if math.isfinite(proof.margin) else -sys.float_info.max,
            radius=proof.radius,
            method=proof.method,
            guarantee=proof.guarantee,
            attack_radius=nearest.radius,
            seconds=proof.seconds + nearest.seconds,
            perturbation=nearest.perturbation,
            norm=settings.threat.norm,
            through=proof.through,
            losses={name: lost for name, lost in proof.losses.items() if math.isfinite(lost)},
            unfinished=proof.unfinished,
        )
        for index, label, prediction, proof, nearest in zip(
            batch.indices, batch.labels, predictions, proofs, attacks, strict=True
        )
    ]


@dataclass(frozen=True)
class _Nearest:
    """The perturbation found for one input; no radius if none was searched for."""

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
        change = settings.attack(
            entered.network, x[decided], answers, settings.seed, threat=settings.threat, seconds=settings.seconds
        )
        seconds = change.seconds / len(decided)
        for i, radius, perturbation in zip(decided, change.radius.tolist(), change.perturbation.cpu(), strict=True):
            nearest[i] = _Nearest(radius, perturbation.clone(), seconds)
    return nearest
