"""How the benchmarks that may run on a GPU measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def second_call(work: Callable[[], T]) -> tuple[T, float, float]:
    """What the second of two calls returns, its seconds, and the GiB that it took of the GPU, where there is one."""
    work()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    result = work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return result, seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
