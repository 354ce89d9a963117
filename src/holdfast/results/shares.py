"""Shares of inputs in per cent, rounded so that they claim no more than was found."""

from __future__ import annotations

import math


def at_least(share: float) -> str:
    """What is right or certified, rounded down."""
    return f"{math.floor(_thousandths(share)) / 10:.1f}"


def at_most(share: float) -> str:
    """What is left after an attack, rounded up."""
    return f"{math.ceil(_thousandths(share)) / 10:.1f}"


def _thousandths(share: float) -> float:
    return round(1000 * share, 6)  # a share is a quotient, which rounding may have moved
