"""What all tests share."""

from __future__ import annotations

import gc
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch

gc.set_threshold(100_000, 20, 50)  # recording graphs makes many objects that live long: by default a fifth of its time
pytest.register_assert_rewrite("holdfast.testing")
sys.path.append(str(Path(sys.prefix) / "vision"))  # where `make` puts timm and torchvision

from holdfast import HoldfastError  # noqa: E402 - its assertions are rewritten first
from holdfast.extras import require  # noqa: E402
from holdfast.testing import Case, make_case  # noqa: E402
from holdfast.testing.pairwise import pairwise  # noqa: E402

_HEADS = {"1 head": (1, 1), "4 heads": (4, 4), "4/2 heads": (4, 2), "4/1 heads": (4, 1)}
_MASKS = {"": None, "mask": "shared", "masks": "each"}
_OUTPUTS = {"": {}, "residual": {"residual": 1.5}, "d_out": {"d_out": 3}}
_OPTIONS = {
    "heads": list(_HEADS),
    "biases": ["", "biases"],
    "mask": list(_MASKS),
    "causal": ["", "causal"],
    "output": list(_OUTPUTS),
}
_COMBINATIONS = [
    dict(zip(("h", "g"), _HEADS[row["heads"]], strict=True))
    | {"biases": bool(row["biases"]), "mask": _MASKS[row["mask"]], "causal": bool(row["causal"])}
    | _OUTPUTS[row["output"]]
    | {"name": " ".join(filter(None, row.values()))}
    for row in pairwise(_OPTIONS)
]
_SLOWEST = 5  # files that the summary shows
_LONGEST = 600  # seconds of a test that waits for other processes
_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went: the suite is to stay quick."""
    terminalreporter.section(f"the {_SLOWEST} slowest files")
    for file, seconds in _seconds.most_common(_SLOWEST):
        terminalreporter.write_line(f"{seconds:6.1f} s  {file}")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def ends(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing that is killed can make its test wait for ever."""
    if request.node.get_closest_marker("cluster") is None:
        yield
        return

    def stop(number: int, frame: object) -> None:
        pytest.fail(f"the test has not ended after {_LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=_COMBINATIONS, ids=lambda options: options["name"])
def combination(request: pytest.FixtureRequest) -> Case:
    """Every pair of heads, grouping, biases, masks, causality, and residual or another output width."""
    return make_case(**request.param, n=5, d=6, k=3)


def _optional(package: str, extra: Literal["hf", "vision"]) -> ModuleType:
    try:
        return require(package, extra)
    except HoldfastError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The library, or a skipped test."""
    module = _optional("transformers", "hf")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """The library, or a skipped test."""
    return _optional("timm", "vision")
