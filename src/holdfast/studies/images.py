"""Trained image classifiers, one after the other: certified, by LoFAST's recursion for comparison, and attacked.

What was certified is kept in the files of `holdfast certify`, so that an interrupted command resumes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from torch import Tensor

from holdfast.attacks.auto_pgd import AutoPgd
from holdfast.certification import certify
from holdfast.data import Dataset, load
from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.models import Transformer
from holdfast.models.files import described, load_transformer, shelf_file
from holdfast.network.network import Network
from holdfast.report.numbers import down
from holdfast.report.style import PALETTE, draw_range, new_figure
from holdfast.results import CertificationRun
from holdfast.storage import make_folder, read_metadata
from holdfast.studies.attacked import check_attacked
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

RADII = (36 / 255, 72 / 255, 108 / 255)

_LOFAST, _OURS = "lofast", "gains"
_ATTACK = AutoPgd(steps=25)
_SHARES = {_OURS: 0.6, _LOFAST: 0.2, "attack": 0.19}  # of the time that a model takes, for the progress bar
_COMPARED = 10  # images on which the network and its model are compared
_AT_ONCE = {"cpu": 10, "cuda": 100}
_ATTACKED_AT_ONCE = {"cpu": 50, "cuda": 1000}


@final
@dataclass(frozen=True)
class ImageModel:
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
        for i, (radius, nearest) in enumerate(zip(self.radius, self.attack, strict=False)):  # fewer are attacked
            check_attacked("the certificate", radius, f"image {i}", nearest)

    def certified(self, radius: float) -> float:
        """The share of the images that are right and proved to stay so."""
        return _mean([proved >= radius for proved in self.radius])

    def lofast_certified(self, radius: float) -> float:
        """The same by LoFAST's recursion."""
        return _mean([proved >= radius for proved in self.lofast])

    def attacked(self, radius: float) -> float:
        """The share of the attacked images that are right and stay so."""
        return _mean([nearest is None or nearest > radius for nearest in self.attack])


def measure(model_name: str, parameters: ImagesParameters, place: Workplace, tell: Tell) -> ImageModel:
    """Certifies and attacks a model."""
    notes = _notes(model_name)
    training = json.loads(notes.get("training", "{}"))
    if not training.get("test"):
        raise InputError(
            f"{model_name!r} has no record of a training with its test split; expected a model.safetensors of holdfast "
            "train on a data set by name"
        )
    model, data = load_transformer(model_name), load(training["config"]["data"]["name"], None, place.data_dir)
    most = min(max(parameters.inputs, parameters.lofast_inputs), len(data))
    # Converted, and compared with the model, once for all images.
    converted = to_network(model, data.inputs[:_COMPARED])
    encoded = replace(data.select(range(most)), inputs=converted.encode(data.inputs[:most]))

    def proved(method: str, inputs: int, before: float) -> CertificationRun:
        return _certify(converted.network, encoded, model_name, place, method, inputs, lambda s: tell(before + s))

    ours, lofast = proved(_OURS, parameters.inputs, 0.0), proved(_LOFAST, parameters.lofast_inputs, _SHARES[_OURS])
    began = time.perf_counter()
    first = data.select(range(min(parameters.attack_inputs, len(data))))
    attack = _attack(model.to(place.device), first, place.device, tell)
    return ImageModel(
        name=training["name"],
        seed=notes.get("seed", ""),
        training=training,
        command=place.command,
        device=torch.cuda.get_device_name() if place.device.startswith("cuda") else place.device,
        seconds={
            _OURS: round(_mean([record.seconds for record in ours.records]), 4),
            _LOFAST: round(_mean([record.seconds for record in lofast.records]), 4),
            "attack": round((time.perf_counter() - began) / len(attack), 4),
        },
        radius=_radii(ours),
        lofast=_radii(lofast),
        attack=attack,
    )


def _certify(
    network: Network, data: Dataset, name: str, place: Workplace, method: str, inputs: int, tell: Tell
) -> CertificationRun:
    folder, file = make_folder(place.runs / "images"), Path(name)
    run = certify(
        network,
        data,
        RADII,
        method,
        guarantee="proved" if method == _OURS else "numerical",
        out=folder / f"{f'{file.parent.name}-{file.stem}'.strip('-')}-{method}.jsonl",
        limit=inputs,
        batch=_AT_ONCE[torch.device(place.device).type],
        device=place.device,
        name=name,
        command=place.command,
        progress=lambda done, planned: tell(_SHARES[method] * done / planned),
    )
    if run.missing:
        raise KeyboardInterrupt
    return run


