"""The lines of a run's file, and what makes a line one of them: nothing is read that `certify` would not write."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
import torch

from holdfast.certification.journal import from_line, to_line
from holdfast.certification.settings import are_settings, checksum_of_inputs, fingerprint
from holdfast.errors import HoldfastError, InputError
from holdfast.radii import check_radii
from holdfast.results import UNDECIDED, Certificate, RadiusEstimate

SCHEMA = "holdfast.certify/2"
_FORMER = "holdfast.certify/1"  # its inputs were part of the settings, and could not grow

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
        indices: of all inputs of the run, whichever shard they fall into: the first ones of the data.
        radii: at which accuracies are shown.
        command: the command line that began the run, where there was one.
    """

    settings: dict[str, str]
    model: str
    data: str
    split: str
    indices: list[int]
    radii: list[float]
    command: str | None = None

    @property
    def fingerprint(self) -> str:
        """One word for the settings."""
        return fingerprint(self.settings)

    @property
    def inputs(self) -> str:
        """One word for the inputs."""
        return checksum_of_inputs(self.indices)

    def begins(self, other: Header) -> bool:
        """Whether the other one asks for these inputs and perhaps for more after them."""
        return other.indices[: len(self.indices)] == self.indices


def header_line(header: Header) -> bytes:
    """The first line of a file."""
    return to_line({"schema": SCHEMA, "fingerprint": header.fingerprint, "inputs": header.inputs} | asdict(header))


def growth_line(before: Header, after: Header) -> bytes:
    """The line that asks for more inputs."""
    return to_line({"indices": after.indices[len(before.indices) :], "inputs": after.inputs})


def record_line(record: Record) -> bytes:
    """The line of one input, without fields that are empty or have their usual value."""
    fields = record.to_dict()
    del fields["side"]
    for name, usual in _OPTIONAL.items():
        if fields[name] == usual:
            del fields[name]
    if record.perturbation is not None:
        numbers = record.perturbation.contiguous().numpy().astype("<f4")
        fields |= {"perturbation": base64.b64encode(numbers.tobytes()).decode(), "shape": list(numbers.shape)}
    return to_line(fields)


def failure_line(index: int, reason: str) -> bytes:
    """The line of an input that could not be done."""
    return to_line({"failed": index, "reason": reason})


def parse(name: str, content: bytes) -> tuple[Header, dict[int, Record], dict[int, str]]:
    """The header, with all inputs added to it, the records by index, and why inputs without one failed.

    Args:
        name: of the file, for messages.
        content: complete lines.
    """
    first, *lines = content.splitlines()
    header = _read_header(name, first)
    expected, records, failures = set(header.indices), dict[int, Record](), dict[int, str]()
    for number, line in enumerate(lines, 2):
        try:
            row = from_line(line)
            if "inputs" in row:
                header = _grown(header, row)
                expected = set(header.indices)
                continue
            if "failed" in row:
                index, reason = _read_failure(row)
                _check_new(index, records, expected)
                failures[index] = reason
                continue
            record = _read_record(row, header.settings)
            _check_new(record.index, records, expected)
        except HoldfastError as error:
            raise type(error)(f"{name}, line {number}: {error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{name}, line {number}: no record ({error}); was the file edited?") from None
        records[record.index] = record
        failures.pop(record.index, None)
    return header, records, failures


# -- one line


def _read_header(name: str, line: bytes) -> Header:
    try:
        fields = from_line(line)
    except ValueError:
        raise InputError(f"{name}: the first line is not a header; expected what certify writes") from None
    schema, stated, inputs = (fields.pop(key, None) for key in ("schema", "fingerprint", "inputs"))
    if schema not in (SCHEMA, _FORMER):
        raise InputError(f"{name}: the schema is {schema!r}; expected {SCHEMA!r}, as certify writes it")
    if schema == _FORMER:
        fields.pop("limit", None)
    try:
        header = Header(**fields)
        _check_header(header)
    except (TypeError, ValueError, InputError) as error:
        raise InputError(f"{name}: the header does not fit {schema}: {error}; was the file edited?") from None
    if stated != header.fingerprint:
        raise InputError(f"{name}: the fingerprint is not that of the settings beside it; was the file edited?")
    if schema == _FORMER:
        settings = dict(header.settings)
        inputs = settings.pop("inputs", None)
        header = replace(header, settings=settings)
    if inputs != header.inputs:
        raise InputError(f"{name}: the inputs do not match their checksum; was the file edited?")
    if not are_settings(header.settings):
        raise InputError(f"{name}: the settings are {', '.join(header.settings)}; was the file edited?")
    return header


