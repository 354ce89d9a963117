"""`repro smoothness`: constants against length, the exponents of the layers, their table and their figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.table import Table

from holdfast.errors import UnknownNameError
from holdfast.report.style import GREY, PINK, VERMILION, new_figure
from holdfast.studies.processes import Tell
from holdfast.studies.smoothness import (
    LENGTHS,
    PUBLISHED,
    BatchConstants,
    ReferenceCurve,
    ReferenceCurves,
    batches,
    fits,
    measure,
    references,
)
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.studies.texts import SOURCES, TEXTS, LanguageModel, find_text, load_source, read_text, refusal

_MARKERS = {"alice": "o", "ag-news": "^"}
_SHIFT = {"alice": 0.965, "ag-news": 1.035}  # so that the texts do not hide each other
_BOUND, _ADVERSARIAL, _PUBLISHED = GREY, VERMILION, PINK


def table(name: str, cells: Sequence[BatchConstants], curves: Sequence[ReferenceCurve]) -> Table:
    """One row for each layer: R, the fit of each text, and the curves beside it at the largest length."""
    laws, own = fits(cells), _own_radius(curves)
    n = max(cell.setting.length for cell in cells)
    texts = sorted({cell.setting.text for cell in cells})
    at_end = "the largest constant" + (", that of the adversarial tokens, the ball bound" if own else "")
    made = Table(
        title=f"{SOURCES[name].title}: ‖DF(X)‖ of the attention layers",
        caption=f"Fits c n^a with the 95 % interval of a. At n = {n}: {at_end}.",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )
    for column in ("layer", "R", *texts, "largest", *(("attack", "bound") if own else ())):
        made.add_column(column, justify="right", no_wrap=True)
    for i in range(len(cells[0].constants)):
        radius = statistics.fmean(statistics.fmean(cell.root_mean_square[i]) for cell in cells)
        largest = max(max(cell.constants[i]) for cell in cells if cell.setting.length == n)
        beside = [f"{own[i].adversarial[-1]:.3g}", f"{own[i].bound[-1]:.1e}"] if i in own else []
        fitted = [str(laws[text, i]) if (text, i) in laws else "-" for text in texts]
        made.add_row(str(i), f"{radius:.3g}", *fitted, f"{largest:.3g}", *beside)
    return made


def draw_constants(name: str, cells: Sequence[BatchConstants], curves: Sequence[ReferenceCurve]) -> Figure:
    """The scatter with the curves beside it, and the exponents with their intervals."""
    layers = len(cells[0].constants)
    figure = new_figure(7.0, 4.0)
    scatter, exponents = figure.subplots(1, 2, width_ratios=(1.55, 1))
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, layers)))
    _plot_constants(scatter, cells, colours)
    handles = _plot_references(scatter, name, cells, curves)
    _plot_exponents(exponents, cells, colours)
    norm = BoundaryNorm(np.arange(layers + 1) - 0.5, layers)
    step = max(1, layers // 6)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=exponents, ticks=range(0, layers, step), pad=0.02)
    bar.set_label("layer")
    bar.ax.minorticks_off()
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if PUBLISHED.get(name) else 4, frameon=False)
    figure.suptitle(SOURCES[name].title)
    return figure


def _plot_constants(axis: Axes, cells: Sequence[BatchConstants], colours: Colormap) -> None:
    for cell in cells:
        for i, row in enumerate(cell.constants):
            n = cell.setting.length * _SHIFT[cell.setting.text]
            axis.plot(
                [n] * len(row),
                row,
                _MARKERS[cell.setting.text],
                color=colours(i),
                markersize=3.2,
                markeredgewidth=0,
                alpha=0.65,
                rasterized=True,
            )
    lengths = sorted({cell.setting.length for cell in cells})
    for i in range(len(cells[0].constants)):
        means = [statistics.geometric_mean(_at(cells, n, i)) for n in lengths]
        axis.plot(lengths, means, "-", color=colours(i), linewidth=0.8, alpha=0.9)
    axis.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="‖DF(X)‖ of the attention layer")
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.minorticks_off()
    axis.grid(which="major", alpha=0.25)


def _plot_references(
    axis: Axes, name: str, cells: Sequence[BatchConstants], beside: Sequence[ReferenceCurve]
) -> list[Line2D]:
    """Draws what stands beside the constants, and returns the entries of the legend."""
    own = list(_own_radius(beside).values())
    shown = sorted({cell.setting.text for cell in cells})
    handles = [Line2D([], [], marker=_MARKERS[t], color="black", linestyle="", markersize=4, label=t) for t in shown]
    if own:
        lengths = own[0].lengths
        curves = np.array([reference.adversarial for reference in own])
        axis.fill_between(lengths, curves.min(0), curves.max(0), color=_ADVERSARIAL, alpha=0.14, linewidth=0)
        axis.plot(lengths, curves.max(0), "--", color=_ADVERSARIAL, linewidth=1.2)
        axis.plot(lengths, curves.min(0), "--", color=_ADVERSARIAL, linewidth=1.2)
        bounds = np.array([reference.bound for reference in own])
        axis.fill_between([lengths[0], lengths[-1]], bounds.min(0), bounds.max(0), color=_BOUND, alpha=0.25)
        handles.append(Line2D([], [], color=_ADVERSARIAL, linestyle="--", label="adversarial tokens, over layers"))
        handles.append(Line2D([], [], color=_BOUND, linewidth=6, alpha=0.4, label="ball bound, over layers"))
    ends = np.array([cell.setting.length for cell in cells])
    for curve in PUBLISHED.get(name, ()):
        n = np.array([ends.min(), ends.max()])
        label = f"published, layer {curve.layer}: {curve.coefficient:g} n^{curve.exponent:g}"
        label += "" if curve.radius is None else f" (adversarial, R={curve.radius:g})"
        style: Literal["-.", ":"] = "-." if curve.radius is None else ":"
        axis.plot(n, curve.coefficient * n**curve.exponent, style, color=_PUBLISHED, linewidth=1.6)
        handles.append(Line2D([], [], color=_PUBLISHED, linestyle=style, label=label))
    return handles


def _plot_exponents(axis: Axes, cells: Sequence[BatchConstants], colours: Colormap) -> None:
    for level, label in ((0.25, "¼"), (0.5, "½")):
        axis.axhline(level, color="black", linewidth=0.8, linestyle=":")
        axis.annotate(label, (1.0, level), (-2, 2), ("axes fraction", "data"), "offset points", ha="right")
    for (text, i), law in fits(cells).items():
        reach = [[law.exponent - law.low], [law.high - law.exponent]]
        place = i + (-0.15 if text == "alice" else 0.15)
        axis.errorbar(place, law.exponent, reach, fmt=_MARKERS[text], color=colours(i), markersize=4, linewidth=1)
    axis.set(xlabel="layer", ylabel="fitted exponent of n, 95 % interval")
    axis.grid(axis="y", alpha=0.25)


def _own_radius(curves: Sequence[ReferenceCurve]) -> dict[int, ReferenceCurve]:
    """The curves at the measured radii, by layer; those at the paper's come after them."""
    own: dict[int, ReferenceCurve] = {}
    for reference in curves:
        own.setdefault(reference.layer, reference)
    return own


