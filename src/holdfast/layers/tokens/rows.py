"""Which tokens the output of a piece depends on."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

Rows = Int64[Tensor, " rows"]


def distinct(*rows: Rows) -> Rows:
    """All of them once, sorted."""
    every: Tensor = torch.unique(torch.cat(rows))
    return every


def entries_among(index: Tensor, rows: Rows, d: int) -> Tensor:
    """Places of entries in tokens of width d, as places in the tokens `rows` alone; -1 stays."""
    moved = torch.searchsorted(rows, (index // d).clamp(min=0).contiguous()) * d + index % d
    return torch.where(index < 0, -1, moved)
