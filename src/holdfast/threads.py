"""How the threads of a process wait for each other."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Read by OpenMP when it is loaded, with torch. Without it, waiting threads spin: where other processes keep the
#: cores busy, two threads then take many times as long as one (docs/guides/scale-out.md).
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}


def wait_asleep() -> None:
    """Lets waiting threads sleep, in children and, before torch is loaded, here; the user's own setting stays."""
    for name, value in _PATIENT.items():
        os.environ.setdefault(name, value)


@contextmanager
def children_wait_asleep() -> Iterator[None]:
    """The same for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in _PATIENT}
    wait_asleep()
    try:
        yield
    finally:
        for name in (name for name, value in before.items() if value is None):
            del os.environ[name]
