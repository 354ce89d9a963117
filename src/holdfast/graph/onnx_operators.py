"""The ONNX operators that are executed in torch. A new operator is one entry of the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.graph.onnx_call import Call, refuse

#: Limits that stand for none: exporters write the largest float32 where a Clip has one side only.
_UNLIMITED = 3.4e38

Operator = Callable[[Call], Any]

OPERATORS: dict[str, Operator] = {}


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def add(execute: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, execute))
        return execute

    return add


# -- entry by entry

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Relu": torch.relu, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Erf": torch.erf, "Abs": torch.abs,
    "Neg": torch.neg, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Not": torch.logical_not,
    "Identity": lambda x: x,
}  # fmt: skip

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "MatMul": torch.matmul, "Equal": torch.eq,
    "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or,
}  # fmt: skip


@_operator(*_UNARY)
def _unary(call: Call) -> Tensor:
    return _UNARY[call.operator](call.tensor(0))


@_operator(*_BINARY)
def _binary(call: Call) -> Tensor:
    return _BINARY[call.operator](call.tensor(0), call.tensor(1))


@_operator("Div")
def _div(call: Call) -> Tensor:
    a, b = call.tensor(0), call.tensor(1)
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@_operator("Pow")
def _pow(call: Call) -> Tensor:
    exponent = call.numbers(1)
    if len(exponent) != 1:
        refuse(f"has {len(exponent)} exponents; expected one")
    return call.tensor(0) ** float(exponent[0])


@_operator("Sum")
def _sum(call: Call) -> Tensor:
    total = call.tensor(0)
    for place in range(1, len(call.given)):
        total = total + call.tensor(place)
    return total


@_operator("Gelu")
def _gelu(call: Call) -> Tensor:
    return functional.gelu(call.tensor(0), approximate=call.get("approximate", "none"))


@_operator("LeakyRelu")
def _leaky_relu(call: Call) -> Tensor:
    return functional.leaky_relu(call.tensor(0), call.get("alpha", 0.01))


@_operator("Clip")
def _clip(call: Call) -> Tensor:
    low, high = (call.option(name, place, None) for name, place in (("min", 1), ("max", 2)))
    low, high = (float(limit[0]) if isinstance(limit, list) else limit for limit in (low, high))
    low = None if low is None or low <= -_UNLIMITED else low
    high = None if high is None or high >= _UNLIMITED else high
    x = call.tensor(0)
    return x if low is None and high is None else torch.clamp(x, low, high)


@_operator("Cast")
def _cast(call: Call) -> Tensor:
    """Floats of all sizes are the model's float type: a certificate is about exact numbers."""
    x, kind = call.tensor(0), int(call.get("to", 1))
    if kind in _FLOATS:
        return x if x.is_floating_point() else call.constant(np.ones((), np.float32)) * x
    if x.is_floating_point():
        refuse("turns floats into whole numbers or truth values")
    return x.bool() if kind == _BOOL else x.long()


_FLOATS, _BOOL = {1, 10, 11, 16}, 9  # TensorProto's numbers of its types


@_operator("Dropout")
def _dropout(call: Call) -> Tensor:
    if call.has(2) and bool(call.numbers(2)[0]):
        refuse("drops entries at random; export the model for inference")
    return call.tensor(0)


@_operator("Where")
def _where(call: Call) -> Tensor:
    return torch.where(call.tensor(0), call.tensor(1), call.tensor(2))


# -- what moves entries about


