"""How fast queries and keys move as they meet, where they are normalised and turned (docs/math/scores.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from holdfast.attention import AttentionLayer
from holdfast.attention.layer import join_heads, project
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@dataclass(frozen=True)
class PlacedSide(Generic[Array]):
    """Queries or keys on balls of radii e around X, where the raw ones move by γ_i M_l.

    Attributes:
        maps: (h, d, m) M_l: W_l, or the maps of all heads side by side where one norm is taken over all of them.
        size: (h) ‖M_l‖.
        slope: (e, b…, h or 1, n) L: a token moves by at most L_li ‖γ_i M_l‖.
        bend: (e, b…, h or 1, n) its second derivative is at most S_li ‖g_i M_l‖².
    """

    maps: Array
    size: Array
    slope: Array
    bend: Array


def placed_sides(
    a: Arithmetic[Array], layer: AttentionLayer, X: Array, eps: Array
) -> tuple[PlacedSide[Array], PlacedSide[Array]]:
    """Queries and keys, for radii eps (…, 1, e)."""
    w = layer.weights(X)
    rho = 1.0 if layer.rotary is None else layer.rotary.norm
    sides = []
    for own, bias, norm in ((w.w_q, w.b_q, layer.q_norm), (w.w_k, w.b_k, layer.k_norm)):
        raw, maps, inner, outer = project(X, own, bias), own, 1.0, rho
        if norm is not None and norm.across:
            maps = join_heads(own).unsqueeze(-3)
        size = a.matrix_norm(maps)
        if norm is not None and norm.after_rotation and layer.rotary is not None:
            raw, inner, outer = layer.rotary.turn(raw), rho, 1.0
        radius = (size.unsqueeze(-1) * eps).movedim(-1, 0).unsqueeze(-1) * inner  # (e, …, h or 1, 1)
        batch = radius.shape[1:-2] or (1,) * (raw.ndim - 3)
        radius = radius.reshape(radius.shape[0], *batch, *radius.shape[-2:])
        if norm is None:
            slope = radius * 0.0 + raw.sum(-1) * 0.0 + outer
            bend = slope * 0.0
        else:
            spread = norm.repeated(layer.h)
            slope = spread.steepest(raw, radius) * (inner * outer)
            bend = spread.sharpest(raw, radius) * inner * (inner * outer)
        sides.append(PlacedSide(maps.expand(layer.h, *maps.shape[-2:]), size.expand(layer.h), slope, bend))
    return sides[0], sides[1]


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
    """The same for all tokens together."""
    query, key = (
        PlacedGain(
            side.slope.amax(-1).movedim(0, -1) * side.size.unsqueeze(-1),
            side.bend.amax(-1).movedim(0, -1) * side.size.square().unsqueeze(-1),
        )
        for side in placed_sides(a, layer, X, eps)
    )
    return query, key
