"""Street View House Numbers, cropped digits, as MATLAB files (Netzer et al. 2011)."""

from __future__ import annotations

import hashlib

import torch

from holdfast.data.dataset import Dataset, altered, checksum, find_file
from holdfast.data.sources import SOURCES, Source
from holdfast.errors import HoldfastError, InputError
from holdfast.storage import Pathlike

_MD5 = {
    "train": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "extra": "a93ce644f1a588dc4d68dda5feec44a7",
    "test": "eb5a983be6a315427106f1b164d9cef3",
}


def read(split: str, data_dir: Pathlike | None, verify: bool) -> Dataset:
    """Images (b, 3, 32, 32) in the official order; the file's class 10 is the digit 0."""
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError:
        raise HoldfastError("SVHN needs scipy, which is not installed; pip install 'holdfast[data]'") from None
    file = f"{split}_32x32.mat"
    path = find_file(data_dir, (f"svhn/{file}", file), "svhn")
    if verify and hashlib.md5(path.read_bytes()).hexdigest() != _MD5[split]:
        raise altered(path, "it is not the published file")
    try:
        content = loadmat(path, variable_names=("X", "y"))
        pixels, labels = torch.from_numpy(content["X"]), torch.from_numpy(content["y"]).flatten().long()
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"{path} cannot be read as a MATLAB file with X and y: {error}; fetch it again") from None
    if pixels.shape != (32, 32, 3, len(labels)) or pixels.dtype != torch.uint8:
        raise InputError(f"{path}: X is {tuple(pixels.shape)} {pixels.dtype}; expected bytes (32, 32, 3, b)")
    pixels, labels = pixels.permute(3, 2, 0, 1).contiguous(), labels % 10
    return Dataset("svhn", split, pixels.float() / 255, labels, torch.arange(len(labels)), checksum(pixels, labels))


SOURCES.add("svhn")(Source(("train", "extra", "test"), 10, read))
