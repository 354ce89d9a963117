"""Trained image classifiers, one after the other: certified, by LoFAST's recursion for comparison, and attacked.

What was certified is kept in the files of `holdfast certify`, so that a command that was interrupted goes on. A result
is one JSON file, from which the table is made.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks.auto_pgd import AutoPgd
from holdfast.certification import certify
from holdfast.data import Dataset, load
from holdfast.errors import InputError, SoundnessError
from holdfast.graph import to_network
from holdfast.models import Transformer
from holdfast.models import load as load_model
from holdfast.models.files import shelf_file, stored_config
from holdfast.network.network import Network
from holdfast.report.numbers import down
from holdfast.repro.processes import Tell
from holdfast.results import CertificationRun
from holdfast.storage import read_metadata, write_text

RADII = (36 / 255, 72 / 255, 108 / 255)

_LOFAST, _OURS = "lofast", "gains"
_ATTACK = AutoPgd(steps=25)
_SHARES = {_OURS: 0.6, _LOFAST: 0.2, "attack": 0.19}  # of the time that a model takes, for the progress bar
_COMPARED = 10  # images on which the network and its model are compared
_AT_ONCE = {"cpu": 10, "cuda": 100}
_ATTACKED_AT_ONCE = {"cpu": 50, "cuda": 1000}


@final
@dataclass(frozen=True)
class Task:
    """One model, and what is done with it.

    Attributes:
        model: its file, or its name on the shelf.
        inputs: how many test images are certified.
        lofast_inputs: how many of them by LoFAST's recursion, whose norms are iterated: that favours it.
        attack_inputs: how many of them are attacked.
        results: folder of the JSON files.
        records: folder of the files of `certify`.
        data_dir: folder of the data.
        device: such as "cuda".
        command: the command line.
    """

    model: str
    inputs: int
    lofast_inputs: int
    attack_inputs: int
    results: Path
    records: Path
    data_dir: Path | None
    device: str
    command: str


@final
@dataclass(frozen=True)
class Measured:
    """A trained model, measured.

    Attributes:
        name: of its config.
        seed: of its training.
        training: the record of the training, with the accuracies on all test images.
        command: that measured it.
        device: where.
        seconds: of every part, for one image.
        radius: proved, of every image; 0 where the answer is wrong.
        lofast: the same by LoFAST's recursion, not proved, of fewer images.
        attack: for every attacked image the smallest of the radii at which Auto-PGD changes its answer, 0 where it is
            wrong, and None where nothing was found.
    """

    name: str
    seed: str
    training: dict[str, Any]
    command: str
    device: str
    seconds: dict[str, float]
    radius: list[float]
    lofast: list[float]
    attack: list[float | None]

    def __post_init__(self) -> None:
        for i, (radius, found) in enumerate(zip(self.radius, self.attack, strict=False)):  # fewer are attacked
            if found is not None and radius > found:
                raise SoundnessError(f"{radius} is proved for image {i}, an attack succeeds at {found}; please report")

    def certified(self, radius: float) -> float:
        """The share of the images that are right and proved to stay so."""
        return _mean([each >= radius for each in self.radius])

    def lofast_certified(self, radius: float) -> float:
        """The same by LoFAST's recursion."""
        return _mean([each >= radius for each in self.lofast])

    def attacked(self, radius: float) -> float:
        """The share of the attacked images that are right and stay so."""
        return _mean([found is None or found > radius for found in self.attack])


def measure(task: Task, tell: Tell) -> None:
    """Certifies and attacks a model, and writes its result."""
    notes = _notes(task.model)
    training = json.loads(notes.get("training", "{}"))
    if not training:
        raise InputError(f"{task.model!r} has no record of a training; expected a model.safetensors of holdfast train")
    model, data = load_model(task.model), load(training["config"]["data"]["name"], None, task.data_dir)
    most = min(max(task.inputs, task.lofast_inputs), len(data))
    # Converted, and compared with the model, once for all images.
    converted = to_network(model, data.inputs[:_COMPARED])
    encoded = replace(data.select(range(most)), inputs=converted.encode(data.inputs[:most]))
    ours = _certify(converted.network, encoded, task, _OURS, task.inputs, tell, 0.0)
    lofast = _certify(converted.network, encoded, task, _LOFAST, task.lofast_inputs, tell, _SHARES[_OURS])
    began = time.perf_counter()
    attack = _attack(model.to(task.device), data.select(range(min(task.attack_inputs, len(data)))), task.device, tell)
    measured = Measured(
        name=training["name"],
        seed=notes.get("seed", ""),
        training=training,
        command=task.command,
        device=torch.cuda.get_device_name() if task.device.startswith("cuda") else task.device,
        seconds={
            _OURS: round(_mean([record.seconds for record in ours.records]), 4),
            _LOFAST: round(_mean([record.seconds for record in lofast.records]), 4),
            "attack": round((time.perf_counter() - began) / len(attack), 4),
        },
        radius=_radii(ours),
        lofast=_radii(lofast),
        attack=attack,
    )
    write_text(task.results / f"{measured.name}-seed-{measured.seed}.json", json.dumps(asdict(measured)) + "\n")


