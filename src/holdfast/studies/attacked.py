"""Proved radii beside attacks: no attack may succeed within one."""

from __future__ import annotations

from holdfast.errors import SoundnessError


def check_attacked(method: str, radius: float, what: str, attack: float | None) -> None:
    """Refuses a record in which an attack succeeds within a radius that is proved.

    Args:
        method: what proves it.
        radius: the radius.
        what: the input, in words.
        attack: how near an attack comes; None where none succeeds.
    """
    if attack is not None and radius > attack:
        raise SoundnessError(
            f"{method} proves {radius:.4g} for {what} and an attack succeeds at {attack:.4g}; please report"
        )
