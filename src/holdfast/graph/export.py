"""A torch model as a graph of operators: what it executes on an example, hooks and parametrisations included."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from holdfast.errors import ConversionError, HoldfastError
from holdfast.graph.operators import OPERATORS
from holdfast.graph.program import ModelInputs, Program, Where, arguments, name_of


def export(model: nn.Module, inputs: ModelInputs, *, output: bool = True) -> Program:
    """Records what the model executes on the inputs.

    Args:
        model: in evaluation mode, where dropout does nothing.
        inputs: an example; shapes, and whatever Python decides, are taken from it.
        output: whether to find the logits in what the model returns.

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
        shapes = [str(tuple(t.shape)) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        where = f"; it was given {', '.join(shapes)}" if shapes and not isinstance(error, HoldfastError) else ""
        raise ConversionError(f"{type(model).__name__} cannot be read: {reason(error)}{where}") from error
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

    If so, there is nothing to decompose, and the graph need not be recorded a second time.
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
            if floating and name_of(node.target) not in (*OPERATORS, "embedding"):
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
    name = name_of(node.target)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) or name in _RECURRENT:
        return False
    if "dropout" in name:
        return bool(node.args[1]) and bool(node.args[2])
    if "attention" in name:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    return True


@cache
def _opened() -> Mapping[Any, Callable[..., Any]]:
    """Operators made of others are decomposed, unless they are read as they are."""
    table: Any = torch.export.default_decompositions()
    return {
        op: decompose
        for op, decompose in table.items()
        if getattr(op, "_schema", None) is not None and name_of(op) in _TAKEN_APART
    }


#: Operators that are made of simpler ones, in a way that loses nothing.
_TAKEN_APART = {
    "einsum", "addbmm", "baddbmm", "addmv", "tensordot", "inner", "kron", "meshgrid", "cosine_similarity",
    "pixel_shuffle", "pixel_unshuffle", "pad", "tile", "flatten", "unflatten", "chunk", "split", "tensor_split",
    "hstack", "vstack", "dstack", "swapaxes", "moveaxis", "rad2deg", "adaptive_avg_pool1d", "square",
    "im2col", "std", "std_mean", "var_mean",
}  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch.export says about itself is of no use here."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _masks_as_given() -> contextlib.AbstractContextManager[Any]:
    """`nn.TransformerEncoder` checks whether its mask is causal, to be faster: the only branch on values in torch."""
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
    if isinstance(error, HoldfastError):
        return words
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
