"""Work on processes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, final

import torch

from holdfast.errors import HoldfastError, check_counts
from holdfast.executors.base import Ended, Executor, Failure, Item, Pool, Sink, Task, attempt
from holdfast.threads import children_wait_asleep

_BEGUN, _EMITTED, _ENDED = "begun", "emitted", "ended"


@final
class Processes(Executor):
    """Several processes, each with its share of the threads. One that ends is replaced.

    Args:
        workers: how many.
        threads: of each; by default those of this process are divided among them.
    """

    def __init__(self, workers: int = 1, threads: int | None = None) -> None:
        check_counts(workers=workers)
        self._workers, self._threads = workers, threads

    @property
    def width(self) -> int:
        return self._workers

    @contextmanager
    def open(self, task: Task[Item], sink: Sink, count: int) -> Iterator[Pool[Item]]:
        workers = max(1, min(self._workers, count))
        pool = _Family(task, sink, workers, self._threads or max(1, torch.get_num_threads() // workers))
        try:
            yield pool
        finally:
            pool.close()


class _Child:
    """A process with one item at most. The other end of its pipe is held by nobody else: it ends with its parent."""

    def __init__(self, task: Task[Any], threads: int) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, task, threads), daemon=True)
        with children_wait_asleep():
            self.process.start()
        theirs.close()
        self.ticket: int | None = None
        self.begun = False

    def close(self) -> None:
        self.process.terminate()
        self.pipe.close()
        self.process.join()


@final
class _Family(Pool[Item]):
    def __init__(self, task: Task[Item], sink: Sink, workers: int, threads: int) -> None:
        self._task, self._sink, self._threads = task, sink, threads
        self._children = [_Child(task, threads) for _ in range(workers)]

    @property
    def workers(self) -> int:
        return len(self._children)

    @property
    def room(self) -> int:
        return sum(child.ticket is None for child in self._children)

    def submit(self, ticket: int, item: Item) -> None:
        child = next(child for child in self._children if child.ticket is None)
        child.ticket = ticket
        with suppress(ConnectionError):  # the next look at its pipe tells
            child.pipe.send(item)

    def wait(self, seconds: float | None = None) -> list[Ended]:
        by_pipe = {child.pipe: child for child in self._children if child.ticket is not None}
        values, ended = list[tuple[int, Any]](), list[Ended]()
        for pipe in connection.wait(list(by_pipe), seconds):
            assert isinstance(pipe, Connection)
            child = by_pipe[pipe]
            assert child.ticket is not None
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionError):
                ended.append(self._replace(child))
                continue
            if kind == _BEGUN:
                child.begun = True
            elif kind == _EMITTED:
                values.append((child.ticket, value))
            else:
                ended.append(Ended(child.ticket, value))
                child.ticket = None
        if values:
            self._sink(values)
        return ended

    def _replace(self, child: _Child) -> Ended:
        """Replaces a process that ended."""
        assert child.ticket is not None
        child.close()
        if not child.begun:
            raise HoldfastError(
                "a worker ended before it began: memory may have run out (take fewer workers), or the program does not "
                "call this inside `if __name__ == '__main__':`; what was finished is kept"
            )
        self._children[self._children.index(child)] = _Child(self._task, self._threads)
        return Ended(child.ticket, Failure("lost", f"its process ended early, {_how(child.process.exitcode)}"))

    def close(self) -> None:
        for child in self._children:
            child.close()


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"by {signal.Signals(-status).name}: memory may have run out"
    return f"with status {status}"


def _serve(pipe: Connection, task: Task[Any], threads: int) -> None:
    """The life of a worker: items in, what they give out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(threads)
    try:
        work = task.start()
        while True:
            item = pipe.recv()
            pipe.send((_BEGUN, None))
            pipe.send((_ENDED, attempt(work, item, lambda value: pipe.send((_EMITTED, value)))))
    except (EOFError, ConnectionError):
        return
