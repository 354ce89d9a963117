"""Softmax attention: its exact second order, and a third-order rest in which all rows, heads and keys share one budget.

For a head and a row i let m be a covector at the head's output, E the mean over keys under p_i, g_j = m·(v_j - E[v]),
n_j = m·(Δv_j - E[Δv]), t_j = ℓ_j + b_j the change of the logits less its mean, ℓ linear and b = q_δ·(k_δj - E[k_δ])
bilinear in δ, and α_j = e^{t_j} - 1 - t_j >= 0. Then (docs/math/forms.md, section 5)

    ⟨m, e⟩ = Q₂ + E[b n] + E[(α - ½t²) g] + E[(ℓb + ½b²) g] + E[α n] - N E[α]/(1 + E[α]),
    Q₂ = E[b g] + E[ℓ n] + ½E[ℓ² g],    N = E[t (g + n)] + E[α (g + n)].

Q₂ is a quadratic form of δ. Of the rest every term is a number times t_j² or |b_j|.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attention.layer import project
from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius_upper
from holdfast.linalg.squarings import gram_norm, thin_gram_norm
from holdfast.network.attention import Attention
from holdfast.network.forms.local import THETA, Local, Problem, Size
from holdfast.network.forms.suprema import Quadratic, Squares, shared

_SMALL = 1e-100
_FINE = 256  # up to so many logits every head's row is a block of its own
_SPECTRAL = 256  # dimensions up to which Q₂ is measured in the spectral norm
_CHUNK = 2**22
_JOINT = 2500  # rows of logits, queries and keys that share one budget in every function
_HEAVY = 1e9  # products beyond which bilinear parts of a margin are bounded by numbers


@dataclass
class Rows:
    """Covectors (S) at the heads' outputs: m (S, h, i, k), g, sup|n| and |E[ℓ g]| for scale 1, and the size of Q₂."""

    m: Tensor
    size: Tensor  # (S, i) bounds of ‖m‖ over all heads, for rounding
    g: Tensor
    most_g: Tensor
    n: Tensor
    n_spread: Tensor
    slope: Tensor
    bent: Tensor
    turned: bool = False  # whether the products of first order and rests in Q₂ are carried as turned covectors

    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Members of the batch that concern the same rows, and these rows."""
        patterns, which = torch.unique(self.size != 0, dim=0, return_inverse=True)
        found = [((which == i).nonzero().squeeze(-1), row.nonzero().squeeze(-1)) for i, row in enumerate(patterns)]
        return [(index, rows) for index, rows in found if len(rows)]

    def some(self, index: slice) -> Rows:
        """A part of the batch."""
        parts: dict[str, Any] = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **parts)


@final
class Softmax(Local):
    """An attention layer at ũ; h heads, rows i that matter, keys j."""

    def __init__(self, piece: Attention, u: Tensor) -> None:
        layer, ball = piece.layer, Ball.exact(u)
        self._piece, self.u, self._h, self._residual = piece, u, layer.h, layer.residual
        self._at = piece.at(ball.unsqueeze(0))
        w = layer.weights(ball)
        q, k = project(ball, w.w_q, w.b_q) * layer.scale, project(ball, w.w_k, w.b_k)
        v = project(ball, w.w_v, w.b_v)
        # A common row of keys or values drops out of everything; without it numbers are smaller.
        k, v = k - k.mid.mean(-2, keepdim=True), v - v.mid.mean(-2, keepdim=True)
        p = layer.probabilities(q @ k.mT)
        w_q = w.w_q * layer.scale
        self._theta = THETA + 16 * sum(map(_relative, (q, k, v, w_q, w.w_k, w.w_v, w.w_o)))
        self._theta += 16 * float(p.rad.sum(-1).amax())
        self._w_q, self._w_k, self._w_v, self._w_o = w_q.mid, w.w_k.mid, w.w_v.mid, w.w_o.mid  # (h, d, k), (h, k, c)
        self._q, self._k, self._v, self._p = q.mid, k.mid, v.mid, p.mid
        self._seen = ((p.mid != 0) | (p.rad != 0)).double()
        self._outer = float(frobenius_upper(self._w_o, (-3, -2, -1)))
        self._value = float(torch.linalg.vector_norm(self._v, dim=-1).amax()) * (1 + 1e-12)

    def pull(self, C: Tensor) -> Ball:
        back = self._at.pull(Ball.exact(C.unsqueeze(1)))
        return back.squeeze(1)

    def covectors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Queries of the rows, keys, values and centred logits."""
        self._rows = tokens
        n, d = self.u.shape
        h, _, k = self._w_q.shape
        rows = len(tokens)
        self._shapes = [(h, rows, k), (h, n, k), (h, n, k), (h, rows, n)]
        p = self._p[:, tokens]
        self._pr, self._sr = p, self._seen[:, tokens]
        centred_k = self._k.unsqueeze(1) - (p @ self._k).unsqueeze(2)  # (h, i, j, k)
        self._spread = (self._v.unsqueeze(1) - (p @ self._v).unsqueeze(2)) * self._sr.unsqueeze(-1)
        q = torch.zeros(h, rows, k, n, d, dtype=torch.float64)
        q[:, torch.arange(rows), :, tokens] = self._w_q.mT.unsqueeze(0)
        keys, values = torch.zeros(2, h, n, k, n, d, dtype=torch.float64)
        every = torch.arange(n)
        keys[:, every, :, every] = self._w_k.mT.unsqueeze(0)
        values[:, every, :, every] = self._w_v.mT.unsqueeze(0)
        by_key = torch.einsum("hik,hdk->hid", self._q[:, tokens], self._w_k)
        apart = torch.eye(n, dtype=torch.float64) - p.unsqueeze(2)  # (h, i, j, j')
        logits = apart.unsqueeze(-1) * by_key[:, :, None, None, :]
        by_query = torch.einsum("hijk,hdk->hijd", centred_k, self._w_q)
        logits[:, torch.arange(rows), :, tokens] += by_query.movedim(1, 0)
        C = torch.cat([part.reshape(-1, n, d) for part in (q, keys, values, logits)])
        sizes = [float(frobenius_upper(w, (-3, -2, -1))) for w in (self._w_q, self._w_k, self._w_v)]
        largest_q, largest_k = (float(torch.linalg.vector_norm(x, dim=-1).amax()) for x in (self._q, self._k))
        sizes.append(2 * sizes[0] * largest_k + 2 * sizes[1] * largest_q)
        counts = [part.numel() for part in (q[..., 0, 0], keys[..., 0, 0], values[..., 0, 0], logits[..., 0, 0])]
        error = torch.cat(
            [torch.full((c,), 4 * self._theta * s, dtype=torch.float64) for c, s in zip(counts, sizes, strict=True)]
        )
        return C, error

    def _split(self, x: Tensor) -> list[Tensor]:
        counts = [a * b * c for a, b, c in self._shapes]
        return [
            part.reshape(*shape, *x.shape[1:]) for part, shape in zip(torch.split(x, counts), self._shapes, strict=True)
        ]

    def place(self, X: Tensor, first: Tensor) -> None:
        self.each = torch.zeros(0, dtype=torch.float64)
        self.bending: Tensor | None = None
        self._Q, self._K, self._V, self._L = self._split(X)  # (h, i, k, p), (h, j, k, p), …, (h, i, j, p)
        self._first = self._split(first)
        h, rows, n, width = self._L.shape
        p, theta = self._pr, self._theta
        K = self._K.unsqueeze(1) - torch.einsum("hij,hjkp->hikp", p, self._K).unsqueeze(2)  # (h, i, j, k, p)
        self._centred_K = K * self._sr[..., None, None]
        self._centred_length = _length(self._centred_K, 2) + theta * _length(self._K, 2).amax()
        inner = torch.einsum("hijkp,hilmp->hijlkm", self._centred_K, self._centred_K).square().sum((-2, -1))
        lengths = self._centred_length.square()
        self._key_inner = inner * (1 + 1e-9) + theta * lengths.unsqueeze(-1) * lengths.unsqueeze(-2)
        self._norm_q, self._norm_k = _spectral(self._Q), _spectral(self._centred_K) + theta * _length(self._K, 2).amax()
        flat_q, flat_k = self._Q.unsqueeze(2).expand_as(self._centred_K), self._centred_K
        # ‖½(QᵀK + KᵀQ)‖² is at most (‖Q‖²‖K‖² + ‖QKᵀ‖²)/2 in Frobenius norms of products: ⟨QᵀK, KᵀQ⟩ = tr(QKᵀQKᵀ).
        inner_q, inner_k, mixed = flat_q @ flat_q.mT, flat_k @ flat_k.mT, flat_q @ flat_k.mT
        square = ((inner_q * inner_k).sum((-2, -1)) + (mixed * mixed.mT).sum((-2, -1))) / 2
        lengths = _length(self._Q, 2).unsqueeze(-1) * self._centred_length
        self._product = (square.clamp(min=0.0) + 64 * theta * lengths.square()).sqrt() * (1 + 1e-9)
        V = (self._V.unsqueeze(1) - torch.einsum("hij,hjkp->hikp", p, self._V).unsqueeze(2)) * self._sr[..., None, None]
        self._value_gram = V @ V.mT  # (h, i, j, k, k)
        self._value_length = (_length(V, 2) + theta * _length(self._V, 2).amax()).square()
        self._logit_gram = self._L @ self._L.mT  # (h, i, j, j')
        self._logit_length = _length(self._L, 1)
        flat = self._L.reshape(-1, width)
        heads = torch.arange(h * rows) if len(flat) <= _FINE else torch.arange(rows).repeat(h)
        self._logits = Squares(flat, heads.repeat_interleave(n))
        self._second: dict[tuple[int, int], Tensor] = {}
        self._joint = None
        k = self._Q.shape[2]
        if len(flat) + h * rows * (n + 1) * k <= _JOINT:
            together = torch.cat([flat, self._Q.reshape(-1, width), self._centred_K.reshape(-1, width)])
            forms = torch.arange(len(flat)), len(flat) + torch.arange(h * rows * (n + 1)).repeat_interleave(k)
            parts = [
                torch.arange(h * rows).repeat_interleave(n),
                torch.arange(h * rows),
                torch.arange(h * rows).repeat_interleave(n),
            ]
            blocks = torch.cat([part + i * h * rows for i, part in enumerate(parts)])
            self._joint = Squares(together, blocks, torch.cat(forms))
        self._bilinear()
        each = [x.reshape(-1) for x in self._first]
        flats = [x.reshape(-1, width) for x in (self._Q, self._K, self._V, self._L)]
        self._together = [(x, *_together(y)) for x, y in zip(each, flats, strict=True)]

    def _bilinear(self) -> None:
        """Inner products of the parts of Q₂ as quadratic forms, which are linear in m."""
        h, rows, n, _ = self._L.shape
        k = self._Q.shape[2]
        q, keys, values = (x.flatten(0, 2) for x in (self._Q, self._K, self._V))
        QQ = (q @ q.mT).reshape(h, rows, k, h, rows, k)
        KK = (keys @ keys.mT).reshape(h, n, k, h, n, k)
        LL = (self._L.flatten(0, 2) @ self._L.flatten(0, 2).mT).reshape(h, rows, n, h, rows, n)
        VV = (values @ values.mT).reshape(h, n, k, h, n, k)
        # E[b g]: Σ_ij p g_ij Σ_a Q_ia ⊗ K_ja.
        inner = QQ.permute(0, 1, 3, 4, 2, 5).reshape(h, rows, h, rows, k * k), KK.permute(0, 1, 3, 4, 2, 5)
        products = torch.einsum("aibjx,akblx->aikbjl", inner[0], inner[1].reshape(h, n, h, n, k * k))
        size = _length(self._Q, 2).unsqueeze(-1) * _length(self._K, 2).unsqueeze(1)
        self._crossed = Quadratic(products.reshape(h * rows * n, -1), size.flatten())
        # ½E[ℓ²g]: the squares of logits.
        self._squared = Quadratic(LL.square().reshape(h * rows * n, -1) / 4, self._logit_length.square().flatten() / 2)
        # E[ℓ n]: Σ_ij p ℓ_ij ⊗ Σ_a m_a V_ja, linear in m.
        weighted = self._pr.reshape(h, rows, n, 1, 1, 1) * LL * self._pr.reshape(1, 1, 1, h, rows, n)
        mixed = torch.einsum("aikbjl,akxbly->aixbjy", weighted, VV)
        size = torch.einsum("hij,hjk->hik", self._pr * self._logit_length, _length(self._V, 1))
        self._carried = Quadratic(mixed.reshape(h * rows * k, -1), size.flatten())

    def prepare(self, mu: Tensor) -> Rows:
        mu = mu[:, self._rows]
        m = torch.einsum("sid,hkd->shik", mu, self._w_o)
        p, theta = self._pr, self._theta
        size = torch.linalg.vector_norm(mu, dim=-1) * self._outer * (1 + 1e-12)  # (S, i)
        wide = size[:, None, :, None]
        g = torch.einsum("shik,hijk->shij", m, self._spread)
        most_g = (g.abs() + 8 * theta * wide * self._value) * self._sr
        square = torch.einsum("shik,hijkl,shil->shij", m, self._value_gram, m).clamp(min=0.0)
        n = (square + 8 * theta * wide.square() * self._value_length).sqrt()
        lengths = _length(self._V, 2)
        spread = torch.einsum("shik,hjkl,shil->shij", m, self._V @ self._V.mT, m).clamp(min=0.0)
        spread = (spread + 8 * theta * wide.square() * lengths.square().unsqueeze(1)).sqrt()
        pg = p * g
        square = torch.einsum("shij,hijl,shil->shi", pg, self._logit_gram, pg).clamp(min=0.0)
        slack = (
            (p * most_g * self._logit_length).sum(-1)
            + size.unsqueeze(1) * self._value * (p * self._logit_length).sum(-1)
        ).square()
        slope = (square + 8 * theta * slack).sqrt()
        rounding = (size.unsqueeze(1) * self._second_size()).sum((1, 2))
        bent = self._crossed.most(pg.flatten(1)) + self._squared.most(pg.flatten(1)) + self._carried.most(m.flatten(1))
        bent = bent + 16 * theta * rounding
        grown = 1 + 1e-9
        rows = Rows(m, size, g, most_g * grown, n * grown, spread * grown, slope * grown, bent * grown)
        if self._L.shape[-1] <= _SPECTRAL:
            self._sharpen(rows, 32 * theta * rounding)
        return rows

    def _sharpen(self, rows: Rows, error: Tensor) -> None:
        """The spectral norms of the forms Q₂, where these are small matrices."""
        for index, chosen in rows.groups():
            for part in torch.split(index, _CHUNK // self._L.shape[-1] ** 2):
                left, right = self._pair(rows, part, chosen, (self._Q, self._K, self._V, self._L))
                form = left.mT @ right
                found = gram_norm((form + form.mT) / 2, error[part] + 1e-300, 2).square() * (1 + 1e-9)
                rows.bent[part] = torch.minimum(rows.bent[part], found)

    def _second_size(self) -> Tensor:
        """(h, i) Q₂ on absolute values, for ‖m‖ = 1."""
        q, k, v = (_length(x, 2) for x in (self._Q, self._K, self._V))
        keys, logits = k.amax(-1, keepdim=True), self._logit_length.amax(-1)
        found: Tensor = self._value * (2 * q * keys + logits.square()) + logits * v.amax(-1, keepdim=True)
        return found

    # -- at a scale

    def bent(self, functions: dict[int, tuple[Tensor, float]], budget: float) -> dict[int, Tensor] | None:
        """How b_ij varies with earlier rests: (h i j, M) norms of its part that is linear in G and in them."""
        h, rows, n, k, width = self._centred_K.shape
        if 4.0 * h * rows * n * k * width * sum(M.shape[1] for M, _ in functions.values()) > budget:
            return None
        found = {}
        for source, (M, accuracy) in functions.items():
            q, keys, _, _ = self._split(M)  # (h, i, k, M), (h, j, k, M)
            keys = keys.unsqueeze(1) - torch.einsum("hij,hjkm->hikm", self._pr, keys).unsqueeze(2)
            norms = [
                torch.linalg.vector_norm(
                    q[a, i].mT.unsqueeze(0) @ self._centred_K[a, i] + keys[a, i].mT @ self._Q[a, i], dim=-1
                )
                for a in range(h)
                for i in range(rows)
            ]
            size = (float(torch.linalg.vector_norm(M)) + accuracy) * (
                _length(self._Q, 2).amax() + _length(self._K, 2).amax()
            )
            found[source] = torch.cat(norms) * (1 + 1e-9) + 32 * self._theta * float(size)
        return found

    def settle(self, size: Size, low: Tensor, high: Tensor, tiny: Tensor, moved: float) -> float:
        self._size = size
        self._tiny = self._split(tiny)
        self._rests = self._split(torch.maximum(low, high))
        q, k, v, logits = self._rests
        self._rest_q, self._rest_k, self._rest_v, self._rest_l = q, k, v, logits * self._sr
        r, p = size.radius, self._pr
        first = [x * size.scale for x in self._first]
        rest_q = torch.linalg.vector_norm(q, dim=-1)
        beside = torch.einsum("hij,hjk->hik", p, k).unsqueeze(2)
        self._rest_centred = torch.linalg.vector_norm(k.unsqueeze(1) + beside, dim=-1) * self._sr
        self._query, self._query_rest = r * self._norm_q, rest_q
        self._key = r * self._norm_k * self._sr
        # b to first order, and what rests add to it: by norms, or coordinate by coordinate and with turned covectors.
        self._rest_b = (
            rest_q.unsqueeze(-1) * (self._key + self._rest_centred) + self._query.unsqueeze(-1) * self._rest_centred
        )
        if self.bending is not None:
            tiny_q, tiny_k = (torch.linalg.vector_norm(x, dim=-1) for x in self._tiny[:2])
            minute = 2 * tiny_k.amax() * self._query.unsqueeze(-1) + tiny_q.unsqueeze(-1) * self._key
            both = (q.unsqueeze(2) * (k.unsqueeze(1) + beside)).sum(-1)
            self._rest_b = torch.minimum(self._rest_b, self.bending.reshape(self._rest_b.shape) + both + minute)
        self._rest_b = self._rest_b * self._sr * (1 + 1e-10)
        to_first = torch.minimum(self._query.unsqueeze(-1) * self._key, r * r * self._product) * self._sr
        self._most_b = (to_first + self._rest_b) * (1 + 1e-10)
        self._logit = first[3] * self._sr
        self._most_l = self._logit + self._rest_l
        self._tau = (self._most_l + self._most_b) * (1 + 1e-10)
        tau = self._tau.clamp(min=1e-6)
        # 2(e^τ - 1 - τ)/τ² - 1 = τ/3 + τ²/12 + … ; the quotient loses digits for small τ, the series does not.
        series = tau / 3 * (1 + tau / 4 * (1 + tau / 5 * tau.exp()))
        quotient = 2 * (torch.expm1(tau) - tau) / tau.square() - 1 + 1e-9
        self._beyond = torch.where(tau < 0.1, series, torch.minimum(series, quotient)) * (1 + 1e-10)
        most_v = torch.linalg.vector_norm(first[2] + v, dim=-1).amax()  # over heads and tokens
        heads, n = self._w_o.shape[0], self.u.shape[0]
        out = (2 * self._value + float(most_v)) * self._outer * (heads * n) ** 0.5
        return float((out + abs(self._residual) * moved) * (1 + 1e-9))

    def _weights(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the rest on ℓ_j² and on |b_j|, (S, h, i, j), and sup |n_j|."""
        p, g, r = self._pr, rows.most_g, self._size.radius
        beyond, b, linear, tau = self._beyond, self._most_b, self._most_l, self._tau
        rest = torch.einsum("shik,hjk->shij", rows.m.abs(), self._rest_v)
        n = (r * rows.n + rest + (p * rest).sum(-1, keepdim=True)) * self._sr
        N = r * rows.slope + (p * (self._rest_l + b) * g).sum(-1) + (p * tau * n).sum(-1)
        mean = (p * (1 + beyond) / 2 * tau.square()).sum(-1)
        N = N + mean * (g + n).amax(-1)
        core = p / 2 * (beyond * g + (1 + beyond) * (n + N.unsqueeze(-1)))
        share = b / linear.clamp(min=_SMALL)  # t² <= (1 + κ)ℓ² + (1 + 1/κ)b²
        on_l = core * (1 + share)
        on_b = core * (b + linear) + p * (g * (linear + b / 2) + n)
        return on_l * (1 + 1e-9), on_b * (1 + 1e-9), n

    def _numbers(self, rows: Rows, on_l: Tensor, crossed: bool) -> Tensor:
        """(S) what the rests of first-order functions do to Q₂ and to ℓ²; `crossed` with products of both in Q₂."""
        if not bool((torch.cat([x.flatten() for x in self._rests]) != 0).any()):
            return torch.zeros(len(on_l), dtype=torch.float64)
        p, g, sr = self._pr, rows.most_g, self._sr
        rest_v = torch.einsum("shik,hjk->shij", rows.m.abs(), self._rest_v) * sr
        rest_k = torch.einsum("shij,hjk->shik", p * g, self._rest_k)
        own = (self._rest_q * rest_k).sum((1, 2, 3))
        own = own + (p * self._rest_l * (rest_v + g * self._rest_l / 2)).sum((1, 2, 3))
        own = own + (on_l * self._rest_l * (self._rest_l + self._logit)).sum((1, 2, 3))
        return (own + self._size.radius * self._products(rows, self._rests if crossed else self._tiny)) * (1 + 1e-9)

    def _products(self, rows: Rows, rests: list[Tensor]) -> Tensor:
        """(S) the products of first order and these rests in Q₂, for radius 1."""
        p, g, sr = self._pr, rows.most_g, self._sr
        q, k, v, logits = rests
        by_q, by_k, by_v, by_l = self._together
        rest_v = torch.einsum("shik,hjk->shij", rows.m.abs(), v) * sr
        mixed = shared(torch.einsum("shij,hjk->shik", p * g, k).flatten(1), *by_q)
        mixed = mixed + shared((p * (rest_v + g * logits * sr)).flatten(1), *by_l)
        mixed = mixed + shared(torch.einsum("shij,hik->shjk", p * g, q).flatten(1), *by_k)
        in_values = shared(torch.einsum("hij,shik->shjk", p * logits * sr, rows.m.abs()).flatten(1), *by_v)
        return mixed + torch.minimum(in_values, (p * logits * sr * rows.n_spread).sum((1, 2, 3)))

    def range(self, prepared: Rows | None, varying: Tensor | None) -> tuple[Tensor, Tensor]:
        r = self._size.radius
        if prepared is None:
            assert varying is not None
            found = (varying @ self.each) * (1 + 1e-9)
            return found, found
        on_l, on_b, _ = self._weights(prepared)
        spread = on_l * (1 + self._rest_l / self._logit.clamp(min=_SMALL))
        form = self._logits.most(spread.flatten(1), r, self._logit.flatten()) + self._bent_numbers(on_b)
        if self._joint is not None:
            on_q, on_k, number = self._apart(on_b)
            weights = torch.cat([spread.flatten(1), on_q.flatten(1), on_k.flatten(1)], 1)
            each = torch.cat([x.flatten() for x in (self._logit, self._query, self._key)])
            form = torch.minimum(form, self._joint.most(weights, r, each) + number)
        found = prepared.bent * (r * r) + form + self._numbers(prepared, on_l, not prepared.turned)
        if varying is not None:
            found = found + varying @ self.each
        return found * (1 + 1e-9), found * (1 + 1e-9)

    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        """The coordinates of the rows' outputs; `each` bounds the rest of every one."""
        return mu[:, self._rows].flatten(1), 0.0

    def identity(self) -> Tensor:
        """(M, n, c) the covectors of these coordinates."""
        n, c = self.u.shape[0], self._w_o.shape[-1]
        return torch.eye(n * c, dtype=torch.float64).reshape(n, c, n, c)[self._rows].flatten(0, 1)

    def turned(self, rows: Rows, functions: dict[int, tuple[Tensor, float]], budget: float) -> dict[int, Tensor] | None:
        """How the covectors of a batch turn at earlier places as G moves the keys, queries and values here.

        Q₂(δ) with δ = JG + F has the part ⟨ΨG, F⟩. With F = Σ_l S_l e_l and `functions` (K, M) at an earlier place the
        numbers that count of this layer's functions there, the M numbers of that part are linear in G: their norms
        (S, M) are given back, for scale 1. None where that costs more than the budget, in products.
        """
        S, h, n_rows, k = rows.m.shape
        width, heads = self._L.shape[-1], h * n_rows * (k + self._L.shape[2])
        cost = sum(len(index) * len(chosen) / n_rows for index, chosen in rows.groups())
        if cost * heads * width * 4 * sum(M.shape[1] for M, _ in functions.values()) > budget:
            return None
        found = {source: torch.zeros(S, M.shape[1], dtype=torch.float64) for source, (M, _) in functions.items()}
        for index, chosen in rows.groups():
            left, right = self._pair(rows, index, chosen, (self._Q, self._K, self._V, self._L))
            for source, (M, accuracy) in functions.items():
                other_left, other_right = self._pair(rows, index, chosen, tuple(self._split(M)))
                turned = other_left.mT @ right + other_right.mT @ left  # (S, M, p)
                size = self._turning_size(rows, index, float(torch.linalg.vector_norm(M)) + accuracy)
                found[source][index] = torch.linalg.vector_norm(turned, dim=-1) + 32 * self._theta * size.unsqueeze(-1)
        return {source: x * (1 + 1e-9) for source, x in found.items()}

    def _turning_size(self, rows: Rows, index: Tensor, length: float) -> Tensor:
        """(S) a bound of the turning on absolute values, for rounding."""
        size = rows.size[index].sum(-1) * length
        q, k, v, logits = (float(_length(x.reshape(-1, x.shape[-1]), 2)) for x in (self._Q, self._K, self._V, self._L))
        return size * (self._value * (q + k + logits) + v + logits)

    def _pair(self, rows: Rows, index: Tensor, chosen: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Q₂ = Σ_r left_r right_r for the chosen rows: (R, w) for the whole batch and (S, R, w)."""
        Q, K, V, L = parts
        p, g, m = self._pr[:, chosen], rows.g[index][:, :, chosen], rows.m[index][:, :, chosen]
        left = torch.cat([Q[:, chosen].flatten(0, 2), L[:, chosen].flatten(0, 2)])
        keys = torch.einsum("shij,hjkp->shikp", p * g, K).flatten(1, 3)
        values = torch.einsum("shik,hjkp->shijp", m, V) + g.unsqueeze(-1) * L[:, chosen] / 2
        return left, torch.cat([keys, (p.unsqueeze(-1) * values).flatten(1, 3)], 1)

    def take(self, prepared: Rows, s: int, problem: Problem, varying: Tensor | None) -> None:
        one = prepared.some(slice(s, s + 1))
        width = self._L.shape[-1]
        L = self._L.reshape(-1, width)
        rounding = float((one.size[0] * self._second_size()).sum()) * 32 * self._theta
        problem.add("second order", self._second_order(one, (id(prepared), s)), rounding)
        on_l, on_b, _ = self._weights(one)
        weight = (on_l * (1 + self._rest_l / self._logit.clamp(min=_SMALL))).flatten()
        form = (L * weight.unsqueeze(-1)).mT @ L
        numbers = self._numbers(one, on_l, not prepared.turned)
        if self._centred_K.numel() * width <= _HEAVY:
            on_q, on_k, number = self._apart(on_b)
            Q, K, k = self._Q.reshape(-1, width), self._centred_K.reshape(-1, width), self._Q.shape[2]
            form = form + (Q * on_q.flatten().repeat_interleave(k).unsqueeze(-1)).mT @ Q
            form = form + (K * on_k.flatten().repeat_interleave(k).unsqueeze(-1)).mT @ K
        else:
            number = self._bent_numbers(on_b)
        problem.add("attention rest", -form, float(torch.trace(form)) * 1e-9)
        problem.lose("carried rests", float(numbers + number) * (1 + 1e-9))
        if varying is not None:
            problem.lose("carried rests", float(varying @ self.each) * (1 + 1e-9))

    def _second_order(self, one: Rows, key: tuple[int, int]) -> Tensor:
        """The matrix of Q₂, which does not depend on the scale."""
        if key not in self._second:
            width, p, g, m = self._L.shape[-1], self._pr, one.g[0], one.m[0]
            left = torch.cat([self._Q.reshape(-1, width), self._L.reshape(-1, width)])
            keys = torch.einsum("hij,hjkp->hikp", p * g, self._K).reshape(-1, width)
            values = torch.einsum("hik,hjkp->hijp", m, self._V) + g.unsqueeze(-1) * self._L / 2
            form = left.mT @ torch.cat([keys, (p.unsqueeze(-1) * values).reshape(-1, width)])
            self._second[key] = (form + form.mT) / 2
        return self._second[key]

    def _apart(self, on_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ w_ij |b_ij| by weights on ‖q_i‖² (S, h, i) and ‖k_ij‖² (S, h, i, j) to first order, and numbers (S).

        |b_ij| <= (κ‖q_i‖² + ‖k_ij‖²/κ)/2, where k_ij is less its mean.
        """
        ratio = self._key.amax(-1) / self._query.clamp(min=_SMALL)  # (h, i)
        usable = (self._query > 0) & (ratio > 0)
        on_q = on_b.sum(-1) * ratio / 2 * usable
        on_k = on_b / (2 * ratio.clamp(min=_SMALL)).unsqueeze(-1) * usable.unsqueeze(-1)
        number = (on_b * self._rest_b).sum((-3, -2, -1))
        return on_q * (1 + 1e-9), on_k * (1 + 1e-9), number * (1 + 1e-9)

    def _bent_numbers(self, on_b: Tensor) -> Tensor:
        """(S) bounds of Σ w_ij |b_ij|: key by key, or the keys of a row together."""
        keys = torch.einsum("shij,hijl,shil->shi", on_b, self._key_inner, on_b).clamp(min=0.0) ** 0.25
        together = self._query * on_b.sum(-1).sqrt() * self._size.radius * keys + (on_b * self._rest_b).sum(-1)
        return torch.minimum((on_b * self._most_b).sum(-1), together).sum((1, 2)) * (1 + 1e-9)


def _relative(x: Ball) -> float:
    """The largest error of a row, relative to the largest row."""
    error, size = (float(frobenius_upper(part, (-1,)).amax()) for part in (x.rad, x.mid))
    return error / size if size > 0 else float(error > 0)


def _length(x: Tensor, dims: int) -> Tensor:
    """Bounds of Frobenius norms over the last dimensions."""
    found: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(-dims, 0)))
    return found * (1 + 1e-12)


def _spectral(x: Tensor) -> Tensor:
    flat = x.reshape(-1, *x.shape[-2:])
    return thin_gram_norm(flat, 3).reshape(x.shape[:-2])


def _together(rows: Tensor) -> tuple[Tensor, float]:
    """The lengths of the rows, and the norm of the matrix of rows of length 1."""
    lengths = _length(rows, 1)
    units = rows / lengths.clamp(min=_SMALL).unsqueeze(-1)
    return lengths, float(thin_gram_norm(units, 3)) * (1 + 1e-9)
