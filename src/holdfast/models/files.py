"""Certifiable models as files: safetensors, with the config in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import InputError
from holdfast.models.config import ModelConfig, config_from
from holdfast.models.transformer import CONFIG_KEY, Transformer
from holdfast.storage import Pathlike, read_metadata, read_tensors, write_tensors

SHELF = Path(__file__).with_name("shelf")  # trained models that come with the package


def save(
    model: Transformer, path: Pathlike, notes: Mapping[str, str] | None = None, *, shard_size: int | None = None
) -> None:
    """Writes a model with its config, whole or not at all.

    Args:
        model: as it is trained, with its constraints.
        path: of the safetensors file.
        notes: further metadata, such as seed and command.
        shard_size: the most bytes of one file: see `holdfast.storage.write_tensors`.
    """
    write_tensors(path, model.state_dict(), {**(notes or {}), **model.notes}, shard_size=shard_size)


def load(path: Pathlike) -> Transformer:
    """Reads a model that `save` wrote, or one on the shelf by its name; it is frozen and in evaluation mode."""
    file = shelf_file(path) or path
    model = Transformer(stored_config(file))
    try:
        model.load_state_dict(read_tensors(file))
    except RuntimeError as error:
        raise InputError(f"{os.fspath(file)!r}: the tensors do not fit the config in the file: {error}") from None
    return model.eval().requires_grad_(False)


def halve(path: Pathlike, target: Pathlike, *, shard_size: int | None = None) -> None:
    """Writes a model with its weights rounded to float16: half the size, and a different model, to be certified again.

    Args:
        path: of the model.
        target: the file to write.
        shard_size: the most bytes of one file: see `holdfast.storage.write_tensors`.
    """
    stored_config(path)  # refuses other files
    rounded = {name: t.half() if t.is_floating_point() else t for name, t in read_tensors(path).items()}
    if any(not bool(t.isfinite().all()) for t in rounded.values()):
        raise InputError(f"{os.fspath(path)!r} has weights beyond the largest float16, 65504; it cannot be halved")
    write_tensors(target, rounded, read_metadata(path), shard_size=shard_size)


def stored_config(path: Pathlike) -> ModelConfig:
    """The config of a model that `save` wrote."""
    stored = read_metadata(path).get(CONFIG_KEY)
    if stored is None:
        raise InputError(f"{os.fspath(path)!r} is not a model of this package: its metadata has no {CONFIG_KEY}")
    return config_from(json.loads(stored), os.fspath(path))


def shelf_file(name: Pathlike) -> Path | None:
    """The file of a model on the shelf; None where there is none of this name."""
    file = SHELF / f"{os.fspath(name)}.safetensors"
    return file if file.parent == SHELF and file.is_file() else None
