"""Neighbouring pieces that are one: attention with its output map, the two maps of an MLP, a norm with its weights.

A joint piece has tighter constants than its parts. Nothing is rounded here: weights are put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.layers.activation.base import SmoothActivation
from holdfast.layers.activation.piece import KinkedEntries, SmoothEntries
from holdfast.layers.attention.piece import Attention
from holdfast.layers.linear.piece import Affine
from holdfast.layers.norm.piece import LayerNorm, RMSNorm
from holdfast.layers.perceptron.piece import KinkedMlp, Mlp
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.embedding import AddPositions
from holdfast.layers.tokens.maxima import WindowMax
from holdfast.layers.tokens.pooling import TokenMean
from holdfast.layers.tokens.selection import Scale, Selection
from holdfast.network.network import Residual

_WIDE = 1024  # an activation without a map beside it gets an identity up to this many channels


def fused(stages: Sequence[Piece | Residual]) -> list[Piece | Residual]:
    """The stages with neighbouring pieces joined."""
    joined: list[Piece | Residual] = []
    run: list[Piece] = []
    for stage in stages:
        if isinstance(stage, Residual):
            joined += [*_fused(run), stage]
            run = []
        else:
            run.append(stage)
    return [*joined, *_fused(run)]


def fused_residual(pieces: Sequence[Piece]) -> Piece | Residual:
    """U + f(u): attention or an MLP by itself takes the identity along, and is bounded together with it."""
    branch = _fused(pieces)
    if len(branch) == 1:
        (piece,) = branch
        if (joint := piece.with_identity()) is not None:
            return joint
    return Residual(tuple(branch))


def _fused(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        joined.append(piece)
        while len(joined) > 1 and (joint := _joint(joined[-2], joined[-1])) is not None:
            joined[-2:] = [joint]
    return _perceptrons(joined)


def _joint(a: Piece, b: Piece) -> Piece | None:
    """One piece for two that follow each other, where there is one."""
    match a, b:
        case Affine(), AddPositions() if b.c.ndim == 1 and not bool(a.b.any()):
            return Affine(a.w, b.c)
        case Attention(), Affine() if _bare(a.layer):
            h, k = a.layer.w_o.shape[:2]
            if b.w.shape[0] == h * k:
                bias = b.b if bool(b.b.any()) else None
                return Attention(a.layer.replace(w_o=b.w.reshape(h, k, -1), b_o=bias))
        case LayerNorm(), Scale() if b.factors.ndim == 1 and not bool(a.beta.any()) and bool((a.gamma == 1).all()):
            return LayerNorm(b.factors, a.beta, a.kappa)
        case RMSNorm(), Scale() if b.factors.ndim == 1 and bool((a.gamma == 1).all()):
            return RMSNorm(b.factors, a.kappa)
        case LayerNorm(), AddPositions() if b.c.ndim == 1 and not bool(a.beta.any()):
            return LayerNorm(a.gamma, b.c, a.kappa)
        case Selection(), TokenMean() if b.skip == 0:
            skipped = _skipped(a)
            return None if skipped is None else TokenMean(a.shape[0], skipped)
        case Selection(), Selection():
            chosen = a.index.flatten()[b.index.clamp(min=0)]
            return Selection(torch.where(b.index < 0, -1, chosen), a.shape)
        case Selection(), WindowMax() if int(a.index.min()) >= 0:
            return WindowMax(torch.where(b.index < 0, -1, a.index.flatten()[b.index]), a.shape)
    return None


def _skipped(a: Selection) -> int | None:
    """How many tokens in front are left out, where the others stay in order."""
    n, d = a.shape
    skip = n - len(a.index)
    everything = torch.arange(n * d).reshape(n, d)
    return skip if a.index.shape == (n - skip, d) and torch.equal(a.index, everything[skip:]) else None


def _perceptrons(pieces: Sequence[Piece]) -> list[Piece]:
    """Activations with the maps around them as MLPs."""
    joined: list[Piece] = []
    rest = list(pieces)
    while rest:
        piece = rest.pop(0)
        if not isinstance(piece, SmoothEntries | KinkedEntries) or not bool(piece.active.all()):
            joined.append(piece)
            continue
        width = len(piece.active)
        before = joined.pop() if joined and isinstance(joined[-1], Affine) else None
        after = rest.pop(0) if rest and isinstance(rest[0], Affine) else None
        if before is None and after is None and width > _WIDE:
            joined.append(piece)
            continue
        eye, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
        w1, b1 = (eye, zero) if before is None else _affine(before)
        w2, b2 = (eye, zero) if after is None else _affine(after)
        kind = Mlp if isinstance(piece.phi, SmoothActivation) else KinkedMlp
        joined.append(kind(w1, b1, piece.phi, w2, b2))
    return joined


def _affine(piece: Piece) -> tuple[Tensor, Tensor]:
    assert isinstance(piece, Affine)
    return piece.w, piece.b


def _bare(layer: AttentionLayer) -> bool:
    """Whether the heads' outputs stand side by side, and nothing follows yet."""
    h, k, c = layer.w_o.shape
    return (
        c == h * k
        and layer.b_o is None
        and layer.residual == 0.0
        and torch.equal(layer.w_o, torch.eye(c, dtype=torch.float64).reshape(h, k, c))
    )
