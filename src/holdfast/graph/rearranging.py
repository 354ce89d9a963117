"""The ATen operators that only rearrange entries, or make constants: they act on the reader's index tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from holdfast.graph.entries import Value, refuse
from holdfast.graph.reader import Reader
from holdfast.graph.table import as_value, operator, shape_of

_REARRANGING = (
    "view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose",
    "permute", "t", "numpy_T", "movedim", "swapaxes", "expand", "expand_as", "repeat", "repeat_interleave", "slice",
    "select", "narrow", "index_select", "unbind", "chunk", "split", "split_with_sizes", "roll", "flip", "unfold",
    "diagonal", "view_as", "tril", "triu", "gather", "tile", "as_strided", "take_along_dim", "rot90", "pixel_shuffle",
    "pixel_unshuffle", "contiguous", "alias", "mT", "T",
)  # fmt: skip


@operator(*_REARRANGING)
def _move(reader: Reader, target: Any, x: Value, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, Tensor):
        refuse("places a constant by something that moves")
    name = target._schema.name.partition("::")[2]
    if name in ("tril", "triu"):
        mask = torch.ones(shape_of(x)[-2:], dtype=torch.bool)
        kept = mask.tril(*args) if name == "tril" else mask.triu(*args)
        return reader.where(kept.expand(shape_of(x)), x, torch.zeros((), dtype=torch.float64))
    if name in ("view_as", "expand_as"):
        shape = shape_of(args[0])
        return reader.rearranged(x, lambda t: t.reshape(shape) if name == "view_as" else t.expand(shape))
    if name in ("unbind", "chunk", "split", "split_with_sizes"):
        count = len(target(torch.empty(shape_of(x)), *args, **kwargs))
        return tuple(reader.rearranged(x, _part(target, i, args, kwargs)) for i in range(count))
    return reader.rearranged(x, lambda t: target(t.contiguous() if name in _STRIDED else t, *args, **kwargs))


def _part(target: Any, place: int, args: Any, kwargs: Any) -> Callable[[Tensor], Tensor]:
    """One of several tensors that an operator returns."""
    return lambda t: target(t, *args, **kwargs)[place]


_STRIDED = {"view", "_unsafe_view", "_reshape_alias", "as_strided"}


@operator("getitem")
def _getitem(reader: Reader, target: Any, x: Sequence[Any], place: int) -> Any:
    if place >= len(x):  # of max-pooling only the maxima are known
        refuse("asks for the places of maxima")
    return x[place]


@operator("index")
def _index(reader: Reader, target: Any, x: Value, indices: Sequence[Tensor | None]) -> Value:
    return reader.rearranged(x, lambda t: target(t, list(indices)))


@operator("cat", "concat", "stack")
def _cat(reader: Reader, target: Any, parts: Sequence[Value], dim: int = 0) -> Value:
    return reader.joined(parts, lambda tensors: target(tensors, dim))


@operator("constant_pad_nd")
def pad(reader: Reader, target: Any, x: Value, pad: Sequence[int], value: float = 0.0) -> Value:
    inside = torch.nn.functional.pad(torch.ones(shape_of(x), dtype=torch.bool), list(pad))
    wide = reader.rearranged(x, lambda t: torch.nn.functional.pad(t, list(pad)))
    return reader.where(inside, wide, torch.full(inside.shape, float(value), dtype=torch.float64))


@operator("select_scatter", "slice_scatter")
def _scatter(reader: Reader, target: Any, x: Value, source: Value, *args: Any, **kwargs: Any) -> Value:
    place = target(torch.zeros(shape_of(x)), torch.ones(shape_of(source)), *args, **kwargs).bool()
    marks = torch.arange(math.prod(shape_of(source))).reshape(shape_of(source))
    index = target(torch.zeros(shape_of(x), dtype=torch.long), marks, *args, **kwargs)
    wide = reader.rearranged(source, lambda t: t.flatten()[index])
    return reader.where(place, wide, x)


@operator("copy")
def _copy(reader: Reader, target: Any, place: Value, source: Value, non_blocking: bool = False) -> Value:
    """What is written into a place: the source in the place's shape."""
    shape = shape_of(place)
    return reader.rearranged(source, lambda t: t.expand(shape))


@operator("fill")
def _fill(reader: Reader, target: Any, place: Value, number: Any) -> Value:
    """One number everywhere."""
    shape = shape_of(place)
    return reader.rearranged(as_value(number), lambda t: t.expand(shape))


_PASSING = (
    "clone", "detach", "lift_fresh_copy", "alias", "_to_copy", "to", "float", "double", "type_as", "dropout",
    "native_dropout", "feature_dropout", "alpha_dropout",
)  # fmt: skip

#: Operators that change nothing but the places of entries.
MOVING = {*_REARRANGING, *_PASSING, "getitem", "index", "cat", "concat", "stack", "constant_pad_nd"}


@operator(*_PASSING)
def _same(reader: Reader, target: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Casts between floating-point types change nothing but rounding; dropout does nothing in evaluation."""
    name = target._schema.name.partition("::")[2]
    if "dropout" in name and len(args) > 1 and args[1] and args[0]:
        refuse("drops entries at random; call model.eval(), and leave out dropout that is always on")
    if isinstance(x, Tensor):  # a mask may come as numbers
        result: Value = target(x, *args, **kwargs)
        return result
    return x


@operator("sym_size", "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size")
def _nothing(reader: Reader, target: Any, *args: Any, **kwargs: Any) -> None:
    return None


@operator("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty")
def _filled(reader: Reader, target: Any, x: Value, *args: Any, **kwargs: Any) -> Tensor:
    """A constant that takes only shape and dtype from what moves."""
    constant: Tensor = target(torch.zeros(shape_of(x), dtype=torch.float64), *args, **kwargs)
    return constant
