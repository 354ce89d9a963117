"""Numbers and radii as users give them: one number or a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from holdfast.errors import InputError


def check_number(value: object, name: str, expected: str) -> float:
    """A number as a float; `name` is the caller's word for it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}; expected {expected}")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{name} is a whole number beyond float64; expected {expected}") from None


GivenRadii = float | Sequence[float] | Tensor | np.ndarray


def as_numbers(radii: GivenRadii) -> float | Sequence[float]:
    """GivenRadii as Python numbers, if they are a tensor or an array."""
    if not isinstance(radii, Tensor | np.ndarray | np.generic):
        return radii
    if radii.ndim > 1:
        raise InputError(f"the radii have shape {tuple(radii.shape)}; expected one number, or one dimension of them")
    numbers: float | list[float] = radii.tolist()
    return numbers


def check_radii(eps: GivenRadii, name: str = "eps") -> list[float]:
    """GivenRadii as floats; each must be finite and not negative. `name` is the caller's word for them."""
    eps = as_numbers(eps)
    given = list(eps) if isinstance(eps, Sequence) and not isinstance(eps, str) else [eps]
    if not given:
        raise InputError(f"{name} is an empty sequence; expected at least one radius")
    expected = "a finite number that is not negative"
    radii = [check_number(value, name, expected) for value in given]
    for value in radii:
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{name} is {value!r}; expected {expected}")
    return radii
