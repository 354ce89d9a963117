"""ONNX files as torch models: the nodes that depend on the input are executed in torch, one module for each.

What comes out is a model like any other: its graph is read, and it can be certified, traced and attacked. What depends
on weights and shapes alone is computed once, by the reference implementation of the `onnx` package.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.errors import ConversionError, InputError
from holdfast.extras import available, require
from holdfast.graph.onnx_call import Array, Call, Value
from holdfast.graph.onnx_operators import OPERATORS
from holdfast.storage import Pathlike

#: The oldest operator set that is read; before it, operators broadcast in ways of their own.
_OLDEST = 7
_LOOK_AT_SHAPES = {"Shape", "Size"}  # these depend on nothing else of their input
_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
_DOMAINS = ("", "ai.onnx")
#: How far logits may be from those of another program, relative to the largest of them: both compute in float32.
SINGLE = 1e-4


@final
class OnnxModel(nn.Module):
    """The network of an ONNX file.

    Inputs are executed one by one, as batches of one: a file's shapes are often those of one input.

    Args:
        path: of the file.

    Example:
        >>> model = OnnxModel("model.onnx")
        >>> logits = model(torch.zeros(1, 3, 32, 32))
    """

    def __init__(self, path: Pathlike) -> None:
        super().__init__()
        onnx = require("onnx", "onnx")
        self.name = Path(path).name
        proto = _load(onnx, path)
        self._file: bytes = proto.SerializeToString()
        self._opset = next((o.version for o in proto.opset_import if o.domain in _DOMAINS), 0)
        if self._opset < _OLDEST:
            raise ConversionError(f"{self.name} has operator set {self._opset}; expected {_OLDEST} or newer")
        graph = proto.graph
        self._known: dict[str, Array] = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        inputs = [value for value in graph.input if value.name not in self._known]
        self._inputs = {value.name: _shape(value) for value in inputs}
        self._output = self._only_output([value.name for value in graph.output])
        nodes = _needed(graph.node, self._output)
        self._check(nodes)
        left = self._fold(nodes)
        self.weights, self.node = nn.Module(), nn.Module()
        self._weights: dict[str, str] = {}
        for node, name in zip(left, _names(left), strict=True):
            self.node.add_module(name, _OnnxNode(node, self._opset))
        # As in torch's own modules: the statistics of a batch normalisation are buffers, all else is parameters.
        statistics = {name for node in left if node.op_type == "BatchNormalization" for name in node.input[3:5]}
        for place, name in enumerate(name for name, array in self._known.items() if array.dtype.kind == "f"):
            self._weights[name] = f"{place} {name.replace('.', ':')}"
            weight = torch.from_numpy(self._known[name].copy())
            if name in statistics:
                self.weights.register_buffer(self._weights[name], weight)
            else:
                self.weights.register_parameter(self._weights[name], nn.Parameter(weight, requires_grad=False))
        self._by_shape: dict[Any, dict[str, Array]] = {}
        self.eval()

    @property
    def shapes(self) -> tuple[tuple[int | None, ...], ...]:
        """The shape of each input as the file has it; None where it leaves a size open."""
        return tuple(self._inputs.values())

    # -- reading the file

    def _only_output(self, outputs: Sequence[str]) -> str:
        if len(outputs) != 1 and "logits" not in outputs:
            raise ConversionError(f"{self.name} has outputs {', '.join(outputs)}; expected one, or one called logits")
        return outputs[0] if len(outputs) == 1 else "logits"

    def _check(self, nodes: Sequence[Any]) -> None:
        """Refuses operators that are not known and depend on the values of an input."""
        behind = set(self._inputs)
        for node in nodes:
            if node.domain not in _DOMAINS:
                raise ConversionError(f"{_where(node)} is of the domain {node.domain!r}; expected standard operators")
            if node.op_type in _RANDOM:
                raise ConversionError(f"{_where(node)} draws at random; a certificate needs one formula for all runs")
            if any(a.HasField("g") or a.graphs for a in node.attribute):
                raise ConversionError(f"{_where(node)} chooses or repeats a graph of its own; expected one graph")
            if node.op_type in _LOOK_AT_SHAPES or not behind.intersection(node.input):
                continue
            behind.update(node.output)
            if node.op_type not in OPERATORS:
                raise ConversionError(f"{_where(node)} is not known; expected one of {', '.join(sorted(OPERATORS))}")

    def _fold(self, nodes: Sequence[Any]) -> list[Any]:
        """Computes what depends on weights alone; the other nodes are left."""
        left = []
        for node in nodes:
            if all(name in self._known for name in node.input if name):
                self._known.update(_computed(node, self._known, self._opset))
            else:
                left.append(node)
        used = {name for node in left for name in node.input} | {self._output}
        self._known = {name: array for name, array in self._known.items() if name in used}
        return left

    # -- execution

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """The logits (b, classes) of inputs in the file's order, or by name."""
        given = dict(zip(self._inputs, inputs, strict=False)) | named
        if given.keys() != self._inputs.keys() or len(inputs) + len(named) != len(self._inputs):
            raise InputError(f"{self.name} takes {', '.join(self._inputs)}; got {len(inputs) + len(named)} tensors")
        batch = {len(x) if x.ndim else 0 for x in given.values()}
        if len(batch) != 1 or not min(batch):
            raise InputError(
                f"the inputs of {self.name} are batches of {sorted(batch)}; expected tensors (b, …) of one b"
            )
        (b,) = batch
        self._check_shapes(given)
        if b == 1:
            return self._execute(given)
        return torch.cat([self._execute({name: x[i : i + 1] for name, x in given.items()}) for i in range(b)])

    def _check_shapes(self, given: Mapping[str, Tensor]) -> None:
        for name, x in given.items():
            expected = self._inputs[name]
            first, *rest = expected or (None,)
            fits = len(x.shape) == len(expected) and all(e in (None, s) for e, s in zip(rest, x.shape[1:], strict=True))
            if first not in (None, 1) or not fits:
                shown = ", ".join("any" if size is None else str(size) for size in expected)
                raise InputError(
                    f"{self.name} takes {name} of shape ({shown}); got {tuple(x.shape)}"
                    + ("" if first in (None, 1) else "; expected a file for one input at a time, or for any number")
                )

    def _execute(self, given: Mapping[str, Tensor]) -> Tensor:
        dtype = next((x.dtype for x in given.values() if x.is_floating_point()), self._dtype)
        known = self._by_shape.setdefault(tuple(tuple(x.shape) for x in given.values()), {})
        values: dict[str, Value] = {**self._known, **given}

        def tensor(name: str, array: Array) -> Tensor:
            if name in self._weights:
                weight: Tensor = getattr(self.weights, self._weights[name])
                return weight if weight.dtype == dtype else weight.to(dtype)  # a trace of the model shows no cast
            if array.dtype.kind == "f":
                return torch.tensor(array.tolist(), dtype=dtype)
            if array.dtype.kind not in "biu":
                raise ConversionError(f"{self.name} holds {array.dtype} in {name!r}; expected floats or whole numbers")
            return torch.tensor(array.tolist(), dtype=torch.bool if array.dtype.kind == "b" else torch.int64)

        for step in self.node.children():
            assert isinstance(step, _OnnxNode)
            own = [values[name] if name else None for name in step.inputs]
            if step.operator in _LOOK_AT_SHAPES:
                own = [np.empty(own[0].shape, np.bool_)]  # type: ignore[union-attr]
            if all(not isinstance(value, Tensor) for value in own):
                if step.outputs[0] not in known:
                    known.update(step.computed(own))
                values.update({name: known[name] for name in step.outputs if name})
            else:
                values.update(zip(step.outputs, step(own, tensor), strict=False))
        logits = values[self._output]
        return logits if isinstance(logits, Tensor) else tensor("", logits)

    @property
    def _dtype(self) -> torch.dtype:
        return next((w.dtype for w in self.weights.state_dict().values()), torch.float32)

    # -- what others compute

    def check(self, inputs: Tensor | Mapping[str, Any] | tuple[Any, ...], logits: Tensor) -> None:
        """Refuses logits that differ from the file's.

        Args:
            inputs: what the model was called with.
            logits: what it returned.
        """
        expected = self.executed(inputs).double()
        apart, size = float((expected - logits).abs().max()), float(expected.abs().max())
        if not apart <= SINGLE * size:
            raise ConversionError(
                f"{self.name}: logits differ from those of the file, executed by {_executor()}, by {apart:.2g}; the "
                f"largest is {size:.2g}, and rounding in float32 explains {SINGLE:g} of it"
            )

    def executed(self, inputs: Tensor | Mapping[str, Any] | tuple[Any, ...]) -> Tensor:
        """The logits as onnxruntime computes them, or the reference of the `onnx` package where that is missing."""
        if isinstance(inputs, Mapping):
            inputs = tuple(inputs[name] for name in self._inputs)
        given = [x.detach().cpu().numpy() for x in ((inputs,) if isinstance(inputs, Tensor) else inputs)]
        rows = [self._run([x[i : i + 1] for x in given]) for i in range(len(given[0]))]
        return torch.from_numpy(np.concatenate(rows))

    def _run(self, given: Sequence[Array]) -> Array:
        proto = require("onnx", "onnx").load_from_string(self._file)
        types = {value.name: _numpy_type(value) for value in proto.graph.input}
        feed = {name: x.astype(types[name]) for name, x in zip(self._inputs, given, strict=True)}
        try:
            session = _session(self._file) if _executor() == "onnxruntime" else _reference(proto)
            (logits,) = session.run([self._output], feed)
        except Exception as error:  # whatever the other program raises
            reason = " ".join(str(error).split())[:200]
            raise ConversionError(f"{_executor()} cannot execute {self.name}: {reason}") from error
        return np.asarray(logits)


