"""What the benchmarks share: one thread, CPU time, the machine in words, and where results go."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy
import torch
from threadpoolctl import threadpool_limits

from holdfast.storage import write_text
from holdfast.usage import give_back_memory, peak_memory

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


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of the work, and how many MiB this process held at most beyond those that it held when it began.

    Linux forgets an earlier peak when it is told to; elsewhere the work may seem to hold less than it does.
    """
    give_back_memory()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_memory()
    _, seconds = cpu_seconds(work)
    return seconds, peak_memory() - before


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
