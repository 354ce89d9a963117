"""Long work on the terminal: progress while it runs, and what is finished when it is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from holdfast.progress import progress_bar
from holdfast.storage import write_text
from holdfast.studies.processes import Tell, side_by_side
from holdfast.version import __version__

T = TypeVar("T")

INTERRUPTED = 130


@dataclass(frozen=True)
class Job(Generic[T]):
    """One unit of work, small enough that losing it does not hurt."""

    label: str
    run: Callable[[], T]


@dataclass(frozen=True)
class Finished(Generic[T]):
    """The results of the jobs that were finished, in order."""

    results: list[T]
    interrupted: bool

    def exit(self, total: int) -> None:
        """Says what is missing, if anything, and leaves with the status of an interrupt."""
        if self.interrupted:
            typer.echo(f"holdfast: interrupted; {len(self.results)} of {total} parts were finished", err=True)
            raise typer.Exit(INTERRUPTED)


def carry_out(jobs: Sequence[Job[T]]) -> Finished[T]:
    """Runs the jobs in turn with a progress bar on standard error; Ctrl-C ends the run, not the results."""
    results: list[T] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=len(jobs))
        try:
            for job in jobs:
                progress.update(task, description=job.label)
                results.append(job.run())
                progress.advance(task)
        except KeyboardInterrupt:
            return Finished(results, interrupted=True)
    return Finished(results, interrupted=False)


def work_through(work: Callable[[T, Tell], None], items: Sequence[T], labels: Sequence[str], jobs: int) -> bool:
    """Does long work on every item, several at once, with a progress bar; returns whether all of it was finished.

    Args:
        work: a module-level function that leaves its results in files and reports its progress.
        items: what it is called with.
        labels: what the bar calls them.
        jobs: how many at once, each with one thread; with 1, the work is done in this process.
    """
    shares = [0.0] * len(items)
    with progress_bar() as bar:
        bar.columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        task = bar.add_task("starting", total=len(items))

        def told(index: int, share: float) -> None:
            shares[index] = share
            label = f"{sum(done == 1 for done in shares)} of {len(shares)} done; {labels[index]}"
            bar.update(task, description=label, completed=sum(shares))
            if share == 1:
                bar.console.print(f"finished {labels[index]}", highlight=False, markup=False)

        try:
            side_by_side(work, items, jobs, told)
        except KeyboardInterrupt:
            return False
    return True


def emit_json(command: str, payload: Mapping[str, object], *, stdout: bool, out: Path | None) -> None:
    """The results as JSON: on standard output, in a file, or both."""
    text = json.dumps({"command": command, "holdfast": __version__, **payload}, indent=2, allow_nan=False)
    if out is not None:
        write_text(out, text + "\n")
    if stdout:
        typer.echo(text)


def say_written(*paths: Path | None) -> None:
    """Names the files that were written, if there are any."""
    written = ", ".join(str(path) for path in paths if path is not None)
    if written:
        Console().print(f"Written: {written}", soft_wrap=True, highlight=False, markup=False)
