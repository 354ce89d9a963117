"""How inputs become tokens: patches of an image, words, or vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.network.affine import Affine
from holdfast.network.base import Piece
from holdfast.network.conversion.design import Embedding
from holdfast.network.conversion.equality import ModelInputs
from holdfast.network.conversion.example import Kept, Seen, kept
from holdfast.network.conversion.parts import Parts, join, refuse
from holdfast.network.embedding import AddPositions, PatchEmbedding, Place

#: A model's inputs, floating-point numbers in float64, as the network's.
Encode = Callable[[ModelInputs], Float64[Tensor, "b n d"]]


@dataclass(frozen=True)
class Entrance:
    """The way into a network: what its input is, if that is known; how inputs get there; the pieces before blocks."""

    kind: Literal["pixels", "embeddings"] | None
    encode: Encode
    pieces: tuple[Piece, ...]


def read_entrance(parts: Parts, prefix: str, design: Embedding, seen: Seen, inputs: ModelInputs) -> Entrance:
    """The entrance of the encoder that stands at `prefix` in the model, for inputs like these."""
    path = join(prefix, design.map)
    part = parts.take(path) if design.map else None
    rows = [parts.rows(join(prefix, name)) for name in design.tokens]
    front = [each for each in rows if each is not None]
    positions = None if design.positions is None else parts.rows(join(prefix, design.positions))
    for name in design.added:
        parts.take(join(prefix, name))
    pieces: list[Piece] = []
    encode: Encode = flat_image
    if isinstance(part, nn.Conv2d) or design.patch is not None:
        pieces.append(_patches(parts, path, design.patch, inputs, front, positions))
    else:
        if part is None:
            encode = _vectors
        elif isinstance(part, nn.Linear):
            encode = _vectors
            linear = parts.linear(path)
            pieces.append(Affine(linear.w, linear.b))
        elif type(part).forward is nn.Embedding.forward and part.max_norm is None:
            encode = _Words(part.weight.detach(), seen, inputs)
            pieces += [AddPositions(each) for each in seen.added]
        else:
            raise refuse(path, part, "is not an embedding that is known; expected nn.Conv2d, nn.Embedding or nn.Linear")
        if front:
            n, k, d = encode(inputs).shape[-2], sum(map(len, front)), front[0].shape[-1]
            pieces.append(Place(torch.cat([*front, front[0].new_zeros(n, d)]), range(k, k + n)))
        if positions is not None:
            pieces.append(AddPositions(positions))
    kind: Literal["pixels", "embeddings"] = "pixels" if encode is flat_image else "embeddings"
    return Entrance(kind, encode, (*pieces, *parts.norm(None if design.norm is None else join(prefix, design.norm))))


def _patches(
    parts: Parts, path: str, side: int | None, inputs: ModelInputs, front: list[Tensor], positions: Tensor | None
) -> PatchEmbedding:
    """The convolution that cuts an image into patches, with the tokens in front and the positions."""
    part = parts.find(path)
    if side is not None:
        linear = parts.linear(path)
        w, b, stride, padding = linear.w.mT.reshape(len(linear.b), -1, side, side), linear.b, (side, side), (0, 0)
    else:
        plain = part.groups == 1 and part.dilation == (1, 1) and part.padding_mode == "zeros"
        if not plain or isinstance(part.padding, str) or type(part).forward is not nn.Conv2d.forward:
            raise refuse(path, part, "is no plain convolution; expected nn.Conv2d without groups or dilation")
        w, b, stride, padding = part.weight, part.bias, part.stride, part.padding
    height, width = _image(inputs).shape[-2:]
    size = (height, width)
    first = torch.cat(front) if front else None
    n = math.prod((size[i] + 2 * padding[i] - w.shape[2 + i]) // stride[i] + 1 for i in (0, 1))
    if first is not None and positions is not None and len(positions) == n:  # they belong to the patches alone
        positions = torch.cat([torch.zeros_like(first), positions])
    return PatchEmbedding(w, b, size, stride, padding, first, positions)


# -- inputs


def the_tensor(inputs: ModelInputs, name: str) -> Tensor:
    """The one tensor of the inputs, or that of the name."""
    found: Any = inputs.get(name) if isinstance(inputs, Mapping) else inputs
    if isinstance(inputs, Mapping) and found is None and len(inputs) == 1:
        found = next(iter(inputs.values()))
    if not isinstance(found, Tensor):
        keys = ", ".join(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise InputError(f"inputs hold {keys}; expected a tensor, or keyword arguments with {name!r}")
    return found


def _image(inputs: ModelInputs) -> Float64[Tensor, "b c height width"]:
    """Images with their channels: one, where there is no dimension for them."""
    images = the_tensor(inputs, "pixel_values")
    if images.ndim not in (3, 4) or not images.is_floating_point():
        raise InputError(f"images are {images.dtype} {tuple(images.shape)}; expected floats (b, c, height, width)")
    return images if images.ndim == 4 else images.unsqueeze(1)


def flat_image(inputs: ModelInputs) -> Float64[Tensor, "b c pixels"]:
    """Images (b, c, height, width) with their pixels in a row."""
    return _image(inputs).flatten(-2, -1)


def _vectors(inputs: ModelInputs) -> Float64[Tensor, "b n d"]:
    """Tokens that are given as vectors."""
    vectors = the_tensor(inputs, "inputs_embeds")
    if vectors.ndim != 3 or not vectors.is_floating_point():
        raise InputError(f"tokens are {vectors.dtype} {tuple(vectors.shape)}; expected floats (b, n, d)")
    return vectors


@final
class _Words:
    """Looks up the embeddings of words, for inputs that share padding, types and positions with the example."""

    def __init__(self, weight: Float64[Tensor, "words d"], seen: Seen, example: ModelInputs) -> None:
        self._weight, self._keep = weight, seen.keep
        self._tokens, self._beside = the_tensor(example, "input_ids").shape[-1], _beside(example)

    def __call__(self, inputs: ModelInputs) -> Float64[Tensor, "b n d"]:
        ids, keep = the_tensor(inputs, "input_ids"), kept(inputs)
        if ids.ndim != 2 or ids.is_floating_point():
            raise InputError(f"input_ids are {ids.dtype} {tuple(ids.shape)}; expected whole numbers (b, n)")
        if ids.shape[-1] != self._tokens or not _same(keep, self._keep) or not self._same_beside(inputs):
            raise InputError(
                f"inputs of {ids.shape[-1]} tokens differ from the example's {self._tokens} in length, padding or "
                "types; a network serves one length: convert these inputs too"
            )
        return self._weight[ids if keep is None else ids[:, keep]]

    def _same_beside(self, inputs: ModelInputs) -> bool:
        here = _beside(inputs)
        return here.keys() == self._beside.keys() and all(
            bool((here[name] == known[:1]).all()) for name, known in self._beside.items()
        )


def _same(a: Kept, b: Kept) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _beside(inputs: ModelInputs) -> dict[str, Tensor]:
    """The tensors beside the words and their mask: token types, positions."""
    items = inputs.items() if isinstance(inputs, Mapping) else ()
    return {k: v for k, v in items if isinstance(v, Tensor) and k not in ("input_ids", "attention_mask", "labels")}
