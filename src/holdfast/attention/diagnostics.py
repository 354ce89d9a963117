"""What a layer's attention looks like at an input, and which paths its slope comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from rich.box import SIMPLE_HEAD
from torch import Tensor

from holdfast.attention import checks
from holdfast.attention.jacobian import AttentionJacobian
from holdfast.attention.layer import AttentionLayer, split_heads
from holdfast.attention.paths import paths
from holdfast.attention.softmax import softmax_jacobian_norm
from holdfast.linalg import MatrixOperator, estimate
from holdfast.tables import Table

_PATHS = ("value", "query", "key")


@final
@dataclass(frozen=True)
class AttentionReport:
    """Every head of a layer at inputs (b…, n, d).

    Attributes:
        g1: (b…, h, n) g_1(p_i) of each row, which bounds ‖diag(p_i) - p_i p_iᵀ‖: 0 for a one-hot row, ½ at most.
        attention_norm: (b…, h) ‖P‖, from 1 to √n, where all rows attend to one token; an estimate.
        entropy: (b…, h, n) of each row, in nats.
        sink: (b…, h) the token with the largest column of P.
        sink_share: (b…, h) that column's part of all attention, from 1/n to 1.
        slope: (b…) ‖DF(x)‖, an estimate: how fast the output moves along the steepest direction v, with u = DF(x)v / σ.
        value_share: (b…, h) u · (value path of head l)(v) / σ, and likewise for the other paths. All shares of an
            input sum to 1; a negative one works against the others. All are 0 where the slope is 0.
        query_share: see value_share.
        key_share: see value_share.
        residual_share: (b…) of the residual.
    """

    g1: Float[Tensor, "*b h n"]
    attention_norm: Float[Tensor, "*b h"]
    entropy: Float[Tensor, "*b h n"]
    sink: Int[Tensor, "*b h"]
    sink_share: Float[Tensor, "*b h"]
    slope: Float[Tensor, "*b"]
    value_share: Float[Tensor, "*b h"]
    query_share: Float[Tensor, "*b h"]
    key_share: Float[Tensor, "*b h"]
    residual_share: Float[Tensor, "*b"]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {name: value.tolist() for name, value in vars(self).items()}

    def table(self) -> Table:
        """One row for every head, and one for the whole layer, of every input."""
        caption = "value, query, key, residual: shares of the slope"
        table = Table(title="attention by head", caption=caption, box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for column in ("input", "head", "g1", "|P|", "entropy", "sink", *_PATHS, "residual", "slope"):
            table.add_column(column, justify="right", no_wrap=True)
        for i, one in enumerate(self._members()):
            shares = torch.stack([one.value_share, one.query_share, one.key_share], -1)
            for head, share in enumerate(shares.tolist()):
                looks = (one.g1[head].max(), one.attention_norm[head], one.entropy[head].mean())
                sink = f"{int(one.sink[head])} ({float(one.sink_share[head]):.2f})"
                table.add_row(str(i), str(head), *_short(*looks), sink, *(f"{part:z.2f}" for part in share))
            looks = (one.g1.max(), one.attention_norm.max(), one.entropy.mean())
            whole = [f"{part:z.2f}" for part in (*shares.sum(0).tolist(), float(one.residual_share))]
            table.add_row(str(i), "all", *_short(*looks), "", *whole, *_short(one.slope), end_section=True)
        return table

    def _members(self) -> list[AttentionReport]:
        """The report of each input alone."""
        batch = self.slope.ndim
        flat = {name: value.reshape(-1, *value.shape[batch:]) for name, value in vars(self).items()}
        return [AttentionReport(**{name: v[i] for name, v in flat.items()}) for i in range(self.slope.numel())]


def _short(*numbers: Tensor | float) -> list[str]:
    return [f"{float(number):.3g}" for number in numbers]


def attention_report(
    layer: AttentionLayer, x: Float[Tensor, "*b n d"], *, tolerance: float = 1e-6, seed: int = 0
) -> AttentionReport:
    """Where every head attends, how sensitive its softmax is, and which paths the layer's slope comes from.

    Args:
        layer: the attention layer.
        x: (b…, n, d) the inputs, float32 or float64; computed in float64.
        tolerance: relative accuracy of the slope and of ‖P‖.
        seed: for the random start of their iteration.

    Example:
        >>> report = attention_report(layer, x)
        >>> report.g1.amax(-1), report.value_share.sum(-1)
    """
    checks.input(layer, x)
    layer, x = layer.double(), x.detach().double()
    with torch.no_grad():
        p = layer.run(x).p
        v = estimate(AttentionJacobian(layer, x), tolerance=tolerance, seed=seed).right
        assert v is not None
        part = paths(layer, x, v)
        slope = torch.linalg.vector_norm(part.total, dim=(-2, -1))
        # u · (y W^O) = (u W^Oᵀ) · y, head by head.
        u = part.total / torch.where(slope > 0, slope, torch.inf).square()[..., None, None]
        pulled = split_heads(u @ part.w_o.flatten(0, 1).mT, layer.h)
        columns = p.sum(-2) / p.shape[-1]
        return AttentionReport(
            g1=softmax_jacobian_norm(layer.whole_rows(p), "g1"),
            attention_norm=estimate(MatrixOperator(p), tolerance=tolerance, seed=seed).value,
            entropy=torch.special.entr(p).sum(-1),
            sink=columns.argmax(-1),
            sink_share=columns.amax(-1),
            slope=slope,
            value_share=(pulled * part.value).sum((-2, -1)),
            query_share=(pulled * part.query).sum((-2, -1)),
            key_share=(pulled * part.key).sum((-2, -1)),
            residual_share=torch.zeros_like(slope) if part.residual is None else (u * part.residual).sum((-2, -1)),
        )
