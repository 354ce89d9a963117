"""Figures 2 and 5 of Havens et al. 2024: how many inputs their networks keep certified, by their bound and by ours.

Every network of a grid is trained; the first inputs of its test split are certified by the paper's recursion and by
another composition, and attacked. A result is one JSON file, from which tables and figures are made.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

import holdfast
from holdfast.attacks.auto_pgd import AutoPgd
from holdfast.attacks.minimal import MinimalAttack
from holdfast.data import Dataset, load
from holdfast.errors import HoldfastError, InputError, SoundnessError, UnknownNameError
from holdfast.linalg.certified import GIB
from holdfast.models import ModelConfig, Transformer, named_configs
from holdfast.network.compositions import certify_inputs
from holdfast.network.network import Network
from holdfast.report.numbers import down, up
from holdfast.repro.processes import Tell
from holdfast.results import Guarantee
from holdfast.storage import write_text
from holdfast.train.config import TrainingConfig, agrees, read_training
from holdfast.train.loop import Progress, train

LOFAST = "lofast"

_DIGITS = 6  # that are kept of a radius
_STEPS = 200  # of a Lanczos iteration at most, which keeps its vectors
_ATTACKED_AT_ONCE = {"cpu": 50, "cuda": 100}
_MEMORY = {"cpu": GIB, "cuda": 8 * GIB}  # of one process, for the vectors of Lanczos
_TRAINING_SHARE, _REST = 0.7, 0.29  # of the time that a member takes, for the progress bar


@final
@dataclass(frozen=True)
class Study:
    """One of the two figures.

    Attributes:
        name: of its command and its files.
        config: the name whose grid it trains.
        title: of the figure.
        inputs: how many are certified unless another number is asked for.
        radii: of the table; at each of them there is an attack, too.
        unit: in which radii are written.
    """

    name: str
    config: str
    title: str
    inputs: int
    radii: tuple[float, ...]
    unit: float = 1.0

    def shown(self, radius: float) -> str:
        """A radius in words."""
        return f"{radius / self.unit:.3g}" + ("" if self.unit == 1 else f"/{1 / self.unit:g}")


FIGURE_2 = Study(
    "lofast-fig2",
    "lofast-vit",
    "CIFAR-10, vision transformers of Havens et al. 2024, Figure 2",
    200,
    tuple(k / 255 for k in (9, 18, 36)),
    1 / 255,
)
FIGURE_5 = Study(
    "lofast-fig5",
    "lofast-bert",
    "SST-2, small BERTs of Havens et al. 2024, Figure 5",
    200,
    (0.05, 0.1, 0.3),
)


@final
@dataclass(frozen=True)
class Member:
    """One network of a grid, and what is done with it.

    Attributes:
        values: its place in the grid, such as {"depth": 3.0}.
        config: of its training, seed included.
        inputs: how many are certified.
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
        """Of its files."""
        return f"{self.label.replace('=', '-').replace(' ', '-')}-seed-{self.config.train.seed}"


@final
@dataclass(frozen=True)
class Place:
    """Where a member is worked on.

    Attributes:
        results: folder of the JSON files.
        models: folder of the trained models and the checkpoints.
        data_dir: folder of the data.
        device: such as "cuda".
        command: the command line.
    """

    results: Path
    models: Path
    data_dir: Path | None
    device: str
    command: str


