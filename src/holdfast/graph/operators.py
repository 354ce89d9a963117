"""The ATen operators that compute, each in terms of the reader's methods. A new operator is one entry of the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.graph.entries import Value, refuse
from holdfast.graph.entrywise import FUNCTIONS, Polynomial, X, function
from holdfast.graph.reader import Reader
from holdfast.graph.rearranging import MOVING, pad
from holdfast.graph.table import OPERATORS, Operator, as_value, for_dimensions, operator, shape_of
from holdfast.graph.values import broadcast
from holdfast.graph.windows import adaptive, sliding

__all__ = ["MOVING", "OPERATORS"]

# -- sums and products


@operator("add")
def _add(reader: Reader, target: Any, a: Any, b: Any, alpha: float = 1.0) -> Value:
    return reader.add(as_value(a), as_value(b), float(alpha))


@operator("sub")
def _sub(reader: Reader, target: Any, a: Any, b: Any, alpha: float = 1.0) -> Value:
    return reader.subtract(as_value(a), as_value(b), float(alpha))


@operator("rsub")
def _rsub(reader: Reader, target: Any, a: Any, b: Any, alpha: float = 1.0) -> Value:
    return reader.subtract(as_value(b), as_value(a), float(alpha))


@operator("mul")
def _mul(reader: Reader, target: Any, a: Any, b: Any) -> Value:
    return reader.multiply(as_value(a), as_value(b))


@operator("div", "true_divide")
def _div(reader: Reader, target: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        refuse("rounds a quotient")
    return reader.divide(as_value(a), as_value(b))


@operator("reciprocal")
def _reciprocal(reader: Reader, target: Any, x: Value) -> Value:
    return reader.divide(torch.ones((), dtype=torch.float64), x)


@operator("neg")
def _neg(reader: Reader, target: Any, x: Value) -> Value:
    return reader.negative(x)


@operator("pow")
def _pow(reader: Reader, target: Any, x: Any, exponent: Any) -> Value:
    if not isinstance(exponent, int | float) and not (isinstance(exponent, Tensor) and exponent.numel() == 1):
        refuse("has an exponent that moves, or several")
    if not isinstance(x, Value):
        refuse("has an exponent that moves")
    return reader.power(x, float(exponent))


@operator("square")
def _square(reader: Reader, target: Any, x: Value) -> Value:
    return reader.power(x, 2.0)


@operator("sqrt")
def _sqrt(reader: Reader, target: Any, x: Value) -> Value:
    return reader.power(x, 0.5)


@operator("rsqrt")
def _rsqrt(reader: Reader, target: Any, x: Value) -> Value:
    return reader.power(x, -0.5)


@operator("mean", "sum")
def _mean(reader: Reader, target: Any, x: Value, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    shape = shape_of(x)
    chosen = list(range(len(shape))) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    return reader.mean(x, chosen, keepdim, total=target._schema.name.endswith("sum"))


@operator("var")
def _var(reader: Reader, target: Any, x: Value, dims: Any = None, unbiased: Any = True, keepdim: bool = False,
         correction: Any = None) -> Value:  # fmt: skip
    if isinstance(dims, bool) or dims is None:
        refuse("takes a variance over all dimensions")
    if correction is None:
        correction = 1.0 if unbiased in (True, None) else 0.0
    return reader.variance(x, [dims] if isinstance(dims, int) else list(dims), float(correction), keepdim)


# -- functions of one variable


def _entrywise(name: str) -> Operator:
    return lambda reader, target, x: reader.function(name, x)


for _each in FUNCTIONS:
    OPERATORS.setdefault(_each, _entrywise(_each))
    OPERATORS.setdefault(f"{_each}_", _entrywise(_each))


@operator("gelu")
def _gelu(reader: Reader, target: Any, x: Value, approximate: str = "none") -> Value:
    inner = X + (X * X * X).scaled(0.044715)
    gate = (
        function("erf", X.scaled(math.sqrt(0.5)))
        if approximate == "none"
        else function("tanh", inner.scaled(math.sqrt(2 / math.pi)))
    )
    return reader.formula(reader.moving(x), lambda p: X.scaled(0.5) * (Polynomial.number(1.0) + gate))


@operator("leaky_relu")
def _leaky_relu(reader: Reader, target: Any, x: Value, slope: float = 0.01) -> Value:
    return reader.formula(x, lambda p: p.scaled(slope) + function("relu", p).scaled(1 - slope))


@operator("prelu")
def _prelu(reader: Reader, target: Any, x: Value, weight: Value) -> Value:
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        refuse("has a slope for each channel; expected one slope")
    slope = float(weight)
    return reader.formula(x, lambda p: p.scaled(slope) + function("relu", p).scaled(1 - slope))


@operator("glu")
def _glu(reader: Reader, target: Any, x: Value, dim: int = -1) -> Value:
    value, gate = (reader.rearranged(x, lambda t, i=i: t.chunk(2, dim)[i]) for i in (0, 1))  # type: ignore[misc]
    return reader.multiply(reader.function("sigmoid", gate), value)


@operator("clamp", "clamp_min")
def _clamp(reader: Reader, target: Any, x: Value, low: Any = None, high: Any = None) -> Value:
    if high is not None or isinstance(low, Tensor) or low != 0:
        refuse(f"limits something that moves to between {low} and {high}; only relu is known")
    return reader.function("relu", x)


@operator("threshold")
def _threshold(reader: Reader, target: Any, x: Value, threshold: float, value: float) -> Value:
    if threshold != 0 or value != 0:
        refuse(f"puts {value:g} in the place of what is below {threshold:g}; only relu is known")
    return reader.function("relu", x)


# -- maps


@operator("linear")
def _linear(reader: Reader, target: Any, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return reader.linear(x, weight, bias)


@operator("matmul", "mm", "bmm", "mv")
def _matmul(reader: Reader, target: Any, a: Value, b: Value) -> Value:
    return reader.matmul(a, b)


@operator("addmm", "baddbmm", "addmv")
def _addmm(reader: Reader, target: Any, c: Value, a: Value, b: Value, beta: float = 1.0, alpha: float = 1.0) -> Value:
    if isinstance(b, Tensor) and isinstance(c, Tensor) and b.ndim == 2 and c.ndim == 1 and alpha == beta == 1:
        return reader.linear(a, b.mT, c)
    product = reader.multiply(reader.matmul(a, b), torch.tensor(float(alpha), dtype=torch.float64))
    return product if beta == 0 else reader.add(product, c, float(beta))


@operator("conv1d", "conv2d")
def _conv(reader: Reader, target: Any, x: Value, weight: Value, bias: Value | None = None, stride: Any = 1,
          padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Value:  # fmt: skip
    dims = len(shape_of(x)) - 2
    if isinstance(padding, str):
        kernel, spread = shape_of(weight)[2:], for_dimensions(dilation, dims)
        total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        if padding == "same" and any(t % 2 for t in total):
            sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            x = reader.joined([x], lambda ts: ts[0])
            x, padding = pad(reader, None, x, sides), 0
        else:
            padding = 0 if padding == "valid" else [t // 2 for t in total]
    options = [for_dimensions(o, dims) for o in (stride, padding, dilation)]
    return reader.convolution(x, weight, bias, options[0], options[1], options[2], groups)


@operator("convolution")
def _convolution(reader: Reader, target: Any, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any,
                 dilation: Any, transposed: bool, output_padding: Any, groups: int) -> Value:  # fmt: skip
    if transposed:
        refuse("is a transposed convolution")
    output: Value = _conv(reader, target, x, weight, bias, stride, padding, dilation, groups)
    return output


# -- pooling


@operator("avg_pool1d", "avg_pool2d")
def _avg_pool(reader: Reader, target: Any, x: Value, kernel: Any, stride: Any = None, padding: Any = 0,
              ceil_mode: bool = False, count_include_pad: bool = True,
              divisor: int | None = None) -> Value:  # fmt: skip
    channels, *sizes = shape_of(x)[1:]
    dims = len(sizes)
    size = for_dimensions(kernel, dims)
    if ceil_mode or (not count_include_pad and any(for_dimensions(padding, dims))):  # windows of different sizes
        given = (kernel, stride or kernel, padding, ceil_mode, count_include_pad, *([divisor] if dims == 2 else ()))
        return reader.pixel_map(x, lambda pixels: target(pixels, *given))
    weight = torch.full((channels, 1, *size), 1 / (divisor or math.prod(size)), dtype=torch.float64)
    options = [for_dimensions(o, dims) for o in (stride or kernel, padding)]
    return reader.convolution(x, weight, None, options[0], options[1], [1] * dims, channels)


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def _adaptive_avg_pool(reader: Reader, target: Any, x: Value, size: Any) -> Value:
    dims = len(shape_of(x)) - 2
    if for_dimensions(size, dims) == [1] * dims:
        return reader.mean(x, list(range(-dims, 0)), True)
    return reader.pixel_map(x, lambda pixels: target(pixels, size))


@operator("max_pool1d", "max_pool2d", "max_pool1d_with_indices", "max_pool2d_with_indices")
def _max_pool(reader: Reader, target: Any, x: Value, kernel: Any, stride: Any = None, padding: Any = 0,
              dilation: Any = 1, ceil_mode: bool = False) -> Any:  # fmt: skip
    sizes = shape_of(x)[2:]
    options = zip(
        sizes, *(for_dimensions(o, len(sizes)) for o in (kernel, stride or kernel, padding, dilation)), strict=True
    )
    pooled = reader.max_pool(x, [sliding(*o, ceil=ceil_mode) for o in options])
    return (pooled,) if target._schema.name.endswith("indices") else pooled


@operator("adaptive_max_pool1d", "adaptive_max_pool2d")
def _adaptive_max_pool(reader: Reader, target: Any, x: Value, outputs: Any) -> Any:
    sizes = shape_of(x)[2:]
    pairs = zip(sizes, for_dimensions(outputs, len(sizes)), strict=True)
    return (reader.max_pool(x, [adaptive(*pair) for pair in pairs]),)


@operator("amax", "amin")
def _amax(reader: Reader, target: Any, x: Value, dims: Any = (), keepdim: bool = False) -> Value:
    return _extreme(reader, target, x, [dims] if isinstance(dims, int) else list(dims), keepdim)


@operator("max", "min", "maximum", "minimum")
def _max(reader: Reader, target: Any, x: Value, other: Any = None, keepdim: bool = False) -> Any:
    if isinstance(other, Value):  # of two tensors
        shape = broadcast(shape_of(x), shape_of(other))
        pair = [reader.rearranged(part, lambda t: t.expand(shape)) for part in (x, other)]
        return _extreme(reader, target, reader.joined(pair, lambda parts: torch.stack(parts, -1)), [-1], False)
    if other is None:
        return _extreme(reader, target, x, [], False)
    return (_extreme(reader, target, x, [other], keepdim),)


def _extreme(reader: Reader, target: Any, x: Value, dims: list[int], keepdim: bool) -> Value:
    if "min" not in target._schema.name:
        return reader.maximum(x, dims, keepdim)
    return reader.negative(reader.maximum(reader.negative(x), dims, keepdim))


# -- normalisations


@operator("layer_norm", "native_layer_norm")
def _layer_norm(reader: Reader, target: Any, x: Value, shape: Sequence[int], weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn: bool = False) -> Any:  # fmt: skip
    output = reader.layer_norm(x, math.prod(shape), weight, bias, eps)
    return (output,) if target._schema.name.endswith("native_layer_norm") else output


@operator("rms_norm", "_fused_rms_norm")
def _rms_norm(reader: Reader, target: Any, x: Value, shape: Sequence[int], weight: Tensor | None = None,
              eps: float | None = None) -> Any:  # fmt: skip
    output = reader.rms_norm(x, math.prod(shape), weight, eps)
    return (output,) if target._schema.name.endswith("_fused_rms_norm") else output


@operator("group_norm")
def _group_norm(reader: Reader, target: Any, x: Value, groups: int, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn: bool = False) -> Value:  # fmt: skip
    return reader.group_norm(x, groups, weight, bias, eps)


@operator("instance_norm")
def _instance_norm(reader: Reader, target: Any, x: Value, weight: Tensor | None, bias: Tensor | None,
                   mean: Tensor | None, variance: Tensor | None, own_statistics: bool, momentum: float, eps: float,
                   cudnn: bool = False) -> Value:  # fmt: skip
    if own_statistics:
        return reader.group_norm(x, shape_of(x)[1], weight, bias, eps)
    if mean is None or variance is None:
        refuse("has no statistics")
    return _by_statistics(reader, x, weight, bias, mean, variance, eps)


@operator("batch_norm")
def _batch_norm(reader: Reader, target: Any, x: Value, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
                variance: Tensor | None, training: bool, momentum: float, eps: float,
                cudnn: bool = False) -> Value:  # fmt: skip
    if training or mean is None or variance is None:
        refuse("normalises by the batch; call model.eval(), and keep running statistics")
    return _by_statistics(reader, x, weight, bias, mean, variance, eps)


@operator("_native_batch_norm_legit", "_native_batch_norm_legit_functional")
def _batch_statistics(reader: Reader, target: Any, *args: Any, **kwargs: Any) -> Value:
    refuse("normalises by the batch; call model.eval(), and keep running statistics")


@operator("_native_batch_norm_legit_no_training", "native_batch_norm")
def _native_batch_norm(reader: Reader, target: Any, x: Value, weight: Tensor | None, bias: Tensor | None, mean: Tensor,
                       variance: Tensor, *rest: Any) -> Any:  # fmt: skip
    if target._schema.name.endswith("native_batch_norm") and rest[0]:
        refuse("normalises by the batch; call model.eval(), and keep running statistics")
    return (_by_statistics(reader, x, weight, bias, mean, variance, rest[-1]),)


def _by_statistics(
    reader: Reader, x: Value, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Value:
    factor = (variance.double() + eps).rsqrt()
    factor = factor if weight is None else factor * weight.double()
    shift = -mean.double() * factor
    return reader.channels(x, factor, shift if bias is None else shift + bias.double())


# -- attention


@operator("softmax", "_softmax", "_safe_softmax")
def _softmax(reader: Reader, target: Any, x: Value, dim: int, *rest: Any, **kwargs: Any) -> Value:
    return reader.softmax(x, dim)


@operator("scaled_dot_product_attention")
def _attention(reader: Reader, target: Any, q: Value, k: Value, v: Value, attn_mask: Value | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Value:  # fmt: skip
    if dropout_p:
        refuse("drops attention at random; call model.eval()")
    return reader.attention(q, k, v, attn_mask, scale, is_causal)


@operator("masked_fill")
def _masked_fill(reader: Reader, target: Any, x: Value, mask: Value, value: Any) -> Value:
    if not isinstance(mask, Tensor) or not isinstance(value, int | float | Tensor):
        refuse("masks by something that moves")
    return reader.filled(x, mask, float(value))


@operator("where")
def _where(reader: Reader, target: Any, condition: Value, a: Any, b: Any) -> Value:
    return reader.where(condition, as_value(a), as_value(b))
