"""How a model's inputs enter its network: the one float tensor as it is, or the embeddings of words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float64
from torch import Tensor, fx

from holdfast.errors import ConversionError, InputError
from holdfast.graph.program import ModelInputs, Program, arguments, operator_name
from holdfast.graph.values import FIXED, Moving, Point, Term

Kind = Literal["pixels", "embeddings"]

#: Operators that hand ids on to an embedding as they are.
_PASSING = {"view", "reshape", "_to_copy", "to", "clone", "detach", "alias", "contiguous", "expand"}


@final
@dataclass(frozen=True)
class Entrance:
    """What moves in a model that was read, and how its inputs become that.

    Attributes:
        program: the operators.
        node: the one whose value moves: an input, or the embeddings of the words.
        moving: that value as a function of the network's input (n, d).
        kind: "embeddings" for words, "pixels" for images (b, c, height, width); None for other tensors.
        kept: which tokens are not padding; None where there is none.
        first: the input that was read, by the names of the placeholders.
        frontier: constants that depend on the inputs, other than through what moves.
    """

    program: Program
    node: fx.Node
    moving: Moving
    kind: Kind | None
    kept: Bool[Tensor, " n"] | None
    first: Mapping[str, Tensor]
    frontier: Mapping[fx.Node, Tensor] = field(default_factory=dict)

    def bound(self, frontier: Mapping[fx.Node, Tensor]) -> Entrance:
        """With the constants that the network depends on."""
        return replace(self, frontier=dict(frontier))

    def admits(self, inputs: ModelInputs) -> bool:
        """Whether the network serves these inputs: they differ from those that were read only in what moves."""
        if isinstance(inputs, Tensor) and self.node.op == "placeholder":
            return inputs.shape[1:] == self.first[self.node.name].shape[1:]
        try:
            return all(self._admits(one) for one in each_of(inputs))
        except InputError:
            return False

    def _admits(self, one: ModelInputs) -> bool:
        feed = self.program.feed(one)
        if any(t.shape != self.first[name].shape for name, t in feed.items()):
            return False
        beside = {name for name in feed if name != self.node.name}
        if all(torch.equal(feed[name], self.first[name]) for name in beside):
            return True
        mask = _mask(self.program, feed)
        if (mask is None) != (self.kept is None):
            return False
        if mask is not None and self.kept is not None and not torch.equal(mask, self.kept):
            return False
        constants = self.program.constants(feed, self.frontier)
        return all(torch.equal(constants[node], known) for node, known in self.frontier.items())

    def encode(self, inputs: ModelInputs) -> Float64[Tensor, "b n d"]:
        """A batch of inputs as they enter the network."""
        check(self.program.name, inputs, self.kind)
        if not self.admits(inputs):
            sizes = ", ".join(str(tuple(t.shape)) for t in self.first.values())
            raise InputError(
                f"these inputs differ from the example ({sizes} for one input) in shape, padding or types; a network "
                "serves one kind: convert these inputs too"
            )
        if isinstance(inputs, Tensor) and self.node.op == "placeholder":
            return inputs.double().reshape(-1, *self.moving.point.shape)
        return torch.cat([self._encode(self.program.feed(one)) for one in each_of(inputs)])

    def _encode(self, feed: Mapping[str, Tensor]) -> Float64[Tensor, "1 n d"]:
        if self.node.op == "placeholder":
            return feed[self.node.name].double().reshape(1, *self.moving.point.shape)
        weight, ids = self.program.arguments(self.node, feed)[:2]
        rows: Tensor = weight.double()[ids].reshape(-1, weight.shape[-1])
        return (rows if self.kept is None else rows[self.kept]).unsqueeze(0)

    def logits(self, x: Float64[Tensor, "1 n d"], one: ModelInputs) -> Float64[Tensor, "1 classes"]:
        """What the model's operators compute from the network's input x, in float64, for one input."""
        row, column = self.moving.row, self.moving.terms[0].column
        value = torch.where(row == FIXED, self.moving.constant, x[0][row.clamp(min=0), column])
        return self.answer(self.program.execute(self.program.feed(one), {self.node: value}))

    def answer(self, logits: Tensor) -> Tensor:
        """The logits of the classes: of a decoder, those of the last token."""
        return logits[:, self.last_token(logits.shape[1])] if logits.ndim == 3 else logits

    def last_token(self, n: int) -> int:
        """The last token that is not padding."""
        if self.kind != "embeddings":
            raise ConversionError(
                f"{self.program.name} returns logits for each of {n} tokens; expected logits (b, classes)"
            )
        return n - 1 if self.kept is None or len(self.kept) != n else int(self.kept.nonzero().max())


def find_entrance(program: Program, first: ModelInputs) -> Entrance:
    """What moves in the model: its one float tensor, or the embeddings of its ids."""
    feed = program.feed(first)
    if "attention_mask" in feed and feed["attention_mask"].is_floating_point():
        raise InputError("attention_mask is a float tensor; expected integers or bools, 1 for words and 0 for padding")
    floats = [name for name in program.inputs if feed[name].is_floating_point()]
    nodes = {node.name: node for node in program.nodes}
    if len(floats) == 1:
        x = feed[floats[0]]
        check(program.name, x, None)
        shape, kind = _matrix(x.shape[1:]), "pixels" if x.ndim == 4 else None
        moving = Point(shape).view(x.shape)
        return Entrance(program, nodes[floats[0]], moving, kind, None, feed)  # type: ignore[arg-type]
    words = [name for name in program.inputs if not feed[name].is_floating_point()]
    if floats or not words:
        raise ConversionError(
            f"{program.name} takes {len(floats)} float tensors; expected one that moves, or ids of words"
        )
    name = "input_ids" if "input_ids" in words else words[0]
    lookups = [n for n in program.nodes if operator_name(n) == "embedding" and _source(n.args[1]) is nodes[name]]
    if len(lookups) != 1:
        raise ConversionError(
            f"{program.name} looks up {name} in {len(lookups)} embeddings; expected one, whose rows are the words"
        )
    (node,) = lookups
    times = sum(operator_name(n) == "embedding" and n.args[0] is node.args[0] for n in program.nodes)
    if times > 1:
        raise ConversionError(f"{program.name} looks up words {times} times; expected once, where they move")
    kept = _mask(program, feed)
    weight, ids = program.arguments(node, feed)[:2]
    rows = weight.double()[ids].reshape(-1, weight.shape[-1])
    n, d = rows.shape
    alive = torch.ones(n, dtype=torch.bool) if kept is None else kept
    if len(alive) != n:
        raise InputError(f"the attention mask has {len(alive)} entries and there are {n} tokens; expected as many")
    row = torch.where(alive, alive.cumsum(0) - 1, FIXED).unsqueeze(-1).expand(n, d)
    ones = torch.ones(n, d, dtype=torch.float64)
    constant = torch.where(alive.unsqueeze(-1), 0.0, rows)
    term = Term(torch.arange(d).expand(n, d), ones * alive.unsqueeze(-1))
    moving = Moving(Point((int(alive.sum()), d)), row, (term,), None, constant).reshape(*ids.shape, d)
    return Entrance(program, node, moving, "embeddings", kept, feed)


def _source(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function" and operator_name(node) in _PASSING:
        node = node.args[0]
    return node


def _mask(program: Program, feed: Mapping[str, Tensor]) -> Bool[Tensor, " n"] | None:
    """The tokens that the attention mask (1, n) keeps; None where it keeps all."""
    mask = feed.get("attention_mask")
    if mask is None or mask.ndim != 2 or bool((mask == 1).all()):
        return None
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
        raise InputError(f"the attention mask {tuple(mask.shape)} is not made of 0 and 1, or hides every token")
    return mask[0].bool()


def _matrix(shape: torch.Size) -> tuple[int, int]:
    """(n, d) for an input: an image (c, height, width) with its pixels in a row, tokens as they are."""
    if len(shape) == 1:
        return 1, shape[0]
    if len(shape) == 3:
        return shape[0], shape[1] * shape[2]
    return math.prod(shape[:-1]), shape[-1]


def check(name: str, inputs: ModelInputs, kind: Kind | None) -> None:
    """Refuses inputs that hold no number, or one that is not finite."""
    for t in torch.utils._pytree.tree_leaves(arguments(inputs)):
        if isinstance(t, Tensor) and (t.ndim < 2 or not t.numel()):
            raise InputError(f"{name} got an input of shape {tuple(t.shape)}; expected a batch (b, …)")
        if isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all()):
            raise InputError(f"{name} got an input with a number that is not finite; expected finite ones")


def first_of(inputs: ModelInputs) -> ModelInputs:
    """The first input of a batch."""
    return next(iter(each_of(inputs)))


def each_of(inputs: ModelInputs) -> list[ModelInputs]:
    """The inputs of a batch one by one, each as a batch of one."""
    if isinstance(inputs, Tensor):
        return [inputs[i : i + 1] for i in range(len(inputs))]
    values = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    sizes = {len(v) for v in values if isinstance(v, Tensor) and v.ndim > 1}
    if len(sizes) != 1:
        raise InputError(f"the inputs are batches of {sorted(sizes)}; expected tensors (b, …) with one b")
    (b,) = sizes

    def cut(v: Any, i: int) -> Any:
        return v[i : i + 1] if isinstance(v, Tensor) and v.ndim > 1 else v

    if isinstance(inputs, Mapping):
        return [{name: cut(v, i) for name, v in inputs.items()} for i in range(b)]
    return [tuple(cut(v, i) for v in values) for i in range(b)]