def _check_header(header: Header) -> None:
    texts = (header.model, header.data, header.split, header.command or "")
    settings = header.settings
    if not isinstance(settings, dict) or not all(isinstance(text, str) for text in (*texts, *settings.values())):
        raise ValueError("a setting is not text")
    if not isinstance(header.radii, list):
        raise ValueError("the radii are not a list")
    check_radii(header.radii, "radii")
    _check_indices(header.indices)


def _check_indices(indices: Any) -> None:
    if not isinstance(indices, list) or not indices or any(type(index) is not int for index in indices):
        raise ValueError("the indices are not a list of whole numbers")
    if len(set(indices)) < len(indices):
        raise ValueError("an index occurs twice")


def _grown(header: Header, row: dict[str, Any]) -> Header:
    """The header with the inputs that a later line asks for."""
    if row.keys() != {"indices", "inputs"}:
        raise ValueError("a line that asks for inputs has other keys")
    _check_indices(row["indices"])
    indices = header.indices + row["indices"]
    _check_indices(indices)
    if row["inputs"] != checksum_of_inputs(indices):
        raise InputError("the inputs do not match their checksum; was the file edited?")
    return replace(header, indices=indices)


def _check_new(index: int, records: dict[int, Record], expected: set[int]) -> None:
    if index in records or index not in expected:
        why = "occurs twice" if index in records else "is not one of the run's"
        raise InputError(f"the index {index} {why}; was the file edited?")


def _read_failure(row: dict[str, Any]) -> tuple[int, str]:
    """Which input failed, and why."""
    index, reason = row["failed"], row.get("reason")
    if row.keys() != {"failed", "reason"} or type(index) is not int or not isinstance(reason, str):
        raise ValueError("a line of a failure has other keys or values")
    return index, reason


_KINDS = {
    "index": int,
    "label": int,
    "prediction": int,
    "margin": float,
    "radius": float,
    "method": str,
    "guarantee": str,
    "seconds": float,
}


_OPTIONAL: dict[str, Any] = {"norm": "l2", "through": None, "losses": {}, "unfinished": []}


def _read_record(row: dict[str, Any], settings: dict[str, str]) -> Record:
    """The record of a line, which must be one of a run with these settings."""
    packed, shape = row.pop("perturbation", None), row.pop("shape", None)
    if row.keys() - _OPTIONAL.keys() != {*_KINDS, "attack_radius"} or (packed is None) != (shape is None):
        raise ValueError(f"the keys are {', '.join(row)}")
    row |= _read_optional(row, settings)
    for name, kind in _KINDS.items():
        if type(row[name]) is not kind:
            raise ValueError(f"{name} is {row[name]!r}")
    if row["guarantee"] != settings["guarantee"]:
        raise InputError(f"a {row['guarantee']} record in another run; was the file edited?")
    row["attack_radius"] = attacked = _read_attack_radius(row["attack_radius"])
    if (attacked is None) != (settings["attack"] == "none") or (packed is not None and attacked is None):
        raise InputError(
            f"the attack radius is {attacked!r} with the attack {settings['attack']}; was the file edited?"
        )
    if row["prediction"] == UNDECIDED and attacked:
        raise InputError(f"the attack radius is {attacked!r} where no class is ahead; expected 0")
    if not (math.isfinite(row["seconds"]) and row["seconds"] >= 0):
        raise ValueError(f"seconds is {row['seconds']!r}")
    perturbation = None if packed is None else _unpacked(packed, shape)
    kind = RadiusEstimate if row["guarantee"] == "numerical" else Certificate
    return kind(**row, perturbation=perturbation)


def _read_optional(row: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    """The optional fields of a line, checked."""
    norm, through, losses, unfinished = (row.get(name, usual) for name, usual in _OPTIONAL.items())
    if norm != settings.get("norm", "l2"):
        raise InputError(f"a record in the norm {norm} in another run; was the file edited?")
    if through is not None and (through != "ball" or norm == "l2"):
        raise ValueError(f"through is {through!r}")
    if not isinstance(losses, dict) or not all(type(lost) is float and math.isfinite(lost) for lost in losses.values()):
        raise ValueError(f"losses is {losses!r}")
    if not isinstance(unfinished, list) or not all(isinstance(note, str) for note in unfinished):
        raise ValueError(f"unfinished is {unfinished!r}")
    return {"norm": norm, "through": through, "losses": losses, "unfinished": tuple(unfinished)}


def _read_attack_radius(stated: Any) -> float | None:
    if stated == "inf":
        return math.inf
    if stated is not None and not (type(stated) is float and math.isfinite(stated)):
        raise ValueError(f"attack_radius is {stated!r}")
    return stated


def _unpacked(packed: Any, shape: Sequence[int]) -> torch.Tensor:
    """The perturbation from its float32 numbers in base64."""
    numbers = np.frombuffer(base64.b64decode(packed, validate=True), "<f4").astype(np.float32)
    return torch.from_numpy(numbers.reshape(shape))
