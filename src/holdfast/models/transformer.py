"""Certifiable transformers with unmodified softmax attention, built from a config."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self, final

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn.utils import parametrize

from holdfast.errors import InputError
from holdfast.layers import (
    Chain,
    Convolution,
    Entrywise,
    Flattened,
    Layer,
    LayerProject,
    Linear,
    MaxMin,
    MeanPool,
    MergedTokens,
    Patches,
    PositionCodes,
    SelfAttention,
    Shifts,
    Sll,
    UnitRowHead,
    shift_scores,
)
from holdfast.models.config import ModelConfig, config_from
from holdfast.models.hub import OnHub
from holdfast.network.network import Head, Network

CONFIG_KEY = "holdfast_model"  # of a file's metadata


@final
class Transformer(OnHub):
    """A classifier of images or of word ids: embedding, blocks, pooling, linear head.

    Images become tokens by a 1-Lipschitz map; words become their embeddings, and that is where they are perturbed.

    Args:
        config: what it is made of.

    Example:
        >>> model = Transformer(config("digits-smooth"))
        >>> network = model.to_network()
        >>> network(model.encode(images))  # the logits, in float64
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.words: nn.Embedding | None = None
        if config.input == "words":
            self.words = nn.Embedding(config.vocabulary, config.width)
            nn.init.normal_(self.words.weight, std=1 / math.sqrt(config.width))
            if config.word_norm:
                parametrize.register_parametrization(self.words, "weight", LayerProject(config.word_norm))
        self.body = Chain(*_embedding(config), *(layer for _ in range(config.depth) for layer in _block(config)))
        self.pool = Chain(*_pool(config))
        features = config.neck or (config.width * math.prod(config.grid) if config.pool == "flatten" else config.width)
        self.head: nn.Linear = (
            UnitRowHead(features, config.classes)
            if config.head == "unit-rows"
            else Linear(features, config.classes, kind=config.head)
        )

    def forward(self, inputs: Tensor) -> Float[Tensor, "b classes"]:
        """Logits of images (b, channels, side, side) or of word ids (b, tokens)."""
        tokens = inputs if self.words is None else self.words(inputs)
        logits: Tensor = self.head(self.pool(self.body(tokens))).squeeze(1)
        return logits

    @property
    def arguments(self) -> dict[str, Any]:
        return {"config": self.config}

    @classmethod
    def built(cls, arguments: Mapping[str, Any], source: str) -> Self:
        given = arguments.get("config", arguments)
        return cls(given if isinstance(given, ModelConfig) else config_from(given, source))

    @property
    def notes(self) -> dict[str, str]:
        """The config, under the key by which files of models are known."""
        return {CONFIG_KEY: json.dumps(asdict(self.config))}

    @property
    def attentions(self) -> tuple[SelfAttention, ...]:
        """The attention of every block, in order."""
        return tuple(module for module in self.body.modules() if isinstance(module, SelfAttention))

    def encode(self, inputs: Tensor) -> Float64[Tensor, "b n d"]:
        """What enters `to_network()`: pixels (b, channels, side²), or the words' embeddings."""
        if self.words is None:
            return inputs.double().reshape(len(inputs), self.config.channels, -1)
        embeddings: Tensor = copy.deepcopy(self.words).double()(inputs)
        return embeddings.detach()

    @torch.no_grad()
    def to_network(self, name: str = "transformer") -> Network:
        """The same function for certificates: weights and constraints are evaluated in float64."""
        double = copy.deepcopy(self).double()
        head = Head(double.head.weight.detach(), double.head.bias.detach())
        return Network((*double.body.pieces(), *double.pool.pieces()), head, name)


def _embedding(c: ModelConfig) -> list[Layer]:
    if c.input == "words":
        layers: list[Layer] = []
    elif not c.stem_layers:
        patches = Patches(c.channels, c.side, c.patch)
        layers = [patches, _centred(Linear(patches.width, c.width, kind=c.maps))]
    else:
        layers = _stem(c)
    return [*layers, PositionCodes(math.prod(c.grid), c.width)] if c.positions == "added" else layers


@torch.no_grad()
def _centred(pixels: Linear) -> Linear:
    """A map that starts with 0 for a grey patch, so that activations with a kink at 0 see both sides."""
    pixels.bias.copy_(-0.5 * pixels.weight.sum(1))
    return pixels


def _stem(c: ModelConfig) -> list[Layer]:
    """Patches of 2 × 2 pixels, 3 × 3 convolutions of gain 1, and squares of their tokens merged."""
    if c.patch % 2:
        raise InputError(f"patch is {c.patch}; a stem of convolutions needs an even one")
    first = Patches(c.channels, c.side, 2)
    grid = (c.side // 2, c.side // 2)
    layers: list[Layer] = [first, _centred(Linear(first.width, c.stem_width, kind=c.maps))]
    for _ in range(c.stem_layers):
        if c.stem == "shifts":
            layers += [Shifts(grid, c.stem_width), Linear(c.stem_width, c.stem_width, kind=c.maps)]
        else:
            weighted = c.stem == "weighted-convolutions"
            layers.append(Convolution(grid, c.stem_width, c.stem_width, kind=c.maps, weighted=weighted))
        layers.append(_activation(c, c.stem_width))
    merged = MergedTokens(grid, c.stem_width, c.patch // 2)
    return [*layers, merged, Linear(merged.width * merged.factor**2, c.width, kind=c.maps)]


def _block(c: ModelConfig) -> list[Layer]:
    scores = shift_scores(c.grid, c.heads, c.sharpness, c.own_score) if c.positions == "scores" else None
    attention = SelfAttention(
        c.width,
        c.heads,
        norm=c.attention_norm,
        kind=c.maps,
        score_norm=c.score_norm or None,
        position_scores=scores,
        residual=float(c.residual),
    )
    feed_forward = _feed_forward(c, c.width)
    if c.projection == "none":
        return [attention, *feed_forward]
    smooth = c.projection == "smooth"
    second = LayerProject(c.feed_forward_radius or math.sqrt(c.width), smooth=smooth)
    return [LayerProject(c.attention_radius, smooth=smooth), attention, second, *feed_forward]


def _feed_forward(c: ModelConfig, width: int) -> list[Layer]:
    activation = _activation(c, c.expansion * width)
    if c.feed_forward == "maps":
        up, down = Linear(width, c.expansion * width, kind=c.maps), Linear(c.expansion * width, width, kind=c.maps)
        down.start_as_inverse(up)
        return [up, activation, down]
    if not isinstance(activation, Entrywise):
        raise InputError("activation is 'maxmin'; an SLL layer needs relu, softplus or tanh")
    return [Sll(width, activation)]


def _activation(c: ModelConfig, width: int) -> Layer:
    if c.activation == "maxmin":
        return MaxMin()
    kind = c.activation.removeprefix("half-")
    return Entrywise(width, kind, on_half=kind != c.activation, sharpness=c.activation_sharpness)  # type: ignore[arg-type]


def _pool(c: ModelConfig) -> list[Layer]:
    tokens = math.prod(c.grid)
    layers: list[Layer] = [MeanPool(tokens) if c.pool == "mean" else Flattened(tokens, c.width)]
    width = c.width if c.pool == "mean" else tokens * c.width
    if c.neck:
        layers.append(Linear(width, c.neck, kind=c.maps))
        width = c.neck
    for _ in range(c.neck_layers):
        layers += _feed_forward(c, width)
    return layers
