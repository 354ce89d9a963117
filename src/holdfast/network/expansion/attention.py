"""Softmax attention, expanded in its logits.

In a row, let t_j be the change of the logits less its mean under p, ṽ_j = v_j - Σ_j p_j v_j the values through the
output map, and ν_j the change of the values, less its mean. With E the mean under p and a_j = e^{t_j} - 1 - t_j,

    y' - y - E[Δv] = (E[t ṽ] + E[t ν] + E[a ṽ] + E[a ν]) / (1 + E[a]),

because E[t] = E[ṽ] = E[ν] = 0. Everything on the right is a product or a series of quantities of known degree.
"""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.attention.layer import join_heads, merge_heads, project, split_heads
from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius_upper, gamma
from holdfast.network.attention import Attention
from holdfast.network.expansion.directions import Directions, Triples
from holdfast.network.expansion.graded import Graded
from holdfast.network.expansion.local import Local
from holdfast.network.expansion.norms import gram_norm, thin_gram_norm


@final
class LocalAttention(Local):
    """An attention layer at ũ; b inputs, h heads, rows i, keys j."""

    token_wise = False

    def __init__(self, piece: Attention, u: Tensor, directions: Directions, order: int) -> None:
        super().__init__(u, directions, order)
        layer = piece.layer
        self._h, self._residual = layer.h, layer.residual
        w = layer.weights(Ball.exact(u))
        scale = layer.scale
        w_q, w_k, w_v = join_heads(w.w_q * scale), join_heads(w.w_k), join_heads(w.w_v)
        q, k, v = project(Ball.exact(u), w.w_q, w.b_q) * scale, project(Ball.exact(u), w.w_k, w.b_k), project(Ball.exact(u), w.w_v, w.b_v)
        # A common row of keys or values drops out of everything; without it numbers are smaller.
        k, v = k - k.mid.mean(-2, keepdim=True), v - v.mid.mean(-2, keepdim=True)
        p = layer.probabilities(q @ k.mT)
        w_o = w.w_o.flatten(0, 1)
        for ball in (w_q, w_k, w_v, w_o):
            self.theta = self.theta + 16 * frobenius_upper(ball.rad) / frobenius_upper(ball.mid).clamp(min=1e-300)
        for ball in (q, k, v):
            self._coefficient(ball, (-3, -2, -1))
        self.theta = self.theta + 16 * p.rad.sum(-1).amax((-2, -1))
        self._w_q, self._w_k, self._w_v, self._w_o = w_q.mid, w_k.mid, w_v.mid, w_o.mid
        self._q, self._k, self._v, self._p = q.mid, k.mid, v.mid, p.mid
        self._upper_p = p.upper.clamp(min=0.0).masked_fill((p.mid == 0) & (p.rad == 0), 0.0)
        self._outer = self._w_o.unflatten(0, (self._h, -1))  # (h, k, d)
        n = u.shape[-2]
        self._squares = u.new_zeros(len(u), self._h, n, n, n)
        self._grams = {name: u.new_zeros(len(u), self._h, n, q.shape[-1], q.shape[-1]) for name in "qkv"}
        self._most = {k_: u.new_zeros(len(u)) for k_ in ("s1", "s2", "s3", "P2", "X", "v1", "v2", "v3")}

    @property
    def output(self) -> torch.Size:
        return torch.Size((*self.u.shape[:-1], self._w_o.shape[-1]))

    # -- jets

    def push(self, a: Tensor) -> Tensor:
        q, k, v = self._moved(a)
        s = self._centred(q @ self._k.mT + self._q @ k.mT)
        return self._out((self._p * s) @ self._v + self._p @ v, a)

    def _first(self, J: Tensor) -> Tensor:
        self._q1, self._k1, self._v1 = self._moved(J)
        self._s1 = s = self._centred(self._q1 @ self._k.mT + self._q @ self._k1.mT)
        self._note_sizes(1, s, self._v1)
        self._vectors = {name: [self._vector(jets)] for name, jets in (("q", self._q1), ("k", self._k1))}
        self._vectors["v"] = [self._through(self._v1)]
        self._forms = [torch.linalg.vector_norm(s, dim=0)]
        self._row_constants(s)
        return self._out((self._p * s) @ self._v + self._p @ self._v1, J)

    def _second(self, H: Tensor) -> Tensor:
        d, (i, j) = self.directions, (self.directions.first, self.directions.second)
        self._q2, self._k2, self._v2 = self._moved(H)
        s1 = self._s1
        left = torch.cat([self._q2, self._q.expand_as(self._q2), self._q1[i], self._q1[j]], -1)
        right = torch.cat([self._k.expand_as(self._k2), self._k2, self._k1[j], self._k1[i]], -1)
        s = self._centred(left @ right.mT)
        self._P2 = P = self._centred(s1[i] * s1[j] + s)
        self._note_sizes(2, s, self._v2)
        self._most["P2"] = P.abs().amax((0, -3, -2, -1))
        root = d.pair_count.sqrt().reshape(-1, 1, 1, 1, 1)
        for name, jets in (("q", self._q2), ("k", self._k2)):
            self._vectors[name].append(self._vector(jets * root) / 2)
        self._vectors["v"].append(self._through(self._v2 * root) / 2)
        forms = [thin_gram_norm(d.full(part).permute(2, 3, 4, 5, 0, 1), 2) for part in torch.split(s, 1, 2)]
        self._forms.append(torch.cat(forms, 1) / 2)
        self._spreads.append(thin_gram_norm(self._weighted(s * root), 2) / 2)
        left = torch.cat([self._p * P, self._p * s1[i], self._p * s1[j], self._p.expand_as(P)], -1)
        right = torch.cat([self._v.expand_as(self._v2), self._v1[j], self._v1[i], self._v2], -2)
        return self._out(left @ right, H)

    def _third(self, T: Tensor, at: Triples) -> Tensor:
        q, k, v = self._moved(T)
        one = slice(at.q, at.q + 1)
        q1, k1, v1, q2, k2, v2 = self._q1, self._k1, self._v1, self._q2, self._k2, self._v2
        s1, P2, p = self._s1, self._P2, self._p

        def all_(x: Tensor) -> Tensor:
            return x.expand(len(q), *x.shape[1:])

        left = [q, self._q.expand_as(q), all_(q1[one]), q1[at.r], q1[at.s], q2[at.qr], q2[at.qs], q2[at.rs]]
        right = [self._k.expand_as(k), k, k2[at.rs], k2[at.qs], k2[at.qr], k1[at.s], k1[at.r], all_(k1[one])]
        s = self._centred(torch.cat(left, -1) @ torch.cat(right, -1).mT)
        sq, sr, ss = s1[one], s1[at.r], s1[at.s]
        Pqr, Pqs, Prs = P2[at.qr], P2[at.qs], P2[at.rs]
        X = self._centred(s + Pqr * ss + Pqs * sr + Prs * sq - 2 * sq * sr * ss)
        left = torch.cat([p * X, p * Pqr, p * Pqs, p * Prs, p * all_(sq), p * sr, p * ss, p.expand_as(X)], -1)
        right = [self._v.expand_as(v), v1[at.s], v1[at.r], all_(v1[one]), v2[at.rs], v2[at.qs], v2[at.qr], v]
        self._note_sizes(3, s, v)
        self._most["X"] = torch.maximum(self._most["X"], X.abs().amax((0, -3, -2, -1)))
        root = at.count.sqrt().reshape(-1, 1, 1, 1, 1)
        rows = self._weighted(s * root)
        self._squares += rows @ rows.mT
        for name, jets in (("q", q), ("k", k), ("v", v)):
            rows = (jets * root).movedim(0, -1)
            self._grams[name] += rows @ rows.mT
        return self._out(left @ torch.cat(right, -2), T)

    def _moved(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tangents, (t, b, h, n, k)."""
        h = self._h
        return split_heads(a @ self._w_q, h), split_heads(a @ self._w_k, h), split_heads(a @ self._w_v, h)

    def _centred(self, f: Tensor) -> Tensor:
        return f - (self._p * f).sum(-1, keepdim=True)

    def _out(self, y: Tensor, a: Tensor) -> Tensor:
        out: Tensor = merge_heads(y) @ self._w_o
        return out + self._residual * a if self._residual else out

    # -- sizes

    def _weighted(self, s: Tensor) -> Tensor:
        """Rows √p_j s_j of every row of logits, (t, b, h, i, j) to (b, h, i, j, t)."""
        return (self._p.sqrt() * s).permute(1, 2, 3, 4, 0)

    def _vector(self, jets: Tensor) -> Tensor:
        """(b, h, n) norms of vectors that depend linearly on what `jets` (t, b, h, n, k) enumerates."""
        return thin_gram_norm(jets.movedim(0, -1), 2)

    def _through(self, v: Tensor) -> Tensor:
        """The same after the output map: ‖W_Oᵀ V‖² is the norm of V's Gram matrix between W_Oᵀ and W_O."""
        rows = v.movedim(0, -1)  # (b, h, n, k, t)
        gram = rows @ rows.mT
        return self._through_gram(gram, gamma(rows.shape[-1]))

    def _through_gram(self, gram: Tensor, relative: float) -> Tensor:
        outer = self._outer.unsqueeze(1)
        error = (relative + gamma(256)) * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        size = frobenius_upper(self._outer).reshape(-1, 1).square()
        return gram_norm(outer.mT @ gram @ outer, 2 * error * size, 2)

    def _note_sizes(self, k: int, s: Tensor, v: Tensor) -> None:
        name_s, name_v = f"s{k}", f"v{k}"
        self._most[name_s] = torch.maximum(self._most[name_s], s.abs().amax((0, -3, -2, -1)))
        longest = torch.linalg.vector_norm(v, dim=-1).amax((0, -2, -1))
        self._most[name_v] = torch.maximum(self._most[name_v], longest)

    def _row_constants(self, s: Tensor) -> None:
        """What the rows are at ũ, and their first-order parts."""
        p, vo = self._p, self._v @ self._outer  # (b, h, n, d)
        spread = vo.unsqueeze(-3) - (p @ vo).unsqueeze(-2)  # (b, h, i, j, d)
        root = p.sqrt().unsqueeze(-1)
        self._value_lengths = torch.linalg.vector_norm(spread, dim=-1)
        self._value_std = thin_gram_norm(root * spread, 2)
        rows = s.permute(1, 2, 3, 4, 0)  # (b, h, i, j, p)
        self._spreads = [thin_gram_norm(root * rows, 2)]
        self._moves = {}
        for name, jets in (("k", self._k1), ("v", self._v1 @ self._outer)):
            moved = jets.movedim(0, -1).flatten(-2, -1)  # (b, h, j, c p)
            moved = moved.unsqueeze(-3) - (p @ moved).unsqueeze(-2)  # (b, h, i, j, c p)
            stacked = (root * moved).unflatten(-1, (-1, self.directions.p)).flatten(-3, -2)
            self._moves[name] = thin_gram_norm(stacked, 2)
        self._first_rows = thin_gram_norm((p.unsqueeze(-1) * spread).mT @ rows, 2)
        keys = self._k.unsqueeze(-3) - (p @ self._k).unsqueeze(-2)
        w_q = self._w_q.unflatten(-1, (self._h, -1)).movedim(-2, 0)  # (h, d, k)
        w_k = self._w_k.unflatten(-1, (self._h, -1)).movedim(-2, 0)
        w_v = self._w_v.unflatten(-1, (self._h, -1)).movedim(-2, 0)
        self._by_query = torch.linalg.vector_norm(keys @ w_q.mT.unsqueeze(1), dim=-1)  # ‖A (x_j - x̄_i)‖
        self._by_key = torch.linalg.vector_norm(self._q @ w_k.mT, dim=-1)  # ‖a_i‖
        self._norms = {"q": thin_gram_norm(w_q, 3), "k": thin_gram_norm(w_k, 3), "v": thin_gram_norm(w_v @ self._outer, 3)}

    def _error(self, k: int) -> Tensor:
        m, theta = self._most, self.theta
        x = [self.largest(j) for j in (1, 2, 3)]
        w_v, w_o = frobenius_upper(self._w_v), frobenius_upper(self._w_o)
        v0 = torch.linalg.vector_norm(self._v, dim=-1).amax((-2, -1))
        v, lost_v = [m[f"v{j}"] for j in (1, 2, 3)], [theta * w_v * size for size in x]
        s, lost_s = [m[f"s{j}"] for j in (1, 2, 3)], [theta * self._logit_size(j) for j in (1, 2, 3)]
        s1, P2, X = s[0] + lost_s[0], m["P2"], m["X"]
        lost_P = 4 * s1 * lost_s[0] + 2 * lost_s[1] + theta * 4 * (s1.square() + s[1])
        if k == 1:
            out = lost_s[0] * v0 + lost_v[0] + theta * (s1 * v0 + v[0])
        elif k == 2:
            out = lost_P * v0 + 2 * (lost_s[0] * v[0] + s1 * lost_v[0]) + lost_v[1]
            out = out + theta * (P2 * v0 + 2 * s1 * v[0] + v[1])
        else:
            P2 = P2 + lost_P
            lost_X = 2 * (lost_s[2] + 3 * (P2 * lost_s[0] + s1 * lost_P) + 6 * s1.square() * lost_s[0])
            lost_X = lost_X + theta * 4 * (s[2] + 3 * P2 * s1 + 2 * s1**3)
            out = lost_X * v0 + 3 * (lost_P * v[0] + P2 * lost_v[0] + lost_s[0] * v[1] + s1 * lost_v[1]) + lost_v[2]
            out = out + theta * (X * v0 + 3 * P2 * v[0] + 3 * s1 * v[1] + v[2])
        return 4 * w_o * out + theta * abs(self._residual) * x[k - 1]

    def _logit_size(self, k: int) -> Tensor:
        """(b) the largest a logit of degree k can be, on absolute values."""
        q0, k0 = (torch.linalg.vector_norm(t, dim=-1).amax((-2, -1)) for t in (self._q, self._k))
        w_q, w_k = frobenius_upper(self._w_q), frobenius_upper(self._w_k)
        x1, x2, x3 = (self.largest(j) for j in (1, 2, 3))
        line = q0 * w_k + k0 * w_q
        return 2 * (line * x1, line * x2 + 2 * w_q * w_k * x1**2, line * x3 + 6 * w_q * w_k * x1 * x2)[k - 1]

    def push_size(self) -> Tensor:
        q0, k0, v0 = (torch.linalg.vector_norm(t, dim=-1).amax((-2, -1)) for t in (self._q, self._k, self._v))
        w_q, w_k, w_v, w_o = (frobenius_upper(w) for w in (self._w_q, self._w_k, self._w_v, self._w_o))
        root = self.u.shape[-2] ** 0.5
        return root * self._h * w_o * (4 * (q0 * w_k + k0 * w_q) * v0 + w_v) + abs(self._residual)

    # -- the rest

    def rest(self, F: Tensor, eps: Tensor) -> Tensor:
        p, K, e = self._upper_p, self.order, eps.reshape(-1, 1, 1)
        norm_q, norm_k, norm_v = (self._norms[name].unsqueeze(-1) for name in "qkv")
        F = F.unsqueeze(-2)  # (b, 1, n): the same for every head
        q = self.graded(self._sizes("q"), eps, norm_q * F)
        k = self.graded(self._sizes("k"), eps, norm_k * F).each(lambda x: _beside(x, p))
        v = self.graded(self._sizes("v"), eps, norm_v * F).each(lambda x: _beside(x, p))
        k, v = (x.each(lambda y: torch.where(p > 0, y, 0.0)) for x in (k, v))
        bilinear = (q.each(lambda x: x.unsqueeze(-1)) * k).rest
        linear = self._by_query * F.unsqueeze(-1) + self._by_key.unsqueeze(-1) * _beside(F, p)
        t = self.graded(self._logits(), eps, bilinear + linear * (1 + 1e-12))
        t = t.each(lambda x: torch.where(p > 0, x, 0.0))
        # Of every row: the largest of its keys (∞), and the root of the mean square, all keys together (2).
        t_, v_ = t.each(lambda x: x.amax(-1)), v.each(lambda x: x.amax(-1))
        t2 = self._joint(t, [s * e ** (j + 1) for j, s in enumerate(self._logit_spreads())])
        k2 = self._joint(k, [self._moves["k"] * e * (1 + 1e-9) + self._lost("k") * e])
        v2 = self._joint(v, [self._moves["v"] * e * (1 + 1e-9) + self._lost("v") * e])
        far, wide = self._value_lengths.masked_fill(p == 0, 0.0).amax(-1), self._value_std * (1 + 1e-9)
        # The series of a = e^t - 1 - t: its mean, its mean with ṽ, its mean with ν.
        power, last = t2, t_
        mean = with_v = with_n = Graded(tuple(torch.zeros_like(x) for x in t_.parts), torch.zeros_like(t_.rest))
        for m in range(2, K + 2):
            c = 1 / math.factorial(m)
            square = power * t2  # t^m: two factors in mean square, the others at their largest
            if m == K + 1:
                square = Graded(tuple(torch.zeros_like(x) for x in t_.parts), square.total * torch.exp(t_.total))
                flat = Graded(square.parts, (power * t_).total * torch.exp(t_.total))
            else:
                flat = power * t_
            mean = mean + square.times(c)
            with_v = with_v + _smaller(square.times(far), flat.times(wide)).times(c)
            with_n = with_n + _smaller(square * v_, flat * v2).times(c)
            power = power * t_
        moved = _smaller(t_.times(far), t2.times(wide))
        first = torch.minimum(moved.parts[0], self._first_rows * e * (1 + 1e-9) + self._slack(1) * self._values * e)
        crossed = t2 * v2
        N = Graded((first, *moved.parts[1:]), moved.rest) + crossed + with_v + with_n
        beyond = (q * k2).rest * wide + crossed.rest + with_v.rest + with_n.rest
        beyond = beyond + (N * mean).rest + N.total * mean.total.square()
        return beyond.sum(-2) * (1 + 1e-10)

    @property
    def _values(self) -> Tensor:
        return self._value_lengths.amax(-1)

    def _joint(self, x: Graded, known: list[Tensor]) -> Graded:
        """Roots of mean squares over the keys, from what is known of each; or smaller ones that are known."""
        p = self._upper_p
        out = x.each(lambda y: (p * y.square()).sum(-1).sqrt() * (1 + 1e-10))
        parts = [torch.minimum(y, known[j]) if j < len(known) else y for j, y in enumerate(out.parts)]
        return Graded(tuple(parts), out.rest)

    def _slack(self, k: int) -> Tensor:
        """(b, 1, 1) what rounding may have taken from a logit's part of degree k."""
        lost = self.theta * 4 * self._logit_size(k) * self.directions.p ** (k / 2)
        return lost.reshape(-1, 1, 1)

    def _logits(self) -> list[Tensor]:
        """Coefficients (b, h, i, j) of every logit's parts."""
        sizes = list(self._forms)
        if self.order == 3:
            squares = self._squares.diagonal(dim1=-2, dim2=-1) / self._p.clamp(min=1e-300)
            sizes.append(squares.sqrt() / 6)
        return [size + self._slack(k).unsqueeze(-1) for k, size in enumerate(sizes, 1)]

    def _logit_spreads(self) -> list[Tensor]:
        """The same (b, h, i) for the mean squares of rows."""
        sizes = list(self._spreads)
        if self.order == 3:
            trace = self._squares.diagonal(dim1=-2, dim2=-1).sum(-1)
            sizes.append(gram_norm(self._squares, gamma(self.directions.p**3 + 64) * 2 * trace) / 6)
        return [size * (1 + 1e-9) + self._slack(k) for k, size in enumerate(sizes, 1)]

    def _lost(self, name: str) -> Tensor:
        """(b, 1, 1) what rounding may have taken from first-order jets of keys or values."""
        w = frobenius_upper(self._w_k) if name == "k" else frobenius_upper(self._w_v) * frobenius_upper(self._w_o)
        return (self.theta * 8 * w * self.largest(1) * self.directions.p**0.5).reshape(-1, 1, 1)

    def _sizes(self, name: str) -> list[Tensor]:
        sizes = list(self._vectors[name])
        if self.order == 3:
            gram, relative = self._grams[name], gamma(self.directions.p**3 + 64)
            if name == "v":
                cube = self._through_gram(gram, relative)
            else:
                cube = gram_norm(gram, 2 * relative * gram.diagonal(dim1=-2, dim2=-1).sum(-1))
            sizes.append(cube / 6)
        w = {"q": self._w_q, "k": self._w_k, "v": self._w_v}[name]
        size = frobenius_upper(w) * (frobenius_upper(self._w_o) if name == "v" else 1.0)
        lost = (self.theta * 4 * size).reshape(-1, 1, 1)
        p = self.directions.p
        return [s + lost * self.largest(k).reshape(-1, 1, 1) * p ** (k / 2) for k, s in enumerate(sizes, 1)]


def _smaller(x: Graded, y: Graded) -> Graded:
    """Two bounds of one quantity, part by part."""
    return Graded(
        tuple(torch.minimum(a, b) for a, b in zip(x.parts, y.parts, strict=True)), torch.minimum(x.rest, y.rest)
    )


def _beside(x: Tensor, p: Tensor) -> Tensor:
    """x_j + Σ_j p_ij x_j, (b, h, n) to (b, h, i, j)."""
    row = x.unsqueeze(-2)
    return row + (p * row).sum(-1, keepdim=True)
