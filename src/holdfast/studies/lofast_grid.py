"""Figures 2 and 5 of Havens et al. 2024: how many inputs their networks keep certified, by their bound and by ours.

Every network of a grid is trained; of the first inputs of its test split those that it answers right are certified by
the paper's recursion and by another composition, and attacked.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks.auto_pgd import AutoPgd
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs
from holdfast.data import Dataset, load
from holdfast.errors import InputError, UnknownNameError
from holdfast.linalg.certified import GIB
from holdfast.models import ModelConfig, Transformer, named_configs
from holdfast.network.network import Network
from holdfast.report.numbers import down, up
from holdfast.results import Guarantee
from holdfast.studies.attacked import check_attacked
from holdfast.studies.processes import Tell
from holdfast.studies.study import Workplace
from holdfast.train.config import TrainingConfig, read_training
from holdfast.train.loop import train
from holdfast.train.outcome import TrainingProgress
from holdfast.version import __version__

LOFAST = "lofast"

_DIGITS = 6  # that are kept of a radius
_STEPS = 64  # of the Lanczos iteration of every head, about, which keeps its vectors
_MEMORY = {"cpu": GIB, "cuda": 10 * GIB}  # of one process, for these vectors; attacks take less
_ATTACK = "attack"  # what its seconds are called
_TRAINING_SHARE, _REST = 0.7, 0.29  # of the time that a member takes, for the progress bar


@final
@dataclass(frozen=True)
class GridNetwork:
    """One network of a grid, and what is done with it.

    Attributes:
        values: its place in the grid, such as {"depth": 3.0}.
        config: of its training, seed included.
        inputs: how many are examined.
        methods: the compositions, and the guarantee of each.
        radii: at which it is attacked.
    """

    values: dict[str, float]
    config: TrainingConfig
    inputs: int
    methods: dict[str, Guarantee]
    radii: tuple[float, ...]

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value:g}" for key, value in self.values.items())

    @property
    def stem(self) -> str:
        """The stem of the network's files."""
        return f"{self.label.replace('=', '-').replace(' ', '-')}-seed-{self.config.train.seed}"


@final
@dataclass(frozen=True)
class CertifiedNetwork:
    """What was measured of one network of a grid: all that tables and figures need.

    Attributes:
        values: its place in the grid.
        seed: of the training.
        config: of the training.
        inputs: how many were to be examined; fewer are in `right` if the test split is smaller.
        methods: the compositions, and the guarantee of each.
        command: the command line.
        versions: of what computed it.
        device: where.
        seconds: of the training, of every composition, and of the attacks.
        test_inputs: of the whole test split, on which the accuracies are.
        clean: share of right answers.
        content_off: the same with content scores replaced by their mean.
        total_variation: of the probabilities from their mean, by layer.
        score_norm: ‖W_QK‖ by layer.
        right: for each of the first inputs of the test split: whether the answer is right.
        radius: certified, by composition; rounded down; 0 where the answer is wrong, which nobody certifies.
        attack: the length of the shortest perturbation found that changes a right answer, rounded up; None if none was.
    """

    values: dict[str, float]
    seed: int
    config: dict[str, Any]
    inputs: int
    methods: dict[str, Guarantee]
    command: str
    versions: dict[str, str]
    device: str
    seconds: dict[str, float]
    test_inputs: int
    clean: float
    content_off: float
    total_variation: list[float]
    score_norm: list[float]
    right: list[bool]
    radius: dict[str, list[float]]
    attack: list[float | None]

    def __post_init__(self) -> None:
        for method, radii in self.radius.items():
            for i, (radius, nearest) in enumerate(zip(radii, self.attack, strict=True)):
                check_attacked(method, radius, f"input {i} of {self.values}", nearest)

    @property
    def ours(self) -> str:
        """The composition beside the paper's."""
        return next(method for method in self.methods if method != LOFAST)

    def certified(self, method: str, radius: float) -> float:
        """Share of the certified inputs that are right and stay so within the radius."""
        kept = [r and reach >= radius for r, reach in zip(self.right, self.radius[method], strict=True)]
        return sum(kept) / len(kept)

    def attacked(self, radius: float) -> float:
        """Share of them that are right and for which no attack succeeded within the radius."""
        kept = [r and (near is None or near > radius) for r, near in zip(self.right, self.attack, strict=True)]
        return sum(kept) / len(kept)

    def mean_radius(self, method: str) -> float:
        """Mean certified radius; 0 where the answer is wrong."""
        return sum(r * reach for r, reach in zip(self.right, self.radius[method], strict=True)) / len(self.right)


