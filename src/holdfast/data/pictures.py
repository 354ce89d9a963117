"""Image files as vision models take them: resized, cropped, normalised."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from holdfast.errors import InputError
from holdfast.storage import Pathlike


@dataclass(frozen=True)
class Preparation:
    """How a model wants its images.

    Attributes:
        size: height and width in pixels.
        mean: of each channel, in [0, 1], to subtract.
        std: of each channel, to divide by.
        crop: what part of the shorter side is kept, around the middle; None to resize both sides, whatever the ratio.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float | None = None


@dataclass(frozen=True)
class PreparedPicture:
    """An image as numbers for a model, and as it then looks."""

    values: Float[Tensor, "1 3 height width"]
    pixels: UInt8[Tensor, "height width 3"]


def read_picture(path: Pathlike, preparation: Preparation) -> PreparedPicture:
    """Reads and prepares an image file in any usual format."""
    from PIL import Image, UnidentifiedImageError  # matplotlib brings it

    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a picture") from None
    except (UnidentifiedImageError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} cannot be read as a picture: {error}") from None
    height, width = preparation.size
    box = None
    if preparation.crop is not None:
        # The largest box of the wanted ratio, shrunk by the crop, in the middle.
        scale = preparation.crop * min(picture.width / width, picture.height / height)
        across, down = (picture.width - scale * width) / 2, (picture.height - scale * height) / 2
        box = (across, down, across + scale * width, down + scale * height)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC, box=box)
    pixels = torch.from_numpy(np.array(resized))
    mean, std = torch.tensor(preparation.mean), torch.tensor(preparation.std)
    values = ((pixels / 255 - mean) / std).movedim(-1, 0)
    return PreparedPicture(values.unsqueeze(0).contiguous(), pixels)
