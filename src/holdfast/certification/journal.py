"""Files of JSON lines that only grow: a line counts once it is on disk, and a half line at the end never does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, final

from holdfast.errors import InputError
from holdfast.storage import Pathlike, check_output

if sys.platform != "win32":
    import fcntl


@final
@dataclass(frozen=True)
class Journal:
    """A file that is open for appending."""

    name: str
    descriptor: int

    def append(self, line: bytes) -> None:
        """Adds lines; they are on disk when this returns, and what cannot be written whole is removed."""
        before = os.fstat(self.descriptor).st_size
        try:
            while line:
                line = line[os.write(self.descriptor, line) :]
            os.fsync(self.descriptor)
        except OSError as error:
            self.cut(before)
            if before == 0:
                Path(self.name).unlink()
            kept = "; what was finished before is kept" if before else ""
            raise InputError(f"{self.name!r} cannot be written: {error.strerror}{kept}") from None

    def cut(self, length: int) -> None:
        """Keeps only the beginning."""
        os.ftruncate(self.descriptor, length)


@contextmanager
def opened(path: Pathlike, *, wait: bool = False) -> Iterator[Journal]:
    """A file for appending, new or existing, held by one process at a time.

    Args:
        path: the file.
        wait: until another process is done with it; otherwise that is an error.
    """
    name = os.fspath(path)
    check_output(path)
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if sys.platform != "win32":
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError:
                raise InputError(f"{name}: another run is writing to it; wait for it, or give another file") from None
        yield Journal(name, descriptor)
    finally:
        os.close(descriptor)


def complete(content: bytes) -> bytes:
    """The whole lines of a file."""
    return content[: content.rfind(b"\n") + 1]


def to_line(value: Mapping[str, Any]) -> bytes:
    """A JSON object as a line; numbers that JSON does not have are refused."""
    return (json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n").encode()


def from_line(line: bytes) -> dict[str, Any]:
    """A JSON object without numbers that JSON does not have, and without repeated keys."""
    content = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_number)
    if not isinstance(content, dict):
        raise ValueError("no object")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key occurs twice")
    return content


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")
