"""Batches on several processes of one machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection

import torch
from torch import nn

from holdfast.certification.examine import examine
from holdfast.certification.examples import Batch
from holdfast.certification.lines import Record
from holdfast.certification.settings import Settings
from holdfast.errors import HoldfastError
from holdfast.graph import Readings
from holdfast.network.network import Network


def examine_all(
    model: Network | nn.Module,
    batches: Sequence[Batch],
    settings: Settings,
    workers: int,
    device: str = "cpu",
    readings: Readings | None = None,
) -> Iterator[list[Record]]:
    """The records of every batch, in the order in which they are finished; `readings` serve this process."""
    workers = min(workers, len(batches))
    if workers <= 1:
        for batch in batches:
            yield examine(model, batch, settings, device, readings)
        return
    # Each worker has a pipe whose other end nobody but the parent holds: it ends with the parent, however that ends.
    context = get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    with ExitStack() as stack:
        idle: list[Connection] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, model, settings, device, threads), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.terminate)
            stack.callback(ours.close)
            idle.append(ours)
        waiting, busy = list(reversed(batches)), list[Connection]()
        while waiting or busy:
            while waiting and idle:
                pipe = idle.pop()
                _send(pipe, waiting.pop())
                busy.append(pipe)
            for ready in connection.wait(busy):
                assert isinstance(ready, Connection)
                busy.remove(ready)
                idle.append(ready)
                yield _receive(ready)


def _send(pipe: Connection, batch: Batch) -> None:
    try:
        pipe.send(batch)
    except ConnectionError:
        raise _ended_early() from None


def _receive(pipe: Connection) -> list[Record]:
    try:
        found: list[Record] | Exception = pipe.recv()
    except (EOFError, ConnectionError):
        raise _ended_early() from None
    if isinstance(found, Exception):
        raise found
    return found


def _ended_early() -> HoldfastError:
    return HoldfastError(
        "a worker ended early: memory may have run out (take fewer workers or smaller batches), or the program does "
        "not call this inside `if __name__ == '__main__':`; what was finished is kept"
    )


def _serve(pipe: Connection, model: Network | nn.Module, settings: Settings, device: str, threads: int) -> None:
    """The life of a worker: batches in, records or an error out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(threads)
    readings = Readings()
    try:
        while True:
            batch: Batch = pipe.recv()
            try:
                pipe.send(examine(model, batch, settings, device, readings))
            except (HoldfastError, RuntimeError, MemoryError) as error:
                pipe.send(error)
    except (EOFError, ConnectionError):
        return
