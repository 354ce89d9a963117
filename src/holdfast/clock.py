"""How much processor time and memory a proof takes."""

from __future__ import annotations

import resource
import sys


def processor_seconds() -> float:
    """The seconds used by this process and by those that it has started and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_memory() -> float:
    """MiB, the largest resident size of the process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
