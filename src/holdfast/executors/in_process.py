"""Work in this process, one item after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from holdfast.executors.base import Ended, Executor, Item, Pool, Sink, Task, attempt


@final
class InProcess(Executor):
    """One worker, which is this process.

    Args:
        threads: that torch may use; as many as it does by default.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    @property
    def width(self) -> int:
        return 1

    @contextmanager
    def open(self, task: Task[Item], sink: Sink, count: int) -> Iterator[Pool[Item]]:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            yield _Here(task, sink)
        finally:
            torch.set_num_threads(before)


@final
class _Here(Pool[Item]):
    workers = 1

    def __init__(self, task: Task[Item], sink: Sink) -> None:
        self._work, self._sink = task.start(), sink
        self._next: tuple[int, Item] | None = None

    @property
    def room(self) -> int:
        return 1 if self._next is None else 0

    def submit(self, ticket: int, item: Item) -> None:
        self._next = ticket, item

    def wait(self, seconds: float | None = None) -> list[Ended]:
        assert self._next is not None
        ticket, item = self._next

        def emit(value: Any) -> None:
            try:
                self._sink([(ticket, value)])
            except Exception as error:
                raise _NotTaken(error) from error

        try:
            failure = attempt(self._work, item, emit)
        except _NotTaken as stopped:
            raise stopped.error from None
        self._next = None
        return [Ended(ticket, failure)]


class _NotTaken(BaseException):
    """What an item gave could not be taken: nothing that the item does may catch that."""

    def __init__(self, error: Exception) -> None:
        self.error = error
