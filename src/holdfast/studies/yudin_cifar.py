"""`repro yudin-cifar10`: JaSMin and spectral penalties beside plain training, a small ViT on CIFAR-10, over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from rich.table import Table

from holdfast import data as datasets
from holdfast.data.dataset import Dataset
from holdfast.report.style import PALETTE, new_figure
from holdfast.studies.cifar_training import RADII, CifarNetwork, CifarTraining, train_and_measure
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
    variants: list[dict[str, Any]] = [{}]
    variants += [{"recipe": "jasmin", "k": k, "weight": w} for k in parameters.ks for w in parameters.weights]
    variants += [{"recipe": "spectral", "weight": w} for w in parameters.spectral]
    return [CifarTraining(seed=seed, **own, **variant) for seed in range(parameters.seeds) for variant in variants]


def title(setting: CifarTraining) -> str:
    """What is compared: the penalty and its weight."""
    if setting.recipe == "jasmin":
        return f"JaSMin, k={setting.k}, weight {setting.weight:g}"
    return "plain" if setting.recipe == "plain" else f"{setting.recipe}, weight {setting.weight:g}"


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
        return StudyOutput({"radii": RADII, "trainings": rows}, [penalty_table(rows)], {"": draw(rows)}, _page(rows))


def _noise() -> Dataset:
    draws = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 32, 32, generator=draws)
    return Dataset("noise", "all", images, torch.arange(8), torch.arange(8), "")


def summary(networks: Sequence[CifarNetwork]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds, in percent: clean accuracy, then PGD accuracy at every radius."""
    groups: dict[str, list[CifarNetwork]] = {}
    for one in networks:
        groups.setdefault(title(one.training), []).append(one)
    rows = []
    for name, group in groups.items():
        columns = [[100 * one.accuracy for one in group]]
        columns += [[100 * one.attacked[i] for one in group] for i in range(len(RADII))]
        deviations = [statistics.stdev(column) if len(column) > 1 else 0.0 for column in columns]
        rows.append(
            {"training": name, "seeds": len(group), "means": list(map(statistics.fmean, columns)), "stds": deviations}
        )
    return rows


_COLUMNS = ("training", "seeds", "accuracy %", *(f"PGD, l2 {radius:.2g} %" for radius in RADII))


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = (f"{mean:.1f} ± {std:.1f}" for mean, std in zip(row["means"], row["stds"], strict=True))
    return [row["training"], str(row["seeds"]), *numbers]


def penalty_table(rows: Sequence[dict[str, Any]]) -> Table:
    """One row for each penalty."""
    table = Table(title="small ViT on CIFAR-10: mean ± standard deviation over seeds", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "training" else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _page(rows: Sequence[dict[str, Any]]) -> str:
    lines = [_COLUMNS, ("---", *("---:",) * (len(_COLUMNS) - 1)), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy and PGD accuracy of each penalty, with error bars over the seeds."""
    figure = new_figure(7.0, 3.2)
    panels = figure.subplots(1, 3, sharey=True)
    for column, (panel, name) in enumerate(
        zip(panels, ("clean", *(f"PGD, l2 {r:.2g}" for r in RADII[:2])), strict=True)
    ):
        for place, row in enumerate(rows):
            kind = 0 if row["training"] == "plain" else 1 if row["training"].startswith("JaSMin") else 2
            panel.errorbar(
                row["means"][column], place, xerr=row["stds"][column], fmt="o", color=PALETTE[kind], capsize=3
            )
        panel.set(xlabel="%", title=name)
        panel.grid(alpha=0.25, axis="x")
    panels[0].set_yticks(range(len(rows)), [row["training"] for row in rows])
    panels[0].invert_yaxis()
    return figure
