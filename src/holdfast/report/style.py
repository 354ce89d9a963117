"""How figures look: sizes and fonts suited to the page of a paper, and colours that everyone can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch import Tensor

from holdfast.storage import write_bytes

#: Okabe and Ito's colours, in the order in which lines take them.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#6a3d9a", "#8c564b")
BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, GREY = PALETTE[:7]

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "figure.titlesize": 10,
    "axes.prop_cycle": cycler(linestyle=("-", "--")) * cycler(color=PALETTE),  # for lines without a colour of their own
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "holdfast",  # the same numbers give the same file
}


def paper_style() -> AbstractContextManager[None]:
    """Figures drawn and saved inside have the fonts of a paper."""
    return rc_context(_STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches; a text column is about 5.5 wide."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_range(
    panel: Axes, at: Sequence[float], rows: Sequence[Sequence[float]] | Tensor, style: str = "", **options: Any
) -> str:
    """The mean of several curves as a line, with their range behind it; returns its colour."""
    values = torch.as_tensor(rows)
    (line,) = panel.plot(at, values.mean(0), *([style] if style else []), **options)
    colour = to_hex(line.get_color())
    panel.fill_between(at, values.amin(0), values.amax(0), color=colour, alpha=0.15, linewidth=0)
    return colour


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Writes a figure as PNG and SVG."""
    paths = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".png", ".svg")]
    write_figure(figure, paths[0], dpi=200)
    write_figure(figure, paths[1], metadata={"Date": None})
    return paths


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Writes a figure whole or not at all, in the format that the name ends in, with options of `savefig`."""
    drawn = BytesIO()
    figure.savefig(drawn, format=path.suffix.removeprefix("."), **options)
    write_bytes(path, drawn.getvalue())
