"""What attention over scores is: tokens, heads, maps and positions read off index tensors, as an `AttentionLayer`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.rotary import Pairing, Rotary
from holdfast.attention.sink_token import sink_token
from holdfast.graph import structure
from holdfast.graph.head_norms import Normed, without_norm
from holdfast.graph.scores import Scores, refuse_attention
from holdfast.graph.values import FIXED, Map, Moving, Point
from holdfast.layers.attention.piece import Attention
from holdfast.layers.tokens.embedding import AddPositions
from holdfast.layers.tokens.selection import choice


@final
@dataclass(frozen=True)
class Attended:
    """Attention over the tokens of a point, and its output before any output map.

    Attributes:
        layer: with each head's output by itself, w_o being an identity.
        x: the point whose tokens attend.
        value: (H, n, k) the heads' outputs.
        source: the point of these tokens, in any order.
        rows: (windows, n) which row of it each token is; tokens attend to those of their own window only.
        lonely: (windows, n) queries that may attend to no key.
    """

    layer: AttentionLayer
    x: Point
    value: Moving
    source: Point
    rows: Int64[Tensor, "windows n"]
    lonely: Bool[Tensor, "windows n"]


def attend(scores: Scores, v: Moving, *, batch: int | None = None) -> Attended:
    """softmax(scores) v.

    Args:
        scores: normalised.
        v: (…, m, k).
        batch: the number of inputs, where a layer of its own mask for each is wanted; otherwise groups of tokens that
            attend to each other only share one mask.
    """
    s = scores.in_order()
    H, n, m = s.sizes
    v = v.reshape(-1, *v.shape[-2:])
    norms: list[Normed | None] = [None, None]
    if batch is not None:  # in a network, norms are pieces of their own
        (raw_q, q_norm), (raw_k, k_norm) = without_norm(s.q), without_norm(s.k)
        s, norms = replace(s, q=raw_q, k=raw_k), [q_norm, k_norm]
    if len(v.row) != H or v.shape[1] != m or n != m:
        refuse_attention(f"lets {n} queries attend to {m} keys: past keys, added tokens or cross-attention")
    points = {s.q.point, s.k.point, v.point}
    if batch is not None and len(points) > 1:
        between = sorted({point.step.label or "a sum" for point in points if point.step is not None})
        refuse_attention(
            f"has more than linear maps before it: {', '.join(between)} of queries, keys or values"
            if between
            else "takes queries, keys and values from different tensors: cross-attention, or unknown operations on them"
        )
    source, parts = _common([s.q, s.k, v])
    point = source
    rows, windows = parts[0].rows, len(parts[0].rows)
    if any(not torch.equal(part.rows, rows) for part in parts):
        refuse_attention("queries, keys and values belong to different tokens, or are in different orders")
    if not torch.equal(rows.flatten(), torch.arange(point.shape[0])):
        width = point.shape[1]
        if sorted(rows.flatten().tolist()) != list(range(point.shape[0])):
            refuse_attention("only some of the tokens attend, or some of them twice")
        order = rows.flatten().unsqueeze(-1) * width + torch.arange(width)
        point = structure.through(point, point.shape, *choice(order, point.shape), label="token order")
    q, k, values = parts
    q, k, rotary, factor = _turned(q, k)
    if factor != 1 and any(norm is not None and norm.after_rotation for norm in norms):
        refuse_attention("queries and keys are turned by different rotary positions before they are normalised")
    tensors, scale = _weights(q, k, values, factor * s.scale, norms)
    tensors |= _mask(s.bias.reshape(windows, H // windows, n, n), batch) | _sinks(s.sinks, windows)
    for name, norm in zip("qk", norms, strict=True):
        if norm is not None:
            tensors[f"{name}_norm"] = norm.of_heads(windows, len(tensors[f"w_{name}"]))
    layer = AttentionLayer(**tensors, scale=scale, rotary=_positions(rotary, windows, batch), soft_cap=s.cap)
    h, kv = layer.h, layer.w_o.shape[1]
    inner = _piece(point, layer) if batch is None else Point((windows * n, h * kv))
    value = inner.view((windows, n, h, kv)).rearranged(lambda t: t.movedim(2, 1).reshape(H, n, kv))
    lonely = (s.bias.reshape(windows, H // windows, n, n)[:, 0] == -torch.inf).all(-1)
    return Attended(layer, point, value, source, rows, lonely)


def _piece(point: Point, layer: AttentionLayer) -> Point:
    """Attention in a network; sinks are one more token there, which is dropped again."""
    n, width = point.shape[0], layer.w_o.shape[0] * layer.w_o.shape[1]
    if layer.sinks is None:
        return structure.through(point, (n, width), Attention(layer), label="attention")
    layer, token = sink_token(layer, n)
    places = torch.full((n + 1, len(token)), FIXED)
    places[:n, : point.shape[1]] = torch.arange(n * point.shape[1]).reshape(point.shape)
    added = torch.zeros(places.shape, dtype=torch.float64)
    added[n] = token
    pieces = (*choice(places, point.shape), AddPositions(added), Attention(layer))
    whole = structure.through(point, (n + 1, width), *pieces, label="attention with sinks")
    kept = torch.arange(n * width).reshape(n, width)
    return structure.through(whole, (n, width), *choice(kept, whole.shape))


@final
@dataclass(frozen=True, eq=False)
class _ReadHeads:
    """One of queries, keys and values: which token each row is, and the map of each head with what it is turned by."""

    rows: Int64[Tensor, "windows n"]
    columns: tuple[Int64[Tensor, "h k"], ...]
    gains: tuple[Float64[Tensor, "windows n k"] | Float64[Tensor, "h k"], ...]
    map: Map

    def weight(self, gain: Tensor) -> tuple[Tensor, Tensor]:
        """W (h, d, k) and b (h, k), each column times a number."""
        w = self.map.matrix[:, self.columns[0]].movedim(0, 1)
        return w * gain.unsqueeze(-2), self.map.bias[self.columns[0]] * gain


def _common(parts: list[Moving]) -> tuple[Point, list[_ReadHeads]]:
    """The tokens that queries, keys and values come from; side by side, where these are functions of several points."""
    parts = [_by_token(part) for part in parts]
    points: list[Point] = []
    for part in parts:
        if part.point not in points:
            points.append(part.point)
    if len({point.shape[0] for point in points}) > 1:
        refuse_attention("queries, keys and values come from different numbers of tokens: cross-attention")
    if len(points) == 1:
        return points[0], [_heads(part) for part in parts]
    whole = structure.beside([point.view(point.shape) for point in points])
    starts = dict(zip(points, torch.tensor([0, *(p.shape[1] for p in points)]).cumsum(0).tolist(), strict=False))

    def moved(part: Moving) -> Moving:
        own = part.map or Map.identity(part.point.shape[1])
        matrix = torch.zeros(whole.shape[1], own.matrix.shape[1], dtype=torch.float64)
        matrix[starts[part.point] : starts[part.point] + len(own.matrix)] = own.matrix
        return Moving(whole, part.row, part.terms, Map(matrix, own.bias), part.constant)

    return whole, [_heads(moved(part)) for part in parts]


def _by_token(part: Moving) -> Moving:
    """Heads (H, n, k) that stand in rows of their own, as behind a norm of each, beside each other in their token."""
    rows, (n, width) = part.row[:, :, 0], (part.shape[1], part.point.shape[1])
    if part.map is not None or bool((part.row == FIXED).any()) or bool((part.row != rows.unsqueeze(-1)).any()):
        return part
    starts, which = torch.unique(rows[:, 0], return_inverse=True)
    kinds = torch.stack([rows[int((which == i).nonzero()[0])] for i in range(len(starts))])  # (heads, n)
    once = torch.equal(kinds.flatten().sort().values, torch.arange(part.point.shape[0]))
    if len(starts) == 1 or not once or not torch.equal(rows, kinds[which]):
        return part
    places = (kinds.mT.unsqueeze(-1) * width + torch.arange(width)).flatten(1)
    point = structure.through(part.point, (n, places.shape[1]), *choice(places, part.point.shape))
    shift = (which * width)[:, None, None]
    terms = tuple(replace(term, column=term.column + shift) for term in part.terms)
    return Moving(point, torch.arange(n)[:, None].expand(part.shape), terms, None, part.constant)


def _heads(part: Moving) -> _ReadHeads:
    """Reads tokens, heads and channels off a tensor (H, n, k)."""
    H = len(part.row)
    rows = part.row[:, :, 0]
    if bool((part.row == FIXED).any()) or bool((part.row != rows.unsqueeze(-1)).any()):
        refuse_attention("a query, key or value mixes tokens, or does not depend on any")
    windows = len(torch.unique(rows, dim=0))
    if H % windows:
        refuse_attention("heads do not have the same tokens")
    h = H // windows
    grouped = rows.reshape(windows, h, -1)
    if bool((grouped != grouped[:, :1]).any()):
        refuse_attention("heads do not have the same tokens")
    if bool(part.constant.any()):
        refuse_attention(
            "something that differs from token to token is added to queries, keys or values after their map"
        )
    columns, gains = [], []
    for term in part.terms:
        column = term.column.reshape(windows, h, *term.column.shape[1:])
        gain = term.gain.reshape(column.shape)
        columns.append(column[0, :, 0])
        alive = gain != 0
        if bool(((column != column[:1, :, :1]) & alive).any()):
            refuse_attention("queries, keys or values use different weights for different tokens")
        if not bool((gain != gain[:1, :, :1]).any()):
            gains.append(gain[0, :, 0])
        elif not bool((gain != gain[:, :1]).any()):
            gains.append(gain[:, 0])
        else:
            refuse_attention("queries, keys or values are scaled by head and by token")
    own = part.map or Map.identity(part.point.shape[1])
    if len(gains) > 1 and all(gain.ndim == 2 for gain in gains):  # a sum of maps is a map
        pairs = list(zip(columns, gains, strict=True))
        matrix = torch.stack([own.matrix[:, c] * g for c, g in pairs]).sum(0)
        bias = torch.stack([own.bias[c] * g for c, g in pairs]).sum(0)
        own = Map(matrix.flatten(1), bias.flatten())
        columns, gains = [torch.arange(bias.numel()).reshape(bias.shape)], [torch.ones_like(bias)]
    return _ReadHeads(grouped[:, 0], tuple(columns), tuple(gains), own)


def _turned(q: _ReadHeads, k: _ReadHeads) -> tuple[_ReadHeads, _ReadHeads, Rotary | None, float]:
    """Rotary positions of queries and keys, if they have them: both the same, but for a factor."""
    of_q, of_k = _turn(q), _turn(k)
    if of_q is None and of_k is None:
        return q, k, None, 1.0
    if of_q is None or of_k is None:
        refuse_attention("queries or keys alone depend on the position; expected both or neither")
    (qc, qs, pairing), (kc, ks, other) = of_q, of_k
    place = kc.abs().flatten().argmax()
    factor = float(qc.flatten()[place] / kc.flatten()[place])
    apart = max(float((qc - kc * factor).abs().max()), float((qs - ks * factor).abs().max()))
    if pairing != other or not apart <= 1e-13 * float(qc.abs().max()):
        refuse_attention("queries and keys are turned by different rotary positions")
    ones = torch.ones(q.columns[0].shape, dtype=torch.float64)
    plain = [
        _ReadHeads(side.rows, side.columns[:1], (ones.expand(side.columns[0].shape),), side.map) for side in (q, k)
    ]
    return plain[0], plain[1], Rotary(kc, ks, pairing), factor


def _turn(heads: _ReadHeads) -> tuple[Tensor, Tensor, Pairing] | None:
    """Cos and sin (windows, n, r) and the pairing of entries; None where nothing depends on the position."""
    if all(gain.ndim == 2 for gain in heads.gains) and len(heads.gains) == 1:
        return None
    if len(heads.gains) != 2:
        refuse_attention(
            f"queries or keys are a sum of {len(heads.gains)} terms; expected one, or two for rotary positions"
        )
    shape = (*heads.rows.shape, heads.columns[0].shape[-1])
    gains = []
    for gain in heads.gains:
        if gain.ndim == 2 and bool((gain != gain[:1]).any()):
            refuse_attention("queries or keys are scaled by head and by position")
        gains.append((gain if gain.ndim == 3 else gain[0]).expand(shape))
    cos, sin = gains
    turned = ((sin != 0) | (cos != 1)).flatten(0, 1).any(0)
    r = int(turned.nonzero().max()) + 1 if bool(turned.any()) else 0
    r += r % 2
    m = torch.arange(r)
    for pairing, partner in (("half", (m + r // 2) % r if r else m), ("interleaved", m ^ 1)):
        used = (sin[..., :r] != 0).flatten(0, 1).any(0)
        if bool((heads.columns[1][:, :r] == heads.columns[0][:, partner])[:, used].all()):
            first = m < r // 2 if pairing == "half" else m % 2 == 0
            sign = torch.where(first, -1.0, 1.0).to(sin)
            return cos[..., :r].contiguous(), (sin[..., :r] * sign).contiguous(), pairing  # type: ignore[return-value]
    refuse_attention("queries or keys mix channels by position in a way that is not a rotary position")


def _weights(
    q: _ReadHeads, k: _ReadHeads, v: _ReadHeads, scale: float, norms: list[Normed | None]
) -> tuple[dict[str, Any], float]:
    """The tensors of an `AttentionLayer`, and its scale: factors of all queries or keys belong to it."""
    tensors: dict[str, Any] = {}
    for name, heads, norm in (("q", q, norms[0]), ("k", k, norms[1]), ("v", v, None)):
        if len(heads.gains) != 1 or heads.gains[0].ndim != 2:
            refuse_attention("values depend on the position by more than their map")
        gain = heads.gains[0]
        if name != "v" and norm is None and bool((gain == gain.flatten()[0]).all()):
            scale, gain = scale * float(gain.flatten()[0]), torch.ones_like(gain)
        tensors[f"w_{name}"], bias = heads.weight(gain)
        if bool(bias.any()):
            tensors[f"b_{name}"] = bias
    h = len(tensors["w_q"])
    groups = _groups(k.columns[0], v.columns[0], h)
    for name in ("w_k", "w_v", "b_k", "b_v"):
        if name in tensors:
            tensors[name] = tensors[name][:: h // groups].contiguous()
    width = tensors["w_v"].shape[-1]
    tensors["w_o"] = torch.eye(h * width, dtype=torch.float64).reshape(h, width, h * width)
    return tensors, scale


def _groups(keys: Tensor, values: Tensor, h: int) -> int:
    """How many key-value heads there are that query heads share in turn."""
    both = torch.cat([keys, values], -1)
    for groups in range(1, h):
        if h % groups == 0 and torch.equal(both, both[:: h // groups].repeat_interleave(h // groups, 0)):
            return groups
    return h


def _mask(bias: Float64[Tensor, "windows h n n"], batch: int | None) -> dict[str, Any]:
    """Mask and score bias of the layer: for each input where there is a batch, otherwise for all windows together."""
    allowed: Bool[Tensor, "windows h n n"] = bias > -torch.inf
    if bool((allowed != allowed[:, :1]).any()):
        refuse_attention("masks the heads differently; expected one mask for all heads")
    mask, finite = allowed[:, 0], torch.where(allowed, bias, 0.0)
    if batch is None:
        if not bool(mask.any(-1).all()):
            refuse_attention("a query may attend to no key at all; remove the padding")
        mask = _diagonal(mask.to(torch.uint8)).bool()
        finite = torch.stack([_diagonal(finite[:, head]) for head in range(finite.shape[1])])
    else:
        lonely = ~mask.any(-1, keepdim=True)  # padding: such a query attends to itself
        mask = mask | (lonely & torch.eye(mask.shape[-1], dtype=torch.bool))
        mask, finite = (t[0] if bool((t == t[:1]).all()) else t for t in (mask, finite))
    options: dict[str, Any] = {}
    if mask.ndim == 2 and len(mask) > 1 and torch.equal(mask, torch.ones_like(mask).tril()):
        options["causal"] = True
    elif not bool(mask.all()):
        options["mask"] = mask
    if bool(finite.any()):
        shared = finite.ndim == 3 and bool((finite == finite[:1]).all())
        options["score_bias"] = finite[0] if shared else finite
    return options


def _sinks(sinks: Float64[Tensor, "H n"] | None, windows: int) -> dict[str, Any]:
    if sinks is None:
        return {}
    whole = sinks.reshape(windows, -1, sinks.shape[-1])
    if not bool((whole == whole[:1, :, :1]).all()):
        refuse_attention("a sink has different logits for different queries; expected one per head")
    return {"sinks": whole[0, :, 0].contiguous()}


def _diagonal(blocks: Tensor) -> Tensor:
    """Blocks (w, n, n) along the diagonal of one matrix."""
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole


def _positions(rotary: Rotary | None, windows: int, batch: int | None) -> Rotary | None:
    if rotary is None:
        return None
    cos, sin = rotary.cos, rotary.sin
    if batch is None:
        return Rotary(cos.flatten(0, 1), sin.flatten(0, 1), rotary.pairing)
    same = bool((cos == cos[:1]).all()) and bool((sin == sin[:1]).all())
    return Rotary(cos[0], sin[0], rotary.pairing) if same else rotary
