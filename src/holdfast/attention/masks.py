"""Masks and score biases that models have, for `AttentionLayer`: windows, chunks, blocks, ALiBi."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from holdfast.errors import InputError


def sliding_window(n: int, width: int, *, causal: bool = True) -> Bool[Tensor, "n n"]:
    """Keys less than `width` tokens before the query (its own included), and without `causal` as many after it."""
    _positive(n=n, width=width)
    before = _distance(n)
    return (before >= 0 if causal else before > -width) & (before < width)


def chunked(n: int, size: int, *, causal: bool = True) -> Bool[Tensor, "n n"]:
    """Keys of the query's own chunk of `size` tokens, and with `causal` none that comes later."""
    _positive(n=n, size=size)
    chunk = torch.arange(n) // size
    same = chunk.unsqueeze(-1) == chunk
    return same & (_distance(n) >= 0) if causal else same


def blocks(sizes: Sequence[int]) -> Bool[Tensor, "n n"]:
    """Sequences of the given lengths one after another: tokens attend within their own."""
    if not sizes:
        raise InputError("sizes is empty; expected the lengths of the sequences")
    _positive(**{f"sizes[{i}]": size for i, size in enumerate(sizes)})
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return owner.unsqueeze(-1) == owner


def alibi(h: int, n: int) -> Float[Tensor, "h n n"]:
    """The score bias of ALiBi (Press et al. 2022): -slope_l · |i - j|, slopes 2^(-8 l / h) for l = 1 … h.

    Where h is not a power of two the slopes are those of the next smaller one, then every other one of the next larger.
    """
    _positive(h=h, n=n)
    below = 2 ** (h.bit_length() - 1)
    slopes = _slopes(below)
    if below < h:
        slopes = torch.cat([slopes, _slopes(2 * below)[::2][: h - below]])
    return -slopes[:, None, None] * _distance(n).abs()


def _slopes(h: int) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, h + 1, dtype=torch.float64) / h)


def _distance(n: int) -> Tensor:
    """(n, n) how far key j stands before query i."""
    place = torch.arange(n)
    return place.unsqueeze(-1) - place


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name} is {size!r}; expected a whole number, at least 1")
