"""What 50,000 images cost on a cluster, computed from measurements; and a driver with 1,000 simulated workers.

The table takes seconds per input from results/benchmarks/scale_measured.json. The simulation certifies through the same
schedule and into the same file as every run, but its workers only wait, for times drawn from those of real inputs, and
one attempt in a hundred loses its worker.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console

from benchmarks.harness import RESULTS, cpu_seconds, machine, save
from holdfast.certification import Batch, Settings, certify, read_examples
from holdfast.certification.examine import examine
from holdfast.certification.lines import record_line
from holdfast.data import load
from holdfast.executors import Ended, Executor, Failure, Pool, Sink, Task
from holdfast.executors.ray_cluster import AHEAD
from holdfast.graph import Readings
from holdfast.models import load_digits_vit
from holdfast.network.network import Head, Network
from holdfast.results import Certificate

MEASURED = RESULTS / "scale_measured.json"
IMAGES = 50_000
PIXELS = 3 * 224 * 224
FLOAT = 4
GPUS = 64
BATCH = 8


# -- what it costs


@final
@dataclass(frozen=True)
class Size:
    """A ViT."""

    name: str
    tokens: int
    width: int
    layers: int
    expansion: int = 4

    @property
    def products(self) -> float:
        """Multiplications of one forward pass."""
        maps = self.tokens * (4 + 2 * self.expansion) * self.width**2
        return self.layers * (maps + 2 * self.tokens**2 * self.width)

    @property
    def weights(self) -> float:
        """Numbers in its maps."""
        return self.layers * (4 + 2 * self.expansion) * self.width**2


SIZES = (
    Size("ViT-Ti/16", 197, 192, 12),
    Size("ViT-S/16", 197, 384, 12),
    Size("ViT-B/16", 197, 768, 12),
    Size("ViT-L/16", 197, 1024, 24),
)


@final
@dataclass(frozen=True)
class Cost:
    """Of 50,000 images of 224 x 224 pixels."""

    size: str
    seconds_per_image: float
    gpu_hours: float
    hours_on_64: float
    model_megabytes: float
    images_gigabytes: float
    object_store_gigabytes: float
    file_megabytes: float
    file_with_attack_gigabytes: float


def cost(size: Size, measured: Size, seconds: float, record_bytes: int) -> Cost:
    """In proportion to the products of a forward pass: what is measured on one size, for another."""
    each = seconds * size.products / measured.products
    image = PIXELS * FLOAT
    return Cost(
        size=size.name,
        seconds_per_image=each,
        gpu_hours=IMAGES * each / 3600,
        hours_on_64=IMAGES * each / 3600 / GPUS,
        model_megabytes=size.weights * FLOAT / 1e6,
        images_gigabytes=IMAGES * image / 1e9,
        object_store_gigabytes=GPUS * AHEAD * BATCH * image / 1e9,
        file_megabytes=IMAGES * record_bytes / 1e6,
        file_with_attack_gigabytes=IMAGES * (record_bytes + image * 4 / 3) / 1e9,  # base64
    )


def table(measurements: dict[str, Any], record_bytes: int) -> list[Cost]:
    """The costs of all sizes, from the measurement on a GPU."""
    row = next(row for row in measurements["rows"] if row["name"] == measurements["extrapolated"])
    measured = Size(row["name"], row["tokens"], row["width"], row["layers"], row["expansion"])
    return [cost(size, measured, row["seconds"], record_bytes) for size in SIZES]


def markdown(costs: Sequence[Cost]) -> str:
    """The table of the documentation."""
    head = [
        "network",
        "s per image",
        "GPU hours",
        f"hours on {GPUS} GPUs",
        "weights, MB",
        "file, MB",
        "with attack, GB",
    ]
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    lines += [
        f"{c.size} | {c.seconds_per_image:.2g} | {c.gpu_hours:.0f} | {c.hours_on_64:.2f} | {c.model_megabytes:.0f} | "
        f"{c.file_megabytes:.0f} | {c.file_with_attack_gigabytes:.0f}"
        for c in costs
    ]
    return "\n".join(f"| {line} |" if "---" not in line else f"|{line}|" for line in lines)


# -- how long an input takes here


def measure_digits(inputs: int) -> list[float]:
    """CPU seconds of single digits, by LoFAST's recursion, on one thread."""
    model, settings, readings = load_digits_vit(), Settings("lofast"), Readings()
    batches = read_examples(load("digits-32"), inputs + 1).batches(range(inputs + 1), 1)
    seconds = [cpu_seconds(lambda part=part: examine(model, part, settings, readings=readings))[1] for part in batches]
    return seconds[1:]  # the first one reads the model


