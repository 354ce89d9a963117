"""Files: safetensors in and out; every file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from holdfast.errors import InputError

Pathlike = str | os.PathLike[str]


def read_tensors(path: Pathlike) -> dict[str, Tensor]:
    """The named tensors of a safetensors file."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} cannot be read as safetensors: {error}") from None
    return tensors


def read_metadata(path: Pathlike) -> dict[str, str]:
    """The texts that a safetensors file carries beside its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} cannot be read as safetensors: {error}") from None


def write_tensors(path: Pathlike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes named tensors as safetensors, with texts beside them."""
    partial = _partial(path)
    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(stored, partial, None if metadata is None else dict(metadata))
    partial.replace(path)


def write_text(path: Pathlike, text: str) -> None:
    """Writes a text file."""
    partial = _partial(path)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _partial(path: Pathlike) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(f"{os.fspath(path)}.partial")
