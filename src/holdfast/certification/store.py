"""The file of a run: JSON lines, a header and then one line for each input, appended and flushed one by one.

Whatever moment the writer is killed at, the file holds every record that was reported and at most one half line at its
end, which the next writer cuts off.
"""

from __future__ import annotations

import base64
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from holdfast.certification.settings import fingerprint
from holdfast.errors import HoldfastError, InputError
from holdfast.results import Certificate, CertificationRun, RadiusEstimate
from holdfast.storage import Pathlike, write_text

if sys.platform != "win32":
    import fcntl

SCHEMA = "holdfast.certify/1"

Record = Certificate | RadiusEstimate


@final
@dataclass(frozen=True)
class Header:
    """The first line.

    Attributes:
        settings: everything that the records depend on.
        model: what to call the model; the command line loads it by this name.
        data: what to call the data set, likewise.
        split: its part.
        limit: how many inputs were taken from its beginning; None for all.
        indices: of all inputs of the run, whichever shard they fall into.
        radii: at which accuracies are shown.
        command: the command line that began the run, where there was one.
    """

    settings: dict[str, str]
    model: str
    data: str
    split: str
    limit: int | None
    indices: list[int]
    radii: list[float]
    command: str | None = None

    @property
    def fingerprint(self) -> str:
        """One word for the settings."""
        return fingerprint(self.settings)


@final
@dataclass(frozen=True)
class Stored:
    """What a file holds: the header and the records by index."""

    header: Header
    records: dict[int, Record]

    def run(self) -> CertificationRun:
        """The result."""
        header = self.header
        return CertificationRun(
            model=header.model,
            data=header.data,
            radii=tuple(header.radii),
            records=tuple(self.records[index] for index in sorted(self.records)),
            missing=tuple(sorted(set(header.indices) - self.records.keys())),
            settings=header.settings,
            fingerprint=header.fingerprint,
            command=header.command,
        )


@final
class Writer:
    """A file that is open for appending, by one process at a time."""

    def __init__(self, descriptor: int, records: dict[int, Record]) -> None:
        self._descriptor = descriptor
        self.records = records

    def append(self, record: Record) -> None:
        """Adds a record; it is on the disk when this returns."""
        if record.index in self.records:
            raise HoldfastError(f"input {record.index} is in the file already; please report how it came to run twice")
        _write(self._descriptor, _line(_row(record)))
        self.records[record.index] = record


@contextmanager
def open_writer(path: Pathlike, header: Header, *, resume: bool) -> Iterator[Writer]:
    """Opens the file of a run, a new one or one to go on with.

    Args:
        path: the file.
        header: of this run; one that resumes must have the settings that the file has.
        resume: go on with what is there; otherwise begin anew.
    """
    name = os.fspath(path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if sys.platform != "win32":
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{name}: another run is writing to it; wait for it, or give another file") from None
        content = _complete(Path(name).read_bytes()) if resume else b""
        os.ftruncate(descriptor, len(content))
        if content:
            stored = _parse(name, content)
            _refuse_other(name, stored.header.settings, header.settings)
            records = stored.records
        else:
            records = {}
            _write(descriptor, _header_line(header))
        yield Writer(descriptor, records)
    finally:
        os.close(descriptor)


def read(path: Pathlike) -> Stored:
    """What the file of a run holds; a half line at its end does not count."""
    name = os.fspath(path)
    try:
        content = _complete(Path(name).read_bytes())
    except OSError as error:
        raise InputError(f"{name!r} cannot be read: {error.strerror}; expected the file of a run") from None
    if not content:
        raise InputError(f"{name}: there is no complete line; expected the file of a run, as certify writes it")
    return _parse(name, content)


def write(path: Pathlike, stored: Stored) -> None:
    """Writes a whole file at once, by index."""
    rows = [_line(_row(stored.records[index])) for index in sorted(stored.records)]
    write_text(path, (_header_line(stored.header) + b"".join(rows)).decode())


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The settings that differ, in words."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return [f"{name} {_short(found.get(name))} against {_short(expected.get(name))}" for name in names]


def _refuse_other(name: str, found: dict[str, str], expected: dict[str, str]) -> None:
    differing = differences(found, expected)
    if differing:
        raise InputError(
            f"{name} was made with other settings than this run: {', '.join(differing)}; write to another file, or "
            "begin anew with resume=False (--no-resume)"
        )


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return f"{value[:12]}…" if len(value) == 64 else value  # a digest


# -- lines


def _complete(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _line(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n").encode()


def _header_line(header: Header) -> bytes:
    return _line({"schema": SCHEMA, "fingerprint": header.fingerprint} | asdict(header))


def _write(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
    os.fsync(descriptor)


def _row(record: Record) -> dict[str, Any]:
    fields = record.to_dict()
    if record.perturbation is not None:
        numbers = record.perturbation.contiguous().numpy().astype("<f4")
        fields |= {"perturbation": base64.b64encode(numbers.tobytes()).decode(), "shape": list(numbers.shape)}
    return fields


def _record(row: dict[str, Any]) -> Record:
    shape, packed = row.pop("shape", None), row.pop("perturbation", None)
    if row.get("attack_radius") == "inf":
        row["attack_radius"] = math.inf
    perturbation: Tensor | None = None
    if packed is not None:
        numbers = np.frombuffer(base64.b64decode(packed, validate=True), "<f4").astype(np.float32)
        perturbation = torch.from_numpy(numbers.reshape(shape))
    kind = RadiusEstimate if row["guarantee"] == "numerical" else Certificate
    return kind(**row, perturbation=perturbation)


def _parse(name: str, content: bytes) -> Stored:
    first, *lines = content.splitlines()
    try:
        fields = json.loads(first)
        schema = fields.pop("schema", None)
        stated = fields.pop("fingerprint", None)
    except (ValueError, AttributeError):
        raise InputError(f"{name}: the first line is no header; expected what certify writes") from None
    if schema != SCHEMA:
        raise InputError(f"{name}: the schema is {schema!r}; expected {SCHEMA!r}, as certify writes it")
    try:
        header = Header(**fields)
    except TypeError as error:
        raise InputError(f"{name}: the header does not fit {SCHEMA}: {error}; was the file edited?") from None
    if stated != header.fingerprint:
        raise InputError(f"{name}: the fingerprint is not that of the settings beside it; was the file edited?")
    records: dict[int, Record] = {}
    expected = set(header.indices)
    for number, line in enumerate(lines, 2):
        try:
            record = _record(json.loads(line))
        except HoldfastError as error:
            raise type(error)(f"{name}, line {number}: {error}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{name}, line {number}: no record ({error}); was the file edited?") from None
        if record.index in records or record.index not in expected:
            why = "stands twice" if record.index in records else "is none of the run's"
            raise InputError(f"{name}, line {number}: the index {record.index} {why}; was the file edited?")
        if record.guarantee != header.settings.get("guarantee"):
            raise InputError(f"{name}, line {number}: a {record.guarantee} record in another run; was the file edited?")
        records[record.index] = record
    return Stored(header, records)
