"""Numbers as printed: upper bounds are rounded up, attained values down, estimates to nearest."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction


def up(value: float | Fraction, digits: int = 3) -> str:
    """An upper bound: the printed number is no smaller.

    Example:
        >>> up(1.6993136, 6)
        '1.69932'
    """
    return _shown(value, digits, ROUND_CEILING)


def down(value: float | Fraction, digits: int = 3) -> str:
    """An attained value, or another lower bound: the printed number is no larger."""
    return _shown(value, digits, ROUND_FLOOR)


def nearest(value: float | Fraction, digits: int = 3) -> str:
    """An estimate."""
    return _shown(value, digits, ROUND_HALF_EVEN)


def _shown(value: float | Fraction, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return f"{float(value):g}"
    numerator, denominator = value.as_integer_ratio()  # exact, so that the division below is the only rounding
    rounded = Context(prec=digits, rounding=rounding).divide(Decimal(numerator), Decimal(denominator))
    return f"{float(rounded):.{digits}g}"
