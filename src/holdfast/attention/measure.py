"""Attention on weighted tokens, that is on measures Σ_i μ_i δ_{x_i}: the rows are P_ij ∝ μ_j e^{s_ij}.

The weights only add log μ_j to the scores, so attention on a measure is a layer, and what works on layers works on
it. What differs is the metric: a movement of the tokens counts Σ_i μ_i |·|², as in the W_2 distance.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention import checks
from holdfast.attention.jacobian import AttentionJacobian
from holdfast.attention.layer import AttentionLayer
from holdfast.errors import InputError, NotApplicableError
from holdfast.linalg.operator import LinearOperator


def on_measure(layer: AttentionLayer, weights: Float[Tensor, "*b n"]) -> AttentionLayer:
    """The layer on tokens that have these weights.

    Args:
        layer: the layer.
        weights: positive, of the layer's dtype; a common factor does not matter.

    Example:
        >>> on_measure(layer, torch.tensor([0.9, 0.1]))(x)  # where the two tokens of x go; their weights stay
    """
    if not isinstance(weights, Tensor) or not weights.ndim:
        raise InputError(f"weights is {type(weights).__name__}; expected a tensor (…, n), one number for each token")
    if not bool(((weights > 0) & torch.isfinite(weights)).all()):
        raise InputError("weights has entries that are not positive and finite; leave tokens without weight out")
    n = weights.shape[-1]
    bias = weights.log().unsqueeze(-2).expand(*weights.shape[:-1], n, n)
    bias = bias if weights.ndim == 1 else bias.unsqueeze(-3)
    if layer.score_bias is not None:
        bias = bias + layer.score_bias
    return layer.replace(score_bias=bias)


def doubled(layer: AttentionLayer, n: int) -> AttentionLayer:
    """The layer on 2n tokens that are n tokens and then the same again: copies attend, and are attended to, alike."""
    if layer.beyond_dot_products is not None:
        raise NotApplicableError(f"copies of tokens are proved for plain scores, not with {layer.beyond_dot_products}")
    if layer.rotary is not None:
        raise NotApplicableError("with rotary positions a copy of a token would stand at another position")
    allowed, bias = layer.allowed(n), layer.score_bias
    return layer.replace(
        causal=False,
        mask=None if allowed is None else _tiled(allowed),
        score_bias=None if bias is None else _tiled(bias),
    )


def _tiled(t: Tensor) -> Tensor:
    return t.repeat(*(1 for _ in t.shape[:-2]), 2, 2)


@final
class WeightedJacobian(LinearOperator):
    """diag(√μ) DF(x) diag(1/√μ), F the layer on the measure; the batch is that of x.

    Its norm is the local Lipschitz constant among measures with these weights, for the W_2 distance.
    """

    def __init__(self, layer: AttentionLayer, x: Float[Tensor, "*b n d"], weights: Float[Tensor, "*b n"]) -> None:
        layer = on_measure(layer, weights)
        if weights.shape[-1] != x.shape[-2]:
            raise InputError(f"weights has {weights.shape[-1]} numbers for each input and x {x.shape[-2]} tokens")
        checks.input(layer, x)
        self._jacobian, self._root = AttentionJacobian(layer, x), weights.sqrt().unsqueeze(-1)
        super().__init__(x.shape[:-2], self._jacobian.domain, self._jacobian.codomain, x)

    def mv(self, v: Float[Tensor, "*m n d"]) -> Float[Tensor, "*m n d_out"]:
        return self._root * self._jacobian.mv(v / self._root)

    def rmv(self, u: Float[Tensor, "*m n d_out"]) -> Float[Tensor, "*m n d"]:
        return self._jacobian.rmv(self._root * u) / self._root
