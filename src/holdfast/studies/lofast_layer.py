"""The first attention of a trained network, and the bounds of Havens et al. 2024 there.

Our own ViT of their section 5.2 with 8 heads and 16 tokens, at test images of CIFAR-10. What enters the attention is
scaled to a Frobenius norm of 4, as in their section 5.1: 16 tokens of length 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.data import load
from holdfast.errors import HoldfastError, InputError
from holdfast.layers.attention.piece import Attention
from holdfast.layers.piece import Piece
from holdfast.models import Transformer
from holdfast.models.files import load_transformer
from holdfast.results import Guarantee
from holdfast.studies.processes import Tell
from holdfast.studies.study import Workplace
from holdfast.studies.trained import train_once, training_record
from holdfast.train.config import TrainingConfig, read_training

CONFIG = "lofast-vit depth=2 heads=8 patch=8 attention_norm=1"
TRIED = str(Path(__file__).with_name("quick-images.toml"))


# -- the layer


@final
@dataclass(frozen=True)
class LayerTraining:
    """The training of the network whose first attention is taken: its share of right answers, and its seconds."""

    clean: float
    content_off: float
    seconds: float


def trained_network(config: str, epochs: int, place: Workplace, tell: Tell) -> Path:
    """The folder of the network."""
    chosen = _training(config, epochs)
    folder = place.runs / f"lofast-layer-{Path(chosen.name).stem.replace(' ', '-')}-epochs{epochs}"
    return train_once(chosen, folder, place, tell)


def _training(config: str, epochs: int) -> TrainingConfig:
    chosen = read_training(config)
    return replace(chosen, train=replace(chosen.train, epochs=epochs, precision="float32"))


def layer_and_input(
    config: str, epochs: int, image: int, norm: float, place: Workplace
) -> tuple[AttentionLayer, Float[Tensor, "n d"]]:
    """The first attention of the trained network, and what enters it for an image, scaled to this Frobenius norm."""
    layer, model = _first_layer(config, epochs, place)
    data = load(read_training(config).data.name, None, place.data_dir)
    if image >= len(data):
        raise InputError(f"image {image} is asked for, and {data.name} has {len(data)}; expected fewer --images")
    return layer, _entering(model, data.inputs[image : image + 1], norm)[0]


@lru_cache(maxsize=1)
def _first_layer(config: str, epochs: int, place: Workplace) -> tuple[AttentionLayer, Transformer]:
    """The first attention of the trained network, and the network."""
    folder = trained_network(config, epochs, place, lambda share: None)
    model = load_transformer(folder / "model.safetensors")
    for stage in model.to_network().stages:
        if isinstance(stage, Attention):
            return stage.layer, model
    raise HoldfastError(f"{config!r} has no attention")


def _entering(model: Transformer, images: Tensor, norm: float) -> Tensor:
    """(b, n, d) what enters the first attention, scaled to this Frobenius norm."""
    x = model.encode(images)
    for stage in model.to_network().stages:
        if isinstance(stage, Attention):
            break
        if not isinstance(stage, Piece):
            raise HoldfastError("a residual stands before the first attention")
        x = stage.value(x)
    length: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x * (norm / length)


def layer_training(config: str, epochs: int, place: Workplace, tell: Tell) -> LayerTraining:
    """Trains the network, unless that is done already, and returns what is known about it."""
    stored = training_record(trained_network(config, epochs, place, tell))
    return LayerTraining(stored["test"]["clean"], stored["test"]["content_off"], stored["seconds"])


# -- the bounds


@final
@dataclass(frozen=True)
class LayerCurves:
    """One input at one norm, over eps. Lists are over eps; where heads are apart, over heads first.

    Attributes:
        image: its place in the test split.
        norm: ‖X‖_F.
        eps: the radii.
        delta_1: ζ(X) ε, equations (11) and (12), which is attained.
        delta_1_naive: (9).
        delta_21: with ‖M(X)‖, (20).
        delta_21_xi: with ξ(X), (21).
        delta_21_attack: what PGD attains of (16).
        delta_22: the first form of (22).
        delta_22_naive: the second form.
        delta_22_attack: what PGD attains.
        theorem: Theorem 1 with M.
        theorem_xi: Theorem 1 with ξ.
        naive: Theorem 1 with ξ, and (9) in the place of ζ.
        best: the smallest bound of ours.
        attack: what PGD attains of (5).
        guarantee: of the bounds.
    """

    image: int
    norm: float
    eps: list[float]
    delta_1: list[float]
    delta_1_naive: list[float]
    delta_21: list[list[float]]
    delta_21_xi: list[list[float]]
    delta_21_attack: list[list[float]]
    delta_22: list[list[float]]
    delta_22_naive: list[list[float]]
    delta_22_attack: list[list[float]]
    theorem: list[float]
    theorem_xi: list[float]
    naive: list[float]
    best: list[float]
    attack: list[float]
    guarantee: Guarantee


def curves(
    layer: AttentionLayer, x: Tensor, image: int, norm: float, eps: Sequence[float], guarantee: Guarantee
) -> LayerCurves:
    """Every bound and every attack of Figure 1 at one input (n, d)."""
    named = {name: api.bound(layer, x, eps, name, guarantee=guarantee) for name in ("lofast", "lofast-xi", "naive")}
    lofast, xi, naive = (named[name].terms for name in ("lofast", "lofast-xi", "naive"))
    attacks = {
        objective: api.attack(layer, x, eps, objective=objective, restarts=4, steps=40).lower
        for objective in ("output", "delta-21", "delta-22")
    }
    best = api.bound(layer, x, eps, "best", guarantee=guarantee)
    return LayerCurves(
        image=image,
        norm=norm,
        eps=list(eps),
        delta_1=lofast["delta_1"].tolist(),
        delta_1_naive=naive["delta_1"].tolist(),
        delta_21=lofast["delta_21"].tolist(),
        delta_21_xi=xi["delta_21"].tolist(),
        delta_21_attack=attacks["delta-21"].tolist(),
        delta_22=lofast["delta_22"].tolist(),
        delta_22_naive=lofast["delta_22_naive"].tolist(),
        delta_22_attack=attacks["delta-22"].tolist(),
        theorem=named["lofast"].value.tolist(),
        theorem_xi=named["lofast-xi"].value.tolist(),
        naive=named["naive"].value.tolist(),
        best=best.value.tolist(),
        attack=attacks["output"].tolist(),
        guarantee=guarantee,
    )
