"""Work on the machines of a Ray cluster."""

from __future__ import annotations

import logging
import math
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from queue import SimpleQueue
from threading import Thread
from typing import Any, final

import torch

from holdfast.errors import HoldfastError, InputError, check_counts
from holdfast.executors.base import Ended, Executor, Failure, Item, Pool, Sink, Task, attempt
from holdfast.extras import require
from holdfast.version import __version__

#: Items that a worker has, including the one in progress: the next is there when it is needed.
AHEAD = 2
#: Seconds between looks at which nodes there are.
LOOK = 2.0
#: Seconds in which the head of a cluster answers.
ANSWER = 5.0
#: Seconds for which a head may be silent; one that keeps its state elsewhere comes back. Ray ends the program after 60.
PATIENCE = 20.0
#: Workers that may fail to start in a row, before none of them can be expected to.
STARTS = 3


@final
class RayCluster(Executor):
    """Actors on the nodes of a running Ray cluster: as many as fit, while nodes join and leave.

    The task is sent out once, through the object store, and each actor starts it once. A worker lost with its node
    is replaced where there is room.

    Args:
        address: HOST:PORT of its head, or "auto" for the one that this machine belongs to.
        workers: the most workers; by default as many as fit.
        gpus_per_task: GPUs of each worker; a part of one, such as 0.5, is possible.
    """

    def __init__(self, address: str = "auto", workers: int | None = None, gpus_per_task: float = 0.0) -> None:
        check_counts(workers=workers)
        if gpus_per_task < 0:
            raise InputError(f"gpus_per_task is {gpus_per_task}; expected 0 or more")
        host, colon, port = address.rpartition(":")
        if address != "auto" and not (host and colon and port.isdigit() and "/" not in host):
            raise InputError(f"the cluster is {address!r}; expected auto, or HOST:PORT of its head")
        self._ray: Any = require("ray", "cluster")
        self._address, self._workers, self._gpus = address, workers, gpus_per_task

    @property
    def width(self) -> int:
        return 1  # nodes join and leave; batches are as large as they are asked for

    @contextmanager
    def open(self, task: Task[Item], sink: Sink, count: int) -> Iterator[Pool[Item]]:
        ray = self._ray
        ours = not ray.is_initialized()
        if ours:
            self._connect()
        try:
            pool = _Crew(ray, task, sink, min(count, self._workers or count), self._gpus)
            try:
                yield pool
            finally:
                pool.close()
        finally:
            if ours:
                ray.shutdown()

    def _connect(self) -> None:
        try:
            if self._address != "auto" and not _answers(self._address):  # Ray itself would ask for minutes
                raise ConnectionError("the port is closed")
            self._ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise HoldfastError(
                f"no Ray cluster answers at {self._address!r} ({reason}); expected auto or HOST:PORT of one that was "
                "started with `ray start --head`, and that this machine belongs to"
            ) from None


@dataclass
class _Member:
    """A worker that is there, with its items in the order in which it does them."""

    actor: Any
    items: deque[tuple[int, Any]] = field(default_factory=deque)


