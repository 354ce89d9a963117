"""Which pieces have forms: for each kind, what stands for it at a point, or why nothing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.compositions.forms.kinks import Kinks, bent_at_zero
from holdfast.compositions.forms.local import Local
from holdfast.compositions.forms.normalised import Normalised
from holdfast.compositions.forms.smooth import SmoothUnits
from holdfast.compositions.forms.softmax import Softmax
from holdfast.compositions.forms.units import Entries, Hidden, SortedPairs, Windows
from holdfast.compositions.forms.waiting import SmoothWaiting, Waiting
from holdfast.layers.activation.functions import Absolute, Relu, Square
from holdfast.layers.activation.piece import KinkedEntries, SmoothEntries
from holdfast.layers.attention.piece import Attention
from holdfast.layers.beside import KinkedBeside, SmoothBeside
from holdfast.layers.maxmin import PairSort
from holdfast.layers.norm.piece import LayerNorm, RMSNorm
from holdfast.layers.perceptron.piece import KinkedMlp, Mlp
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.layers.product import Product
from holdfast.layers.projection import SmoothProject
from holdfast.layers.tokens.maxima import WindowMax
from holdfast.network.network import Network

#: A piece at a point (n, d); None where this piece of its kind has no forms.
Kind = Callable[[Any, Tensor], Local]

_kinds: dict[type[Piece], Kind] = {
    Attention: lambda piece, u: Softmax(piece, u),
    KinkedMlp: lambda piece, u: Kinks(u, Hidden(piece), piece.activation.all_slopes),
    KinkedEntries: lambda piece, u: Kinks(u, Entries(piece.active), piece.phi.all_slopes),
    PairSort: lambda piece, u: Kinks(u, SortedPairs(u.shape[-1]), Absolute.all_slopes),
    Mlp: lambda piece, u: SmoothUnits(u, Hidden(piece), piece.smooth_activation),
    SmoothEntries: lambda piece, u: SmoothUnits(u, Entries(piece.active), piece.phi),
    Product: lambda piece, u: SmoothUnits(u, Hidden(piece.squares(u.shape[-1])), Square()),
    KinkedBeside: lambda piece, u: Waiting(u, piece, local_at(piece.piece, piece.part.take(u))),
    SmoothBeside: lambda piece, u: SmoothWaiting(u, piece, local_at(piece.piece, piece.part.take(u))),
    LayerNorm: lambda piece, u: Normalised(u, piece),
    RMSNorm: lambda piece, u: Normalised(u, piece),
    SmoothProject: lambda piece, u: Normalised(u, piece),
    WindowMax: lambda piece, u: Kinks(u, Windows(piece, u), Relu.all_slopes),
}

#: What prevents forms for a piece of a kind that otherwise has them, or None.
_exceptions: dict[type[Piece], Callable[[Any], str | None]] = {
    Attention: lambda piece: _beyond(piece.layer),
    KinkedMlp: lambda piece: None if bent_at_zero(piece.activation) else "this activation",
    KinkedEntries: lambda piece: None if bent_at_zero(piece.phi) else "this activation",
    KinkedBeside: lambda piece: why_not(piece.piece),
    SmoothBeside: lambda piece: why_not(piece.piece),
}


def _beyond(layer: AttentionLayer) -> str | None:
    """What an attention layer has beyond dot products of linear queries and keys of one input."""
    if layer.rotary is not None and layer.rotary.batch:
        return "rotary positions for each input"
    if layer.w_v.shape[-1] != layer.k:
        return "values of another width than keys"
    if (layer.mask is not None and layer.mask.ndim > 2) or (layer.score_bias is not None and layer.score_bias.ndim > 3):
        return "a mask or a score bias for each input"
    return layer.beyond_dot_products


def why_not(piece: Piece) -> str | None:
    """Why a piece that is not affine has no forms, or None where it has."""
    kind = type(piece)
    if kind not in _kinds:
        return f"{kind.__name__} has no forms"
    exception = _exceptions.get(kind, lambda _: None)(piece)
    if exception is None or exception.endswith("has no forms"):
        return exception
    return f"{kind.__name__} with {exception} has no forms"


def local_at(piece: Piece, u: Tensor) -> Local:
    """What stands for a piece that has forms."""
    return _kinds[type(piece)](piece, u)


def refusal(network: Network) -> str | None:
    """Names what has no forms, or None."""
    curved = (piece for piece in network.pieces() if not isinstance(piece, LinearPiece))
    return next((reason for piece in curved if (reason := why_not(piece)) is not None), None)
