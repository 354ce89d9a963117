"""From a graph of operators to a function of what moves: every operator is read in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, fx

from holdfast.errors import ConversionError
from holdfast.graph.entries import Value
from holdfast.graph.export import reason
from holdfast.graph.operators import OPERATORS
from holdfast.graph.program import Environment, Program, Where, looked_up, operator_name
from holdfast.graph.reader import Reader


@final
class Walk:
    """Reads a program: constants are computed, what moves is followed.

    Args:
        program: the operators.
        feed: the model's inputs by name.
        reader: reads operators on what moves.
    """

    def __init__(self, program: Program, feed: Mapping[str, Tensor], reader: Reader) -> None:
        self._program, self._feed, self._reader = program, feed, reader
        self.values: Environment = {}
        self.frontier: dict[fx.Node, Tensor] = {}  # constants that depend on the inputs and meet what moves

    def run(self, moving: Mapping[fx.Node, Value]) -> Value:
        """The logits as a function of the given nodes, which move."""
        depends = self._program.dependent()
        for node in self._program.nodes:
            if node in moving:
                self.values[node] = moving[node]
                continue
            if not any(_moves(leaf) for source in node.all_input_nodes for leaf in _leaves(self.values[source])):
                self.values[node] = self._program.evaluate(node, self._feed, self.values, lifted=False)
                continue
            args, kwargs = looked_up(node, self.values)
            for source in node.all_input_nodes:
                if source in depends and isinstance(self.values[source], Tensor):
                    self.frontier[source] = self.values[source]
            value = self._read(node, args, kwargs)
            _check_rounding(node, value)
            self.values[node] = self._reader.settled(value) if _is_stream(node, depends) else value
        logits: Value = self.values[self._program.output]
        return logits

    def _read(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator_name(node)
        where = Where(node)
        if name not in OPERATORS:
            raise ConversionError(f"{where} is not known; expected one of those in the guide to your own model")
        try:
            return OPERATORS[name](self._reader, node.target, *args, **kwargs)
        except ConversionError as error:
            raise type(error)(f"{where} {error}") from error
        except Exception as error:  # an option or a shape that no piece has
            raise ConversionError(f"{where} is used in an unknown way ({reason(error)})") from error


def _is_stream(node: fx.Node, depends: set[fx.Node]) -> bool:
    """Whether a sum adds something to the node's value that may be a branch from it."""
    sums = [n for n in node.users if operator_name(n) == "add" and all(m in depends for m in n.all_input_nodes)]
    return len(node.users) > 1 and any(len(n.all_input_nodes) == 2 for n in sums)


def _check_rounding(node: fx.Node, value: Any) -> None:
    """Refuses what moves in other numbers than float32 and float64: a step's rounding must be too small to matter."""
    for leaf, known in zip(_leaves(value), _leaves(node.meta.get("val")), strict=False):
        if _moves(leaf) and isinstance(known, Tensor) and known.dtype not in (torch.float32, torch.float64):
            raise ConversionError(
                f"{Where(node)} turns something that moves into {known.dtype}; use float32 or float64"
            )


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _moves(value: object) -> bool:
    return isinstance(value, Value) and not isinstance(value, Tensor)
