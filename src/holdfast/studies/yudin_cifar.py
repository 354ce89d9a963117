"""`repro yudin-cifar10`: JaSMin and spectral penalties beside plain training, a small ViT on CIFAR-10, over seeds.

Each network is trained and attacked at some radii; then the smallest movements that change an answer are searched, and
its attention is measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from holdfast import data as datasets
from holdfast.attacks.minimal import MinimalAttack
from holdfast.data.dataset import Dataset
from holdfast.errors import InputError
from holdfast.models.vit import VisionTransformer
from holdfast.storage import make_folder
from holdfast.studies.cifar_training import (
    RADII,
    CifarNetwork,
    CifarTraining,
    load_network,
    save_network,
    train_and_measure,
)
from holdfast.studies.penalties import draw_seeds, over_seeds, seeds_page, seeds_tables, training_title, variants
from holdfast.studies.processes import Tell
from holdfast.studies.robustness import (
    ATTENTION_COLUMNS,
    AttentionNorms,
    attention_norms,
    median_radius,
    middle,
    network_constants,
)
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

_SEARCHED = 100  # images, the first that are answered right, for which the nearest change is searched
_PROBED = 8  # images at which the attention is measured, the first ones
_NEAREST = MinimalAttack(restarts=1, targets=3, steps=20)


@final
@dataclass(frozen=True)
class CifarAttention:
    """What is measured of a network beside its accuracies.

    Attributes:
        training: the recipe.
        nearest: of the first test images that are answered right, the smallest movement found that changes the answer.
        not_found: for how many of them there is none.
        jacobian: the norms of the network's Jacobian at these images.
        attention: at the first test images.
    """

    training: CifarTraining
    nearest: list[float]
    not_found: int
    jacobian: list[float]
    attention: AttentionNorms


@final
@dataclass(frozen=True)
class YudinCifarParameters:
    """What `repro yudin-cifar10` takes."""

    ks: tuple[int, ...] = option((0, 2, 10), "Values of k.", grid=True)
    weights: tuple[float, ...] = option((0.01, 0.1), "Weights of JaSMin.", grid=True)
    spectral: tuple[float, ...] = option((1e-4, 1e-3), "Weights of the spectral penalty.", grid=True)
    seeds: int = option(3, "Number of trainings for each.", grid=True, least=1)
    steps: int = option(1541, "Steps of each training.", least=1)
    depth: int = option(4, "Number of layers of the network.", least=1)
    noise: bool = option(False, "A few random images instead of CIFAR-10, to try the command.")


def settings(parameters: YudinCifarParameters) -> list[CifarTraining]:
    """Every training, seed by seed, so that an interrupted run can be compared."""
    own: dict[str, Any] = {"patch": 4, "depth": parameters.depth, "width": 96, "heads": 3, "steps": parameters.steps}
    return [
        CifarTraining(seed=seed, recipe=recipe, weight=weight, k=k, **own)
        for seed in range(parameters.seeds)
        for recipe, weight, k in variants(parameters.ks, parameters.weights, parameters.spectral)
    ]


def title(setting: CifarTraining) -> str:
    """What is compared."""
    return training_title(setting.recipe, setting.weight, setting.k)


@final
@register_study
class YudinCifarStudy(Study[YudinCifarParameters]):
    """Penalties on CIFAR-10."""

    name = "yudin-cifar10"
    title = "JaSMin and a spectral penalty on CIFAR-10: accuracy, local constants, attacks of a small ViT (needs a GPU)"
    paper = "yudin2025"
    minutes = 8
    memory = 4
    parameters = YudinCifarParameters
    kinds: ClassVar = {"training": CifarNetwork, "attention": CifarAttention}

    def quick(self) -> YudinCifarParameters:
        return YudinCifarParameters((2,), (0.1,), (1e-3,), 1, 1, 1, noise=True)

    def plan(self, parameters: YudinCifarParameters, place: Workplace) -> StudyPlan:
        named = {f"{title(one)}, seed {one.seed}": one for one in settings(parameters)}
        trainings = [StudyPart("training", name, one) for name, one in named.items()]
        return StudyPlan(
            [trainings, [StudyPart("attention", f"attention, {name}", one) for name, one in named.items()]]
        )

    def measure(
        self, parameters: YudinCifarParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> CifarNetwork | CifarAttention:
        def data(split: str) -> Dataset:
            return _noise() if parameters.noise else datasets.load("cifar10", split, place.data_dir)

        setting, folder = part.work, place.runs / self.name
        if part.kind == "training":
            return trained(setting, data("train"), data("test"), folder, place.device)
        return examined(recorded_network(setting, folder, earlier[_key(setting)]), setting, data("test"), place.device)

    def show(self, parameters: YudinCifarParameters, records: Records) -> StudyOutput:
        attentions = records.of("attention")
        rows = summary(records.of("training"), attentions)
        columns, panels = (_COLUMNS, _PANELS) if attentions else (_ACCURACIES, _ACCURACY_PANELS)
        tables = seeds_tables("small ViT on CIFAR-10: mean ± standard deviation over seeds", columns, rows)
        content = {"radii": RADII, "columns": list(columns), "trainings": rows}
        return StudyOutput(content, tables, {"": draw_seeds(panels, rows)}, seeds_page(columns, rows))


def trained(setting: CifarTraining, train: Dataset, test: Dataset, folder: Path, device: str) -> CifarNetwork:
    """What is known about the network of a setting, which is trained unless its file is in the folder."""
    path = _file(setting, folder)
    if not path.exists():
        make_folder(folder)
        save_network(path, *train_and_measure(setting, train, test, device))
    return load_network(path)[1]


def recorded_network(setting: CifarTraining, folder: Path, record: CifarNetwork) -> VisionTransformer:
    """The very network whose accuracies are recorded; another of the same setting would not do."""
    path = _file(setting, folder)
    if path.exists():
        model, known = load_network(path)
        if known == record:
            return model
    raise InputError(f"the network whose training is recorded is not in {path}; give another --out to train it again")


def _key(setting: CifarTraining) -> str:
    return f"{title(setting)}, seed {setting.seed}"


def _file(setting: CifarTraining, folder: Path) -> Path:
    return folder / f"{_key(setting)}, steps {setting.steps}, depth {setting.depth}.safetensors".replace(", ", "-")


def examined(model: VisionTransformer, setting: CifarTraining, test: Dataset, device: str) -> CifarAttention:
    """Searches the nearest changes of a network's answers, in float64, and measures its attention."""
    attention = attention_norms(model, (test.inputs[i : i + 1] for i in range(min(_PROBED, len(test)))))
    double = copy.deepcopy(model).double().to(device)
    x, labels = test.inputs[: 10 * _SEARCHED].double().to(device), test.labels[: 10 * _SEARCHED].to(device)
    kept = (double(x).argmax(1) == labels).nonzero().flatten()[:_SEARCHED]

    def logits(flat: Tensor) -> Tensor:
        out: Tensor = double(flat.reshape(-1, *x.shape[1:]))
        return out

    radii = _NEAREST(logits, x[kept].flatten(-2), labels[kept]).radius.tolist() if len(kept) else []
    reached = [radius for radius in radii if math.isfinite(radius)]
    jacobian = network_constants(double, x[kept]) if len(kept) else []
    return CifarAttention(setting, reached, len(radii) - len(reached), jacobian, attention)


