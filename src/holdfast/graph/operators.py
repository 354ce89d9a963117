"""The ATen operators that are read, each in the words of the reader. A new operator is one entry of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.graph.entries import Value, refuse
from holdfast.graph.entrywise import FUNCTIONS, Polynomial, X, function
from holdfast.graph.reader import Reader

Operator = Callable[..., Any]

OPERATORS: dict[str, Operator] = {}


def _operator(*names: str) -> Callable[[Operator], Operator]:
    def add(read: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, read))
        return read

    return add


# -- what moves entries about; the operator itself acts on the index tensors


_REARRANGING = (
    "view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose",
    "permute", "t", "numpy_T", "movedim", "swapaxes", "expand", "expand_as", "repeat", "repeat_interleave", "slice",
    "select", "narrow", "index_select", "unbind", "chunk", "split", "split_with_sizes", "roll", "flip", "unfold",
    "diagonal", "view_as", "tril", "triu", "gather", "tile", "as_strided", "take_along_dim", "rot90", "pixel_shuffle",
    "pixel_unshuffle", "contiguous", "alias", "mT", "T",
)  # fmt: skip


@_operator(*_REARRANGING)
def _move(reader: Reader, target: Any, x: Value, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, Tensor):
        refuse("places a constant by something that moves")
    name = target._schema.name.partition("::")[2]
    if name in ("tril", "triu"):
        mask = torch.ones(_shape(x)[-2:], dtype=torch.bool)
        kept = mask.tril(*args) if name == "tril" else mask.triu(*args)
        return reader.where(kept.expand(_shape(x)), x, torch.zeros((), dtype=torch.float64))
    if name in ("view_as", "expand_as"):
        shape = _shape(args[0])
        return reader.rearranged(x, lambda t: t.reshape(shape) if name == "view_as" else t.expand(shape))
    if name in ("unbind", "chunk", "split", "split_with_sizes"):
        count = len(target(torch.empty(_shape(x)), *args, **kwargs))
        return tuple(reader.rearranged(x, _part(target, i, args, kwargs)) for i in range(count))
    return reader.rearranged(x, lambda t: target(t.contiguous() if name in _STRIDED else t, *args, **kwargs))


def _part(target: Any, place: int, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor]:
    """One of several tensors that an operator returns."""
    return lambda t: target(t, *args, **kwargs)[place]


_STRIDED = {"view", "_unsafe_view", "_reshape_alias", "as_strided"}


@_operator("getitem")
def _getitem(reader: Reader, target: Any, x: Sequence[Any], place: int) -> Any:
    return x[place]


@_operator("index")
def _index(reader: Reader, target: Any, x: Value, indices: Sequence[Tensor | None]) -> Value:
    return reader.rearranged(x, lambda t: target(t, list(indices)))


@_operator("cat", "concat", "stack")
def _cat(reader: Reader, target: Any, parts: Sequence[Value], dim: int = 0) -> Value:
    return reader.joined(parts, lambda tensors: target(tensors, dim))


@_operator("constant_pad_nd")
def _pad(reader: Reader, target: Any, x: Value, pad: Sequence[int], value: float = 0.0) -> Value:
    inside = torch.nn.functional.pad(torch.ones(_shape(x), dtype=torch.bool), list(pad))
    wide = reader.rearranged(x, lambda t: torch.nn.functional.pad(t, list(pad)))
    return reader.where(inside, wide, torch.full(inside.shape, float(value), dtype=torch.float64))


@_operator("select_scatter", "slice_scatter")
def _scatter(reader: Reader, target: Any, x: Value, source: Value, *args: Any, **kwargs: Any) -> Value:
    place = target(torch.zeros(_shape(x)), torch.ones(_shape(source)), *args, **kwargs).bool()
    marks = torch.arange(math.prod(_shape(source))).reshape(_shape(source))
    index = target(torch.zeros(_shape(x), dtype=torch.long), marks, *args, **kwargs)
    wide = reader.rearranged(source, lambda t: t.flatten()[index])
    return reader.where(place, wide, x)


@_operator("copy")
def _copy(reader: Reader, target: Any, place: Value, source: Value, non_blocking: bool = False) -> Value:
    """What is written into a place: the source in the place's shape."""
    shape = _shape(place)
    return reader.rearranged(source, lambda t: t.expand(shape))


