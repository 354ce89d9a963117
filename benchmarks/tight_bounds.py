"""The second-order bound against an attack of 100 steps with 10 restarts: CPU time of one input, GPU time of a batch.

The CPU part runs with the other benchmarks, the GPU part by itself: python -m benchmarks.tight_bounds. Without a GPU
that one takes few inputs of small layers, and writes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import holdfast
from benchmarks.gpu import second_call
from holdfast.storage import write_text
from holdfast.studies.tightness import Regime, draw

EPS = 0.1
CURVE = [0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0]
SHAPES = ((64, 64, 8), (197, 384, 6))
GPU_BATCHES = {(64, 64, 8): 256, (197, 384, 6): 8}
GPU_PROVED = {(16, 32, 4): 256, (64, 64, 8): 8}
TRIED = {(8, 16, 2): 2}


@dataclass(frozen=True)
class Row:
    """Seconds of one piece of work on one shape."""

    shape: tuple[int, int, int]
    work: str
    inputs: int
    seconds: float
    gigabytes: float | None = None


def run(quick: bool = False) -> None:
    """The CPU part."""
    from benchmarks.harness import cpu_seconds, machine, save

    rows = []
    for n, d, h in SHAPES[: 1 if quick else None]:
        layer, x = draw(Regime(n, d, h, 3.0, 1.0), seed=0)
        for name, work in _works(layer, x, proved=(n, d, h) == SHAPES[0] and not quick).items():
            rows.append(Row((n, d, h), name, 1, cpu_seconds(work)[1]))
    _show(rows, "CPU seconds")
    if not quick:
        save("tight_bounds", {"machine": machine(), "eps": EPS, "rows": [asdict(row) for row in rows]})


def run_gpu(out: Path) -> None:
    """The GPU part: batches of inputs of one layer."""
    on_gpu, rows = torch.cuda.is_available(), []
    for (n, d, h), inputs in (GPU_BATCHES if on_gpu else TRIED).items():
        layer, x = _batch(n, d, h, inputs)
        works = _works(layer, x, proved=False)
        rows += [_on_gpu((n, d, h), name, inputs, work) for name, work in works.items()]
    for (n, d, h), inputs in (GPU_PROVED if on_gpu else TRIED).items():
        layer, x = _batch(n, d, h, inputs)

        def proved(layer: holdfast.AttentionLayer = layer, x: torch.Tensor = x) -> object:
            return holdfast.bound(layer, x, EPS, "second-order", memory_limit=64 * 2**30)

        rows.append(_on_gpu((n, d, h), "second-order, proved", inputs, proved))
    if on_gpu:
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "eps": EPS}
        write_text(out, json.dumps({"machine": found, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def _works(layer: holdfast.AttentionLayer, x: torch.Tensor, *, proved: bool) -> dict[str, Callable[[], Any]]:
    works: dict[str, Callable[[], Any]] = {
        "attack, 100 steps, 10 restarts": lambda: holdfast.attack(layer, x, EPS),
        "second-order, numerical": lambda: holdfast.bound(layer, x, EPS, "second-order", guarantee="numerical"),
        f"second-order, numerical, {len(CURVE)} radii": lambda: holdfast.bound(
            layer, x, CURVE, "second-order", guarantee="numerical"
        ),
    }
    if proved:
        works["second-order, proved"] = lambda: holdfast.bound(layer, x, EPS, "second-order")
    return works


def _batch(n: int, d: int, h: int, inputs: int) -> tuple[holdfast.AttentionLayer, torch.Tensor]:
    layer, _ = draw(Regime(n, d, h, 3.0, 1.0), seed=0)
    x = torch.stack([draw(Regime(n, d, h, 3.0, 1.0), seed)[1] for seed in range(inputs)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return layer.to(device=device), x.to(device)


def _on_gpu(shape: tuple[int, int, int], name: str, inputs: int, work: Callable[[], Any]) -> Row:
    _, seconds, gigabytes = second_call(work)
    row = Row(shape, name, inputs, seconds, gigabytes)
    _show([row], "GPU seconds")
    return row


def _show(rows: list[Row], unit: str) -> None:
    table = Table("n, d, h", "work", "inputs", unit, "GiB", title="second-order bound and attack")
    for row in rows:
        memory = "" if row.gigabytes is None else f"{row.gigabytes:.1f}"
        table.add_row(", ".join(map(str, row.shape)), row.work, str(row.inputs), f"{row.seconds:.2f}", memory)
    Console(width=100).print(table)


if __name__ == "__main__":
    run_gpu(Path(sys.argv[1] if len(sys.argv) > 1 else "results/benchmarks/tight_bounds_gpu.json"))
