"""Files: safetensors in and out, TOML in; every file is written whole or not at all."""

from __future__ import annotations

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
from torch import Tensor

from holdfast.errors import InputError

Pathlike = str | os.PathLike[str]


def read_tensors(path: Pathlike) -> dict[str, Tensor]:
    """The named tensors of a safetensors file."""
    _refuse_folder(path)
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} cannot be read as safetensors: {error}") from None
    return tensors


def read_metadata(path: Pathlike) -> dict[str, str]:
    """The texts that a safetensors file carries beside its tensors."""
    _refuse_folder(path)
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except FileNotFoundError:
        raise InputError(f"no file {os.fspath(path)!r}; expected a safetensors file") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} cannot be read as safetensors: {error}") from None


def _refuse_folder(path: Pathlike) -> None:
    if Path(path).is_dir():
        raise InputError(f"{os.fspath(path)!r} is a folder; expected a safetensors file")


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


def write_tensors(path: Pathlike, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes named tensors as safetensors, with texts beside them."""
    stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
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

    The folder that it is to stand in must be there: a name that is mistyped makes no folders.
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

    It need not be there: `make_folder` makes it.
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
    """A folder that is to be filled, made with those above it if it is missing."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise _unwritable(path, "it is a file; expected the name of a folder") from None
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None
    return Path(path)


def _standing(path: Path) -> Path:
    """The nearest folder above a path that is there; a file in its place is refused."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise _unwritable(path, f"{str(folder)!r} is not a folder")
    return folder


def _check_room(path: Pathlike, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(path, f"you may not write in {str(folder)!r}; name another folder")
    disk = shutil.disk_usage(folder)
    if disk.total > 0 and disk.free == 0:
        raise _unwritable(path, "no space is left on the disk")


@contextmanager
def _whole_or_not(path: Pathlike) -> Iterator[Path]:
    """A file beside the one that is meant, which takes its place at the end; of one that fails nothing stays."""
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
