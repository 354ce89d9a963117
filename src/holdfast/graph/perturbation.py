"""What moves: the whole input, some words, a layer's input, some pixels, or a few directions.

Radii are l2 norms of the change of the input, in its own units. Fewer moving numbers make tighter certificates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.graph.entrance import Kind
from holdfast.graph.program import ModelInputs
from holdfast.layers.attention.piece import Attention
from holdfast.layers.linear.piece import Affine
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.embedding import AddPositions, Place
from holdfast.layers.tokens.selection import Selection
from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius
from holdfast.network.network import Network, Residual, run
from holdfast.storage import read_tensors

#: What moves. "pixels" and "embeddings": all of the input. ("word", i) and ("words", [i, j]): some words, by their
#: places among those that are not padding. ("layer", k): the input of a block, from 0 on. ("patch", (top, left, height,
#: width)) and ("patches", […]): rectangles of pixels in all channels. ("mask", m): the entries where the bool tensor m,
#: of the input's shape, is True. ("directions", D): sums of the tensors D (k, …input). "brightness", "contrast" and
#: "colour": all pixels alike, the image against its mean, and each channel by itself.
Perturbation = (
    Literal["pixels", "embeddings", "brightness", "contrast", "colour"]
    | tuple[Literal["word", "layer"], int]
    | tuple[Literal["words"], Sequence[int]]
    | tuple[Literal["patch"], Sequence[int]]
    | tuple[Literal["patches"], Sequence[Sequence[int]]]
    | tuple[Literal["mask", "directions"], Tensor]
)

EXPECTED = (
    "'pixels', 'embeddings', ('word', i), ('words', [i, j]), ('layer', k), ('patch', (top, left, height, width)), "
    "('patches', [...]), ('mask', tensor), ('directions', tensor), 'brightness', 'contrast' or 'colour'"
)

Encode = Callable[[ModelInputs], Tensor]


@final
@dataclass(frozen=True)
class Moved:
    """A network behind what moves, and how inputs become its input."""

    network: Network
    encode: Encode


def perturbed(
    network: Network, kind: Kind | None, encode: Encode, perturb: Perturbation | None, example: ModelInputs | None
) -> Moved:
    """The network behind what moves.

    Args:
        network: on the whole input.
        kind: of that input.
        encode: inputs as they enter the network.
        perturb: what moves.
        example: the inputs around which a part of them moves.
    """
    if perturb is None:
        return Moved(network, encode)
    name, given = (perturb, None) if isinstance(perturb, str) else _pair(perturb)
    if name in ("pixels", "embeddings") and given is None:
        if kind is not None and kind != name:
            raise InputError(f"perturb is {perturb!r}, but the input of {network.name} is {kind}")
        return Moved(network, encode)
    if name == "layer":
        return _from_layer(network, encode, given)
    if example is None:
        raise InputError(
            f"perturb is {_shown(perturb)}, and there is no example; pass the inputs around which it moves"
        )
    x = encode(example)
    if name in ("word", "words") and given is not None:
        return _words(network, kind, encode, x, perturb, [given] if name == "word" else given)
    if name in ("patch", "patches", "mask"):
        return _behind(network, encode, x, _chosen(x, example, name, given))
    if name in ("directions", "brightness", "contrast", "colour"):
        return _behind(network, encode, x, _basis(x, example, name, given))
    raise InputError(f"perturb is {_shown(perturb)}; expected {EXPECTED}")


def _pair(perturb: Any) -> tuple[str, Any]:
    if not isinstance(perturb, tuple | list) or len(perturb) != 2 or not isinstance(perturb[0], str):
        raise InputError(f"perturb is {_shown(perturb)}; expected {EXPECTED}")
    return perturb[0], perturb[1]


def _shown(perturb: Any) -> str:
    if isinstance(perturb, tuple) and len(perturb) == 2 and isinstance(perturb[1], Tensor):
        return f"({perturb[0]!r}, a tensor of shape {tuple(perturb[1].shape)})"
    return repr(perturb)


# -- words and layers


def _words(network: Network, kind: Kind | None, encode: Encode, x: Tensor, perturb: Any, places: Any) -> Moved:
    if kind == "pixels":
        raise InputError(f"perturb is {perturb!r}, and the input of {network.name} is an image; expected words")
    whole = isinstance(places, list | tuple) and places and all(isinstance(p, int) for p in places)
    if not whole or len(set(places)) < len(places) or not all(0 <= p < x.shape[-2] for p in places):
        raise InputError(
            f"perturb is {perturb!r}; the example has words 0 to {x.shape[-2] - 1}, each may be named once"
        )
    start = torch.zeros_like(x[:, : len(places)])
    return Moved(network.before(Place(_single(x), places)), _displacement(encode, x, start))


def _single(x: Float64[Tensor, "b n d"]) -> Float64[Tensor, "*b n d"]:
    """One input without its batch: a network around it then takes points (n, d) as well as batches of them."""
    return x[0] if len(x) == 1 else x


def _displacement(encode: Encode, x: Tensor, zero: Tensor) -> Encode:
    def displacement(inputs: ModelInputs) -> Tensor:
        if not torch.equal(encode(inputs), x):
            raise InputError("a part of the example moves, and these are other inputs; convert them too")
        return zero

    return displacement


def _from_layer(network: Network, encode: Encode, index: Any) -> Moved:
    starts = [i for i, stage in enumerate(network.stages) if attends(stage)]
    if not starts:
        raise InputError(f"perturb is ('layer', {index!r}); {network.name} has no attention, and so no layers")
    if not isinstance(index, int) or not 0 <= index < len(starts):
        raise InputError(f"perturb is ('layer', {index!r}); {network.name} has layers 0 to {len(starts) - 1}")
    first = starts[index]

    def tokens(inputs: ModelInputs) -> Tensor:
        x = encode(inputs)
        for stage in network.stages[:first]:
            x = run(stage, x)
        return x

    return Moved(network.after(first), tokens)


def attends(stage: Piece | Residual) -> bool:
    """Whether attention is in the stage."""
    return any(isinstance(piece, Attention) for piece in (stage.pieces if isinstance(stage, Residual) else (stage,)))


# -- parts of the input


def _behind(network: Network, encode: Encode, x: Float64[Tensor, "b n d"], first: Sequence[Piece]) -> Moved:
    """The network behind a map from displacements (…, 1, k) to inputs."""
    for piece in reversed(first):
        network = network.before(piece)
    width = _width(first[0])
    return Moved(network, _displacement(encode, x, x.new_zeros(len(x), 1, width)))


def _width(first: Piece) -> int:
    if isinstance(first, Affine):
        return len(first.w)
    assert isinstance(first, Selection)
    return first.shape[1]


def _chosen(x: Float64[Tensor, "b n d"], example: ModelInputs, name: str, given: Any) -> list[Piece]:
    """Some entries move."""
    if name == "mask":
        if not isinstance(given, Tensor) or given.dtype != torch.bool or given.numel() != x[0].numel():
            received = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise InputError(f"the mask is {received}; expected a bool tensor of the shape of one input")
        chosen = given.flatten()
    else:
        chosen = _rectangles(example, [given] if name == "patch" else given).flatten()
    if not bool(chosen.any()):
        raise InputError(f"perturb is {name!r} without a single entry; expected at least one that moves")
    index = torch.where(chosen, chosen.cumsum(0) - 1, -1).reshape(x.shape[1:])
    return [Selection(index, (1, int(chosen.sum()))), AddPositions(_single(x))]


def _rectangles(example: ModelInputs, patches: Any) -> Tensor:
    image = _image(example)
    mask = torch.zeros(image.shape[1:], dtype=torch.bool)
    for patch in patches:
        if not isinstance(patch, list | tuple) or len(patch) != 4 or not all(isinstance(p, int) for p in patch):
            raise InputError(f"a patch is {patch!r}; expected (top, left, height, width)")
        top, left, height, width = patch
        inside = 0 <= top < top + height <= mask.shape[-2] and 0 <= left < left + width <= mask.shape[-1]
        if not inside:
            raise InputError(
                f"the patch {patch!r} is not inside an image of {mask.shape[-2]} x {mask.shape[-1]} pixels"
            )
        mask[..., top : top + height, left : left + width] = True
    return mask


def _image(example: ModelInputs) -> Tensor:
    leaves = [t for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, Tensor) and t.is_floating_point()]
    if len(leaves) != 1 or leaves[0].ndim not in (3, 4):
        raise InputError("the input is not an image (b, c, height, width); patches, brightness and colour need one")
    return leaves[0]


def _basis(x: Float64[Tensor, "b n d"], example: ModelInputs, name: str, given: Any) -> list[Piece]:
    """Sums of some directions move, measured by their own length."""
    if len(x) != 1 and name == "contrast":
        raise InputError("'contrast' moves each image in a direction of its own; convert one input at a time")
    if name == "directions":
        if not isinstance(given, Tensor) or given.ndim < 2 or given[0].numel() != x[0].numel():
            received = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InputError(f"the directions are {received}; expected a tensor (k, …) of {x[0].numel()} numbers each")
        rows = given.detach().double().flatten(1)
    else:
        rows = _ready(_image(example).double(), name)
    Q = orthonormal(rows)
    n, d = x.shape[1:]
    return [Affine(Q), Selection(torch.arange(n * d).reshape(n, d), (1, n * d)), AddPositions(_single(x))]


def _ready(image: Tensor, name: str) -> Tensor:
    one = torch.ones_like(image[0])
    if name == "brightness":
        return one.reshape(1, -1)
    if name == "contrast":
        if bool((image[0] == image[0].flatten()[0]).all()):
            raise InputError("perturb is 'contrast', and the numbers of the image are all the same; expected others")
        return (image[0] - image[0].mean()).reshape(1, -1)
    channels = one.shape[0] if one.ndim == 3 else 1
    flat = one.reshape(channels, -1)
    return (torch.eye(channels, dtype=torch.float64).unsqueeze(-1) * flat).flatten(1)


def orthonormal(rows: Float64[Tensor, "k N"]) -> Float64[Tensor, "r N"]:
    """A basis Q of the directions' span in float64, such that every sum g of its rows is a Q with ‖a‖ <= ‖g‖.

    Rows that are orthonormal up to rounding are enlarged by 2^-40, which is proved to suffice: with E = QQᵀ - I,
    ‖aQ‖² = ‖a‖² + aEaᵀ >= ‖a‖² (1 - ‖E‖_F).
    """
    if not bool(rows.isfinite().all()):
        raise InputError("a direction holds a number that is not finite; expected finite ones")
    _, s, v = torch.linalg.svd(rows, full_matrices=False)
    rank = int((s > s.max() * 1e-12).sum())
    if not rank or not float(s.max()):
        raise InputError("the directions are all zero; expected at least one that is not")
    Q = v[:rank]
    B = Ball.exact(Q)
    off = B @ B.mT - torch.eye(rank, dtype=torch.float64)
    if not float(frobenius(off).upper) < 2.0**-41:
        raise InputError(f"{len(rows)} directions could not be made orthonormal; pass fewer, or better scaled ones")
    enlarged: Tensor = Q * (1 + 2.0**-40)
    return enlarged


# -- in words


def spelled(perturb: Perturbation) -> str:
    """What moves, in words that `read_perturbation` takes; tensors by their SHA-256."""
    if isinstance(perturb, str):
        return perturb
    name, given = _pair(perturb)
    if isinstance(given, Tensor):
        content = given.detach().cpu().contiguous()
        digest = hashlib.sha256(content.reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"{name}:sha256={digest.hexdigest()}"
    if name == "patches":
        return "patches:" + ";".join(",".join(map(str, patch)) for patch in given)
    return f"{name}:{given if isinstance(given, int) else ','.join(map(str, given))}"


def read_perturbation(text: str) -> Perturbation:
    """What moves, from words: "pixels", "word:3", "words:1,4", "patch:0,0,4,4", "mask:file.safetensors" and so on."""
    name, colon, rest = text.partition(":")
    if not colon and name in ("pixels", "embeddings", "brightness", "contrast", "colour"):
        return name  # type: ignore[return-value]
    if name in ("mask", "directions") and rest.startswith("sha256="):
        raise InputError(f"what moves is a tensor ({text[:24]}…) that the file does not hold; pass it as perturb")
    if name in ("mask", "directions") and rest:
        tensors = read_tensors(rest)
        if len(tensors) != 1:
            raise InputError(f"{rest} holds {len(tensors)} tensors; expected one, the {name}")
        return name, next(iter(tensors.values()))  # type: ignore[return-value]
    try:
        numbers = [[int(number) for number in part.split(",")] for part in rest.split(";")]
    except ValueError:
        numbers = []
    match name, numbers:
        case (("word" | "layer"), [[number]]):
            return name, number
        case (("words" | "patch"), [several]):
            return name, several  # type: ignore[return-value]
        case "patches", [_, *_]:
            return "patches", numbers
    raise InputError(
        f"the perturbation is {text!r}; expected pixels, embeddings, word:3, words:1,4, layer:1, patch:TOP,LEFT,HEIGHT,"
        "WIDTH, patches:…;…, mask:FILE, directions:FILE, brightness, contrast or colour"
    )
