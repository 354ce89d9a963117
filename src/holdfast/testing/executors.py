"""What every executor must do: each item once, whatever becomes of workers. A test class inherits this."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest

from holdfast.errors import HoldfastError, InputError
from holdfast.executors import Emit, Executor, Plan, Task, Work, carry_out

Numbers = tuple[int, ...]


@final
@dataclass(frozen=True)
class SquaresTask(Task[Numbers]):
    """Emits the square of every number of an item, in order, with the worker's own mark; some numbers make trouble.

    Attributes:
        raising: fail.
        starving: run out of memory.
        refused: are refused.
        deadly: end the worker.
        deadly_once: end it unless this file is there; it is then.
        most: larger items run out of memory.
    """

    raising: Numbers = ()
    starving: Numbers = ()
    refused: Numbers = ()
    deadly: Numbers = ()
    deadly_once: tuple[int, str] | None = None
    most: int = 100

    def start(self) -> Work[Numbers]:
        mark = os.urandom(8).hex()

        def work(numbers: Numbers, emit: Emit) -> None:
            if len(numbers) > self.most:
                raise MemoryError(f"{len(numbers)} numbers at once")
            for number in numbers:
                self._trouble(number)
                emit((number, number**2, mark))

        return work

    def _trouble(self, number: int) -> None:
        if number in self.raising:
            raise ValueError(f"{number} is not a number")
        if number in self.starving:
            raise MemoryError(f"for {number}")
        if number in self.refused:
            raise InputError(f"{number} is refused")
        if number in self.deadly:
            os._exit(9)
        if self.deadly_once is not None and self.deadly_once[0] == number and not Path(self.deadly_once[1]).exists():
            Path(self.deadly_once[1]).touch()
            os._exit(9)


@final
class Squared(Plan[Numbers]):
    """Numbers from 0 on, so many at once, and what became of them."""

    def __init__(self, task: SquaresTask, count: int, size: int) -> None:
        self.task, self._count, self._size = task, count, size
        self.values: dict[int, int] = {}
        self.again: list[int] = []
        self.marks: set[str] = set()
        self.failures: dict[int, str] = {}
        self.workers: list[int] = []
        self.farthest_ahead = 0

    def __len__(self) -> int:
        return -(-self._count // self._size)

    def items(self) -> Iterator[Numbers]:
        for first in range(0, self._count, self._size):
            ahead = first - len(self.values) - len(self.failures)
            self.farthest_ahead = max(self.farthest_ahead, ahead // self._size)
            yield tuple(range(first, min(first + self._size, self._count)))

    def take(self, values: Sequence[tuple[Numbers, Any]]) -> None:
        for numbers, (number, square, mark) in values:
            assert number in numbers
            self.again += [number] if number in self.values else []
            self.values[number] = square
            self.marks.add(mark)

    def smaller(self, item: Numbers) -> Sequence[Numbers]:
        half = (len(item) + 1) // 2
        return (item[:half], item[half:]) if len(item) > 1 else ()

    def give_up(self, item: Numbers, reason: str) -> None:
        self.failures |= dict.fromkeys(item, reason)

    def notice(self, workers: int) -> None:
        self.workers.append(workers)


class ExecutorConformance(ABC):
    """Inherited by a test class that makes an executor with two workers, or with as many as it has."""

    #: Whether a worker can end and leave the others.
    loses_workers = True

    @abstractmethod
    def executor(self) -> Executor:
        """The executor under test."""

    def run(self, task: SquaresTask, count: int = 40, size: int = 4) -> Squared:
        """A plan, carried out."""
        plan = Squared(task, count, size)
        carry_out(plan, self.executor())
        return plan

    def test_everything_is_done_once_and_failures_stay_alone(self) -> None:
        plan = self.run(SquaresTask(raising=(5,), starving=(17,), most=3))
        assert plan.values == {number: number**2 for number in range(40) if number not in (5, 17)}
        assert set(plan.failures) == {5, 17}
        assert plan.failures[5].startswith("ValueError: 5 is not a number (executors.py:")
        assert plan.failures[17] == "MemoryError: for 17"
        assert set(plan.again) <= {4, 16, 18}  # what stood beside a failure
        assert 1 <= max(plan.workers) <= 2
        assert len(plan.marks) <= max(plan.workers)  # the task is started once by each worker

    def test_few_items_are_ahead_of_the_work(self) -> None:
        assert self.run(SquaresTask(), count=60, size=1).farthest_ahead <= 6

    def test_a_refusal_stops_the_rest(self) -> None:
        with pytest.raises(InputError, match=r"^13 is refused$"):
            self.run(SquaresTask(refused=(13,)))

    def test_what_fails_throughout_stops(self) -> None:
        plan = Squared(SquaresTask(raising=tuple(range(1000))), 1000, 1)
        with pytest.raises(HoldfastError, match=r"nothing could be done: ValueError: \d is not a number"):
            carry_out(plan, self.executor())
        assert len(plan.failures) < 20

    def test_what_cannot_be_taken_is_raised_here(self) -> None:
        class FullError(OSError):
            pass

        plan = Squared(SquaresTask(), 8, 2)

        def take(values: Sequence[tuple[Numbers, Any]]) -> None:
            raise FullError("no space left")

        plan.take = take  # type: ignore[method-assign]
        with pytest.raises(FullError):
            carry_out(plan, self.executor())

    def test_lost_workers_are_replaced(self, tmp_path: Path) -> None:
        if not self.loses_workers:
            pytest.skip("the worker is this process")
        plan = self.run(SquaresTask(deadly=(9,), deadly_once=(2, str(tmp_path / "dead"))), count=16)
        assert plan.values == {number: number**2 for number in range(16) if number != 9}
        assert list(plan.failures) == [9]
        assert "ended" in plan.failures[9]
