"""What a slope in the loss costs: images per second of one training step of a CIFAR-10 model, forward to optimiser.

On the CPU one thread, float32, and CPU time; on a GPU, if there is one, bf16 and torch.compile, and wall time. Every
round takes some steps with each loss in turn, and the ratio to cross-entropy is taken within its round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.harness import machine, save
from holdfast.layers import ManifoldStep, manifold_parameters
from holdfast.models import Transformer, config
from holdfast.train.losses import CrossEntropy, Emma, Loss, Pgd
from holdfast.train.objective import TrainingObjective
from holdfast.train.slopes import GainsSlope, GradientSlope, JacobianSlope, SecondOrderSlope

MODEL = "cifar10-smooth"
PLAIN = "cross-entropy"
LOSSES: dict[str, Loss] = {
    PLAIN: CrossEntropy(),
    "emma, gains": Emma(slope=GainsSlope()),
    "emma, gains of 16 inputs": Emma(slope=GainsSlope(sample=16)),
    "emma, gains over a ball": Emma(slope=GainsSlope(radius=36 / 255)),
    "emma, gains over a ball of 16 inputs": Emma(slope=GainsSlope(radius=36 / 255, sample=16)),
    "emma, jacobian": Emma(slope=JacobianSlope()),
    "emma, margin gradient": Emma(slope=GradientSlope(curvature=0.0)),
    "emma, margin gradient and curvature": Emma(slope=GradientSlope()),
    "emma, second order": Emma(slope=SecondOrderSlope()),
    "pgd, 7 steps": Pgd(),
}
ROUNDS = 5


class Steps:
    """A model, a batch of random images and what steps the model."""

    def __init__(self, loss: Loss, device: str, batch: int) -> None:
        torch.manual_seed(0)
        gpu = device != "cpu"
        model = Transformer(config(MODEL)).to(device)
        self._objective = TrainingObjective(model, (loss,), bf16=gpu)
        if gpu:
            self._objective.compile()
        orthogonal = list(manifold_parameters(model))
        ours = {id(p) for p in orthogonal}
        rest = [p for p in model.parameters() if id(p) not in ours]
        self._optimisers = (ManifoldStep(orthogonal), torch.optim.AdamW(rest))
        images = torch.rand(batch, 3, 32, 32, device=device)
        labels = torch.randint(10, (batch,), device=device)
        self._arguments: tuple[Tensor, ...] = images, labels, torch.tensor(0.5, device=device)
        self._clock: Callable[[], float] = time.perf_counter if gpu else time.process_time
        self._wait: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None

    def seconds(self, count: int) -> float:
        """For one step, the mean of some."""
        self._wait()
        began = self._clock()
        for _ in range(count):
            loss: Tensor = self._objective(*self._arguments)
            for optimiser in self._optimisers:
                optimiser.zero_grad()
            torch.autograd.backward(loss)
            for optimiser in self._optimisers:
                optimiser.step()
        self._wait()
        return (self._clock() - began) / count


def run(*, quick: bool = False) -> None:
    """Measures, prints tables and, unless `quick`, writes the results."""
    console, found = Console(), []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        batch, count = (256, 20) if device == "cuda" else (8 if quick else 64, 1)
        steps = {title: Steps(loss, device, batch) for title, loss in LOSSES.items()}
        for each in steps.values():
            each.seconds(1)  # the first call loads, and compiles, code
        found.append(measured(steps, device, batch, 1 if quick else ROUNDS, count))
        console.print(_table(found[-1]))
    if not quick:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        console.print(f"written to {save('training', {'machine': machine() | {'gpu': gpu}, 'models': found})}")


def measured(steps: dict[str, Steps], device: str, batch: int, rounds: int, count: int) -> dict[str, Any]:
    """The summary of some rounds, each of so many steps with every loss."""
    taken = [
        {title: each.seconds(count) for title, each in steps.items()} for _ in track(range(rounds), f"on {device}")
    ]
    return {"model": MODEL, "device": device, "batch": batch, "summary": _summary(taken, batch)}


def _summary(rounds: list[dict[str, float]], batch: int) -> dict[str, Any]:
    """Median images per second, and how many times longer a step takes: median, least, largest over the rounds."""
    summary = {}
    for title in rounds[0]:
        ratios = [seconds[title] / seconds[PLAIN] for seconds in rounds]
        summary[title] = {
            "images_a_second": batch / statistics.median(seconds[title] for seconds in rounds),
            "times_longer": [statistics.median(ratios), min(ratios), max(ratios)],
        }
    return summary


def _table(found: dict[str, Any]) -> Table:
    title = f"{found['model']} on {found['device']}, batch of {found['batch']}: medians (ranges)"
    table = Table("loss", title=title, title_justify="left")
    table.add_column("images per second", justify="right")
    table.add_column("times longer", justify="right")
    for name, row in found["summary"].items():
        longer = "{:.2f} ({:.2f} to {:.2f})".format(*row["times_longer"])
        table.add_row(name, f"{row['images_a_second']:.3g}", "" if name == PLAIN else longer)
    return table
