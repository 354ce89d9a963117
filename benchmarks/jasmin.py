"""What JaSMin and the monitor add to the training of a small ViT (d=192, 6 layers, 65 tokens, batch of 32): CPU time.

Every round trains one step of the same model without and with each penalty, in turn, and a ratio is taken within its
round; the monitor is measured in the same rounds, and its share is that of one measurement in `every` plain steps.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import cpu_seconds, machine, save
from holdfast import JaSMin
from holdfast.extras import require
from holdfast.train import Monitor

WIDTH, DEPTH, HEADS, BATCH, IMAGE, PATCH = 192, 6, 3, 32, 32, 4
KS = (0, 2, 10)
PROBE, EVERY = 4, 100
ROUNDS = 15
PLAIN, MONITOR = "plain step", f"one measurement of {PROBE} inputs"


class Training:
    """A timm ViT with random images and its optimizer."""

    def __init__(self) -> None:
        timm = require("timm", "vision")
        torch.manual_seed(0)
        self.model: nn.Module = timm.models.VisionTransformer(
            img_size=IMAGE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS, num_classes=10
        )
        self.images, self.labels = torch.randn(BATCH, 3, IMAGE, IMAGE), torch.randint(10, (BATCH,))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.monitor = Monitor(self.model, self.images[:PROBE], EVERY)

    def step(self, k: int | None) -> Tensor:
        penalty = None if k is None else JaSMin(self.model, k)
        loss = functional.cross_entropy(self.model(self.images), self.labels)
        loss = loss if penalty is None else loss + penalty()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        if penalty is not None:
            penalty.remove()
        return loss


def run(*, quick: bool = False) -> None:
    """Measures, prints a table and, unless `quick`, writes the results."""
    training, console = Training(), Console()
    variants: dict[str, int | None] = {PLAIN: None} | {f"step with JaSMin, k={k}": k for k in KS}
    for k in variants.values():
        training.step(k)  # the first call of anything loads code
    training.monitor.measure(0)
    rounds = [_round(training, variants) for _ in track(range(2 if quick else ROUNDS), "jasmin", console=console)]
    summary = _summary(rounds)
    console.print(_table(summary))
    if not quick:
        shape = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "tokens": (IMAGE // PATCH) ** 2 + 1, "batch": BATCH}
        content = {"machine": machine(), "shape": shape, "probe": PROBE, "every": EVERY, "summary": summary}
        console.print(f"written to {save('jasmin', content | {'rounds': rounds})}")


def _round(training: Training, variants: dict[str, int | None]) -> dict[str, float]:
    seconds = {name: cpu_seconds(lambda k=k: training.step(k))[1] for name, k in variants.items()}  # type: ignore[misc]
    return seconds | {MONITOR: cpu_seconds(lambda: training.monitor.measure(0))[1]}


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Median seconds, and the share that is added to the training: median, least, largest over the rounds."""
    summary = {}
    for name in rounds[0]:
        added = [_added(name, seconds) for seconds in rounds]
        summary[name] = {
            "cpu_seconds": statistics.median(seconds[name] for seconds in rounds),
            "added": [statistics.median(added), min(added), max(added)],
        }
    return summary


def _added(name: str, seconds: dict[str, float]) -> float:
    return seconds[name] / (EVERY * seconds[PLAIN]) if name == MONITOR else seconds[name] / seconds[PLAIN] - 1


def _table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"medians (ranges), float32, {torch.get_num_threads()} thread", title_justify="left")
    table.add_column("work")
    table.add_column("CPU seconds", justify="right")
    table.add_column("added to training, %", justify="right")
    for name, row in summary.items():
        added = "{:.2f} ({:.2f} to {:.2f})".format(*(100 * share for share in row["added"]))
        table.add_row(name, f"{row['cpu_seconds']:.3f}", "" if name == PLAIN else added)
    return table
