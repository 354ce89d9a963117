"""Models of this package as files: safetensors, with what they are built from in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import InputError
from holdfast.models.transformer import CONFIG_KEY, Transformer
from holdfast.models.vit import VIT_KEY, VisionTransformer
from holdfast.storage import Pathlike, read_metadata, read_tensors, write_tensors

SHELF = Path(__file__).with_name("shelf")  # trained models that come with the package

_KINDS: Mapping[str, type[Transformer | VisionTransformer]] = {CONFIG_KEY: Transformer, VIT_KEY: VisionTransformer}


def save(
    model: Transformer | VisionTransformer,
    path: Pathlike,
    notes: Mapping[str, str] | None = None,
    *,
    shard_size: int | None = None,
) -> None:
    """Writes a model with what it is built from, whole or not at all.

    Args:
        model: as it is trained, with its constraints.
        path: of the safetensors file.
        notes: further metadata, such as seed and command.
        shard_size: the most bytes of one file: see `holdfast.storage.write_tensors`.
    """
    write_tensors(path, model.state_dict(), {**(notes or {}), **model.notes}, shard_size=shard_size)


def load(path: Pathlike) -> Transformer | VisionTransformer:
    """Reads a model that `save` wrote, or one on the shelf by its name; it is frozen and in evaluation mode."""
    file = shelf_file(path) or path
    kind, arguments = described(file)
    model = kind.built(arguments, os.fspath(file))
    try:
        model.load_state_dict(read_tensors(file))
    except RuntimeError as error:
        raise InputError(f"{os.fspath(file)!r}: the tensors do not fit the config in the file: {error}") from None
    return model.eval().requires_grad_(False)


def load_transformer(path: Pathlike) -> Transformer:
    """The same for what `holdfast train` wrote; other models are refused."""
    model = load(path)
    if not isinstance(model, Transformer):
        raise InputError(f"{os.fspath(path)!r} is a {type(model).__name__}; expected a model of holdfast train")
    return model


def halve(path: Pathlike, target: Pathlike, *, shard_size: int | None = None) -> None:
    """Writes a model with its weights rounded to float16: half the size, and a different model, to be certified again.

    Args:
        path: of the model.
        target: the file to write.
        shard_size: the most bytes of one file: see `holdfast.storage.write_tensors`.
    """
    described(path)  # refuses other files
    rounded = {name: t.half() if t.is_floating_point() else t for name, t in read_tensors(path).items()}
    if any(not bool(t.isfinite().all()) for t in rounded.values()):
        raise InputError(f"{os.fspath(path)!r} has weights beyond the largest float16, 65504; it cannot be halved")
    write_tensors(target, rounded, read_metadata(path), shard_size=shard_size)


def described(path: Pathlike) -> tuple[type[Transformer | VisionTransformer], dict[str, Any]]:
    """The class of a model that `save` wrote, and what it is built from."""
    notes = read_metadata(path)
    for key, kind in _KINDS.items():
        if key in notes:
            return kind, json.loads(notes[key])
    raise InputError(
        f"{os.fspath(path)!r} is not a model of this package: its metadata has no {' and no '.join(_KINDS)}"
    )


def shelf_file(name: Pathlike) -> Path | None:
    """The file of a model on the shelf; None where there is none of this name."""
    file = SHELF / f"{os.fspath(name)}.safetensors"
    return file if file.parent == SHELF and file.is_file() else None
