"""A finished run, checked from the model alone: records are computed again, and witnesses are tried."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from holdfast.attacks.minimal import answer_changed
from holdfast.certification.examine import examine
from holdfast.certification.examples import Data, enter, read_examples
from holdfast.certification.join import disagreements
from holdfast.certification.runner import Progress, describe
from holdfast.certification.settings import Settings
from holdfast.certification.store import Record, differences, read
from holdfast.errors import InputError
from holdfast.movement import distance
from holdfast.network.network import Network
from holdfast.results import UNDECIDED
from holdfast.storage import Pathlike

#: The settings that must be those of the model and the data at hand.
_IDENTITY = ("weights", "data", "inputs")


@final
@dataclass(frozen=True)
class Verification:
    """What a check found.

    Attributes:
        checked: indices of the records that were computed again.
        witnesses: how many perturbations were tried.
        failures: what did not hold, in words; empty for a run that stands.
    """

    checked: tuple[int, ...]
    witnesses: int
    failures: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether everything held."""
        return not self.failures


def verify(
    path: Pathlike,
    model: Network | nn.Module,
    data: Data,
    *,
    sample: int | None = 20,
    seed: int = 0,
    batch: int = 8,
    progress: Progress | None = None,
) -> Verification:
    """Computes records again and tries the stored perturbations, from the model and the data alone.

    Args:
        path: the file of a run.
        model: the model that it claims.
        data: the data that it claims.
        sample: how many records, drawn at random; None for all.
        seed: of the sample.
        batch: inputs that are treated at once.
        progress: is told how many records are checked, and of how many.

    Example:
        >>> verify("run.jsonl", model, "digits-32", sample=None).sound
        True
    """
    stored = read(path)
    header = stored.header
    settings = Settings.from_dict(header.settings)
    examples = read_examples(data, header.limit, split=header.split)
    found = describe(model, examples, settings)
    other = differences({name: found[name] for name in _IDENTITY}, {name: header.settings[name] for name in _IDENTITY})
    if other:
        raise InputError(f"{os.fspath(path)} was made from something else than what was given: {', '.join(other)}")
    indices = sorted(stored.records)
    if sample is not None and sample < len(indices):
        indices = sorted(random.Random(seed).sample(indices, sample))
    place = {index: i for i, index in enumerate(examples.indices)}
    failures: list[str] = []
    witnesses = done = 0
    for part in examples.batches([place[index] for index in indices], batch):
        again = examine(model, part, replace(settings, attack=None))
        entered = enter(model, part.inputs, settings)
        for i, expected in enumerate(again):
            claimed = stored.records[expected.index]
            failures += [f"input {claimed.index}: {what}" for what in disagreements(claimed, expected)]
            if claimed.perturbation is not None or claimed.attack_radius is not None:
                witnesses += 1
                failures += [
                    f"input {claimed.index}: {what}" for what in _witness(entered.network, entered.x[i], claimed)
                ]
        done += len(again)
        if progress is not None:
            progress(done, len(indices))
    return Verification(tuple(indices), witnesses, tuple(failures))


def _witness(network: Network, x: Tensor, record: Record) -> list[str]:
    """What is wrong with the perturbation of a record."""
    if record.prediction == UNDECIDED or record.attack_radius == math.inf:
        return []
    if record.perturbation is None or record.perturbation.shape != x.shape:
        return [f"there is no perturbation of shape {tuple(x.shape)} for the attack radius {record.attack_radius!r}"]
    moved = x + record.perturbation.double()
    length = float(distance(x, moved).upper)
    wrong = []
    if not bool(answer_changed(network, moved.unsqueeze(0), torch.tensor([record.prediction]))):
        wrong.append("the stored perturbation does not change the answer")
    if length > (record.attack_radius or 0.0):
        wrong.append(f"the stored perturbation has norm {length!r}, above the attack radius {record.attack_radius!r}")
    return wrong