@final
@dataclass(frozen=True)
class Measured:
    """A member, measured: all that tables and figures need.

    Attributes:
        values: its place in the grid.
        seed: of the training.
        config: of the training.
        inputs: how many were to be certified; fewer are in `right` where the test split is smaller.
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
        right: for each certified input, the first of the test split: whether the answer is right.
        radius: certified, by composition; rounded down.
        attack: the length of the shortest perturbation found that changes the answer, rounded up; None if none was.
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
                if nearest is not None and radius > nearest:
                    raise SoundnessError(
                        f"{method} certifies {radius:.4g} for input {i} of {self.values} and an attack succeeds at "
                        f"{nearest:.4g}; please report"
                    )

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
    study: Study, methods: dict[str, Guarantee], *, inputs: int, seed: int, only: str = "", epochs: int | None = None
) -> list[Member]:
    """The networks of a study's grid.

    Args:
        study: whose grid.
        methods: the compositions, and the guarantee of each.
        inputs: how many are certified.
        seed: of the trainings.
        only: the part with these values, such as "depth=3,heads=4"; a key may stand there several times.
        epochs: instead of those in the config.
    """
    named = {name: _values(name) for name in named_configs() if name.split()[0] == study.config}
    grid = {key: {values[key] for values in named.values()} for key in next(iter(named.values()))}
    wanted = grid | _read_only(only, grid)
    found = []
    for name, values in named.items():
        if all(values[key] in wanted[key] for key in values):
            config = read_training(name).with_seed(seed)
            if epochs is not None:
                config = replace(config, train=replace(config.train, epochs=epochs))
            found.append(Member(values, config, inputs, methods, study.radii))
    return found


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
            known = ", ".join(f"{each:g}" for each in sorted(grid[key]))
            raise InputError(f"--only says {part!r}; the grid has {key} = {known}")
        wanted.setdefault(key, set()).add(number)
    return wanted


def finished(member: Member, folder: Path) -> Measured | None:
    """The result of an earlier run with the same settings, if there is one."""
    path = folder / f"{member.stem}.json"
    if not path.exists():
        return None
    found = read(path)
    same = (found.methods, found.inputs) == (member.methods, member.inputs)
    if not same or not agrees(found.config, member.config.to_dict()):
        raise InputError(f"{path} was made with other settings; move it away, or give another --out")
    return found


def read(path: Path) -> Measured:
    """A result."""
    try:
        return Measured(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise HoldfastError(f"{path} is not a result of this command ({error}); move it away or give --out") from None


def read_all(folder: Path) -> list[Measured]:
    """Every result in a folder, in the order of the grid."""
    found = [read(path) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: (*one.values.values(), one.seed))


def measure(work: tuple[Member, Place], tell: Tell) -> None:
    """Trains, certifies and attacks a member, and writes its result."""
    member, place = work
    training = train(
        member.config,
        place.models / member.stem,
        data_dir=place.data_dir,
        device=place.device,
        command=place.command,
        progress=lambda now: tell(_TRAINING_SHARE * _share(now)),
    )
    if not training.finished:
        raise KeyboardInterrupt
    data = load(member.config.data.name, None, place.data_dir)
    data = data.select(range(min(member.inputs, len(data))))
    found = _examine(training.model, data, member, place.device, tell)
    test = training.test
    measured = Measured(
        values=member.values,
        seed=member.config.train.seed,
        config=member.config.to_dict(),
        inputs=member.inputs,
        methods=member.methods,
        command=place.command,
        versions={
            "holdfast": holdfast.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        device=torch.cuda.get_device_name() if place.device.startswith("cuda") else place.device,
        seconds={"training": round(training.seconds, 1), **found.seconds},
        test_inputs=test["inputs"],
        clean=test["clean"],
        content_off=test["content_off"],
        total_variation=test["total_variation"],
        score_norm=test["score_norm"],
        right=found.right.tolist(),
        radius={name: [float(down(r, _DIGITS)) for r in radii] for name, radii in found.radius.items()},
        attack=[float(up(r, _DIGITS)) if math.isfinite(r) else None for r in found.attack.tolist()],
    )
    write_text(place.results / f"{member.stem}.json", json.dumps(asdict(measured), allow_nan=False) + "\n")


def _share(now: Progress) -> float:
    return now.step / now.steps


@final
@dataclass(frozen=True)
class _Examined:
    """What was found at a member's inputs."""

    right: Tensor
    radius: dict[str, list[float]]
    attack: Tensor
    seconds: dict[str, float]


def _examine(model: Transformer, data: Dataset, member: Member, device: str, tell: Tell) -> _Examined:
    network, labels = model.to_network(member.label), data.labels
    x = model.encode(data.inputs.to(next(model.parameters()).device)).cpu()
    radius: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    parts = len(member.methods) + 1
    step = _at_once(member.config.model, device)
    for number, (method, guarantee) in enumerate(member.methods.items()):
        began, found = time.perf_counter(), []
        for part in _parts(len(x), step):
            found += certify_inputs(network, x[part].to(device), method=method, guarantee=guarantee)
            tell(_TRAINING_SHARE + _REST * (number + part.stop / len(x)) / parts)
        radius[method] = [each.radius for each in found]
        seconds[method] = round(time.perf_counter() - began, 1)
    prediction = torch.tensor([each.prediction for each in found])
    began = time.perf_counter()
    chunks = []
    for part in _parts(len(x), _ATTACKED_AT_ONCE[torch.device(device).type]):
        chunks.append(_attack(network, x[part].to(device), prediction[part].to(device), member.radii).cpu())
        tell(_TRAINING_SHARE + _REST * (parts - 1 + part.stop / len(x)) / parts)
    seconds["attack"] = round(time.perf_counter() - began, 1)
    return _Examined(prediction == labels, radius, torch.cat(chunks), seconds)


def _attack(network: Network, x: Tensor, prediction: Tensor, radii: Sequence[float]) -> Tensor:
    """(b) how near another answer was found: by a search for the nearest, and by ascents at the radii."""

    def logits(at: Tensor) -> Tensor:
        found: Tensor = network(at)  # plain float64: balls are too wide at the end of six layers
        return found

    nearest = MinimalAttack(restarts=2, targets=3)(logits, x, prediction).radius
    for radius in sorted(radii, reverse=True):
        left = (nearest > radius).nonzero().flatten()
        if len(left):
            eps = torch.full_like(nearest[left], radius)
            changed = AutoPgd(steps=25)(logits, x[left], prediction[left], eps)
            nearest[left[changed]] = radius
    return nearest


def _at_once(model: ModelConfig, device: str) -> int:
    """How many inputs are certified together: Lanczos keeps two bases for every head of an attention."""
    entries = 2 * model.heads * _STEPS * math.prod(model.grid) * model.width
    return max(1, _MEMORY[torch.device(device).type] // (8 * entries))


def _parts(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
