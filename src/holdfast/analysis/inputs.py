"""The inputs of an analysis: which tokens count, what they are called, and the image they come from."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from holdfast.analysis.result import AnalyzedInput
from holdfast.errors import InputError, check_counts
from holdfast.models.loading import Picture

_SMALL = 64  # pixels: up to this size every pixel is kept as it is
_LARGEST = 336


def describe(
    inputs: Tensor | Mapping[str, Any],
    x: Float[Tensor, "b n d"],
    tokens: Sequence[Sequence[str]] | None,
    pictures: Sequence[Picture] | None,
) -> tuple[AnalyzedInput, ...]:
    """The inputs with the names of their tokens.

    Args:
        inputs: what the model was given.
        x: what entered its first attention.
        tokens: names for the tokens of each input, with or without its padding.
        pictures: the images, where the inputs are images.
    """
    b = len(x)
    for what, given in (("tokens", tokens), ("pictures", pictures)):
        if given is not None and len(given) != b:
            raise InputError(f"{what} has {len(given)} members and there are {b} inputs; give one for each input")
    views = []
    for place, real in enumerate(_real_tokens(inputs, x).tolist()):
        picture = None if pictures is None else pictures[place]
        names = _names(len(real), picture) if tokens is None else _spread_out(list(tokens[place]), real, place)
        views.append(
            AnalyzedInput(
                tokens=tuple(names),
                padding=tuple(not is_real for is_real in real),
                image=None if picture is None else data_uri(picture.pixels),
                grid=None if picture is None else picture.grid,
            )
        )
    return tuple(views)


def shortened(inputs: Tensor | Mapping[str, Any], most: int) -> Tensor | dict[str, Any]:
    """Token ids, and whatever accompanies them, cut to the first `most` tokens."""
    check_counts(max_tokens=most)
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InputError("max_tokens cuts token ids, and these inputs have none; leave it out or cut the inputs")
    if not isinstance(inputs, Mapping):
        return ids[:, :most]
    return {
        key: value[:, :most] if isinstance(value, Tensor) and value.shape[:2] == ids.shape else value
        for key, value in inputs.items()
    }


def data_uri(pixels: UInt8[Tensor, "height width 3"]) -> str:
    """An image as text for a page: PNG if it is small, otherwise JPEG of at most 336 pixels per side."""
    from PIL import Image  # comes with matplotlib

    picture = Image.fromarray(pixels.cpu().numpy())
    kind = "png" if max(picture.size) <= _SMALL else "jpeg"
    picture.thumbnail((_LARGEST, _LARGEST))
    stream = io.BytesIO()
    picture.save(stream, kind, quality=82)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"


def _real_tokens(inputs: Tensor | Mapping[str, Any], x: Float[Tensor, "b n d"]) -> Bool[Tensor, "b n"]:
    """Which tokens are not padding."""
    given = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if isinstance(given, Tensor) and given.shape == x.shape[:2]:
        return given.bool()
    return torch.ones(x.shape[:2], dtype=torch.bool)


def _spread_out(names: list[str], real: list[bool], place: int) -> list[str]:
    """One name per token; if the names were given without padding, padding gets an empty one."""
    if len(names) == len(real):
        return names
    if len(names) != sum(real):
        raise InputError(f"tokens of input {place}: {len(names)} names were given, and it has {sum(real)} tokens")
    following = iter(names)
    return [next(following) if is_real else "" for is_real in real]


def _names(n: int, picture: Picture | None) -> list[str]:
    """Numbers, or positions in the image."""
    if picture is None:
        return [str(i) for i in range(n)]
    rows, columns = picture.grid
    if picture.prefix + rows * columns != n:
        raise InputError(f"the picture has {picture.prefix} + {rows} × {columns} tokens and the model {n}")
    before = ["class token"] if picture.prefix == 1 else [f"token {i}" for i in range(picture.prefix)]
    return before + [f"patch {i + 1}, {j + 1}" for i in range(rows) for j in range(columns)]
