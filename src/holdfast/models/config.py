"""What a certifiable model is made of: a small config, read from the [model] table of a TOML file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, final, get_args, get_type_hints

from holdfast.errors import InputError, UnknownNameError
from holdfast.layers.linear.module import MapKind
from holdfast.storage import Pathlike, read_toml

CONFIGS = Path(__file__).with_name("configs")

InputKind = Literal["image", "words"]
Stem = Literal["shifts", "convolutions", "weighted-convolutions"]
Positions = Literal["added", "scores"]
Projection = Literal["none", "hard", "smooth"]
FeedForward = Literal["sll", "maps"]
ActivationKind = Literal[
    "relu", "abs", "softplus", "smooth-abs", "tanh", "half-abs", "half-softplus", "half-smooth-abs", "maxmin"
]
Pool = Literal["mean", "flatten"]
HeadKind = Literal["unit-rows", "orthogonal", "orthogonal-torch", "sll", "free"]

# Keys that older files name, and the values at which they changed nothing.
_RETIRED = {"centring": False, "dense_layers": 0, "pool_merge": 1}


@final
@dataclass(frozen=True)
class ModelConfig:
    """A transformer with unmodified softmax attention.

    Attributes:
        input: images, or word ids.
        classes: number of logits.
        width: d of a token.
        depth: number of blocks.
        heads: of each attention.
        channels: of an image.
        side: of an image, in pixels.
        patch: side of the patches that become tokens.
        tokens: words of a sentence.
        vocabulary: number of word ids.
        word_norm: largest length of a word's embedding; 0 leaves it free.
        stem: "shifts" of channels and orthogonal maps, or "convolutions" with whole kernels of gain 1, which weigh all
            neighbours alike unless they are "weighted-convolutions".
        stem_layers: 3 × 3 convolutions between patches of 2 × 2 pixels and the tokens; 0 for plain patches.
        stem_width: their channels.
        maps: how linear maps keep their norm.
        attention_norm: limit of ‖W^V‖ and of ‖W^O‖.
        score_norm: limit of ‖W^Q‖ and ‖W^K‖; 0 leaves them free.
        positions: codes added to the tokens, or to the scores of every attention, starting as circular shifts.
        sharpness: of these shifts: the score of the one neighbour at the start.
        own_score: the score of a token with itself at the start, beside that of the neighbour.
        residual: whether attention is added to its input.
        projection: LayerProject before attention and feed-forward: none, hard or smooth.
        attention_radius: its radius before attention.
        feed_forward_radius: its radius before the feed-forward part; 0 stands for the root of the width.
        feed_forward: an SLL layer, or two limited maps around an activation.
        expansion: hidden width of the feed-forward part, in widths.
        activation: its activation; half- acts on half of the channels.
        activation_sharpness: s of softplus and smooth-abs.
        pool: the mean of the tokens, or all of them flattened.
        neck: width of a map before the head; 0 for none.
        neck_layers: feed-forward parts between neck and head, where one token is left: many parameters for little time.
        head: unit rows, or a map of limited norm.
    """

    input: InputKind
    classes: int
    width: int
    depth: int
    heads: int
    channels: int = 3
    side: int = 32
    patch: int = 4
    tokens: int = 32
    vocabulary: int = 0
    word_norm: float = 0.0
    stem: Stem = "shifts"
    stem_layers: int = 0
    stem_width: int = 192
    maps: MapKind = "orthogonal"
    attention_norm: float = 1.0
    score_norm: float = 0.0
    positions: Positions = "scores"
    sharpness: float = 6.0
    own_score: float = 0.0
    residual: bool = False
    projection: Projection = "none"
    attention_radius: float = 1.0
    feed_forward_radius: float = 0.0
    feed_forward: FeedForward = "maps"
    expansion: int = 1
    activation: ActivationKind = "half-abs"
    activation_sharpness: float = 4.0
    pool: Pool = "flatten"
    neck: int = 0
    neck_layers: int = 0
    head: HeadKind = "unit-rows"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, expected = getattr(self, field.name), hints[field.name]
            choices = get_args(expected)
            if choices:
                if value not in choices:
                    raise UnknownNameError(field.name, str(value), choices)
            elif expected is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not expected:
                raise InputError(f"{field.name} is {value!r}; expected {expected.__name__}")
            elif expected is not bool and value < 0:
                raise InputError(f"{field.name} is {value}; expected a number that is not negative")
        for name in ("classes", "width", "depth", "heads", "attention_norm", "expansion"):
            if getattr(self, name) == 0:
                raise InputError(f"{name} is 0; expected a positive number")
        if self.input == "words" and self.vocabulary < 2:
            raise InputError(f"vocabulary is {self.vocabulary}; a model of words needs the number of word ids")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the tokens."""
        return (1, self.tokens) if self.input == "words" else (self.side // self.patch, self.side // self.patch)


def config_from(table: Mapping[str, Any], source: str = "the config") -> ModelConfig:
    """A config from the keys of a table; an unknown key is an error that names the nearest known one."""
    table = {key: value for key, value in table.items() if (key, value) not in _RETIRED.items()}
    known = {field.name for field in fields(ModelConfig)}
    for key in table:
        if key not in known:
            raise UnknownNameError(f"key of [model] in {source}:", key, known)
    missing = {"input", "classes", "width", "depth", "heads"} - set(table)
    if missing:
        raise InputError(f"{source}: [model] lacks {', '.join(sorted(missing))}")
    return ModelConfig(**table)


def read_config(path: Pathlike) -> ModelConfig:
    """The [model] table of a TOML file; other tables, such as [train], are left to others."""
    return config_from(_tables(Path(path))["model"], str(path))


def config(name: str) -> ModelConfig:
    """A shipped config by name, or a member of a grid: its name, then key=value for each key of the grid.

    Example:
        >>> config("lofast-vit depth=2 heads=4 patch=8 attention_norm=0.5").depth
        2
    """
    configs = named_configs()
    if name not in configs:
        raise UnknownNameError("model", name, configs)
    return configs[name]


def named_configs() -> dict[str, ModelConfig]:
    """Every shipped config by name; a [grid] table gives one for each combination of its values."""
    configs = {}
    for path in sorted(CONFIGS.glob("*.toml")):
        base, grid = read_config(path), _tables(path).get("grid", {})
        if not grid:
            configs[path.stem] = base
            continue
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            suffix = " ".join(f"{key}={value:g}" for key, value in chosen.items())
            configs[f"{path.stem} {suffix}"] = replace(base, **chosen)
    return configs


def _tables(path: Path) -> dict[str, Any]:
    tables = read_toml(path, "a [model] table")
    if not isinstance(tables.get("model"), dict):
        raise InputError(f"{path} has no table [model]; found {', '.join(tables) or 'nothing'}")
    return tables
