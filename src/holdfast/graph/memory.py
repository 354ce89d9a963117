"""Attention to keys and values that do not move: cross-attention to a fixed memory, such as an encoder's output.

The memory becomes constant tokens beside the queries, and queries attend only to these; so it is attention like any
other, for every bound and composition. What these tokens return is dropped again.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor
from torch.nn.functional import one_hot

from holdfast.attention import AttentionLayer
from holdfast.graph import structure
from holdfast.graph.scores import FORBIDDEN, refuse_attention
from holdfast.graph.values import FIXED, Moving
from holdfast.layers.attention.piece import Attention
from holdfast.layers.tokens.embedding import AddPositions
from holdfast.layers.tokens.selection import choice


def remembered(
    q: Moving,
    keys: Float64[Tensor, "h m k"],
    values: Float64[Tensor, "h m c"],
    bias: Float64[Tensor, "h n m"],
    scale: float,
) -> Moving:
    """softmax(scale · q keysᵀ + bias) values for queries (h, n, k): (h, n, c).

    A token has channels for the queries, the keys and the values of all heads; of a query those of the first kind are
    not 0, of the memory the others.
    """
    (h, n, k), (_, m, c) = q.shape, values.shape
    point = structure.matrix_of(q.rearranged(lambda t: t.movedim(0, 1).reshape(n, h * k)))
    width = h * (2 * k + c)
    places, added = torch.full((n + m, width), FIXED), torch.zeros(n + m, width, dtype=torch.float64)
    places[:n, : h * k] = torch.arange(n * h * k).reshape(n, h * k)
    added[n:, h * k :] = torch.cat([t.movedim(0, 1).flatten(1) for t in (keys, values)], -1)
    channels = one_hot(torch.arange(width)).double()
    w_q, w_k = (channels[:, start : start + h * k].reshape(width, h, k).movedim(1, 0) for start in (0, h * k))
    w_v = channels[:, 2 * h * k :].reshape(width, h, c).movedim(1, 0)
    w_o = torch.eye(h * c, dtype=torch.float64).reshape(h, c, h * c)
    layer = AttentionLayer(w_q, w_k, w_v, w_o, scale=scale, **_mask(bias))
    pieces = (*choice(places, point.shape), AddPositions(added), Attention(layer))
    whole = structure.through(point, (n + m, h * c), *pieces, label="attention to a fixed memory")
    kept = torch.arange(n * h * c).reshape(n, h * c)
    out = structure.through(whole, (n, h * c), *choice(kept, whole.shape))
    return out.view((n, h, c)).rearranged(lambda t: t.movedim(1, 0))


def _mask(bias: Float64[Tensor, "h n m"]) -> dict[str, Any]:
    """Queries attend to the memory where the bias allows it, its tokens to themselves."""
    h, n, m = bias.shape
    allowed = bias > FORBIDDEN
    if bool((allowed != allowed[:1]).any()):
        refuse_attention("masks the heads differently; expected one mask for all heads")
    if not bool(allowed.any(-1).all()):
        refuse_attention("a query may attend to no key at all; remove the padding")
    mask = torch.zeros(n + m, n + m, dtype=torch.bool)
    mask[:n, n:], mask[n:, n:] = allowed[0], torch.eye(m, dtype=torch.bool)
    whole = torch.zeros(h, n + m, n + m, dtype=torch.float64)
    whole[:, :n, n:] = bias.masked_fill(~allowed, 0.0)
    return {"mask": mask, "score_bias": whole} if bool(whole.any()) else {"mask": mask}
