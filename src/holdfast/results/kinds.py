"""How far a number can be trusted, in words, and numbers as a prompt and JSON show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Side = Literal["upper", "lower", "estimate"]
Guarantee = Literal["proved", "numerical"]
Scope = Literal["ball at x", "point", "ball at 0"]
Norm = Literal["l2", "linf"]


def brief(t: Tensor | float | Sequence[float] | None) -> str:
    """Numbers in few words and digits: all of them if they are few."""
    if t is None:
        return "none"
    if not isinstance(t, Tensor):
        t = torch.tensor(t, dtype=torch.float64)
    if t.numel() <= 6:
        return str(t.tolist() if not t.is_floating_point() else _rounded(t.tolist()))
    return f"{t.amin():.4g} to {t.amax():.4g}, shape {tuple(t.shape)}"


def _rounded(value: Any) -> str:
    return f"[{', '.join(map(_rounded, value))}]" if isinstance(value, list) else f"{value:.4g}"


def plain(value: object) -> object:
    """Tensors as nested lists, for JSON."""
    return value.tolist() if isinstance(value, Tensor) else value
