"""Shows that the quick suite can fail: plants faults in a copy of the tree, one by one, and runs the tests near them.

    python tests/faults/run.py                   # all faults of planted.toml; writes results/faults.json
    python tests/faults/run.py --only attention  # those whose file or name holds the word; replaces their rows
    python tests/faults/run.py --tree ../before  # against the tests and kits of another checkout; writes nothing

A fault is caught if one of the quick tests of the files that it names fails, and passes again without it. That these
files alone are run makes the verdict "missed" strict: another file of the suite might still find the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch  # noqa: F401 - imported once, before the processes that test each fault are forked

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted.toml")
RESULT = ROOT / "results" / "faults.json"
COMMAND = "python tests/faults/run.py"
SECONDS = 900  # for the tests of one fault

Verdict = Literal["caught", "missed"]


@dataclass(frozen=True)
class Fault:
    """A small change that makes the package wrong.

    Attributes:
        name: what is wrong then.
        file: in which file of the package.
        old: what stands there, once.
        new: what stands there instead.
        tests: files of the suite, or classes in them, that are about it; they are run in this order.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise SystemExit(f"{self.file} has {text.count(self.old)} times {self.old!r}; expected once: {self.name!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Tested:
    """A fault, whether it was caught, by which test first, and after how many seconds of processor time."""

    fault: Fault
    verdict: Verdict
    by: str | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.fault) | {"verdict": self.verdict, "by": self.by, "seconds": round(self.seconds, 1)}


def read_faults(only: str | None) -> list[Fault]:
    rows = tomllib.loads(PLANTED.read_text(encoding="utf-8"))["fault"]
    faults = [Fault(**row | {"tests": tuple(row["tests"])}) for row in rows]
    return [fault for fault in faults if only is None or only in fault.file or only in fault.name]


class _First:
    """Remembers the first test that failed, or the file that could not be imported."""

    by: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.by is None:
            self.by = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.by is None:
            self.by = report.nodeid


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str | None]:
    """Runs tests of a tree in a process of its own; its exit status, and the first test that failed."""

    def inside() -> tuple[int, str | None]:
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        sys.path[:0] = [str(tree / "src")]
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            first = _First()
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings"]
            status = int(pytest.main([*options, *(f"tests/{test}" for test in tests)], [first]))
        assert Path(sys.modules["holdfast"].__file__ or "").is_relative_to(tree)
        return status, first.by

    return _forked(inside, SECONDS)


def _forked(work: Callable[[], Any], seconds: int) -> Any:
    """What `work` returns in a process of its own; one that takes too long has failed."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        signal.alarm(seconds)
        with os.fdopen(writing, "w") as pipe:
            json.dump(work(), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else (1, "the tests did not end")


def examine(fault: Fault, tree: Path) -> Tested:
    """Plants a fault in the tree, runs its tests and takes it out again."""
    path = tree / "src" / "holdfast" / fault.file
    text, times = path.read_text(encoding="utf-8"), path.stat()
    began = os.times()
    path.write_text(fault.planted(text), encoding="utf-8")
    os.utime(path, (time.time() + 1000, time.time() + 1000))  # compiled files know their source by its time
    try:
        status, by = run_tests(tree, fault.tests)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    ended = os.times()
    seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
    if status not in (0, 1):
        raise SystemExit(f"{fault.name!r}: pytest ended with {status} at {by}; expected tests that pass or fail")
    return Tested(fault, "caught" if status else "missed", by, seconds)


def copied(tree: Path, folder: str) -> Path:
    """A copy of a tree to plant faults in."""
    unneeded = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "out", "build")
    target = Path(folder, "tree")
    shutil.copytree(tree, target, ignore=unneeded)
    return target


def share(faults: Sequence[Fault], tree: Path, report: Callable[[Tested], None]) -> list[Tested]:
    """Examines faults one after the other; a verdict counts if its test passes without the fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy, results = copied(tree, folder), []
        for fault in faults:
            results.append(examine(fault, copy))
            report(results[-1])
        failed = sorted({result.by.removeprefix("tests/") for result in results if result.by is not None})
        if failed and (broken := run_tests(copy, failed))[0] != 0:
            raise SystemExit(f"{broken[1]} fails without any fault; mend it first")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="word", help="faults whose file or name holds it")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose suite is examined")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help=f"default {RESULT.relative_to(ROOT)}, for this tree")
    arguments = parser.parse_args()
    faults = read_faults(arguments.only)
    for fault in faults:
        fault.planted((arguments.tree / "src" / "holdfast" / fault.file).read_text(encoding="utf-8"))

    def report(result: Tested) -> None:
        print(f"{result.verdict:7}{result.seconds:6.1f} s  {result.fault.name}  [{result.by or 'nothing'}]", flush=True)

    results = _in_parallel(faults, arguments.tree.resolve(), max(1, arguments.jobs), report)
    missed = [row["name"] for row in results if row["verdict"] == "missed"]
    print(
        f"{len(results) - len(missed)} of {len(results)} faults are caught"
        + "".join(f"\n  missed: {m}" for m in missed)
    )
    out = arguments.out or (RESULT if arguments.tree == ROOT else None)
    if out is not None:
        store(results, out)
    sys.exit(bool(missed))


def store(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes results beside those of faults that were not planted now and are still planned in the same words."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        rows = {row["name"]: row for row in (*(json.loads(text)["faults"] if text else ()), *results)}
        planned = [(fault.name, json.loads(json.dumps(asdict(fault)))) for fault in read_faults(None)]
        kept = [rows[name] for name, fault in planned if name in rows and fault.items() <= rows[name].items()]
        caught = sum(row["verdict"] == "caught" for row in kept)
        content = {"command": COMMAND, "planned": len(planned), "planted": len(kept), "caught": caught, "faults": kept}
        file.truncate(0)
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _in_parallel(
    faults: Sequence[Fault], tree: Path, jobs: int, report: Callable[[Tested], None]
) -> list[dict[str, Any]]:
    """The results in the order of the faults."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for job in range(jobs):
            if (child := os.fork()) == 0:
                rows = [result.to_dict() for result in share(faults[job::jobs], tree, report)]
                Path(folder, str(job)).write_text(json.dumps(rows), encoding="utf-8")
                os._exit(0)
            children.append(child)
        if any(os.waitpid(child, 0)[1] for child in children):
            raise SystemExit("a process failed; see above")
        rows = [row for job in range(jobs) for row in json.loads(Path(folder, str(job)).read_text(encoding="utf-8"))]
    order = [fault.name for fault in faults]
    return sorted(rows, key=lambda row: order.index(row["name"]))


if __name__ == "__main__":
    main()
