"""How fast queries and keys move as they meet, where they are normalised and turned (docs/math/scores.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from holdfast.attention import AttentionLayer
from holdfast.attention.layer import join_heads, project
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@dataclass(frozen=True)
class PlacedGain(Generic[Array]):
    """Of Q̂_l or K̂_l, on balls of radii e around X, for directions G of length 1.

    Attributes:
        slope: (b…, h, e) a bound of ‖Q̂_l'‖_F.
        bend: (b…, h, e) a bound of ‖Q̂_l''‖_F.
    """

    slope: Array
    bend: Array


def placed_gains(
    a: Arithmetic[Array], layer: AttentionLayer, X: Array, eps: Array
) -> tuple[PlacedGain[Array], PlacedGain[Array]]:
    """Queries and keys, for radii eps (…, 1, e)."""
    w = layer.weights(X)
    rho = 1.0 if layer.rotary is None else layer.rotary.norm
    sides = []
    for maps, bias, norm in ((w.w_q, w.b_q, layer.q_norm), (w.w_k, w.b_k, layer.k_norm)):
        size = a.matrix_norm(maps).unsqueeze(-1) + eps * 0.0  # (…, h, e)
        if norm is None:
            sides.append(PlacedGain(size * rho, size * 0.0))
            continue
        raw = project(X, maps, bias)
        if norm.across:
            size = a.matrix_norm(join_heads(maps)) + eps * 0.0
        outer = rho
        if norm.after_rotation and layer.rotary is not None:
            raw, size, outer = layer.rotary.turn(raw), size * rho, 1.0
        radius = (size * eps).movedim(-1, 0).unsqueeze(-1)  # (e, …, h or 1, 1)
        batch = radius.shape[1:-2] or (1,) * (raw.ndim - 3)
        radius = radius.reshape(radius.shape[0], *batch, *radius.shape[-2:])
        own = norm.repeated(layer.h)
        slope, bend = (f(raw, radius).amax(-1).movedim(0, -1) for f in (own.steepest, own.sharpest))
        sides.append(PlacedGain(slope * size * outer, bend * size.square() * outer))
    return sides[0], sides[1]
