"""LayerNorm, RMSNorm and the smooth projection: the exact second order, and a third-order rest of a few numbers.

A token is f = scale ⊙ n + β with ‖n‖ < 1; for w = cδ̃, linear in δ, a = n·w and b = ‖w‖² it becomes scale ⊙ (n + w)g + β
with g = (1 + 2a + b)^{-1/2}. For a covector μ at the output let m = scale ⊙ μ, m₀ = m·n and v = m·w. Then

    ⟨μ, e⟩ = Q₂ + m₀(3/2 ab + 3/8 b² + ζ) + v(g - 1 + a),    Q₂ = ½m₀(3a² - b) - av,

with g = 1 - x/2 + 3/8 x² + ζ, x = 2a + b (docs/math/forms.md, section 6). Every term beyond Q₂ is at most a
number times a² or b.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import (
    NARROW,
    THETA,
    Named,
    Problem,
    Rests,
    Size,
    SmoothLocal,
    Twist,
    second_lengths,
    token_lengths,
)
from holdfast.compositions.forms.single import NormalisedTokens, TokenMoves
from holdfast.compositions.forms.suprema import QuadraticSums, Squares, worth
from holdfast.compositions.forms.third import TokenOrders, Triples
from holdfast.layers.norm.piece import Normalisation
from holdfast.linalg import Ball
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import down, frobenius_upper, up
from holdfast.linalg.squarings import gram_norm, thin_gram_norm

_SMALL = 1e-100
_NARROW = 2.0**-22  # what float32 takes of a number, and more


@dataclass(frozen=True)
class Tokens:
    """Covectors (S) at some tokens of the output: m (S, i, d) in float32, m₀ (S, i), bounds of |m₀|, ‖m‖, |v| and |Q₂|.

    Those of |v| and |Q₂| are for scale 1, and that of |Q₂| (S) is not a number until it is needed.
    """

    tokens: Tensor  # (i) among those that matter
    m: Tensor
    along: Tensor
    most_along: Tensor
    size: Tensor
    v: Tensor
    bent: Tensor
    alone: Tensor  # (S) 1 for a covector at one token

    def some(self, index: Tensor | slice) -> Tokens:
        """A part of the covectors, in float64."""
        parts = {name: x[index].double() for name, x in vars(self).items() if name != "tokens"}
        return Tokens(self.tokens, **parts)


@final
class Normalised(SmoothLocal):
    """A normalisation at ũ, for the tokens i that matter."""

    def __init__(self, u: Tensor, piece: Normalisation) -> None:
        self.u, self._piece = u, piece
        parts = piece.parts(Ball.exact(u))
        length = parts.m.sqrt()
        n, c, scale = (
            parts.N / length,
            Ball.exact(torch.ones_like(u[..., :1])) / (parts.s * length),
            parts.gamma * length,
        )
        self._n, self._c, self._scale = n.mid, c.mid, scale.mid.expand(u.shape[-1])
        relative = float(frobenius_upper(n.rad, (-1,)).amax()) + float((c.rad / c.mid).amax())
        self._theta = THETA + 16 * relative  # the scale is within 4 units in the last place
        self._largest = up(float(self._scale.abs().amax()), 1e-12)
        self._pull_size = 4 * self._largest * float(self._c.amax())  # the derivative's norm on absolute values

    @property
    def rest(self) -> str:
        return "normalisation rest"

    @property
    def scalars(self) -> int:
        return self.u.numel() + len(self.u)

    @property
    def longest(self) -> int:
        return self.u.numel()

    @property
    def stride(self) -> int:
        return self.u.shape[-1]

    @property
    def numbers(self) -> int:
        return len(self._tokens) * self.u.shape[-1]

    @property
    def kept(self) -> int:
        return 4 * self.numbers

    def pull(self, C: Tensor) -> tuple[Tensor, Tensor]:
        return self._piece.pull(self.u, C), frobenius_upper(C) * (8 * self._theta * self._pull_size)

    def push(self, T: Tensor) -> tuple[Tensor, Tensor]:
        return self._piece.push(self.u, T), token_lengths(T) * (8 * self._theta * self._pull_size)

    def second_order(self, directions: Directions) -> tuple[Tensor, float]:
        """Scale ⊙ (½n(3a² - b) - a w), token by token."""
        first, second = directions.first, directions.second
        out = torch.zeros(len(first), *self.u.shape, dtype=torch.float64)
        for token, W, A in zip(self._tokens.tolist(), self._W, self._A, strict=True):
            along = (3 * A.unsqueeze(-1) * A - W.mT @ W)[first, second] / 2
            turned = (W[:, first] * A[second] + W[:, second] * A[first]) / 2
            out[:, token] = ((self._n[token].unsqueeze(-1) * along - turned) * self._scale.unsqueeze(-1)).mT
        size = float(torch.linalg.vector_norm(self._second_size())) * self._largest
        return out, up(16 * self._theta * size, 1e-9)

    def functions(self, T: Tensor) -> Tensor:
        w = (self._piece.centred(T) * self._c)[:, self._tokens]
        return torch.cat([w.flatten(1), (w * self._n[self._tokens]).sum(-1)], 1).mT

    def third_order(self, second: Tensor, size: float, directions: Directions) -> tuple[Twist, float]:
        (W, A), (W2, A2) = (self._W, self._A), self._split(second)
        first, other = directions.first, directions.second
        squares = torch.einsum("icp,icq->ipq", W, W)[:, first, other]
        along = A[:, first] * A[:, other]
        on_n = 3 * A2 + 1.5 * squares - 2.5 * along
        on_w = 1.5 * along - squares / 2 - A2
        n = self._n[self._tokens]

        def crossed(first: slice, pairs: Tensor) -> Tensor:
            made: Tensor = torch.einsum("icr,ics->irs", W[..., first], W2[..., pairs].double())
            return made

        def at(t: Triples) -> Tensor:
            dots = torch.einsum("ic,icm->im", W[..., t.q], W2[..., t.rs].double()) + t.symmetric(crossed)
            new = n.unsqueeze(-1) * (t.added(A, on_n) - dots).unsqueeze(1)
            new -= t.added(A.unsqueeze(1), W2)
            new += t.added(W, on_w.unsqueeze(1))
            out = torch.zeros(len(t.r), *self.u.shape, dtype=torch.float64)
            out[:, self._tokens] = new.permute(2, 0, 1) * self._scale
            return out

        lengths, d = self._length, self.u.shape[-1]
        total = torch.linalg.vector_norm(8 * lengths * (lengths.square() + d**0.5 * size))
        own_w, own_a = self._split(second_lengths(second))
        kept = torch.linalg.vector_norm(8 * lengths * (torch.linalg.vector_norm(own_w, dim=-1) + own_a))
        return at, up((16 * self._theta * float(total) + NARROW * float(kept)) * self._largest, 1e-9)

    def covectors(self, tokens: Tensor) -> tuple[Named, Tensor]:
        """The coordinates of w and then a, of every token."""
        self._tokens = tokens
        n, d = self.u.shape
        coordinates = self._c[tokens].unsqueeze(-1) * self._piece.centred(torch.eye(d, dtype=torch.float64))
        rows = torch.cat([coordinates.flatten(0, 1), self._n[tokens] * self._c[tokens]])
        at = torch.cat([tokens.repeat_interleave(d), tokens])

        def made(index: Tensor) -> Tensor:
            C = torch.zeros(len(index), n, d, dtype=torch.float64)
            C[torch.arange(len(index)), at[index]] = rows[index]
            return C

        error = 4 * self._theta * self._c[tokens].squeeze(-1)
        return Named(len(rows), made), torch.cat([error.repeat_interleave(d), error])

    def most(self, y: Tensor) -> Tensor:
        size, n, c = y[self._tokens], self._n[self._tokens], self._c[self._tokens]
        eye = self._piece.centred(torch.eye(y.shape[-1], dtype=torch.float64)).abs()
        return up(torch.cat([((size @ eye) * c).flatten(), (size * n.abs() * c).sum(-1)]), 1e-9)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(i, d, …) of w and (i, …) of a."""
        count, d = len(self._tokens), self.u.shape[-1]
        return x[: count * d].reshape(count, d, *x.shape[1:]), x[count * d :]

    def place(self, X: Tensor, first: Tensor) -> None:
        self._W, self._A = W, A = self._split(X)
        self._first = self._split(first)
        count, d, _ = W.shape
        self._length, self._norm = up(torch.linalg.matrix_norm(W), 1e-12), thin_gram_norm(W, 3)
        self._lengths = up(torch.linalg.vector_norm(A, dim=-1), 1e-12)
        token = torch.arange(count)
        self._squares = Squares(X, torch.cat([token, token]), torch.cat([token.repeat_interleave(d), count + token]))
        self._gram = W @ W.mT

    @cached_property
    def _second(self) -> QuadraticSums:
        """Inner products of the matrices of Q₂ for every coordinate of m: n_c U - sym(A ⊗ W_c), U = ½(3AAᵀ - WᵀW)."""
        count, d, width = self._W.shape
        flat = self._W.reshape(-1, width)
        G = (flat @ flat.mT).reshape(count, d, count, d)
        AA, WA = self._A @ self._A.mT, (flat @ self._A.mT).reshape(count, d, count)  # WA[j, c, i] = W_jc·A_i
        seen = WA.square().sum(1)  # ‖W_j A_i‖²
        UU = 2.25 * AA.square() - 0.75 * (seen + seen.mT) + 0.25 * G.square().sum((1, 3))
        # A_jᵀ U_i W_jc, (i, j, c)
        turned = torch.einsum("iej,iejc->ijc", WA, G)
        AUW = 1.5 * AA.unsqueeze(-1) * WA.permute(2, 0, 1) - 0.5 * turned
        n = self._n[self._tokens]
        inner = n[:, :, None, None] * UU[:, None, :, None] * n
        crossed = n[:, :, None, None] * AUW.unsqueeze(1)  # (i, c, j, e)
        inner = inner - crossed - crossed.permute(2, 3, 0, 1)
        across = WA.permute(2, 0, 1)  # A_i·W_je, (i, j, e)
        pairs = AA[:, None, :, None] * G + across.unsqueeze(1) * across.permute(1, 2, 0).unsqueeze(-1)
        inner = inner + pairs / 2
        size = n.abs() * (1.5 * self._lengths.square() + 0.5 * self._length.square()).unsqueeze(-1)
        size = size + self._lengths.unsqueeze(-1) * torch.linalg.vector_norm(self._W, dim=-1)
        return QuadraticSums(inner.reshape(count * d, count * d), up(size.flatten(), 1e-9))

    def prepare(self, mu: Tensor) -> Tokens:
        mu = mu[:, self._tokens]
        tokens = (mu != 0).any(-1).any(0).nonzero().squeeze(-1)
        m, theta = mu[:, tokens] * self._scale, self._theta
        size = up(torch.linalg.vector_norm(m, dim=-1), 1e-12) + 1e-30  # more than what float32 takes for zero
        along = (m * self._n[self._tokens[tokens]]).sum(-1)
        most = up(along.abs() + 2 * theta * size, 1e-12)
        square = torch.einsum("sic,ice,sie->si", m, self._gram[tokens], m).clamp(min=0.0)
        v = up((square + 8 * theta * (size * self._length[tokens]).square()).sqrt(), 1e-10)
        alone = ((mu != 0).any(-1).sum(-1) == 1).double()
        return Tokens(tokens, m.float(), along, most, size, v, torch.full((len(m),), torch.nan).double(), alone)

    def _bent(self, prepared: Tokens, index: Tensor) -> Tensor:
        """Bounds of |Q₂| on the unit ball for some of a batch; what is known is kept."""
        unknown = index[prepared.bent[index].isnan()]
        if len(unknown):
            one, count = prepared.some(unknown), len(self._tokens)
            m = torch.zeros(len(unknown), count, self.u.shape[-1], dtype=torch.float64)
            m[:, one.tokens] = one.m
            rounding = self._unsure(one)
            # Token by token, with one budget for the squares of w and a.
            weights = self._everywhere(one.tokens, one.most_along / 2, one.most_along * 1.5)
            apart = self._squares.most(weights, 1.0, torch.cat([self._norm, self._lengths]))
            apart = apart + one.v @ self._lengths[one.tokens]
            bent = torch.minimum(self._second.most(m.flatten(1)), apart)
            prepared.bent[unknown] = up(bent + rounding, 1e-9)
        return prepared.bent[index]

    def _unsure(self, one: Tokens) -> Tensor:
        """(S) what rounding, float32 included, may do to Q₂ on the unit ball."""
        return up((16 * self._theta + _NARROW) * (one.size @ self._second_size()[one.tokens]), 1e-9)

    def _everywhere(self, tokens: Tensor, on_b: Tensor, on_a: Tensor) -> Tensor:
        """(S, 2 i) weights on ‖Wb‖² and (A·b)² of all tokens that matter, from those of some."""
        both = torch.zeros(2, len(on_b), len(self._tokens), dtype=torch.float64)
        both[0][:, tokens], both[1][:, tokens] = on_b, on_a
        return torch.cat([both[0], both[1]], -1)

    def _second_size(self) -> Tensor:
        """(i) Q₂ on absolute values, for ‖m‖ = 1."""
        size: Tensor = self._length.square() / 2 + 1.5 * self._lengths.square() + self._lengths * self._length
        return size

    def settle(self, size: Size, rests: Rests, moved: float) -> float:
        self._size = size
        self._third, self._fourth = (None if x is None else self._split(x) for x in (rests.third, rests.fourth))
        self._lost = None if rests.unsure is None else self._split(rests.unsure)[0]
        self._rest_w, self._rest_a = self._split(rests.most)
        first_w, first_a = (x * size.scale for x in self._first)
        self._rest = up(torch.linalg.vector_norm(self._rest_w, dim=-1), 1e-12)
        if rests.together is not None:
            self._rest = torch.minimum(self._rest, rests.together)
        if self._third is not None:  # all coordinates of the second order together
            joint = size.radius * size.radius * self._met[0].norm + torch.linalg.vector_norm(self._third[0], dim=-1)
            self._rest = torch.minimum(self._rest, up(joint, 1e-9))
        self._w = up(torch.minimum(size.radius * self._norm, torch.linalg.vector_norm(first_w, dim=-1)), 1e-12)
        self._a = up(first_a, 1e-12)
        a = up(self._a + self._rest_a, 1e-12)
        b = up((self._w + self._rest).square(), 1e-12)
        left = down(torch.where(a < 1, 1 - a, 0.0), 1e-12)
        # |ζ| <= 5/16 |x|³/(1 - a)⁷ <= tail (4a² + (4a + b) b); every number with a factor a² or b, for m₀ and for v.
        tail = 5 / 16 * (2 * a + b) / left**7
        mixed = 4 * a + b
        self._on_b = 1.5 * a + 0.375 * b + tail * mixed, 0.5 + 0.375 * mixed + tail * mixed
        self._on_a = 4 * tail, 1.5 + 4 * tail
        beyond = b * self._on_b[1] + a.square() * self._on_a[1]  # |g - 1 + a|
        n = self._n[self._tokens].abs() + self._theta
        coordinate = up(first_w + self._rest_w, 1e-12)
        self._moves = a, beyond
        left_out = n * beyond.unsqueeze(-1) + coordinate * (a + beyond).unsqueeze(-1)
        self._output_rests = up(left_out * self._scale.abs(), 1e-9).flatten()
        chord = torch.minimum(torch.full_like(b, 2.0), b.sqrt() / left)
        return up(self._largest * float(torch.linalg.vector_norm(chord)), 1e-9)

    def output_rows(self) -> tuple[Tensor, Tensor]:
        """(n, d, p) first-order rows of the output, scale ⊙ (w - n a), and (n, d) what they are rounded by for ‖b‖ = 1.

        At tokens that do not matter they are not numbers, of which nothing can be proved.
        """
        _, d, p = self._W.shape
        rows, unsure = (torch.full((len(self.u), *shape), torch.nan).double() for shape in ((d, p), (d,)))
        n = self._n[self._tokens]
        rows[self._tokens] = (self._W - n.unsqueeze(-1) * self._A.unsqueeze(1)) * self._scale.unsqueeze(-1)
        sizes = torch.linalg.vector_norm(self._W, dim=-1) + self._lengths.unsqueeze(-1)
        unsure[self._tokens] = up(4 * self._theta * sizes * self._scale.abs(), 1e-9)
        return rows, unsure

    def output_gram(self) -> tuple[Tensor, Tensor]:
        """(t, d, d) inner products of these rows where tokens matter; accurate relative to squares of lengths (t)."""
        rows, _ = self.output_rows()
        rows = rows[self._tokens]
        length: Tensor = torch.linalg.matrix_norm(self._W) + self._lengths
        return rows @ rows.mT, up(length * self._largest, 1e-9)

    def single_tokens(self) -> NormalisedTokens:
        """The tokens that matter, for covectors at one of them."""
        c = up(self._c[self._tokens].squeeze(-1) * (1 + 4 * self._theta), 1e-12)
        return NormalisedTokens(
            self._tokens, self._n[self._tokens], self._scale, c, self._gram, self._length, self._theta
        )

    def moves(self, carried: Tensor, tiny: Tensor) -> TokenMoves:
        """What is known of these tokens at the last scale, where the stream's rest is carried by tokens."""
        a, beyond = self._moves
        return TokenMoves(carried, tiny, self._w, self._rest, a, beyond, self._size.radius)

    def forget(self) -> None:
        """Drops the first-order rows, which sums of suprema do without."""
        nothing = self._W.new_zeros(0)
        self._W = self._A = nothing
        self._squares.forget()

    def output_beyond(self) -> Tensor:
        """(n, d) what the output has beyond first order at the last scale: rests of w and a, and its own."""
        beyond = torch.full_like(self.u, torch.nan)
        n = self._n[self._tokens].abs() + self._theta
        carried = (self._rest_w + n * self._rest_a.unsqueeze(-1)) * self._scale.abs() * (1 + 4 * self._theta + 1e-9)
        beyond[self._tokens] = carried + self._output_rests.reshape(carried.shape)
        return beyond

    def _weights(self, one: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the rest on ‖Wb‖² and (A·b)², (S, i), and numbers (S)."""
        t, along = one.tokens, one.most_along
        v = self._size.radius * one.v
        rest_v = up((one.m.abs() * (1 + _NARROW) * self._rest_w[t]).sum(-1), 1e-12) + 1e-37 * self._rest_w[t].sum(-1)
        rest_v = torch.minimum(rest_v, one.size * self._rest[t])
        v_all = v + rest_v
        w, a, rest, rest_a = self._w[t], self._a[t], self._rest[t], self._rest_a[t]
        on_b = along * self._on_b[0][t] + v_all * self._on_b[1][t]
        on_a = along * self._on_a[0][t] + v_all * self._on_a[1][t]
        # ‖w‖² <= (1 + η)‖Wb‖² + (1 + 1/η)‖rest‖², likewise a²; and what the rests do to Q₂.
        eta_w, eta_a = rest / w.clamp(min=_SMALL), rest_a / a.clamp(min=_SMALL)
        square_w, square_a = rest * (rest + w), rest_a * (rest_a + a)
        number = (on_b + along / 2) * square_w + (on_a + 1.5 * along) * square_a
        number = number + a * rest_v + rest_a * v_all
        on_b, on_a = on_b * (1 + eta_w) + along / 2 * eta_w, on_a * (1 + eta_a) + 1.5 * along * eta_a
        return up(on_b, 1e-9), up(on_a, 1e-9), up(number.sum(-1), 1e-9)

    def meet(self, degree: int, order: Tensor, count: Tensor, unsure: float, directions: Directions) -> None:
        w = self._split(order)[0].double()
        if degree == 2:
            self._met = TokenOrders.of(w), TokenOrders.of(w)
            place = directions.place
            squares = torch.stack([torch.einsum("cpq,cqr->pr", T, T) for T in (token[:, place] for token in w)])
            error = 8 * THETA * torch.einsum("ipp->i", squares)
            bound = gram_norm(squares, error, 2) + unsure * w.shape[1] ** 0.5
            self._met[0].norm = up(bound, 1e-9)
        self._met[degree - 2].add(w, count, unsure)

    def _turned(self, one: Tokens, earlier: Tensor | None) -> tuple[Tensor, Tensor]:
        """(S, i) bounds of what v has beyond first order, and beyond second: by coordinates, or as forms of its own.

        A covector at one token whose ways all lead through here is ⟨μ, Aδ⟩ = v - m₀a behind its first order, so that
        what earlier places add to it beyond third order, and m₀a's own, is what v has; but for the rounding of both
        sides' known orders, of which that of v is made of its coordinates'.
        """
        assert self._third is not None
        assert self._fourth is not None
        assert self._lost is not None
        t, r = one.tokens, self._size.radius
        m = one.m.abs() * (1 + _NARROW) + 1e-37
        rest, third, fourth = (up((m * x[t]).sum(-1), 1e-12) for x in (self._rest_w, self._third[0], self._fourth[0]))
        if earlier is not None:
            lost = 2 * (m * self._lost[t]).sum(-1)
            own = torch.minimum(fourth, earlier.unsqueeze(-1) + one.most_along * self._fourth[1][t] + lost)
            fourth = torch.where(one.alone.unsqueeze(-1) > 0, own, fourth)
        second, cubic = (met.most(t, one.m, one.size) for met in self._met)
        second, cubic = second * (r * r), cubic * (r * r * r)
        third = torch.minimum(third, up(cubic + fourth, 1e-9))
        return torch.minimum(rest, up(second + third, 1e-9)), third

    def _beyond_third(self, one: Tokens, third: tuple[Tensor, Tensor], earlier: Tensor | None) -> Tensor:
        """(S) bounds of what is beyond third order, where the functions' rests from there on are `third`."""
        t, m0, v = one.tokens, one.most_along, self._size.radius * one.v
        w, a, rest, rest_a = self._w[t], self._a[t], self._rest[t], self._rest_a[t]
        third_w, third_a = (x[t] for x in third)
        rest_v, third_v = self._turned(one, earlier)
        norm = torch.linalg.vector_norm(third_w, dim=-1)
        all_a, b, all_v = a + rest_a, (w + rest).square(), v + rest_v
        bent_w, bent_a = rest * (2 * w + rest), rest_a * (2 * a + rest_a)  # of b and a²
        # Q₂, the terms of third degree, and all others
        most = m0 / 2 * (3 * (2 * a * third_a + rest_a.square()) + 2 * w * norm + rest.square())
        most = most + a * third_v + third_a * v + rest_a * rest_v
        most = most + m0 * (1.5 * (rest_a * b + a * bent_w) + 7.5 * all_a.square() * rest_a)
        most = most + all_v * (1.5 * bent_a + bent_w / 2) + rest_v * (1.5 * a.square() + w.square() / 2)
        x, left = 2 * all_a + b, down(torch.where(all_a < 1, 1 - all_a, 0.0), 1e-12)
        cube = 12 * all_a.square() * b + 6 * all_a * b.square() + b**3
        most = most + m0 * (0.375 * b.square() + 5 / 16 * cube + 35 / 128 * x**4 / left**9)
        most = most + all_v * (1.5 * all_a * b + 0.375 * b.square() + 5 / 16 * x**3 / left**7)
        total: Tensor = up(most.sum(-1), 1e-9)
        return total

    def _term_by_term(self, one: Tokens) -> Tensor:
        """(S) bounds of |Q₂|, which norms may make smaller."""
        r, w, a = self._size.radius, self._w[one.tokens], self._a[one.tokens]
        second = (one.most_along / 2 * (w.square() + 3 * a.square()) + a * r * one.v).sum(-1)
        return up(second + self._unsure(one) * (r * r), 1e-9)

    def range(
        self,
        prepared: Tokens | None,
        varying: Tensor | None,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        most = torch.zeros((), dtype=torch.float64) if varying is None else varying @ self._output_rests
        if prepared is not None:
            one, r = prepared.some(slice(None)), self._size.radius
            if not bent and self._third is not None:
                most = most + self._beyond_third(one, self._third, earlier)
                return up(most, 1e-9), up(most, 1e-9)
            on_b, on_a, number = self._weights(one)
            weights = self._everywhere(one.tokens, on_b, on_a)
            form = self._squares.most(weights, r, torch.cat([self._w, self._a]), enough)
            most = most + form + number
            if bent:
                second = self._term_by_term(one)
                large = worth(second, enough)
                if len(large):
                    second[large] = torch.minimum(second[large], self._bent(prepared, large) * (r * r))
                most = most + second
        return up(most, 1e-9), up(most, 1e-9)

    def take(self, prepared: Tokens, s: int, problem: Problem, varying: Tensor | None) -> None:
        square = self._size.radius * self._size.radius
        one = prepared.some(slice(s, s + 1))
        bent = float(self._term_by_term(one))
        d, t = self.u.shape[-1], one.tokens
        W, A = self._W[t].flatten(0, 1), self._A[t]
        if bent <= problem.slight:
            problem.lose("second order", bent)
        else:
            m = one.m[0]
            along = (m * self._n[self._tokens[t]]).sum(-1)  # of m as it is kept: what that lacks is a number
            turned = torch.einsum("ic,icp->ip", m, self._W[t])
            second = (A * (1.5 * along).unsqueeze(-1) - turned).mT @ A
            second = second - (W * (along / 2).repeat_interleave(d).unsqueeze(-1)).mT @ W
            problem.add("second order", (second + second.mT) / 2, 0.0)
            problem.lose("rounding", up(2 * float(self._unsure(one)) * square, 1e-9))
        on_b, on_a, number = (x[0] for x in self._weights(one))
        weights = torch.cat([on_b.repeat_interleave(d), on_a])
        rows, reach = torch.cat([W, A]), torch.cat([self._first[0][t].flatten(), self._first[1][t]]) * self._size.scale
        rounding_of_rows = 1e-9 * weights * torch.linalg.vector_norm(rows, dim=-1).square()
        problem.add_squares(rows, {"normalisation rest": -weights}, rounding_of_rows, up(reach, 1e-12))
        problem.lose("carried rests", up(float(number), 1e-9))
        if varying is not None:
            problem.lose("carried rests", up(float(varying @ self._output_rests), 1e-9))

    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        """The coordinates of the tokens' outputs."""
        return mu[:, self._tokens].flatten(1), 0.0
