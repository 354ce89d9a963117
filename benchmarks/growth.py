"""How time and memory grow when tokens, width, heads, layers or inputs are doubled, beside what the algorithm promises.

On a CPU every point is measured in a process of its own: seconds of one thread, and how far its memory grew. The GPU
part, with larger sizes, runs by itself: python -m benchmarks.growth [FILE].
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.compositions import certify_inputs
from holdfast.errors import HoldfastError
from holdfast.linalg.certified import GIB
from holdfast.models import DigitsViT
from holdfast.report.style import BLUE, new_figure, paper_style, save_figure
from holdfast.storage import write_text
from holdfast.studies.tightness import Regime, draw

DOUBLINGS = 2
MEMORY = 64 * GIB  # that a proved norm may hold


@final
@dataclass(frozen=True)
class Point:
    """The size of one piece of work."""

    n: int = 16
    d: int = 32
    h: int = 4
    layers: int = 1
    inputs: int = 1


Prepare = Callable[[Point, str], Callable[[], object]]


def _bound(method: str) -> Prepare:
    """A proved bound of one layer."""

    def prepare(point: Point, device: str) -> Callable[[], object]:
        layer, x = draw(Regime(point.n, point.d, point.h, 3.0, 1.0), seed=0)
        moved, batch = layer.to(device=device), x.expand(point.inputs, -1, -1).to(device)
        return lambda: holdfast.bound(moved, batch, 0.1, method, memory_limit=MEMORY)

    return prepare


def _certify(method: str) -> Prepare:
    """Proved radii of a network of 17 tokens."""

    def prepare(point: Point, device: str) -> Callable[[], object]:
        torch.manual_seed(0)
        model = DigitsViT(depth=point.layers, width=point.d, heads=point.h).eval()
        images = torch.rand(point.inputs, 8, 8)
        converted = holdfast.to_network(model, images[:1])
        encoded = converted.encode(images).to(device)
        return lambda: certify_inputs(converted.network, encoded, method=method)

    return prepare


@final
@dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
        prepare: makes ready what is measured, at a size and on a device.
        first: the size that is doubled, on a CPU.
        on_gpu: the same on a GPU.
        promised: for each variable the exponents of time and memory, as the algorithm has them where that variable is
            large and the others stay. More heads are narrower ones, of d/h numbers.
    """

    prepare: Prepare
    first: Point
    on_gpu: Point
    promised: Mapping[str, tuple[float, float]]


WORKS = {
    "second-order, proved": Work(
        _bound("second-order"),
        Point(32, 32, 4),
        Point(64, 64, 8),
        # Gram matrices and factors of size nd, (nd)³; scores among them, h n³ d² from rows of h n² d numbers.
        {"n": (3, 2), "d": (3, 2), "h": (1, 1), "inputs": (1, 1)},
    ),
    "rows, proved": Work(
        _bound("rows"),
        Point(128, 64, 4),
        Point(256, 256, 8, inputs=8),
        # Formulas for every head and pair of tokens, h n²; norms of size d/h for every head and token, h n (d/h)³.
        {"n": (2, 2), "d": (3, 2), "h": (1, 1), "inputs": (1, 1)},
    ),
    "certify by gains": Work(
        _certify("gains"),
        Point(17, 32, 4, inputs=4),
        Point(17, 32, 4, inputs=4),
        {"layers": (1, 1), "inputs": (1, 1)},  # what is known of every layer and input is kept
    ),
    "certify by telescoped": Work(
        _certify("telescoped"), Point(17, 16, 2), Point(17, 16, 2), {"layers": (2, 1), "inputs": (1, 0)}
    ),
}


@final
@dataclass(frozen=True)
class Measured:
    """One point: seconds, and megabytes that were held at most beyond those before."""

    work: str
    variable: str
    device: str
    point: Point
    seconds: float
    megabytes: float


def _answer(prepare: Prepare, point: Point, answer: Any) -> None:
    from benchmarks.harness import cost

    torch.set_num_threads(1)
    prepare(Point(4, 8, 2), "cpu")()  # what is loaded once
    answer.send(cost(prepare(point, "cpu")))


