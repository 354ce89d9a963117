"""What work runs on: every executor passes the same tests, and a study runs on them as well."""

from __future__ import annotations

import pytest
import torch

from holdfast import HoldfastError, InputError
from holdfast.executors import Executor, InProcess, Processes, RayCluster, choose, executors
from holdfast.studies.processes import Tell, side_by_side
from holdfast.testing.executors import ExecutorConformance

#: Where each executor is tested.
TESTED = {"in-process": "TestInProcess", "processes": "TestProcesses", "ray": "test_cluster.py"}


class TestInProcess(ExecutorConformance):
    loses_workers = False

    def executor(self) -> Executor:
        return InProcess()


@pytest.mark.cluster
class TestProcesses(ExecutorConformance):
    def executor(self) -> Executor:
        return Processes(2)


def test_every_executor_is_tested() -> None:
    assert set(TESTED) == set(executors)


def test_executors_by_name() -> None:
    assert isinstance(choose(None, None), InProcess)
    assert isinstance(choose(None, 2), Processes)
    assert isinstance(choose("processes", 1), Processes)
    with pytest.raises(InputError, match="unknown executor 'rays': did you mean 'ray'"):
        choose("rays", None)
    with pytest.raises(InputError, match="workers is 0; expected at least 1"):
        Processes(0)


def _threads(item: int, tell: Tell) -> None:
    if torch.get_num_threads() != 1:
        raise InputError(f"{torch.get_num_threads()} threads")


def test_one_job_has_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        told: list[tuple[int, float]] = []
        side_by_side(_threads, [0, 1], 1, lambda *share: told.append(share))
        assert told == [(0, 1.0), (1, 1.0)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_missing_ray_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.extras.find_spec", lambda name: None)
    with pytest.raises(HoldfastError, match=r"this needs ray, .* pip install 'holdfast\[cluster\]'"):
        RayCluster()


@pytest.mark.parametrize("address", ["", "somewhere", "host:", ":6379", "ray://host:10001"])
def test_a_strange_address_is_refused(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="expected auto, or HOST:PORT of its head"):
        RayCluster(address)
