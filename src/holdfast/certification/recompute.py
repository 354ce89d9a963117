"""A finished run, checked from the model and the data alone: records are recomputed, and witnesses are tested.

Nothing in the file is believed. What it says about its settings and inputs must be what the model and the data give;
every input must have a record with its own label; and no number in the records drawn may claim more than is found.
"""

from __future__ import annotations

import math
import os
import random
import secrets
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from holdfast.attacks.minimal import answer_changed
from holdfast.certification.examine import examine
from holdfast.certification.examples import Data, Examples, enter, ranges, read_examples
from holdfast.certification.lines import Header, Record
from holdfast.certification.runner import Progress, describe
from holdfast.certification.settings import Settings
from holdfast.certification.store import Stored, differences, read
from holdfast.compositions import proves
from holdfast.errors import InputError
from holdfast.graph import Perturbation, Readings
from holdfast.linalg.threat import Threat
from holdfast.network.network import Network
from holdfast.results import UNDECIDED
from holdfast.storage import Pathlike
from holdfast.version import __version__

#: Relative, between two computations of one number: sums in another order, for batches of another size.
ROUNDING = 1e-9
#: Relative, of the end of a search guided by iterated norms; a radius beyond the one found must be proved itself.
SEARCH = 1e-6
#: Relative, of the end of an attack, which follows gradients: far above what was ever seen (2e-8), far below a point.
NEARER = 1e-3

_TINY = 1e-12  # a radius to test where none is claimed


@final
@dataclass(frozen=True)
class Verification:
    """The result of a check.

    Attributes:
        inputs: how many the run covers.
        available: how many the data have.
        radii: at which the run shows accuracies.
        accuracy: what the file claims to be certified there, of all inputs; one without a record is not.
        checked: indices of the recomputed records.
        witnesses: how many perturbations were tested.
        failures: what did not hold, in words; empty for a valid run.
        weaker: indices of records that claim less than is proved here; that is not a failure.
        unchecked: what the file says and nobody checked, in words.
        seed: of the sample; None if every record was recomputed.
    """

    inputs: int
    available: int
    radii: tuple[float, ...]
    accuracy: tuple[float, ...]
    checked: tuple[int, ...]
    witnesses: int
    failures: tuple[str, ...]
    weaker: tuple[int, ...]
    unchecked: tuple[str, ...]
    seed: int | None

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
    seed: int | None = None,
    batch: int = 8,
    perturb: Perturbation | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Recomputes records, attacks again and tests the stored perturbations, from the model and the data alone.

    Args:
        path: the file of a run.
        model: the model that it claims.
        data: the data that it claims.
        sample: how many records, drawn at random; None for all.
        seed: of the sample, to repeat it; by default nobody knows beforehand what will be drawn.
        batch: inputs treated at once.
        perturb: what moves, if that is a tensor, which the file does not hold.
        progress: called with the number of records checked, and their total.

    Example:
        >>> verify("run.jsonl", model, "digits-32", sample=None).sound
        True
    """
    stored = read(path)
    whole = read_examples(data, split=stored.header.split)
    examples = read_examples(whole, len(stored.header.indices))
    readings = Readings()
    settings = _same_run(os.fspath(path), stored.header, model, examples, readings, perturb)
    indices = sorted(stored.records)
    drawn = None
    if sample is not None and sample < len(indices):
        drawn = secrets.randbits(32) if seed is None else seed
        indices = sorted(random.Random(drawn).sample(indices, sample))
    place = {index: i for i, index in enumerate(examples.indices)}
    failures = _incomplete(stored, examples)
    weaker: list[int] = []
    witnesses = done = 0
    size = batch if settings.seconds is None else 1
    for part in examples.batches([place[index] for index in indices], size):
        again = examine(model, part, _asked_again(settings, stored.records[part.indices[0]]), readings=readings)
        entered = enter(model, part.inputs, settings, readings)
        for i, expected in enumerate(again):
            claimed = stored.records[expected.index]
            wrong = _overstated(claimed, expected, entered.network, entered.x, i, settings.threat)
            if claimed.attack_radius is not None:
                witnesses += claimed.attack_radius < math.inf
                wrong += _witness(entered.network, entered.x[i], claimed, settings.threat)
            failures += [f"input {claimed.index}: {what}" for what in wrong]
            weaker += [claimed.index] if claimed.radius < expected.radius * (1 - SEARCH) else []
        done += len(again)
        if progress is not None:
            progress(done, len(indices))
    run = stored.run()
    right = [record.radius for record in run.records if record.correct]
    return Verification(
        inputs=len(examples.labels),
        available=len(whole.labels),
        radii=run.radii,
        accuracy=tuple(sum(reached >= radius for reached in right) / len(examples.labels) for radius in run.radii),
        checked=tuple(indices),
        witnesses=witnesses,
        failures=tuple(failures),
        weaker=tuple(weaker),
        unchecked=tuple(_unchecked(stored, len(indices))),
        seed=drawn,
    )


def _same_run(
    name: str,
    header: Header,
    model: Network | nn.Module,
    examples: Examples,
    readings: Readings,
    perturb: Perturbation | None,
) -> Settings:
    """The settings of a run, refused unless its weights, data and inputs are those given."""
    settings = Settings.from_dict(header.settings, perturb)
    given, claimed = (
        {word: value for word, value in words.items() if word != "holdfast"}
        for words in (describe(model, examples, settings, readings), header.settings)
    )
    other = differences(given, claimed)
    if other:
        raise InputError(f"{name} was made from something other than what was given: {', '.join(other)}")
    if list(examples.indices) != header.indices:
        raise InputError(
            f"{name} asks for inputs that are not the first {len(header.indices)} of the data {examples.name!r}; "
            "give the data that it was made from; was the file edited?"
        )
    return settings


def _incomplete(stored: Stored, examples: Examples) -> list[str]:
    """What is wrong with any record, drawn or not: it is missing, or its label is not its input's."""
    missing = [index for index in sorted(examples.indices) if index not in stored.records]
    wrong = [f"{len(missing)} of {len(examples.labels)} inputs have no record: {ranges(missing)}"] if missing else []
    for index, label in zip(examples.indices, examples.labels, strict=True):
        record = stored.records.get(index)
        if record is not None and record.label != label:
            wrong.append(f"input {index}: label {record.label} against {label}")
    return wrong