def on_cpu(name: str, variable: str, point: Point) -> Measured:
    """One point, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(WORKS[name].prepare, point, sender))
    process.start()
    sender.close()  # or a process that ends without an answer would be waited for, for ever
    try:
        seconds, megabytes = receiver.recv()
    except EOFError:
        raise HoldfastError(f"{name} gave no answer at {point}") from None
    process.join()
    return Measured(name, variable, "cpu", point, seconds, megabytes)


def on_gpu(name: str, variable: str, point: Point) -> Measured:
    """One point, whose kernels are loaded."""
    run = WORKS[name].prepare(point, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return Measured(name, variable, "cuda", point, seconds, (torch.cuda.max_memory_allocated() - before) / 2**20)


def doubled(first: Point, variable: str) -> list[Point]:
    return [replace(first, **{variable: getattr(first, variable) * 2**k}) for k in range(DOUBLINGS + 1)]


def exponent(sizes: list[float], values: list[float]) -> float:
    """The slope of a line through the logarithms, by least squares."""
    x, y = ([math.log(max(t, 1e-9)) for t in numbers] for numbers in (sizes, values))
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def fitted(points: list[Measured]) -> list[dict[str, Any]]:
    """The exponents of every work and variable, beside those that are promised."""
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for point in points:
        groups.setdefault((point.work, point.variable, point.device), []).append(point)
    rows = []
    for (work, variable, device), group in groups.items():
        sizes = [float(getattr(one.point, variable)) for one in group]
        time_promised, memory_promised = WORKS[work].promised[variable]
        if device != "cpu" and variable == "inputs":
            memory_promised = 1  # there they are always treated together
        rows.append(
            {
                "work": work,
                "doubled": variable,
                "device": device,
                "time": exponent(sizes, [one.seconds for one in group]),
                "time promised": time_promised,
                "memory": exponent(sizes, [max(one.megabytes, 1.0) for one in group]),
                "memory promised": memory_promised,
                "seconds": [one.seconds for one in group],
                "megabytes": [one.megabytes for one in group],
            }
        )
    return rows


def run(quick: bool = False) -> None:
    """The CPU part: measures, shows the table, and draws the plot."""
    from benchmarks.harness import machine, save

    points = [
        on_cpu(name, variable, point)
        for name, work in list(WORKS.items())[: 1 if quick else None]
        for variable in (list(work.promised)[:1] if quick else work.promised)
        for point in doubled(work.first, variable)
    ]
    rows = fitted(points)
    _show(rows)
    if not quick:
        draw_exponents(
            save("growth", {"machine": machine(), "fitted": rows, "points": [asdict(point) for point in points]})
        )


def run_gpu(out: Path) -> None:
    """The GPU part; what is measured is written at once, and is not measured again."""
    stored = json.loads(out.read_text()) if out.exists() else {"machine": {}, "points": []}
    points = [Measured(**one | {"point": Point(**one["point"])}) for one in stored["points"]]
    measured = {(one.work, one.variable) for one in points}
    for name, work in WORKS.items():
        for variable in work.promised:
            if (name, variable) in measured:
                continue
            work.prepare(work.on_gpu, "cuda")()  # loads the kernels
            points += [on_gpu(name, variable, point) for point in doubled(work.on_gpu, variable)]
            _show(fitted(points[-DOUBLINGS - 1 :]))
            where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            content = {
                "machine": stored["machine"] | where,
                "fitted": fitted(points),
                "points": [asdict(point) for point in points],
            }
            write_text(out, json.dumps(content, indent=1) + "\n")
    draw_exponents(out)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("work", "doubled", "on", "time ~ size^", "promised", "memory ~ size^", "promised", "s", "MB")
    for row in rows:
        table.add_row(
            row["work"],
            row["doubled"],
            row["device"],
            f"{row['time']:.1f}",
            f"{row['time promised']:g}",
            f"{row['memory']:.1f}",
            f"{row['memory promised']:g}",
            ", ".join(f"{seconds:.2g}" for seconds in row["seconds"]),
            ", ".join(f"{megabytes:.0f}" for megabytes in row["megabytes"]),
        )
    Console(width=140).print(table)


def draw_exponents(numbers: Path) -> None:
    """Fitted exponents of time and memory beside those of large sizes, from a file of numbers alone."""
    rows = json.loads(numbers.read_text())["fitted"]
    with paper_style():
        figure = new_figure(8.5, 0.28 * len(rows) + 1.2)
        panels = figure.subplots(1, 2, sharey=True)
        names = [f"{row['work']}: {row['doubled']}" for row in rows]
        for panel, kind in zip(panels, ("time", "memory"), strict=True):
            panel.barh(names, [row[kind] for row in rows], color=BLUE, label="fitted")
            panel.plot([row[f"{kind} promised"] for row in rows], names, "k|", markersize=12, label="of large sizes")
            panel.set(xlabel=f"exponent of {kind}")
            panel.set_xlim(left=-0.1)  # so that a mark at 0 can be seen
        panels[0].invert_yaxis()
        figure.legend(
            handles=panels[0].get_legend_handles_labels()[0], loc="outside lower center", ncols=2, frameon=False
        )
        save_figure(figure, numbers.with_suffix(""))


if __name__ == "__main__":
    run_gpu(Path(sys.argv[1] if len(sys.argv) > 1 else "results/benchmarks/growth_gpu.json"))
