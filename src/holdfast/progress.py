"""A bar while long work runs, in a terminal and in a notebook, unless the caller turns it off or follows it himself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar() -> Progress:
    """A bar on standard error that leaves no trace, and is silent where that is neither a terminal nor a notebook."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter
    # An input may take minutes: the remaining time is estimated from the last hour.
    return Progress(*columns, console=console, transient=True, disable=not shown, speed_estimate_period=3600)


class Told:
    """Moves a progress bar and remembers its position."""

    def __init__(self, bar: Progress, title: str) -> None:
        self.bar, self._title, self._task = bar, title, bar.add_task(title, total=None)
        self.done = self.planned = 0

    def __call__(self, done: int, planned: int) -> None:
        self.done, self.planned = done, planned
        self.bar.update(self._task, completed=done, total=planned)

    def show_workers(self, workers: int) -> None:
        """Shows the number of workers beside the title."""
        self.bar.update(self._task, description=f"{self._title} ({workers} worker{'' if workers == 1 else 's'})")


@contextmanager
def telling(title: str) -> Iterator[Told]:
    """A progress bar with the remaining time, for work that reports its progress."""
    with progress_bar() as bar:
        bar.columns = (*bar.columns, TimeRemainingColumn())
        yield Told(bar, Path(title).name)


@contextmanager
def watching(
    progress: Callable[..., None] | bool, title: str, place: Callable[..., tuple[int, int]] = lambda *told: told
) -> Iterator[Callable[..., None] | None]:
    """What long work reports its progress to: the caller's own function, a bar, or nothing.

    Args:
        progress: a function to call; True for a bar, False for silence.
        title: of the bar.
        place: how much is done and planned, from what the work reports.
    """
    if not isinstance(progress, bool):
        yield progress
    elif not progress:
        yield None
    else:
        with telling(title) as told:

            def tell(*now: Any) -> None:
                told(*place(*now))

            yield tell
