"""How much of the distance to the nearest change of answer is proved, on standard ViTs trained on digits.

17 tokens of width 64, 4 heads, MLPs with 128 GELU units, pre-LayerNorm, class token, biases; perturbations are l2 on
pixels in [0, 1], and fill the whole ball.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.errors import InputError, SoundnessError
from holdfast.graph import to_network
from holdfast.models.digits import DigitsViT
from holdfast.network.compositions import certify_inputs
from holdfast.network.network import Network
from holdfast.repro.jasmin import load_digits
from holdfast.repro.vit_training import HEADS, UNITS, WIDTH, Setting, train
from holdfast.storage import read_metadata, read_tensors, write_tensors

_RESTARTS, _TARGETS = 3, 9  # of both attacks: 27 starts
_STEPS = 60
_HALVINGS = 7  # of the radius below the first attack's


@dataclass(frozen=True)
class Subject:
    """A trained model, and the first test digits that it gets right.

    Attributes:
        network: the model in float64.
        x: (b, 1, 64) pixels.
        labels: (b) the digits, which are also the answers.
        places: (b) where they stand in the test split.
        accuracy: on the whole test split.
        training: seconds that the training took, also where it was an earlier one.
    """

    setting: Setting
    network: Network
    x: Tensor
    labels: Tensor
    places: list[int]
    accuracy: float
    training: float


@dataclass(frozen=True)
class Row:
    """One digit.

    Attributes:
        place: in the test split.
        radii: proved, by method.
        seconds: by method.
        memory: MiB, the largest resident size of the process until then.
    """

    place: int
    radii: dict[str, float]
    seconds: dict[str, float]
    memory: float


@dataclass(frozen=True)
class Measurement:
    """One model, measured: `attack` is the smallest perturbation found for every digit, None where there is none."""

    setting: Setting
    accuracy: float
    training: float
    rows: list[Row]
    attack: list[float | None]

    def __post_init__(self) -> None:
        for row, nearest in zip(self.rows, self.attack, strict=True):
            for method, radius in row.radii.items():
                if nearest is not None and radius > nearest:
                    raise SoundnessError(
                        f"{method} proves {radius:.4g} for digit {row.place} of {self.setting.name} and an attack "
                        f"succeeds at {nearest:.4g}; please report"
                    )

    def to_dict(self) -> dict[str, Any]:
        """Everything and its summary, ready for JSON."""
        medians = {name: value if math.isfinite(value) else None for name, value in self.medians().items()}
        return asdict(self) | {"median": medians}

    def medians(self) -> dict[str, float]:
        """Of the attack, of every method's radii, and the methods' ratio to the attack."""
        attack = statistics.median(math.inf if radius is None else radius for radius in self.attack)
        found = {"attack": attack}
        for method in self.rows[0].radii:
            radius = statistics.median(row.radii[method] for row in self.rows)
            found |= {method: radius, f"{method} / attack": radius / attack}
        return found


def prepare(setting: Setting, digits: int, folder: Path) -> Subject:
    """Trains a model, or takes the one that an earlier run has left in the folder."""
    training, test = load_digits()
    path = folder / f"vit-{setting.name}.safetensors"
    model = DigitsViT(setting.layers, WIDTH, HEADS, UNITS)
    if path.exists():
        try:
            model.load_state_dict(read_tensors(path))
            seconds = float(json.loads(read_metadata(path)["vit"])["seconds"])
        except (RuntimeError, KeyError, ValueError):
            raise InputError(f"{path} is no checkpoint of this command; move it away or give --out") from None
        model = model.eval().requires_grad_(False)
    else:
        began = time.perf_counter()
        model = train(setting, training)
        seconds = time.perf_counter() - began
        write_tensors(path, model.state_dict(), {"vit": json.dumps(asdict(setting) | {"seconds": seconds})})
    converted = to_network(model, test.images[:digits])
    x = converted.encode(test.images)
    right = converted.network(x).argmax(-1) == test.labels
    places = right.nonzero().flatten()[:digits]
    accuracy = right.double().mean().item()
    return Subject(setting, converted.network, x[places], test.labels[places], places.tolist(), accuracy, seconds)


def certify(subject: Subject, i: int, methods: Sequence[str]) -> Row:
    """The proved radii of one digit."""
    found = {method: certify_inputs(subject.network, subject.x[i : i + 1], method=method)[0] for method in methods}
    radii, seconds = ({name: getattr(one, key) for name, one in found.items()} for key in ("radius", "seconds"))
    return Row(subject.places[i], radii, seconds, _peak_memory())


def attack(subject: Subject) -> list[float | None]:
    """The radius of a minimal attack, or a smaller one at which projected gradient ascent still succeeds."""

    # Witnesses are evaluated in float64: balls are too wide at the end of four layers.
    def logits(x: Tensor) -> Tensor:
        found: Tensor = subject.network(x)
        return found

    radius = MinimalAttack(_RESTARTS, _TARGETS, _STEPS)(logits, subject.x, subject.labels).radius
    low, high = torch.zeros_like(radius), radius.clone()
    for _ in range(_HALVINGS):
        middle = (low + high.clamp(max=2.0)) / 2
        changed = _ascend(logits, subject, middle)
        low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    return [value if math.isfinite(value) else None for value in high.tolist()]


def _ascend(logits: Any, subject: Subject, radius: Tensor) -> Tensor:
    """(b) whether one of the targeted starts changes the answer on the sphere of this radius or inside."""
    b, classes = len(subject.x), len(subject.network.head.bias)
    generator = torch.Generator().manual_seed(0)
    answers = subject.labels.repeat_interleave(_RESTARTS * (classes - 1))
    others = torch.arange(classes - 1).repeat(b * _RESTARTS)
    targets = others + (others >= answers)
    x, r = (t.repeat_interleave(_RESTARTS * (classes - 1), 0) for t in (subject.x, radius.reshape(-1, 1, 1)))
    delta = r * _unit(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    for step in range(_STEPS):
        at = (x + delta).requires_grad_()
        found = logits(at)
        gain = found.gather(1, targets[:, None]) - found.gather(1, answers[:, None])
        (gradient,) = torch.autograd.grad(gain.sum(), at)
        delta = delta + r * 0.25 * (1 - 0.9 * step / _STEPS) * _unit(gradient)
        delta = torch.where(_length(delta) > r, r * _unit(delta), delta)
    with torch.no_grad():
        changed: Tensor = logits(x + delta).argmax(-1) != answers
    return changed.reshape(b, -1).any(-1)


def table(measurements: Sequence[Measurement]) -> Table:
    """Medians over the digits."""
    first = measurements[0]
    made = Table(title=f"{first.setting.run}: medians over {len(first.rows)} digits, proved", title_justify="left")
    for column in ("layers", "accuracy %", "method", "radius", "attack", "ratio", "s / digit", "MiB"):
        made.add_column(column, justify="left" if column == "method" else "right")
    for one in measurements:
        medians = one.medians()
        for method in one.rows[0].radii:
            seconds = statistics.median(row.seconds[method] for row in one.rows)
            numbers = (f"{medians[method]:.4f}", f"{medians['attack']:.3f}", f"{medians[f'{method} / attack']:.3f}")
            cells = (str(one.setting.layers), f"{100 * one.accuracy:.1f}", method, *numbers, f"{seconds:.1f}")
            made.add_row(*cells, f"{one.rows[-1].memory:.0f}")
    return made


def _peak_memory() -> float:
    """MiB, of the process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _length(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    return length


def _unit(v: Tensor) -> Tensor:
    return v / _length(v).clamp(min=1e-300)
