"""Mass splitting: tokens that are doubled before they are moved can move the output more.

Copies of token i that move in opposite directions ±w leave every mean over keys where it was, so each copy's output
moves through its query alone, by (residual + Σ_l C_lᵀ Cov_li A_lᵀ) w; and the rest of the movement is that of the
tokens undivided. So the slope is max(‖DF(X)‖, max_i ‖residual + Σ_l C_lᵀ Cov_li A_lᵀ‖), exactly, and two copies are
enough (derived after Castin, Ablin and Peyré 2024; docs/math/regularity.md, Theorem 8).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, checks, fold
from holdfast.attention.measure import WeightedJacobian, doubled, on_measure
from holdfast.attention.movement import distance, movement
from holdfast.attention.query_path import QueryBlocks
from holdfast.errors import HoldfastError, InputError
from holdfast.linalg import LinearOperator, estimate
from holdfast.results import Guarantee, Side

_TOLERANCE = 1e-11


@dataclass(frozen=True)
class SplitResult:
    """What doubling the tokens gains, and two inputs that show it.

    Attributes:
        local: (b…) ‖DF(X)‖ before tokens are split, in the metric of the weights.
        divided: (b…, n) the slope of the outputs of each token's copies when they move apart.
        token: (b…) the token whose copies move most.
        direction: (b…, d) the unit vector along which they move apart.
        layer: the layer on 2n tokens, copies alike.
        witness: (b…, 2n, d) all tokens, then all again.
        moved: (b…, 2n, d) the same with the copies of `token` moved apart.
        lower: (b…) by how much more than the input the output moves between the two; rounded down, and so "proved",
            where there are no weights.
    """

    local: Tensor
    divided: Tensor
    token: Tensor
    direction: Tensor = field(repr=False)
    layer: AttentionLayer = field(repr=False)
    witness: Tensor = field(repr=False)
    moved: Tensor = field(repr=False)
    lower: Tensor
    guarantee: Guarantee
    side: Side = "lower"
    seconds: float = 0.0

    @property
    def slope(self) -> Tensor:
        """(b…) the law: the local Lipschitz constant among measures, where mass may be split."""
        return torch.maximum(self.local, self.divided.amax(-1))

    @property
    def gain(self) -> Tensor:
        """(b…) how many times larger it is than ‖DF(X)‖; 1 where both are 0."""
        return torch.where(self.slope > 0, self.slope / self.local, 1.0)


def split_attack(
    layer: AttentionLayer,
    x: Float[Tensor, "*b n d"],
    weights: Float[Tensor, "*b n"] | None = None,
    *,
    step: float = 1e-4,
) -> SplitResult:
    """Doubles every token, and moves the copies of the best one apart.

    Args:
        layer: the layer. In a causal one the copies of a token see each other.
        x: the tokens.
        weights: of the tokens, positive; a copy has half of it. None where all count equally.
        step: how far the two copies move, as a share of the longest token.

    Example:
        >>> split = split_attack(layer, x)
        >>> split.local, split.slope, split.lower  # before and after; what the witness attains
    """
    began = time.perf_counter()
    checks.input(layer, x)
    if not 0 < step < float("inf"):
        raise InputError(f"step is {step!r}; expected a positive number")
    layer, x = layer.double(), x.detach().double()
    n = x.shape[-2]
    with torch.no_grad():
        measure, jacobian = layer, cast(LinearOperator, AttentionJacobian(layer, x))
        if weights is not None:
            weights = weights.detach().double()
            measure, jacobian = on_measure(layer, weights), WeightedJacobian(layer, x, weights)
        local = estimate(jacobian, tolerance=_TOLERANCE).value
        blocks = estimate(QueryBlocks.of(fold(measure, x), layer.residual), tolerance=_TOLERANCE)
        assert blocks.right is not None
        token = blocks.value.argmax(-1)
        chosen = torch.nn.functional.one_hot(token, n).to(x).unsqueeze(-1)
        direction = (chosen * blocks.right).sum(-2)
        apart = (
            chosen * direction.unsqueeze(-2) * (step * torch.linalg.vector_norm(x, dim=-1).amax(-1))[..., None, None]
        )
        pair = doubled(measure, n)
        witness, moved = torch.cat([x, x], -2), torch.cat([x + apart, x - apart], -2)
        lower = _ratio(pair, witness, moved, weights)
    if not bool(torch.isfinite(torch.cat([local.unsqueeze(-1), blocks.value, lower.unsqueeze(-1)], -1)).all()):
        raise HoldfastError("the slope at x overflowed float64; use smaller weights or inputs")
    return SplitResult(
        local=local,
        divided=blocks.value,
        token=token,
        direction=direction,
        layer=pair,
        witness=witness,
        moved=moved,
        lower=lower,
        guarantee="proved" if weights is None else "numerical",
        seconds=time.perf_counter() - began,
    )


def _ratio(layer: AttentionLayer, x: Tensor, moved: Tensor, weights: Tensor | None) -> Tensor:
    """How far the output moves for each unit that the input does."""
    if weights is None:
        return (movement(layer, x, moved) / distance(x, moved)).lower.nan_to_num(nan=0.0).clamp(min=0)
    root = torch.cat([weights, weights], -1).sqrt().unsqueeze(-1)
    far, near = root * (layer(moved) - layer(x)), root * (moved - x)
    far, near = (torch.linalg.vector_norm(t, dim=(-2, -1)) for t in (far, near))
    ratio: Tensor = far / torch.where(near > 0, near, torch.inf)  # 0 where nothing moves
    return ratio
