"""`train`: a config becomes a model, a checkpoint to resume from, and a JSON file of the run."""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from holdfast.data import SOURCES, Dataset, load
from holdfast.errors import HoldfastError, InputError
from holdfast.layers import manifold_parameters
from holdfast.models import Transformer, save
from holdfast.models.files import load_transformer
from holdfast.progress import watching
from holdfast.storage import Pathlike, check_folder, make_folder, write_text
from holdfast.train.augment import AUGMENTATIONS
from holdfast.train.checkpoint import Checkpoint
from holdfast.train.config import TrainingConfig, read_training
from holdfast.train.gradients import Gradients, RecordedGradients
from holdfast.train.interrupts import held_interrupts
from holdfast.train.objective import Measurement, TrainingObjective, measure, measure_content
from holdfast.train.optimisers import lookahead, optimisers
from holdfast.train.outcome import Epoch, TrainingProgress, TrainingRun
from holdfast.train.place import Accelerated, find_place
from holdfast.version import __version__

_LOG = logging.getLogger(__name__)
_SPLIT_SEED = 0  # every seed of a training keeps the same inputs apart
_MEASURED = 2000  # training inputs to measure on if none are held out
_TELL_EVERY = 20  # steps between two looks at the loss: on a GPU each of them waits


def train(
    config: TrainingConfig | Pathlike,
    out: Pathlike,
    *,
    resume: bool = True,
    data_dir: Pathlike | None = None,
    device: str | None = None,
    checkpoint_seconds: float = 60.0,
    seconds: float | None = None,
    shard_size: int | None = None,
    command: str = "",
    progress: Callable[[TrainingProgress], None] | bool = True,
) -> TrainingRun:
    """Trains a certifiable model.

    An interrupted training run, killed or not, resumes from its last checkpoint, and on a CPU ends with the same
    weights, bit for bit.

    Args:
        config: a `TrainingConfig`, the path of its TOML file, or the name of one that comes with the package.
        out: folder for model.safetensors, checkpoint.safetensors and run.json; it is created if it is missing.
        resume: go on from the checkpoint in that folder; otherwise start afresh.
        data_dir: folder with the data files.
        device: such as "cuda:1"; by default what accelerate chooses, or a GPU if there is one.
        checkpoint_seconds: time between checkpoints.
        seconds: until the run ends, counted from this call; the next call resumes from its checkpoint. At least one
            step is done, and what is measured after the very last step is not counted.
        shard_size: the most bytes of one file: see `holdfast.storage.write_tensors`.
        command: the command line, where there is one.
        progress: a function called with the progress of the training; by default a bar, with False none. If it is
            interrupted (KeyboardInterrupt), the run ends with a checkpoint of the last whole step.

    Example:
        >>> run = train("digits-smooth", "out/digits")
        >>> run.history[-1].clean, run.test["certified"]
    """
    began = time.perf_counter()
    if not isinstance(config, TrainingConfig):
        config = read_training(config)
    check_folder(out, "model.safetensors", "checkpoint.safetensors", "run.json")
    place = find_place(device)
    training = _Training(config, Path(out), data_dir, place, command, shard_size)
    make_folder(out)
    with watching(progress if place.rank == 0 else False, config.name, lambda now: (now.step, now.steps)) as tell:
        return training.run(resume, checkpoint_seconds, math.inf if seconds is None else began + seconds, tell)


