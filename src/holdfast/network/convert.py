"""From a model to a network: the same function, as a chain of pieces that say how steep and how curved they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.network.conversion.assemble import Assembled, assemble, attends
from holdfast.network.conversion.design import Encoder, describe, designs
from holdfast.network.conversion.entrance import Encode, Entrance, the_tensor
from holdfast.network.conversion.equality import (
    Equality,
    ModelInputs,
    compare,
    float64_copy,
    float64_inputs,
    model_logits,
)
from holdfast.network.conversion.families import read_wrapper
from holdfast.network.conversion.parts import refuse
from holdfast.network.embedding import Place
from holdfast.network.network import Network, run
from holdfast.network.normalise import Normalise

#: What moves, in the tensor that enters the model: an image's pixels; the embeddings of all words; that of one word, by
#: its place among those that are no padding; the input of one block, from 0 on.
Perturbation = Literal["pixels", "embeddings"] | tuple[Literal["word", "layer"], int]


@final
@dataclass(frozen=True)
class Converted:
    """A network and the way into it.

    Attributes:
        network: computes the model's logits from `encode(inputs)`; perturbations are measured there.
        encode: a batch of the model's inputs as the network's, float64. An image (b, c, height, width) becomes (b, c,
            pixels), words become their embeddings (b, n, d) without padding; for one word that moves, (b, 1, d), its
            displacement: zero; for a block, the tokens that enter it.
        normalise: the piece that normalises images in front of the model, if that is part of the network.
        equality: how well the network and the model agree on the example; None without one.
    """

    network: Network
    encode: Encode
    normalise: Normalise | None = None
    equality: Equality | None = None


def to_network(
    model: nn.Module,
    example: ModelInputs | None = None,
    *,
    perturb: Perturbation | None = None,
    normalise: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Converted:
    """Turns a classifier into a network that computes the same logits.

    A model whose class defines `to_network(self) -> Network`, and `encode(self, inputs)` where its inputs are neither
    images (b, c, height, width) nor tokens (b, n, d), is asked first, in a float64 copy. Otherwise it is a
    classifier of transformers (ViT, DeiT, BERT, RoBERTa, DistilBERT) or timm (VisionTransformer), the digits ViT, or a
    model of your own around an encoder, as `holdfast.network.conversion.families.torch` describes it. Its attention is
    traced on the example, all the rest is read off its modules; a part that is not known is refused by name.

    Padding of the example is cut out, as no token attends to it. The network then serves inputs of the same length,
    padding and token types, and `encode` refuses others.

    Args:
        model: in evaluation mode.
        example: a batch of what the model takes: images, or what a tokenizer returns. The network and the model are
            compared on it; it may be missing where the model has a `to_network` of its own.
        perturb: what moves; by default the pixels of an image, the embeddings of all words. With ("word", i), the other
            words are those of the example.
        normalise: mean and standard deviation of every channel, if the model takes images that are normalised. The
            network's input is then the image before that, so that radii are in units of its pixels.

    Raises:
        ConversionError: the model is training or is not known, or has a part that is not; or the network's logits on
            the example are not the model's.

    Example:
        >>> converted = to_network(load_digits_vit(), demo_digits().images)
        >>> converted.network(converted.encode(demo_digits().images)).shape
        torch.Size([32, 10])
    """
    for path, module in model.named_modules():
        if module.training:
            raise refuse(path, module, "is in training mode, where dropout may act; call model.eval() first")
    double, piece = float64_copy(model), None if normalise is None else Normalise(*normalise)
    inputs = None if example is None else _normalised(float64_inputs(example), piece)
    made = _own(double) or _read(double, inputs)
    network = made.network if piece is None else made.network.before(piece)
    entrance = replace(made.entrance, encode=lambda inputs: made.entrance.encode(float64_inputs(inputs)))
    converted = replace(_perturbed(network, entrance, perturb, example), normalise=piece)
    return converted if example is None else replace(converted, equality=_compared(converted, double, example))


def check_equal(converted: Converted, model: nn.Module, inputs: ModelInputs) -> Equality:
    """Compares a network with its model, in float64 and in ball arithmetic, on inputs of the model.

    The logits must agree up to rounding, as `holdfast.network.conversion.equality` says.

    Raises:
        ConversionError: they do not; the message says by how much.
    """
    return _compared(converted, float64_copy(model), inputs)


def _compared(converted: Converted, double: nn.Module, inputs: ModelInputs) -> Equality:
    logits = model_logits(double, _normalised(float64_inputs(inputs), converted.normalise))
    return compare(converted.network, converted.encode(inputs), logits)


def _normalised(inputs: ModelInputs, piece: Normalise | None) -> ModelInputs:
    """What the model takes, from images that are not normalised yet."""
    if piece is None:
        return inputs
    images = the_tensor(inputs, "pixel_values")
    if images.ndim != 4 or images.shape[1] != len(piece.mean):
        raise InputError(
            f"normalise has {len(piece.mean)} channels and the images have shape {tuple(images.shape)}; expected "
            f"(b, {len(piece.mean)}, height, width)"
        )
    images = piece.value(images.flatten(-2, -1)).reshape(images.shape)
    if not isinstance(inputs, Mapping):
        return images
    return {**inputs, "pixel_values" if "pixel_values" in inputs else next(iter(inputs)): images}


def _own(model: nn.Module) -> Assembled | None:
    """What the model says of itself."""
    method = getattr(model, "to_network", None)
    if method is None:
        return None
    network = method()
    if not isinstance(network, Network):
        raise refuse("", model, f"has a to_network that returned {type(network).__name__}; expected a Network")
    encode = getattr(model, "encode", _plain)
    return Assembled(network, Entrance(None, lambda inputs: encode(the_tensor(inputs, "inputs")), ()))


def _plain(x: Tensor) -> Tensor:
    """Images (b, c, height, width) with their pixels in a row; tokens (b, n, d) as they are."""
    return x.flatten(-2, -1) if x.ndim == 4 else x


def _read(model: nn.Module, inputs: ModelInputs | None) -> Assembled:
    """What is known of the model's class, or of its attributes."""
    if inputs is None:
        raise InputError(f"{type(model).__name__} needs an example to be converted: pass a batch of its inputs")
    design = describe(model) or read_wrapper(model)
    if design is None:
        known = ", ".join(sorted(designs))
        raise refuse(
            "",
            model,
            f"is of no class that is known: {known}; give it the attributes encoder, pooling and head, as "
            "holdfast.network.conversion.families.torch says, or define to_network on its class",
        )
    if isinstance(design, Encoder):
        raise refuse("", model, "has no classification head; wrap it in a model with encoder, pooling and head")
    return assemble(model, inputs, design)


