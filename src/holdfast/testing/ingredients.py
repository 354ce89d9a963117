"""What the bounds are made of, each with its definition at one point: the constants of a ball must not be below it.

The definitions are written from queries, keys and values, for tensors (to climb) and for balls (to judge).
Z is a point of the ball of radius r around X, G a direction with ‖G‖_F <= 1. Shapes begin with (m, r, b…): m points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.head_norm import Placed
from holdfast.attention.layer import Weights, project
from holdfast.attention.rows import Rows
from holdfast.bounds.over_ball import OverBall
from holdfast.bounds.score_map import root
from holdfast.bounds.second_order import direct_gain, every_direction, integrate, where_tokens_agree
from holdfast.linalg import Array, Ball
from holdfast.linalg.rounding import frobenius, lift


@final
class Situation(Generic[Array]):
    """A layer at X, a point Z of the ball, a direction G, a share t of the way between the scores.

    Args:
        layer: float64.
        x: (b…, n, d).
        z: (…, b…, n, d).
        g: (…, b…, n, d).
        t: in [0, 1].
    """

    def __init__(self, layer: AttentionLayer, x: Array, z: Array, g: Array, t: float) -> None:
        self.layer = layer
        self.x: Array = x
        self.z: Array = z
        self.g: Array = g
        self.w: Weights[Array] = layer.weights(z)
        self.c: Array = self.w.w_v @ self.w.w_o
        self._placed: tuple[Placed[Array], Placed[Array]] = layer.placed(z)
        self.query: Array = self._placed[0].value
        self.key: Array = self._placed[1].value
        self.v: Array = z.unsqueeze(-3) @ self.c
        query, key = (placed.value for placed in layer.placed(x))
        scores, before = self.query @ self.key.mT * layer.scale, query @ key.mT * layer.scale
        self.p: Array = layer.probabilities(scores)
        self.p_between: Array = layer.probabilities(before + (scores - before) * t)

    # -- moments over the keys

    def centred(self, f: Array) -> Array:
        """The deviation of f (…, h, n, n) from its mean."""
        return f - (self.p * f).sum(-1, keepdim=True)

    @staticmethod
    def deviation(f: Array, p: Array) -> Array:
        """(…, n) (Σ_l Var_p(f_li))^½."""
        off = f - (p * f).sum(-1, keepdim=True)
        return root((p * off.square()).sum(-1).sum(-2))

    def spread(self, rows: Rows[Array], probabilities: Array) -> Array:
        """(…, n) the largest deviation of rows (…, h, n, m) along a unit vector: any vector gives a lower value."""
        p, every = _middle(probabilities), rows.for_every_query()
        r = _middle(every)  # (…, h, i or 1, n, m)
        off = (r - p.unsqueeze(-2) @ r).movedim(-4, -3).flatten(-3, -2)  # (…, n, h n, m)
        weight = p.movedim(-3, -2).flatten(-2, -1).unsqueeze(-1)
        u = torch.linalg.eigh(off.mT @ (weight * off)).eigenvectors[..., -1]
        unit = lift(u, every)
        along = (every @ unit.unsqueeze(-3).unsqueeze(-1)).squeeze(-1)
        return self.deviation(along, probabilities) / root(unit.square().sum(-1))

    @cached_property
    def reach(self) -> Array:
        """(…, h, n, n) ‖C_lᵀ(z_j - ȳ_i)‖, 0 where masked."""
        off = self.v.unsqueeze(-3) - (self.p @ self.v).unsqueeze(-2)
        distance, allowed = root(off.square().sum(-1)), self.layer.allowed(off.shape[-2])
        return distance if allowed is None else distance.masked_fill(~allowed.unsqueeze(-3), 0.0)

    def third(self, f: Array) -> Array:
        """(…, n) (Σ_lj p_lij ‖C_lᵀ(z_j - ȳ_i)‖ (f_lij - E f_li)²)^½."""
        return root((self.p * self.reach * self.centred(f).square()).sum(-1).sum(-2))

    # -- derivatives at Z

    def moved(self, g: Array) -> tuple[Array, Array]:
        """(…, h, n, k) how queries and keys move along g."""
        query, key = self._placed
        return query.push(project(g, self.w.w_q, None)), key.push(project(g, self.w.w_k, None))

    def bent(self, g: Array, other: Array) -> Array:
        """(…, h, n, n) s'' along g and other."""
        (dq, dk), (dq_other, dk_other) = self.moved(g), self.moved(other)
        bent = dq @ dk_other.mT + dq_other @ dk.mT
        if self.layer.q_norm is not None or self.layer.k_norm is not None:
            ddq, ddk = (
                placed.push2(project(g, w, None), project(other, w, None))
                for placed, w in zip(self._placed, (self.w.w_q, self.w.w_k), strict=True)
            )
            bent = bent + ddq @ self.key.mT + self.query @ ddk.mT
        return bent * self.layer.scale

    def slope(self, g: Array) -> Array:
        """(…, h, n, n) s' along g."""
        dq, dk = self.moved(g)
        return (dq @ self.key.mT + self.query @ dk.mT) * self.layer.scale

    def first(self, g: Array) -> Array:
        """(…, n, d_out) DF(Z)[g]."""
        moved = self.p @ (g.unsqueeze(-3) @ self.c) + self._covariance(self.slope(g), self.v)
        return moved.sum(-3) + g * self.layer.residual if self.layer.residual else moved.sum(-3)

    def second(self, g: Array, other: Array) -> Array:
        """(…, n, d_out) D²F(Z)[g, other] = Cov(s', v°) + Cov(s°, v') + Cov(s'°, v) + E[(s' - E)(s° - E)(v - E)]."""
        s, s_other = self.slope(g), self.slope(other)
        rows = self._covariance(s, other.unsqueeze(-3) @ self.c) + self._covariance(s_other, g.unsqueeze(-3) @ self.c)
        weight = self.p * self.centred(s) * self.centred(s_other)
        third = weight @ self.v - weight.sum(-1, keepdim=True) * (self.p @ self.v)
        return (rows + self._covariance(self.bent(g, other), self.v) + third).sum(-3)

    def _covariance(self, s: Array, values: Array) -> Array:
        return (self.p * self.centred(s)) @ values

    @cached_property
    def common(self) -> Array:
        """The part of G in which all tokens move alike."""
        return (self.g.sum(-2, keepdim=True) / self.g.shape[-2]).expand(*self.g.shape)


