"""Long pieces of work side by side on one machine, each in a process of its own with one thread."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from holdfast.errors import HoldfastError

T = TypeVar("T")

#: Is told what share of a piece of work is done.
Tell = Callable[[float], None]


def side_by_side(work: Callable[[T, Tell], None], items: Sequence[T], jobs: int) -> Iterator[tuple[int, float]]:
    """Does the work on every item, and says which of them is how far: 1 once it is done.

    Args:
        work: a function of a module, which processes can find; it tells shares below 1, and leaves results in files.
        items: what it is called with.
        jobs: how many at once.
    """
    context = get_context("spawn")
    waiting = list(enumerate(items))[::-1]
    busy: dict[Connection, int] = {}
    with ExitStack() as stack:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                index, item = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(theirs, work, item), daemon=True)
                process.start()
                theirs.close()
                stack.callback(process.terminate)
                busy[ours] = index
            for ready in connection.wait(list(busy)):
                assert isinstance(ready, Connection)
                told = _receive(ready)
                yield busy[ready], told
                if told == 1.0:
                    del busy[ready]
                    ready.close()


def _receive(pipe: Connection) -> float:
    try:
        told: float | Exception = pipe.recv()
    except EOFError:
        raise HoldfastError(
            "a process ended early: memory may have run out (take fewer --jobs); what was finished is kept"
        ) from None
    if isinstance(told, Exception):
        raise told
    return told


def _serve(pipe: Connection, work: Callable[[T, Tell], None], item: T) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    torch.set_num_threads(1)
    try:
        work(item, pipe.send)
    except Exception as error:
        pipe.send(error)
    else:
        pipe.send(1.0)
