"""Whole data sets: every input once, resumable at any moment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import nn

import holdfast
from holdfast.attacks.minimal import MinimalAttack
from holdfast.certification.examples import Data, Examples, enter, read_examples
from holdfast.certification.lines import Header
from holdfast.certification.settings import Normalisation, Settings, weights_digest
from holdfast.certification.store import Stored, open_writer
from holdfast.certification.workers import examine_all
from holdfast.errors import InputError
from holdfast.graph import Perturbation, Readings
from holdfast.graph.onnx import OnnxModel
from holdfast.network.network import Network
from holdfast.radii import check_radii
from holdfast.results import CertificationRun, Guarantee
from holdfast.storage import Pathlike

Progress = Callable[[int, int], None]


@final
@dataclass(frozen=True)
class Shard:
    """Part `number` of `count`, counted from 1: every count-th input."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            last = f"{self.count}/{self.count}"
            raise InputError(f"the shard is {self.number}/{self.count}; expected 1/{self.count} to {last}")


def certify(
    model: Network | nn.Module | Pathlike,
    data: Data,
    radii: float | Sequence[float],
    method: str = "best",
    attack: bool | MinimalAttack = False,
    out: Pathlike | None = None,
    resume: bool = True,
    *,
    guarantee: Guarantee = "proved",
    perturb: Perturbation | None = None,
    normalise: Normalisation | None = None,
    seed: int = 0,
    batch: int = 8,
    workers: int = 1,
    device: str = "cpu",
    shard: Shard | None = None,
    limit: int | None = None,
    name: str | None = None,
    command: str | None = None,
    progress: Progress | None = None,
) -> CertificationRun:
    """For every input the largest radius up to which it is proved that no l2 perturbation changes the answer.

    Args:
        model: a classifier that `to_network` reads, a `Network`, or the path of an ONNX file.
        data: the name of a data set or of a safetensors file, as `holdfast.data.load` takes it; a data set; or pairs of
            an input and its label. An input may be keyword arguments of the model, as a tokenizer returns them.
        radii: at which accuracies are shown; the records do not depend on them.
        method: the composition, as `certify_inputs` takes it.
        attack: also search the smallest perturbation that changes the answer.
        out: file for the records (JSON lines), one by one; it can be gone on with after any interruption.
        resume: go on with that file if it is there; otherwise begin anew.
        guarantee: "proved", for certificates; "numerical" is faster and gives a `RadiusEstimate` for every input.
        perturb: what moves, as `to_network` takes it; by default the pixels, or the embeddings of all words.
        normalise: mean and standard deviation of each channel, where the model takes images normalised by them.
        seed: of everything random.
        batch: inputs that are treated at once.
        workers: processes.
        device: where the numbers are computed, such as "cuda".
        shard: the part of the data to do; `merge` joins the parts.
        limit: take so many inputs from the beginning of the data; a file can be gone on with to more of them.
        name: what to call the model.
        command: the command line, where there is one.
        progress: is told how many inputs are done, and of how many. If it is interrupted (KeyboardInterrupt), the run
            ends with what is finished.

    Example:
        >>> run = certify(model, "digits-32", radii=[0.05, 0.1], attack=True, out="run.jsonl")
        >>> run.accuracy(0.1) <= run.attacked(0.1) <= run.clean()
        True
    """
    for word, number in (("batch", batch), ("workers", workers), ("limit", 1 if limit is None else limit)):
        if number < 1:
            raise InputError(f"{word} is {number}; expected at least 1")
    shown = check_radii(radii, "radii")
    if isinstance(model, str | os.PathLike):
        name = name or os.fspath(model)
        model = OnnxModel(model)
    chosen = (MinimalAttack() if attack else None) if isinstance(attack, bool) else attack
    settings = Settings(method, guarantee, chosen, seed, perturb, normalise)
    examples, readings = read_examples(data, limit), Readings()
    header = Header(
        settings=describe(model, examples, settings, readings),
        model=name or (model.name if isinstance(model, Network) else type(model).__name__),
        data=examples.name,
        split=examples.split,
        indices=list(examples.indices),
        radii=shown,
        command=command,
    )
    work = _Work(model, examples, settings, header, shard or Shard(), batch, workers, device, progress, readings)
    if out is not None:
        return work.fill(out, resume)
    with tempfile.TemporaryDirectory() as folder:
        return work.fill(Path(folder, "run.jsonl"), resume=False)


def describe(
    model: Network | nn.Module, examples: Examples, settings: Settings, readings: Readings | None = None
) -> dict[str, str]:
    """Everything that the records depend on."""
    (first,) = examples.batches([0], 1)
    network = enter(model, first.inputs, settings, readings).network
    return {
        "weights": weights_digest(network),
        "data": examples.checksum,
        **settings.to_dict(),
        "holdfast": holdfast.__version__,
    }


@final
@dataclass(frozen=True)
class _Work:
    model: Network | nn.Module
    examples: Examples
    settings: Settings
    header: Header
    shard: Shard
    batch: int
    workers: int
    device: str
    progress: Progress | None
    readings: Readings

    def fill(self, path: Pathlike, resume: bool) -> CertificationRun:
        """Does what the file lacks of this shard."""
        indices = self.examples.indices
        mine = range(self.shard.number - 1, len(indices), self.shard.count)
        with open_writer(path, self.header, resume=resume) as writer:
            pending = [place for place in mine if indices[place] not in writer.records]
            size = max(1, min(self.batch, -(-len(pending) // self.workers)))  # no worker goes without
            batches = self.examples.batches(pending, size)
            done = len(mine) - len(pending)
            try:
                self._tell(done, len(mine))
                for records in examine_all(
                    self.model, batches, self.settings, self.workers, self.device, self.readings
                ):
                    for record in records:
                        writer.append(record)
                    done += len(records)
                    self._tell(done, len(mine))
            except KeyboardInterrupt:
                pass  # what is finished is on the disk
            return Stored(self.header, writer.records).run()

    def _tell(self, done: int, planned: int) -> None:
        if self.progress is not None:
            self.progress(done, planned)
