"""How the benchmarks that may run on a GPU measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Counted(TorchDispatchMode):
    """Counts operations that compute something, and numbers that the program waits for."""

    operations = waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], Any]) -> dict[str, int]:
    """How many operations the work takes on this device, and how often it waits for a number."""
    with _Counted() as mode:
        work()
    return {"operations": mode.operations, "waits": mode.waits}
