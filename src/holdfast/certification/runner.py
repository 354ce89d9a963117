"""Whole data sets: every input once, resumable at any moment."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from holdfast.attacks.minimal import MinimalAttack
from holdfast.certification.batches import fitting
from holdfast.certification.examples import Batch, Data, Examples, check_channels, enter, read_examples
from holdfast.certification.lines import Header, Record
from holdfast.certification.settings import Normalisation, Settings
from holdfast.certification.store import Stored, Writer, open_writer
from holdfast.certification.workers import Examination
from holdfast.device import check_device
from holdfast.errors import InputError, check_counts
from holdfast.executors import Executor, Plan, RayCluster, carry_out, choose
from holdfast.graph import Perturbation, Readings
from holdfast.linalg.threat import Threat
from holdfast.models.loading import load_classifier
from holdfast.network.digest import weights_digest
from holdfast.network.network import Network
from holdfast.progress import watching
from holdfast.radii import GivenRadii, check_radii
from holdfast.results import CertificationRun, Guarantee, Norm
from holdfast.storage import Pathlike, check_output
from holdfast.version import __version__

Progress = Callable[[int, int], None]

_LOG = logging.getLogger(__name__)


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
    radii: GivenRadii,
    method: str = "best",
    attack: bool | MinimalAttack = False,
    out: Pathlike | None = None,
    resume: bool = True,
    *,
    guarantee: Guarantee = "proved",
    perturb: Perturbation | None = None,
    normalise: Normalisation | None = None,
    norm: Norm = "l2",
    clip: tuple[float, float] | None = None,
    at: GivenRadii | None = None,
    seconds_per_input: float | None = None,
    seed: int = 0,
    batch: int | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
    device: str = "cpu",
    shard: Shard | None = None,
    limit: int | None = None,
    name: str | None = None,
    command: str | None = None,
    progress: Progress | bool = True,
    crew: Callable[[int], None] | None = None,
) -> CertificationRun:
    """For every input, a radius up to which it is proved that no perturbation changes the answer, as large as possible.

    Args:
        model: a classifier that `to_network` reads, a `Network`, or what `holdfast certify` takes: "digits", a name on
            the shelf, an ONNX file, a folder of a model.
        data: the name of a data set or of a safetensors file, as `holdfast.data.load` takes it; a data set; inputs and
            labels (X, y) as tensors or arrays; a DataLoader; or pairs of an input and its label. An input may be
            keyword arguments of the model, as a tokenizer returns them.
        radii: at which accuracies are shown; the records do not depend on them.
        method: the composition, as `certify_inputs` takes it.
        attack: also search for the smallest perturbation that changes the answer.
        out: file for the records (JSON lines), one by one; after any interruption it can be resumed.
        resume: resume that file if it exists; otherwise start afresh.
        guarantee: "proved", for certificates; "numerical" is faster and gives a `RadiusEstimate` for every input.
        perturb: what moves, as `to_network` takes it; by default the pixels, or the embeddings of all words.
        normalise: mean and standard deviation of each channel, if the model takes images normalised by them.
        norm: of perturbations: "l2", or "linf", where every number of the input may move by the radius.
        clip: the smallest and the largest number that an input may hold, such as (0, 1); for "linf".
        at: decide only at these radii, which is quicker than finding the largest; the record holds the largest of
            them that is proved.
        seconds_per_input: for the proof of each input, and for its attack. No step is begun after that, and the best so
            far counts; the record's `unfinished` says what was left out.
        seed: for everything random.
        batch: inputs treated at once; by default one on a CPU, where each is on disk when it is done, and
            on a GPU as many as fit into its memory.
        workers: processes; on a cluster the most workers, by default as many as fit.
        executor: what the batches run on: "in-process", "processes" or "ray", or one of `executors` with
            its own options, such as `RayCluster("10.0.0.1:6379", gpus_per_task=1)`. The records do not depend on it.
        device: where the numbers are computed, such as "cuda".
        shard: the part of the data to do; `merge` joins the parts.
        limit: take this many inputs from the beginning of the data; a file can later be resumed with more of them.
        name: what to call the model.
        command: the command line, where there is one.
        progress: a function called with the number of inputs done, and their total; by default a bar in a terminal and
            in a notebook, with False none. If it is interrupted (KeyboardInterrupt), the run ends with what is
            finished.
        crew: called with the number of workers.

    If an input cannot be done, because memory runs out or a computation fails, the reason is in `failures` of the
    result and in the file; the others go on, and the same call tries it again.

    Example:
        >>> run = certify(model, "digits-32", radii=[0.05, 0.1], attack=True, out="run.jsonl")
        >>> run.accuracy(0.1) <= run.attacked(0.1) <= run.clean()
        True
    """
    check_counts(batch=batch, workers=workers, limit=limit)
    decided = () if at is None else tuple(check_radii(at, "at"))
    shown = check_radii(radii, "radii")
    if isinstance(model, str | os.PathLike):
        name = name or os.fspath(model)
        model = load_classifier(os.fspath(model))
    chosen = (MinimalAttack() if attack else None) if isinstance(attack, bool) else attack
    threat = Threat(norm, clip)
    settings = Settings(method, guarantee, chosen, seed, perturb, normalise, threat, decided, seconds_per_input)
    chosen_executor = choose(executor, workers)
    if not isinstance(chosen_executor, RayCluster):  # its workers have their own devices
        check_device(device)
    if out is not None:
        check_output(out)
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
    task = Examination(model, settings, device, readings)
    with watching(progress, header.model) as tell, tempfile.TemporaryDirectory() as folder:
        size = 1 if seconds_per_input is not None else batch or _fitting(task, examples, chosen_executor)
        work = _ShardWork(task, examples, header, shard or Shard(), size, chosen_executor, tell, crew)
        return work.fill(Path(folder, "run.jsonl"), resume=False) if out is None else work.fill(out, resume)


def _fitting(task: Examination, examples: Examples, executor: Executor) -> int:
    """Inputs at once: as memory allows on an accelerator; one keeps a CPU busy, and is on disk when it is done."""
    if torch.device(task.device).type == "cpu":
        return 1
    (first,) = examples.batches([0], 1)
    entered = enter(task.model, first.inputs, task.settings, task.readings)
    return fitting(entered.network, entered.x, task.settings.method, task.device, executor.width)


def describe(
    model: Network | nn.Module, examples: Examples, settings: Settings, readings: Readings | None = None
) -> dict[str, str]:
    """Everything that the records depend on."""
    (first,) = examples.batches([0], 1)
    if isinstance(model, nn.Module):
        check_channels(model, first.inputs)
    network = enter(model, first.inputs, settings, readings).network
    examples.check_labels(len(network.head.bias))
    return {
        "weights": weights_digest(network),
        "data": examples.checksum,
        **settings.to_dict(),
        "holdfast": __version__,
    }


@final
@dataclass(frozen=True)
class _ShardWork:
    task: Examination
    examples: Examples
    header: Header
    shard: Shard
    batch: int
    executor: Executor
    progress: Progress | None
    crew: Callable[[int], None] | None

    def fill(self, path: Pathlike, resume: bool) -> CertificationRun:
        """Does what the file still lacks of this shard."""
        with open_writer(path, self.header, resume=resume) as writer:
            with suppress(KeyboardInterrupt):  # what is finished is on disk
                carry_out(_Missing(self, writer), self.executor)
            shown = {} if isinstance(self.task.model, Network) else self.examples.shown()
            return Stored(self.header, writer.records, writer.failures).run(shown)


@final
class _Missing(Plan[Batch]):
    """The inputs of a shard that a file lacks, in batches.

    Which inputs share a batch depends only on their positions, not on what is already done: numbers that are computed
    together are rounded together.
    """

    def __init__(self, work: _ShardWork, writer: Writer) -> None:
        self.task, self._examples, self._writer = work.task, work.examples, writer
        self._progress, self._crew = work.progress, work.crew
        self._place = {index: place for place, index in enumerate(work.examples.indices)}
        self._mine = range(work.shard.number - 1, len(self._place), work.shard.count)
        self._size = max(1, min(work.batch, -(-len(self._mine) // work.executor.width)))  # no worker goes without
        groups = [self._lacking(self._mine[i : i + self._size]) for i in range(0, len(self._mine), self._size)]
        self._groups = [group for group in groups if group]
        self._done = len(self._mine) - sum(map(len, self._groups))
        self._tell()

    def __len__(self) -> int:
        return sum(map(len, self._groups))  # no fewer than there are batches

    def items(self) -> Iterator[Batch]:
        for places in self._groups:
            yield from self._examples.batches(places, self._size)

    def take(self, values: Sequence[tuple[Batch, Record]]) -> None:
        fresh = {record.index: record for _, record in values if record.index not in self._writer.records}
        self._writer.append(*fresh.values())
        self._done += len(fresh)
        for record in fresh.values():
            _LOG.info("input %d: radius %.4g by %s, %.2f s", record.index, record.radius, record.method, record.seconds)
        self._tell()

    def smaller(self, item: Batch) -> Sequence[Batch]:
        places = self._lacking([self._place[index] for index in item.indices])
        return self._examples.batches(places, (len(places) + 1) // 2) if len(item.indices) > 1 and places else ()

    def give_up(self, item: Batch, reason: str) -> None:
        for place in self._lacking([self._place[index] for index in item.indices]):
            self._writer.fail(self._examples.indices[place], reason)
            _LOG.warning("input %d failed: %s", self._examples.indices[place], reason)

    def notice(self, workers: int) -> None:
        if self._crew is not None:
            self._crew(workers)

    def _lacking(self, places: Sequence[int]) -> list[int]:
        return [place for place in places if self._examples.indices[place] not in self._writer.records]

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done, len(self._mine))
