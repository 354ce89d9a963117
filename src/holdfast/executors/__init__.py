"""What work runs on: one seam, and one schedule for all."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.executors.base import Emit, Ended, Executor, Failure, Pool, Sink, Task, Work
from holdfast.executors.in_process import InProcess
from holdfast.executors.processes import Processes
from holdfast.executors.ray_cluster import RayCluster
from holdfast.executors.schedule import Plan, carry_out
from holdfast.registry import Registry

#: By name: what makes an executor with a number of workers, or with its usual number.
executors: Registry[Callable[[int | None], Executor]] = Registry("executor", "holdfast.executors")
executors.add("in-process")(lambda workers: InProcess())
executors.add("processes")(lambda workers: Processes(workers or 1))
executors.add("ray")(lambda workers: RayCluster(workers=workers))


def choose(executor: str | Executor | None, workers: int | None) -> Executor:
    """The executor of this name; without one, as many processes as there are workers, or this process.

    Args:
        executor: a name, or an executor.
        workers: how many; None for the usual number.
    """
    if isinstance(executor, Executor):
        return executor
    if executor is None:
        executor = "in-process" if workers in (None, 1) else "processes"
    return executors[executor](workers)


__all__ = [
    "Emit",
    "Ended",
    "Executor",
    "Failure",
    "InProcess",
    "Plan",
    "Pool",
    "Processes",
    "RayCluster",
    "Sink",
    "Task",
    "Work",
    "carry_out",
    "choose",
    "executors",
]
