"""Certifying on a real Ray cluster of this machine, a head and two nodes, while parts of it are killed.

Whatever happens, no record is lost, none stands twice, and all are those of a run in this process, byte for byte but
for the seconds that they took.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from certify_cases import linear_network
from holdfast import HoldfastError, InputError
from holdfast.certification import certify, read, verify
from holdfast.data import Dataset
from holdfast.data.dataset import checksum
from holdfast.executors import Executor, RayCluster
from holdfast.layers.piece import Piece
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.network.network import Network
from holdfast.results import CertificationRun
from holdfast.testing.executors import ExecutorConformance

pytestmark = pytest.mark.cluster

BATCH = 3
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
#: A node that is killed is missed after two seconds; by default that takes half a minute.
QUICK = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 1000}


def start_cluster() -> Any:
    """A head without a worker, for the driver, and two nodes with one each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")  # here: it takes long, and this file is always collected
    head = NODE | {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(wait=False, **NODE)
    cluster.wait_for_nodes()
    return cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster = start_cluster()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def connected(cluster: Any) -> Iterator[Any]:
    """This process as a driver, with two nodes that are there."""
    ray = pytest.importorskip("ray")
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()


@dataclass(frozen=True)
class Trouble:
    """What happens in the workers.

    Attributes:
        seconds: that every call takes.
        most: larger batches run out of memory.
        starving: the input that always does.
        raising: the input that fails.
        deadly: file that a worker makes before it kills itself, unless it is there.
        gate: file that every input from the tenth on waits for, a minute at most.
    """

    seconds: float = 0.0
    most: int = 100
    starving: int = -1
    raising: int = -1
    deadly: str | None = None
    gate: str | None = None

    def strike(self, inputs: list[int]) -> None:
        time.sleep(self.seconds)
        end = time.monotonic() + 60
        while self.gate is not None and max(inputs) >= 10 and not Path(self.gate).exists() and time.monotonic() < end:
            time.sleep(0.01)
        if len(set(inputs)) > self.most or self.starving in inputs:
            raise MemoryError("no room")
        if self.raising in inputs:
            raise ValueError("no number")
        if self.deadly is not None and not Path(self.deadly).exists():
            Path(self.deadly).touch()
            os.kill(os.getpid(), signal.SIGKILL)


HOME, TROUBLE = os.getpid(), Trouble()  # they travel with the class, and are not in the digest of a network


class Troubled(Piece):
    """The identity. An input is known by its first number."""

    def value(self, u: Array) -> Array:
        if os.getpid() != HOME:
            x = u if isinstance(u, Tensor) else u.mid
            TROUBLE.strike((8 * x.reshape(-1, 6)[:, 0]).int().tolist())
        return u

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return rho


NETWORK = Network((Troubled(),), linear_network().head, "linear")


def numbered(count: int) -> Dataset:
    """Inputs whose first number is their place."""
    x = torch.randn(count, 1, 6, generator=torch.Generator().manual_seed(1))
    x[:, 0, 0] = torch.arange(count) / 8
    labels = linear_network()(x.double()).argmax(-1)
    return Dataset("numbered", "test", x, labels, torch.arange(count), checksum(x, labels))


def run(path: Path | None, count: int, trouble: Trouble | None = None, **options: Any) -> CertificationRun:
    """The first inputs of 3,000."""
    global TROUBLE
    TROUBLE = trouble or Trouble()
    options = {"batch": BATCH, "limit": count} | options
    return certify(NETWORK, numbered(3000), [0.1], "lofast", out=path, **options)


def lines(path: Path) -> list[str]:
    """The records of a file by index, without their seconds; no index may stand twice."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    records = [row for row in rows if "index" in row]
    indices = [row["index"] for row in records]
    assert len(set(indices)) == len(indices)
    return [json.dumps(row | {"seconds": 0}) for row in sorted(records, key=lambda row: row["index"])]


def expected(tmp_path: Path, count: int, **options: Any) -> list[str]:
    run(tmp_path / "here.jsonl", count, resume=False, **options)
    return lines(tmp_path / "here.jsonl")


def opens(gate: Path) -> Callable[[int], None]:
    """Makes the gate when two workers are there: the work cannot end before it."""
    return lambda workers: gate.touch() if workers == 2 else None


class TestRayCluster(ExecutorConformance):
    @pytest.fixture(autouse=True)
    def _connect(self, connected: Any) -> None:
        self.address: str = connected.address

    def executor(self) -> Executor:
        return RayCluster(self.address)


def test_the_same_records_and_the_same_file(connected: Any, tmp_path: Path) -> None:
    path, gate = tmp_path / "run.jsonl", tmp_path / "two are there"
    run(path, 10, executor="ray", workers=1)
    found = run(path, 40, Trouble(gate=str(gate)), executor="ray", crew=opens(gate))  # goes on to more inputs
    assert found.missing == ()
    assert gate.exists()
    assert lines(path) == expected(tmp_path, 40)
    assert verify(path, NETWORK, numbered(3000), sample=None).sound


def test_a_node_killed_in_the_middle(connected: Any, tmp_path: Path) -> None:
    path, killed = tmp_path / "run.jsonl", list[Any]()

    def kill(done: int, planned: int) -> None:
        if done >= 9 and not killed:
            killed.extend(connected.worker_nodes)
            connected.remove_node(killed[0], allow_graceful=False)

    found = run(path, 60, Trouble(0.01), executor="ray", progress=kill)
    assert killed
    assert (found.missing, found.failures) == ((), {})
    assert lines(path) == expected(tmp_path, 60)


def test_a_worker_killed(connected: Any, tmp_path: Path) -> None:
    path, dead = tmp_path / "run.jsonl", tmp_path / "dead"
    found = run(path, 30, Trouble(deadly=str(dead)), executor="ray")
    assert dead.exists()
    assert (found.missing, found.failures) == ((), {})
    assert lines(path) == expected(tmp_path, 30)


def test_a_node_that_joins_is_used(connected: Any, tmp_path: Path) -> None:
    connected.remove_node(connected.worker_nodes.copy().pop())
    path, gate = tmp_path / "run.jsonl", tmp_path / "two are there"

    def join(done: int, planned: int) -> None:
        if done >= 3 and len(connected.worker_nodes) < 2:
            assert not gate.exists()
            connected.add_node(wait=False, **NODE)

    run(path, 40, Trouble(gate=str(gate)), executor="ray", batch=1, progress=join, crew=opens(gate))
    assert gate.exists()
    assert lines(path) == expected(tmp_path, 40, batch=1)


def test_what_fails_is_recorded_and_the_others_go_on(connected: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    found = run(path, 24, Trouble(most=2, starving=7, raising=11), executor="ray", batch=4)
    assert found.missing == (7, 11)
    assert found.failures[7] == "MemoryError: no room"
    assert found.failures[11].startswith("ValueError: no number (test_cluster.py:")
    assert read(path).failures == found.failures
    again = run(path, 24, Trouble(most=2), executor="ray", batch=1)
    assert (again.missing, again.failures) == ((), {})
    alone, in_pairs = (expected(tmp_path, 24, batch=size) for size in (1, 2))
    singled_out = (6, 7, 10, 11)  # a batch of four became pairs, and what failed was left alone
    assert lines(path) == [(alone if i in singled_out else in_pairs)[i] for i in range(24)]


def _drive(path: Path, address: str, count: int) -> None:
    torch.set_num_threads(1)
    run(path, count, Trouble(0.004), batch=1, executor=RayCluster(address))


@pytest.fixture(scope="module")
def drive() -> Callable[[Path, Any, int], Any]:
    """Starts a process that certifies on a cluster, with everything imported and nothing connected."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_cluster"])
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # the server imports before it knows this process's path
        context.Process(target=int).start()

    def drive(path: Path, cluster: Any, count: int) -> Any:
        process = context.Process(target=_drive, args=(path, cluster.address, count))
        process.start()
        return process

    return drive