def _noise() -> Dataset:
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 32, 32, generator=draws)
    return Dataset("noise", "all", images, torch.arange(8), torch.arange(8), "")


def summary(networks: Sequence[CifarNetwork], attentions: Sequence[CifarAttention]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of every column: accuracies, then what is beside them, if anything."""
    measured = {one.training: one for one in attentions}
    groups: dict[str, list[list[float]]] = {}
    for one in networks:
        row = [100 * share for share in (one.accuracy, *one.attacked)]
        if one.training in measured:
            beside = measured[one.training]
            radius = median_radius(beside.nearest, beside.not_found)
            row += [radius, middle(beside.jacobian), *beside.attention.columns]
        elif measured:
            row += [math.inf] * (len(_COLUMNS) - len(_ACCURACIES))
        groups.setdefault(title(one.training), []).append(row)
    return over_seeds(groups)


_ACCURACIES = dict.fromkeys(("accuracy %", *(f"PGD, l2 {radius:.2g} %" for radius in RADII)), ".1f")
_COLUMNS = {**_ACCURACIES, "attack radius": ".3f", "constant of the network": ".1f", **ATTENTION_COLUMNS}
_ACCURACY_PANELS = {0: ("clean", "%"), 1: (f"PGD, l2 {RADII[0]:.2g}", "%")}
_PANELS = {**_ACCURACY_PANELS, 4: ("attack radius", "l2"), 5: ("network", "‖DF(x)‖")}
