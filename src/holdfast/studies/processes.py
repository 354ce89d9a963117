"""Long pieces of work side by side on one machine, with one thread each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar, final

from holdfast.errors import HoldfastError
from holdfast.executors import Emit, InProcess, Plan, Processes, Task, Work, carry_out

T = TypeVar("T")

#: Is told what share of a piece of work is done.
Tell = Callable[[float], None]


def side_by_side(
    work: Callable[[T, Tell], None], items: Sequence[T], jobs: int, told: Callable[[int, float], None]
) -> None:
    """Does the work on every item, and reports how much of each is done: 1 at its end.

    Args:
        work: a function of a module, which processes can find; it tells shares below 1, and leaves results in files.
        items: what it is called with.
        jobs: how many at once, in processes; with 1, the work is done in this one.
        told: is called with the number of an item and the share of it that is done.
    """
    executor = InProcess(threads=1) if jobs == 1 else Processes(jobs, threads=1)
    carry_out(_Pieces(_Function(work), items, told), executor)


@final
@dataclass(frozen=True)
class _Function(Task[tuple[int, T]]):
    function: Callable[[T, Tell], None]

    def start(self) -> Work[tuple[int, T]]:
        def work(numbered: tuple[int, T], emit: Emit) -> None:
            self.function(numbered[1], emit)
            emit(1.0)

        return work


@final
class _Pieces(Plan[tuple[int, T]], Generic[T]):
    def __init__(self, task: _Function[T], items: Sequence[T], told: Callable[[int, float], None]) -> None:
        self.task, self._items, self._told = task, items, told

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> Iterator[tuple[int, T]]:
        return iter(enumerate(self._items))

    def take(self, values: Sequence[tuple[tuple[int, T], float]]) -> None:
        for (number, _), share in values:
            self._told(number, share)

    def smaller(self, item: tuple[int, T]) -> Sequence[tuple[int, T]]:
        return ()

    def give_up(self, item: tuple[int, T], reason: str) -> NoReturn:
        raise HoldfastError(f"a piece of work failed: {reason}; what was finished is kept")
