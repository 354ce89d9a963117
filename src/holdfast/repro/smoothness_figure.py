"""Table and figure of `smoothness`: constants against length, and the exponents of the layers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.table import Table

from holdfast.report.layer import save_figure
from holdfast.repro.smoothness import PUBLISHED, Cell, Record, Reference, Setting, fits
from holdfast.repro.texts import SOURCES

_MARKERS = {"alice": "o", "ag-news": "^"}
_SHIFT = {"alice": 0.965, "ag-news": 1.035}  # so that the texts do not hide each other
_BOUND, _ADVERSARIAL, _PUBLISHED = "#7f7f7f", "#d55e00", "#cc79a7"


def table(record: Record, settings: Sequence[Setting]) -> Table:
    """One row for each layer: R, the fit of each text, and the curves beside it at the largest length."""
    cells = record.of(settings)
    laws, own = fits(cells), _own_radius(record.references)
    n = max(cell.setting.length for cell in cells)
    texts = sorted({cell.setting.text for cell in cells})
    at_end = "the largest constant" + (", that of the adversarial tokens, the ball bound" if own else "")
    made = Table(
        title=f"{SOURCES[record.name].title}: ‖DF(X)‖ of the attention layers",
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


def plot(record: Record, settings: Sequence[Setting]) -> None:
    """The scatter with the curves beside it, and the exponents with their intervals; PNG and SVG beside the record."""
    cells = record.of(settings)
    layers = len(cells[0].constants)
    figure = Figure(figsize=(10, 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    scatter, exponents = figure.subplots(1, 2, width_ratios=(1.55, 1))
    colours = ListedColormap(colormaps["viridis"](np.linspace(0, 0.92, layers)))
    _plot_constants(scatter, cells, colours)
    handles = _plot_references(scatter, record, cells)
    _plot_exponents(exponents, cells, colours)
    norm = BoundaryNorm(np.arange(layers + 1) - 0.5, layers)
    step = max(1, layers // 6)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=exponents, ticks=range(0, layers, step), pad=0.02)
    bar.set_label("layer")
    bar.ax.minorticks_off()
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
    figure.suptitle(SOURCES[record.name].title)
    save_figure(figure, record.path.with_suffix(""))


def _plot_constants(axis: Axes, cells: Sequence[Cell], colours: Colormap) -> None:
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
        axis.plot(lengths, means, color=colours(i), linewidth=0.8, alpha=0.9)
    axis.set(xscale="log", yscale="log", xlabel="tokens n", ylabel="‖DF(X)‖ of the attention layer")
    axis.set_xticks(lengths, [str(n) for n in lengths])
    axis.minorticks_off()
    axis.grid(which="major", alpha=0.25)


def _plot_references(axis: Axes, record: Record, cells: Sequence[Cell]) -> list[Line2D]:
    """Draws what stands beside the constants, and returns the entries of the legend."""
    own = list(_own_radius(record.references).values())
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
    for curve in PUBLISHED.get(record.name, ()):
        n = np.array([ends.min(), ends.max()])
        label = f"published, layer {curve.layer}: {curve.coefficient:g} n^{curve.exponent:g}"
        label += "" if curve.radius is None else f" (adversarial, R={curve.radius:g})"
        style: Literal["-.", ":"] = "-." if curve.radius is None else ":"
        axis.plot(n, curve.coefficient * n**curve.exponent, style, color=_PUBLISHED, linewidth=1.6)
        handles.append(Line2D([], [], color=_PUBLISHED, linestyle=style, label=label))
    return handles


def _plot_exponents(axis: Axes, cells: Sequence[Cell], colours: Colormap) -> None:
    for level, label in ((0.25, "¼"), (0.5, "½")):
        axis.axhline(level, color="black", linewidth=0.8, linestyle=":")
        axis.annotate(label, (1.0, level), (-2, 2), ("axes fraction", "data"), "offset points", ha="right")
    for (text, i), law in fits(cells).items():
        reach = [[law.exponent - law.low], [law.high - law.exponent]]
        place = i + (-0.15 if text == "alice" else 0.15)
        axis.errorbar(place, law.exponent, reach, fmt=_MARKERS[text], color=colours(i), markersize=4, linewidth=1)
    axis.set(xlabel="layer", ylabel="fitted exponent of n, 95 % interval")
    axis.grid(axis="y", alpha=0.25)


def _own_radius(references: Sequence[Reference] | None) -> dict[int, Reference]:
    """The curves at the measured radii, by layer; those at the paper's come after them."""
    own: dict[int, Reference] = {}
    for reference in references or ():
        own.setdefault(reference.layer, reference)
    return own


def _at(cells: Sequence[Cell], n: int, layer: int) -> list[float]:
    return [value for cell in cells if cell.setting.length == n for value in cell.constants[layer]]
