"""The seam between work and what it runs on: this process, processes of this machine, or a cluster."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, final

import torch

from holdfast.errors import HoldfastError, InputError, MemoryLimitError

Item = TypeVar("Item")
_log = logging.getLogger(__name__)

#: Takes what an item gives, piece by piece, while it is worked on.
Emit = Callable[[Any], None]
#: Does one item.
Work = Callable[[Item, Emit], None]
#: Takes what has arrived, each value with the ticket of its item.
Sink = Callable[[Sequence[tuple[int, Any]]], None]


class Task(ABC, Generic[Item]):
    """What every worker does. It is sent to each worker once, pickled."""

    @abstractmethod
    def start(self) -> Work[Item]:
        """Called once by each worker: what it returns is called with every item."""


@final
@dataclass(frozen=True)
class Failure:
    """Why an item was not finished.

    Attributes:
        kind: "refused" (by Holdfast, which would refuse the next item as well), "memory", "lost" (its worker ended) or
            "error".
        reason: one line.
        error: what to raise for a refusal.
    """

    kind: Literal["refused", "memory", "lost", "error"]
    reason: str
    error: HoldfastError | None = None


@final
@dataclass(frozen=True)
class Ended:
    """An item that a pool has done with.

    Attributes:
        ticket: which one.
        failure: None where it was finished.
        begun: whether its worker had begun with it.
    """

    ticket: int
    failure: Failure | None = None
    begun: bool = True


class Pool(ABC, Generic[Item]):
    """The workers that are running, and the items they work on."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many there are now."""

    @property
    @abstractmethod
    def room(self) -> int:
        """How many more items it takes now; a few more than are worked on, so that no worker waits."""

    @abstractmethod
    def submit(self, ticket: int, item: Item) -> None:
        """Takes an item."""

    @abstractmethod
    def wait(self, seconds: float | None = None) -> list[Ended]:
        """Passes on what has arrived and says what has ended; waits a while for something to happen.

        Args:
            seconds: no longer than that, unless this process is the worker.
        """


class Executor(ABC):
    """What work runs on."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many items can be worked on at once, as far as that is known before it is opened; at least 1."""

    @abstractmethod
    def open(self, task: Task[Item], sink: Sink, count: int) -> AbstractContextManager[Pool[Item]]:
        """Workers for a task, until the context ends.

        Args:
            task: what they do.
            sink: takes what they emit, here, in the order in which each of them emits it.
            count: of items; no more workers are needed.
        """


def attempt(work: Work[Item], item: Item, emit: Emit) -> Failure | None:
    """Does one item, and says why not."""
    try:
        work(item, emit)
    except Exception as error:
        _log.info("an item failed", exc_info=error)
        return _failure(error)
    return None


def _failure(error: Exception) -> Failure:
    reason = _one_line(error)
    if isinstance(error, MemoryError | MemoryLimitError | torch.OutOfMemoryError) or _out_of_memory(error):
        return Failure("memory", reason)
    if isinstance(error, HoldfastError):  # made anew: one with arguments of its own does not travel
        kind = InputError if isinstance(error, InputError) else type(error)
        return Failure("refused", reason, kind(str(error)))
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Failure("error", f"{reason} ({Path(place.filename).name}:{place.lineno})")


def _out_of_memory(error: Exception) -> bool:
    """What torch says of the memory of a CPU has no class of its own."""
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
