"""Merges shards into one run, if nothing in them disagrees."""

from __future__ import annotations

import math
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from holdfast.certification.examples import Data, read_examples
from holdfast.certification.lines import Header, Record
from holdfast.certification.store import Stored, differences, read, write
from holdfast.errors import InputError, SoundnessError
from holdfast.results import CertificationRun
from holdfast.storage import Pathlike, check_output

#: Relative difference between two computations of one number: far above rounding, far below a bisection's last step.
TOLERANCE = 1e-5


def merge(paths: Sequence[Pathlike], out: Pathlike | None = None, data: Data | None = None) -> CertificationRun:
    """Joins the files of shards.

    Args:
        paths: files that `certify` wrote with the same settings; an input may be in several of them, and some may
            cover more inputs than others.
        out: file for the whole run, by index.
        data: of the run, as `certify` takes them, so that its page can show the inputs.

    Example:
        >>> merge(["shard-1.jsonl", "shard-2.jsonl"], out="run.jsonl").missing
        ()
    """
    if not paths:
        raise InputError("no file was given; expected the files of the shards")
    if out is not None:
        check_output(out)
    stored = [read(path) for path in paths]
    header = max((part.header for part in stored), key=lambda part: len(part.indices))
    records: dict[int, Record] = {}
    first_in: dict[int, str] = {}
    for path, part in zip([os.fspath(path) for path in paths], stored, strict=True):
        differing = differences(part.header.settings, header.settings)
        if differing:
            raise InputError(f"{path} and {os.fspath(paths[0])} are parts of different runs: {', '.join(differing)}")
        if not part.header.begins(header):
            raise InputError(f"{path} is about other inputs than the rest; expected the files of one run")
        for index, record in part.records.items():
            if index in records and (differing := disagreements(record, records[index], "seconds" in header.settings)):
                raise InputError(f"{path} and {first_in[index]} disagree on input {index}: {', '.join(differing)}")
            records.setdefault(index, record)
            first_in.setdefault(index, path)
    failures = {index: why for part in stored for index, why in part.failures.items() if index not in records}
    whole = Stored(header, records, failures)
    run = whole.run({} if data is None else _shown(data, header))
    check_order(run)
    if out is not None:
        write(out, whole)
    return run


def _shown(data: Data, header: Header) -> dict[int, Tensor | tuple[str, ...]]:
    """What a page can show of the data, if they are those of the run."""
    examples = read_examples(data, split=header.split)
    if examples.checksum != header.settings["data"]:
        raise InputError(f"the data {examples.name!r} are not those that the run was made from; expected the same ones")
    return examples.shown()


def disagreements(found: Record, expected: Record, timed: bool = False) -> list[str]:
    """Where two computations of one input differ and should not, in words.

    A search may end elsewhere on another machine, so attack radii matter only by what they imply for the radii; and
    where the time was limited, radii are not compared either.
    """
    free = {"attack_radius", "seconds", "perturbation", "losses", "unfinished"}
    free |= {"radius", "method", "through"} if timed else set()
    differing = [
        f"{field.name} {getattr(found, field.name)!r} against {getattr(expected, field.name)!r}"
        for field in fields(found)
        if field.name not in free and not _same(getattr(found, field.name), getattr(expected, field.name))
    ]
    for one, other in ((found, expected), (expected, found)):
        if one.attack_radius is not None and 0 < one.attack_radius <= other.radius:
            differing.append(f"radius {other.radius!r} against a change at {one.attack_radius!r}")
    return differing


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, float) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(found == expected)


def check_order(run: CertificationRun) -> None:
    """Certified <= attacked <= clean at every radius at which one of them changes; otherwise something is wrong."""
    if not run.attacked_too:
        return
    right = [record for record in run.records if record.correct]
    proved = sorted(record.radius for record in right)
    nearest = sorted(record.attack_radius or 0.0 for record in right)
    for radius in sorted({0.0, *run.radii, *proved, *nearest}):
        certified, attacked = len(right) - bisect_left(proved, radius), len(right) - bisect_right(nearest, radius)
        if radius < math.inf and not certified <= attacked <= len(right):
            raise SoundnessError(
                f"at radius {radius!r} {certified} inputs are certified, the attack leaves {attacked} of {len(right)}; "
                "please report the run"
            )