# -- what moves


def _perturbed(
    network: Network, entrance: Entrance, perturb: Perturbation | None, example: ModelInputs | None
) -> Converted:
    """The network behind what moves."""
    encode, kind = entrance.encode, entrance.kind
    match perturb:
        case None:
            return Converted(network, encode)
        case "pixels" | "embeddings":
            if kind is not None and kind != perturb:
                raise InputError(f"perturb is {perturb!r}, but the input of {network.name} is {kind}")
            return Converted(network, encode)
        case ("word", int(place)):
            if kind == "pixels" or example is None:
                found = "no example" if example is None else "an image"
                raise InputError(
                    f"perturb is {perturb!r}, and there is {found}; expected words, and the other words with it"
                )
            x = encode(example)
            if not 0 <= place < x.shape[-2]:
                raise InputError(f"perturb is {perturb!r}; the example has words 0 to {x.shape[-2] - 1}")
            return Converted(network.before(Place(x, [place])), _one_word(encode, x, place))
        case ("layer", int(index)):
            starts = [i for i, stage in enumerate(network.stages) if attends(stage)]
            if not 0 <= index < len(starts):
                raise InputError(f"perturb is {perturb!r}; {network.name} has layers 0 to {len(starts) - 1}")
            return Converted(network.after(starts[index]), _up_to(encode, network, starts[index]))
    raise InputError(f"perturb is {perturb!r}; expected 'pixels', 'embeddings', ('word', number) or ('layer', number)")


def _one_word(encode: Encode, x: Tensor, place: int) -> Encode:
    def displacement(inputs: ModelInputs) -> Tensor:
        if not torch.equal(encode(inputs), x):
            raise InputError("one word of the example moves, and these are other inputs; convert them too")
        return torch.zeros_like(x[:, place : place + 1])

    return displacement


def _up_to(encode: Encode, network: Network, stages: int) -> Encode:
    def tokens(inputs: ModelInputs) -> Tensor:
        x = encode(inputs)
        for stage in network.stages[:stages]:
            x = run(stage, x)
        return x

    return tokens
