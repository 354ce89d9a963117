"""Table and figure of the two LoFAST studies, from their results alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.table import Table

from holdfast.report.layer import save_figure
from holdfast.repro.lofast import LOFAST, Measured, Study

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_PANEL = "attention_norm"  # one column of panels for each of its values
_ROW = "patch"  # one row for each of its values, where the grid has it
_SHORT = {"attention_norm": "norm"}
_POINTS = 400  # of a curve


def markdown(study: Study, results: Sequence[Measured]) -> str:
    """One row for each member, as a table of a Markdown page, and a line on how they were made."""
    first = results[0]
    head = [*_keys(first), "seed", "clean %", "content off %", "variation", "‖W_QK‖"]
    head += [f"% at {study.shown(radius)}" for radius in study.radii]
    head += [f"mean radius, {method}" for method in (LOFAST, first.ours)]
    lines = [head, ["---:"] * len(head)]
    for one in results:
        means = [f"{one.mean_radius(method):.4f}" for method in (LOFAST, one.ours)]
        shares = _shares(study, one, ".1f", " / ")
        lines.append([*_place(one), str(one.seed), *_accuracies(one), *shares, *means])
    made = ", ".join(f"{method} {guarantee}" for method, guarantee in first.methods.items())
    note = (
        f"Of the first {len(first.right)} test inputs at each radius: % certified by {LOFAST} / {first.ours} / right "
        f"after the attack ({made}). Clean and content off are on all {first.test_inputs}; variation and ‖W_QK‖ the "
        "largest over the layers; a wrong answer counts as a radius of 0."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def table(study: Study, results: Sequence[Measured]) -> Table:
    """The same for the screen, shorter."""
    first = results[0]
    made = Table(
        title=study.title,
        caption=f"{len(first.right)} test inputs. At each radius: % certified by {LOFAST} / by {first.ours} / right "
        "after the attack. off: clean accuracy with content off; TV, QK: variation of P, ‖W_QK‖, largest over layers.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )
    for column in (*_keys(first), "clean", "off", "TV", "QK", *map(study.shown, study.radii)):
        made.add_column(column, justify="right", no_wrap=True)
    for one in results:
        made.add_row(*_place(one), *_accuracies(one), *_shares(study, one, ".0f", "/"))
    return made


def _keys(one: Measured) -> list[str]:
    return [_SHORT.get(key, key) for key in one.values]


def _place(one: Measured) -> list[str]:
    return [f"{value:g}" for value in one.values.values()]


def _accuracies(one: Measured) -> list[str]:
    """Clean, content off, variation and ‖W_QK‖."""
    shares = (f"{100 * one.clean:.1f}", f"{100 * one.content_off:.1f}")
    return [*shares, f"{max(one.total_variation):.3f}", f"{max(one.score_norm):.2f}"]


def _shares(study: Study, one: Measured, form: str, between: str) -> list[str]:
    """At each radius: certified by the paper's bound, by ours, and right after the attack."""
    three = [(one.certified(LOFAST, r), one.certified(one.ours, r), one.attacked(r)) for r in study.radii]
    return [between.join(format(100 * share, form) for share in shares) for shares in three]


def plot(study: Study, results: Sequence[Measured], stem: Path) -> list[Path]:
    """Certified accuracy against radius: one panel for each norm of the weights, one colour for each network."""
    columns = sorted({one.values[_PANEL] for one in results})
    lines = sorted({one.values.get(_ROW, 0.0) for one in results})
    figure = Figure(figsize=(3.6 * len(columns) + 0.6, 3.2 * len(lines) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(lines), len(columns), sharex=True, sharey=True, squeeze=False)
    kinds = sorted({_kind(one) for one in results})
    colour = {kind: _COLOURS[i % len(_COLOURS)] for i, kind in enumerate(kinds)}
    end = _end(study, results)
    for one in results:
        row, column = lines.index(one.values.get(_ROW, 0.0)), columns.index(one.values[_PANEL])
        _draw(panels[row, column], one, end, colour[_kind(one)])
    for (i, j), panel in np.ndenumerate(panels):
        title = f"norm of $W^V$, $W^O$: {columns[j]:g}" + (f", patches of {lines[i]:g}" if lines[i] else "")
        panel.set(title=title, xlim=(0, end), ylim=(0, 100))
        panel.set(xlabel="l2 radius" if i == len(lines) - 1 else "", ylabel="% of the inputs" if j == 0 else "")
        panel.grid(alpha=0.25)
    handles = [Line2D([], [], color=colour[kind], label=f"{kind[0]:g} layers, {kind[1]:g} heads") for kind in kinds]
    ours = results[0].ours
    handles.append(Line2D([], [], color="black", linestyle="-", label=f"certified, {ours}"))
    handles.append(Line2D([], [], color="black", linestyle="--", label=f"certified, {LOFAST}"))
    handles.append(Line2D([], [], color="black", linestyle=":", label="after the attack"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(5, 2 * len(columns)), frameon=False, fontsize="small"
    )
    figure.suptitle(study.title, wrap=True)
    return save_figure(figure, stem)


def _kind(one: Measured) -> tuple[float, float]:
    return one.values["depth"], one.values["heads"]


def _end(study: Study, results: Sequence[Measured]) -> float:
    """The radius at which hardly anything is certified by any bound."""
    reach = np.quantile([r for one in results for r in one.radius[one.ours]], 0.98)
    return max(float(reach), study.radii[-1])


def _draw(panel: Axes, one: Measured, end: float, colour: str) -> None:
    radii = np.linspace(0, end, _POINTS)
    curves = (("-", [one.certified(one.ours, r) for r in radii]), ("--", [one.certified(LOFAST, r) for r in radii]))
    for style, shares in (*curves, (":", [one.attacked(r) for r in radii])):
        panel.plot(radii, [100 * share for share in shares], style, color=colour, linewidth=1.3)
