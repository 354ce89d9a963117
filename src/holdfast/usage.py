"""How much processor time and memory a proof takes, and how what is free goes back to the system."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path


def processor_seconds() -> float:
    """The seconds used by this process and by those that it has started and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_memory() -> float:
    """MiB, the largest resident size of the process so far.

    Linux also knows it for the program that runs; what `getrusage` tells may be that of the program that started it.
    """
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        for name, _, value in (line.partition(":") for line in lines):
            if name == "VmHWM":
                return int(value.split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def give_back_memory() -> None:
    """What is free on the heap goes back to the system: glibc keeps it where smaller tensors lie between larger ones.

    Other C libraries have no such call, and need none.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