def _certify(
    network: Network, data: Dataset, task: Task, method: str, inputs: int, tell: Tell, before: float
) -> CertificationRun:
    task.records.mkdir(parents=True, exist_ok=True)
    file = Path(task.model)
    run = certify(
        network,
        data,
        RADII,
        method,
        guarantee="proved" if method == _OURS else "numerical",
        out=task.records / f"{f'{file.parent.name}-{file.stem}'.strip('-')}-{method}.jsonl",
        limit=inputs,
        batch=_AT_ONCE[torch.device(task.device).type],
        device=task.device,
        name=task.model,
        command=task.command,
        progress=lambda done, planned: tell(before + _SHARES[method] * done / planned),
    )
    if run.missing:
        raise KeyboardInterrupt
    return run


def _radii(run: CertificationRun) -> list[float]:
    return [float(down(record.radius, 6)) if record.correct else 0.0 for record in run.records]


def _attack(model: Transformer, data: Dataset, device: str, tell: Tell) -> list[float | None]:
    """For every image the smallest of the radii at which its answer changes; in float32, or what torch takes for it."""

    def logits(flat: Tensor) -> Tensor:
        found: Tensor = model(flat.reshape(-1, *shape))
        return found

    shape = data.inputs.shape[1:]
    step = _ATTACKED_AT_ONCE[torch.device(device).type]
    smallest: list[float | None] = []
    for start in range(0, len(data), step):
        part = slice(start, start + step)
        x, labels = data.inputs[part].to(device).flatten(2), data.labels[part].to(device)
        with torch.no_grad():
            right = logits(x).argmax(1) == labels
        changed = torch.where(right, torch.inf, 0.0).double()
        for radius in RADII:
            left = torch.isinf(changed).nonzero().flatten()
            if len(left):
                broken = _ATTACK(logits, x[left], labels[left], torch.full_like(changed[left], radius))
                changed[left[broken]] = radius
        smallest += [None if math.isinf(each) else each for each in changed.tolist()]
        done = min(start + step, len(data)) / len(data)
        tell(_SHARES[_OURS] + _SHARES[_LOFAST] + _SHARES["attack"] * done)
    return smallest


def markdown(results: Sequence[Measured]) -> str:
    """One row for each model, as a table of a Markdown page, and a line on how they were made."""
    head = ["model", "seed", "parameters", "clean %", "content off %", "variation", "‖W_QK‖"]
    head += ["images", *(f"certified % at {255 * radius:.0f}/255" for radius in RADII)]
    head += ["LoFAST % at 36/255", "attacked % at 36/255", "s an image"]
    lines = [head, ["---:"] * len(head)]
    for one in results:
        test = one.training["test"]
        lines.append(
            [
                one.name,
                one.seed,
                f"{one.training['parameters'] / 1e6:.1f} M",
                *(f"{100 * test[key]:.1f}" for key in ("clean", "content_off")),
                *(f"{max(test[key]):.2g}" for key in ("total_variation", "score_norm")),
                f"{len(one.radius):,}",
                *(f"{100 * one.certified(radius):.1f}" for radius in RADII),
                f"{100 * one.lofast_certified(RADII[0]):.1f} of {len(one.lofast)}" if one.lofast else "",
                f"{100 * one.attacked(RADII[0]):.1f} of {len(one.attack)}" if one.attack else "",
                f"{one.seconds[_OURS]:.2g} ({one.device})",
            ]
        )
    note = (
        f"Certified by `{_OURS}`, proved: the first so many test images. LoFAST (its recursion with "
        "iterated norms) and Auto-PGD: on the first so many of them. Clean and content off: the whole test split; "
        "variation and ‖W_QK‖: the largest over the layers."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def read_all(folder: Path) -> list[Measured]:
    """The results of a folder, by name and seed."""
    return [Measured(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]


def _notes(model: str) -> dict[str, str]:
    file = shelf_file(model) or model
    stored_config(file)  # refuses other files
    return read_metadata(file)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
