"""A torch model as a graph of operators: what it executes on an example, hooks and parametrisations included."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from holdfast.errors import ConversionError, InputError
from holdfast.graph.operators import OPERATORS

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
    before = _attributes(model)
    try:
        with torch.no_grad(), _quiet(), _masks_as_given():
            exported = torch.export.export(_Answering(model, output), args, kwargs, strict=False)
            for node in exported.graph.nodes:
                if node.target is torch.ops.aten.detach_.default:  # it changes no value, and constants are born with it
                    node.target = torch.ops.aten.detach.default
            if not _readable(exported):
                exported = exported.run_decompositions(dict(_opened()))
    except ConversionError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise ConversionError(f"{type(model).__name__} cannot be read: {reason(error)}") from error
    signature = exported.graph_signature
    changed = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    written = [name.removeprefix("model.") for name in changed.values()]
    if written:
        raise ConversionError(
            f"{type(model).__name__} writes to {', '.join(sorted(written))} when it runs; a certificate is "
            "about a model that does not change"
        )
    after = _attributes(model)
    moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if moved:
        raise ConversionError(
            f"{type(model).__name__} changes its attributes {', '.join(moved)} when it runs; a certificate is about a "
            "model that does not change"
        )
    for node in exported.graph.nodes:
        if _draws(node):
            raise ConversionError(f"{Where(node)} draws at random; a certificate needs one formula for all runs")
    given, names, keys = dict[str, Tensor](), list[str](), dict[str, str]()
    for spec in signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            names.append(name)
        elif spec.target in exported.constants:
            given[name] = exported.constants[spec.target]
        else:
            given[name] = exported.state_dict[spec.target].detach()
            keys[name] = str(spec.target).removeprefix("model.")
    nodes = tuple(exported.graph.nodes)
    tensors = [name for name in names if any(n.name == name and isinstance(n.meta.get("val"), Tensor) for n in nodes)]
    needed = _needed(nodes[-1])
    return Program(
        tuple(n for n in nodes if n in needed),
        given,
        tuple(tensors),
        nodes[-1].args[0][0],
        type(model).__name__,
        model,
        keys,
    )


def _needed(end: fx.Node) -> set[fx.Node]:
    """Inputs, weights, and all nodes that what is returned depends on."""
    needed, pending = {n for n in end.graph.nodes if n.op == "placeholder"}, list(end.all_input_nodes)
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    return needed


def _readable(exported: Any) -> bool:
    """Whether nothing changes in place, and all that depends on inputs is read as it is.

    If so, there is nothing to take apart, and the graph need not be recorded a second time.
    """
    behind = {node for node in exported.graph.nodes if node.name in exported.graph_signature.user_inputs}
    for node in exported.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return False
        if node.op == "call_function" and any(source in behind for source in node.all_input_nodes):
            behind.add(node)
            value = node.meta.get("val")
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if floating and _name(node.target) not in (*OPERATORS, "embedding"):
                return False
    return True


def _attributes(model: nn.Module) -> dict[str, Any]:
    """What modules remember in plain Python values, and the lengths of their collections."""
    attributes: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, int | float | str | None):
                attributes[f"{path}.{name}".strip(".")] = value
            elif isinstance(value, list | tuple | dict | set) and not name.startswith("_"):
                attributes[f"{path}.{name}".strip(".")] = len(value)
    return attributes


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # random in training alone


def _draws(node: fx.Node) -> bool:
    """Whether an operator's value is random; dropout that is switched off is not."""
    name = _name(node.target)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) or name in _RECURRENT:
        return False
    if "dropout" in name:
        return bool(node.args[1]) and bool(node.args[2])
    if "attention" in name:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return True


@cache
def _opened() -> Mapping[Any, Callable[..., Any]]:
    """Operators made of others are taken apart, unless they are read as they are."""
    table: Any = torch.export.default_decompositions()
    return {
        op: decompose
        for op, decompose in table.items()
        if getattr(op, "_schema", None) is not None and _name(op) in _TAKEN_APART
    }


#: Operators that are made of simpler ones, in a way that loses nothing.
_TAKEN_APART = {
    "einsum", "addbmm", "baddbmm", "addmv", "tensordot", "inner", "kron", "meshgrid", "cosine_similarity",
    "pixel_shuffle", "pixel_unshuffle", "pad", "tile", "flatten", "unflatten", "chunk", "split", "tensor_split",
    "hstack", "vstack", "dstack", "swapaxes", "moveaxis", "rad2deg", "adaptive_avg_pool1d", "square",
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


def _masks_as_given() -> contextlib.AbstractContextManager[Any]:
    """`nn.TransformerEncoder` looks whether its mask is causal, to be faster: the only branch on values in torch."""
    return mock.patch.object(
        torch.nn.modules.transformer, "_detect_is_causal_mask", lambda mask, causal, size: bool(causal)
    )


def reason(error: Exception) -> str:
    """The first sentence of an error, in words that a user of the model can act on."""
    text = str(error)
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        line = re.search(r'File "([^"]+)", line (\d+)', text[text.rfind("Traceback") :]) if "File" in text else None
        where = f" ({line[1]}, line {line[2]})" if line else ""
        return (
            f"its Python code branches on the values of tensors{where}; a certificate needs one formula for all inputs"
        )
    words = " ".join(text.split())
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


@final
class _Answering(nn.Module):
    """A model that returns tensors alone: its logits, or whatever tensors it returns."""

    def __init__(self, model: nn.Module, logits: bool) -> None:
        super().__init__()
        self.model, self._logits = model, logits
        self.training = model.training  # of the whole alone: its parts keep their modes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = self.model(*args, **kwargs)
        if self._logits:
            return logits_of(returned, type(self.model).__name__)
        values = returned.values() if isinstance(returned, Mapping) else returned
        values = (values,) if isinstance(values, Tensor) else values
        return tuple(value for value in values if isinstance(value, Tensor))


def logits_of(returned: Any, name: str) -> Tensor:
    """The one tensor that a model returned, or its `logits`."""
    logits = returned
    if not isinstance(returned, Tensor):
        logits = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if isinstance(returned, tuple | list) and len(returned) == 1:
        logits = returned[0]
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        shown = tuple(logits.shape) if isinstance(logits, Tensor) else type(returned).__name__
        raise ConversionError(f"{name} returned {shown}; expected a classifier with logits (b, classes)")
    return logits


@final
class Where:
    """Where an operator stands, for messages: its module and the line of the model's own code."""

    def __init__(self, node: fx.Node) -> None:
        self.operator = _name(node.target)
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