@final
class _Training:
    """All that the steps of one training share, and its state."""

    def __init__(
        self,
        config: TrainingConfig,
        folder: Path,
        data_dir: Pathlike | None,
        place: Accelerated,
        command: str,
        shard_size: int | None,
    ) -> None:
        self._config, self._c, self._folder, self._data_dir = config, config.train, folder, data_dir
        self._place, self._command, self._shard_size = place, command, shard_size
        data = _read(config, "train", data_dir)
        part, self._watched = _split(data, config.data.validation)
        self._inputs, self._labels = part.inputs.to(place.device), part.labels.to(place.device)
        self._per_epoch = max(1, len(part) // self._c.batch)
        self._steps = self._per_epoch * self._c.epochs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._c.seed)
            self._model = _first_model(config).to(place.device)
        self._optimisers = optimisers(self._model, self._c)
        self._lookahead = lookahead(self._model, self._c)
        objective = TrainingObjective(self._model, self._c.losses, bf16=self._c.precision == "bf16")
        self._gradients_of: Gradients
        if self._c.compile == "graph" and place.device.type == "cuda" and place.count == 1:
            self._gradients_of = RecordedGradients(objective, objective.parameters())
        else:
            if self._c.compile not in ("no", "graph"):
                objective.compile(mode=self._c.compile)
            self._gradients_of = Gradients(place.prepare(objective))
        self._generator = torch.Generator(place.device)
        identity = {**config.to_dict(), "checksum": data.checksum, "holdfast": __version__}
        self._checkpoint = Checkpoint(folder / "checkpoint.safetensors", identity, shard_size)
        self._step = self._saved_step = 0
        self._earlier, self._began = 0.0, time.perf_counter()
        self._history: list[Epoch] = []
        self._loss_sum = torch.zeros((), device=place.device)
        self._whole = True  # whether the state is that between two steps

    def run(
        self, resume: bool, checkpoint_seconds: float, until: float, tell: Callable[[TrainingProgress], None] | None
    ) -> TrainingRun:
        """Does the remaining steps, or those before the clock shows `until`."""
        if resume and self._checkpoint.exists():
            notes = self._checkpoint.read(self._model, self._states, self._loss_sum)
            if self._lookahead is not None and self._c.compact_every:
                self._lookahead.begin()
            self._step, self._earlier = notes["step"], notes["seconds"]
            self._history = [Epoch(**entry) for entry in notes["history"]]
        saved = point = self._began = time.perf_counter()
        self._saved_step = self._step
        order = None
        try:
            while self._step < self._steps:
                epoch, number = divmod(self._step, self._per_epoch)
                order = self._order(epoch) if order is None or number == 0 else order
                loss = self._gradients(order[number * self._c.batch : (number + 1) * self._c.batch])
                over = False
                with held_interrupts():
                    self._change(loss)
                    if self._can_be_saved:
                        # The next such point will be about as far away as the last one was.
                        now = time.perf_counter()
                        over = until < math.inf and self._place.agree(now + (now - point) > until)
                        if over or now - saved > checkpoint_seconds:
                            self._save({})
                            saved = time.perf_counter()
                        point = time.perf_counter()
                if tell is not None and (self._step % _TELL_EVERY == 0 or self._step == self._steps):
                    last = self._history[-1] if self._history else None
                    tell(TrainingProgress(self._step, self._steps, loss.item(), last))
                if over and self._step < self._steps:
                    return self._outcome({}, finished=False)
            return self._finish()
        except KeyboardInterrupt:
            with held_interrupts():
                if self._whole and self._can_be_saved:
                    self._save({})
            return self._outcome({}, finished=False, interrupted=True)

    @property
    def _states(self) -> dict[str, torch.optim.Optimizer]:
        """What has to be remembered besides the weights."""
        if self._lookahead is None or self._c.compact_every:  # slow weights start afresh where the state is compact
            return self._optimisers
        return {**self._optimisers, "lookahead": self._lookahead}

    @property
    def _can_be_saved(self) -> bool:
        """Whether the state is one to resume from: with `compact_every`, where it has just been made compact."""
        epoch, number = divmod(self._step, self._per_epoch)
        return not self._c.compact_every or (number == 0 and self._is_compact(epoch))

    def _is_compact(self, epoch: int) -> bool:
        every = self._c.compact_every
        return every > 0 and (epoch % every == 0 or epoch == self._c.epochs)

    def _order(self, epoch: int) -> Tensor:
        """The inputs in the order of an epoch; random numbers depend on the seed, the epoch and the step alone."""
        chosen = torch.Generator().manual_seed((self._c.seed << 33) + (1 << 32) + epoch)
        return torch.randperm(len(self._labels), generator=chosen).to(self._place.device)

    def _gradients(self, chosen: Tensor) -> Tensor:
        """The loss of these inputs, or of this process's part of them, and its gradients in the weights."""
        mine = chosen[self._place.rank :: self._place.count]
        inputs, labels = self._inputs[mine], self._labels[mine]
        stream = (self._c.seed << 33) + self._step * self._place.count + self._place.rank
        self._generator.manual_seed(stream)
        for name in self._config.data.augment:
            inputs = AUGMENTATIONS[name](inputs, self._generator)
        rate = self._c.rate((self._step + 1) / self._steps)
        for optimiser in self._optimisers.values():
            for group in optimiser.param_groups:
                group["lr"] = rate * group["full_lr"]
            optimiser.zero_grad()
        done = torch.full((), self._step / self._steps, device=self._place.device)
        return self._gradients_of(inputs, labels, done)

    def _change(self, loss: Tensor) -> None:
        """Moves the weights along the gradients of a step: from here to its end the state is between two steps."""
        self._whole = False
        for optimiser in self._optimisers.values():
            optimiser.step()
        self._loss_sum += loss
        self._step += 1
        if self._lookahead is not None and self._step % self._c.lookahead == 0:
            self._lookahead.step()
        if self._step % self._per_epoch == 0:
            self._end_epoch(self._step // self._per_epoch)
        self._whole = True

    def _end_epoch(self, epoch: int) -> None:
        mean = self._loss_sum.item() / self._per_epoch
        self._loss_sum.zero_()
        if not math.isfinite(mean):
            raise HoldfastError(f"the loss of epoch {epoch} is {mean}; lower lr or manifold_lr of [train]")
        if self._is_compact(epoch):
            self._compact()
        if epoch % self._c.evaluate_every == 0 or epoch == self._c.epochs:
            measurement = self._measure(self._watched)
            self._history.append(Epoch(epoch, mean, measurement.clean, measurement.certified, self._seconds))
            _LOG.info(
                "epoch %d: loss %.4f, clean %.3f, certified (estimate) %.3f",
                epoch,
                mean,
                measurement.clean,
                measurement.certified,
            )

    @torch.no_grad()
    def _compact(self) -> None:
        """Rounds orthogonal maps to half precision, in which they are stored, and lets their momentum start afresh.

        The next step brings them back to the manifold.
        """
        for p in manifold_parameters(self._model):
            p.copy_(p.half())
        if "manifold" in self._optimisers:
            self._optimisers["manifold"].state.clear()
        if self._lookahead is not None:
            self._lookahead.begin()

    def _measure(self, data: Dataset) -> Measurement:
        return measure(self._model, data, self._c.slope, self._c.radius, self._place.device)

    @property
    def _seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._began

    def _finish(self) -> TrainingRun:
        """Measures on the held-out split, once, and writes the model."""
        name = self._config.data.name
        test: dict[str, Any] = {}
        if name in SOURCES:
            data = _read(self._config, SOURCES[name].splits[-1], self._data_dir)
            test = {"split": data.split, "inputs": len(data), **asdict(self._measure(data))}
            test |= asdict(measure_content(self._model, data, self._place.device))
        self._save(test)
        if self._place.rank == 0:
            notes = {"seed": str(self._c.seed), "command": self._command, "training": json.dumps(self._record(test))}
            save(self._model, self._folder / "model.safetensors", notes, shard_size=self._shard_size)
        return self._outcome(test, finished=True)

    def _save(self, test: dict[str, Any]) -> None:
        """The state, and the run in words beside it."""
        if self._place.rank == 0:
            notes = {
                "step": self._step,
                "seconds": self._seconds,
                "history": [asdict(entry) for entry in self._history],
            }
            self._checkpoint.write(self._model, self._states, self._loss_sum, notes)
            self._saved_step = self._step
            write_text(self._folder / "run.json", json.dumps(self._record(test), indent=1) + "\n")

    def _record(self, test: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": self._config.name,
            "config": self._config.to_dict(),
            "seed": self._c.seed,
            "command": self._command,
            "versions": {
                "holdfast": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "device": _device_name(self._place.device),
            "processes": self._place.count,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "step": self._step,
            "steps": self._steps,
            "seconds": self._seconds,
            "measured_on": f"{len(self._watched)} inputs of {self._watched.split}",
            "history": [asdict(entry) for entry in self._history],
            "test": test,
        }

    def _outcome(self, test: dict[str, Any], *, finished: bool, interrupted: bool = False) -> TrainingRun:
        model = self._model.eval().requires_grad_(False)
        return TrainingRun(
            self._config,
            model,
            tuple(self._history),
            test,
            finished,
            interrupted,
            self._saved_step,
            self._steps,
            self._seconds,
            self._folder,
            writes=self._place.rank == 0,
        )


def _first_model(config: TrainingConfig) -> Transformer:
    """The model before the first step."""
    model, start = Transformer(config.model), config.train.start
    if start:
        try:
            model.load_state_dict(load_transformer(start).state_dict())
        except RuntimeError:
            raise InputError(f"start of [train] is {start!r}, a model of another shape than [model]") from None
    return model


def _read(config: TrainingConfig, split: str, data_dir: Pathlike | None) -> Dataset:
    """A split of the data, in the shape that the model takes."""
    data, model = load(config.data.name, split, data_dir), config.model
    if model.input == "words":
        if data.inputs.ndim != 2 or data.inputs.is_floating_point() or data.inputs.shape[1] != model.tokens:
            raise InputError(f"{data.name!r} has inputs {tuple(data.inputs.shape)}; expected ids (b, {model.tokens})")
        return data
    shape = (model.channels, model.side, model.side)
    if data.inputs[0].numel() != math.prod(shape):
        raise InputError(f"{data.name!r} has inputs of shape {tuple(data.inputs.shape[1:])}; [model] takes {shape}")
    return replace(data, inputs=data.inputs.reshape(-1, *shape).float())


def _split(data: Dataset, validation: int) -> tuple[Dataset, Dataset]:
    """What is trained on, and what is measured on meanwhile."""
    if validation >= len(data):
        raise InputError(f"validation of [data] is {validation}; {data.name!r} has {len(data)} training inputs")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    watched = data.select(order[: validation or _MEASURED])
    apart = replace(watched, split="the training split, kept apart" if validation else "those trained on")
    return data.select(order[validation:].sort().values), apart


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
