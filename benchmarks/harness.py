"""What the benchmarks share: one thread, CPU time, the machine in words, and where results go."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy
import torch
from threadpoolctl import threadpool_limits

from holdfast.storage import write_text

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks"

T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for the BLAS under scipy: CPU time is then the time of the work itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def cpu_seconds(f: Callable[[], T]) -> tuple[T, float]:
    """What f returns, and the CPU time that it took, of all threads together."""
    began = time.process_time()
    result = f()
    return result, time.process_time() - began


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scipy": scipy.__version__,
        "numpy": np.__version__,
    }


def save(name: str, content: Mapping[str, Any]) -> Path:
    """Writes the results of a benchmark as JSON."""
    path = RESULTS / f"{name}.json"
    write_text(path, json.dumps(content, indent=1) + "\n")
    return path


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
