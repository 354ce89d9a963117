"""From a model to a network: what the model executes, as a chain of pieces that know how steep and curved they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from holdfast.errors import ConversionError, InputError
from holdfast.graph import structure
from holdfast.graph.assemble import stages
from holdfast.graph.declared import declared
from holdfast.graph.entrance import Entrance, find_entrance, first_of
from holdfast.graph.entries import Value
from holdfast.graph.equality import Equality, check_as_it_runs, check_equal, float64_copy, float64_inputs
from holdfast.graph.export import export
from holdfast.graph.perturbation import Perturbation, perturbed
from holdfast.graph.program import CPU, ModelInputs, Program
from holdfast.graph.prune import pruned
from holdfast.graph.reader import Reader
from holdfast.graph.values import Moving, Point, Term
from holdfast.graph.walk import Walk
from holdfast.layers.tokens.normalise import Normalise
from holdfast.network.network import Head, Network

Encode = Callable[[ModelInputs], Tensor]


@final
@dataclass(frozen=True)
class Converted:
    """A network and the way into it.

    Attributes:
        network: computes the model's logits from `encode(inputs)`; perturbations are measured there.
        encode: a batch of the model's inputs as the network's, float64 on the CPU; the network computes where its input
            is. An image (b, c, height, width) becomes (b, c, pixels), words become their embeddings (b, n, d) without
            padding; if only a part moves, its displacement: zero; for a block, the tokens that enter it.
        normalise: the piece that normalises images before the model, if that is part of the network.
        equality: how well the network and the model agree on the example; None without one.
    """

    network: Network
    encode: Encode
    normalise: Normalise | None = None
    equality: Equality | None = None


@final
@dataclass(frozen=True)
class Reading:
    """A network as it was read, before it is said what moves.

    Attributes:
        network: on the whole input.
        entrance: how the model was read; None where its class declares its network.
        encode: inputs as they enter the network.
    """

    network: Network
    entrance: Entrance | None
    encode: Encode


@final
class Readings:
    """What was read from one model whose weights do not change: inputs of the same kind need no second reading."""

    def __init__(self) -> None:
        self._known: list[Reading] = []
        self._doubles: dict[torch.device, nn.Module] = {}

    def double(self, model: nn.Module, device: torch.device = CPU) -> nn.Module:
        """The model in float64 on a device."""
        if device not in self._doubles:
            self._doubles[device] = float64_copy(model).to(device)
        return self._doubles[device]

    def read(self, model: nn.Module, inputs: ModelInputs | None) -> tuple[Reading, bool]:
        """The network of the model, in float64, for these inputs; and whether it is new."""
        for reading in self._known:
            if reading.entrance is None or (inputs is not None and reading.entrance.admits(inputs)):
                return reading, False
        self._known.append(read(model, inputs))
        return self._known[-1], True


def to_network(
    model: nn.Module,
    example: ModelInputs | None = None,
    *,
    perturb: Perturbation | None = None,
    normalise: tuple[Sequence[float], Sequence[float]] | None = None,
    readings: Readings | None = None,
    device: str = "cpu",
) -> Converted:
    """Turns a classifier into a network that computes the same logits.

    The network is made from the operators that the model executes on the first input of the example: nothing depends on
    the names of its classes and attributes. An unknown operator is refused, with its module and the line of
    the model's code. Holdfast's own models, and classes that define both `forward` and `to_network(self) -> Network`,
    say themselves which network they are.

    Tokens that no answer depends on, such as padding, are left out. The network then serves inputs of the same shape,
    padding and token types, and `encode` refuses others.

    Args:
        model: in evaluation mode. For a decoder that returns logits for every token, the answer is that of the last.
        example: a batch of what the model takes: images, vectors, or what a tokenizer returns. Network and model are
            compared on it and around it; it may be omitted if the model has a `to_network` of its own.
        perturb: what moves, as `holdfast.graph.perturbation` says; by default the pixels of an image, the embeddings of
            all words.
        normalise: mean and standard deviation of every channel, if the model takes normalised images. The
            network's input is then the image before normalisation, so that radii are in units of its pixels.
        readings: what was read from this model before.
        device: where network and model are compared on inputs of a kind that was read before; on the CPU if they do
            not run there, or seem to differ.

    Raises:
        ConversionError: the model is in training mode, or does something unknown; or the network's logits are not
            the model's.

    Example:
        >>> converted = to_network(load_digits_vit(), demo_digits().images)
        >>> converted.network(converted.encode(demo_digits().images)).shape
        torch.Size([32, 10])
    """
    check_evaluating(model)
    readings = readings or Readings()
    piece = None if normalise is None else Normalise(*normalise)
    double = readings.double(model)
    inputs = None if example is None else float64_inputs(example)

    def model_inputs(given: ModelInputs) -> ModelInputs:
        return given if piece is None else normalised(given, piece)

    reading, new = readings.read(double, None if inputs is None else model_inputs(inputs))
    network = reading.network if piece is None else reading.network.before(piece)

    def equality_on(where: torch.device, inputs: ModelInputs) -> Equality:
        there = readings.double(model, where)
        return check_equal(network, reading.entrance, there, inputs, reading.encode, model_inputs, where, around=new)

    equality = None
    if inputs is not None:
        where = CPU if new else torch.device(device)
        try:
            equality = equality_on(where, inputs)
        except (ConversionError, RuntimeError):
            if where == CPU:
                raise
            equality = equality_on(CPU, inputs)
        if new:
            check_as_it_runs(network, reading.entrance, model, inputs, reading.encode, model_inputs)
    moved = perturbed(network, reading.entrance and reading.entrance.kind, reading.encode, perturb, inputs)
    return Converted(moved.network, lambda given: moved.encode(float64_inputs(given)), piece, equality)


def read(model: nn.Module, inputs: ModelInputs | None) -> Reading:
    """Reads a model in float64 on the first of its inputs, or takes the network that it declares."""
    own = declared(model)
    if own is not None:
        return Reading(own[0], None, own[1])
    if inputs is None:
        raise InputError(f"{type(model).__name__} needs an example to be converted: pass a batch of its inputs")
    first = first_of(inputs)
    program = export(model, first)
    entrance = find_entrance(program, first)
    reader = Reader()
    walk = Walk(program, program.feed(first), reader)
    logits = walk.run({entrance.node: entrance.moving})
    point, head = _head(logits, entrance, program)
    chain = pruned(stages(entrance.moving.point, point), entrance.moving.point.shape)
    if chain is None:
        raise _constant(program)
    entrance = entrance.bound(walk.frontier)
    return Reading(Network(chain, head, program.name), entrance, entrance.encode)


def _head(logits: Value, entrance: Entrance, program: Program) -> tuple[Point, Head]:
    """The point of the features, and the linear map from them to the logits."""
    if isinstance(logits, Tensor):
        raise _constant(program)
    value = Reader().moving(logits)
    if len(value.shape) == 3 and value.shape[0] == 1:
        last = entrance.last_token(value.shape[1])
        value = value.rearranged(lambda t: t[:, last])
    if len(value.shape) != 2 or value.shape[0] != 1:
        raise ConversionError(
            f"{program.name} returned {tuple(value.shape)} for one input; expected logits (b, classes)"
        )
    row = int(value.row[0, 0])
    plain = len(value.terms) == 1 and bool((value.terms[0].gain == 1).all()) and not bool(value.constant.any())
    if value.map is None or not plain or bool((value.row != row).any()):
        point = structure.matrix_of(value)
        eye = torch.eye(point.shape[1], dtype=torch.float64)
        return point, Head(eye, torch.zeros(len(eye), dtype=torch.float64))
    columns = value.terms[0].column[0]
    d = value.point.shape[1]
    token = torch.full((1, d), row)
    ones = torch.ones(1, d, dtype=torch.float64)
    features = Moving(value.point, token, (Term(torch.arange(d).unsqueeze(0), ones),), None, ones * 0)
    return structure.matrix_of(features), Head(value.map.matrix[:, columns].mT.contiguous(), value.map.bias[columns])


def _constant(program: Program) -> ConversionError:
    return ConversionError(f"the logits of {program.name} do not depend on what moves")


def check_evaluating(model: nn.Module) -> None:
    """Refuses a model in training mode."""
    for path, module in model.named_modules():
        if module.training:
            name = f"module {path!r}" if path else "the model"
            raise ConversionError(
                f"{name} ({type(module).__name__}) is in training mode, where dropout may act; call model.eval() first"
            )


def normalised(inputs: ModelInputs, piece: Normalise) -> ModelInputs:
    """What the model takes, from images that are not yet normalised."""
    images = inputs if isinstance(inputs, Tensor) else _image_of(inputs)
    if images.ndim != 4 or images.shape[1] != len(piece.mean):
        raise InputError(
            f"normalise has {len(piece.mean)} channels and the images have shape {tuple(images.shape)}; expected "
            f"(b, {len(piece.mean)}, height, width)"
        )
    changed = piece.value(images.flatten(-2, -1)).reshape(images.shape)
    if not isinstance(inputs, Mapping):
        return changed
    return {name: changed if value is images else value for name, value in inputs.items()}


def _image_of(inputs: ModelInputs) -> Tensor:
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    images = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    if len(images) != 1:
        raise InputError(f"normalise was given, and {len(images)} of the inputs are float tensors; expected one image")
    return images[0]
