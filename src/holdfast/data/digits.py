"""The 8×8 handwritten digits of scikit-learn, and the 32 of them that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from holdfast.data.dataset import Dataset, checksum
from holdfast.data.sources import SOURCES, Source
from holdfast.errors import HoldfastError
from holdfast.storage import Pathlike

SIDE = 8  # pixels along one side of an image
CLASSES = 10
MAX_PIXEL = 16  # the digits come in 17 grey levels, 0 to 16
TEST_SIZE = 360

DIGITS_FILE = Path(__file__).with_name("digits_test.safetensors")

_SPLIT_SEED = 0  # the bundled ViT was trained on the same training split


@dataclass(frozen=True)
class Digits:
    """Handwritten digits with their labels.

    Attributes:
        images: (b, 8, 8), float32 pixels in [0, 1].
        labels: (b,), the digit each image shows.
        indices: (b,), the place of each image in `sklearn.datasets.load_digits()`.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


def demo_digits() -> Digits:
    """Loads 32 digits from the test split: none of them was seen in training."""
    stored = load_file(DIGITS_FILE)
    return Digits(stored["images"].float() / MAX_PIXEL, stored["labels"], stored["indices"])


def read(split: str, data_dir: Pathlike | None, verify: bool) -> Dataset:
    """Images (b, 8, 8); an index is the place in `sklearn.datasets.load_digits()`."""
    try:
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError:
        raise HoldfastError(
            "the digits need scikit-learn, which is not installed; pip install 'holdfast[demo]', or use 'digits-32'"
        ) from None
    data = datasets.load_digits()
    images, labels = torch.from_numpy(data.images).float() / MAX_PIXEL, torch.from_numpy(data.target).long()
    parts = train_test_split(range(len(labels)), test_size=TEST_SIZE, random_state=_SPLIT_SEED, stratify=data.target)
    chosen = torch.tensor(parts[0 if split == "train" else 1])
    images, labels = images[chosen], labels[chosen]
    return Dataset("digits", split, images, labels, chosen, checksum(images, labels))


def read_bundled(split: str, data_dir: Pathlike | None, verify: bool) -> Dataset:
    """Images (32, 8, 8) of the test split."""
    d = demo_digits()
    return Dataset("digits-32", split, d.images, d.labels, d.indices, checksum(d.images, d.labels))


SOURCES.add("digits")(Source(("train", "test"), CLASSES, read))
SOURCES.add("digits-32")(Source(("test",), CLASSES, read_bundled))
