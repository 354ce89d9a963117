"""What a training is: the tables [model], [data] and [train] of one TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final

from holdfast.data import SOURCES
from holdfast.errors import HoldfastError, InputError, UnknownNameError
from holdfast.models.config import CONFIGS, ModelConfig, config_from, named_configs
from holdfast.storage import Pathlike, read_toml
from holdfast.train.augment import AUGMENTATIONS
from holdfast.train.losses import CrossEntropy, Loss
from holdfast.train.slopes import GainsSlope, MarginSlope
from holdfast.train.tables import from_table, to_table

#: Seeds take part in 64 bits, beside the number of the step.
LARGEST_SEED = 2**30 - 1
_TABLES = ("model", "data", "train", "grid")


@final
@dataclass(frozen=True)
class DataConfig:
    """What a model is trained on.

    Attributes:
        name: a data set of `holdfast.data`, or a safetensors file with `inputs` and `labels`.
        validation: inputs held out of the training split to measure on; the same for every seed.
        augment: what is done to images, in order: flip, crop, shift, colour, rand.
    """

    name: str
    validation: int = 0
    augment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.augment:
            AUGMENTATIONS[name]


@final
@dataclass(frozen=True)
class TrainConfig:
    """How it is trained.

    Attributes:
        epochs: passes over the data; the last batch of each is left out where it is not full.
        batch: inputs of a step, over all processes.
        losses: the terms of the loss.
        lr: of AdamW, for all that is not orthogonal.
        weight_decay: of AdamW.
        manifold_lr: spectral length of a step of the orthogonal maps.
        momentum: of these.
        lookahead: steps between updates of the slow weights, from which the others continue (Zhang et al. 2019); or 0.
        lookahead_share: of the way to the present weights that the slow ones go.
        compact_every: epochs between the points at which orthogonal maps are rounded to half precision and their
            momentum starts afresh; checkpoints are written only there, at a quarter of the size. 0 for full
            checkpoints after any step.
        schedule: how both rates fall after the warm-up.
        warmup: share of the training in which they rise.
        precision: of the products; weights stay float32.
        compile: whether torch.compile runs the step, and in which mode; with "graph" nothing is compiled, and a single
            GPU records the step once and replays it.
        start: a saved model of the same shape to take the first weights from; empty to draw them from the seed.
        seed: for the first weights, the order of the inputs and their augmentation.
        evaluate_every: epochs between measurements.
        radius: at which certified accuracy is estimated.
        slope: what estimates it.
    """

    epochs: int
    batch: int = 256
    losses: tuple[Loss, ...] = (CrossEntropy(),)
    lr: float = 1e-3
    weight_decay: float = 0.0
    manifold_lr: float = 0.01
    momentum: float = 0.95
    lookahead: int = 0
    lookahead_share: float = 0.5
    compact_every: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: float = 0.05
    precision: Literal["float32", "bf16"] = "float32"
    compile: Literal["no", "graph", "default", "reduce-overhead", "max-autotune"] = "no"
    start: str = ""
    seed: int = 0
    evaluate_every: int = 1
    radius: float = 36 / 255
    slope: MarginSlope = field(default_factory=GainsSlope)

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "evaluate_every", "lr", "manifold_lr"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} of [train] is {getattr(self, name)}; expected a positive number")
        if not self.losses:
            raise InputError("losses of [train] is empty; expected at least one [[train.losses]]")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"seed of [train] is {self.seed}; expected 0 to {LARGEST_SEED}")
        if not 0 < self.lookahead_share <= 1:
            raise InputError(f"lookahead_share of [train] is {self.lookahead_share}; expected more than 0, at most 1")
        if not self.warmup < 1:
            raise InputError(f"warmup of [train] is {self.warmup}; expected a share of the training below 1")

    def rate(self, progress: float) -> float:
        """The factor of both learning rates when this share of the training is done."""
        if progress < self.warmup:
            return progress / self.warmup
        rest = (progress - self.warmup) / (1 - self.warmup)
        return {"constant": 1.0, "linear": 1 - rest, "cosine": (1 + math.cos(math.pi * rest)) / 2}[self.schedule]


@final
@dataclass(frozen=True)
class TrainingConfig:
    """A whole file.

    Attributes:
        name: of the config that comes with the package, or the path of its file.
        model: table [model].
        data: table [data].
        train: table [train].
    """

    name: str
    model: ModelConfig
    data: DataConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        classes = SOURCES[self.data.name].classes if self.data.name in SOURCES else self.model.classes
        if classes != self.model.classes:
            raise InputError(f"classes of [model] is {self.model.classes}; {self.data.name!r} has {classes}")
        if self.data.augment and self.model.input == "words":
            raise InputError(f"augment of [data] is {list(self.data.augment)}; expected none for a model of words")

    def with_seed(self, seed: int) -> TrainingConfig:
        """The same training from another seed."""
        return replace(self, train=replace(self.train, seed=seed))

    def with_start(self, model: Pathlike) -> TrainingConfig:
        """The same training, starting from a saved model."""
        return replace(self, train=replace(self.train, start=str(model)))

    def to_dict(self) -> dict[str, Any]:
        """The tables, ready for JSON."""
        return {"model": asdict(self.model), "data": to_table(self.data), "train": to_table(self.train)}


def read_training(source: Pathlike) -> TrainingConfig:
    """The training that a TOML file describes, or a config that comes with the package, by its name.

    Example:
        >>> read_training("digits-smooth").data.name
        'digits'
    """
    name = str(source)
    shipped = named_configs()
    if name not in shipped and not name.endswith(".toml"):
        raise UnknownNameError("config (neither a file .toml nor a name)", name, shipped)
    path = CONFIGS / f"{name.split()[0]}.toml" if name in shipped else Path(source)
    tables = _read(path)
    model = shipped[name] if name in shipped else config_from(tables["model"], name)
    data = from_table(DataConfig, tables["data"], f"[data] in {name}")
    return TrainingConfig(name, model, data, from_table(TrainConfig, tables["train"], f"[train] in {name}"))


def _read(path: Path) -> dict[str, Any]:
    tables = read_toml(path, "[model], [data] and [train]")
    for name in tables:
        if name not in _TABLES:
            raise UnknownNameError(f"table of {path}:", name, _TABLES)
    missing = [f"[{name}]" for name in ("model", "data", "train") if name not in tables]
    if missing:
        raise InputError(f"{path} has no {' and no '.join(missing)}; a training needs [model], [data] and [train]")
    return tables


def completed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Stored tables, with the defaults of keys that were not there yet; as they are where today's do not fit them."""
    try:
        model = asdict(config_from(tables["model"], "a checkpoint"))
        data = to_table(from_table(DataConfig, tables["data"], "[data]"))
        train = to_table(from_table(TrainConfig, tables["train"], "[train]"))
    except (HoldfastError, KeyError):
        return dict(tables)
    return {**tables, "model": model, "data": data, "train": train}


def agrees(stored: Any, asked: Any) -> bool:
    """Whether two configs say the same; what an older one does not name yet is no difference."""
    if isinstance(stored, dict):
        return all(key in asked and agrees(value, asked[key]) for key, value in stored.items())
    if isinstance(stored, list):
        return len(stored) == len(asked) and all(map(agrees, stored, asked))
    return bool(stored == asked)
