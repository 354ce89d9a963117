"""Files: safetensors in and out, TOML in; every file is written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, cat

from holdfast.errors import InputError

Pathlike = str | os.PathLike[str]

_PARTS = "holdfast_parts"  # metadata of a file whose tensors are in other files beside it
_LEAST, _ENTRY = 64_000, 160  # bytes of the smallest shard, and of what a shard says about a tensor besides its name


def read_tensors(path: Pathlike) -> dict[str, Tensor]:
    """The named tensors of a safetensors file, and of its parts if it has some."""
    parts = _parts(path)
    if parts is None:
        return _load(Path(path))
    pieces: dict[str, Tensor] = {}
    for name, checksum in parts["files"].items():
        part = Path(path).with_name(Path(name).name)
        if part.is_file() and _checksum(part) != checksum:
            raise InputError(f"{str(part)!r} is not the part that {os.fspath(path)!r} was written with")
        pieces |= _load(part)
    return {
        name: cat([pieces[f"{name}@{number}"] for number in range(count)]).reshape(shape)
        for name, (count, shape) in parts["tensors"].items()
    }


def read_metadata(path: Pathlike) -> dict[str, str]:
    """The texts that a safetensors file carries beside its tensors."""
    metadata = _metadata(path)
    metadata.pop(_PARTS, None)
    return metadata


def file_size(path: Pathlike) -> int:
    """Bytes of a safetensors file, its parts included."""
    parts = _parts(path)
    others = () if parts is None else (Path(path).with_name(Path(name).name) for name in parts["files"])
    return sum(file.stat().st_size for file in (Path(path), *others))


def _parts(path: Pathlike) -> dict[str, Any] | None:
    """Which files hold the tensors of this one, and how each tensor was cut."""
    text = _metadata(path).get(_PARTS)
    return None if text is None else dict(json.loads(text))


def _load(path: Path) -> dict[str, Tensor]:
    with _reading(path):
        tensors: dict[str, Tensor] = load_file(path)
    return tensors


def _metadata(path: Pathlike) -> dict[str, str]:
    with _reading(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@contextmanager
def _reading(path: Pathlike) -> Iterator[None]:
    if Path(path).is_dir():
        raise InputError(f"{os.fspath(path)!r} is a folder; expected a safetensors file")
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} cannot be read as safetensors: {error}") from None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_toml(path: Pathlike, expected: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        path: of the file.
        expected: what it should hold, for the error where there is none ("parameters", "a [model] table").
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a TOML file with {expected}") from None
    except IsADirectoryError:
        raise InputError(f"{os.fspath(path)!r} is a folder; expected a TOML file with {expected}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{os.fspath(path)} cannot be read as TOML: {error}") from None


def write_tensors(
    path: Pathlike,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    shard_size: int | None = None,
) -> None:
    """Writes named tensors as safetensors, with texts beside them.

    Args:
        path: of the file.
        tensors: by name.
        metadata: the texts.
        shard_size: the most bytes in one file, at least 64,000. Tensors that need more are split, where necessary,
            over NAME-a1.safetensors, NAME-a2.safetensors, … beside it, which `read_tensors` puts together. Written
            again they are called NAME-b1 and so on, and the old ones stay until the file itself names the new ones.
    """
    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    target = Path(path)
    before = _known_parts(target)
    if shard_size is None or sum(_room(name, t) for name, t in stored.items()) <= shard_size - _LEAST // 2:
        _write(target, stored, metadata)
    else:
        turn = "b" if any(name.startswith(f"{target.stem}-a") for name in before) else "a"
        pieces, cut = _cut(stored, shard_size)
        files = {f"{target.stem}-{turn}{number}{target.suffix}": piece for number, piece in enumerate(pieces, 1)}
        for name, piece in files.items():
            _write(target.with_name(name), piece, None)
        checksums = {name: _checksum(target.with_name(name)) for name in files}
        index = json.dumps({"files": checksums, "tensors": cut})
        _write(target, {}, {**(metadata or {}), _PARTS: index})
        before -= files.keys()
    for name in before:
        target.with_name(name).unlink(missing_ok=True)


def parse_size(text: str) -> int:
    """Bytes of a shard, from a number with a unit.

    Example:
        >>> parse_size("15MB")
        15000000
    """
    units = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    number = text.strip().rstrip("bBkKmMgG")
    try:
        size = float(number) * units[text.strip().removeprefix(number).lower() or "b"]
    except (ValueError, KeyError):
        size = math.nan
    if not _LEAST <= size < math.inf:
        raise InputError(f"{text!r} is not a file size; expected 64kB or more, such as 15MB")
    return int(size)


def _cut(tensors: Mapping[str, Tensor], size: int) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """The tensors in parts of at most so many bytes, and for each the number of its pieces and its shape."""
    parts: list[dict[str, Tensor]] = []
    room, cut = 0, {}
    for name, t in tensors.items():
        rest, count = t.reshape(-1), 0
        while count == 0 or len(rest):
            if room < _ENTRY + len(name) + min(rest.nbytes, 4096):
                parts.append({})
                room = size - _ENTRY
            piece = rest[: (room - _ENTRY - len(name)) // t.element_size()].clone()
            parts[-1][f"{name}@{count}"] = piece
            rest, room, count = rest[len(piece) :], room - _room(name, piece), count + 1
        cut[name] = (count, list(t.shape))
    return parts, cut


def _room(name: str, t: Tensor) -> int:
    return _ENTRY + len(name) + t.nbytes


def _known_parts(path: Path) -> set[str]:
    """The parts of a file that is already there."""
    try:
        parts = _parts(path) if path.is_file() else None
    except InputError:  # some other file is about to be replaced
        parts = None
    return set() if parts is None else {Path(name).name for name in parts["files"]}


def _write(path: Path, stored: dict[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    with _whole_or_not(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode  # as for any file of the user; safetensors would keep it from others
        save_file(stored, partial, None if metadata is None else dict(metadata))
        partial.chmod(mode)


def write_text(path: Pathlike, text: str) -> None:
    """Writes a text file."""
    write_bytes(path, text.encode())


def write_bytes(path: Pathlike, content: bytes) -> None:
    """Writes a file."""
    with _whole_or_not(path) as partial:
        partial.write_bytes(content)


def check_output(path: Pathlike) -> None:
    """Refuses a file that could not be written, before the work begins; touches nothing.

    Its folder must exist: a mistyped name creates no folders.
    """
    target = Path(path)
    if target.is_dir():
        raise _unwritable(path, "it is a folder; expected the name of a file")
    if target.exists() and not target.is_file():
        raise _unwritable(path, "it is a device or a pipe; expected the name of a file")
    folder = _standing(target)
    if folder != target.absolute().parent:
        missing = shlex.quote(str(target.parent))
        raise _unwritable(path, f"there is no folder {str(target.parent)!r}; make it first: mkdir -p {missing}")
    _check_room(path, folder)
    if target.exists() and not os.access(target, os.W_OK):
        raise _unwritable(path, "the file is read-only; name another one")


def check_folder(path: Pathlike, *files: str) -> None:
    """Refuses a folder that could not be filled with these files, before the work begins; touches nothing.

    It need not exist: `make_folder` creates it.
    """
    folder = Path(path)
    if folder.is_dir():
        for file in files:
            check_output(folder / file)
    elif folder.exists():
        raise _unwritable(path, "it is a file; expected the name of a folder")
    else:
        _check_room(path, _standing(folder))


def make_folder(path: Pathlike) -> Path:
    """A folder to be filled, created with its parents if it is missing."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise _unwritable(path, "it is a file; expected the name of a folder") from None
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None
    return Path(path)


def _standing(path: Path) -> Path:
    """The nearest existing folder above a path; a file in its place is refused."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise _unwritable(path, f"{str(folder)!r} is not a folder")
    return folder


def _check_room(path: Pathlike, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(path, f"you may not write in {str(folder)!r}; name another folder")
    disk = shutil.disk_usage(folder)
    if disk.total > 0 and disk.free == 0:
        raise _unwritable(path, "no space is left on disk")


@contextmanager
def _whole_or_not(path: Pathlike) -> Iterator[Path]:
    """A temporary file that takes the place of the target at the end; if the work fails, nothing of it stays."""
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        check_output(path)
        yield partial
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else None
        raise _unwritable(path, reason or str(error)) from None
    except BaseException:  # Ctrl-C
        partial.unlink(missing_ok=True)
        raise


def _unwritable(path: Pathlike, reason: str) -> InputError:
    return InputError(f"{os.fspath(path)!r} cannot be written: {reason}")