@final
class _OnnxNode(nn.Module):
    """One node: a module by itself, so that messages about the model's graph name it."""

    def __init__(self, node: Any, opset: int) -> None:
        super().__init__()
        onnx = require("onnx", "onnx")
        self.operator: str = node.op_type
        self.inputs, self.outputs = tuple(node.input), tuple(node.output)
        self._opset, self._where = opset, _where(node)
        self._attributes = {a.name: _plain(onnx.helper.get_attribute_value(a)) for a in node.attribute}
        self._node: bytes = node.SerializeToString()

    def forward(self, given: Sequence[Value | None], to_tensor: Callable[[str, Array], Tensor]) -> tuple[Tensor, ...]:
        outputs = sum(1 for name in self.outputs if name)
        call = Call(self.operator, self._opset, self._attributes, outputs, self.inputs, given, to_tensor)
        try:
            results = OPERATORS[self.operator](call)
        except ConversionError as error:
            raise ConversionError(f"{self._where} {error}") from error
        return results if isinstance(results, tuple) else (results,)

    def computed(self, given: Sequence[Value | None]) -> dict[str, Array]:
        """The results by name, where all inputs are known."""
        node = require("onnx", "onnx").NodeProto.FromString(self._node)
        return _computed(node, dict(zip(self.inputs, given, strict=True)), self._opset)