@_operator("fill")
def _fill(reader: Reader, target: Any, place: Value, number: Any) -> Value:
    """One number everywhere."""
    shape = _shape(place)
    return reader.rearranged(_value(number), lambda t: t.expand(shape))


_PASSING = (
    "clone", "detach", "lift_fresh_copy", "alias", "_to_copy", "to", "float", "double", "type_as", "dropout",
    "native_dropout", "feature_dropout", "alpha_dropout",
)  # fmt: skip

#: Operators that change nothing but the places of entries.
MOVING = {*_REARRANGING, *_PASSING, "getitem", "index", "cat", "concat", "stack", "constant_pad_nd"}


@_operator(*_PASSING)
def _same(reader: Reader, target: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Casts between floating-point types change nothing but rounding; dropout does nothing in evaluation."""
    name = target._schema.name.partition("::")[2]
    if "dropout" in name and len(args) > 1 and args[1] and args[0]:
        refuse("drops entries at random; call model.eval(), and leave out dropout that is always on")
    if isinstance(x, Tensor):  # a mask may come as numbers
        result: Value = target(x, *args, **kwargs)
        return result
    return x


@_operator("sym_size", "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size")
def _nothing(reader: Reader, target: Any, *args: Any, **kwargs: Any) -> None:
    return None


@_operator("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
def _filled(reader: Reader, target: Any, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """A constant that takes only shape and dtype from what moves."""
    constant: Tensor = target(torch.zeros(_shape(x), dtype=torch.float64), *args, **kwargs)
    return constant


# -- sums and products


@_operator("add")
def _add(reader: Reader, target: Any, a: Any, b: Any, alpha: float = 1.0) -> Value:
    return reader.add(_value(a), _value(b), float(alpha))


@_operator("sub")
def _sub(reader: Reader, target: Any, a: Any, b: Any, alpha: float = 1.0) -> Value:
    return reader.subtract(_value(a), _value(b), float(alpha))


@_operator("rsub")
def _rsub(reader: Reader, target: Any, a: Any, b: Any, alpha: float = 1.0) -> Value:
    return reader.subtract(_value(b), _value(a), float(alpha))


@_operator("mul")
def _mul(reader: Reader, target: Any, a: Any, b: Any) -> Value:
    return reader.multiply(_value(a), _value(b))


@_operator("div", "true_divide")
def _div(reader: Reader, target: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is not None:
        refuse("rounds a quotient")
    return reader.divide(_value(a), _value(b))


@_operator("reciprocal")
def _reciprocal(reader: Reader, target: Any, x: Value) -> Value:
    return reader.divide(torch.ones((), dtype=torch.float64), x)


@_operator("neg")
def _neg(reader: Reader, target: Any, x: Value) -> Value:
    return reader.negative(x)


@_operator("pow")
def _pow(reader: Reader, target: Any, x: Any, exponent: Any) -> Value:
    if not isinstance(exponent, int | float) and not (isinstance(exponent, Tensor) and exponent.numel() == 1):
        refuse("has an exponent that moves, or several")
    if not isinstance(x, Value):
        refuse("has an exponent that moves")
    return reader.power(x, float(exponent))


@_operator("square")
def _square(reader: Reader, target: Any, x: Value) -> Value:
    return reader.power(x, 2.0)


@_operator("sqrt")
def _sqrt(reader: Reader, target: Any, x: Value) -> Value:
    return reader.power(x, 0.5)


@_operator("rsqrt")
def _rsqrt(reader: Reader, target: Any, x: Value) -> Value:
    return reader.power(x, -0.5)


@_operator("mean", "sum")
def _mean(reader: Reader, target: Any, x: Value, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    shape = _shape(x)
    chosen = list(range(len(shape))) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    return reader.mean(x, chosen, keepdim, total=target._schema.name.endswith("sum"))


@_operator("var")
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


@_operator("gelu")
def _gelu(reader: Reader, target: Any, x: Value, approximate: str = "none") -> Value:
    inner = X + (X * X * X).scaled(0.044715)
    gate = (
        function("erf", X.scaled(math.sqrt(0.5)))
        if approximate == "none"
        else function("tanh", inner.scaled(math.sqrt(2 / math.pi)))
    )
    return reader.formula(reader.moving(x), lambda p: X.scaled(0.5) * (Polynomial.number(1.0) + gate))


@_operator("leaky_relu")
def _leaky_relu(reader: Reader, target: Any, x: Value, slope: float = 0.01) -> Value:
    return reader.formula(x, lambda p: p.scaled(slope) + function("relu", p).scaled(1 - slope))


@_operator("prelu")
def _prelu(reader: Reader, target: Any, x: Value, weight: Value) -> Value:
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        refuse("has a slope for each channel; expected one slope")
    slope = float(weight)
    return reader.formula(x, lambda p: p.scaled(slope) + function("relu", p).scaled(1 - slope))


@_operator("glu")
def _glu(reader: Reader, target: Any, x: Value, dim: int = -1) -> Value:
    value, gate = (reader.rearranged(x, lambda t, i=i: t.chunk(2, dim)[i]) for i in (0, 1))  # type: ignore[misc]
    return reader.multiply(reader.function("sigmoid", gate), value)


@_operator("clamp", "clamp_min")
def _clamp(reader: Reader, target: Any, x: Value, low: Any = None, high: Any = None) -> Value:
    if high is not None or isinstance(low, Tensor) or low != 0:
        refuse(f"limits something that moves to between {low} and {high}; only relu is known")
    return reader.function("relu", x)


@_operator("threshold")
def _threshold(reader: Reader, target: Any, x: Value, threshold: float, value: float) -> Value:
    if threshold != 0 or value != 0:
        refuse(f"puts {value:g} in the place of what is below {threshold:g}; only relu is known")
    return reader.function("relu", x)


# -- maps


@_operator("linear")
def _linear(reader: Reader, target: Any, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return reader.linear(x, weight, bias)


@_operator("matmul", "mm", "bmm", "mv")
def _matmul(reader: Reader, target: Any, a: Value, b: Value) -> Value:
    return reader.matmul(a, b)


@_operator("addmm", "baddbmm", "addmv")
def _addmm(reader: Reader, target: Any, c: Value, a: Value, b: Value, beta: float = 1.0, alpha: float = 1.0) -> Value:
    if isinstance(b, Tensor) and isinstance(c, Tensor) and b.ndim == 2 and c.ndim == 1 and alpha == beta == 1:
        return reader.linear(a, b.mT, c)
    product = reader.multiply(reader.matmul(a, b), torch.tensor(float(alpha), dtype=torch.float64))
    return product if beta == 0 else reader.add(product, c, float(beta))


@_operator("conv1d", "conv2d")
def _conv(reader: Reader, target: Any, x: Value, weight: Value, bias: Value | None = None, stride: Any = 1,
          padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Value:  # fmt: skip
    dims = len(_shape(x)) - 2
    if isinstance(padding, str):
        kernel, spread = _shape(weight)[2:], _wide(dilation, dims)
        total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        if padding == "same" and any(t % 2 for t in total):
            sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            x = reader.joined([x], lambda ts: ts[0])
            x, padding = _pad(reader, None, x, sides), 0
        else:
            padding = 0 if padding == "valid" else [t // 2 for t in total]
    options = [_wide(o, dims) for o in (stride, padding, dilation)]
    return reader.convolution(x, weight, bias, options[0], options[1], options[2], groups)


@_operator("convolution")
def _convolution(reader: Reader, target: Any, x: Value, weight: Value, bias: Value | None, stride: Any, padding: Any,
                 dilation: Any, transposed: bool, output_padding: Any, groups: int) -> Value:  # fmt: skip
    if transposed:
        refuse("is a transposed convolution")
    output: Value = _conv(reader, target, x, weight, bias, stride, padding, dilation, groups)
    return output


@_operator("avg_pool2d")
def _avg_pool(reader: Reader, target: Any, x: Value, kernel: Any, stride: Any = None, padding: Any = 0,
              ceil_mode: bool = False, count_include_pad: bool = True,
              divisor: int | None = None) -> Value:  # fmt: skip
    size = _wide(kernel, 2)
    if ceil_mode or (not count_include_pad and any(_wide(padding, 2))):
        refuse("averages windows of different sizes")
    channels = _shape(x)[1]
    weight = torch.full((channels, 1, *size), 1 / (divisor or math.prod(size)), dtype=torch.float64)
    return reader.convolution(x, weight, None, _wide(stride or kernel, 2), _wide(padding, 2), [1, 1], channels)


@_operator("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
def _adaptive(reader: Reader, target: Any, x: Value, size: Any) -> Value:
    if _wide(size, 2) != [1, 1]:
        refuse("averages adaptive windows; only the mean of all pixels is known")
    return reader.mean(x, [-2, -1], True)


# -- normalisations


@_operator("layer_norm", "native_layer_norm")
def _layer_norm(reader: Reader, target: Any, x: Value, shape: Sequence[int], weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn: bool = False) -> Any:  # fmt: skip
    output = reader.layer_norm(x, math.prod(shape), weight, bias, eps)
    return (output,) if target._schema.name.endswith("native_layer_norm") else output


@_operator("rms_norm", "_fused_rms_norm")
def _rms_norm(reader: Reader, target: Any, x: Value, shape: Sequence[int], weight: Tensor | None = None,
              eps: float | None = None) -> Any:  # fmt: skip
    output = reader.rms_norm(x, math.prod(shape), weight, eps)
    return (output,) if target._schema.name.endswith("_fused_rms_norm") else output


@_operator("group_norm")
def _group_norm(reader: Reader, target: Any, x: Value, groups: int, weight: Tensor | None = None,
                bias: Tensor | None = None, eps: float = 1e-5, cudnn: bool = False) -> Value:  # fmt: skip
    return reader.group_norm(x, groups, weight, bias, eps)


@_operator("instance_norm")
def _instance_norm(reader: Reader, target: Any, x: Value, weight: Tensor | None, bias: Tensor | None,
                   mean: Tensor | None, variance: Tensor | None, own_statistics: bool, momentum: float, eps: float,
                   cudnn: bool = False) -> Value:  # fmt: skip
    if own_statistics:
        return reader.group_norm(x, _shape(x)[1], weight, bias, eps)
    if mean is None or variance is None:
        refuse("has no statistics")
    return _by_statistics(reader, x, weight, bias, mean, variance, eps)


@_operator("batch_norm")
def _batch_norm(reader: Reader, target: Any, x: Value, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
                variance: Tensor | None, training: bool, momentum: float, eps: float,
                cudnn: bool = False) -> Value:  # fmt: skip
    if training or mean is None or variance is None:
        refuse("normalises by the batch; call model.eval(), and keep running statistics")
    return _by_statistics(reader, x, weight, bias, mean, variance, eps)


@_operator("_native_batch_norm_legit", "_native_batch_norm_legit_functional")
def _batch_statistics(reader: Reader, target: Any, *args: Any, **kwargs: Any) -> Value:
    refuse("normalises by the batch; call model.eval(), and keep running statistics")


@_operator("_native_batch_norm_legit_no_training", "native_batch_norm")
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


@_operator("softmax", "_softmax", "_safe_softmax")
def _softmax(reader: Reader, target: Any, x: Value, dim: int, *rest: Any, **kwargs: Any) -> Value:
    return reader.softmax(x, dim)


@_operator("amax")
def _amax(reader: Reader, target: Any, x: Value, dims: Any = (), keepdim: bool = False) -> Value:
    if isinstance(dims, int) or len(dims) == 1:
        return reader.maximum(x, dims if isinstance(dims, int) else dims[0], keepdim)
    refuse("takes a maximum over several dimensions")


@_operator("max")
def _max(reader: Reader, target: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
    if not isinstance(dim, int):
        refuse("takes a maximum of everything, or of two tensors")
    return (reader.maximum(x, dim, keepdim),)


@_operator("scaled_dot_product_attention")
def _attention(reader: Reader, target: Any, q: Value, k: Value, v: Value, attn_mask: Value | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Value:  # fmt: skip
    if dropout_p:
        refuse("drops attention at random; call model.eval()")
    return reader.attention(q, k, v, attn_mask, scale, is_causal)


@_operator("masked_fill")
def _masked_fill(reader: Reader, target: Any, x: Value, mask: Value, value: Any) -> Value:
    if not isinstance(mask, Tensor) or not isinstance(value, int | float | Tensor):
        refuse("masks by something that moves")
    return reader.filled(x, mask, float(value))


@_operator("where")
def _where(reader: Reader, target: Any, condition: Value, a: Any, b: Any) -> Value:
    return reader.where(condition, _value(a), _value(b))


def _value(x: Any) -> Value:
    return x if isinstance(x, Value) else torch.tensor(float(x), dtype=torch.float64)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.value.shape if hasattr(x, "formula") else x.shape)


def _wide(option: Any, dims: int) -> list[int]:
    """One number for each dimension."""
    listed = [option] if isinstance(option, int) else list(option)
    return listed * dims if len(listed) == 1 else listed
