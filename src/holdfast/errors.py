"""The errors a user can meet: each message is one line that says what was passed, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALL, _FEW = 24, 5  # names that a message lists: all of them if they are few, otherwise the nearest


def check_counts(**counts: int | None) -> None:
    """Refuses numbers of things that are not at least 1; None stands for no number."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{name} is {count}; expected at least 1")


class HoldfastError(Exception):
    """Base of every error that Holdfast raises on purpose."""


class InputError(HoldfastError, ValueError):
    """An argument has the wrong shape, type or value."""


class UnknownNameError(InputError):
    """A name is not registered; the message offers the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=_FEW, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if len(known) <= _ALL:
            listed = f"known: {', '.join(known)}"
        else:
            listed = f"{len(known)} are known, such as {', '.join(near or known[:_FEW])}"
        super().__init__(f"unknown {kind} {name!r}: {hint}{listed}")


class NotApplicableError(HoldfastError):
    """A method has no proof for this layer; the message says which assumption fails."""


class UnsupportedAttentionError(HoldfastError):
    """Some attention of a model cannot be represented by an `AttentionLayer`; the message names the module and why."""


class ConversionError(HoldfastError):
    """A model cannot be turned into a network, or the network does not compute what the model does."""


class MemoryLimitError(HoldfastError):
    """A computation would need more memory than it may use; nothing has been allocated."""


class NotFiniteError(HoldfastError):
    """A proved number does not fit into float64."""


class TimeLimitError(HoldfastError):
    """A computation was given up at its deadline; what was proved before stays."""


class SoundnessError(HoldfastError):
    """A method returned a value that its own check contradicts; the value is withheld."""
