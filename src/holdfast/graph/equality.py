"""A network computes what its model computes: compared at the inputs at hand and at random points around them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from holdfast.errors import ConversionError, HoldfastError, InputError
from holdfast.graph.entrance import Entrance, each_of
from holdfast.graph.export import logits_of, reason
from holdfast.graph.onnx import OnnxModel
from holdfast.graph.program import CPU, ModelInputs, arguments, placed
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
        inputs: the number of points at which they were compared: the inputs, and points around the first of them.
        difference: the largest difference of two logits, relative to the largest logit.
    """

    inputs: int
    difference: float


def float64_copy(model: nn.Module) -> nn.Module:
    """The model in float64 on the CPU: the weights keep their values."""
    computed = {  # weights that hooks compute before each run, which copy.deepcopy refuses
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(model, computed).double().cpu()
    except (RuntimeError, TypeError) as error:
        raise ConversionError(
            f"{type(model).__name__} cannot be copied ({str(error).split('.')[0]}); a hook or an attribute may keep "
            "tensors of an earlier run: remove it, or keep tensor.detach() there"
        ) from None


def float64_inputs(inputs: ModelInputs) -> ModelInputs:
    """The inputs on the CPU, with float64 in the place of other floating-point numbers."""
    if not isinstance(inputs, Tensor | Mapping | tuple):
        raise InputError(
            f"inputs are a {type(inputs).__name__}; expected a batch of inputs as one tensor, or keyword arguments "
            "such as a tokenizer returns"
        )
    doubled: ModelInputs = placed(_floats(inputs, lambda t: t.double()))
    return doubled


def _floats(inputs: ModelInputs, change: Callable[[Tensor], Tensor]) -> ModelInputs:
    """The inputs with each of their float tensors changed."""

    def changed(value: Any) -> Any:
        return change(value) if _is_float(value) else value

    if isinstance(inputs, Tensor):
        return change(inputs) if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {name: changed(value) for name, value in inputs.items()}
    return tuple(changed(value) for value in inputs)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def model_logits(model: nn.Module, inputs: ModelInputs) -> Tensor:
    """What the model returns: logits (b, classes), or (b, n, classes) of a decoder."""
    args, kwargs = arguments(inputs)
    try:
        output = model(*args, **kwargs)
    except HoldfastError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ConversionError(f"{type(model).__name__} cannot be run: {reason(error)}") from error
    return logits_of(output, type(model).__name__)


@torch.no_grad()
def check_equal(
    network: Network,
    entrance: Entrance | None,
    model: nn.Module,
    inputs: ModelInputs,
    encode: Callable[[ModelInputs], Tensor],
    model_inputs: Callable[[ModelInputs], ModelInputs],
    device: torch.device = CPU,
    *,
    around: bool,
) -> Equality:
    """Compares a network with its model, in float64: on the batch, and around its first inputs.

    Args:
        network: what the model was converted to.
        entrance: how the model was read; None if its class declares its network.
        model: in float64.
        inputs: a batch of inputs.
        encode: turns them into what the network takes.
        model_inputs: turns them into what the model takes, normalised if that is part of the network.
        device: where the model is; points around the inputs are compared only on the CPU.
        around: whether points around the inputs are compared, too.

    Raises:
        ConversionError: they differ; the message says by how much.
    """
    x = encode(inputs)
    logits = model_logits(model, placed(model_inputs(inputs), device)).cpu()
    if isinstance(model, OnnxModel):
        model.check(model_inputs(inputs), logits)
    answer = logits if entrance is None else entrance.answer(logits)
    most = SINGLE if _casts(entrance) else TOLERANCE
    worst = compare(network, x.to(device), answer, most)
    count = len(x)
    for one in each_of(inputs)[:_AROUND] if around else ():
        for number, radius in enumerate(RADII):
            moved = _beside(encode(one), radius, number)
            real = _logits_at(entrance, model, one, moved, model_inputs)
            if real is not None:
                worst = max(worst, compare(network, moved, real, TOLERANCE))
                count += 1
    if around:
        pair = _answer_in_company(entrance, model, model_inputs(each_of(inputs)[0]))
        if pair is not None:
            compare(network, x[:1], pair, most, "the model with another input in the batch")
    return Equality(count, worst)


def _casts(entrance: Entrance | None) -> bool:
    """Whether the model computes some steps in float32 though its weights are float64."""
    return entrance is not None and entrance.program.casts(entrance.node)


def _answer_in_company(entrance: Entrance | None, model: nn.Module, one: ModelInputs) -> Tensor | None:
    """The model's answer to an input in a batch with another; None if it takes one at a time."""
    try:
        logits = model_logits(model, _in_company(one))[:1]
    except ConversionError:
        return None
    return logits if entrance is None else entrance.answer(logits)


def check_as_it_runs(
    network: Network,
    entrance: Entrance | None,
    model: nn.Module,
    inputs: ModelInputs,
    encode: Callable[[ModelInputs], Tensor],
    model_inputs: Callable[[ModelInputs], ModelInputs],
) -> None:
    """Compares a network with the model itself: in its own dtype, where it is, with gradients as for an attack."""
    weights = (p for p in model.parameters() if p.is_floating_point())
    dtype, device = next(((p.dtype, p.device) for p in weights), (torch.float64, CPU))
    one = each_of(inputs)[0]
    with torch.enable_grad():
        given = placed(model_inputs(one), device)
        taken = _floats(given, lambda t: t.to(dtype).detach().requires_grad_())
        logits = model_logits(model, taken).detach().cpu().double()
    answer = logits if entrance is None else entrance.answer(logits)
    what = f"the model in {dtype} with gradients"
    rounding = math.sqrt(torch.finfo(dtype).eps)
    compare(network, encode(one), answer, max(rounding, SINGLE) if _casts(entrance) else rounding, what)


def _in_company(one: ModelInputs) -> ModelInputs:
    """The input and another one beside it."""

    def beside(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        other = value.flip(-1)
        return torch.cat([value, 2 * other if value.is_floating_point() else other])

    if isinstance(one, Tensor):
        pair: Tensor = beside(one)
        return pair
    if isinstance(one, Mapping):
        return {name: beside(value) for name, value in one.items()}
    return tuple(beside(value) for value in one)


def _beside(x: Float64[Tensor, "1 n d"], radius: float, seed: int) -> Float64[Tensor, "1 n d"]:
    """A point at a distance from x that is `radius` times its length."""
    step = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    length = torch.linalg.vector_norm(x).clamp(min=1.0)
    moved: Tensor = x + step * (radius * length / torch.linalg.vector_norm(step))
    return moved


def _logits_at(
    entrance: Entrance | None,
    model: nn.Module,
    one: ModelInputs,
    moved: Tensor,
    model_inputs: Callable[[ModelInputs], ModelInputs],
) -> Tensor | None:
    """The model's logits at a point of the network's input space; None where no input of the model leads there."""
    if entrance is None and not any(_is_float(value) for value in torch.utils._pytree.tree_leaves(one)):
        return None
    if entrance is None or entrance.node.op == "placeholder":
        given = model_inputs(_floats(one, lambda t: moved.reshape(t.shape)))
        if isinstance(model, OnnxModel):
            model.check(given, model_logits(model, given))
        if entrance is None or not _casts(entrance):
            return model_logits(model, given)
        return entrance.logits(entrance.encode(given), given)
    return entrance.logits(moved, one)


def compare(
    network: Network, x: Float64[Tensor, "b n d"], logits: Float64[Tensor, "b classes"], most: float,
    what: str = "the model",
) -> float:  # fmt: skip
    """The largest difference of the logits, relative to the largest of them.

    Raises:
        ConversionError: it is larger than `most`; the message says that the network is not `what`.
    """
    with torch.no_grad():
        returned = network(x).to(logits.device)
    if returned.shape != logits.shape:
        raise ConversionError(
            f"{network.name}: the network returns logits {tuple(returned.shape)}, the model {tuple(logits.shape)}"
        )
    if not bool((returned.isfinite() & logits.isfinite()).all()):
        raise ConversionError(
            f"{network.name}: logits of the network or of {what} are not finite, at the inputs or near them; expected "
            "finite weights, and inputs and weights whose products and squares do not overflow"
        )
    apart, size = float((returned - logits).abs().max()), float(logits.abs().max())
    if not apart <= most * max(size, 1e-300):
        raise ConversionError(
            f"{network.name}: the network is not {what}: logits differ by up to {apart:.2g}, the largest is "
            f"{size:.2g}; expected a difference by rounding alone: the model does more than its graph or its "
            "to_network says"
        )
    return apart / size if size else 0.0