# -- parts of a file


def _load(onnx: Any, path: Pathlike) -> Any:
    try:
        return onnx.load(os.fspath(path))
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected an ONNX file") from None
    except Exception as error:  # whatever protobuf and onnx raise on another kind of file
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{os.fspath(path)!r} cannot be read as ONNX: {reason}") from None


def _shape(value: Any) -> tuple[int | None, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim)


def _numpy_type(value: Any) -> Any:
    return require("onnx", "onnx").helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _where(node: Any) -> str:
    name = node.name or f"behind {', '.join(node.input)}"
    return f"node {name!r}: operator {node.op_type!r}"


def _needed(nodes: Sequence[Any], output: str) -> list[Any]:
    """The nodes on which the output depends, in order."""
    wanted, needed = {output}, []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            needed.append(node)
    return needed[::-1]


def _names(nodes: Sequence[Any]) -> list[str]:
    """A name for each node that a module can have."""
    given = Counter(node.name for node in nodes)
    return [
        (node.name if node.name and given[node.name] == 1 else f"{node.op_type} {place}").replace(".", ":")
        for place, node in enumerate(nodes)
    ]


def _plain(attribute: Any) -> Any:
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def _computed(node: Any, known: Mapping[str, Any], opset: int) -> dict[str, Array]:
    """The results of one node by name, by the reference implementation."""
    onnx = require("onnx", "onnx")
    inputs = [onnx.helper.make_tensor_value_info(name, 0, None) for name in dict.fromkeys(node.input) if name]
    outputs = [onnx.helper.make_tensor_value_info(name, 0, None) for name in node.output if name]
    graph = onnx.helper.make_graph([node], "one node", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        arrays = _reference(model).run(None, {value.name: known[value.name] for value in inputs})
    except Exception as error:  # whatever the reference implementation raises
        raise ConversionError(f"{_where(node)} cannot be computed: {' '.join(str(error).split())[:200]}") from error
    return {value.name: np.asarray(array) for value, array in zip(outputs, arrays, strict=True)}


def _reference(proto: Any) -> Any:
    require("onnx", "onnx")
    return import_module("onnx.reference").ReferenceEvaluator(proto)


def _executor() -> str:
    return "onnxruntime" if available("onnxruntime") else "onnx.reference"


@lru_cache(maxsize=4)
def _session(file: bytes) -> Any:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
