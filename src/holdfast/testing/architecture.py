"""The packages and the arrows between them, read from the source: imports inside functions count like any others.

`python -m holdfast.testing.architecture` regenerates the table and the picture of docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

#: For every part, a sub-package or a module at the top, the parts that it imports, each with the places where it does.
Arrows = Mapping[str, Mapping[str, tuple[str, ...]]]

PACKAGE = Path(__file__).parents[1]
#: They open every door, and nothing opens theirs.
DOORS = ("__init__", "__main__")

_ROW = re.compile(r"^\| `(\w+)` \|[^|]*\| ([^|]*) \|$", re.MULTILINE)


def arrows(package: Path = PACKAGE) -> Arrows:
    """The arrows of a package."""
    graph: dict[str, dict[str, list[str]]] = {}
    for file in sorted(package.rglob("*.py")):
        inside = file.relative_to(package).with_suffix("").parts
        targets = graph.setdefault(inside[0], {})
        for line, target in _imports(file, package.name):
            if target != inside[0]:
                targets.setdefault(target, []).append(f"{'/'.join(inside)}.py:{line}")
    return {part: {target: tuple(where) for target, where in targets.items()} for part, targets in graph.items()}


def order(graph: Arrows) -> list[str]:
    """The parts, each behind all that it imports; raises where that is impossible, naming a cycle."""
    placed: list[str] = []

    def place(part: str, path: tuple[str, ...]) -> None:
        if part in path:
            raise ValueError(f"a cycle: {' → '.join([*path[path.index(part) :], part])}")
        if part not in placed:
            for target in sorted(graph.get(part, {})):
                place(target, (*path, part))
            placed.append(part)

    for part in sorted(graph):
        place(part, ())
    return placed


def shown(page: str) -> dict[str, set[str]]:
    """The arrows that the table of the architecture page shows, by part, in the order of the page."""
    return {part: set(re.findall(r"\w+", imports)) for part, imports in _ROW.findall(page)}


def with_arrows(page: str, graph: Arrows) -> str:
    """The page with the last column of its table as the source has it."""

    def row(match: re.Match[str]) -> str:
        start, _ = match.span(2)
        return match.group()[: start - match.start()] + ", ".join(sorted(graph[match[1]])) + " |"

    return _ROW.sub(row, page)


def draw(graph: Arrows, parts: Sequence[str]) -> Figure:
    """The parts in rows, each above all that it imports; arrows that others imply are left out."""
    graph = {part: {t: () for t in graph[part] if t in parts} for part in parts}
    level: dict[str, int] = {}
    for part in order(graph):
        level[part] = 1 + max((level[target] for target in graph[part]), default=-1)
    rows = [[part for part in parts if level[part] == at] for at in range(max(level.values()) + 1)]
    spot = {part: ((i + 0.5) / len(row), at) for at, row in enumerate(rows) for i, part in enumerate(row)}
    figure = Figure(figsize=(9, 0.62 * len(rows)))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(-0.6, len(rows) - 0.4))
    for part in parts:
        for target in _direct(graph, part):
            axes.annotate(
                "",
                spot[target],
                spot[part],
                arrowprops={"arrowstyle": "->", "color": "#7f7f7f", "shrinkA": 9, "shrinkB": 9},
            )
    for part, (x, y) in spot.items():
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "#0072b2"}
        axes.text(x, y, part, ha="center", va="center", fontsize=9, bbox=box)
    return figure


def _direct(graph: Arrows, part: str) -> list[str]:
    """What a part imports that none of the others it imports leads to."""
    return [t for t in graph[part] if not any(t in _reached(graph, other) for other in graph[part] if other != t)]


def _reached(graph: Arrows, part: str) -> set[str]:
    """All that a part imports, and what that imports, and so on."""
    return set(graph[part]).union(*(_reached(graph, target) for target in graph[part]))


def _imports(file: Path, package: str) -> Iterator[tuple[int, str]]:
    """Line and part of every import from the package itself."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{package}.{alias.name}" for alias in node.names] if node.module == package else [node.module]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == package:
                yield node.lineno, rest.partition(".")[0] or "__init__"


def _write(docs: Path) -> None:
    graph, page = arrows(), docs / "architecture.md"
    page.write_text(with_arrows(page.read_text(), graph))
    figure = draw(graph, [part for part in shown(page.read_text()) if part not in DOORS])
    FigureCanvasSVG(figure)
    figure.savefig(docs / "architecture.svg", metadata={"Date": None})


if __name__ == "__main__":
    _write(PACKAGE.parents[1] / "docs")
