"""How figures look: sizes and fonts fit for a page of a paper, and colours that everyone can tell apart."""

from __future__ import annotations

from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from holdfast.storage import write_bytes

#: Okabe and Ito's colours, in the order in which lines take them.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#6a3d9a", "#8c564b")
BLUE, VERMILION, GREEN, PINK, SKY, ORANGE, GREY = PALETTE[:7]

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "figure.titlesize": 10,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "holdfast",  # the same numbers give the same file
}


def paper_style() -> AbstractContextManager[None]:
    """What is drawn and saved inside has the fonts of a paper."""
    return rc_context(_STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches; a text column is about 5.5 wide."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
