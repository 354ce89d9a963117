"""Radii as users give them: one number or a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.errors import InputError


def check_radii(eps: float | Sequence[float], name: str = "eps") -> list[float]:
    """Radii as floats; each must be finite and not negative. `name` is the caller's word for them."""
    given = list(eps) if isinstance(eps, Sequence) and not isinstance(eps, str) else [eps]
    if not given:
        raise InputError(f"{name} is an empty sequence; expected at least one radius")
    for value in given:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise InputError(f"{name} is {value!r}; expected a finite number that is not negative")
    return [float(value) for value in given]