@final
class _Crew(Pool[Item]):
    def __init__(self, ray: Any, task: Task[Item], sink: Sink, most: int, gpus: float) -> None:
        self._ray, self._sink, self._most, self._gpus = ray, sink, most, gpus
        self._members: list[_Member] = []
        self._starting: dict[Any, Any] = {}
        self._failed_starts = 0
        if self._fitting() == 0:
            raise HoldfastError(
                f"no node of the cluster has a CPU{f' and {gpus:g} GPUs' if gpus else ''} for a worker; "
                "take another cluster, or fewer GPUs per task"
            )
        with _own_modules_by_value(ray.cloudpickle):
            self._task = ray.put(task)
        self._kind = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(_Worker)
        self._head, self._heard = ray.get_runtime_context().gcs_address, time.monotonic()
        self._looked = 0.0
        self._recruit()

    @property
    def workers(self) -> int:
        return len(self._members)

    @property
    def room(self) -> int:
        return sum(AHEAD - len(member.items) for member in self._members)

    def submit(self, ticket: int, item: Item) -> None:
        member = min(self._members, key=lambda member: len(member.items))
        member.items.append((ticket, member.actor.do.options(num_returns="streaming").remote(item)))

    def wait(self, seconds: float | None = None) -> list[Ended]:
        self._recruit()
        working = {member.items[0][1]: member for member in self._members if member.items}
        ready = self._ready([*working, *self._starting], LOOK if seconds is None else min(LOOK, seconds))
        values, ended = list[tuple[int, Any]](), list[Ended]()
        for reference in ready:
            if reference in self._starting:
                self._welcome(reference)
            else:
                ended += self._receive(working[reference], values)
        if values:
            self._sink(values)
        return ended

    def _ready(self, watched: list[Any], seconds: float) -> list[Any]:
        """Which of them have something to tell, as soon as one has; none after a while."""
        if not watched:
            time.sleep(seconds)
            return []
        first, _ = self._ray.wait(watched, num_returns=1, timeout=seconds)
        if not first:
            return []
        ready: list[Any] = self._ray.wait(watched, num_returns=len(watched), timeout=0)[0]
        return ready

    def _receive(self, member: _Member, values: list[tuple[int, Any]]) -> list[Ended]:
        """What a worker has sent of the item that it works on; all that it had, where it is lost."""
        ticket, stream = member.items[0]
        try:
            messages = self._ray.get(next(stream))
        except (self._ray.exceptions.RayError, StopIteration) as error:
            self._members.remove(member)
            self._ray.kill(member.actor)
            failure = Failure("lost", f"its worker on the cluster ended: {_first_line(error)}")
            return [Ended(lost, failure, begun=lost == ticket) for lost, _ in member.items]
        ended = []
        for message in messages:
            if isinstance(message, _Emitted):
                values.append((ticket, message.value))
            else:
                member.items.popleft()
                ended.append(Ended(ticket, message.failure))
        return ended

    def _recruit(self) -> None:
        """Starts a worker wherever one fits."""
        if time.monotonic() < self._looked + LOOK:
            return
        self._looked = time.monotonic()
        if not self._head_answers():
            return
        wanted = min(self._most, self._fitting())
        for _ in range(wanted - len(self._members) - len(self._starting)):
            actor = self._kind.remote(self._task)
            self._starting[actor.version.remote()] = actor

    def _head_answers(self) -> bool:
        """Whether nodes can be asked for; what workers send arrives without the head."""
        if _answers(self._head):
            self._heard = time.monotonic()
            return True
        if time.monotonic() > self._heard + PATIENCE:
            self._members, self._starting = [], {}  # nobody can end them, and they end with their nodes
            raise HoldfastError(
                f"the head of the cluster at {self._head} is gone; what was finished is kept, and the same call resumes"
            )
        return False

    def _fitting(self) -> int:
        """How many workers fit on the nodes that are there, if nobody else used them."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = [node.get("GPU", 0.0) / self._gpus if self._gpus else math.inf for node in nodes]
        return sum(int(min(node.get("CPU", 0.0), room)) for node, room in zip(nodes, gpus, strict=True))

    def _welcome(self, reference: Any) -> None:
        """A worker that has started, or has failed to."""
        actor = self._starting.pop(reference)
        try:
            version = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                raise HoldfastError(f"no worker starts on the cluster: {_last_line(error)}") from error
            return
        if version != __version__:
            raise HoldfastError(f"a node of the cluster has Holdfast {version}; expected {__version__}, as here")
        self._failed_starts = 0
        self._members.append(_Member(actor))

    def close(self) -> None:
        for actor in [member.actor for member in self._members] + list(self._starting.values()):
            self._ray.kill(actor)


@dataclass(frozen=True)
class _Emitted:
    value: Any


@dataclass(frozen=True)
class _Over:
    failure: Failure | None


class _Worker:
    """An actor: starts the task once, then does items."""

    def __init__(self, task: Task[Any]) -> None:
        self._work = task.start()

    def version(self) -> str:
        """Of Holdfast, once the actor is ready."""
        return __version__

    def do(self, item: Any) -> Iterator[list[_Emitted | _Over]]:
        """What the item gives, as soon as it is there."""
        messages = SimpleQueue[_Emitted | _Over]()

        def work() -> None:
            torch.set_num_threads(1)  # a worker takes one CPU
            messages.put(_Over(attempt(self._work, item, lambda value: messages.put(_Emitted(value)))))

        Thread(target=work, daemon=True).start()
        last: _Emitted | _Over | None = None
        while not isinstance(last, _Over):
            sent = [messages.get()]
            while not messages.empty():
                sent.append(messages.get())
            last = sent[-1]
            yield sent


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except OSError:
        return False
    return True


@contextmanager
def _own_modules_by_value(cloudpickle: Any) -> Iterator[None]:
    """What is pickled here includes the code of modules outside any package: other machines do not have them."""
    known = sys.stdlib_module_names | packages_distributions().keys() | {"holdfast", "__main__"}
    named = {name: module for name, module in sys.modules.items() if getattr(module, "__name__", None) == name}
    own = [
        module
        for name, module in named.items()
        if name.partition(".")[0] not in known and name not in cloudpickle.list_registry_pickle_by_value()
    ]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _first_line(error: BaseException) -> str:
    return _lines(error)[0]


def _last_line(error: BaseException) -> str:
    """Of a traceback from another machine: what was raised there."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return (str(error).strip() or type(error).__name__).splitlines()
