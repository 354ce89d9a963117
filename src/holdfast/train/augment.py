"""Changes of training images, on the device where they are, every image its own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Generator, Tensor
from torch.nn import functional

from holdfast.registry import Registry

Augmentation = Callable[[Float[Tensor, "b c s s"], Generator], Float[Tensor, "b c s s"]]

AUGMENTATIONS: Registry[Augmentation] = Registry("augmentation")


@AUGMENTATIONS.add("flip")
def flip(images: Float[Tensor, "b c s s"], generator: Generator) -> Float[Tensor, "b c s s"]:
    """Left and right exchanged, for each image with probability 1/2."""
    return torch.where(_uniform(images, generator) < 0.5, images.flip(-1), images)


@AUGMENTATIONS.add("crop")
def crop(images: Float[Tensor, "b c s s"], generator: Generator) -> Float[Tensor, "b c s s"]:
    """Moved by up to an eighth of the side; what enters is reflected."""
    reach = max(1, images.shape[-1] // 8)
    return _cut(functional.pad(images, [reach] * 4, mode="reflect"), reach, generator)


@AUGMENTATIONS.add("shift")
def shift(images: Float[Tensor, "b c s s"], generator: Generator) -> Float[Tensor, "b c s s"]:
    """Moved by up to an eighth of the side; what enters is black."""
    reach = max(1, images.shape[-1] // 8)
    return _cut(functional.pad(images, [reach] * 4), reach, generator)


@AUGMENTATIONS.add("colour")
def colour(images: Float[Tensor, "b c s s"], generator: Generator) -> Float[Tensor, "b c s s"]:
    """Brightness, contrast and saturation changed by up to a tenth."""
    brightness, contrast, saturation = (0.2 * _uniform(images, generator) - 0.1 for _ in range(3))
    grey = images.mean(1, keepdim=True)
    images = images + saturation * (images - grey)
    images = images + contrast * (images - grey.mean((-2, -1), keepdim=True)) + brightness
    return images.clamp(0.0, 1.0)


# How far a change of "rand" goes at most: a slope, a share of half of the side, an angle, a share of the colour, bits
# of a level, a share of the side.
_SHEAR, _MOVE, _TURN, _COLOUR, _BITS, _HOLE = 0.15, 0.3, math.pi / 12, 0.5, (4, 7), 0.5
_KINDS = 12  # of changes, the first of them none


@AUGMENTATIONS.add("rand")
def rand(images: Float[Tensor, "b c s s"], generator: Generator) -> Float[Tensor, "b c s s"]:
    """Half of the images changed twice, each time in one of twelve ways and to its own degree.

    As in RandAugment (Cubuk et al. 2020): nothing, shear or translation along an axis, rotation, brightness, contrast,
    colour, posterising, solarising, cutting out a square. All images are changed at once.
    """
    changed = images
    for _ in range(2):
        kind = torch.randint(_KINDS, (len(images), 1, 1, 1), generator=generator, device=images.device)
        degree = 2 * _uniform(images, generator) - 1
        changed = _recoloured(_moved(changed, kind, degree), kind, degree)
        changed = _with_hole(changed, kind, generator)
    return torch.where(_uniform(images, generator) < 0.5, changed, images)


def _moved(images: Tensor, kind: Tensor, degree: Tensor) -> Tensor:
    """Kinds 1 to 5: one affine map of the plane for every image; what enters is black."""
    along, across, right, down, turned = (torch.where(kind == which, degree, 0.0).flatten() for which in range(1, 6))
    sine, cosine = (_TURN * turned).sin(), (_TURN * turned).cos()
    rows = (cosine, _SHEAR * along - sine, _MOVE * right), (_SHEAR * across + sine, cosine, _MOVE * down)
    maps = torch.stack([torch.stack(row, -1) for row in rows], -2).to(images.dtype)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False).clamp(0.0, 1.0)
    return torch.where((kind >= 1) & (kind <= 5), moved, images)


def _recoloured(images: Tensor, kind: Tensor, degree: Tensor) -> Tensor:
    """Kinds 6 to 10: every pixel from itself, its grey and the mean of the image."""
    share = 1 + _COLOUR * degree
    grey = images.mean(1, keepdim=True)
    mean = grey.mean((-2, -1), keepdim=True)
    levels = 2 ** (_BITS[1] - (_BITS[1] - _BITS[0]) * degree.abs()).round() - 1
    by_kind = {
        6: share * images,
        7: mean + share * (images - mean),
        8: grey + share * (images - grey),
        9: (images * levels).round() / levels,
        10: torch.where(images > 1 - _COLOUR * degree.abs(), 1 - images, images),
    }
    for which, changed in by_kind.items():
        images = torch.where(kind == which, changed, images)
    return images.clamp(0.0, 1.0)


def _with_hole(images: Tensor, kind: Tensor, generator: Generator) -> Tensor:
    """Kind 11: a square of up to half of the side in grey, which may reach beyond the edge."""
    side = images.shape[-1]
    half = _HOLE * side / 2 * _uniform(images, generator)
    centre = side * torch.rand(2, len(images), 1, 1, 1, generator=generator, device=images.device)
    places = torch.arange(side, device=images.device) + 0.5
    inside = ((places[:, None] - centre[0]).abs() < half) & ((places - centre[1]).abs() < half)
    return torch.where((kind == 11) & inside, 0.5, images)


def _uniform(images: Tensor, generator: Generator) -> Float[Tensor, "b 1 1 1"]:
    return torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device)


def _cut(padded: Tensor, reach: int, generator: Generator) -> Tensor:
    b, channels, side, _ = padded.shape
    corners = torch.randint(2 * reach + 1, (2, b, 1), generator=generator, device=padded.device)
    rows, columns = corners + torch.arange(side - 2 * reach, device=padded.device)
    every = torch.arange(b, device=padded.device)[:, None, None, None]
    planes = torch.arange(channels, device=padded.device)[:, None, None]
    return padded[every, planes, rows[:, None, :, None], columns[:, None, None, :]]
