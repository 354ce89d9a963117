"""A model's graph of operators: its nodes, how they are executed, and where each is in the model's own code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, fx, nn

from holdfast.errors import InputError

#: One tensor; keyword arguments, such as a tokenizer returns; or positional arguments.
ModelInputs = Tensor | Mapping[str, Any] | tuple[Any, ...]

Environment = dict[fx.Node, Any]

_HERE = str(Path(__file__).parent)

#: Where graphs are read, wherever the model runs.
CPU = torch.device("cpu")


def placed(value: Any, device: torch.device = CPU) -> Any:
    """The same with its tensors on a device, and that in the place of any other device."""

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device)
        return device if isinstance(leaf, torch.device) else leaf

    return torch.utils._pytree.tree_map(moved, value)


def arguments(inputs: ModelInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@final
@dataclass(frozen=True)
class Program:
    """The operators that a model executes.

    Attributes:
        nodes: in order, `placeholder` and `call_function` alone.
        given: weights, buffers and constants by the name of their placeholder.
        inputs: the names of the placeholders of the model's own inputs, in order.
        output: the node of the logits.
        name: of the model's class.
        model: whose weights `given` holds, and may change in place.
        keys: under which name of the model's state each of these weights stands.
    """

    nodes: tuple[fx.Node, ...]
    given: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    output: fx.Node
    name: str
    model: nn.Module = field(repr=False)
    keys: Mapping[str, str] = field(default_factory=dict)

    def current(self) -> Program:
        """The same operators with the weights that the model has now."""
        state = self.model.state_dict()
        return replace(self, given={**self.given, **{name: state[key] for name, key in self.keys.items()}})

    def execute(self, feed: Mapping[str, Tensor], moving: Mapping[fx.Node, Tensor]) -> Tensor:
        """The logits, with the given values of some nodes; behind these, casts to smaller floats do nothing."""
        values, behind = Environment(), set(moving)
        for node in self.nodes:
            if node in moving:
                values[node] = moving[node]
                continue
            if any(source in behind for source in node.all_input_nodes):
                behind.add(node)
            values[node] = self.evaluate(node, feed, values, lifted=node in behind)
        logits: Tensor = values[self.output]
        return logits

    def constants(self, feed: Mapping[str, Tensor], wanted: Iterable[fx.Node]) -> dict[fx.Node, Tensor]:
        """The values of some nodes that do not depend on what moves."""
        needed, pending = set[fx.Node](), list(wanted)
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        values = Environment()
        for node in self.nodes:
            if node in needed:
                values[node] = self.evaluate(node, feed, values, lifted=False)
        return {node: values[node] for node in wanted}

    def arguments(self, node: fx.Node, feed: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What a node gets, where that does not depend on what moves."""
        values = self.constants(feed, node.all_input_nodes)
        resolved: tuple[Any, ...] = fx.node.map_arg(node.args, values.__getitem__)
        return resolved

    def dependent(self) -> set[fx.Node]:
        """Every node that depends on the model's inputs."""
        dependent: set[fx.Node] = set()
        for node in self.nodes:
            if node.name in self.inputs or any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
        return dependent

    def casts(self, moving: fx.Node) -> bool:
        """Whether something behind the node is computed in a smaller float than float64."""
        behind = {moving}
        for node in self.nodes:
            if any(source in behind for source in node.all_input_nodes):
                behind.add(node)
                value = node.meta.get("val")
                if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
                    return True
        return False

    def evaluate(self, node: fx.Node, feed: Mapping[str, Tensor], values: Environment, *, lifted: bool) -> Any:
        """One node, from the values of those before it; `lifted` with float64 in the place of smaller floats."""
        if node.op == "placeholder":
            if node.name in self.given:
                return self.given[node.name]
            return feed.get(node.name, node.meta.get("val"))
        args, kwargs = looked_up(node, values)
        if lifted:
            args, kwargs = (torch.utils._pytree.tree_map(_lifted, given) for given in (args, kwargs))
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def feed(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """The model's inputs by the names of their placeholders."""
        args, kwargs = arguments(inputs)
        flat = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len(flat) != len(self.inputs):
            raise InputError(f"{self.name} was read with {len(self.inputs)} tensors as inputs; got {len(flat)}")
        return dict(zip(self.inputs, flat, strict=True))


def operator_name(node: fx.Node) -> str:
    """The operator's name without its overload: "add" of aten.add.Tensor."""
    return name_of(node.target)


def name_of(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return str(schema.name).partition("::")[2] if schema is not None else getattr(target, "__name__", str(target))


@final
class Where:
    """Where an operator is, for messages: its module and the line of the model's own code."""

    def __init__(self, node: fx.Node) -> None:
        self.operator = name_of(node.target)
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path.removeprefix("model").removeprefix(".") for path, _ in stack.values() if path]
        self.module = paths[-1] if paths else ""
        lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        own = [line for line in lines if "/torch/" not in line[0] and not line[0].startswith(_HERE)]
        self.line = "{}:{}".format(*own[-1]) if own else ""

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "the model"
        return f"{place}: operator {self.operator!r}" + (f" ({self.line})" if self.line else "")


def looked_up(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, with values in the place of nodes."""
    args: Any = fx.node.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.node.map_arg(node.kwargs, values.__getitem__)
    return args, kwargs


def _lifted(value: Any) -> Any:
    """Float64 in the place of smaller floats."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
