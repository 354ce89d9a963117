"""The first three derivatives of an attention layer in closed form, along many directions at once.

One head maps u to y_i = Σ_j p_ij v_j with p_i = softmax(s_i). An index stands for a derivative along a direction; s is
quadratic in u, so s_abc = 0, and v is affine, so v_ab = 0. Writing f° = f - E_p f along each row,

    p_a   = p ∘ s°_a
    p_ab  = p ∘ (s°_a s°_b + s_ab)°
    p_abc = p ∘ (s°_a s°_b s°_c + r_ab s°_c + r_ac s°_b + r_bc s°_a)°,   r_ab = s°_ab - E_p[s°_a s°_b],

because log p has the derivatives s°_a and r_ab, and every derivative of p sums to zero. The product rule gives

    y_a   = p_a v + p v_a
    y_ab  = p_ab v + p_a v_b + p_b v_a
    y_abc = p_abc v + p_ab v_c + p_ac v_b + p_bc v_a,

the cumulants Cov(s_a, v_b), Cov(s_ab, v), κ₃(s_a, s_b, v), … all together. The adjoint of c, with m = c (W^O)ᵀ and
g_ij = m_i · v_j, is s̄ = p ∘ g°, q̄ = s̄ k, k̄ = s̄ᵀ q, v̄ = pᵀ m; its derivative along a is
s̄_a = p ∘ (s°_a g° + m · v_a)°, q̄_a = s̄_a k + s̄ k_a, and so on.

With sinks the first derivative is the same: a sink's score and value do not move, and E_p is a sum over the keys alone.
With norms of queries or keys, q_a and k_a go through their derivative. The higher derivatives cover neither.

A soft cap φ puts φ'(s) s_a in the place of s_a and φ'(s) s_ab + φ''(s) s_a s_b in that of s_ab; in the adjoint φ'(s) s̄
stands for s̄, and its derivative is φ'(s) s̄_a + φ''(s) s_a s̄. There is no third derivative with a cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, final

from torch import Tensor

from holdfast.attention.common import centred, centred_product
from holdfast.attention.head_norm import Placed
from holdfast.attention.layer import AttentionLayer, join_heads, merge_heads, project, split_heads
from holdfast.errors import NotApplicableError
from holdfast.linalg import Array, Ball
from holdfast.linalg.rounding import as_ball


@dataclass(frozen=True)
class _Direction(Generic[Array]):
    """Along one direction a: q_a, k_a, v_a (t…, b…, h, n, k); s_a before a cap and s°_a, (t…, b…, h, n, n)."""

    q: Array
    k: Array
    v: Array
    raw: Array
    s: Array


@dataclass(frozen=True)
class _Cap(Generic[Array]):
    """φ' and φ'' at the scores (b…, h, n, n)."""

    slope: Array
    bend: Array

    @classmethod
    def of(cls, cap: float, scores: Array) -> _Cap[Array]:
        tanh = (scores / cap).tanh()
        slope = -(tanh.square() - 1.0)
        return cls(slope, tanh * slope * (-2.0) / cap)