def _radii(run: CertificationRun) -> list[float]:
    return [float(down(record.radius, 6)) if record.correct else 0.0 for record in run.records]


def _attack(model: Transformer, data: Dataset, device: str, tell: Tell) -> list[float | None]:
    """For every image the smallest of the radii at which its answer changes; in what torch computes for float32."""

    def logits(flat: Tensor) -> Tensor:
        values: Tensor = model(flat.reshape(-1, *shape))
        return values

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
        smallest += [None if math.isinf(radius) else radius for radius in changed.tolist()]
        done = min(start + step, len(data)) / len(data)
        tell(_SHARES[_OURS] + _SHARES[_LOFAST] + _SHARES["attack"] * done)
    return smallest


def markdown(results: Sequence[ImageModel]) -> str:
    """One row per model, as a table of a Markdown page, and a line on how they were made."""
    head = ["model", "seed", "parameters", "clean %", "content off %", "variation", "‖W_QK‖"]
    head += ["images", *(f"certified % at {255 * radius:.0f}/255" for radius in RADII)]
    head += ["LoFAST % at 36/255", "attacked % at 36/255", "s per image"]
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
        f"Certified by `{_OURS}`, proved: the first test images, as many as stated. LoFAST (its recursion with "
        "iterated norms) and Auto-PGD: the first of them, as stated. Clean and content off: the whole test split; "
        "variation and ‖W_QK‖: the largest over the layers."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def draw_accuracies(results: Sequence[ImageModel]) -> Figure:
    """Certified accuracy against the radius, mean and range over seeds; accuracy under attack at the radii tried."""
    figure = new_figure(5.5, 3.4)
    panel = figure.subplots()
    radii = [0.005 * step for step in range(1, 101)]  # at 0 the wrong answers would count, too
    for colour, name in zip(PALETTE, dict.fromkeys(one.name for one in results), strict=False):
        seeds = [one for one in results if one.name == name]
        certified = [[100 * one.certified(radius) for radius in radii] for one in seeds]
        draw_range(panel, radii, certified, color=colour, label=f"{name}, certified")
        attacked = [[100 * one.attacked(radius) for radius in RADII] for one in seeds if one.attack]
        if attacked:
            draw_range(panel, RADII, attacked, "o:", color=colour, label=f"{name}, attacked")
    panel.set(xlabel="l2 radius", ylabel="% of the images", xlim=(0, radii[-1]), ylim=(0, None))
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    return figure


def _notes(model: str) -> dict[str, str]:
    file = shelf_file(model) or model
    described(file)  # refuses other files
    return read_metadata(file)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@final
@dataclass(frozen=True)
class ImagesParameters:
    """What `repro images` takes."""

    models: tuple[str, ...] = option((), "Files of train, or names on the shelf.", grid=True, argument=True)
    inputs: int = option(1000, "Number of test images to certify.", grid=True, least=1)
    lofast_inputs: int = option(20, "Number of them to certify by LoFAST's recursion.", grid=True, least=1)
    attack_inputs: int = option(200, "Number of them to attack.", grid=True, least=1)


@final
@register_study
class ImagesStudy(Study[ImagesParameters]):
    """Trained image classifiers."""

    name = "images"
    title = "Trained image classifiers, certified, compared with LoFAST's recursion, and attacked"
    paper = "holdfast"
    minutes = 30
    memory = 8
    parameters = ImagesParameters
    kinds: ClassVar = {"model": ImageModel}

    def quick(self) -> ImagesParameters:
        return ImagesParameters(("cifar10-best",), 2, 1, 2)

    def plan(self, parameters: ImagesParameters, place: Workplace) -> StudyPlan:
        return StudyPlan([[StudyPart("model", _key(name), name) for name in parameters.models]])

    def measure(
        self, parameters: ImagesParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> ImageModel:
        return measure(part.work, parameters, place, tell)

    def show(self, parameters: ImagesParameters, records: Records) -> StudyOutput:
        models = sorted(records.of("model"), key=lambda one: (one.name, one.seed))
        return StudyOutput(figures={"": draw_accuracies(models)}, page=markdown(models))


def _key(model: str) -> str:
    """The config's name and the seed; two files of the same training are one part."""
    notes = _notes(model)
    name = json.loads(notes.get("training", "{}")).get("name", model)
    return f"{name}, seed {notes.get('seed', '')}"
