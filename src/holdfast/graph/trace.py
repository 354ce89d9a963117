"""Every self-attention of an unmodified model as an `AttentionLayer` at its real input, checked against the model.

The model's graph is run once. Around each attention it is read backwards, to the tensor X that enters the maps of
queries, keys and values, and forwards, to the output map; all other operators are only executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from holdfast.attention import AttentionLayer
from holdfast.errors import ConversionError, HoldfastError, InputError, UnsupportedAttentionError
from holdfast.graph.attend import Attended
from holdfast.graph.export import export
from holdfast.graph.head_norms import UnknownAttentionError
from holdfast.graph.operators import MOVING, OPERATORS
from holdfast.graph.program import Environment, ModelInputs, Program, Where, arguments, operator_name, placed
from holdfast.graph.reader import Reader
from holdfast.graph.scores import Scores
from holdfast.graph.values import Moving, Point

#: The relative error that a rebuilt layer may have: rounding in the model's dtype.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}

_PRODUCTS = {"matmul", "bmm"}
_MAPS = {"linear", "addmm", "convolution", "conv1d"}
_KERNEL = "scaled_dot_product_attention"
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}


@final
@dataclass(frozen=True)
class TracedLayer:
    """One self-attention of a model.

    Attributes:
        name: qualified name of its module; with #1, #2, … where the module runs more than once.
        layer: its output map included, if one follows, without residual.
        x: what enters the query, key and value maps.
        rebuild_error: ‖layer(x) - what the model computed‖ / ‖what it computed‖, with layer(x) in float64. Queries
            without any key (padding) are left out: the layer lets them attend to themselves.
    """

    name: str
    layer: AttentionLayer
    x: Float[Tensor, "b n d"] = field(repr=False)
    rebuild_error: float


def trace(model: nn.Module, inputs: ModelInputs) -> list[TracedLayer]:
    """Finds every dot-product self-attention of a model.

    Args:
        model: unmodified, in the state in which it is to be analyzed: call `eval()` if it has dropout.
        inputs: one tensor; a mapping of keyword arguments (what a tokenizer returns); or a tuple of arguments.

    Raises:
        UnsupportedAttentionError: some attention of the model cannot be represented by an `AttentionLayer`, or the
            rebuilt layer does not return what the model computed; the message names the module and what is there.

    Example:
        >>> for layer in trace(bert, tokenizer(["a sentence"], return_tensors="pt")):
        ...     print(layer.name, local_lipschitz(layer.layer, layer.x).value)
    """
    return list(iter_trace(model, inputs))


def iter_trace(model: nn.Module, inputs: ModelInputs) -> Iterator[TracedLayer]:
    """The layers of `trace` one after the other, each as soon as it has been computed."""
    return Tracer(model, inputs).layers(inputs)


@final
class Tracer:
    """Traces a model repeatedly: its graph is recorded once, and run with the model's current weights.

    Args:
        model: whose weights may change in place.
        inputs: an example; later inputs have its shapes.
    """

    def __init__(self, model: nn.Module, inputs: ModelInputs) -> None:
        _call(model, inputs)
        try:
            self._program = export(model, inputs, output=False)
        except ConversionError as error:
            raise UnsupportedAttentionError(str(error)) from error
        self._near = _near(self._program)
        if not self._near.attentions:
            raise UnsupportedAttentionError(
                f"{self._program.name} computed no dot-product attention on this input; expected a transformer"
            )
        self._names = Counter(Where(node).module for node in self._near.attentions)

    def layers(self, inputs: ModelInputs) -> Iterator[TracedLayer]:
        """Every attention at these inputs."""
        seen = Counter[str]()
        for traced in _Pass(self._program.current(), self._near).run(inputs):
            seen[traced.name] += 1
            name = traced.name if self._names[traced.name] == 1 else f"{traced.name}#{seen[traced.name]}"
            yield TracedLayer(name, traced.layer, traced.x, traced.rebuild_error)


def _call(model: nn.Module, inputs: ModelInputs) -> None:
    """Runs the model, so that inputs that it does not take are refused in its own words."""
    args, kwargs = arguments(inputs)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except HoldfastError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{type(model).__name__} does not take these inputs: {reason}") from error


@final
@dataclass(frozen=True)
class _Near:
    """Which nodes are read.

    Attributes:
        attentions: kernels, and softmaxes whose output is multiplied by something.
        nodes: those, and what lies between X and them: maps, and what is done to their outputs.
        content: what depends on the tensors that enter these maps; the rest, such as masks, is constant.
        maps: linear maps, near or not.
    """

    attentions: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]
    content: frozenset[fx.Node]
    maps: frozenset[fx.Node]


def _near(program: Program) -> _Near:
    calls = [node for node in program.nodes if node.op == "call_function"]
    attentions, ends = list[fx.Node](), list[fx.Node]()
    for node in calls:
        products = _products(node) if operator_name(node) in _SOFTMAX else []
        if operator_name(node) == _KERNEL or products:
            attentions.append(node)
            ends += [node, *products]
    near, entering, dependent = set[fx.Node](), set[fx.Node](), program.dependent()
    pending = [(node, False) for node in ends]
    while pending:
        node, mapped = pending.pop()
        name = operator_name(node) if node.op == "call_function" else ""
        if name in MOVING or (not mapped and name in OPERATORS):
            if node not in near:
                near.add(node)
                pending += [(source, mapped or _maps(node, dependent)) for source in node.all_input_nodes]
        elif mapped:
            entering.add(node)
    maps = frozenset(node for node in calls if _maps(node, dependent))
    return _Near(tuple(attentions), frozenset(near), frozenset(_content(program, entering)), maps)


def _maps(node: fx.Node, dependent: set[fx.Node]) -> bool:
    """Whether a node is a linear map: one by its name, or a product with something that is the same for all inputs."""
    name = operator_name(node)
    return name in _MAPS or (name in _PRODUCTS and any(source not in dependent for source in node.all_input_nodes))


def _products(softmax: fx.Node) -> list[fx.Node]:
    """The products that probabilities enter, and the views on the way."""
    reached = [softmax]
    for node in reached:
        reached += [user for user in node.users if user.op == "call_function" and operator_name(user) in MOVING]
    products = [user for node in reached for user in node.users if operator_name(user) in _PRODUCTS]
    return [*reached[1:], *products] if products else []


def _content(program: Program, entering: set[fx.Node]) -> set[fx.Node]:
    """What depends on embeddings, or on an input of which the tensors that enter some map are made."""
    above = set(entering)
    for node in reversed(program.nodes):
        if any(user in above for user in node.users):
            above.add(node)
    dependent, content = program.dependent(), set[fx.Node]()
    for node in program.nodes:
        value = node.meta.get("val")
        floating = isinstance(value, Tensor) and value.is_floating_point()
        starts = node.name in program.inputs and floating and node in above
        looked_up = node.op == "call_function" and operator_name(node) == "embedding" and node in dependent
        if starts or looked_up or any(source in content for source in node.all_input_nodes):
            content.add(node)
    return content


@final
@dataclass
class _Open:
    """An attention whose output map has not been met yet."""

    name: str
    attended: Attended
    x: Tensor


@final
class _Pass:
    """One run of a program, with what is near attention read beside."""

    def __init__(self, program: Program, near: _Near) -> None:
        self._program, self._near = program, near
        self._values, self._symbols = Environment(), dict[fx.Node, Any]()
        self._concrete: dict[Point, Tensor] = {}
        self._given: dict[Any, Moving] = {}
        self._open: dict[Point, tuple[_Open, Tensor]] = {}

    def run(self, inputs: ModelInputs) -> Iterator[TracedLayer]:
        feed = self._program.feed(inputs)
        last = _last_uses(self._program)
        self._reader = Reader(batch=_batch(feed))
        for node in self._program.nodes:
            self._values[node] = self._program.evaluate(node, feed, self._values, lifted=False)
            yield from self._read(node)
            for gone in last.get(node, ()):
                self._values.pop(gone, None)
                self._symbols.pop(gone, None)
        for one, output in self._open.values():  # nothing linear follows
            yield self._close(one, None, output)

    def _read(self, node: fx.Node) -> Iterator[TracedLayer]:
        """Reads the node where it is near an attention or follows one."""
        if node.op != "call_function":
            return
        name = operator_name(node)
        behind = [s for s in node.all_input_nodes if self._behind(s) is not None]
        if behind and node in self._near.maps:
            symbol = self._symbols[behind[0]]
            one, _ = self._open.pop(symbol.point)
            mapped = self._map(node, symbol)
            if mapped is not None:
                yield self._close(one, mapped, self._values[node])
                return
            self._open[symbol.point] = (one, self._values[behind[0]])
        if node not in self._near.nodes and not (behind and name in MOVING):
            return
        before = len(self._reader.attended)
        symbol = self._symbol(node, name)
        if symbol is not None:
            self._symbols[node] = symbol
        if len(self._reader.attended) > before:
            self._opened(node, self._reader.attended.pop())

    def _behind(self, node: fx.Node) -> Point | None:
        symbol = self._symbols.get(node)
        return symbol.point if isinstance(symbol, Moving) and symbol.point in self._open else None

    def _symbol(self, node: fx.Node, name: str) -> Any:
        args: Any = fx.node.map_arg(node.args, self._argument)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._argument)
        try:
            return OPERATORS[name](self._reader, node.target, *placed(args), **placed(kwargs))
        except ConversionError as error:
            known = any(isinstance(self._symbols.get(source), Scores) for source in node.all_input_nodes)
            if known or isinstance(error, UnknownAttentionError) or node in self._near.attentions:
                raise UnsupportedAttentionError(f"{Where(node)} {error}") from error
            return None  # an operator that is only executed

    def _argument(self, node: fx.Node) -> Any:
        """What a node is for the reader: known, or a point of its own where it depends on the inputs."""
        if node in self._symbols:
            return self._symbols[node]
        value = self._values[node]
        if not isinstance(value, Tensor) or node not in self._near.content or value.ndim < 2:
            return value
        given = _memory(value) if node.op == "placeholder" else None
        if given in self._given:  # one tensor for queries, keys and values
            self._symbols[node] = self._given[given]
            return self._symbols[node]
        point = Point((value[..., 0].numel(), value.shape[-1]))
        self._concrete[point] = value.detach().reshape(point.shape)
        self._symbols[node] = point.view(value.shape)
        if given is not None:
            self._given[given] = self._symbols[node]
        return self._symbols[node]

    def _opened(self, node: fx.Node, attended: Attended) -> None:
        point = attended.source
        if point not in self._concrete:
            what = point.step.label if point.step is not None else ""
            raise UnsupportedAttentionError(
                f"{Where(node)} attends by more than linear maps of one tensor: found {what or 'a sum'} before it"
            )
        x = self._concrete[point][attended.rows.flatten()]
        x = x.reshape(*attended.rows.shape, point.shape[1])
        one = _Open(Where(node).module, attended, x)
        self._open[attended.value.point] = (one, self._values[node])

    def _map(self, node: fx.Node, symbol: Moving) -> Moving | None:
        """A map that takes all heads' outputs, as a function of these; None for any other."""
        read = self._symbol(node, operator_name(node))
        if not isinstance(read, Moving) or read.map is None or read.point is not symbol.point:
            return None
        return read

    def _close(self, one: _Open, mapped: Moving | None, output: Tensor) -> TracedLayer:
        """The layer with its output map, compared with what the model computed."""
        layer = one.attended.layer
        dtype = one.x.dtype if one.x.dtype in (torch.float32, torch.float64) else torch.float32
        if mapped is not None and mapped.map is not None:
            w_o, b_o = mapped.map.matrix, mapped.map.bias
            w_o = w_o.reshape(*layer.w_o.shape[:2], -1)
            layer = layer.replace(w_o=w_o, b_o=b_o if bool(b_o.any()) else None)
        layer = layer.to(device=one.x.device)
        error = _distance(one, layer, mapped, output)
        most = _TOLERANCE.get(output.dtype, 1e-5)
        if not error <= most:
            raise UnsupportedAttentionError(
                f"module {one.name!r}: the layer that was read differs from what the model computed by {error:.1e}, "
                f"relatively; expected at most {most:.0e}{self._narrower(output.dtype)}"
            )
        return TracedLayer(one.name, layer.to(dtype), one.x.to(dtype), error)

    def _narrower(self, dtype: torch.dtype) -> str:
        """What to do where the model computes in fewer digits than its weights have."""
        values = (node.meta.get("val") for node in self._near.content if node.op == "call_function")
        if dtype != torch.float64 or not any(isinstance(v, Tensor) and v.dtype == torch.float32 for v in values):
            return ""
        return ". The model casts to float32 inside, whatever its weights are: trace it in float32, by model.float()"