@_operator("Transpose")
def _transpose(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.permute(call.get("perm", list(range(x.ndim))[::-1]))


@_operator("Reshape")
def _reshape(call: Call) -> Tensor:
    x, shape = call.tensor(0), call.option("shape", 1, None)
    if not call.get("allowzero", 0):
        shape = [x.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return x.reshape(shape)


@_operator("Flatten")
def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), int(call.get("axis", 1))
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@_operator("Squeeze")
def _squeeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.option("axes", 1, None)
    gone = [i for i, size in enumerate(x.shape) if size == 1] if axes is None else [a % x.ndim for a in axes]
    if any(x.shape[i] != 1 for i in gone):
        refuse(f"removes dimensions {gone} of a tensor of shape {tuple(x.shape)}; expected dimensions of size 1")
    return x.reshape([size for i, size in enumerate(x.shape) if i not in gone])


@_operator("Unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.option("axes", 1, None)
    ndim = x.ndim + len(axes)
    new, sizes = {a % ndim for a in axes}, iter(x.shape)
    return x.reshape([1 if i in new else next(sizes) for i in range(ndim)])


@_operator("Concat")
def _concat(call: Call) -> Tensor:
    return torch.cat([call.tensor(i) for i in range(len(call.given))], int(call.attributes["axis"]))


@_operator("Slice")
def _slice(call: Call) -> Tensor:
    x = call.tensor(0)
    starts, ends = call.option("starts", 1, None), call.option("ends", 2, None)
    axes = call.option("axes", 3, list(range(len(starts))))
    steps = call.numbers(4) if call.has(4) else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        places = list(range(*slice(start, end if end > -size - 1 or step > 0 else None, step).indices(size)))
        if step == 1:
            x = x.narrow(axis, places[0] if places else 0, len(places))
        else:
            x = x.index_select(axis, call.constant(np.array(places, np.int64)))
    return x


@_operator("Split")
def _split(call: Call) -> tuple[Tensor, ...]:
    x, axis = call.tensor(0), int(call.get("axis", 0))
    sizes = call.option("split", 1, None)
    if sizes is None:
        size = -(-x.shape[axis] // int(call.get("num_outputs", call.outputs)))
        return torch.split(x, size, axis)
    return torch.split(x, sizes, axis)


@_operator("Gather")
def _gather(call: Call) -> Tensor:
    x, axis = call.tensor(0), int(call.get("axis", 0))
    axis, index = axis % x.ndim, call.given[1]
    if isinstance(index, np.ndarray):
        places = np.where(index < 0, index + x.shape[axis], index).astype(np.int64)
        if places.ndim == 0:
            return x.select(axis, int(places))
        chosen = x.index_select(axis, call.constant(places.reshape(-1)))
        return chosen.reshape(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :])
    ids = call.tensor(1)
    if x.ndim != 2 or axis != 0 or ids.is_floating_point():
        refuse("takes entries at places that depend on the model's input; expected the rows of words in an embedding")
    return functional.embedding(ids.long(), x)


@_operator("Expand")
def _expand(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(call.numbers(1))))


@_operator("Tile")
def _tile(call: Call) -> Tensor:
    return call.tensor(0).repeat(call.numbers(1))


@_operator("Pad")
def _pad(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.get("mode", "constant")
    if mode != "constant":
        refuse(f"pads by {mode!r}; expected 'constant'")
    pads = call.option("pads", 1, None)
    value = call.numbers(2)[0] if call.has(2) else call.get("value", 0.0)
    axes = [a % x.ndim for a in call.numbers(3)] if call.has(3) else list(range(x.ndim))
    sides = {axis: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    return functional.pad(
        x, [side for axis in reversed(range(x.ndim)) for side in sides.get(axis, (0, 0))], value=float(value)
    )


# -- sums and maps


@_operator("ReduceMean", "ReduceSum", "ReduceMax")
def _reduce(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.option("axes", 1, None)
    if not axes and call.get("noop_with_empty_axes", 0):
        return x
    dims, keep = list(axes or range(x.ndim)), bool(call.get("keepdims", 1))
    if call.operator == "ReduceMax":
        return x.amax(dims, keep)
    return x.mean(dims, keep) if call.operator == "ReduceMean" else x.sum(dims, keep)


@_operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    dims = list(range(2, x.ndim))
    return x.mean(dims, True) if call.operator == "GlobalAveragePool" else x.amax(dims, True)


@_operator("Gemm")
def _gemm(call: Call) -> Tensor:
    a, b = (
        call.tensor(i).transpose(-1, -2) if call.get(name, 0) else call.tensor(i)
        for i, name in ((0, "transA"), (1, "transB"))
    )
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    product = a @ b if alpha == 1 else alpha * (a @ b)
    c = call.optional(2)
    return product if c is None else product + (c if beta == 1 else beta * c)


@_operator("Einsum")
def _einsum(call: Call) -> Tensor:
    return torch.einsum(call.attributes["equation"].replace(" ", ""), *(call.tensor(i) for i in range(len(call.given))))


@_operator("Conv")
def _conv(call: Call) -> Tensor:
    x, w = call.tensor(0), call.tensor(1)
    dims = x.ndim - 2
    if dims not in (1, 2):
        refuse(f"convolves over {dims} dimensions; expected one or two")
    strides, dilations = (list(call.get(name, [1] * dims)) for name in ("strides", "dilations"))
    before, after = _sides(call, x, list(w.shape[2:]), strides, dilations)
    if before != after:
        x, before = (
            functional.pad(x, [side for i in reversed(range(dims)) for side in (before[i], after[i])]),
            [0] * dims,
        )
    convolve = functional.conv1d if dims == 1 else functional.conv2d
    return convolve(x, w, call.optional(2), strides, before, dilations, int(call.get("group", 1)))


@_operator("AveragePool", "MaxPool")
def _pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), list(call.attributes["kernel_shape"])
    dims, largest = x.ndim - 2, call.operator == "MaxPool"
    if dims not in (1, 2) or call.outputs > 1:
        refuse("pools over other than one or two dimensions, or tells where the largest entries are")
    strides, dilations = (list(call.get(name, [1] * dims)) for name in ("strides", "dilations"))
    if max(dilations) > 1 and call.get("auto_pad", "NOTSET").startswith("SAME"):
        refuse("pads windows with gaps by auto_pad, which is not the same everywhere; give pads")
    before, after = _sides(call, x, kernel, strides, dilations)
    ceil = bool(call.get("ceil_mode", 0))
    if largest:
        if before != after or any(2 * p > k for p, k in zip(before, kernel, strict=True)):
            sides = [side for i in reversed(range(dims)) for side in (before[i], after[i])]
            x, before = functional.pad(x, sides, value=-math.inf), [0] * dims
        pool = functional.max_pool1d if dims == 1 else functional.max_pool2d
        return pool(x, kernel, strides, before, dilations, ceil)
    if before != after or any(d != 1 for d in dilations):
        refuse("averages windows with gaps, or padded on one side")
    counted = bool(call.get("count_include_pad", 0))
    average = functional.avg_pool1d if dims == 1 else functional.avg_pool2d
    return average(x, kernel, strides, before, ceil, counted)


def _sides(
    call: Call, x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]
) -> tuple[list[int], list[int]]:
    """How many zeros stand before and after each dimension."""
    dims, mode = len(kernel), call.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID"):
        pads = list(call.get("pads", [0] * (2 * dims))) if mode == "NOTSET" else [0] * (2 * dims)
        return pads[:dims], pads[dims:]
    total = []
    for i, size in enumerate(x.shape[2:]):
        reach = dilations[i] * (kernel[i] - 1) + 1
        total.append(max(0, (-(-size // strides[i]) - 1) * strides[i] + reach - size))
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return (small, large) if mode == "SAME_UPPER" else (large, small)


# -- normalisations and attention


@_operator("BatchNormalization")
def _batch_norm(call: Call) -> Tensor:
    if call.get("training_mode", 0) or not call.get("spatial", 1) or call.outputs > 1:
        refuse("normalises by the batch; export the model for inference")
    x, scale, bias, mean, variance = (call.tensor(i) for i in range(5))
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, call.get("epsilon", 1e-5))


@_operator("LayerNormalization", "RMSNormalization")
def _layer_norm(call: Call) -> Tensor:
    if call.outputs > 1:
        refuse("also returns its mean or deviation")
    x, eps = call.tensor(0), call.get("epsilon", 1e-5)
    shape = list(x.shape[int(call.get("axis", -1)) :])
    scale = call.tensor(1).expand(shape)
    if call.operator == "RMSNormalization":
        return functional.rms_norm(x, shape, scale, eps)
    bias = call.optional(2)
    return functional.layer_norm(x, shape, scale, None if bias is None else bias.expand(shape), eps)


@_operator("Softmax")
def _softmax(call: Call) -> Tensor:
    x = call.tensor(0)
    if call.opset >= 13:
        return x.softmax(int(call.get("axis", -1)))
    axis = int(call.get("axis", 1)) % x.ndim  # older operator sets take all dimensions from the axis on together
    return x.softmax(-1) if axis == x.ndim - 1 else x.flatten(axis).softmax(-1).reshape(x.shape)