def members(
    config: str,
    radii: tuple[float, ...],
    methods: dict[str, Guarantee],
    *,
    inputs: int,
    seed: int,
    only: str = "",
    epochs: int | None = None,
) -> list[GridNetwork]:
    """The networks of a config's grid, those that take longest first.

    Args:
        config: the name whose grid it is, or a TOML file with one network.
        radii: at which they are attacked.
        methods: the compositions, and the guarantee of each.
        inputs: how many are certified.
        seed: of the trainings.
        only: the part with these values, such as "depth=3,heads=4"; a key may stand there several times.
        epochs: instead of those in the config.
    """
    named = {name: _values(name) for name in named_configs() if name.split()[0] == config}
    if config.endswith(".toml"):
        model = read_training(config).model
        named = {config: {key: float(getattr(model, key)) for key in ("depth", "heads", "attention_norm")}}
    if not named:
        raise UnknownNameError("grid", config, {name.split()[0] for name in named_configs() if " " in name})
    grid = {key: {values[key] for values in named.values()} for key in next(iter(named.values()))}
    wanted = grid | _read_only(only, grid)
    chosen = []
    for name, values in named.items():
        if all(values[key] in wanted[key] for key in values):
            training = read_training(name).with_seed(seed)
            if epochs is not None:
                training = replace(training, train=replace(training.train, epochs=epochs))
            chosen.append(GridNetwork(values, training, inputs, methods, radii))
    return sorted(chosen, key=_effort, reverse=True)


def _effort(member: GridNetwork) -> int:
    """Grows with the time that a member takes: with the longest first, processes end together."""
    return member.config.model.depth * math.prod(member.config.model.grid)


def _values(name: str) -> dict[str, float]:
    """The place in the grid that a config's name gives: "lofast-bert depth=3 heads=4"."""
    pairs = (pair.split("=") for pair in name.split()[1:])
    return {key: float(value) for key, value in pairs}


def _read_only(text: str, grid: dict[str, set[float]]) -> dict[str, set[float]]:
    wanted: dict[str, set[float]] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in grid:
            raise UnknownNameError("key of --only:", key, grid)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if number not in grid[key]:
            known = ", ".join(f"{value:g}" for value in sorted(grid[key]))
            raise InputError(f"--only says {part!r}; the grid has {key} = {known}")
        wanted.setdefault(key, set()).add(number)
    return wanted


