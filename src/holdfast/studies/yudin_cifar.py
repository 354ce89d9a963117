"""`repro yudin-cifar10`: JaSMin and spectral penalties beside plain training, a small ViT on CIFAR-10, over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from holdfast import data as datasets
from holdfast.data.dataset import Dataset
from holdfast.studies.cifar_training import RADII, CifarNetwork, CifarTraining, train_and_measure
from holdfast.studies.penalties import draw_seeds, over_seeds, seeds_page, seeds_table, training_title, variants
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study


@final
@dataclass(frozen=True)
class YudinCifarParameters:
    """What `repro yudin-cifar10` takes."""

    ks: tuple[int, ...] = option((0, 2, 10), "Values of k.", grid=True)
    weights: tuple[float, ...] = option((0.01, 0.1), "Weights of JaSMin.", grid=True)
    spectral: tuple[float, ...] = option((1e-4, 1e-3), "Weights of the spectral penalty.", grid=True)
    seeds: int = option(3, "How many trainings for each.", grid=True, least=1)
    steps: int = option(1541, "Of each training.", least=1)
    depth: int = option(4, "Layers of the network.", least=1)
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
    title = "JaSMin and a spectral penalty on CIFAR-10: accuracy and PGD accuracy of a small ViT (needs a GPU)"
    paper = "yudin2025"
    minutes = 40
    memory = 4
    parameters = YudinCifarParameters
    kinds: ClassVar = {"training": CifarNetwork}

    def quick(self) -> YudinCifarParameters:
        return YudinCifarParameters((2,), (0.1,), (1e-3,), 1, 1, 1, noise=True)

    def plan(self, parameters: YudinCifarParameters, place: Workplace) -> StudyPlan:
        asked = settings(parameters)
        return StudyPlan([[StudyPart("training", f"{title(one)}, seed {one.seed}", one) for one in asked]])

    def measure(
        self, parameters: YudinCifarParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> CifarNetwork:
        if parameters.noise:
            train = test = _noise()
        else:
            train, test = (datasets.load("cifar10", split, place.data_dir) for split in ("train", "test"))
        return train_and_measure(part.work, train, test, place.device)[1]

    def show(self, parameters: YudinCifarParameters, records: Records) -> StudyOutput:
        rows = summary(records.of("training"))
        table = seeds_table("small ViT on CIFAR-10: mean ± standard deviation over seeds", _COLUMNS, rows)
        figures = {"": draw_seeds(_PANELS, rows)}
        return StudyOutput({"radii": RADII, "trainings": rows}, [table], figures, seeds_page(_COLUMNS, rows))


def _noise() -> Dataset:
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 32, 32, generator=draws)
    return Dataset("noise", "all", images, torch.arange(8), torch.arange(8), "")


def summary(networks: Sequence[CifarNetwork]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds, in percent: clean accuracy, then PGD accuracy at every radius."""
    groups: dict[str, list[list[float]]] = {}
    for one in networks:
        groups.setdefault(title(one.training), []).append([100 * share for share in (one.accuracy, *one.attacked)])
    return over_seeds(groups)


_COLUMNS = dict.fromkeys(("accuracy %", *(f"PGD, l2 {radius:.2g} %" for radius in RADII)), ".1f")
_PANELS = {0: ("clean", "%")} | {i + 1: (f"PGD, l2 {RADII[i]:.2g}", "%") for i in range(2)}
