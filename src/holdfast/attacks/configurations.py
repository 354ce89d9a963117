"""Explicit tokens at which attention is steep (after Castin, Ablin and Peyré 2024): lower bounds by construction.

All tokens but the first stand at one point x, and the first at R a/|a|, a = Aᵀx + scale · W^K b^Q the key vector of x:
of all tokens in the ball it has the largest score. With the gap G = ⟨a, x_1 - x⟩ = R|a| - ⟨a, x⟩ every other token
gives it the probability p = 1 / (1 + (n-1) e^{-G}), and moves by p Cᵀ(ε + (1-p)(x_1 - x)⟨a, ε⟩) when it moves by ε. For
one head with C = I and ε along a that is at least p (1 + (1-p) G), so Lip >= √(n-1) p (1 + (1-p) G).

The paper's configurations are x = Ru for the most negative eigenvalue of A and x = Ru/2 for the largest one, G = 2γR².
Eigenvectors of the symmetric part of A do as well and reach farther, since only ⟨Aᵀu, u⟩ enters; the top singular
vector of A serves where that part vanishes. Proofs: docs/math/regularity.md, Theorems 5 and 6.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer
from holdfast.attention.measure import WeightedJacobian
from holdfast.attention.paths import paths
from holdfast.errors import HoldfastError, InputError, NotApplicableError, SoundnessError
from holdfast.linalg import Ball, estimate
from holdfast.linalg.rounding import down, frobenius
from holdfast.radii import check_radii
from holdfast.results import LipschitzWitness

_TOLERANCE = 1e-10  # of the singular vectors of a witness
_KEPT = 4  # choices whose local constants are computed
_LEAST_ODDS = 1e-280


def adversarial_configuration(layer: AttentionLayer, radius: float, tokens: int) -> LipschitzWitness:
    """The steepest of the configurations with one dominant token, with its local constant.

    Args:
        layer: the layer; masked or not.
        radius: R; no token is longer.
        tokens: n, at least 2.

    Example:
        >>> steep = adversarial_configuration(layer, radius=4.0, tokens=64)
        >>> steep.lower, steep.guaranteed  # the slope at steep.witness, and what the formula promises
    """
    began = time.perf_counter()
    layer, radius = checked(layer, radius, tokens)
    if tokens < 2:
        raise InputError(f"tokens is {tokens}; one dominant token needs at least one other")
    with torch.no_grad():
        choices = dominant_tokens(layer, radius)
        promised = _finite(choices.guaranteed(layer, tokens), radius)
        kept = promised.topk(min(_KEPT, len(promised))).indices
        witness = steepest(layer, choices.tokens(tokens)[kept], radius, "dominant token", promised[kept])
    return replace(witness, seconds=time.perf_counter() - began)


def two_diracs(layer: AttentionLayer, radius: float) -> LipschitzWitness:
    """The steepest measure with a little mass on a dominant token and the rest on one other point.

    Its slope grows like e^{γR²}: no bound for all measures can grow more slowly. A light mass μ with odds
    μ/(1-μ) = e^{-G}/t gives p = 1/(1+t) and, for one head with C = I, e^{G/2} √t/(1+t) (1 + G t/(1+t)).

    Args:
        layer: the layer; without a mask.
        radius: R; no token is longer.
    """
    began = time.perf_counter()
    layer, radius = checked(layer, radius, 2)
    if layer.causal or layer.mask is not None:
        raise NotApplicableError("the two Dirac masses attend to each other, and the layer has a mask")
    with torch.no_grad():
        choices = dominant_tokens(layer, radius)
        t = torch.logspace(-3, 3, 121, dtype=torch.float64, device=layer.device)
        odds = ((-choices.own_gap).exp().unsqueeze(-1) / t).clamp(min=_LEAST_ODDS)  # (s, t)
        promised = _finite(choices.slope(odds) / odds.sqrt(), radius)
        best = int(promised.argmax())
        choice, light = best // len(t), odds.flatten()[best]
        weights = torch.stack([light, torch.ones_like(light)]) / (1 + light)
        x = inside(choices.tokens(2)[choice], radius)
        norm = estimate(WeightedJacobian(layer, x, weights), tolerance=_TOLERANCE)
    assert norm.right is not None
    return LipschitzWitness(
        lower=_finite(norm.value, radius),
        witness=x,
        direction=norm.right / weights.sqrt().unsqueeze(-1),
        radius=radius,
        origin="two Dirac masses",
        guarantee="numerical",
        guaranteed=float(promised.flatten()[best]),
        weights=weights,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class DominantTokens:
    """Choices of a dominant first token and of the point where the others stand, for heads l = 1 … h.

    Attributes:
        first: (s, d) the first token, of length R.
        others: (s, d) the point of the others.
        gap: (s, h) by how much the first token's score exceeds the others' in head l, in the rows of the others.
        own_gap: (s) the gap in the head for which the choice was made.
        gram: (s, 2h, 2h) scalar products of C_lᵀε and then of C_lᵀ(x_1 - x)⟨a_l, ε⟩ for all l, ε along a of that head.
    """

    first: Tensor
    others: Tensor
    gap: Tensor
    own_gap: Tensor
    gram: Tensor

    def tokens(self, n: int) -> Float[Tensor, "s n d"]:
        """The tokens themselves."""
        return torch.cat([self.first.unsqueeze(1), self.others.unsqueeze(1).expand(-1, n - 1, -1)], 1)

    def slope(self, odds: Float[Tensor, "s r"]) -> Float[Tensor, "s r"]:
        """|Σ_l p_l C_lᵀ(ε + (1-p_l)(x_1 - x)⟨a_l, ε⟩)|, if the first token has these odds where all scores agree."""
        p = torch.sigmoid(self.gap.unsqueeze(-1) + odds.log().unsqueeze(1))  # (s, h, r)
        shares = torch.cat([p, p * (1 - p)], 1)
        slope: Tensor = (shares * (self.gram @ shares)).sum(1).clamp(min=0).sqrt()
        return slope

    def guaranteed(self, layer: AttentionLayer, n: int) -> Float[Tensor, " s"]:
        """How fast the outputs of the other n - 1 tokens move together when the first token does."""
        allowed = layer.allowed(n)
        if allowed is None:
            slope = self.slope(self.gap.new_full((len(self.gap), 1), 1 / (n - 1))).squeeze(-1)
            return slope * math.sqrt(n - 1)
        sees_first = allowed[1:, 0].to(self.gap)
        odds = 1 / (allowed[1:].sum(-1).to(self.gap) - 1)
        slopes = self.slope(odds.expand(len(self.gap), -1))
        promised: Tensor = (sees_first * slopes.square()).sum(-1).sqrt()
        return promised


def dominant_tokens(layer: AttentionLayer, radius: float) -> DominantTokens:
    """Six choices for every head: two eigenvectors and a singular vector, and their opposites (s = 6h)."""
    w = layer.weights(layer.w_q)
    A, C = w.w_q @ w.w_k.mT * layer.scale, w.w_v @ w.w_o
    eigenvectors = torch.linalg.eigh((A + A.mT) / 2).eigenvectors
    singular = torch.linalg.svd(A).U[..., 0]
    u = torch.stack([eigenvectors[..., 0], eigenvectors[..., -1] / 2, singular], 1)
    others = radius * torch.cat([u, -u], 1).flatten(0, 1)
    keys = torch.einsum("sd,hde->she", others, A)
    if w.b_q is not None:
        keys = keys + (w.w_k @ w.b_q.unsqueeze(-1)).squeeze(-1) * layer.scale
    choice = torch.arange(len(others), device=layer.device)
    own = keys[choice, choice // 6]
    length = torch.linalg.vector_norm(own, dim=-1, keepdim=True)
    along = torch.where(length > 0, own / torch.where(length > 0, length, 1.0), own.shape[-1] ** -0.5)
    first = radius * along
    gap = torch.einsum("she,se->sh", keys, first - others)
    value = torch.einsum("sd,hdo->sho", along, C)
    moved = torch.einsum("sh,sd,hdo->sho", torch.einsum("she,se->sh", keys, along), first - others, C)
    vectors = torch.cat([value, moved], 1)
    return DominantTokens(first, others, gap, gap[choice, choice // 6], vectors @ vectors.mT)


def steepest(
    layer: AttentionLayer,
    x: Float[Tensor, "s n d"],
    radius: float,
    origin: str,
    guaranteed: Float[Tensor, " s"] | None = None,
) -> LipschitzWitness:
    """The steepest of the points, each pulled into the ball, with a proved value and the most that was promised."""
    x = inside(x, radius)
    right = estimate(AttentionJacobian(layer, x), tolerance=_TOLERANCE).right
    assert right is not None
    X, G = Ball.exact(x), Ball.exact(right)
    lower = (frobenius(paths(layer, X, G).total) / frobenius(G)).lower.nan_to_num(nan=0.0).clamp(min=0)
    best = int(lower.argmax())
    return LipschitzWitness(
        lower=lower[best],
        witness=x[best],
        direction=right[best],
        radius=radius,
        origin=origin,
        guarantee="proved",
        guaranteed=None if guaranteed is None else float(guaranteed.amax()),
    )


def _finite(slope: Tensor, radius: float) -> Tensor:
    if not bool(torch.isfinite(slope).all()):
        raise HoldfastError(f"the slope at tokens of length {radius:g} overflowed float64; use a smaller radius")
    return slope


def inside(x: Float[Tensor, "*s n d"], radius: float) -> Float[Tensor, "*s n d"]:
    """Shortens tokens until each is, exactly, not longer than the radius."""
    for _ in range(8):
        length = frobenius(Ball.exact(x), (-1,)).upper.unsqueeze(-1)
        within = (length <= radius) | (x == 0).all(-1, keepdim=True)
        if bool(within.all()):
            return x
        x = torch.where(within, x, x * down(radius / length, 2.0**-50))
    raise SoundnessError("tokens could not be pulled into the ball; please report the layer and the radius")


def checked(layer: AttentionLayer, radius: float, tokens: int, *, ascent: bool = False) -> tuple[AttentionLayer, float]:
    """The layer in float64 and the radius, where the constructions apply, or an ascent, which asks less."""
    (radius,) = check_radii(radius, "radius")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise InputError(f"tokens is {tokens!r}; expected how many tokens there are, at least 1")
    rotary, bias = layer.rotary, layer.score_bias
    if ascent and ((rotary is not None and rotary.cos.shape[:-1] != (tokens,)) or (bias is not None and bias.ndim > 3)):
        raise InputError(f"rotary positions or a score bias are not those of {tokens} tokens of one input")
    if not ascent and (rotary is not None or bias is not None):
        raise NotApplicableError("the configurations are made for scores without rotary positions or a score bias")
    if layer.mask is not None and layer.mask.shape != (tokens, tokens):
        raise InputError(f"the mask has shape {tuple(layer.mask.shape)}; expected ({tokens}, {tokens})")
    return layer.double(), radius
