"""Which entries pooling takes together, read off its options: along one dimension, then along all of them.

A table (outputs, kernel) of one dimension holds places, and -1 where a window has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

Table = Int64[Tensor, "outputs kernel"]


def sliding(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, *, ceil: bool = False) -> Table:
    """Windows at equal distances; with `ceil` also a last one that begins inside and ends outside."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    outputs = span // stride + 1
    if ceil and span % stride and outputs * stride < size + padding:
        outputs += 1
    places = torch.arange(outputs).unsqueeze(-1) * stride - padding + torch.arange(kernel) * dilation
    return places.where((places >= 0) & (places < size), -1)


def adaptive(size: int, outputs: int) -> Table:
    """So many windows, of sizes that differ by one at most."""
    place = torch.arange(outputs)
    begin, end = place * size // outputs, -(-(place + 1) * size // outputs)
    places = begin.unsqueeze(-1) + torch.arange(int((end - begin).max()))
    return places.where(places < end.unsqueeze(-1), -1)


def together(tables: Sequence[Table], sizes: Sequence[int]) -> Int64[Tensor, "*outputs window"]:
    """The windows of several dimensions, as places in these dimensions flattened."""
    index = torch.zeros(1, dtype=torch.int64)
    for table, size in zip(tables, sizes, strict=True):
        before, here = index[..., None, :, None], table[:, None, :]
        index = torch.where((before < 0) | (here < 0), -1, before * size + here).flatten(-2)
    return index
