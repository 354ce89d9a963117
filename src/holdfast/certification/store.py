"""The file of a run: JSON lines, a header and then one line per input, on disk before it counts.

Whenever the writer is killed, the file holds every record that was reported and at most one half line at its
end, which the next writer cuts off. A run that is extended to more inputs adds a line that asks for them; an input that
failed has a line with the reason, until there is a record of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from torch import Tensor

from holdfast.certification.journal import Journal, complete, opened
from holdfast.certification.lines import Header, Record, failure_line, growth_line, header_line, parse, record_line
from holdfast.errors import HoldfastError, InputError
from holdfast.results import CertificationRun
from holdfast.storage import Pathlike, write_text


@final
@dataclass(frozen=True)
class Stored:
    """What a file holds: the header, the records by index, and why there is none for an input that failed."""

    header: Header
    records: dict[int, Record]
    failures: dict[int, str] = field(default_factory=dict)

    def run(self, inputs: Mapping[int, Tensor | tuple[str, ...]] | None = None) -> CertificationRun:
        """The result, with what can be shown of the inputs."""
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
            failures={index: self.failures[index] for index in sorted(self.failures)},
            inputs=inputs or {},
        )


@final
class Writer:
    """A file that is open for appending, by one process at a time."""

    def __init__(self, journal: Journal, records: dict[int, Record], failures: dict[int, str]) -> None:
        self._journal = journal
        self.records, self.failures = records, failures

    def append(self, *records: Record) -> None:
        """Adds records; they are on disk when this returns."""
        twice = [record.index for record in records if record.index in self.records]
        if twice:
            raise HoldfastError(f"input {twice[0]} is in the file already; please report how it came to run twice")
        self._journal.append(b"".join(map(record_line, records)))
        self.records |= {record.index: record for record in records}
        for record in records:
            self.failures.pop(record.index, None)

    def fail(self, index: int, reason: str) -> None:
        """Adds why an input could not be done; it can be tried again."""
        self._journal.append(failure_line(index, reason))
        self.failures[index] = reason


@contextmanager
def open_writer(path: Pathlike, header: Header, *, resume: bool) -> Iterator[Writer]:
    """Opens the file of a run, new or to be resumed.

    Args:
        path: the file.
        header: of this run; one that resumes must have the file's settings, and ask for its inputs or for more.
        resume: resume what is there; otherwise start afresh.
    """
    name = os.fspath(path)
    with opened(path) as journal:
        content = complete(Path(name).read_bytes()) if resume else b""
        before, records, failures = parse(name, content) if content else (None, {}, {})
        if before is not None:
            _refuse_other(name, before, header)
        journal.cut(len(content))
        if before is None:
            journal.append(header_line(header))
        elif before.indices != header.indices:
            journal.append(growth_line(before, header))
        yield Writer(journal, records, failures)


def read(path: Pathlike) -> Stored:
    """What the file of a run holds; a half line at its end does not count."""
    name = os.fspath(path)
    try:
        content = complete(Path(name).read_bytes())
    except OSError as error:
        raise InputError(f"{name!r} cannot be read: {error.strerror}; expected the file of a run") from None
    if not content:
        raise InputError(f"{name}: there is no complete line; expected the file of a run, as certify writes it")
    return Stored(*parse(name, content))


def write(path: Pathlike, stored: Stored) -> None:
    """Writes a whole file at once, by index."""
    rows = [record_line(stored.records[index]) for index in sorted(stored.records)]
    rows += [failure_line(index, stored.failures[index]) for index in sorted(stored.failures)]
    write_text(path, (header_line(stored.header) + b"".join(rows)).decode())


def differences(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The settings that differ, in words."""
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    return [f"{name} {_short(found.get(name))} against {_short(expected.get(name))}" for name in names]


def _refuse_other(name: str, found: Header, expected: Header) -> None:
    anew = "write to another file, or start afresh with resume=False (--no-resume)"
    differing = differences(found.settings, expected.settings)
    if differing:
        raise InputError(f"{name} was made with other settings than this run: {', '.join(differing)}; {anew}")
    if not found.begins(expected):
        asked, wanted = len(found.indices), len(expected.indices)
        why = "fewer" if expected.begins(found) else "others"
        raise InputError(
            f"{name} covers {asked} inputs and this run {wanted}, {why}; a file only takes more of the same "
            f"data: {anew}"
        )


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return f"{value[:12]}…" if len(value) == 64 else value  # a digest
