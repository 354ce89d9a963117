"""Ctrl-C between two steps, never inside one: what was done can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Holds a Ctrl-C back until the block is done; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread alone
        return
    pressed = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed += 1
        if pressed > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
