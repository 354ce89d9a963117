"""A torch model as a graph of operators: what it executes on an example, hooks and parametrisations included."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from holdfast.errors import ConversionError, InputError
from holdfast.graph.operators import OPERATORS
from holdfast.graph.reader import Reader, Value

#: One tensor; keyword arguments, such as a tokenizer returns; or positional arguments.
ModelInputs = Tensor | Mapping[str, Any] | tuple[Any, ...]


Environment = dict[fx.Node, Any]

_HERE = str(Path(__file__).parent)


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
    """

    nodes: tuple[fx.Node, ...]
    given: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    output: fx.Node
    name: str
    model: nn.Module = field(repr=False)

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
        found: tuple[Any, ...] = fx.node.map_arg(node.args, values.__getitem__)
        return found

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
        args, kwargs = (fx.node.map_arg(given, values.__getitem__) for given in (node.args, node.kwargs))
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


def export(model: nn.Module, inputs: ModelInputs, *, output: bool = True) -> Program:
    """Records what the model executes on the inputs.

    Args:
        model: in evaluation mode, where dropout does nothing.
        inputs: an example; shapes, and whatever is decided by Python, are taken from it.
        output: whether the logits are looked for in what the model returns.

    Raises:
        ConversionError: it cannot be recorded, or changes its own buffers; the message says why.
    """
    args, kwargs = arguments(inputs)
    flags = [p.requires_grad for p in model.parameters()]
    try:
        with torch.no_grad(), _quiet():
            exported = torch.export.export(model, args, kwargs, strict=False)
            exported = exported.run_decompositions(_Opened())
    except Exception as error:  # whatever the model's own code raises
        raise ConversionError(f"{type(model).__name__} cannot be read: {_reason(error)}") from error
    finally:
        for p, flag in zip(model.parameters(), flags, strict=True):
            p.requires_grad_(flag)
    signature = exported.graph_signature
    changed = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    if changed:
        raise ConversionError(
            f"{type(model).__name__} writes to {', '.join(sorted(changed.values()))} when it runs; a certificate is "
            "about a model that does not change"
        )
    given, names = dict[str, Tensor](), list[str]()
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            names.append(name)
        elif spec.target in exported.constants:
            given[name] = exported.constants[spec.target]
        else:
            given[name] = exported.state_dict[spec.target].detach()
    nodes = tuple(exported.graph.nodes)
    tensors = [name for name in names if any(n.name == name and isinstance(n.meta.get("val"), Tensor) for n in nodes)]
    return Program(
        tuple(n for n in nodes if n.op != "output"),
        given,
        tuple(tensors),
        _logits(exported, type(model).__name__) if output else nodes[-1],
        type(model).__name__,
        model,
    )


class _Opened(dict[Any, Callable[..., Any]]):
    """Operators made of others are taken apart, unless they are read as they are."""

    def __init__(self) -> None:
        table = torch.export.default_decompositions()
        super().__init__(
            {
                op: decompose
                for op, decompose in table.items()
                if getattr(op, "_schema", None) is not None and _name(op) in _TAKEN_APART
            }
        )


#: Operators that are made of simpler ones, in a way that loses nothing.
_TAKEN_APART = {
    "einsum", "addbmm", "baddbmm", "addmv", "tensordot", "inner", "kron", "meshgrid", "cosine_similarity",
    "pixel_shuffle", "pixel_unshuffle", "pad", "tile", "flatten", "unflatten", "chunk", "split", "tensor_split",
    "hstack", "vstack", "dstack", "swapaxes", "moveaxis", "rad2deg", "instance_norm", "adaptive_avg_pool1d", "square",
    "im2col", "std", "std_mean", "var_mean",
}  # fmt: skip


def operator_name(node: fx.Node) -> str:
    """The operator's name without its overload: "add" of aten.add.Tensor."""
    return _name(node.target)


def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return str(schema.name).partition("::")[2] if schema is not None else getattr(target, "__name__", str(target))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch.export says of itself is of no use here."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)


def _reason(error: Exception) -> str:
    """The first sentence of an error, in words that a user of the model can act on."""
    text = str(error)
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        line = re.search(r'File "([^"]+)", line (\d+)', text[text.rfind("Traceback") :]) if "File" in text else None
        where = f" ({line[1]}, line {line[2]})" if line else ""
        return f"its Python code branches on the values of tensors{where}; a certificate needs one formula for all inputs"
    words = " ".join(text.split())
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


def _logits(exported: Any, name: str) -> fx.Node:
    """The node of the tensor that the model returns, or of its `logits`."""
    (end,) = (n for n in exported.graph.nodes if n.op == "output")
    leaves = [leaf for leaf in end.args[0] if isinstance(leaf, fx.Node)]
    if len(leaves) == 1:
        return leaves[0]
    returned = torch.utils._pytree.tree_unflatten(list(range(len(end.args[0]))), exported.call_spec.out_spec)
    place = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if place is None:
        raise ConversionError(f"{name} returns {len(leaves)} tensors and none called logits; expected logits alone")
    found = end.args[0][place]
    assert isinstance(found, fx.Node)
    return found


# -- reading


@final
class Where:
    """Where an operator stands, for messages: its module and the line of the model's own code."""

    def __init__(self, node: fx.Node) -> None:
        self.operator = _name(node.target)
        stack = node.meta.get("nn_module_stack") or {}
        self.module = next((path for path, _ in reversed(stack.values()) if path), "")
        lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
        own = [line for line in lines if "/torch/" not in line[0] and not line[0].startswith(_HERE)]
        self.line = "{}:{}".format(*own[-1]) if own else ""

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "the model"
        return f"{place}: operator {self.operator!r}" + (f" ({self.line})" if self.line else "")


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
        depends = _depends(self._program)
        for node in self._program.nodes:
            if node in moving:
                self.values[node] = moving[node]
                continue
            if not any(_moves(leaf) for source in node.all_input_nodes for leaf in _leaves(self.values[source])):
                self.values[node] = self._program.evaluate(node, self._feed, self.values, lifted=False)
                continue
            args, kwargs = (fx.node.map_arg(given, self.values.__getitem__) for given in (node.args, node.kwargs))
            for source in node.all_input_nodes:
                if source in depends and isinstance(self.values[source], Tensor):
                    self.frontier[source] = self.values[source]
            self.values[node] = self._read(node, args, kwargs)
        found: Value = self.values[self._program.output]
        return found

    def _read(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _name(node.target)
        where = Where(node)
        if name not in OPERATORS:
            raise ConversionError(f"{where} is not known; expected one of those in the guide to your own model")
        try:
            return OPERATORS[name](self._reader, node.target, *args, **kwargs)
        except ConversionError as error:
            raise type(error)(f"{where} {error}") from error


def _lifted(value: Any) -> Any:
    """Float64 in the place of smaller floats."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _moves(value: object) -> bool:
    return isinstance(value, Value) and not isinstance(value, Tensor)


def _depends(program: Program) -> set[fx.Node]:
    """Every node that depends on the model's inputs."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        if node.name in program.inputs or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