# -- 1,000 workers


@dataclass
class _Simulated:
    """A worker.

    Attributes:
        free: until when it has worked, or until when there is another in its place.
        items: each with its batch, its seconds, and whether the worker is lost after them.
        away: whether it is lost, and there is no other yet.
    """

    free: float
    items: deque[tuple[int, Batch, float, bool]] = field(default_factory=deque)
    away: bool = False


@final
class Simulation(Executor):
    """Workers that wait, and answer with a record that says nothing.

    Args:
        workers: how many.
        seconds: of single inputs; a batch takes the sum of draws.
        losses: share of attempts that lose their worker, somewhere in the middle.
        restart: seconds until another worker is there.
    """

    def __init__(self, workers: int, seconds: Sequence[float], losses: float, restart: float, seed: int = 0) -> None:
        self.workers, self.seconds, self.losses, self.restart = workers, list(seconds), losses, restart
        self.draw = random.Random(seed)
        self.useful = self.wasted = self.waited = 0.0
        self.lost = 0

    @property
    def width(self) -> int:
        return self.workers

    @contextmanager
    def open(self, task: Task[Any], sink: Sink, count: int) -> Iterator[Pool[Any]]:
        yield _Crowd(self, sink)


@final
class _Crowd(Pool[Batch]):
    def __init__(self, plan: Simulation, sink: Sink) -> None:
        self._plan, self._sink = plan, sink
        now = time.perf_counter()
        self._members = [_Simulated(now) for _ in range(plan.workers)]
        self._by_load = [deque(self._members), *(deque[_Simulated]() for _ in range(AHEAD))]
        self._events: list[tuple[float, int, _Simulated]] = []
        self._order = 0

    @property
    def workers(self) -> int:
        return sum(not member.away for member in self._members)

    @property
    def room(self) -> int:
        return sum(AHEAD - len(member.items) for member in self._members if not member.away)

    def submit(self, ticket: int, item: Batch) -> None:
        plan, member = self._plan, self._least_loaded()
        seconds = sum(plan.draw.choices(plan.seconds, k=len(item.indices)))
        lost = plan.draw.random() < plan.losses
        member.items.append((ticket, item, seconds * (plan.draw.random() if lost else 1.0), lost))
        self._by_load[len(member.items)].append(member)
        if len(member.items) == 1:
            self._at(max(time.perf_counter(), member.free) + member.items[0][2], member)

    def _least_loaded(self) -> _Simulated:
        for held, members in enumerate(self._by_load[:AHEAD]):
            while members:
                member = members.popleft()
                if len(member.items) == held and not member.away:  # otherwise it stands elsewhere by now
                    return member
        raise AssertionError("there is no room")

    def _at(self, moment: float, member: _Simulated) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment, self._order, member))

    def wait(self, seconds: float | None = None) -> list[Ended]:
        pause = min(max(0.0, self._events[0][0] - time.perf_counter()), math.inf if seconds is None else seconds)
        time.sleep(pause)
        self._plan.waited += pause
        values, ended = list[tuple[int, Any]](), list[Ended]()
        now = time.perf_counter()
        while self._events and self._events[0][0] <= now:
            moment, _, member = heapq.heappop(self._events)
            member.free = moment
            if member.away:
                member.away = False
            else:
                ended += self._finish(member, values)
            self._by_load[len(member.items)].append(member)
        self._sink(values)
        return ended

    def _finish(self, member: _Simulated, values: list[tuple[int, Any]]) -> list[Ended]:
        ticket, item, seconds, lost = member.items.popleft()
        if not lost:
            self._plan.useful += seconds
            values += [(ticket, _stub(index, label)) for index, label in zip(item.indices, item.labels, strict=True)]
            if member.items:
                self._at(member.free + member.items[0][2], member)
            return [Ended(ticket)]
        self._plan.wasted += seconds
        self._plan.lost += 1
        member.away = True
        self._at(member.free + self._plan.restart, member)
        failure = Failure("lost", "its worker was lost")
        others = [Ended(other, failure, begun=False) for other, *_ in member.items]
        member.items.clear()
        return [Ended(ticket, failure), *others]


