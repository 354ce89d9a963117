"""A network computes what its model computes, on the inputs at hand: checked in float64 and in ball arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from holdfast.errors import ConversionError, InputError
from holdfast.linalg import Ball
from holdfast.network.network import Network

#: One tensor, or keyword arguments such as a tokenizer returns.
ModelInputs = Tensor | Mapping[str, Any]

#: How far logits may be apart, relative to the largest of them: far above rounding in float64, far below any mistake.
TOLERANCE = 1e-9


@final
@dataclass(frozen=True)
class Equality:
    """How well a network and its model agree.

    Attributes:
        inputs: on how many inputs they were compared.
        difference: the largest difference of two logits, relative to the largest logit.
        radius: the largest radius of the balls that hold the network's exact logits, likewise.
    """

    inputs: int
    difference: float
    radius: float


def float64_copy(model: nn.Module) -> nn.Module:
    """The model in float64: the weights keep their values.

    Attention of transformers is switched from "eager", where some softmaxes are in float32 whatever the model's dtype,
    to "sdpa".
    """
    double = copy.deepcopy(model).double()
    for module in double.modules():
        switch = getattr(module, "set_attn_implementation", None)
        if switch is not None:
            switch("sdpa")
    return double


def float64_inputs(inputs: ModelInputs) -> ModelInputs:
    """The inputs, with float64 in the place of other floating-point numbers."""
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if not isinstance(inputs, Mapping):
        raise InputError(
            f"inputs are a {type(inputs).__name__}; expected a batch of inputs as one tensor, or keyword arguments "
            "such as a tokenizer returns"
        )
    return {name: float64_inputs(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def model_logits(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """What the model returns: logits (b, classes)."""
    with torch.no_grad():
        output = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ConversionError(
            f"{type(model).__name__} returned {found}; expected a classifier with logits (b, classes)"
        )
    return logits


def compare(network: Network, x: Float64[Tensor, "b n d"], logits: Float64[Tensor, "b classes"]) -> Equality:
    """Compares a network at its inputs with the logits of the model in float64.

    The exact logits lie in the balls that the network returns in ball arithmetic. The model's own are rounded too: by
    the same operations in another order, for which the radius of the ball is a bound as well. So they must lie within
    twice the radius of the ball's midpoint. Radii grow fast with depth; so the logits must also lie within `TOLERANCE`
    of the midpoint, relative to the largest logit.

    Raises:
        ConversionError: they do not.
    """
    found = network(Ball.exact(x))
    if found.shape != logits.shape:
        raise ConversionError(
            f"{network.name}: the network returns logits {tuple(found.shape)}, the model {tuple(logits.shape)}"
        )
    apart, size = (found.mid - logits).abs(), float(logits.abs().max())
    radius = torch.where(found.rad.isfinite(), found.rad, torch.inf)
    most = float(apart.max())
    if not bool((apart <= 2 * radius).all()) or not most <= TOLERANCE * size:
        raise ConversionError(
            f"{network.name}: the network is not the model: logits differ by up to {most:.2g}, the largest is "
            f"{size:.2g}; expected a difference by rounding alone: some part of the model does more than its class says"
        )
    return Equality(len(logits), most / size if size else 0.0, float(radius.max()) / size if size else 0.0)