def written(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(lines: int, path: Path, process: Any) -> None:
    end = time.monotonic() + 120
    while written(path) < lines and process.is_alive() and time.monotonic() < end:
        time.sleep(0.005)


def test_twenty_drivers_killed(cluster: Any, drive: Any, tmp_path: Path) -> None:
    path, count, draw = tmp_path / "run.jsonl", 1000, random.Random(0)
    patient = set(draw.sample(range(20), 5))
    fruitful = 0
    for number in range(20):
        before = written(path)
        process = drive(path, cluster, count)
        if number in patient:
            wait_for(before + draw.randint(2, 60), path, process)
            time.sleep(draw.uniform(0, 0.1))
        else:
            time.sleep(draw.uniform(0, 2.0))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        fruitful += written(path) > before
    assert fruitful >= 4
    assert 0 < len(lines(path)) < count
    process = drive(path, cluster, count)
    process.join(300)
    assert process.exitcode == 0
    assert lines(path) == expected(tmp_path, count, batch=1)


def test_the_head_is_lost_and_the_command_repeated(drive: Any, tmp_path: Path) -> None:
    path, count = tmp_path / "run.jsonl", 5000
    first = start_cluster()
    process = drive(path, first, count)
    wait_for(20, path, process)
    first.remove_node(first.head_node, allow_graceful=False)
    process.join(300)
    if process.exitcode == 0:
        pytest.skip("the run was over before the head was gone")
    assert process.exitcode is not None
    first.shutdown()
    assert 10 < len(lines(path)) < count
    second = start_cluster()
    try:
        process = drive(path, second, count)
        process.join(300)
        assert process.exitcode == 0
    finally:
        second.shutdown()
    assert lines(path) == expected(tmp_path, count, batch=1)


def test_a_cluster_that_is_not_there_gets_one_line() -> None:
    with pytest.raises(HoldfastError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'") as found:
        run(None, 2, executor=RayCluster("127.0.0.1:1"))
    assert "\n" not in str(found.value)


def test_a_cluster_without_gpus_gets_one_line(connected: Any) -> None:
    with pytest.raises(HoldfastError, match="no node of the cluster has a CPU and 1 GPUs for a worker"):
        run(None, 2, executor=RayCluster(gpus_per_task=1))
    with pytest.raises(InputError, match="gpus_per_task is -1"):
        RayCluster(gpus_per_task=-1)
