"""A node of an ONNX graph with what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from holdfast.errors import ConversionError

#: What depends on the values of an input is a tensor; what depends on weights and shapes alone is an array, and known.
Array = npt.NDArray[Any]
Value = Tensor | Array


@final
@dataclass(frozen=True)
class Call:
    """One node with what it is given.

    Attributes:
        operator: its name.
        opset: the version of the operators.
        attributes: by their names.
        outputs: how many results it has.
        names: of its inputs; empty for one that is left out.
        given: the inputs.
        to_tensor: an array as a tensor, with the model's float type where it holds floats; by the name of a weight.
    """

    operator: str
    opset: int
    attributes: Mapping[str, Any]
    outputs: int
    names: Sequence[str]
    given: Sequence[Value | None]
    to_tensor: Callable[[str, Array], Tensor]

    def has(self, place: int) -> bool:
        return place < len(self.given) and self.given[place] is not None

    def tensor(self, place: int) -> Tensor:
        """An input as a tensor."""
        value = self.given[place]
        if value is None:
            refuse(f"lacks its input {place}")
        return value if isinstance(value, Tensor) else self.to_tensor(self.names[place], value)

    def constant(self, array: Array) -> Tensor:
        """A tensor that stands in no file."""
        return self.to_tensor("", array)

    def optional(self, place: int) -> Tensor | None:
        return self.tensor(place) if self.has(place) else None

    def numbers(self, place: int) -> list[Any]:
        """The numbers of an input, which must not depend on the values of the model's input."""
        value = self.given[place]
        if not isinstance(value, np.ndarray):
            refuse(f"has an input {place} that depends on the model's input; expected a constant")
        return list(value.reshape(-1).tolist())

    def get(self, name: str, default: Any) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def option(self, name: str, place: int, default: Any) -> Any:
        """Numbers that older operator sets have as an attribute, newer ones as an input."""
        return self.numbers(place) if self.has(place) else self.get(name, default)


def refuse(why: str) -> NoReturn:
    """What stands in the way, in words that follow the node's name and operator."""
    raise ConversionError(why)
