"""Attention at some of its rows: its second order, and a rest in which these rows, all heads and keys share a budget.

For a head and a row i let m be a covector at the head's output, E the mean over keys under p_i, g_j = m·(v_j - E[v]),
n_j = m·(Δv_j - E[Δv]), t_j = ℓ_j + b_j the change of the logits minus its mean, ℓ linear and b = q_δ·(k_δj - E[k_δ])
bilinear in δ, and α_j = e^{t_j} - 1 - t_j >= 0. Then (docs/math/forms.md, section 5)

    ⟨m, e⟩ = Q₂ + E[b n] + E[(α - ½t²) g] + E[(ℓb + ½b²) g] + E[α n] - N E[α]/(1 + E[α]),
    Q₂ = E[b g] + E[ℓ n] + ½E[ℓ² g],    N = E[t (g + n)] + E[α (g + n)].

Q₂ is a quadratic form of δ. Of the rest every term is a number times t_j² or |b_j|.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.covered import Covered, Four, SettledHeads, Softened, at_rows, narrow
from holdfast.compositions.forms.local import Problem, Size
from holdfast.compositions.forms.suprema import QuadraticSums, Squares, length, shared, together, worth
from holdfast.linalg.rounding import up
from holdfast.linalg.squarings import gram_norm, thin_gram_norm

_SMALL = 1e-100
_FINE = 256  # up to so many logits every head's row is a block of its own
_SPECTRAL = 256  # dimensions up to which Q₂ is measured in the spectral norm
_CHUNK = 2**22
_JOINT = 2500  # rows of logits, queries and keys that share one budget in every function
_HEAVY = 1e9  # products beyond which bilinear parts of a margin are bounded by numbers


@final
class HeadRows:
    """An attention layer at ũ and at rows i.

    Args:
        soft: its probabilities there.
        rows: first-order rows (…, p) of its queries, keys, values and logits.
        first: their suprema over the region, for scale 1.
        whole: the same for more rows, of which these were chosen; it knows already what all rows have in common.
        chosen: the places of these rows there.
    """

    _norm_q: Tensor  # (h, i)
    _norm_k: Tensor  # (h, i, j) of centred keys
    _product: Tensor  # (h, i, j) of the norm of b
    _value_gram: Tensor  # (h, i, j, k, k) of centred values
    _values: Tensor  # (h, j, k, k) of values
    _value_length: Tensor  # relative to which both are accurate

    def __init__(
        self, soft: Softened, rows: Four, first: Four, whole: HeadRows | None = None, chosen: Tensor | None = None
    ) -> None:
        self.soft, self._first, self._whole, self._chosen = soft, first, whole, chosen
        self._Q, self._K, self._V, self._L = self.rows = rows
        self._second: dict[tuple[int, int], Tensor] = {}
        if whole is None:
            self._measure()
        else:
            for name in ("_norm_q", "_norm_k", "_product", "_value_gram"):
                setattr(self, name, getattr(whole, name)[:, chosen])
            self._values, self._value_length = whole._values, whole._value_length
        self._value_lengths = length(self._V, 2)
        h, count, n, width = self._L.shape
        self._logit_gram = self._L @ self._L.mT  # (h, i, j, j')
        self._logit_length = length(self._L, 1)
        flat = self._L.reshape(-1, width)
        heads = torch.arange(h * count) if len(flat) <= _FINE else torch.arange(count).repeat(h)
        self._logits = Squares(flat, heads.repeat_interleave(n))

    def at(self, chosen: Tensor) -> HeadRows:
        """The same for some of the rows."""
        return HeadRows(self.soft.at(chosen), at_rows(self.rows, chosen), at_rows(self._first, chosen), self, chosen)

    def of_rows(self, parts: Four) -> Four:
        """Of numbers of all rows' functions those of these rows."""
        return parts if self._chosen is None else at_rows(parts, self._chosen)

    def _measure(self) -> None:
        """Lengths, norms and inner products of centred keys and values, from those of keys and values."""
        p, seen, theta = self.soft.p, self.soft.seen, self.soft.theta
        h, count, n, _ = self._L.shape
        k = self._Q.shape[2]
        largest_k, largest_v = length(self._K, 2).amax(), length(self._V, 2).amax()
        keys, values = self._K.flatten(1, 2), self._V.flatten(1, 2)
        inner_k = _centred_own((keys @ keys.mT).reshape(h, n, k, n, k), p, seen)  # (h, i, j, k, m)
        mixed = (self._Q.flatten(1, 2) @ keys.mT).reshape(h, count, k, n, k).transpose(2, 3)
        mixed = (mixed - torch.einsum("hij,hijkm->hikm", p, mixed).unsqueeze(2)) * seen[..., None, None]
        error = 16 * theta * largest_k.square()
        squares = torch.einsum("hijkk->hij", inner_k).clamp(min=0.0)
        self._centred_length = up((squares + k * error).sqrt(), 1e-12)
        self._norm_q = thin_gram_norm(self._Q, 3)
        self._norm_k = gram_norm(inner_k, error.expand(inner_k.shape[:-2]), 3)
        # ‖½(QᵀK + KᵀQ)‖² is at most (‖Q‖²‖K‖² + ‖QKᵀ‖²)/2 in Frobenius norms of products: ⟨QᵀK, KᵀQ⟩ = tr(QKᵀQKᵀ).
        inner_q = (self._Q @ self._Q.mT).unsqueeze(2)
        square = ((inner_q * inner_k).sum((-2, -1)) + (mixed * mixed.mT).sum((-2, -1))) / 2
        sizes = length(self._Q, 2).unsqueeze(-1) * (self._centred_length + largest_k)
        self._product = up((square.clamp(min=0.0) + 64 * theta * sizes.square()).sqrt(), 1e-9)
        self._value_gram = _centred_own((values @ values.mT).reshape(h, n, k, n, k), p, seen)
        self._values, self._value_length = self._V @ self._V.mT, 4 * largest_v.square()

    @cached_property
    def _key_inner(self) -> Tensor | None:
        """(h, i, j, l) squares of the norms of K_j K_lᵀ, keys centred; None where the keys' rows are gone."""
        if self._whole is not None:
            inner: Tensor | None = self._whole._key_inner
            return None if inner is None else inner[:, self._chosen]
        p, seen, keys = self.soft.p, self.soft.seen, self._K.flatten(1, 2)
        h, n, k, _ = self._K.shape
        gram, error = (keys @ keys.mT).reshape(h, n, k, n, k), 16 * self.soft.theta * length(self._K, 2).amax().square()
        rows = [_centred_gram(gram, p[:, i], seen[:, i]) for i in range(p.shape[1])]
        return up(torch.stack([torch.linalg.vector_norm(row, dim=(2, 4)) + error for row in rows], 1).square(), 1e-9)

    def centred_keys(self, i: int) -> Tensor:
        """(h, j, k, p) the rows of keys minus their mean, as row i sees them."""
        p, seen = self.soft.p[:, i], self.soft.seen[:, i]
        return (self._K - torch.einsum("hj,hjkp->hkp", p, self._K).unsqueeze(1)) * seen[..., None, None]

    def _all_centred(self) -> Tensor:
        """(h i j k, p) for all rows."""
        every = torch.stack([self.centred_keys(i) for i in range(self._L.shape[1])], 1)
        return every.flatten(0, 3)

    @cached_property
    def _joint(self) -> Squares | None:
        """Logits, queries and centred keys together, where they are few."""
        h, count, n, width = self._L.shape
        k, flat = self._Q.shape[2], self._L.reshape(-1, width)
        if (self._whole is not None and self._whole._joint is None) or len(flat) + h * count * (n + 1) * k > _JOINT:
            return None
        rows = torch.cat([flat, self._Q.reshape(-1, width), self._all_centred()])
        forms = torch.arange(len(flat)), len(flat) + torch.arange(h * count * (n + 1)).repeat_interleave(k)
        parts = [
            torch.arange(h * count).repeat_interleave(n),
            torch.arange(h * count),
            torch.arange(h * count).repeat_interleave(n),
        ]
        blocks = torch.cat([part + i * h * count for i, part in enumerate(parts)])
        return Squares(rows, blocks, torch.cat(forms))

    @cached_property
    def _bilinear(self) -> tuple[QuadraticSums, QuadraticSums, QuadraticSums]:
        """Inner products of the parts of Q₂ as quadratic forms: of p g for E[b g] and ½E[ℓ²g], and of m for E[ℓ n]."""
        h, rows, n, _ = self._L.shape
        k, p = self._Q.shape[2], self.soft.p
        if self._whole is not None and self._chosen is not None:
            crossed, squared, carried = self._whole._bilinear
            places = torch.arange(h * self._whole._L.shape[1]).reshape(h, -1)[:, self._chosen].flatten().unsqueeze(-1)
            logits, outputs = ((places * size + torch.arange(size)).flatten() for size in (n, k))
            return crossed.at(logits), squared.at(logits), carried.at(outputs)
        q, keys, values, logits = (x.flatten(0, 2) for x in (self._Q, self._K, self._V, self._L))
        QQ = (q @ q.mT).reshape(h, rows, k, h, rows, k).permute(0, 1, 3, 4, 2, 5).reshape(h, rows, h, rows, k * k)
        KK = (keys @ keys.mT).reshape(h, n, k, h, n, k).permute(0, 1, 3, 4, 2, 5).reshape(h, n, h, n, k * k)
        LL = (logits @ logits.mT).reshape(h, rows, n, h, rows, n)
        VV = (values @ values.mT).reshape(h, n, k, h, n, k)
        # E[b g]: Σ_ij p g_ij Σ_a Q_ia ⊗ K_ja.
        products = torch.einsum("aibjx,akblx->aikbjl", QQ, KK)
        size = length(self._Q, 2).unsqueeze(-1) * length(self._K, 2).unsqueeze(1)
        crossed = QuadraticSums(products.reshape(h * rows * n, -1), size.flatten())
        # ½E[ℓ²g]: the squares of logits.
        squares = self._logit_length.square().flatten() / 2
        squared = QuadraticSums(LL.square().reshape(h * rows * n, -1) / 4, squares)
        # E[ℓ n]: Σ_ij p ℓ_ij ⊗ Σ_a m_a V_ja, linear in m.
        weighted = p.reshape(h, rows, n, 1, 1, 1) * LL * p.reshape(1, 1, 1, h, rows, n)
        mixed = torch.einsum("aikbjl,akxbly->aixbjy", weighted, VV)
        size = torch.einsum("hij,hjk->hik", p * self._logit_length, length(self._V, 1))
        return crossed, squared, QuadraticSums(mixed.reshape(h * rows * k, -1), size.flatten())

    @cached_property
    def mean_norm(self) -> Tensor:
        """(h, i) the norm of all logits of a row, weighted with the roots of p."""
        return up(thin_gram_norm(self._L * self.soft.most.sqrt().unsqueeze(-1), 3), 1e-9)

    @cached_property
    def value_norms(self) -> Tensor:
        """(h, i, j) of the rows of centred values."""
        error = (16 * self.soft.theta * self._value_length).expand(self._value_gram.shape[:-2])
        return gram_norm(self._value_gram, error, 4)

    def forget(self) -> None:
        """Drops the first-order rows of a ball: sums of suprema do without; K rows of length 1 have a norm of √K."""
        nothing = self._L.new_zeros(0)
        self._together = [(x.reshape(-1), x.reshape(-1), up(x.numel() ** 0.5, 1e-12)) for x in self._first]
        self._Q, self._K, self._V, self._L = self.rows = (nothing,) * 4
        self._value_gram = nothing
        self._key_inner = None
        self._logits.forget()

    @cached_property
    def _together(self) -> list[tuple[Tensor, Tensor, float]]:
        """Of queries, keys, values and logits: suprema, lengths, and the norm of all rows of length 1."""
        parts = [(x.reshape(-1), y.reshape(-1, y.shape[-1])) for x, y in zip(self._first, self.rows, strict=True)]
        if self._whole is None:
            return [(x, *together(y)) for x, y in parts]
        (q, by_q), (logits, by_l) = parts[0], parts[3]
        return [(q, *together(by_q)), *self._whole._together[1:3], (logits, *together(by_l))]

    # -- covectors

    def cover(self, m: Tensor, size: Tensor) -> Covered:
        """What does not depend on the scale, for covectors m (S, h, i, k) with lengths of at most `size` (S, i)."""
        p, seen, theta, value = self.soft.p, self.soft.seen, self.soft.theta, self.soft.value
        wide = size[:, None, :, None]
        g = self._gaps(m)
        most_g = (g.abs() + 8 * theta * wide * value) * seen
        n = (_quadratic(m, self._value_gram) + 8 * theta * wide.square() * self._value_length).sqrt()
        values = self._values.unsqueeze(1).expand_as(self._value_gram)
        spread = _quadratic(m, values) + 8 * theta * wide.square() * self._value_lengths.square().unsqueeze(1)
        square = _quadratic(p * g, self._logit_gram.unsqueeze(2)).squeeze(-1)
        weighted = (p * self._logit_length).sum(-1)
        slack = ((p * most_g * self._logit_length).sum(-1) + size.unsqueeze(1) * value * weighted).square()
        slope = (square + 8 * theta * slack).sqrt()
        error = up(16 * theta * (size.unsqueeze(1) * self.second_size()).sum((1, 2)), 1e-9)
        unknown = torch.full_like(error, torch.nan)
        most_g, n, spread = (narrow(up(x, 1e-9)) for x in (most_g, n * seen, spread.sqrt()))
        return Covered(m, size, most_g, n, spread, up(slope, 1e-9), unknown, error)

    def _gaps(self, m: Tensor) -> Tensor:
        """The numbers g (S, h, i, j)."""
        gaps: Tensor = torch.einsum("shik,hijk->shij", m, self.soft.spread)
        return gaps

    def bent(self, covered: Covered, index: Tensor) -> Tensor:
        """Bounds of |Q₂| on the unit ball for some of a batch; what is known is kept."""
        unknown = index[covered.bent[index].isnan()]
        for part in torch.split(unknown, max(1, _CHUNK // self._L[..., 0].numel())):
            if len(part):
                m = covered.m[part]
                crossed, squared, carried = self._bilinear
                pg = (self.soft.p * self._gaps(m)).flatten(1)
                most = crossed.most(pg) + squared.most(pg) + carried.most(m.flatten(1)) + covered.error[part]
                covered.bent[part] = up(most, 1e-9)
        if len(unknown) and self._L.shape[-1] <= _SPECTRAL:
            self._sharpen(covered, unknown)
        return covered.bent[index]

    def _sharpen(self, covered: Covered, members: Tensor) -> None:
        """The spectral norms of the forms Q₂, where these are small matrices."""
        of_members = covered.some(members)
        for index, chosen in of_members.groups():
            for part in torch.split(index, _CHUNK // self._L.shape[-1] ** 2):
                left, right = self.pair(of_members, part, chosen, self.rows)
                form = left.mT @ right
                error = 2 * of_members.error[part] + 1e-300
                norms = up(gram_norm((form + form.mT) / 2, error, 2).square(), 1e-9)
                covered.bent[members[part]] = torch.minimum(covered.bent[members[part]], norms)

    def second_size(self) -> Tensor:
        """(h, i) Q₂ on absolute values, for ‖m‖ = 1."""
        q, k, v = (length(x, 2) for x in (self._Q, self._K, self._V))
        keys, logits = k.amax(-1, keepdim=True), self._logit_length.amax(-1)
        size: Tensor = self.soft.value * (2 * q * keys + logits.square()) + logits * v.amax(-1, keepdim=True)
        return size

    def pair(self, covered: Covered, index: Tensor, chosen: Tensor, parts: Four) -> tuple[Tensor, Tensor]:
        """Q₂ = Σ_r left_r right_r for the chosen rows: (R, w) for the whole batch and (S, R, w)."""
        Q, K, V, L = parts
        m = covered.m[index][:, :, chosen]
        p, spread = self.soft.p[:, chosen], self.soft.spread[:, chosen]
        g = torch.einsum("shik,hijk->shij", m, spread)
        left = torch.cat([Q[:, chosen].flatten(0, 2), L[:, chosen].flatten(0, 2)])
        keys = torch.einsum("shij,hjkp->shikp", p * g, K).flatten(1, 3)
        values = torch.einsum("shik,hjkp->shijp", m, V) + g.unsqueeze(-1) * L[:, chosen] / 2
        return left, torch.cat([keys, (p.unsqueeze(-1) * values).flatten(1, 3)], 1)

    def turning_size(self, covered: Covered, index: Tensor, size: float) -> Tensor:
        """(S) a bound of the turning on absolute values, for rounding."""
        q, k, v, logits = (float(length(x.reshape(-1, x.shape[-1]), 2)) for x in self.rows)
        return covered.size[index].sum(-1) * size * (self.soft.value * (q + k + logits) + v + logits)

    # -- at a scale

    @property
    def settled(self) -> SettledHeads:
        """What is known at the last scale."""
        suprema = self._logit, self._rest_l, self._most_b, self._rest_b, self._tau, self._beyond
        return SettledHeads(self._size.radius, self._rests, *suprema)

    def settle(self, size: Size, rests: Four, tiny: Four, bending: Tensor | None) -> Tensor:
        """Takes notice of the scale and of rests; (h, i) bounds of how far a head's rows move."""
        self._size, self._rests, self._tiny = size, rests, tiny
        q, k, v, logits = rests
        p, seen, r = self.soft.most, self.soft.seen, size.radius
        self._rest_l = logits * seen
        first = [x * size.scale for x in self._first]
        rest_q = torch.linalg.vector_norm(q, dim=-1)
        beside = torch.einsum("hij,hjk->hik", p, k).unsqueeze(2)
        rest_centred = torch.linalg.vector_norm(k.unsqueeze(1) + beside, dim=-1) * seen
        self._query = r * self._norm_q
        self._key = r * self._norm_k * seen
        # b to first order, and what rests add to it: by norms, or coordinate by coordinate and with turned covectors.
        rest_b = rest_q.unsqueeze(-1) * (self._key + rest_centred) + self._query.unsqueeze(-1) * rest_centred
        if bending is not None:
            tiny_q, tiny_k = (torch.linalg.vector_norm(x, dim=-1) for x in tiny[:2])
            minute = 2 * tiny_k.amax() * self._query.unsqueeze(-1) + tiny_q.unsqueeze(-1) * self._key
            both = (q.unsqueeze(2) * (k.unsqueeze(1) + beside)).sum(-1)
            rest_b = torch.minimum(rest_b, bending.reshape(rest_b.shape) + both + minute)
        self._rest_b = up(rest_b * seen, 1e-10)
        self._first_b = torch.minimum(self._query.unsqueeze(-1) * self._key, r * r * self._product) * seen
        self._most_b = up(self._first_b + self._rest_b, 1e-10)
        self._logit = first[3] * seen
        self._most_l = self._logit + self._rest_l
        self._tau = up(self._most_l + self._most_b, 1e-10)
        tau = self._tau.clamp(min=1e-6)
        # 2(e^τ - 1 - τ)/τ² - 1 = τ/3 + τ²/12 + … ; the quotient loses digits for small τ, the series does not.
        series = tau / 3 * (1 + tau / 4 * (1 + tau / 5 * tau.exp()))
        quotient = 2 * (torch.expm1(tau) - tau) / tau.square() - 1 + 1e-9
        self._beyond = up(torch.where(tau < 0.1, series, torch.minimum(series, quotient)), 1e-10)
        most_v = torch.linalg.vector_norm(first[2] + v, dim=-1).amax()  # over heads and tokens
        # Every head's row moves by E[Δv] + N/(1 + E[α]) with ‖N‖ <= E[|t| + α] · 2 max‖v + Δv‖, or from mean to mean.
        value = self.soft.value
        turned = (p * (self._tau + (1 + self._beyond) / 2 * self._tau.square())).sum(-1) * 2 * (value + most_v)
        moved: Tensor = torch.minimum(turned, torch.full_like(turned, 2 * value)) + most_v
        return moved

    def range(self, covered: Covered, enough: Tensor | None, bent: bool) -> Tensor:
        """(S) bounds of |⟨m, e⟩| for covectors that do not vary, with or without Q₂."""
        r, one = self._size.radius, covered.some(slice(None))
        on_l, on_b = self._weights(one)
        spread = on_l * (1 + self._rest_l / self._logit.clamp(min=_SMALL))
        form = self._logits.most(spread.flatten(1), r, self._logit.flatten(), enough) + self._bent_numbers(on_b)
        if len(large := worth(form, enough)) and self._joint is not None:
            on_q, on_k, number = self._apart(on_b[large])
            weights = torch.cat([spread[large].flatten(1), on_q.flatten(1), on_k.flatten(1)], 1)
            suprema = torch.cat([x.flatten() for x in (self._logit, self._query, self._key)])
            form[large] = torch.minimum(form[large], self._joint.most(weights, r, suprema) + number)
        most = form + self._numbers(one, on_l)
        if bent:
            second = self._term_by_term(one)
            large = worth(second, enough)
            if len(large):
                second[large] = torch.minimum(second[large], self.bent(covered, large) * (r * r))
            most = most + second
        return up(most, 1e-9)

    def _term_by_term(self, one: Covered) -> Tensor:
        """(S) bounds of |Q₂|, which norms may make smaller."""
        r, p = self._size.radius, self.soft.most
        by_g, by_n = p * (self._first_b + self._logit.square() / 2), p * self._logit * r
        return up((by_g * one.most_g + by_n * one.n).sum((1, 2, 3)) + one.error * (r * r), 1e-9)

    def _weights(self, one: Covered) -> tuple[Tensor, Tensor]:
        """Weights of the rest on ℓ_j² and on |b_j|, (S, h, i, j)."""
        p, seen, g, r = self.soft.most, self.soft.seen, one.most_g, self._size.radius
        beyond, b, linear, tau = self._beyond, self._most_b, self._most_l, self._tau
        rest = torch.einsum("shik,hjk->shij", one.m.abs(), self._rests[2])
        n = (r * one.n + rest + (p * rest).sum(-1, keepdim=True)) * seen
        N = r * one.slope + (p * (self._rest_l + b) * g).sum(-1) + (p * tau * n).sum(-1)
        mean = (p * (1 + beyond) / 2 * tau.square()).sum(-1)
        N = N + mean * (g + n).amax(-1)
        core = p / 2 * (beyond * g + (1 + beyond) * (n + N.unsqueeze(-1)))
        share = b / linear.clamp(min=_SMALL)  # t² <= (1 + κ)ℓ² + (1 + 1/κ)b²
        on_l = core * (1 + share)
        on_b = core * (b + linear) + p * (g * (linear + b / 2) + n)
        return up(on_l, 1e-9), up(on_b, 1e-9)

    def _numbers(self, one: Covered, on_l: Tensor) -> Tensor:
        """(S) what the rests of first-order functions do to Q₂ and to ℓ²; with products of both, unless they turn."""
        if not any(bool((x != 0).any()) for x in self._rests):
            return torch.zeros(len(on_l), dtype=torch.float64)
        own = (on_l * self._rest_l * (self._rest_l + self._logit)).sum((1, 2, 3))
        return up(own + self.crossed(one, self._tiny if one.turned else self._rests), 1e-9)

    def crossed(self, one: Covered, rests: Four) -> Tensor:
        """(S) what Q₂ makes of all rests among each other, and of products of first order and these rests."""
        p, g, seen = self.soft.most, one.most_g, self.soft.seen
        rest_q, rest_k, rest_v, _ = self._rests
        beside_v = torch.einsum("shik,hjk->shij", one.m.abs(), rest_v) * seen
        beside_k = torch.einsum("shij,hjk->shik", p * g, rest_k)
        own = (rest_q * beside_k).sum((1, 2, 3))
        own = own + (p * self._rest_l * (beside_v + g * self._rest_l / 2)).sum((1, 2, 3))
        return up(own + self._size.radius * self._products(one, rests), 1e-9)

    def _products(self, one: Covered, rests: Four) -> Tensor:
        """(S) the products of first order and these rests in Q₂, for radius 1."""
        p, g, seen = self.soft.most, one.most_g, self.soft.seen
        q, k, v, logits = rests
        by_q, by_k, by_v, by_l = self._together
        rest_v = torch.einsum("shik,hjk->shij", one.m.abs(), v) * seen
        mixed = shared(torch.einsum("shij,hjk->shik", p * g, k).flatten(1), *by_q)
        mixed = mixed + shared((p * (rest_v + g * logits * seen)).flatten(1), *by_l)
        mixed = mixed + shared(torch.einsum("shij,hik->shjk", p * g, q).flatten(1), *by_k)
        in_values = shared(torch.einsum("hij,shik->shjk", p * logits * seen, one.m.abs()).flatten(1), *by_v)
        return mixed + torch.minimum(in_values, (p * logits * seen * one.n_spread).sum((1, 2, 3)))

    def take(self, covered: Covered, s: int, problem: Problem) -> None:
        """Takes a lower bound of ⟨m_s, e⟩ into the problem."""
        one = covered.some(slice(s, s + 1))
        second, width = float(self._term_by_term(one)), self._L.shape[-1]
        if second <= problem.slight:
            problem.lose("second order", second)
        else:
            problem.add("second order", self._second_order(one, (id(covered), s)), 2 * float(one.error))
        on_l, on_b = self._weights(one)
        weight = (on_l * (1 + self._rest_l / self._logit.clamp(min=_SMALL))).flatten()
        _take_squares(problem, self._L.reshape(-1, width), weight, self._logit.flatten())
        number = self._bent_numbers(on_b)
        if self._product.numel() * self._Q.shape[2] * width**2 <= _HEAVY and float(number) > problem.slight:
            on_q, on_k, number = self._apart(on_b)
            Q, K, k = self._Q.reshape(-1, width), self._all_centred(), self._Q.shape[2]
            for rows, on, reach in ((Q, on_q, self._query), (K, on_k, self._key)):
                _take_squares(problem, rows, *(x.flatten().repeat_interleave(k) for x in (on, reach)))
        problem.lose("carried rests", up(float(self._numbers(one, on_l) + number), 1e-9))

    def _second_order(self, one: Covered, key: tuple[int, int]) -> Tensor:
        """The matrix of Q₂, which does not depend on the scale."""
        if key not in self._second:
            left, right = self.pair(one, torch.arange(1), torch.arange(self._L.shape[1]), self.rows)
            form = left.mT @ right[0]
            self._second[key] = (form + form.mT) / 2
        return self._second[key]

    def _apart(self, on_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ w_ij |b_ij| by weights on ‖q_i‖² (S, h, i) and ‖k_ij‖² (S, h, i, j) to first order, and numbers (S).

        |b_ij| <= (κ‖q_i‖² + ‖k_ij‖²/κ)/2, where k_ij is minus its mean.
        """
        ratio = self._key.amax(-1) / self._query.clamp(min=_SMALL)  # (h, i)
        usable = (self._query > 0) & (ratio > 0)
        on_q = on_b.sum(-1) * ratio / 2 * usable
        on_k = on_b / (2 * ratio.clamp(min=_SMALL)).unsqueeze(-1) * usable.unsqueeze(-1)
        number = (on_b * self._rest_b).sum((-3, -2, -1))
        return up(on_q, 1e-9), up(on_k, 1e-9), up(number, 1e-9)

    def _bent_numbers(self, on_b: Tensor) -> Tensor:
        """(S) bounds of Σ w_ij |b_ij|: key by key, or the keys of a row together."""
        apart = (on_b * self._most_b).sum(-1)
        if self._key_inner is None:
            plain: Tensor = up(apart.sum((1, 2)), 1e-9)
            return plain
        keys = torch.einsum("shij,hijl,shil->shi", on_b, self._key_inner, on_b).clamp(min=0.0) ** 0.25
        joint = self._query * on_b.sum(-1).sqrt() * self._size.radius * keys + (on_b * self._rest_b).sum(-1)
        return up(torch.minimum(apart, joint).sum((1, 2)), 1e-9)


def _centred_own(gram: Tensor, p: Tensor, seen: Tensor) -> Tensor:
    """Inner products (h, i, j, k, m) of vectors of one key minus their mean, from those (h, j, k, l, m) of all."""
    h, n, k, _, _ = gram.shape
    mean = (p @ gram.reshape(h, n, -1)).reshape(h, -1, k, n, k).transpose(2, 3)  # E with every one
    twice = torch.einsum("hil,hilkm->hikm", p, mean).unsqueeze(2)
    own = torch.einsum("hjkjm->hjkm", gram).unsqueeze(1)
    centred: Tensor = (own - mean - mean.mT + twice) * seen[..., None, None]
    return centred


def _centred_gram(gram: Tensor, p: Tensor, seen: Tensor) -> Tensor:
    """Inner products (h, j, k, l, m) of vectors minus their mean, from those of the vectors; p and seen are (h, j)."""
    mean = torch.einsum("hj,hjklm->hklm", p, gram)  # E with every one
    twice = torch.einsum("hl,hklm->hkm", p, mean)
    centred = gram - mean.unsqueeze(1)
    centred -= mean.permute(0, 2, 3, 1).unsqueeze(3)
    centred += twice[:, None, :, None, :]
    if not bool(seen.all()):
        centred *= seen[:, :, None, None, None] * seen[:, None, None, :, None]
    return centred


def _take_squares(problem: Problem, rows: Tensor, weights: Tensor, reach: Tensor) -> None:
    """Takes Σ_k w_k (x_k·b)² off, |x_k·b| <= reach_k."""
    rounding = 1e-9 * weights * torch.linalg.vector_norm(rows, dim=-1).square()
    problem.add_squares(rows, {"attention rest": -weights}, rounding, up(reach, 1e-12))


def _quadratic(m: Tensor, grams: Tensor) -> Tensor:
    """m_k G_jkl m_l for m (S, h, i, k) and grams (h, i, j, k, l), (S, h, i, j): row by row, where m does not vanish."""
    (S, h, rows, k), keys = m.shape, grams.shape[2]
    squares = torch.zeros(S, h, rows, keys, dtype=torch.float64)
    for i in range(rows):
        seen = (m[:, :, i] != 0).any(-1).any(-1).nonzero().squeeze(-1)
        part = m[seen, :, i].movedim(1, 0)  # (h, S', k)
        turned = (part @ grams[:, i].permute(0, 2, 1, 3).reshape(h, k, -1)).reshape(h, len(seen), keys, k)
        squares[seen, :, i] = (turned @ part.unsqueeze(-1)).squeeze(-1).movedim(0, 1)
    return squares.clamp(min=0.0)
