"""One layer, analyzed end to end: two tables and a figure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor

from holdfast.analysis.layer import LayerReport
from holdfast.report.numbers import down, up
from holdfast.report.style import PALETTE, new_figure, save_figure
from holdfast.tables import Table

_STYLES = tuple(itertools.product(("-", "-.", ":"), PALETTE))  # a style of its own for every line
_FIRST_ORDER = "‖DF(x)‖ eps"
_LOFAST = "Havens et al. (2024), Fine-grained Local Sensitivity Analysis of Standard Dot-Product Self-Attention"


def sensitivity_table(report: LayerReport, radii: Sequence[float]) -> Table:
    """How far the output moves at some of the radii: what an attack attained, and what each bound allows."""
    slopes = [up(value, 5) for value in sorted(report.lipschitz.value.tolist())]
    count = len(slopes)
    table = Table(
        title=f"{report.name}: how far the output moves\n"
        f"bounds proved and rounded up, attack rounded down{'' if count == 1 else f', mean over {count} inputs'}",
        caption=f"Local Lipschitz constant ‖DF(x)‖, proved: at most {slopes[-1]}"
        + ("" if count == 1 else f" (at most {slopes[0]} at the flattest of the {count} inputs)")
        + f". {_FIRST_ORDER} is not a bound: it is the first order alone. × is the ratio to the attack.",
    )
    table.add_column("eps")
    columns = [report.radii.index(radius) for radius in radii]
    for radius in radii:
        table.add_column(f"{radius:g}", justify="right")
    rows = {"attack": report.attack.lower, _FIRST_ORDER: _tangent(report)}
    rows |= dict(reversed(list(report.best.terms.items())))
    for label, values in rows.items():
        mean, ratio = _means(values), _means(values / report.attack.lower)
        shown, rounded = label not in ("attack", _FIRST_ORDER), down if label == "attack" else up
        table.add_row(label, *(rounded(mean[i]) + (f" ×{up(ratio[i])}" if shown else "") for i in columns))
    return table


def head_table(report: LayerReport) -> Table:
    """The terms of the LoFAST bounds, head by head; terms of the whole layer are in the caption."""
    naive, xi, lofast = (report.lofast[name].terms for name in ("naive", "lofast-xi", "lofast"))
    heads = {
        "‖P‖": naive["norm_P"],
        "‖M(X)‖ (20)": lofast["norm_M"],
        "ξ(X) (21)": xi["xi"],
        "‖A‖": lofast["norm_A"],
        "‖X C‖": lofast["norm_XC"],
        "‖C‖": lofast["norm_C"],
    }
    caption = f"ζ(X) (12) {_mean(lofast['zeta'])}, ‖H‖ + Σ‖C‖‖P‖ (9) {_mean(naive['naive_gain'])}"
    caption += f", ‖X‖ {_mean(lofast['norm_X'])}; the scale of the scores is in A, M and ξ."
    caption += f" Numbers in brackets: equations of {_LOFAST}."
    table = Table("head", *heads, title=f"{report.name}: terms of the LoFAST bounds, rounded up", caption=caption)
    for head in range(report.layer.h):
        table.add_row(str(head), *(_mean(term[..., head]) for term in heads.values()))
    return table


def plot_layers(reports: Sequence[LayerReport], stem: Path) -> list[Path]:
    """Bounds and attack against eps, one panel per layer, as PNG and SVG."""
    panels = []
    for report in reports:
        curves = dict(report.best.terms)
        curves[f"{_FIRST_ORDER} (first order)"] = _tangent(report)
        panels.append(Panel(report.name, report.radii, curves, report.attack.lower))
    return plot_panels(panels, stem)


@dataclass(frozen=True)
class Panel:
    """Curves (b, e) over the radii, and what an attack attained."""

    title: str
    radii: Sequence[float]
    curves: dict[str, Tensor]
    attained: Tensor


def plot_panels(panels: Sequence[Panel], stem: Path) -> list[Path]:
    """Draws the panels; as PNG and SVG."""
    return save_figure(draw_panels(panels), stem)


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Means over the inputs, with the range shaded, on logarithmic axes."""
    figure = new_figure(5.2 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for (style, colour), (name, values) in zip(itertools.cycle(_STYLES), panel.curves.items(), strict=False):
            line = "--" if "first order" in name else style
            axis.plot(panel.radii, values.mean(0), line, color=colour, label=name)
            axis.fill_between(panel.radii, values.amin(0), values.amax(0), color=colour, alpha=0.15, linewidth=0)
        axis.plot(panel.radii, panel.attained.mean(0), "k.", label="attack (lower bound)")
        axis.set(xscale="log", yscale="log", title=panel.title, xlabel="eps")
        axis.grid(which="major", alpha=0.25)
    axes[0].set_ylabel("largest movement of the output")
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def _tangent(report: LayerReport) -> Tensor:
    """‖DF(x)‖ eps: what the output moves to first order, (b, e)."""
    return report.lipschitz.value.unsqueeze(-1) * torch.tensor(report.radii, dtype=torch.float64)


def _means(values: Tensor) -> list[Fraction]:
    """Exact means over the inputs of (b, e)."""
    return [sum(map(Fraction, column), Fraction()) / len(column) for column in values.T.tolist()]


def _mean(values: Tensor) -> str:
    """The mean of terms that are bounds from above."""
    (mean,) = _means(values.reshape(-1, 1))
    return up(mean, 4)
