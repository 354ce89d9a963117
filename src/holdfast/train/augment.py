"""Changes of training images, on the device where they are, every image its own."""

from __future__ import annotations

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


def _uniform(images: Tensor, generator: Generator) -> Float[Tensor, "b 1 1 1"]:
    return torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device)


def _cut(padded: Tensor, reach: int, generator: Generator) -> Tensor:
    b, channels, side, _ = padded.shape
    corners = torch.randint(2 * reach + 1, (2, b, 1), generator=generator, device=padded.device)
    rows, columns = corners + torch.arange(side - 2 * reach, device=padded.device)
    every = torch.arange(b, device=padded.device)[:, None, None, None]
    planes = torch.arange(channels, device=padded.device)[:, None, None]
    return padded[every, planes, rows[:, None, :, None], columns[:, None, None, :]]
