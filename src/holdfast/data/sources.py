"""Data sets by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from holdfast.data.dataset import Dataset, checksum
from holdfast.errors import InputError, UnknownNameError
from holdfast.registry import Registry
from holdfast.storage import Pathlike, read_tensors


@final
@dataclass(frozen=True)
class Source:
    """How a data set is read.

    Attributes:
        splits: its parts; the last is the one to certify on.
        classes: number of labels.
        read: (split, data_dir, verify) to the data.
    """

    splits: tuple[str, ...]
    classes: int
    read: Callable[[str, Pathlike | None, bool], Dataset]


SOURCES: Registry[Source] = Registry("data set", group="holdfast.data")


def load(name: Pathlike, split: str | None = None, data_dir: Pathlike | None = None, *, verify: bool = True) -> Dataset:
    """Reads a data set.

    Args:
        name: one of SOURCES, or the path of a safetensors file with `inputs`, `labels` and perhaps `indices`.
        split: the part to read, by default the held-out one; your own files have no parts.
        data_dir: folder with the standard files; by default what HOLDFAST_DATA names, else ~/.cache/holdfast.
        verify: refuse files that are not the published ones.

    Example:
        >>> load("digits-32").inputs.shape
        torch.Size([32, 8, 8])
    """
    text = os.fspath(name)
    if text not in SOURCES and (os.sep in text or text.endswith(".safetensors")):
        return _read_file(Path(text), split)
    source = SOURCES[text]
    split = source.splits[-1] if split is None else split
    if split not in source.splits:
        raise UnknownNameError(f"split of {text!r}", split, source.splits)
    return source.read(split, data_dir, verify)


def _read_file(path: Path, split: str | None) -> Dataset:
    tensors = read_tensors(path)
    missing = [name for name in ("inputs", "labels") if name not in tensors]
    if missing:
        names = ", ".join(sorted(tensors)) or "nothing"
        raise InputError(f"{path}: no tensor named {' or '.join(missing)}; found {names}; a data set needs both")
    if tensors["labels"].is_floating_point():
        raise InputError(f"{path}: the labels are {tensors['labels'].dtype}; expected whole numbers, the classes")
    inputs, labels = tensors["inputs"], tensors["labels"].long()
    indices = tensors["indices"].long() if "indices" in tensors else torch.arange(labels.numel())
    if labels.ndim != 1 or indices.shape != labels.shape or inputs.shape[:1] != labels.shape:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise InputError(f"{path}: the shapes {shapes} do not fit; expected inputs (b, …), labels (b,), indices (b,)")
    given = (inputs, labels, indices) if "indices" in tensors else (inputs, labels)
    return Dataset(str(path), split or "all", inputs, labels, indices, checksum(*given))