def _distance(one: _Open, layer: AttentionLayer, mapped: Moving | None, output: Tensor) -> float:
    """How far the layer is from what the model computed, relatively, over the queries that have a key."""
    computed, keep = layer.double()(one.x.double()), ~one.attended.lonely
    if mapped is not None:
        rows = mapped.row[..., 0].flatten()
        computed, keep = computed.flatten(0, 1)[rows], keep.flatten()[rows]
        real = output.reshape(computed.shape).double()
    else:
        _, n, k = one.attended.value.shape
        real = output.reshape(len(one.x), -1, n, k).movedim(1, 2).flatten(-2).double()
    difference, size = (torch.linalg.vector_norm(t[keep]) for t in (computed - real, real))
    return float(difference / size) if float(size) else float(difference)


def _memory(t: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Where a tensor's numbers stand."""
    return t.data_ptr(), t.shape, t.stride()


def _batch(feed: Any) -> int:
    return next((len(t) for t in feed.values() if t.ndim > 0), 1)


def _last_uses(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """After which node each value is no longer needed."""
    order = {node: place for place, node in enumerate(program.nodes)}
    uses: dict[fx.Node, list[fx.Node]] = {}
    for node in program.nodes:
        places = [order[user] for user in node.users if user in order]
        if places:
            uses.setdefault(program.nodes[max(places)], []).append(node)
    return uses
