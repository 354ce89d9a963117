"""The errors a user can meet: each message is one line that says what was passed, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoldfastError(Exception):
    """Base of every error that Holdfast raises on purpose."""


class InputError(HoldfastError, ValueError):
    """An argument has the wrong shape, type or value."""


class UnknownNameError(InputError):
    """A name is not registered; the message offers the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}: {hint}known: {', '.join(known)}")


class NotApplicableError(HoldfastError):
    """A method has no proof for this layer; the message says which assumption fails."""


class UnsupportedAttentionError(HoldfastError):
    """Some attention of a model is not what an `AttentionLayer` can stand for; the message names the module and why."""


class ConversionError(HoldfastError):
    """A model cannot be turned into a network, or the network does not compute what the model does."""


class MemoryLimitError(HoldfastError):
    """A computation would need more memory than it may use; nothing has been allocated."""


class SoundnessError(HoldfastError):
    """A method returned a value that its own check contradicts; the value is withheld."""
