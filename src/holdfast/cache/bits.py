"""Which layers and heads need more bits for a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.cache.error import CacheError, cache_error
from holdfast.cache.quantise import Quantiser
from holdfast.errors import InputError

_CHOICES = (2, 3, 4, 6, 8, 10, 12, 16)


@final
@dataclass(frozen=True)
class LayerBits:
    """What one layer needs.

    Attributes:
        name: of the layer.
        actual: bits with which the quantised cache moved no token by more than the tolerance; None if none sufficed.
        proved: bits with which no cache within the bounds can, proved; None if none sufficed.
        heads: for each head the bits with which its own contribution stays within the tolerance, proved.
        movement: for each number of bits the largest relative movement: actual, attacked, proved.
    """

    name: str
    actual: int | None
    proved: int | None
    heads: tuple[int | None, ...]
    movement: Mapping[int, tuple[float, float, float]]


@final
@dataclass(frozen=True)
class BitsTable:
    """Bits of a cache for a tolerance, layer by layer.

    Attributes:
        tolerance: the largest movement of a token's attention output, relative to the median length of the outputs.
        layers: one row each.
    """

    tolerance: float
    layers: tuple[LayerBits, ...]

    def __str__(self) -> str:
        lines = [f"{'layer':<32} {'actual':>7} {'proved':>7}  heads that need most (proved)"]
        for row in self.layers:
            order = sorted(range(len(row.heads)), key=lambda i: -(row.heads[i] or 99))[:4]
            worst = ", ".join(f"{i}: {_word(row.heads[i])}" for i in order)
            lines.append(f"{row.name[-32:]:<32} {_word(row.actual):>7} {_word(row.proved):>7}  {worst}")
        return "\n".join(lines)


def cache_bits(
    layers: Mapping[str, tuple[AttentionLayer, Tensor]],
    tolerance: float,
    bits: Sequence[int] = _CHOICES,
    *,
    attack: bool = False,
) -> BitsTable:
    """The fewest bits, per channel for keys and per token for values, that keep every layer within a tolerance.

    Args:
        layers: by name, each with its input (b…, n, d), as `trace` finds them.
        tolerance: of the movement of a token's output, relative to the median length of the layer's outputs.
        bits: the numbers of bits to try, in growing order.
        attack: also attack; the movement is then reported along with the others.

    Example:
        >>> print(cache_bits({t.name: (t.layer, t.x) for t in trace(model, inputs)}, tolerance=0.1))
    """
    if not tolerance > 0:
        raise InputError(f"tolerance is {tolerance}; expected a positive number")
    if not bits or sorted(set(bits)) != list(bits):
        raise InputError(f"bits is {tuple(bits)}; expected different numbers in growing order")
    rows = []
    for name, (layer, x) in layers.items():
        moved = {b: _relative(layer, x, b, attack) for b in bits}
        heads = torch.stack([of_heads for _, of_heads in moved.values()])  # (bits, h)
        movement = {b: of_layer for b, (of_layer, _) in moved.items()}
        rows.append(
            LayerBits(
                name,
                actual=next((b for b, (actual, _, _) in movement.items() if actual <= tolerance), None),
                proved=next((b for b, (_, _, value) in movement.items() if value <= tolerance), None),
                heads=tuple(_first(bits, heads[:, i] <= tolerance) for i in range(heads.shape[1])),
                movement=movement,
            )
        )
    return BitsTable(tolerance, tuple(rows))


def _relative(layer: AttentionLayer, x: Tensor, bits: int, attack: bool) -> tuple[tuple[float, float, float], Tensor]:
    r: CacheError = cache_error(layer, x, Quantiser(bits, "channel"), Quantiser(bits, "token"), attack=attack)
    size = r.size.median()
    assert r.moved is not None
    moved, lower, value = (float((t / size).max()) for t in (r.moved, r.lower, r.value))
    return (moved, lower, value), (r.heads / size).movedim(-2, 0).flatten(1).amax(1)


def _first(bits: Sequence[int], enough: Tensor) -> int | None:
    return next((b for b, yes in zip(bits, enough.tolist(), strict=True) if yes), None)


def _word(bits: int | None) -> str:
    return "more" if bits is None else str(bits)
