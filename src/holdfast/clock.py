"""How much processor time a proof takes."""

from __future__ import annotations

import resource


def processor_seconds() -> float:
    """Used by this process and by those that it has started and waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
