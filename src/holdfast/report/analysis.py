"""An analysis on the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from holdfast.analysis.result import AnalysedLayer, Analysis, Row, Rows


def analysis_table(analysis: Analysis) -> Table:
    """One row for each layer: the largest value over the inputs, and over the heads where a number is a head's."""
    several = len(analysis.inputs) > 1
    ratios = ", ".join(f"{_up(r)} at eps {e:g}" for r, e in zip(analysis.tightness, analysis.eps, strict=False))
    caption = f"Bounds: {analysis.method}, {analysis.guarantee}, rounded up; attained values rounded down."
    caption += f" Median ratio: {ratios}." if ratios else ""
    reasons = dict.fromkeys(layer.bound_note for layer in analysis.layers if layer.bound is None)
    table = Table(
        title=f"{analysis.model}: attention layers"
        + (f", largest over {len(analysis.inputs)} inputs" if several else ""),
        caption=" ".join([caption, *reasons]),
    )
    table.add_column("")
    table.add_column("layer", overflow="fold")
    for title in ("‖DF‖", "… proved") if _proved(analysis) else ("‖DF‖",):
        table.add_column(title, justify="right")
    for title in ("head", "softmax", "‖P‖", "entropy"):
        table.add_column(title, justify="right")
    for eps in analysis.eps:
        table.add_column(f"eps {eps:g}\nattained ≤ bound", justify="right")
    for layer in analysis.layers:
        heads = (layer.head_slope, layer.softmax_norm, layer.attention_norm, layer.entropy)
        slopes = [_nearest(max(layer.slope))]
        if _proved(analysis):
            slopes.append(_up(max(layer.slope_upper)) if layer.slope_upper else "–")
        cells = [_nearest(max(map(max, values))) for values in heads]
        table.add_row(str(layer.index), layer.name, *slopes, *cells, *_movements(analysis, layer))
    return table


def plot_analysis(analysis: Analysis) -> Figure:
    """Gains over depth, mean and range over the inputs, and the local constants of all heads."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    numbers = [layer.index for layer in analysis.layers]
    _ranges(left, numbers, [layer.slope for layer in analysis.layers], "local constant (estimate)", "#0072b2")
    for e, (eps, shade) in enumerate(zip(analysis.eps, _spread(len(analysis.eps)), strict=True)):
        bounded = [layer for layer in analysis.layers if layer.bound is not None]
        if bounded and eps > 0:
            gains = [tuple(row[e] / eps for row in layer.bound or ()) for layer in bounded]
            places = [layer.index for layer in bounded]
            _ranges(left, places, gains, f"bound / eps ({analysis.guarantee}), eps = {eps:g}", (0.84, 0.37, 0.0, shade))
    left.set(xlabel="attention layer", ylabel="output / input", yscale="log", title=analysis.model)
    left.grid(alpha=0.25)
    left.legend(frameon=False, fontsize="small")
    width = max(len(layer.head_slope[0]) for layer in analysis.layers)
    largest = [[max(head) for head in zip(*layer.head_slope, strict=True)] for layer in analysis.layers]
    image = right.imshow(
        [row + [float("nan")] * (width - len(row)) for row in largest], cmap="cividis", aspect="auto", origin="upper"
    )
    right.set(xlabel="head", ylabel="attention layer", title="local constant of each head")
    right.set_yticks(range(len(numbers)), [str(number) for number in numbers])
    figure.colorbar(image, ax=right)
    return figure


def _ranges(axis: Any, places: list[int], rows: Sequence[Row], label: str, colour: object) -> None:
    """A line through the means, with the range shaded."""
    mean = [sum(row) / len(row) for row in rows]
    axis.plot(places, mean, "o-", color=colour, label=label)
    axis.fill_between(places, list(map(min, rows)), list(map(max, rows)), color=colour, alpha=0.15, linewidth=0)


def _spread(count: int) -> list[float]:
    """Opacities, from faint to full."""
    return [1.0] if count == 1 else [0.35 + 0.65 * i / (count - 1) for i in range(count)]


def _movements(analysis: Analysis, layer: AnalysedLayer) -> list[str]:
    """For every eps the attained value and the bound."""
    return [
        f"{_largest(layer.attack, e, ROUND_FLOOR)} ≤ {_largest(layer.bound, e, ROUND_CEILING)}"
        for e in range(len(analysis.eps))
    ]


def _largest(values: Rows | None, e: int, rounding: str) -> str:
    return "–" if values is None else _digits(max(row[e] for row in values), rounding)


def _proved(analysis: Analysis) -> bool:
    return any(layer.slope_upper for layer in analysis.layers)


def _up(value: float) -> str:
    return _digits(value, ROUND_CEILING)


def _nearest(value: float) -> str:
    return _digits(value, ROUND_HALF_EVEN)


def _digits(value: float, rounding: str) -> str:
    """Three digits, rounded in the given direction."""
    return f"{float(Context(prec=3, rounding=rounding).create_decimal_from_float(value)):.3g}"
