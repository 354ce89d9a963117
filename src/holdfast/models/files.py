"""Certifiable models as files: safetensors, with the config in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict

from holdfast.errors import InputError
from holdfast.models.config import config_from
from holdfast.models.transformer import Transformer
from holdfast.storage import Pathlike, read_metadata, read_tensors, write_tensors

_KEY = "holdfast_model"


def save(model: Transformer, path: Pathlike, notes: Mapping[str, str] | None = None) -> None:
    """Writes a model with its config, whole or not at all.

    Args:
        model: as it is trained, with its constraints.
        path: of the safetensors file.
        notes: further metadata, such as seed and command.
    """
    write_tensors(path, model.state_dict(), {**(notes or {}), _KEY: json.dumps(asdict(model.config))})


def load(path: Pathlike) -> Transformer:
    """Reads a model that `save` wrote; it is frozen and in evaluation mode."""
    stored = read_metadata(path).get(_KEY)
    if stored is None:
        raise InputError(f"{os.fspath(path)!r} is not a model of this package: its metadata has no {_KEY}")
    model = Transformer(config_from(json.loads(stored), os.fspath(path)))
    try:
        model.load_state_dict(read_tensors(path))
    except RuntimeError as error:
        raise InputError(f"{os.fspath(path)!r}: the tensors do not fit the config in the file: {error}") from None
    return model.eval().requires_grad_(False)
