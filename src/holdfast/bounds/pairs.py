r"""`rows`, sharpened where rows attend to few keys: what moves the scores is what the values average out.

A covariance is a sum over pairs of keys, Cov_p(f, g) = Σ_{j<m} p_j p_m (f_j - f_m)(g_j - g_m), and the scores of a pair
move apart with the difference of two tokens. The pairs that matter most are taken with their directions and joined with
the values by one quadratic form; the other ones are bounded as in `rows` (docs/math/second-order.md, Theorem 9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.bounds import rows
from holdfast.bounds.base import Bound, Evaluation, register_bound
from holdfast.bounds.pair_form import quadratic_form, row_norms
from holdfast.bounds.row_norms import cover, grown, moment_norms
from holdfast.bounds.rows import AtPoint, at_point, over_heads, projections
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.certified import gram_upper
from holdfast.linalg.curves import Grid
from holdfast.linalg.rounding import UNIT, as_ball, frobenius_upper, gamma, outward, up
from holdfast.linalg.squarings import gram_norm

_PAIRS, _MOST = 3, 1536  # for a row, in the mean, and for all of them
_RATIO = 1.02  # of two radii at which the largest eigenvalue is proved
_NONE = -(2**31)  # no level
_MATRICES = {"cuda": 2**32}  # numbers of the matrices of pairs whose eigenvalues are proved together
_LARGEST = 2**24  # numbers of one input that are held at once; `rows` serves beyond
_WORTH = 0.02  # of the gain: where scores cost less, `rows` is as good


@final
@register_bound
class Pairs(Bound):
    """√(μ + λ_max) of the values and the pairs of keys that matter most, and the other pairs as in `rows`.

    It is never above `rows`, and equal to it where the scores hardly move.
    """

    name = "pairs"
    score_terms = ("rotary", "bias")
    cost = "that of `rows`, and for some radii an eigenvalue of size 3hn"
    reference: ClassVar[str] = "holdfast"
    in_best = False
    in_networks = ("quick",)

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def held_numbers(self, layer: AttentionLayer, tokens: int) -> int:
        return number_of_pairs(layer.h, tokens) ** 2

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        radii = a.number(eps)
        terms = rows.terms_of(a, layer, x, radii)
        gain = rows.gain(terms)
        costly = gain * (1 - _WORTH) > terms["fixed"]
        if x.shape[-2] > 1 and layer.h * x.shape[-2] ** 2 * layer.k <= _LARGEST and bool(costly.any()):
            here = a.once("rows", lambda: at_point(a, layer, x))
            pairs = a.once("pairs", lambda: _chosen(a, layer, x.reshape(-1, *x.shape[-2:]), here.flat()))
            gain = torch.where(costly, gain.minimum(pairs.gain(radii.expand_as(gain))), gain)
        return Evaluation(a.lift(outward(gain * radii)), {"gain": a.lift(gain)})


@final
@dataclass
class _Levels:
    """What was proved at some levels of each input.

    Attributes:
        level: (S, B) the levels; _NONE where nothing was proved.
        above: (S, B, N) the weights there.
        largest: (S, B) √λ_max.
    """

    level: Int64[Tensor, "S B"]
    above: Float64[Tensor, "S B N"]
    largest: Float64[Tensor, "S B"]

    def at(self, level: Int64[Tensor, "e B"]) -> Int64[Tensor, "e B"]:
        """The place at which a level of an input is known; -1 where it is not."""
        same = self.level == level.unsqueeze(1)
        places = torch.arange(len(self.level), device=level.device).unsqueeze(-1)
        return torch.cat([torch.full_like(level, -1).unsqueeze(1), torch.where(same, places, -1)], 1).amax(1)

    def add(self, level: Tensor, above: Tensor, largest: Tensor) -> None:
        self.level, self.above = torch.cat([self.level, level]), torch.cat([self.above, above])
        self.largest = torch.cat([self.largest, largest])


@final
@dataclass(frozen=True)
class _ChosenPairs:
    """A layer at B inputs X with N pairs s = (l, i, j, m) of keys chosen for each. All numbers are upper bounds.

    Attributes:
        here: what `rows` knows.
        top: (B, h, n, 2) the two keys of each row with the largest probabilities; each pair has one of them.
        taken: (B, h, n, 2, n) which of their pairs are chosen.
        head: (B, N) l.
        row: (B, N) i.
        first: (B, N) j.
        second: (B, N) m.
        apart: (B, N) ‖v_lj - v_lm‖.
        mu: (B) μ.
        gram: (B, N, N) ⟨c_s, R c_s'⟩, but for rounding.
        lengths: (B, 1 + h, N) of the parts of c_s that it is made of, and their radii.
        radii: see lengths.
        rounding: (B, 1 + h) what entries of `gram` are off by, relative to a product of two lengths …
        size: (B, 1 + h) … and the largest entry of R there.
        value_top: (B, h, n) λ_max(Σ_j w_lij (v_lj - c_li)(v_lj - c_li)ᵀ) with the weights w of the other pairs, at X.
        key_top: (B, h, n) the same of the keys.
        base: (B, h, n, n) these weights.
        drawn: (B, h, n, n) value_top_li w_lij, (j, i).
        drawn_top: (B, h, n) λ_max(Σ_i drawn_lji q_li q_liᵀ).
        grid: the radii at which √λ_max is proved, whatever was asked before.
    """

    here: AtPoint
    top: Int64[Tensor, "B h n 2"]
    taken: Bool[Tensor, "B h n 2 n"]
    head: Int64[Tensor, "B N"]
    row: Int64[Tensor, "B N"]
    first: Int64[Tensor, "B N"]
    second: Int64[Tensor, "B N"]
    apart: Float64[Tensor, "B N"]
    mu: Float64[Tensor, " B"]
    gram: Float64[Tensor, "B N N"]
    lengths: Float64[Tensor, "B parts N"]
    radii: Float64[Tensor, "B parts N"]
    rounding: Float64[Tensor, "B parts"]
    size: Float64[Tensor, "B parts"]
    value_top: Float64[Tensor, "B h n"]
    key_top: Float64[Tensor, "B h n"]
    base: Float64[Tensor, "B h n n"]
    drawn: Float64[Tensor, "B h n n"]
    drawn_top: Float64[Tensor, "B h n"]
    grid: Grid

    @cached_property
    def _proved(self) -> _Levels:
        """What was proved so far."""
        none = self.gram.new_zeros(0, *self.head.shape)
        return _Levels(self.head.new_zeros(0, len(self.head)), none, none[..., 0])

    def gain(self, radii: Float64[Tensor, "*b e"]) -> Float64[Tensor, "*b e"]:
        """A bound of δ/ε."""
        r = radii.reshape(-1, radii.shape[-1]).mT  # (e, B)
        maps, out = self.here.maps, self.here.maps.output
        q, u = self._probabilities(r)
        weights = _others(q, u, self.top, self.taken)
        near = r[..., None, None]
        damping = weights.amax(-1).sqrt()
        value, key = (
            grown(top, self.base, weights, far).minimum(outward((weights * far).sum(-1), far.shape[-1])).sqrt()
            for top, far in ((self.value_top, self.here.value_far), (self.key_top, self.here.key_far))
        )
        omega = outward(value + damping * near * maps.value.sizes.unsqueeze(-1))
        drawn = outward(omega.square().unsqueeze(-1) * weights).mT
        keys = grown(self.drawn_top, self.drawn, drawn, self.here.query_length).sqrt()
        queries = outward(omega * (key + damping * near * maps.key.sizes.unsqueeze(-1)))
        weight, bent = self._weights(r, q, u)
        bilinear = over_heads(bent * maps.query.sizes, out, maps.key)
        bilinear = bilinear.minimum(over_heads(bent * maps.key.sizes, out, maps.query))
        joined = outward(out.norm[0] * outward(self.mu + self._largest(r, weight).square()).sqrt())
        rest = over_heads(queries.amax(-1), out, maps.query) + over_heads(keys.amax(-1), out, maps.key)
        whole = outward(self.here.residual + joined + rest + bilinear * r).mT
        return whole.masked_fill(whole.isnan(), math.inf).reshape(radii.shape)

    def _probabilities(self, r: Float64[Tensor, "e B"]) -> tuple[Tensor, Tensor]:
        """(e, B, h, n, n) the mean and the largest of every probability between the scores, from above."""
        here, at = self.here, r[..., None, None, None]
        largest = outward((here.log_p + outward((here.slope + here.bend * at) * at)).clamp(max=0.0).exp())
        return here.probabilities(at), largest.clamp(max=1.0).nan_to_num(nan=1.0)

    def _weights(self, r: Float64[Tensor, "e B"], q: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """(e, B, N) √π_s Ω_li of the chosen pairs, and (e, B, h) the largest Ω_li √λ_li."""
        spread = cover(q).amax(-1).clamp(max=0.5).sqrt()
        moved = spread * r[..., None, None] * self.here.maps.value.sizes.unsqueeze(-1)
        every = torch.arange(len(self.head), device=q.device).unsqueeze(-1)
        one, other, most, least = (
            t[:, every, self.head, self.row, at] for t in (q, u) for at in (self.first, self.second)
        )
        pi = torch.minimum(outward(one * least), outward(other * most)).minimum(_halved(one)).minimum(_halved(other))
        squares = torch.zeros_like(moved).flatten(2)
        squares = squares.scatter_add(
            2, (self.head * moved.shape[-1] + self.row).expand_as(pi), outward(pi * self.apart.square())
        )
        omega = outward(outward(squares.reshape(moved.shape), 2 * moved.shape[-1]).sqrt() + moved)
        return outward(pi.sqrt() * omega[:, every, self.head, self.row]), outward((omega * spread).amax(-1))

    def _largest(self, r: Float64[Tensor, "e B"], weight: Float64[Tensor, "e B N"]) -> Float64[Tensor, "e B"]:
        """√λ_max(diag(w) G diag(w)); it is proved at a few radii, and what is proved at a larger one is scaled down."""
        level = self.grid.level(r.mT).mT
        known = self._proved.at(level)
        if not bool((known >= 0).all()):
            self._prove(level, known < 0)
            known = self._proved.at(level)
        every = torch.arange(level.shape[-1], device=level.device)
        # Any level and factor serve for which weight <= factor · above.
        factor = outward((weight / self._proved.above[known, every]).amax(-1))
        return outward(factor * self._proved.largest[known, every])

    def _prove(self, level: Int64[Tensor, "e B"], new: Bool[Tensor, "e B"]) -> None:
        """Proves √λ_max at the levels of all inputs that are new, together."""
        asked = new.any(-1)
        level, new = level[asked], new[asked]
        radius = self.grid.radius(level.mT).mT
        above = self._weights(radius, *self._probabilities(radius))[0].clamp(min=1e-100)
        largest = torch.full_like(radius, math.inf)
        step = max(1, _MATRICES.get(above.device.type, 2**25) // above.shape[-1] ** 2)
        for which in torch.split(new.nonzero(), step):
            asked_at, of = which.unbind(-1)
            largest[asked_at, of] = self._above(above[asked_at, of], of)
        self._proved.add(torch.where(new, level, _NONE), above, largest)

    def _above(self, weight: Float64[Tensor, "b N"], which: Int64[Tensor, " b"]) -> Float64[Tensor, " b"]:
        """√λ_max for weights of some of the inputs."""
        w = weight.unsqueeze(1)
        long, short = ((w * t[which]).square().sum(-1) for t in (self.lengths, self.radii))
        size, rounding = self.size[which], self.rounding[which]
        error = (rounding * long + size * (2 * (long * short).sqrt() + short)).sum(-1)
        matrix = weight.unsqueeze(-1) * self.gram[which] * w
        return gram_upper(matrix, outward(up(error, 1e-9) + 4 * UNIT * frobenius_upper(matrix)), tolerance=1e-6)


def _halved(q: Tensor) -> Tensor:
    """The largest ∫ p_t (1 - p_t) dt, where ∫ p_t dt <= q: t(1 - t) is concave."""
    return outward(torch.where(q < 0.5, up(q * (1 - q), 4 * UNIT), 0.25))


def _others(q: Float64[Tensor, "e B h n n"], u: Tensor, top: Tensor, taken: Tensor) -> Float64[Tensor, "e B h n n"]:
    """w_j >= 2 Σ_m ∫ p_tj p_tm dt over the pairs (j, m) that are not taken.

    Over these Σ π_jm (f_j - f_m)² <= Σ_j w_j f_j². u is the largest of p_t, which may leave the integral.
    """
    both = top.expand(*q.shape[:-1], 2)
    among = q.gather(-1, both)
    outside = outward(q.scatter(-1, both, 0.0).sum(-1, keepdim=True), q.shape[-1])
    left = outside + (among.unsqueeze(-1) * ~taken).sum(-2)  # for a key that is not in `top`
    own = torch.zeros_like(taken).scatter(-1, top.unsqueeze(-1), True)
    left_top = (q.unsqueeze(-2) * ~(taken | own)).sum(-1)
    left = outward(left.scatter(-1, both, left_top), q.shape[-1])
    return outward(2 * torch.minimum(outward(u * left), _halved(q)))


def _chosen(a: Arithmetic[Array], layer: AttentionLayer, x: Float64[Tensor, "B n d"], here: AtPoint) -> _ChosenPairs:
    query, key, value = (as_ball(projection) for projection in projections(layer, a.lift(x)))
    top = here.p.topk(2, -1).indices
    head, row, side, m = _most_important(here, query.mid, key.mid, value.mid, top)
    every = torch.arange(len(top), device=x.device).unsqueeze(-1)
    j = top[every, head, row, side]
    taken = torch.zeros(*top.shape, x.shape[-2], dtype=torch.bool, device=x.device)
    taken[every, head, row, side, m] = True
    both = taken.gather(-1, top.flip(-1).unsqueeze(-1)).any(-2, keepdim=True)  # the pair of the two stands for both
    taken = taken.scatter(-1, top.flip(-1).unsqueeze(-1), both.expand(*top.shape, 1))
    base = _others(here.p.unsqueeze(0), here.p.unsqueeze(0), top, taken)[0]
    value_top, key_top = (_moments(base, here.p, z) for z in (value, key))
    drawn = outward(value_top.unsqueeze(-1) * base).mT
    length = torch.linalg.vector_norm(x, dim=(-2, -1))
    unit = torch.where(length > 1e-100, length, 1.0)  # any numbers serve
    mu, gram, lengths, radii, rounding, size = quadratic_form(layer, here, query, key, head, row, j, m)
    return _ChosenPairs(
        here=here,
        top=top,
        taken=taken,
        head=head,
        row=row,
        first=j,
        second=m,
        apart=_length(value[every, head, j] - value[every, head, m]),
        mu=mu,
        gram=gram,
        lengths=lengths,
        radii=radii,
        rounding=rounding,
        size=size,
        value_top=value_top,
        key_top=key_top,
        base=base,
        drawn=drawn,
        drawn_top=moment_norms(drawn, query),
        grid=Grid(lambda: unit, torch.full_like(unit, math.inf), _RATIO),
    )


def number_of_pairs(heads: int, tokens: int) -> int:
    """How many pairs are taken with their directions."""
    return max(1, min(_MOST, min(_PAIRS, tokens) * heads * tokens))


def _most_important(here: AtPoint, query: Tensor, key: Tensor, value: Tensor, top: Tensor) -> tuple[Tensor, ...]:
    """(B, N) head, row, side in `top` and other key of the pairs that move most at X; any choice is sound."""
    B, h, n, _ = top.shape
    index = top.movedim(-1, -2).reshape(B, h, 2 * n, 1).expand(B, h, 2 * n, n)
    apart, turned = (torch.cdist(z, z).gather(-2, index).reshape(B, h, 2, n, n) for z in (value, key))
    p = here.p.unsqueeze(-3) * here.p.gather(-1, top).movedim(-1, -2).unsqueeze(-1)
    maps, length = here.maps, torch.linalg.vector_norm(query, dim=-1)[:, :, None, :, None]
    gains = [t.sizes[:, None, None, None] for t in (maps.key, maps.query)]
    moved = p * apart * (math.sqrt(2) * length * gains[0] + turned * gains[1])
    moved[:, :, 1].scatter_(-1, top[..., :1], -1.0)  # it stands at the other side already
    best = moved.flatten(1).topk(number_of_pairs(h, n))
    head, side = best.indices // (2 * n * n), best.indices // (n * n) % 2
    row, other = best.indices // n % n, best.indices % n
    every = torch.arange(B, device=top.device).unsqueeze(-1)
    return head, row, side, torch.where(best.values > 0, other, top[every, head, row, side])  # or a key with itself


def _moments(weights: Float64[Tensor, "B h n n"], p: Tensor, z: Ball) -> Float64[Tensor, "B h n"]:
    """λ_max(Σ_j w_ij (z_j - c_i)(z_j - c_i)ᵀ), c_i = Σ_j p_ij z_j."""
    apart = z.mid.unsqueeze(-3) - (p @ z.mid).unsqueeze(-2)
    rows = weights.sqrt().unsqueeze(-1) * apart
    T, W = rows.square().sum((-2, -1)), weights.sum(-1)
    far, wide = (t.amax(-1, keepdim=True) for t in (row_norms(z.mid), row_norms(z.rad)))
    E = W * (2 * wide + gamma(z.shape[-2] + 16) * far).square()
    error = (gamma(z.shape[-2] + 16) * T + 2 * (T * E).sqrt() + E) * 1.01
    return outward(gram_norm(rows.mT @ rows, error, 5, 0.01).square())


def _length(z: Ball) -> Tensor:
    return outward(row_norms(z.mid) + row_norms(z.rad))