def _at(cells: Sequence[BatchConstants], n: int, layer: int) -> list[float]:
    return [value for cell in cells if cell.setting.length == n for value in cell.constants[layer]]


@final
@dataclass(frozen=True)
class SmoothnessParameters:
    """What `repro smoothness` takes."""

    models: tuple[str, ...] = option(tuple(SOURCES), "Names of language models.", grid=True)
    lengths: tuple[int, ...] = option(LENGTHS, "Numbers of tokens.", grid=True, least=2)
    sequences: int = option(10, "Most sequences of each length.", grid=True, least=2)
    tokens: int = option(
        1280, "Most tokens in them together; longer sequences are fewer, at least two.", grid=True, least=1
    )


@lru_cache(maxsize=1)
def _loaded(name: str, data_dir: Path | None) -> tuple[LanguageModel, dict[str, list[int]]]:
    """A model and the ids of its texts; one at a time."""
    source = load_source(name)
    return source, {text: source.tokenise(read_text(text, data_dir)) for text in TEXTS}


@final
@register_study
class Smoothness(Study[SmoothnessParameters]):
    """The experiment of Castin, Ablin and Peyré on real models."""

    name = "smoothness"
    title = "Local Lipschitz constants of language models' attention layers against sequence length"
    paper = "castin2024"
    minutes = 75
    memory = 6
    parameters = SmoothnessParameters
    kinds: ClassVar = {"batch": BatchConstants, "curves": ReferenceCurves}

    def quick(self) -> SmoothnessParameters:
        return SmoothnessParameters(("minilm",), (2, 4, 8), 2)

    def plan(self, parameters: SmoothnessParameters, place: Workplace) -> StudyPlan:
        for name in parameters.models:
            if name not in SOURCES:
                raise UnknownNameError("model", name, SOURCES)
        for text in TEXTS:
            find_text(text, place.data_dir)
        lengths = sorted(set(parameters.lengths))
        refused = {name: reason for name in dict.fromkeys(parameters.models) if (reason := refusal(name)) is not None}
        models = [name for name in dict.fromkeys(parameters.models) if name not in refused]
        asked = [
            batch for name in models for batch in batches(name, TEXTS, lengths, parameters.sequences, parameters.tokens)
        ]
        shown = ", ".join(map(str, lengths))
        return StudyPlan(
            [
                [StudyPart("batch", batch.title, batch) for batch in asked],
                [StudyPart("curves", f"{name}: bound and configuration for {shown} tokens", name) for name in models],
            ],
            list(refused.values()),
        )

    def measure(
        self, parameters: SmoothnessParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> BatchConstants | ReferenceCurves:
        if part.kind == "batch":
            source, ids = _loaded(part.work.model, place.data_dir)
            return measure(source, ids[part.work.text], part.work)
        source, _ = _loaded(part.work, place.data_dir)
        own = [batch for batch in earlier.of("batch") if batch.setting.model == part.work]
        return ReferenceCurves(part.work, references(part.work, source, own))

    def show(self, parameters: SmoothnessParameters, records: Records) -> StudyOutput:
        cells: dict[str, list[BatchConstants]] = {}
        for batch in records.of("batch"):
            cells.setdefault(batch.setting.model, []).append(batch)
        curves = {one.model: one.curves for one in records.of("curves")}  # the latest
        laws = [
            {"model": name, "text": text, "layer": i} | asdict(law)
            for name, own in cells.items()
            for (text, i), law in fits(own).items()
        ]
        return StudyOutput(
            {"fits": laws},
            [table(name, own, curves.get(name, ())) for name, own in cells.items()],
            {name: draw_constants(name, own, curves.get(name, ())) for name, own in cells.items()},
        )