def _stub(index: int, label: int) -> Certificate:
    return Certificate(
        index=index,
        label=label,
        prediction=label,
        margin=0.123456789012345,
        radius=0.0123456789012345,
        method="telescoped",
        guarantee="proved",
        attack_radius=None,
        seconds=1.23456789,
    )


@final
@dataclass(frozen=True)
class Simulated:
    """How a run with simulated workers went.

    Attributes:
        share_useful: of the time of all workers; the rest is what follows.
        share_repeated: work that was lost with a worker.
        share_restarting: workers that were not there yet.
        share_idle: workers without an item, which wait for the driver or for the last ones to finish.
        driver_busy: share of the time in which the driver did not wait.
    """

    workers: int
    inputs: int
    lost: int
    seconds: float
    ideal_seconds: float
    share_useful: float
    share_repeated: float
    share_restarting: float
    share_idle: float
    driver_busy: float
    records_per_second: float


def simulate(workers: int, inputs: int, seconds: Sequence[float], losses: float, restart: float) -> Simulated:
    """One run, in real time."""
    executor = Simulation(workers, seconds, losses, restart)
    network = Network((), Head(torch.eye(2).double(), torch.zeros(2).double()), "nothing")
    data = [(torch.zeros(1, 2), 0)] * inputs
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run = certify(network, data, 0.1, "lofast", out=Path(folder, "run.jsonl"), batch=1, executor=executor)
        wall = time.perf_counter() - began
    assert (len(run.records), run.missing, run.failures) == (inputs, (), {})
    whole = workers * wall
    shares = (executor.useful / whole, executor.wasted / whole, executor.lost * restart / whole)
    return Simulated(
        workers=workers,
        inputs=inputs,
        lost=executor.lost,
        seconds=wall,
        ideal_seconds=executor.useful / workers,
        share_useful=shares[0],
        share_repeated=shares[1],
        share_restarting=shares[2],
        share_idle=1 - sum(shares),
        driver_busy=1 - executor.waited / wall,
        records_per_second=inputs / wall,
    )


def run(quick: bool = False) -> None:
    """Measures, simulates and computes the table."""
    console = Console(width=120)
    digits = measure_digits(2 if quick else 12)
    console.print(
        f"a digit takes {sum(digits) / len(digits):.2f} s of one core ({min(digits):.2f} to {max(digits):.2f})"
    )
    ten = [10 * seconds / (sum(digits) / len(digits)) for seconds in digits]  # the same spread around ten seconds
    runs = (
        [simulate(100, 300, [0.1 * s for s in ten], 0.01, 1.0)]
        if quick
        else [simulate(1000, 1000 * count, ten, 0.01, 30.0) for count in (3, 10)]
    )
    runs.append(simulate(1000, 2000 if quick else 20_000, [0.0], 0.0, 0.0))  # as fast as the driver can
    for simulated in runs:
        console.print(simulated)
    costs = table(json.loads(MEASURED.read_text(encoding="utf-8")), len(record_line(_stub(12345, 6))))
    console.print(markdown(costs), markup=False)
    if not quick:
        rows = {"simulated": [asdict(one) for one in runs], "costs": [asdict(one) for one in costs]}
        save("scale", {"machine": machine(), "digits": digits, **rows})
