"""One run of a model on an example: its attention, what it adds to words, and which tokens are padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from jaxtyping import Bool, Float64
from torch import Tensor, nn

from holdfast.attention import AttentionLayer
from holdfast.errors import InputError
from holdfast.network.conversion.equality import ModelInputs
from holdfast.network.conversion.parts import refuse
from holdfast.tracing import trace

#: Which tokens are no padding; None where there is none.
Kept = Bool[Tensor, " n"] | None


@dataclass(frozen=True)
class Seen:
    """What one run of a model shows.

    Attributes:
        layers: every self-attention by the name of its module, rebuilt and compared with what the module returned.
        added: what the modules that add to the words added to each token that is kept.
        keep: which tokens those are.
    """

    layers: Mapping[str, AttentionLayer]
    added: tuple[Float64[Tensor, "n d"], ...]
    keep: Kept


def watch(model: nn.Module, inputs: ModelInputs, added: Sequence[str]) -> Seen:
    """Runs the model once. Padding is cut out of what is seen: no token attends to it.

    Args:
        model: in float64.
        inputs: in float64.
        added: paths of the modules that add to the words.
    """
    keep, outputs = kept(inputs), dict[str, Tensor]()

    def note(path: str, module: nn.Module, args: object, output: Tensor) -> None:
        outputs[path] = output

    with ExitStack() as stack:
        for path in added:
            stack.callback(model.get_submodule(path).register_forward_hook(partial(note, path)).remove)
        layers = {each.name: _cut(each.name, each.layer, keep) for each in trace(model, inputs)}
    return Seen(layers, tuple(_shared(path, outputs[path], keep) for path in added), keep)


def kept(inputs: ModelInputs) -> Kept:
    """The tokens that the attention mask (b, n) keeps: the same in every member of the batch."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is None or bool((mask == 1).all()):
        return None
    if mask.ndim != 2 or not bool((mask == mask[:1]).all()) or not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            f"the attention mask {tuple(mask.shape)} is not one row of 0 and 1 for all inputs; a network has one "
            "pattern of padding: convert inputs of one length together"
        )
    if not bool(mask[0, 0]):
        raise InputError("the attention mask hides the first token; expected padding on the right")
    row: Tensor = mask[0].bool()
    return row


def _cut(name: str, layer: AttentionLayer, keep: Kept) -> AttentionLayer:
    """The layer on the tokens that are kept."""
    if layer.mask is None:
        return layer
    if layer.mask.ndim != 2:
        raise refuse(name, layer, "masks each input in a way of its own; convert one input at a time")
    if keep is None:
        return layer
    if bool(layer.mask[keep][:, ~keep].any()) or layer.score_bias is not None:
        raise refuse(
            name, layer, "attends to tokens that the mask hides, or adds a bias to its scores; remove the padding"
        )
    left = layer.mask[keep][:, keep]
    return layer.with_mask(None if bool(left.all()) else left)


def _shared(path: str, output: Tensor, keep: Kept) -> Float64[Tensor, "n d"]:
    """What is added to the tokens that are kept: the same in every member of the batch."""
    output = output if keep is None else output[:, keep]
    if not bool((output == output[:1]).all()):
        raise InputError(
            f"module {path!r} adds something else to each input of the batch (positions, token types); convert inputs "
            "that share them together"
        )
    return output[0]
