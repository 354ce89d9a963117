"""A classifier whose certified radii are known, for the tests of runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.certification import Batch, workers
from holdfast.data import Dataset
from holdfast.data.dataset import checksum
from holdfast.layers.piece import Piece
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.network.network import Head, Network

CLASSES, WIDTH = 4, 6


def linear_network(seed: int = 0) -> Network:
    """Logits w x + b."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    return Network((), Head(weight, torch.zeros(CLASSES, dtype=torch.float64)), "linear")


class Deadly(Piece):
    """A piece that ends the process it is computed in, unless that is the one that made it."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def value(self, u: Array) -> Array:
        if os.getpid() != self.home:
            os._exit(9)
        return u

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho


def labelled(count: int, seed: int = 1, wrong: int = 2) -> Dataset:
    """Inputs (b, 1, d) with the labels of the network; the first `wrong` of them are false. Indices are odd numbers."""
    x = torch.randn(count, 1, WIDTH, generator=torch.Generator().manual_seed(seed))
    labels = linear_network()(x.double()).argmax(-1)
    labels[:wrong] = (labels[:wrong] + 1) % CLASSES
    return Dataset("made up", "test", x, labels, 2 * torch.arange(count) + 1, checksum(x, labels))


def exact_radii(network: Network, x: Tensor) -> Tensor:
    """min_j (f_y - f_j) / ‖w_y - w_j‖: the distance to the nearest boundary."""
    w, logits = network.head.weight, network(x.double())
    answer = logits.argmax(-1)
    margins = logits.gather(1, answer[:, None]) - logits
    slopes = torch.linalg.vector_norm(w[answer][:, None] - w, dim=-1)
    return (margins / slopes).nan_to_num(nan=torch.inf).amin(1)


def rows(path: Path) -> list[str]:
    """The lines after the header."""
    return path.read_text(encoding="utf-8").splitlines()[1:]


def starve(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Memory runs out in a batch with this input."""
    real = workers.examine

    def hungry(model: Any, batch: Batch, *rest: Any) -> Any:
        if index in batch.indices:
            raise MemoryError("no room")
        return real(model, batch, *rest)

    monkeypatch.setattr(workers, "examine", hungry)
