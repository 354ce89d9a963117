"""A network computes what its model computes: compared at the inputs at hand and at random points around them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from holdfast.errors import ConversionError, InputError
from holdfast.graph.entrance import Entrance, each_of
from holdfast.graph.export import ModelInputs, arguments
from holdfast.graph.onnx import OnnxModel
from holdfast.network.network import Network

#: How far logits may be apart, relative to the largest of them: far above rounding in float64, far below any mistake.
TOLERANCE = 1e-9
#: The same for the logits of a model that computes some steps in float32 whatever its dtype.
SINGLE = 1e-4
#: Radii of the random points, relative to the length of the input.
RADII = (1e-3, 1e-2, 0.1, 1.0)
_AROUND = 2  # inputs of the batch around which points are drawn


@final
@dataclass(frozen=True)
class Equality:
    """How well a network and its model agree.

    Attributes:
        inputs: at how many points they were compared: the inputs, and points around the first of them.
        difference: the largest difference of two logits, relative to the largest logit.
    """

    inputs: int
    difference: float


def float64_copy(model: nn.Module) -> nn.Module:
    """The model in float64: the weights keep their values."""
    return copy.deepcopy(model).double()


def float64_inputs(inputs: ModelInputs) -> ModelInputs:
    """The inputs, with float64 in the place of other floating-point numbers."""
    if not isinstance(inputs, Tensor | Mapping | tuple):
        raise InputError(
            f"inputs are a {type(inputs).__name__}; expected a batch of inputs as one tensor, or keyword arguments "
            "such as a tokenizer returns"
        )
    if isinstance(inputs, Tensor):
        return _double(inputs)
    if isinstance(inputs, Mapping):
        return {name: _double(value) for name, value in inputs.items()}
    return tuple(_double(value) for value in inputs)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def model_logits(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """What the model returns: logits (b, classes), or (b, n, classes) of a decoder."""
    args, kwargs = arguments(inputs)
    with torch.no_grad():
        output = model(*args, **kwargs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(output, tuple) and len(output) == 1:
        logits = output[0]
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
        raise ConversionError(
            f"{type(model).__name__} returned {found}; expected a classifier with logits (b, classes)"
        )
    return logits


def check_equal(
    network: Network,
    entrance: Entrance | None,
    model: nn.Module,
    inputs: ModelInputs,
    encode: Callable[[ModelInputs], Tensor],
    model_inputs: Callable[[ModelInputs], ModelInputs],
) -> Equality:
    """Compares a network with its model, in float64: on the batch, and around its first inputs.

    Args:
        network: what was made of the model.
        entrance: how the model was read; None where its class declares its network.
        model: in float64.
        inputs: a batch of inputs.
        encode: these as the network takes them.
        model_inputs: these as the model takes them, normalised where that is part of the network.

    Raises:
        ConversionError: they differ; the message says by how much.
    """
    x = encode(inputs)
    logits = model_logits(model, model_inputs(inputs))
    if isinstance(model, OnnxModel):
        model.check(model_inputs(inputs), logits)
    answer = logits if entrance is None else entrance.answer(logits)
    single = entrance is not None and entrance.program.casts(entrance.node)
    worst = compare(network, x, answer, SINGLE if single else TOLERANCE)
    count = len(x)
    for one in each_of(inputs)[:_AROUND]:
        for number, radius in enumerate(RADII):
            moved = around(encode(one), radius, number)
            real = _logits_at(entrance, model, one, moved, model_inputs)
            if real is not None:
                worst = max(worst, compare(network, moved, real, TOLERANCE))
                count += 1
    return Equality(count, worst)


def around(x: Float64[Tensor, "1 n d"], radius: float, seed: int) -> Float64[Tensor, "1 n d"]:
    """A point at a distance from x that is `radius` times its length."""
    step = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    length = torch.linalg.vector_norm(x).clamp(min=1.0)
    return x + step * (radius * length / torch.linalg.vector_norm(step))


def _logits_at(
    entrance: Entrance | None,
    model: nn.Module,
    one: ModelInputs,
    moved: Tensor,
    model_inputs: Callable[[ModelInputs], ModelInputs],
) -> Tensor | None:
    """The model's logits at a point of the network's input space; None where no input of the model leads there."""
    if isinstance(one, Tensor) and one.is_floating_point():
        given = model_inputs(moved.reshape(one.shape))
        if isinstance(model, OnnxModel):
            model.check(given, model_logits(model, given))
        if entrance is None or not entrance.program.casts(entrance.node):
            return model_logits(model, given)
        return entrance.logits(entrance.encode(given), given)
    if entrance is None or entrance.node.op == "placeholder":
        return None
    return entrance.logits(moved, one)


def compare(network: Network, x: Float64[Tensor, "b n d"], logits: Float64[Tensor, "b classes"], most: float) -> float:
    """The largest difference of the logits, relative to the largest of them.

    Raises:
        ConversionError: it is larger than `most`.
    """
    with torch.no_grad():
        found = network(x)
    if found.shape != logits.shape:
        raise ConversionError(
            f"{network.name}: the network returns logits {tuple(found.shape)}, the model {tuple(logits.shape)}"
        )
    apart, size = float((found - logits).abs().max()), float(logits.abs().max())
    if not apart <= most * max(size, 1e-300):
        raise ConversionError(
            f"{network.name}: the network is not the model: logits differ by up to {apart:.2g}, the largest is "
            f"{size:.2g}; expected a difference by rounding alone: the model does more than its graph or its "
            "to_network says"
        )
    return apart / size if size else 0.0
