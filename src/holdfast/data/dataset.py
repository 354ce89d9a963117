"""A data set in memory, and where its files are searched for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from jaxtyping import Int64
from torch import Tensor

from holdfast.errors import InputError
from holdfast.storage import Pathlike


@final
@dataclass(frozen=True)
class Dataset:
    """Labelled inputs of one split.

    Attributes:
        name: of the data set, or the path of its file.
        split: which part of it.
        inputs: (b, …) images with pixels in [0, 1], or word ids.
        labels: (b,) classes from 0.
        indices: (b,) the position of each input in the data set's own order.
        checksum: SHA-256 of the whole split as it was read.
        texts: the sentences that word ids stand for.
    """

    name: str
    split: str
    inputs: Tensor
    labels: Int64[Tensor, " b"]
    indices: Int64[Tensor, " b"]
    checksum: str
    texts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(self.inputs, self.labels.tolist(), strict=True)

    def select(self, places: Sequence[int] | Int64[Tensor, " s"]) -> Dataset:
        """The inputs at these positions of this data set; they keep their indices."""
        chosen = torch.as_tensor(places, dtype=torch.int64)
        texts = None if self.texts is None else tuple(self.texts[i] for i in chosen.tolist())
        return replace(
            self, inputs=self.inputs[chosen], labels=self.labels[chosen], indices=self.indices[chosen], texts=texts
        )


def data_folder(data_dir: Pathlike | None = None) -> Path:
    """Where data files are: the given folder, else what HOLDFAST_DATA names, else ~/.cache/holdfast."""
    named = os.environ.get("HOLDFAST_DATA", "~/.cache/holdfast") if data_dir is None else data_dir
    return Path(named).expanduser()


def find_file(data_dir: Pathlike | None, places: Sequence[str], name: str) -> Path:
    """The first of these files, named relative to the data folder, that exists."""
    folder = data_folder(data_dir)
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise InputError(
        f"the data set {name!r} is not in {folder}: put {' or '.join(places)} there, or name another folder by "
        "HOLDFAST_DATA or data_dir (--data-dir)"
    )


def checksum(*tensors: Tensor) -> str:
    """SHA-256 of the numbers in the tensors."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(t.contiguous().flatten().view(torch.uint8).numpy().data)  # numpy has no bfloat16
    return digest.hexdigest()


def altered(path: Path, what: str) -> InputError:
    """The error for a file that is not the published one."""
    return InputError(
        f"{path}: {what}; the file is damaged or was changed: fetch it again, or, in Python, load it with verify=False"
    )
