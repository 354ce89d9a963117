"""Unmodified softmax dot-product self-attention with limited value and output maps."""

from __future__ import annotations

import math
from typing import final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from holdfast.attention import AttentionLayer
from holdfast.attention.layer import merge_heads, split_heads
from holdfast.errors import InputError
from holdfast.layers.attention.piece import Attention
from holdfast.layers.linear.module import Linear, MapKind
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece


@final
class SelfAttention(Layer):
    """F(X) = residual · X + Σ_l softmax(X W_l^Q (X W_l^K)ᵀ/√k + B_l) X W_l^V W_l^O + b.

    B, if there, is what position codes of the queries and keys contribute to their products, entry by entry.

    Args:
        width: d.
        heads: h.
        norm: limit of ‖W^V‖ and of ‖W^O‖, all heads together.
        kind: how that limit is kept.
        score_norm: limit of ‖W^Q‖ and ‖W^K‖; None leaves them free.
        position_scores: (h, n, n) that B starts from.
        residual: of the layer.

    Example:
        >>> SelfAttention(64, 4)(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        norm: float = 1.0,
        kind: MapKind = "orthogonal",
        score_norm: float | None = None,
        position_scores: Float[Tensor, "h n n"] | None = None,
        residual: float = 0.0,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise InputError(f"{heads} heads do not divide the width {width}; expected a divisor of it")
        self.heads, self.residual = heads, residual
        score_kind: MapKind = "free" if score_norm is None else kind
        self.query = Linear(width, width, norm=score_norm or 1.0, kind=score_kind, bias=False)
        self.key = Linear(width, width, norm=score_norm or 1.0, kind=score_kind, bias=False)
        self.value = Linear(width, width, norm=norm, kind=kind, bias=False)
        self.output = Linear(width, width, norm=norm, kind=kind)
        self.output.start_as_inverse(self.value)
        self.position_scores = None if position_scores is None else nn.Parameter(position_scores)
        self.register_buffer("fixed_scores", None, persistent=False)
        self.fixed_scores: Tensor | None

    @property
    def gain(self) -> float:
        """Dot-product attention has no Lipschitz constant on all of space; certificates are local."""
        return math.inf

    def forward(self, x: Float[Tensor, "b n d"], content: Float[Tensor, "h n n"] | None = None) -> Tensor:
        """F(x), or what it would be with the given content scores in the place of its own."""
        v = split_heads(self.value(x), self.heads)
        if self.fixed_scores is None and content is None:
            q, k = self._queries_and_keys(x)
            bias = None if self.position_scores is None else self.position_scores.to(q.dtype)
            y = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            y = self._attend(self.content_scores(x) if content is None else content).to(v.dtype) @ v
        out: Tensor = self.output(merge_heads(y))
        return out + self.residual * x if self.residual else out

    def content_scores(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b h n n"]:
        """The part of the scores that depends on x, or what was put in its place."""
        if self.fixed_scores is not None:
            return self.fixed_scores.expand(len(x), -1, -1, -1)
        q, k = self._queries_and_keys(x)
        return q @ k.mT / math.sqrt(q.shape[-1])

    def probabilities(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b h n n"]:
        """The attention of every head."""
        return self._attend(self.content_scores(x))

    def layer(self) -> AttentionLayer:
        """The same function with its present weights, in float64."""
        if self.fixed_scores is not None:
            raise InputError(
                "this attention has fixed scores; an AttentionLayer needs those of its own queries and keys"
            )
        per_head = {
            f"w_{name[0]}": split_heads(getattr(self, name).weight.detach().double().mT, self.heads)
            for name in ("query", "key", "value")
        }
        w_o, b_o = self.output.weight.detach().double(), self.output.bias.detach().double()
        bias = None if self.position_scores is None else self.position_scores.detach().double()
        return AttentionLayer(
            **per_head,
            w_o=w_o.mT.reshape(self.heads, -1, len(w_o)),
            b_o=b_o,
            residual=self.residual,
            score_bias=bias,
        )

    def pieces(self) -> tuple[Piece, ...]:
        return (Attention(self.layer()),)

    def _attend(self, content: Tensor) -> Tensor:
        return (content if self.position_scores is None else content + self.position_scores).softmax(-1)

    def _queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return split_heads(self.query(x), self.heads), split_heads(self.key(x), self.heads)