def _middle(x: Tensor | Ball) -> Tensor:
    return x.mid if isinstance(x, Ball) else x.detach()


@dataclass(frozen=True)
class Constants:
    """The constants of balls around x, in proved arithmetic, and what they are computed from."""

    ball: OverBall[Ball]
    layer: AttentionLayer
    x: Tensor
    radii: Tensor

    @cached_property
    def every(self) -> Ball:
        return every_direction(self.ball)

    @cached_property
    def agreeing(self) -> tuple[Ball, Ball]:
        return where_tokens_agree(self.ball)

    def remainder(self, beta: Ball) -> Ball:
        """(r, b…) ∫_0^r (r - s) β(s) ds, from the value of β at r."""
        return integrate(self.ball.a, beta, self.radii.unsqueeze(-1)).movedim(-1, 0)


@dataclass(frozen=True)
class Ingredient:
    """A constant of a ball and what it bounds.

    Attributes:
        name: what it is called in the code.
        bound: (r, b…, …) its value.
        truth: (m, r, b…, …) the same quantity at one point, by definition.
        only: for linear queries and keys, or for normalised ones; None for both.
    """

    name: str
    bound: Callable[[Constants], Any]
    truth: Callable[[Situation[Any]], Any]
    only: Literal["linear", "normed"] | None = None


def _softmax_norm(s: Situation[Array]) -> Array:
    """vᵀ(diag p - ppᵀ)v / vᵀv for the top eigenvector v."""
    p = _middle(s.p)
    v = torch.linalg.eigh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)).eigenvectors[..., -1]
    f = lift(v, s.p)
    return (s.p * s.centred(f).square()).sum(-1) / f.square().sum(-1)


def _score_movement(s: Situation[Array]) -> Array:
    """(Σ_li Var(s'_li))^½."""
    return root(s.deviation(s.slope(s.g), s.p).square().sum(-1))


