"""Softmax attention, expanded in its logits.

In a row, let t_j be the change of the logits minus its mean under p, ṽ_j = v_j - Σ_j p_j v_j the values through the
output map, and ν_j the change of the values, minus its mean. With E the mean under p and a_j = e^{t_j} - 1 - t_j,

    y' - y - E[Δv] = (E[t ṽ] + E[t ν] + E[a ṽ] + E[a ν]) / (1 + E[a]),

because E[t] = E[ṽ] = E[ν] = 0. Everything on the right is a product or a series of quantities of known degree. A row's
keys are measured together: |E[x y]| <= |x||y| with |x|² = E[x²], and taking off a mean makes that no larger.

The first two derivatives are those of `attention/derivatives.py`, written once more because the rest is bounded by the
jets of queries, keys, values and logits themselves, which are kept from one degree to the next.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from holdfast.attention.common import centred, less_common
from holdfast.attention.layer import join_heads, merge_heads, project, split_heads
from holdfast.layers.attention.positions import Positions
from holdfast.layers.expansion import LocalExpansion
from holdfast.linalg import Ball, forms
from holdfast.linalg.directions import Directions
from holdfast.linalg.graded import Graded, smaller
from holdfast.linalg.rounding import frobenius_upper, up
from holdfast.linalg.squarings import thin_gram_norm
from holdfast.usage import give_back_memory

if TYPE_CHECKING:
    from holdfast.layers.attention.piece import Attention


@final
class LocalAttention(LocalExpansion):
    """An attention layer at ũ; b inputs, h heads, rows i, keys j."""

    def __init__(self, piece: Attention, u: Tensor, directions: Directions) -> None:
        layer, ball, n = piece.layer, Ball.exact(u), u.shape[-2]
        super().__init__(u, directions, layer.h * n * (2 * n + 3 * layer.k) + 4 * (n + layer.k + layer.d + layer.d_out))
        self._h, self._residual = layer.h, layer.residual
        w = layer.weights(ball)
        maps = [join_heads(w.w_q * layer.scale), join_heads(w.w_k), join_heads(w.w_v), w.w_o.flatten(0, 1)]
        self._at = at = Positions(layer.rotary)
        q, k = at.turn(project(ball, w.w_q, w.b_q)), at.turn(project(ball, w.w_k, w.b_k))
        q, v = q * layer.scale, project(ball, w.w_v, w.b_v)
        k, v = less_common(k), less_common(v)
        p = layer.probabilities(q @ k.mT)
        for projected in (q, k, v):
            error, size = (frobenius_upper(part, (-1,)).amax((-2, -1)) for part in (projected.rad, projected.mid))
            self._coefficient(error, size)
        for weight in maps:
            self._coefficient(frobenius_upper(weight.rad), frobenius_upper(weight.mid))
        self._coefficient(up(p.rad.sum(-1).amax((-2, -1)), 1e-12), torch.ones_like(self.theta))
        self._w_q, self._w_k, self._w_v, self._w_o = (weight.mid for weight in maps)
        self._size_q, self._size_k = (frobenius_upper(w) * at.absolute for w in (self._w_q, self._w_k))
        self._q, self._k, self._v, self._p = q.mid, k.mid, v.mid, p.mid
        self._seen = (p.mid != 0) | (p.rad != 0)  # keys that are not masked
        self._most_p = p.upper.clamp(min=0.0, max=1.0) * self._seen
        self._outer = self._w_o.reshape(self._h, -1, self._w_o.shape[-1])  # (h, k, d)
        self._constants()

    @property
    def rest(self) -> str:
        return "attention rest"

    @property
    def output(self) -> torch.Size:
        return torch.Size((*self.u.shape[:-1], self._w_o.shape[-1]))

    def _constants(self) -> None:
        """What the rows are at ũ."""
        p, vo = self._p, self._v @ self._outer  # (b, h, n, d)
        spread = vo.unsqueeze(-3) - (p @ vo).unsqueeze(-2)  # (b, h, i, j, d)
        slack = 1 + 64 * self.theta.reshape(-1, 1, 1)
        size = torch.linalg.vector_norm(self._v, dim=-1).amax((-2, -1)) * frobenius_upper(self._w_o)
        self._value_size = size.reshape(-1, 1, 1)
        lost = 64 * self.theta.reshape(-1, 1, 1) * self._value_size
        length = torch.linalg.vector_norm(spread, dim=-1)
        self._lengths = (length * slack.unsqueeze(-1) + lost.unsqueeze(-1)) * self._seen
        self._values = spread
        weight = self._most_p.sqrt().unsqueeze(-1)
        self._value_std = thin_gram_norm(weight * spread) * slack + lost
        self._value_far = self._lengths.amax(-1)
        keys = self._k.unsqueeze(-3) - (p @ self._k).unsqueeze(-2)  # (b, h, i, j, k)
        w_q, w_k, w_v = (w.reshape(len(w), self._h, -1).movedim(-2, 0) for w in (self._w_q, self._w_k, self._w_v))
        by_query = self._at.turn_back(keys) @ w_q.mT.unsqueeze(1)  # A (x_j - x̄_i), with the row's position
        self._query_gram = by_query @ by_query.mT  # (b, h, i, j, j)
        size = torch.linalg.vector_norm(self._k, dim=-1).amax((-2, -1)) * self._size_q
        self._query_size = size.reshape(-1, 1, 1)
        lost = 64 * self.theta.reshape(-1, 1, 1) * self._query_size
        self._by_query = up(torch.linalg.vector_norm(by_query, dim=-1), 1e-12) + lost.unsqueeze(-1)
        self._by_query_std = thin_gram_norm(weight * by_query) * slack + lost
        size = torch.linalg.vector_norm(self._q, dim=-1).amax((-2, -1)) * self._size_k
        lost = (64 * self.theta * size).reshape(-1, 1, 1)
        self._by_key = up(self._at.longest(self._q, w_k, self._seen), 1e-12) + lost  # ‖a_i‖
        self._norm_q, self._norm_k = (thin_gram_norm(w, 3) * up(self._at.norm, 1e-15) for w in (w_q, w_k))
        size = frobenius_upper(self._w_v) * frobenius_upper(self._w_o)
        self._norm_v = thin_gram_norm(w_v @ self._outer, 3) + 1e-12 * size

    # -- jets

    def push(self, a: Tensor) -> Tensor:
        *_, out = self._along(a)
        return out

    def _first(self, J: Tensor) -> Tensor:
        self._q1, self._k1, self._v1, self._s1, out = self._along(J)
        return out

    def _along(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values and logits minus their means along tangents, and the derivative."""
        q, k, v = self._projected(a)
        s = centred(self._p, q @ self._k.mT + self._q @ k.mT)
        return q, k, v, s, self._out((self._p * s) @ self._v + self._p @ v, a)

    def _second(self, H: Tensor) -> Tensor:
        self._q2, self._k2, self._v2 = self._projected(H)
        some = self._some_pairs()
        s = torch.cat([self._logits_along(pairs) for pairs in some])
        give_back_memory()
        self._sizes(s)
        give_back_memory()
        for pairs in some:  # in place: probabilities instead of logits
            i, j = self.directions.first[pairs], self.directions.second[pairs]
            s[pairs] = centred(self._p, self._s1[i] * self._s1[j] + s[pairs])
        self._P2 = s
        return torch.cat([self._out(self._means_along(pairs), H[pairs]) for pairs in some])

    def _logits_along(self, pairs: Tensor) -> Tensor:
        """s°_qr for some pairs: second derivatives of the logits along the jets."""
        i, j, q, k = self.directions.first[pairs], self.directions.second[pairs], self._q2[pairs], self._k2[pairs]
        left = torch.cat([q, self._q.expand_as(q), self._q1[i], self._q1[j]], -1)
        right = torch.cat([self._k.expand_as(k), k, self._k1[j], self._k1[i]], -1)
        return centred(self._p, left @ right.mT)

    def _means_along(self, pairs: Tensor) -> Tensor:
        """The heads' outputs for some pairs."""
        i, j, P, v = self.directions.first[pairs], self.directions.second[pairs], self._P2[pairs], self._v2[pairs]
        left = torch.cat([P, self._s1[i], self._s1[j], torch.ones_like(P)], -1)
        right = torch.cat([self._v.expand_as(v), self._v1[j], self._v1[i], v], -2)
        return (torch.cat([self._p] * 4, -1) * left) @ right

    def _projected(self, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tangents, (t, b, h, n, k)."""
        q, k, v = (split_heads(a @ w, self._h) for w in (self._w_q, self._w_k, self._w_v))
        return self._at.turn(q), self._at.turn(k), v

    def _out(self, y: Tensor, a: Tensor) -> Tensor:
        out: Tensor = merge_heads(y) @ self._w_o
        return out + self._residual * a if self._residual else out

    # -- sizes

    def _sizes(self, s: Tensor) -> None:
        """Forms of rows, (b, h, i, p, p), and sizes of single keys, with what rounding may have taken."""
        p, most, d = self._p, self._most_p, self.directions
        self._most = [self._s1.abs().amax((0, -3, -2, -1)), s.abs().amax((0, -3, -2, -1))]
        lost1, lost2 = ((8 * self.theta * self._logit_size(k) * d.p ** (k / 2)).reshape(-1, 1, 1) for k in (1, 2))
        rows = self._s1.permute(1, 2, 3, 4, 0)  # (b, h, i, j, p)
        # Weights: p for mean squares, p‖ṽ‖ for means with the values' lengths.
        roots = [most.sqrt(), (most * self._lengths).sqrt()]
        quadratics: list[list[Tensor]] = [[], [], []]
        for i in range(s.shape[-2]):  # row by row: of all rows together this is the largest tensor of the whole proof
            full = d.full(s[..., i, :]).permute(2, 3, 4, 0, 1)  # (b, h, j, p, p)
            for k, root in enumerate(roots):
                quadratics[k].append(forms.of_rows((root[..., i, :, None, None] * full).flatten(-3, -2)) / 4)
            quadratics[2].append(thin_gram_norm(full) / 2)
        del full
        give_back_memory()
        *quadratic, alone = (torch.stack(row, 2) for row in quadratics)
        linear = [forms.of_rows(root.unsqueeze(-1) * rows) for root in roots]
        self._logits, self._bends = (
            [
                forms.plus(A, forms.unit(A, lost * root.square().sum(-1).sqrt()))
                for A, root in zip(of, roots, strict=True)
            ]
            for of, lost in ((linear, lost1), (quadratic, lost2))
        )
        self._size_s = [
            up(torch.linalg.vector_norm(self._s1, dim=0), 1e-12) + lost1.unsqueeze(-1),
            alone + lost2.unsqueeze(-1),
        ]
        self._spread_s = [forms.root(self._logits[0]), forms.root(self._bends[0])]
        # E[ℓ ṽ x] for numbers x of the keys, and for x_j = (A k̃_j)·y with a vector y.
        seen = forms.of_rows((most.sqrt() * self._lengths).unsqueeze(-1) * rows)
        heavy = (most * self._lengths.square()).sum(-1).sqrt()
        self._seen_logits = forms.plus(seen, forms.unit(seen, lost1 * heavy))
        gram = (self._values @ self._values.mT) * self._query_gram * (p.unsqueeze(-1) * p.unsqueeze(-2))
        largest = (self._by_query * self._seen).amax(-1) + self._query_size
        slack = 8 * lost1 * (self._value_far + self._value_size) * largest
        absolute = (most * self._lengths * self._by_query).unsqueeze(-2) @ rows.abs()
        turned = forms.firm(rows.mT @ (gram @ rows), absolute.square().sum((-2, -1)))
        self._turned_logits = forms.plus(turned, forms.unit(turned, slack))
        first = torch.einsum("bhij,bhijd,bhijp->bhidp", p, self._values, rows)
        self._first_rows = thin_gram_norm(first) + lost1 * (self._value_far + self._value_size)
        self._token_sizes()

    def _token_sizes(self) -> None:
        """Forms of queries, keys and values (through the output map) of every token, degrees 1 and 2."""
        p = self._p
        lost = [8 * self.theta * x * self.directions.p ** (k / 2) for k, x in enumerate(self.largest, 1)]
        maps = {
            "q": (self._q1, self._q2, self._size_q),
            "k": (self._k1, self._k2, self._size_k),
        }
        maps["v"] = (self._v1, self._v2, frobenius_upper(self._w_v) * frobenius_upper(self._w_o))
        self._linear, self._bent_forms, self._size = {}, {}, {}
        for name, (one, two, size) in maps.items():
            metric = self._outer @ self._outer.mT if name == "v" else None
            linear, bent = self._form(one, metric, 1), self._form(two, metric, 2) / 4
            slack1, slack2 = ((x * size).reshape(-1, 1, 1).expand(linear.shape[:-2]) for x in lost)
            self._linear[name] = forms.plus(linear, forms.unit(linear, slack1))
            self._bent_forms[name] = forms.plus(bent, forms.unit(bent, slack2))
            self._size[name] = [forms.root(self._linear[name]), forms.root(self._bent_forms[name])]
        keys = self._k1.movedim(0, -1)  # (b, h, j, k, p)
        keys = keys.unsqueeze(2) - torch.einsum("bhij,bhjkp->bhikp", p, keys).unsqueeze(3)
        crossed = torch.einsum("bhij,bhijd,bhijkp->bhidkp", p, self._values, keys).flatten(-3, -2)
        slack = (lost[0] * self._size_k).reshape(-1, 1, 1) * (self._value_far + self._value_size) * 4
        crossed_form = forms.of_rows(crossed)
        self._crossed = forms.plus(crossed_form, forms.unit(crossed_form, slack))
        # Mean squares over the keys of a row; taking off their mean makes them no larger.
        self._rows = {name: (self._mean(self._linear[name]), self._mean(self._bent_forms[name])) for name in "kv"}
        self._spread = {name: [forms.root(f) for f in self._rows[name]] for name in "kv"}

    def _form(self, jets: Tensor, metric: Tensor | None, k: int) -> Tensor:
        """Of vectors (t, b, h, n, k) in a metric: Σ over all but one index of the directions."""
        tokens = torch.split(jets, 1, -2)  # one by one: all directions of all tokens are large
        rows = (self._of_all(token, k) for token in tokens)
        if metric is None:
            return torch.cat([forms.of_rows(flat.flatten(3, -2)) for flat in rows], 2)
        factor = torch.linalg.qr(self._outer.mT, mode="r").R  # (h, k, k): RᵀR is the metric, up to `off`
        off = frobenius_upper(metric - factor.mT @ factor) + 1e-12 * frobenius_upper(self._outer).square()
        parts = []
        for row in rows:
            flat = torch.einsum("hck,bhnk...->bhnc...", factor, row).flatten(3, -2)
            missed = (off.reshape(-1, 1) * row.flatten(3).square().sum(-1)).sqrt()
            parts.append(up(forms.of_rows(flat), 1e-10) + forms.unit(flat, missed))
        return torch.cat(parts, 2)

    def _of_all(self, jets: Tensor, k: int) -> Tensor:
        """(t, b, h, n, k) along pairs or directions as (b, h, n, k, [p,] p)."""
        return jets.movedim(0, -1) if k == 1 else self.directions.full(jets).permute(2, 3, 4, 5, 1, 0)

    def _mean(self, A: Tensor) -> Tensor:
        """(b, h, j, p, p) to (b, h, i, p, p): the mean over the keys of every row."""
        return torch.einsum("bhij,bhjpq->bhipq", self._most_p, A)

    # -- beyond

    def third(self, F: Tensor, eps: Tensor) -> Tensor:
        e, wide = eps.reshape(-1, 1, 1), forms.wide
        e2 = wide(e.square())
        p = self._most_p
        norm_q, norm_k, norm_v = (wide(x.square().unsqueeze(-1)) for x in (self._norm_q, self._norm_k, self._norm_v))
        F = F.unsqueeze(1).expand(-1, self._h, -1, -1, -1)  # (b, h, n, p, p)
        size = e * forms.root(F)  # (b, h, n)
        # E = δ - J[G], seen by queries, keys and values.
        q_E = forms.plus(self._bent_forms["q"] * e2, norm_q * F)
        F_row = self._mean(F)
        k_E = forms.plus(self._rows["k"][1] * e2, norm_k * F_row)
        v_E = forms.plus(self._rows["v"][1] * e2, norm_v * F_row)
        q_all = forms.plus(self._linear["q"], q_E)
        v_all = forms.plus(self._rows["v"][0], v_E)
        # Logits beyond degree 2: linear in F, and bilinear in what is not of degree 1 in both.
        q_size, q_away = e * self._size["q"][0], e * forms.root(q_E)
        k_key = e * self._size["k"][0], e.square() * self._size["k"][1] + self._norm_k.unsqueeze(-1) * size
        crossed_row = forms.plus(
            wide(q_away.square()) * forms.plus(self._rows["k"][0], k_E), wide(q_size.square()) * k_E
        )
        bilinear = q_away.unsqueeze(-1) * _beside(k_key[0] + k_key[1], p) + q_size.unsqueeze(-1) * _beside(k_key[1], p)
        linear = self._by_query * size.unsqueeze(-1) + self._by_key.unsqueeze(-1) * _beside(size, p)
        away = (bilinear + linear) * self._seen
        t_key = (self._size_s[0] * e.unsqueeze(-1) + self._size_s[1] * e.square().unsqueeze(-1)) * self._seen + away
        row = forms.plus(
            crossed_row, forms.plus(wide(self._by_query_std.square()) * F, wide(self._by_key.square()) * F_row)
        )
        far = wide(self._value_far)  # the mean with weights p‖ṽ‖ is at most the mean with p times the largest length
        b, b_v = (forms.plus(self._bends[k] * e2, x) for k, x in enumerate((row, far * row)))
        t, t_v = (forms.plus(self._logits[k], x) for k, x in enumerate((b, b_v)))
        growth = torch.exp(t_key.amax(-1))
        v_far = (
            _beside(e * self._size["v"][0] + e.square() * self._size["v"][1] + self._norm_v.unsqueeze(-1) * size, p)
            * self._seen
        ).amax(-1)
        # E[t ṽ]: what is bilinear. E[t ν].
        out = forms.product(self._crossed, q_E) + forms.product(wide(self._value_std.square()) * q_all, k_E)
        out = out + forms.product(self._logits[0], v_E) + forms.product(b, v_all)
        # E[a ṽ] - E[ℓ² ṽ]/2, E[a ν], and what the quotient adds.
        out = out + wide(t_key.amax(-1) * growth / 6) * t_v + b_v / 2
        out = out + forms.product(self._logits[1], self._bends[1] * e2) + forms.product(self._turned_logits, F)
        out = out + forms.product(self._seen_logits, forms.plus(crossed_row, wide(self._by_key.square()) * F_row))
        mean = wide(growth / 2) * t
        moved = (
            e * self._first_rows + self._value_std * e * forms.root(b) + e.square() * forms.root(t) * forms.root(v_all)
        )
        moved = moved + e.square() * forms.root(mean).square() * (self._value_far + v_far)
        out = out + wide(v_far + moved) * mean
        return up(out.sum(1), 1e-9)

    def fourth(self, F: Tensor, eps: Tensor) -> Tensor:
        p, e = self._most_p, eps.reshape(-1, 1, 1)
        size = F.unsqueeze(1)  # (b, 1, n): the same for every head
        norm_q, norm_k, norm_v = (x.unsqueeze(-1) for x in (self._norm_q, self._norm_k, self._norm_v))
        q = Graded.of(self._size["q"][0] * e, self._size["q"][1] * e.square(), norm_q * size)
        k, v = (
            Graded.of(self._size[name][0] * e, self._size[name][1] * e.square(), norm * size)
            for name, norm in (("k", norm_k), ("v", norm_v))
        )
        row_size = (p * size.unsqueeze(-2).square()).sum(-1).sqrt()  # (b, h, i)
        k2, v2 = (
            Graded.of(self._spread[name][0] * e, self._spread[name][1] * e.square(), norm * row_size)
            for name, norm in (("k", norm_k), ("v", norm_v))
        )
        k_, v_ = (x.each(lambda y: (_beside(y, p) * self._seen).amax(-1)) for x in (k, v))
        # A logit's part of degree 3: linear in F, and queries of one degree with keys of another.
        one = self._by_query.mul(self._seen).amax(-1) * size + self._by_key * (_beside(size, p) * self._seen).amax(-1)
        two = self._by_query_std * size + self._by_key * row_size
        bilinear_, bilinear2 = q * k_, q * k2
        t_ = Graded.of(
            (self._size_s[0] * self._seen).amax(-1) * e, (self._size_s[1] * self._seen).amax(-1) * e.square(), one
        )
        t2 = Graded.of(self._spread_s[0] * e, self._spread_s[1] * e.square(), two)
        t_, t2 = (
            Graded((*t.parts[:2], t.parts[2] + b.parts[2]), b.rest) for t, b in ((t_, bilinear_), (t2, bilinear2))
        )
        # The series of a = e^t - 1 - t, two factors in mean square: its mean, with ṽ, with ν.
        growth = torch.exp(t_.total)
        far, std = self._value_far, self._value_std
        mean = with_v = with_n = Graded.of(torch.zeros_like(far))
        power = t2
        for m in (2, 3, 4):
            square, flat = power * t2, power * t_
            if m == 4:
                square, flat = square.all_rest().times(growth), flat.all_rest().times(growth)
            c = 1 / math.factorial(m)
            mean = mean + square.times(c)
            with_v = with_v + smaller(square.times(far), flat.times(std)).times(c)
            with_n = with_n + smaller(square * v_, flat * v2).times(c)
            power = power * t_
        straight = smaller(t_.times(far), t2.times(std))
        straight = Graded((torch.minimum(straight.parts[0], self._first_rows * e), *straight.parts[1:]), straight.rest)
        crossed = t2 * v2
        N = straight + crossed + with_v + with_n
        lost = bilinear2.rest * std + crossed.rest + with_v.rest + with_n.rest
        lost = lost + (N * mean).rest + N.total * mean.total.square()
        total: Tensor = lost.sum(1)
        return up(total, 1e-9)

    def twist(self, c: Tensor) -> Tensor:
        m = split_heads(c @ self._w_o.mT, self._h)  # (j, b, h, n, k)
        p, s1 = self._p, self._s1
        g = p * centred(self._p, m @ self._v.mT)  # (j, b, h, i, j)
        seen = torch.einsum("jbhik,tbhlk->jtbhil", m, self._v1)
        by_score = _side_by_side([g.unsqueeze(1) * s1, p * seen]).movedim(2, 1)
        by_value = torch.einsum("tbhil,jbhik->jtbhlk", p * s1, m)
        by_key = torch.einsum("jbhil,tbhik->jtbhlk", g, self._q1)
        by_query = torch.einsum("jbhil,tbhlk->jtbhik", g, self._k1)
        by_token = _side_by_side([by_value, by_key, by_query]).movedim(2, 1)
        return torch.cat([self._twist_along(pairs, by_score, by_token) for pairs in self._some_pairs()], -1)

    def _twist_along(self, pairs: Tensor, by_score: Tensor, by_token: Tensor) -> Tensor:
        """(j, b, p, pairs) for some pairs."""
        i, j, P2 = self.directions.first[pairs], self.directions.second[pairs], self._P2[pairs]
        scores = _side_by_side([P2 - 2 / 3 * self._s1[i] * self._s1[j], P2])
        tokens = _side_by_side([self._v2[pairs], self._k2[pairs], self._q2[pairs]])
        return by_score @ scores.movedim(0, 1).mT + by_token @ tokens.movedim(0, 1).mT

    def forget(self) -> None:
        del self._q2, self._k2, self._v2, self._P2

    # -- rounding

    @property
    def _heads_together(self) -> float:
        """2√h or more: heads side by side against the largest of them, and rows of logits minus their mean."""
        return 2.0 * max(2.0, math.sqrt(self._h))

    def _error(self, k: int) -> Tensor:
        theta, (x1, x2) = self.theta, self.largest
        w_v, w_o = frobenius_upper(self._w_v), frobenius_upper(self._w_o)
        v0 = torch.linalg.vector_norm(self._v, dim=-1).amax((-2, -1))
        v1, v2 = w_v * x1, w_v * x2
        lost1, lost2, lost3 = (theta * self._logit_size(j) for j in (1, 2, 3))
        if k == 1:
            s1 = self._logit_size(1)
            out = theta * (s1 * v0 + v1)
        else:
            s1, s2 = (most + lost for most, lost in zip(self._most, (lost1, lost2), strict=True))
            P2 = 2 * (s1.square() + s2)
            lost_P = 4 * s1 * lost1 + 2 * lost2 + 2 * theta * P2
            out = lost_P * v0 + 2 * lost1 * v1 + theta * (P2 * v0 + 4 * s1 * v1 + 2 * v2)
            if k == 3:
                X = 2 * (self._logit_size(3) + 3 * P2 * s1 + 2 * s1**3)
                lost_X = 2 * (lost3 + 3 * (P2 * lost1 + s1 * lost_P) + 6 * s1.square() * lost1) + 2 * theta * X
                out = lost_X * v0 + 3 * (lost_P * v1 + lost1 * v2)
                out = out + theta * (X * v0 + 6 * P2 * v1 + 6 * s1 * v2)
        straight = theta * abs(self._residual) * self.largest[k - 1] if k < 3 else 0.0
        error: Tensor = self._heads_together * w_o * out + straight
        return error

    def _logit_size(self, k: int) -> Tensor:
        """(b) the largest a logit of degree k can be on absolute values; for k = 3 without the jets of that degree."""
        q0, k0 = (torch.linalg.vector_norm(t, dim=-1).amax((-2, -1)) for t in (self._q, self._k))
        w_q, w_k = self._size_q, self._size_k
        x1, x2 = self.largest
        line = q0 * w_k + k0 * w_q
        return 2 * (line * x1, line * x2 + 2 * w_q * w_k * x1**2, 6 * w_q * w_k * x1 * x2)[k - 1]

    def push_size(self) -> Tensor:
        q0, k0, v0 = (torch.linalg.vector_norm(t, dim=-1).amax((-2, -1)) for t in (self._q, self._k, self._v))
        w_v, w_o = frobenius_upper(self._w_v), frobenius_upper(self._w_o)
        logits = self._heads_together * (q0 * self._size_k + k0 * self._size_q)
        size: Tensor = self.u.shape[-2] ** 0.5 * w_o * (logits * v0 + w_v) + abs(self._residual)
        return size


def _beside(x: Tensor, p: Tensor) -> Tensor:
    """x_j + Σ_j p_ij x_j, (b, h, n) to (b, h, i, j): bounds x_j minus its mean."""
    row = x.unsqueeze(-2)
    return row + (p * row).sum(-1, keepdim=True)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """Parts (…, h, n, k) as one long last axis."""
    return torch.cat([x.flatten(-3, -1) for x in parts], -1)