@final
class AttentionPass(Generic[Array]):
    """A layer at u (b…, n, d), a tensor or a ball, with all that its derivatives there have in common.

    Directions a, b, c (t…, b…, n, d) and adjoints (t…, b…, n, d_out) broadcast over t…: every pair of two stacks is
    a.unsqueeze(1) with b.unsqueeze(0). The largest tensors are t… times h n² and h n k.
    """

    def __init__(self, layer: AttentionLayer, u: Array) -> None:
        self._layer = layer
        self._u: Array = u
        w = layer.weights(u)
        # The scale of the scores is carried by q. Without sinks a common row of v drops out of every derivative, and
        # one of k where there is no cap: it is taken off because what is left is smaller, as are its rounding errors.
        self._w_q: Array = join_heads(w.w_q * layer.scale)
        self._w_k: Array = join_heads(w.w_k)
        self._w_v: Array = join_heads(w.w_v)
        self._w_o: Array = w.w_o.flatten(0, 1)
        self._b_o: Array | None = w.b_o
        self._placed_q: Placed[Array]
        self._placed_k: Placed[Array]
        self._placed_q, self._placed_k = layer.placed(u)
        k, v = self._placed_k.value, project(u, w.w_v, w.b_v)
        self._common = as_ball(v).mid.mean(-2, keepdim=True) if layer.sinks is None else None
        self._q: Array = self._placed_q.value * layer.scale
        shifts = layer.soft_cap is None and layer.sinks is None
        self._k: Array = k - as_ball(k).mid.mean(-2, keepdim=True) if shifts else k
        self._v: Array = v if self._common is None else v - self._common
        scores: Array = self._q @ self._k.mT
        self._p: Array = layer.probabilities(scores)
        self._cap: _Cap[Array] | None = None if layer.soft_cap is None else _Cap.of(layer.soft_cap, scores)

    @property
    def value(self) -> Array:
        """F(u)."""
        y = self._p @ self._v
        out = self._out(y if self._common is None else y + self._common)
        if self._b_o is not None:
            out = out + self._b_o
        return out + self._u * self._layer.residual if self._layer.residual else out

    def push(self, a: Array) -> Array:
        """DF(u)[a]."""
        A = self._direction(a)
        out = self._out((self._p * A.s) @ self._v + self._p @ A.v)
        return out + a * self._layer.residual if self._layer.residual else out

    def paths(self, a: Array) -> tuple[Array, Array, Array]:
        """What the heads' outputs move by in `push`, (t…, b…, h, n, k): through values, queries and keys."""
        q, k, v = self._projected(a)
        by_query, by_key = (self._centred_scores(raw) for raw in (q @ self._k.mT, self._q @ k.mT))
        return self._p @ v, (self._p * by_query) @ self._v, (self._p * by_key) @ self._v

    def push2(self, a: Array, b: Array) -> Array:
        """D²F(u)[a, b]."""
        self._check_higher()
        A, B = self._direction(a), self._direction(b)
        p_ab = centred_product(self._p, A.s * B.s + self._bend(A, B))
        return self._out(p_ab @ self._v + (self._p * A.s) @ B.v + (self._p * B.s) @ A.v)

    def push3(self, a: Array, b: Array, c: Array) -> Array:
        """D³F(u)[a, b, c]."""
        self._check_higher()
        if self._cap is not None:
            raise NotApplicableError("attention has no third derivative with a soft cap")
        A, B, C = (self._direction(direction) for direction in (a, b, c))
        r_ab, r_ac, r_bc = self._log_bend(A, B), self._log_bend(A, C), self._log_bend(B, C)
        ab = A.s * B.s
        p_abc = centred_product(self._p, (ab + r_ab) * C.s + r_ac * B.s + r_bc * A.s)
        p_ab, p_ac, p_bc = self._p * (ab + r_ab), self._p * (A.s * C.s + r_ac), self._p * (B.s * C.s + r_bc)
        return self._out(p_abc @ self._v + p_ab @ C.v + p_ac @ B.v + p_bc @ A.v)

    def pull(self, c: Array) -> Array:
        """DF(u)ᵀ[c]."""
        m = self._heads(c)
        s = self._uncapped(centred_product(self._p, m @ self._v.mT))
        out = self._back(s @ self._k, s.mT @ self._q, self._p.mT @ m)
        return out + c * self._layer.residual if self._layer.residual else out

    def pull2(self, c: Array, a: Array) -> Array:
        """D²F(u)[a, ·]ᵀ[c]."""
        self._check_higher()
        m, A = self._heads(c), self._direction(a)
        g = centred(self._p, m @ self._v.mT)
        s, s_a = self._p * g, centred_product(self._p, A.s * g + m @ A.v.mT)
        if self._cap is not None:
            s, s_a = self._cap.slope * s, self._cap.slope * s_a + self._cap.bend * A.raw * s
        q = s_a @ self._k + s @ A.k
        k = s_a.mT @ self._q + s.mT @ A.q
        return self._back(q, k, (self._p * A.s).mT @ m)

    # -- parts

    def _check_higher(self) -> None:
        """Refuses terms of the scores that the second derivative does not cover."""
        layer = self._layer
        if layer.q_norm is not None or layer.k_norm is not None or layer.sinks is not None:
            raise NotApplicableError(f"higher derivatives of attention do not cover {layer.beyond_dot_products}")

    def _projected(self, a: Array) -> tuple[Array, Array, Array]:
        """q_a, k_a and v_a."""
        q, k, v = (split_heads(a @ w, self._layer.h) for w in (self._w_q, self._w_k, self._w_v))
        return self._placed_q.push(q), self._placed_k.push(k), v

    def _direction(self, a: Array) -> _Direction[Array]:
        q, k, v = self._projected(a)
        raw = q @ self._k.mT + self._q @ k.mT
        return _Direction(q, k, v, raw, self._centred_scores(raw))

    def _centred_scores(self, raw: Array) -> Array:
        """s°_a of the movement s_a before a cap, or of a part of it."""
        s = self._uncapped(raw)
        if isinstance(s, Ball) and self._layer.sinks is None:
            # A constant along the row drops out: that of its likeliest key makes what is left, and its radius, smaller.
            s = s - s.mid.gather(-1, self._likeliest.expand(*s.shape[:-1], 1))
        return centred(self._p, s)

    @cached_property
    def _likeliest(self) -> Tensor:
        """(b…, h, n, 1) the key that each row attends to most."""
        return as_ball(self._p).mid.argmax(-1, keepdim=True)

    def _uncapped(self, s: Array) -> Array:
        """The derivative of the cap times s; it is its own adjoint."""
        return s if self._cap is None else self._cap.slope * s

    def _bend(self, A: _Direction[Array], B: _Direction[Array]) -> Array:
        """s_ab."""
        bend = A.q @ B.k.mT + B.q @ A.k.mT
        return bend if self._cap is None else self._cap.slope * bend + self._cap.bend * (A.raw * B.raw)

    def _log_bend(self, A: _Direction[Array], B: _Direction[Array]) -> Array:
        """r_ab, the second derivative of log p."""
        return centred(self._p, self._bend(A, B)) - (self._p * A.s * B.s).sum(-1, keepdim=True)

    def _out(self, y: Array) -> Array:
        """Heads' outputs through the output maps."""
        out: Array = merge_heads(y) @ self._w_o
        return out

    def _heads(self, c: Array) -> Array:
        """The adjoint of `_out`."""
        m: Array = split_heads(c @ self._w_o.mT, self._layer.h)
        return m

    def _back(self, q: Array, k: Array, v: Array) -> Array:
        """Adjoints of queries, keys and values as an adjoint of u."""
        q, k = merge_heads(self._placed_q.pull(q)), merge_heads(self._placed_k.pull(k))
        out: Array = q @ self._w_q.mT + k @ self._w_k.mT + merge_heads(v) @ self._w_v.mT
        return out
