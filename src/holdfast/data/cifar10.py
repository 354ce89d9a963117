"""CIFAR-10 in its binary and its Python layout (Krizhevsky 2009)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.data.dataset import Dataset, altered, checksum, find_file
from holdfast.data.pickled import read_pickle
from holdfast.data.sources import SOURCES, Source
from holdfast.errors import InputError
from holdfast.storage import Pathlike

PIXELS = 3 * 32 * 32

# SHA-1 of the binary files; the Python files are checked after they were brought to the same form.
_TRAIN = {
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
}
_TEST = {"test_batch": "67eb016db431130d61cd03c7ad570b013799c88c"}


def read(split: str, data_dir: Pathlike | None, verify: bool) -> Dataset:
    """Images (b, 3, 32, 32) in the official order."""
    parts = []
    for batch, published in (_TRAIN if split == "train" else _TEST).items():
        path = find_file(data_dir, (f"cifar-10-batches-bin/{batch}.bin", f"cifar-10-batches-py/{batch}"), "cifar10")
        rows = _binary_rows(path) if path.suffix == ".bin" else _python_rows(path)
        if verify and hashlib.sha1(rows.tobytes()).hexdigest() != published:
            raise altered(path, "the images are not those published")
        parts.append(rows)
    stored = torch.from_numpy(np.concatenate(parts))  # a row is the label, then the red, green and blue planes
    images = stored[:, 1:].reshape(-1, 3, 32, 32).float() / 255
    return Dataset("cifar10", split, images, stored[:, 0].long(), torch.arange(len(stored)), checksum(stored))


def _binary_rows(path: Path) -> NDArray[np.uint8]:
    content = np.fromfile(path, np.uint8)
    if content.size == 0 or content.size % (1 + PIXELS):
        raise InputError(
            f"{path}: {content.size} bytes are not a whole number of images of {1 + PIXELS}; fetch it again"
        )
    return content.reshape(-1, 1 + PIXELS)


def _python_rows(path: Path) -> NDArray[np.uint8]:
    batch = read_pickle(path)
    pixels, labels = batch.get(b"data"), batch.get(b"labels")
    if not isinstance(pixels, np.ndarray) or not isinstance(labels, list) or pixels.shape != (len(labels), PIXELS):
        raise InputError(f"{path}: expected a dictionary with data (b, {PIXELS}) and b labels; fetch it again")
    return np.concatenate([np.array(labels, np.uint8)[:, None], pixels], 1)


SOURCES.add("cifar10")(Source(("train", "test"), 10, read))
