"""Trainings with a penalty beside trainings without one: what is added to the loss, and the tables over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, final

import torch
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import normalize

from holdfast.report.style import PALETTE, new_figure
from holdfast.train import JaSMin
from holdfast.train.jasmin import check_options

PenaltyRecipe = Literal["plain", "jasmin", "spectral"]


class Penalty(Protocol):
    """What is added to the loss after each forward pass."""

    def __call__(self) -> Tensor: ...

    def reset(self) -> None:
        """Forgets forward passes that are not to be charged."""


@contextmanager
def charged(model: nn.Module, recipe: str, weight: float, k: int) -> Iterator[Penalty | None]:
    """The penalty of a recipe, attached to a model: JaSMin, or the norms of all matrices; None for any other."""
    if recipe == "jasmin":
        with JaSMin(model, k, weight) as penalty:
            yield penalty
    else:
        yield SpectralPenalty(model, weight) if recipe == "spectral" else None


@final
class SpectralPenalty:
    """The sum of the squared norms of all matrices but tables of embeddings, each by one power iteration a step."""

    def __init__(self, model: nn.Module, weight: float) -> None:
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        self._weight = weight
        self._matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in tables]
        self._left = [normalize(torch.ones_like(w[:, 0]), dim=0) for w in self._matrices]

    def __call__(self) -> Tensor:
        total = torch.zeros((), device=self._matrices[0].device)
        for i, w in enumerate(self._matrices):
            with torch.no_grad():
                right = normalize(self._left[i] @ w, dim=0)
                left = normalize(w @ right, dim=0)
                self._left[i].copy_(left)
            total = total + torch.dot(left, w @ right).square()
        return self._weight * total

    def reset(self) -> None:
        """Nothing: the norms do not depend on forward passes."""


def variants(
    ks: Sequence[int], weights: Sequence[float], spectral: Sequence[float]
) -> list[tuple[PenaltyRecipe, float, int]]:
    """Plain training, every k and weight of JaSMin, every weight of the spectral penalty: recipe, weight and k."""
    for k in ks:
        check_options(k, "mean")
    jasmin: list[tuple[PenaltyRecipe, float, int]] = [("jasmin", weight, k) for k in ks for weight in weights]
    return [("plain", 0.0, 0), *jasmin, *(("spectral", weight, 0) for weight in spectral)]


def training_title(recipe: str, weight: float, k: int) -> str:
    """What is compared: the penalty and its weight."""
    if recipe == "jasmin":
        return f"JaSMin, k={k}, weight {weight:g}"
    return "plain" if recipe == "plain" else f"{recipe}, weight {weight:g}"


# -- means over seeds


def over_seeds(trainings: Mapping[str, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of every column of numbers, from those of each seed, for every kind of training.

    Both are None where a seed has an infinite number, and the deviation where there is one seed.
    """
    rows = []
    for name, seeds in trainings.items():
        spreads = [_spread(column) for column in zip(*seeds, strict=True)]
        means, stds = (list(part) for part in zip(*spreads, strict=True))
        rows.append({"training": name, "seeds": len(seeds), "means": means, "stds": stds})
    return rows


def _spread(column: Sequence[float]) -> tuple[float | None, float | None]:
    if not all(map(math.isfinite, column)):
        return None, None
    return statistics.fmean(column), statistics.stdev(column) if len(column) > 1 else None


def _cells(row: dict[str, Any], columns: Mapping[str, str]) -> list[str]:
    numbers = zip(row["means"], row["stds"], columns.values(), strict=True)
    return [_cell(mean, std, form) for mean, std, form in numbers]


def _cell(mean: float | None, std: float | None, form: str) -> str:
    if mean is None:
        return "none"
    return f"{mean:{form}}" + ("" if std is None else f" ± {std:{form}}")


def seeds_tables(title: str, columns: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> list[Table]:
    """One row for each kind of training; `columns` are titles with the format of their numbers.

    There are as many tables as it takes to fit a terminal of 80 characters.
    """
    tables: list[Table] = []
    for shown in _portions(columns, 3):
        table = Table(title=None if tables else title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("training", no_wrap=True)
        for column in list(columns)[shown]:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(row["training"], *_cells(row, columns)[shown])
        tables.append(table)
    return tables


def seeds_page(columns: Mapping[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """The same for a Markdown page, with tables that fit its width."""
    tables = []
    for shown in _portions(columns, 4):
        names = list(columns)[shown]
        lines = [["training", "seeds", *names], ["---", "---:", *["---:"] * len(names)]]
        for row in rows:
            cells = (row["training"], str(row["seeds"]), *_cells(row, columns)[shown])
            lines.append([cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in cells])
        tables.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(tables)


def _portions(columns: Mapping[str, str], at_once: int) -> list[slice]:
    """Which columns the tables have, evenly."""
    each = -(-len(columns) // -(-len(columns) // at_once))
    return [slice(start, start + each) for start in range(0, len(columns), each)]


def draw_seeds(panels: Mapping[int, tuple[str, str]], rows: Sequence[dict[str, Any]]) -> Figure:
    """One panel for each chosen column (by number: title and unit), with error bars over the seeds."""
    figure = new_figure(7.0, 3.2)
    drawn = figure.subplots(1, len(panels), sharey=True)
    for panel, (column, (name, unit)) in zip(drawn, panels.items(), strict=True):
        for place, row in enumerate(rows):
            if row["means"][column] is None:
                continue
            kind = 0 if row["training"] == "plain" else 1 if row["training"].startswith("JaSMin") else 2
            panel.errorbar(
                row["means"][column], place, xerr=row["stds"][column], fmt="o", color=PALETTE[kind], capsize=3
            )
        panel.set(xlabel=unit, title=name)
        panel.grid(alpha=0.25, axis="x")
    drawn[0].set_yticks(range(len(rows)), [row["training"] for row in rows])
    drawn[0].invert_yaxis()
    return figure