def _asked_again(settings: Settings, claimed: Record) -> Settings:
    """How to recompute a record: one made with a time limit, at its own radius by its own method, without an attack."""
    if settings.seconds is None:
        return settings
    return replace(settings, seconds=None, attack=None, method=claimed.method, at=(claimed.radius or _TINY,))


def _overstated(
    claimed: Record, expected: Record, network: Network, x: Tensor, place: int, threat: Threat
) -> list[str]:
    """Where a record says something other than what is found, or more."""
    wrong = [
        f"{name} {getattr(claimed, name)!r} against {getattr(expected, name)!r}"
        for name in ("prediction", "method", "guarantee", "norm", "through")
        if getattr(claimed, name) != getattr(expected, name)
    ]
    if not claimed.margin <= expected.margin + ROUNDING * abs(expected.margin):
        wrong.append(f"margin {claimed.margin!r} against {expected.margin!r}")
    if not claimed.radius <= expected.radius:
        near = claimed.radius <= expected.radius * (1 + SEARCH)
        if wrong or not near or not _proves(network, x, place, claimed, threat):
            wrong.append(f"radius {claimed.radius!r} against {expected.radius!r}")
    if claimed.attack_radius is not None and expected.attack_radius is not None:
        if 0 < claimed.attack_radius <= expected.radius:
            wrong.append(f"a change at {claimed.attack_radius!r} against the radius {expected.radius!r}")
        if not claimed.attack_radius <= expected.attack_radius * (1 + NEARER):
            wrong.append(f"attack radius {claimed.attack_radius!r} against a change at {expected.attack_radius!r}")
    return wrong


def _proves(network: Network, x: Tensor, place: int, claimed: Record, threat: Threat) -> bool:
    method, guarantee = claimed.method, claimed.guarantee
    return proves(network, x, place, claimed.radius, method=method, guarantee=guarantee, threat=threat)


def _witness(network: Network, x: Tensor, record: Record, threat: Threat) -> list[str]:
    """What is wrong with the perturbation of a record."""
    if record.prediction == UNDECIDED or record.attack_radius is None or record.attack_radius == math.inf:
        return []
    if record.perturbation is None or record.perturbation.shape != x.shape:
        return [f"there is no perturbation of shape {tuple(x.shape)} for the attack radius {record.attack_radius!r}"]
    moved = x + record.perturbation.double()
    length = float(threat.distance(x, moved))
    wrong = []
    if not torch.equal(moved, threat.inside(moved)):
        wrong.append(f"the stored perturbation leaves the range {threat.clip}")
    if not bool(answer_changed(network, moved.unsqueeze(0), torch.tensor([record.prediction]))):
        wrong.append("the stored perturbation does not change the answer")
    if not abs(record.attack_radius - length) <= ROUNDING * length:
        wrong.append(f"the stored perturbation has norm {length!r} and the attack radius is {record.attack_radius!r}")
    return wrong


def _unchecked(stored: Stored, checked: int) -> list[str]:
    """What the file says and was not checked, in words."""
    records, settings = stored.records, stored.header.settings
    words = ["wall times, what margins were lost to, and the command line"]
    if "seconds" in settings:
        words.append("whether more time would prove more, or find a nearer change")
    if checked < len(records):
        words.append(f"the numbers of the {len(records) - checked} records that were not drawn; --all checks them")
    if settings["holdfast"] != __version__:
        words.append(f"that Holdfast {settings['holdfast']} made the run; this is {__version__}")
    return words
