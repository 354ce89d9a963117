"""An analysis on the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console

from holdfast.analysis.result import Analysis, Row, Rows
from holdfast.report.numbers import down, nearest, up
from holdfast.tables import Table

_NAME = 16  # characters of a layer's name that fit on a line; the rest is folded


@dataclass(frozen=True)
class _Column:
    """A column of the table; if the table is too wide, columns with a rank are dropped, the highest rank first."""

    title: str
    cells: list[str]
    rank: int = 0

    @property
    def width(self) -> int:
        return max(map(len, (*self.title.splitlines(), *self.cells)))


def analysis_table(analysis: Analysis, width: int | None = None) -> Table:
    """One row per layer: the largest value over the inputs, and over the heads where a number belongs to a head.

    Args:
        analysis: what is shown.
        width: characters per line, by default the terminal's; columns that do not fit are left out.
    """
    width = width or Console().width
    several = len(analysis.inputs) > 1
    pattern, names = _short_names([layer.name for layer in analysis.layers])
    numbers = [str(layer.index) for layer in analysis.layers]
    columns = _columns(analysis)
    named = any(names) and names != numbers
    first = _Column("" if named else "layer", numbers).width
    taken = 2 + first + (1 + min(_NAME, _Column("layer", names).width) if named else 0)
    left_out = 0
    while taken + sum(1 + column.width for column in columns) > width:
        last = max(columns, key=lambda column: column.rank)
        if last.rank == 0:
            break
        columns = [column for column in columns if column.rank != last.rank]
        left_out += 1
    ratios = ", ".join(f"{up(r)} at eps {e:g}" for r, e in zip(analysis.tightness, analysis.eps, strict=False))
    caption = [f"Layers: {pattern}." if pattern else "", "‖DF‖: estimated."]
    caption += [f"Bounds: {analysis.method}, {analysis.guarantee}, rounded up; attained values rounded down."]
    caption += [f"Median ratio: {ratios}." if ratios else ""]
    caption += dict.fromkeys(layer.bound_note for layer in analysis.layers if layer.bound is None)
    caption += ["A wider terminal, --json and --html show more columns." if left_out else ""]
    table = Table(
        title=f"{PurePath(analysis.model).name}: attention layers"
        + (f", largest over {len(analysis.inputs)} inputs" if several else ""),
        caption=" ".join(filter(None, caption)),
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("" if named else "layer", justify="right", no_wrap=True)
    if named:
        table.add_column("layer", overflow="fold")
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for i, number in enumerate(numbers):
        table.add_row(number, *([names[i]] if named else []), *(column.cells[i] for column in columns))
    return table


def _columns(analysis: Analysis) -> list[_Column]:
    """The numbers: first those that are dropped first for lack of room, then what every eps allows and attains."""
    layers = analysis.layers
    columns = [_Column("‖DF‖", [nearest(max(layer.slope)) for layer in layers])]
    if any(layer.slope_upper for layer in layers):
        columns.append(
            _Column("proved", [up(max(layer.slope_upper)) if layer.slope_upper else "–" for layer in layers])
        )
    heads = {"head": "head_slope", "‖P‖": "attention_norm", "softmax": "softmax_norm", "entropy": "entropy"}
    first = len(analysis.eps)  # an eps beyond the first is dropped after all of these, the largest eps first
    for rank, (title, name) in enumerate(heads.items(), first):
        columns.append(_Column(title, [nearest(max(map(max, getattr(layer, name)))) for layer in layers], rank))
    for e, eps in enumerate(analysis.eps):
        attained = [_largest(layer.attack, e, down) for layer in layers]
        bound = [_largest(layer.bound, e, up) for layer in layers]
        columns.append(_Column(f"eps {eps:g}\nattained", attained, e))
        columns.append(_Column("\nbound", bound, e))
    return columns


def _largest(values: Rows | None, e: int, rounded: Callable[[float], str]) -> str:
    return "–" if values is None else rounded(max(row[e] for row in values))


def _short_names(names: list[str]) -> tuple[str, list[str]]:
    """What the names share, with … for the rest, and the rest; "" and the names themselves if they share nothing.

    Example:
        >>> _short_names(["blocks.0.attention", "blocks.1.attention"])
        ('blocks.….attention', ['0', '1'])
    """
    if len(names) == 1:
        return names[0], [""]
    parts = [name.split(".") for name in names]
    before = _shared(parts)
    after = _shared([part[before:][::-1] for part in parts])
    if not before + after:
        return "", names
    head, tail = parts[0][:before], parts[0][len(parts[0]) - after :]
    return ".".join([*head, "…", *tail]), [".".join(part[before : len(part) - after]) for part in parts]


def _shared(parts: list[list[str]]) -> int:
    """How many leading members are the same in all lists."""
    return len(list(takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))))


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
