"""The slope of a layer far from the origin, where every query attends to one token."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from holdfast.attention import checks
from holdfast.attention.jacobian import ValueOperator, fold
from holdfast.attention.layer import AttentionLayer
from holdfast.errors import InputError, NotApplicableError
from holdfast.linalg import estimate
from holdfast.results import NormResult


def large_radius_limit(layer: AttentionLayer, x: Float[Tensor, "*b n d"]) -> NormResult:
    """The limit of ‖DF(R x)‖ as R grows, where for every head and row the largest of the products x_iᵀA x_j is unique.

    Then P_l tends to the matrix Π_l with a one at each row's largest score, faster than R² grows, and DF(R x) to
    residual + Σ_l Π_l ⊗ C_lᵀ; for one head without residual its norm is ‖C‖ √(most rows with the same largest score).
    Biases do not matter: they are of lower order in R.

    Args:
        layer: the layer.
        x: (b…, n, d) the shape of the tokens; only their directions and relative lengths count.
    """
    checks.input(layer, x)
    if layer.beyond_dot_products is not None:
        raise NotApplicableError(f"the limit is that of plain scores; the layer has {layer.beyond_dot_products}")
    layer = layer.replace(b_q=None, b_k=None, score_bias=None).double()
    x = x.detach().double()
    with torch.no_grad():
        x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        scores = fold(layer, x).scores
        two = pad(scores, (0, 1), value=-torch.inf).topk(2).values  # a query with one key has nothing to choose
        gap = (two[..., 0] - two[..., 1]).flatten(-2).amin(-1)
        if not bool((gap > 1e-9 * scores.masked_fill(scores.isinf(), 0).abs().amax()).all()):
            raise InputError("x has a query with two equal largest scores; the limit needs one")
        far = x * (1000 / gap).sqrt()[..., None, None]  # e^{-1000} is zero: the probabilities are the limit's
        return estimate(ValueOperator(layer, far), tolerance=1e-9)
