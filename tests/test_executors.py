"""What work runs on: every executor passes the same tests, and a study runs on them as well."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from holdfast import HoldfastError, InputError
from holdfast.executors import Executor, InProcess, Processes, RayCluster, choose, executors
from holdfast.studies.processes import Tell, side_by_side
from holdfast.testing.executors import ExecutorConformance
from holdfast.threads import children_wait_asleep

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


def _wait_policy(item: str, tell: Tell) -> None:
    if os.environ.get("OMP_WAIT_POLICY") != item:
        raise InputError(f"waiting threads are told {os.environ.get('OMP_WAIT_POLICY')}; expected {item}")


def test_threads_of_processes_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that spin take the cores away from each other; but what a user has set stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    side_by_side(_wait_policy, ["PASSIVE"] * 2, 2, lambda *share: None)
    assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with children_wait_asleep():
        assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_command_line_says_so_before_torch_is_loaded() -> None:
    program = (
        "import importlib, os, sys\n"
        "cli = importlib.import_module('holdfast.cli.app')\n"
        "cli.app = lambda **_: print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)\n"
        "cli.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["PASSIVE", "False"], done.stderr


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
