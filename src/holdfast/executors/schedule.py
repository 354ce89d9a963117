"""Every item once, whatever happens to workers: what to do next, what to do again, and when to give up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic

from holdfast.errors import HoldfastError
from holdfast.executors.base import Executor, Failure, Item, Task

#: How often an item may lose its worker; workers end for reasons of their own, too.
LOSSES = 3
#: After so many failures with nothing done, the rest is not tried.
HOPELESS = 10


class Plan(ABC, Generic[Item]):
    """What is to be done, and what becomes of it."""

    task: Task[Item]

    @abstractmethod
    def __len__(self) -> int:
        """How many items there are initially."""

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """The items, one by one, when they are needed."""

    @abstractmethod
    def take(self, values: Sequence[tuple[Item, Any]]) -> None:
        """Takes what items gave. An item that is done again may give something for a second time."""

    @abstractmethod
    def smaller(self, item: Item) -> Sequence[Item]:
        """What to try instead of an item that failed; nothing if it cannot be made smaller."""

    @abstractmethod
    def give_up(self, item: Item, reason: str) -> None:
        """Takes note of an item that cannot be done."""

    def notice(self, workers: int) -> None:
        """Is told how many workers there are."""
        return


@dataclass
class _Ticket(Generic[Item]):
    item: Item
    losses: int = 0


def carry_out(plan: Plan[Item], executor: Executor) -> None:
    """Does all items of a plan, never more at once than the executor has room for.

    An item whose worker ends is done again as it is, then in smaller parts; one that runs out of memory or fails is
    done in smaller parts at once. What fails and cannot be made smaller is given up, and the others go on.

    Raises:
        HoldfastError: an item was refused, or nothing at all could be done.
    """
    source = plan.items()
    queue = deque[_Ticket[Item]]()
    under_way: dict[int, _Ticket[Item]] = {}
    given_up = list[str]()
    done = number = 0

    def waiting() -> bool:
        if not queue:
            queue.extend(_Ticket(item) for item in islice(source, 1))
        return bool(queue)

    def take(values: Sequence[tuple[int, Any]]) -> None:
        plan.take([(under_way[ticket].item, value) for ticket, value in values])

    def react(ticket: _Ticket[Item], failure: Failure, begun: bool) -> None:
        if failure.error is not None:
            raise failure.error
        if failure.kind == "lost":
            ticket.losses += begun
            if ticket.losses < 2:
                queue.append(ticket)
                return
        parts = plan.smaller(ticket.item)
        if parts:
            queue.extend(_Ticket(part, max(0, ticket.losses - 1)) for part in parts)
        elif failure.kind == "lost" and ticket.losses < LOSSES:
            queue.append(ticket)
        else:
            given_up.append(failure.reason)
            plan.give_up(ticket.item, failure.reason)

    with executor.open(plan.task, take, len(plan)) as pool:
        while (under_way or waiting()) and (done or len(given_up) < HOPELESS):
            for _ in range(pool.room):
                if waiting():
                    number += 1
                    under_way[number] = queue.popleft()
                    pool.submit(number, under_way[number].item)
            plan.notice(pool.workers)
            for ended in pool.wait():
                ticket = under_way.pop(ended.ticket)
                if ended.failure is None:
                    done += 1
                else:
                    react(ticket, ended.failure, ended.begun)
    if given_up and not done:
        raise HoldfastError(f"nothing could be done: {given_up[0]}")