def _bilinear(s: Situation[Array]) -> Array:
    """(Σ_l ‖G A_l Gᵀ‖_F²)^½."""
    dq, dk = s.moved(s.g)
    return frobenius(dq @ dk.mT * s.layer.scale, (-3, -2, -1))


def _bend(s: Situation[Array]) -> Array:
    """(Σ_li Var(q̂'' · k̂ + q̂ · k̂''))^½ along G."""
    dq, dk = s.moved(s.g)
    return root(s.deviation(s.bent(s.g, s.g) - dq @ dk.mT * (2 * s.layer.scale), s.p).square().sum(-1))


def _alike(s: Situation[Array], g: Array) -> Array:
    """‖D²F(Z)[c, g]‖ for c the common part of G, made a unit vector."""
    return frobenius(s.second(s.common, g)) / frobenius(s.common)


def _remainder(s: Situation[Array]) -> Array:
    """‖F(Z) - F(X) - DF(X)[Z - X]‖_F."""
    x, z = s.x, s.z
    moved = s.layer.output(z, s.layer.run(z)) - s.layer.output(x, s.layer.run(x))
    return frobenius(moved - Situation(s.layer, x, x, s.g, 0.0).first(z - x))


INGREDIENTS: tuple[Ingredient, ...] = (
    Ingredient("q", lambda c: c.ball.q, lambda s: s.p),
    Ingredient("q between the scores", lambda c: c.ball.q, lambda s: s.p_between),
    Ingredient("softmax_norm", lambda c: c.ball.softmax_norm, _softmax_norm),
    Ingredient("value_spread", lambda c: c.ball.value_spread, lambda s: s.spread(Rows(s.v), s.p)),
    Ingredient(
        "value_spread between the scores", lambda c: c.ball.value_spread, lambda s: s.spread(Rows(s.v), s.p_between)
    ),
    Ingredient(
        "query_spread",
        lambda c: c.ball.query_spread,
        lambda s: s.spread(Rows(s.key * s.layer.scale, s.w.w_q.mT, s.layer.rotary), s.p),
        only="linear",
    ),
    Ingredient(
        "common_spread",
        lambda c: c.ball.common_spread,
        lambda s: s.deviation(s.slope(s.common), s.p) / root(s.common.square().sum(-1).amax(-1, keepdim=True)),
        only="linear",
    ),
    Ingredient("score_spread", lambda c: c.ball.score_spread, lambda s: s.deviation(s.slope(s.g), s.p)),
    Ingredient("value_reach", lambda c: c.ball.value_reach, lambda s: s.reach),
    Ingredient("third_spread", lambda c: c.ball.third_spread, lambda s: s.third(s.slope(s.g))),
    Ingredient(
        "third moments of all scores",
        lambda c: c.ball.score_movement(Ball.exact(c.ball.third_weights)),
        lambda s: root(s.third(s.slope(s.g)).square().sum(-1)),
    ),
    Ingredient("score_movement", lambda c: c.ball.score_movement(Ball.exact(c.ball.q)), _score_movement),
    Ingredient("joint_A", lambda c: c.ball.joint_A, _bilinear),
    Ingredient("direct_gain", lambda c: direct_gain(c.ball, c.layer, c.x), lambda s: frobenius(s.first(s.g))),
    Ingredient("curvature, every", lambda c: c.every, lambda s: frobenius(s.second(s.g, s.g))),
    Ingredient(
        "curvature, common", lambda c: c.agreeing[0], lambda s: _alike(s, s.common) / frobenius(s.common), "linear"
    ),
    Ingredient("curvature, mixed", lambda c: c.agreeing[1], lambda s: _alike(s, s.g), "linear"),
    Ingredient("bend", lambda c: c.ball.map.bend(Ball.exact(c.ball.q)), _bend, "normed"),
    Ingredient("remainder", lambda c: c.remainder(c.every), _remainder),
)


def ingredients_of(layer: AttentionLayer) -> tuple[Ingredient, ...]:
    """Those that the layer has."""
    kind = "linear" if layer.q_norm is None and layer.k_norm is None else "normed"
    return tuple(ingredient for ingredient in INGREDIENTS if ingredient.only in (None, kind))