def measure(member: GridNetwork, folder: Path, place: Workplace, tell: Tell) -> CertifiedNetwork:
    """Trains, certifies and attacks a member."""
    training = train(
        member.config,
        folder / member.stem,
        data_dir=place.data_dir,
        device=place.device,
        command=place.command,
        progress=lambda now: tell(_TRAINING_SHARE * _share(now)),
    )
    if not training.finished:
        raise KeyboardInterrupt
    data = load(member.config.data.name, None, place.data_dir)
    data = data.select(range(min(member.inputs, len(data))))
    examined = _examine(training.model, data, member, place.device, tell)
    test = training.test
    return CertifiedNetwork(
        values=member.values,
        seed=member.config.train.seed,
        config=member.config.to_dict(),
        inputs=member.inputs,
        methods=member.methods,
        command=place.command,
        versions={
            "holdfast": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        device=torch.cuda.get_device_name() if place.device.startswith("cuda") else place.device,
        seconds={"training": round(training.seconds, 1), **examined.seconds},
        test_inputs=test["inputs"],
        clean=test["clean"],
        content_off=test["content_off"],
        total_variation=test["total_variation"],
        score_norm=test["score_norm"],
        right=examined.right.tolist(),
        radius={name: [float(down(r, _DIGITS)) for r in radii] for name, radii in examined.radius.items()},
        attack=[float(up(r, _DIGITS)) if math.isfinite(r) else None for r in examined.attack.tolist()],
    )


def _share(now: TrainingProgress) -> float:
    return now.step / now.steps


@final
@dataclass(frozen=True)
class _Examined:
    """What was found at a member's inputs."""

    right: Tensor
    radius: dict[str, list[float]]
    attack: Tensor
    seconds: dict[str, float]


def _examine(model: Transformer, data: Dataset, member: GridNetwork, device: str, tell: Tell) -> _Examined:
    network, step = model.to_network(member.label), _at_once(member.config.model, device)
    x = model.encode(data.inputs.to(next(model.parameters()).device)).cpu()
    prediction = torch.cat([network(x[part].to(device)).argmax(1).cpu() for part in _parts(len(x), step)])
    right = prediction == data.labels
    x, prediction = x[right], prediction[right]

    def certified(part: slice, method: str, guarantee: Guarantee) -> list[float]:
        inputs = certify_inputs(network, x[part].to(device), method=method, guarantee=guarantee)
        return [one.radius for one in inputs]

    def attacked(part: slice) -> list[float]:
        return _attack(network, x[part].to(device), prediction[part].to(device), member.radii).tolist()

    works: dict[str, Callable[[slice], list[float]]] = {
        method: partial(certified, method=method, guarantee=guarantee) for method, guarantee in member.methods.items()
    }
    reached: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for number, (name, work) in enumerate({**works, _ATTACK: attacked}.items()):
        began = time.perf_counter()
        reached[name] = torch.full((len(right),), math.inf if name == _ATTACK else 0.0, dtype=torch.float64)
        reached[name][right] = torch.tensor(_in_parts(work, len(x), step), dtype=torch.float64)
        seconds[name] = round(time.perf_counter() - began, 1)
        tell(_TRAINING_SHARE + _REST * (number + 1) / (len(works) + 1))
    attack = reached.pop(_ATTACK)
    return _Examined(right, {name: radii.tolist() for name, radii in reached.items()}, attack, seconds)


def _in_parts(work: Callable[[slice], list[float]], total: int, step: int) -> list[float]:
    """What the work gives for all inputs, in parts that are halved where a GPU has no memory for them."""
    done: list[float] = []
    while len(done) < total:
        try:
            done += work(slice(len(done), min(len(done) + step, total)))
        except torch.OutOfMemoryError:
            if step == 1:
                raise
            step //= 2
            torch.cuda.empty_cache()
    return done


def _attack(network: Network, x: Tensor, prediction: Tensor, radii: Sequence[float]) -> Tensor:
    """(b) the distance of the nearest point found with another answer: by a minimal attack, and by ascents at radii."""

    def logits(at: Tensor) -> Tensor:
        values: Tensor = network(at)  # plain float64: balls are too wide at the end of six layers
        return values

    nearest = MinimalAttack(restarts=2, targets=3)(logits, x, prediction).radius
    for radius in sorted(radii, reverse=True):
        left = (nearest > radius).nonzero().flatten()
        if len(left):
            eps = torch.full_like(nearest[left], radius)
            changed = AutoPgd(steps=25)(logits, x[left], prediction[left], eps)
            nearest[left[changed]] = radius
    return nearest


def _at_once(model: ModelConfig, device: str) -> int:
    """How many inputs are taken together: Lanczos keeps two bases for every head of an attention."""
    entries = 2 * model.heads * _STEPS * math.prod(model.grid) * model.width
    return max(1, _MEMORY[torch.device(device).type] // (8 * entries))


def _parts(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
