"""A torch model as a graph of operators: what it executes on an example, hooks and parametrisations included."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from holdfast.errors import ConversionError, InputError
from holdfast.graph.operators import OPERATORS
from holdfast.graph.reader import Reader, Value

#: One tensor; keyword arguments, such as a tokenizer returns; or positional arguments.
ModelInputs = Tensor | Mapping[str, Any] | tuple[Any, ...]


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


def _name(target: Any) -> str:
    """The operator's name without its overload: "add" of aten.add.Tensor."""
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
        own = [line for line in lines if "/torch/" not in line[0]]
        self.line = "{}:{}".format(*(own or lines)[-1]) if lines else ""

    def __str__(self) -> str:
        place = f"module {self.module!r}" if self.module else "the model"
        return f"{place}: operator {self.operator!r}" + (f" ({self.line})" if self.line else "")


Environment = dict[fx.Node, Any]


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
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
                continue
            args, kwargs = (fx.node.map_arg(a, self.values.__getitem__) for a in (node.args, node.kwargs))
            if not any(_moves(leaf) for leaf in torch.utils._pytree.tree_leaves((args, kwargs), is_leaf=_moves)):
                with torch.no_grad():
                    self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                continue
            for source in node.all_input_nodes:
                if source in depends and isinstance(self.values[source], Tensor):
                    self.frontier[source] = self.values[source]
            self.values[node] = self._read(node, args, kwargs)
        found: Value = self.values[self._program.output]
        return found

    def _placeholder(self, node: fx.Node) -> Any:
        if node.name in self._program.given:
            return self._program.given[node.name]
        return self._feed.get(node.name, node.meta.get("val"))

    def _read(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = _name(node.target)
        where = Where(node)
        if name not in OPERATORS:
            raise ConversionError(f"{where} is not known; expected one of those in the guide to your own model")
        try:
            return OPERATORS[name](self._reader, node.target, *args, **kwargs)
        except ConversionError as error:
            raise type(error)(f"{where} {error}") from error


def _moves(value: object) -> bool:
    return isinstance(value, Value) and not isinstance(value, Tensor)


def _depends(program: Program) -> set[fx.Node]:
    """Every node that depends on the model's inputs."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        if node.name in program.inputs or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
