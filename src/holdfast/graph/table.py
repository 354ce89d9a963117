"""The table of ATen operators that are read, and what its entries share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.graph.entries import Value

Operator = Callable[..., Any]

#: By name without the overload. An entry is given the reader, the operator itself and its arguments.
OPERATORS: dict[str, Operator] = {}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Enters a function into the table under the names of the operators that it reads."""

    def add(read: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, read))
        return read

    return add


def as_value(x: Any) -> Value:
    """An argument that may be a plain number."""
    return x if isinstance(x, Value) else torch.tensor(float(x), dtype=torch.float64)


def shape_of(x: Any) -> tuple[int, ...]:
    return tuple(x.value.shape if hasattr(x, "formula") else x.shape)


def for_dimensions(option: Any, dims: int) -> list[int]:
    """An option with one number for each dimension."""
    listed = [option] if isinstance(option, int) else list(option)
    return listed * dims if len(listed) == 1 else listed
