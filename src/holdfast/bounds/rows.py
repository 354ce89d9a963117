r"""A closed form for layers of any size: covariances of every row and head, and nothing of size nd x nd.

F(X') - F(X) = HΓ + [P_l Γ W_l^V]_l W^O + [(P_l' - P_l) X' W_l^V]_l W^O (docs/math/second-order.md, Theorem 8). What
depends on X alone is computed once, in the arithmetic; from there on everything is a tensor of numbers that are not
negative, and every formula is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.attention.layer import Weights, join_heads, project
from holdfast.attention.rotary import Rotary
from holdfast.attention.sink_token import with_sink_token
from holdfast.bounds.base import Bound, Evaluation, register_bound
from holdfast.bounds.row_norms import (
    covariance_norms,
    cover,
    grown,
    moment_norms,
    norm_of_paths,
    norm_of_probabilities,
    shares,
)
from holdfast.bounds.score_map import distances_from_means, log_growth, turned_growth
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.rounding import as_ball, outward, up

_LEAST_LOG, _LEAST_GROWTH = -650.0, 2.0**-44  # exp of the one, times the other, is a normal number
_IDLE = 2.0**-20  # of the gain: where scores cost less, traces do in place of norms
_NEARLY = 0.9  # of the largest norm of a head: costs that head next to nothing, and the others count for less


@final
@register_bound
class RowsBound(Bound):
    """Every row of every head by its own covariances; rows and heads are joined by norms of the weights.

    δ/ε = |H| + ‖W^O‖ (max ‖P_l‖ ‖W^V‖ + max Ω_li κ_li ‖W^Q‖ + max Λ_lj ‖W^K‖ + ε max Ω_li √λ_li ‖W_l^Q‖ ‖W^K‖)

    Ω_li², κ_li² are the largest eigenvalues of the covariances of values and keys on the ball, and Λ_lj² is that of
    Σ_i Ω_li² d_lij q_li q_liᵀ, where diag(d_li) covers the Jacobian of softmax. The maxima belong to different tokens:
    the norm of values, queries and keys together is mostly smaller, and the bound is the smaller one.
    """

    name = "rows"
    in_networks = ("smallest", "near")
    score_terms = ("rotary", "bias", "sinks")
    cost = "3hn norms of size k x k, and O(hn²) for every eps"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        terms = terms_of(a, layer, x, a.number(eps))
        value = outward(gain(terms) * a.number(eps))
        return Evaluation(a.lift(value), {name: a.lift(term) for name, term in terms.items()})


# -- the weights


@dataclass(frozen=True)
class _Joined:
    """Maps W_1 … W_h, each taken as t_l (W_l/t_l), so that heads of unequal size can be joined by one norm.

    Attributes:
        sizes: (h) ‖W_l‖.
        factors: (3, h) three choices of t: 1, ‖W_l‖, and ‖W_l‖ or what is nearly the largest of them.
        norm: (3) ‖[W_1/t_1, …, W_h/t_h]‖.
    """

    sizes: Float64[Tensor, " h"]
    factors: Float64[Tensor, "3 h"]
    norm: Float64[Tensor, " 3"]


@dataclass(frozen=True)
class _Maps(Generic[Array]):
    """What the bound needs of the weights; the scale is that of the query maps.

    With rotary positions the maps of queries and keys count ρ >= ‖R_i‖ times.

    Attributes:
        query: of W_l^Q, and likewise key, value, output.
        key: see query.
        value: see query.
        output: see query.
        queries: (h, k, k) W^Qᵀ W^Q.
        keys: (h, k, k) W^Kᵀ W^K.
        crossed: (h, k, k) W^Kᵀ W^Q.
        scores: (h, 1, 1) ‖W_l^Q W_l^Kᵀ‖, with rotary positions ‖W_l^Q‖ ‖W_l^K‖.
    """

    query: _Joined
    key: _Joined
    value: _Joined
    output: _Joined
    queries: Array
    keys: Array
    crossed: Array
    scores: Array


def _maps(a: Arithmetic[Array], w: Weights[Array], scale: float, rotary: Rotary | None) -> _Maps[Array]:
    w_q, w_k, rho = w.w_q * scale, w.w_k, 1.0 if rotary is None else rotary.norm
    query, key = _joined(a, w_q * rho), _joined(a, w_k * rho)
    scores = a.matrix_norm(a.product(w_q, w_k)) if rotary is None else a.lift(outward(query.sizes * key.sizes))
    return _Maps(
        query=query,
        key=key,
        value=_joined(a, w.w_v),
        output=_joined(a, w.w_o.mT),
        queries=w_q.mT @ w_q,
        keys=w_k.mT @ w_k,
        crossed=w_k.mT @ w_q,
        scores=scores.unsqueeze(-1).unsqueeze(-1),
    )


def _joined(a: Arithmetic[Array], maps: Array) -> _Joined:
    head_norms = a.number(a.matrix_norm(maps))
    own = torch.where(head_norms > 1e-150, head_norms, 1.0)
    factors = torch.stack([torch.ones_like(own), own, own.maximum(_NEARLY * own.max())])
    norms = [a.number(a.matrix_norm(join_heads(maps / t[:, None, None]))) for t in factors]
    return _Joined(head_norms, factors, torch.stack(norms))


def _scales(left: _Joined, right: _Joined) -> Float64[Tensor, "3 h"]:
    """What head l counts for, for each choice of t, where x_l with ‖x_l‖ <= ‖g W_l‖, unit g, are joined by two maps."""
    return outward(left.factors * right.factors * (left.norm * right.norm).unsqueeze(-1))


def over_heads(values: Float64[Tensor, "*b h"], left: _Joined, right: _Joined) -> Float64[Tensor, "*b"]:
    """A bound of the norm of heads x_l with ‖x_l‖ <= values_l ‖g W_l‖, joined by two maps, for unit g."""
    return (outward(values).unsqueeze(-2) * _scales(left, right)).amax(-1).amin(-1)


# -- the layer at x


@final
@dataclass(frozen=True)
class AtPoint:
    """A layer at X: what its bound on every ball around X is made of. All numbers but `p` are upper bounds.

    Attributes:
        maps: of the weights.
        residual: |H|.
        fixed: (b…) |H| + ‖W^O‖ ‖W^V‖ max_l ‖P_l‖.
        P: (b…, h, n, n) the probabilities, 0 for a key that does not move.
        norms: (b…, h) ‖P_l‖.
        p: (b…, h, n, n) the probabilities in plain float64: weights at which the norms below are taken.
        rad: (b…, h, n, n) how far they may be from the exact ones.
        log_p: (b…, h, n, n) their logarithms.
        slope: (b…, h, n, n) ℓ of Lemma 3.
        bend: (b…, h, n, n) κ of Lemma 3.
        masked: (b…, 1, n, n) pairs that no head attends to, or None.
        query: (b…, h, n, k) q_li.
        key: (b…, h, n, k) likewise, up to a common row.
        value: (b…, h, n, k) likewise, up to a common row.
        value_top: (b…, h, n) λ_max(Σ_j p_lij (v_lj - c_li)(v_lj - c_li)ᵀ), or the trace.
        key_top: (b…, h, n) the same of the keys.
        value_far: (b…, h, n, n) ‖v_lj - c_li‖², 0 where masked.
        key_far: (b…, h, n, n) the same of the keys.
        drawn: (b…, h, n, n) Ω_li² d_lij at X, (j, i).
        drawn_top: (b…, h, n) λ_max(Σ_i drawn_lji q_li q_liᵀ), or the trace.
        query_length: (b…, h, 1, n) ‖q_li‖².
        share: (b…, h, n, n) s_lji, how much row i counts among those that key j draws; any positive numbers.
    """

    maps: _Maps[Tensor] | _Maps[Ball]
    residual: float
    fixed: Tensor
    P: Tensor
    norms: Tensor
    p: Tensor
    rad: Tensor
    log_p: Tensor
    slope: Tensor
    bend: Tensor
    masked: Tensor | None
    query: Ball
    key: Ball
    value: Ball
    value_top: Tensor
    key_top: Tensor
    value_far: Tensor
    key_far: Tensor
    drawn: Tensor
    drawn_top: Tensor
    query_length: Tensor
    share: Tensor

    def terms(self, radii: Float64[Tensor, "*b e"]) -> dict[str, Float64[Tensor, "*b e"]]:
        """The parts of δ/ε for radii (e), or (b…, e) where every input has its own."""
        own = radii.shape[:-1] or (1,) * self.fixed.ndim
        r = radii.movedim(-1, 0).reshape(-1, *own)
        q = self.probabilities(r[..., None, None, None])
        d = cover(q)
        damping = d.amax(-1).clamp(max=0.5).sqrt()
        spread = grown(self.value_top, self.p, q, self.value_far).minimum(self.value_far.amax(-1)).sqrt()
        omega = outward(spread + damping * r[..., None, None] * self.maps.value.sizes.unsqueeze(-1))
        kappa = grown(self.key_top, self.p, q, self.key_far).minimum(self.key_far.amax(-1)).sqrt()
        drawn = outward(omega.square().unsqueeze(-1) * d).mT
        keys, shared = (
            grown(self.drawn_top, self.drawn, w, self.query_length).sqrt() for w in (drawn, drawn / self.share)
        )
        bent, Q, K, out = outward((omega * damping).amax(-1)), self.maps.query, self.maps.key, self.maps.output
        bilinear = over_heads(bent * Q.sizes, out, K).minimum(over_heads(bent * K.sizes, out, Q))
        queries = outward(omega * (kappa + damping * r[..., None, None] * K.sizes.unsqueeze(-1)))
        parts = {
            "fixed": self.fixed.expand(r.shape[:1] + self.fixed.shape),
            "queries": over_heads((omega * kappa).amax(-1), out, Q),
            "keys": over_heads(keys.amax(-1), out, K),
            "bilinear": bilinear * r,
            "together": self._together(queries, shared) + self.residual,
        }
        return {name: outward(term).movedim(0, -1) for name, term in parts.items()}

    def sharpened(self) -> AtPoint:
        """The same by norms; as these are not exact, some are above the traces."""
        value_top, key_top = (
            top.minimum(covariance_norms(self.p, z))
            for top, z in ((self.value_top, self.value), (self.key_top, self.key))
        )
        drawn = _drawn(value_top, self.p)
        return replace(
            self,
            value_top=value_top,
            key_top=key_top,
            drawn=drawn,
            drawn_top=self.drawn_top.minimum(moment_norms(drawn, self.query)),
            share=shares(drawn * self.query_length),
        )

    def flat(self) -> AtPoint:
        """The same with one batch dimension."""
        batch = self.fixed.shape
        masked = None if self.masked is None else self.masked.expand(*batch, *self.masked.shape[-3:])
        attributes = {**vars(self), "masked": masked}
        tensors: dict[str, Any] = {name: t for name, t in attributes.items() if isinstance(t, Tensor | Ball)}
        return replace(self, **{name: t.reshape(-1, *t.shape[len(batch) :]) for name, t in tensors.items()})

    def _together(self, queries: Float64[Tensor, "e *b h n"], keys: Float64[Tensor, "e *b h n"]) -> Tensor:
        """(e, b…) a bound of the three paths together: one token does not pass all of them at their best."""
        out, V, Q, K = self.maps.output, self.maps.value, self.maps.query, self.maps.key
        sizes = (self.norms.expand(queries.shape[:-1]), queries.amax(-1), keys.amax(-1))
        scales = [_scales(out, path) for path in (V, Q, K)]
        whole = sum((size.unsqueeze(-2) * scale).amax(-1) for size, scale in zip(sizes, scales, strict=True))
        best = torch.as_tensor(whole).argmin(-1)  # any choice serves, but it is that of all three
        value, query, key = (scale[best] for scale in scales)
        scaled = queries * query.unsqueeze(-1), keys * key.unsqueeze(-1)
        return norm_of_paths(self.P, self.norms, self.share, value, *scaled)

    def probabilities(self, r: Tensor) -> Tensor:
        """(e, b…, h, n, n) q_lij >= the mean of p_lij between the scores, everywhere on the balls.

        p_lij grows at most as exp(t g) (Lemma 3 (a)) and stays below 1; this is the integral of that over 0 <= t <= 1.
        It does not fall with g, which may therefore be raised to what no product underflows with.
        """
        grown = (self.slope + self.bend * r).mul_(up(r, 2.0**-44)).clamp_(min=_LEAST_GROWTH)
        until = torch.minimum(grown, -self.log_p)
        q = (until + self.log_p).clamp_(_LEAST_LOG, 0.0).exp_().mul_(until.neg().expm1_().neg_())
        q = up(q.add_(grown - until).div_(grown), 2.0**-42).nan_to_num_(nan=1.0).clamp_(max=1.0)
        return q if self.masked is None else q.masked_fill_(self.masked, 0.0)


def gain(terms: dict[str, Tensor]) -> Tensor:
    """δ/ε from its terms: one by one, or together."""
    apart = torch.stack([term for name, term in terms.items() if name != "together"]).sum(0)
    return outward(apart.minimum(terms["together"]))


def terms_of(
    a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, radii: Float64[Tensor, "*b e"]
) -> dict[str, Float64[Tensor, "*b e"]]:
    """The parts of δ/ε: by norms where scores cost something."""
    rough = a.once("rows, by traces", lambda: by_traces(a, layer, x))
    terms = rough.terms(radii)
    idle = gain(terms) <= rough.fixed.unsqueeze(-1) * (1 + _IDLE)
    if bool(idle.all()):
        return terms
    here = a.once("rows", rough.sharpened)
    return {name: torch.where(idle, terms[name], term) for name, term in here.terms(radii).items()}


def at_point(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> AtPoint:
    """The layer at X by norms: of all small matrices, which takes most of the time."""
    return by_traces(a, layer, x).sharpened()


def by_traces(a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> AtPoint:
    """The layer at X with the trace of every small matrix, which is not below its norm, in place of it."""
    residual, still = abs(layer.residual), layer.sinks is not None
    if still:
        layer, x = with_sink_token(layer, x)
    X = a.lift(x)
    weights = (layer.w_q, layer.w_k, layer.w_v, layer.w_o)
    w, allowed, rotary = layer.weights(X), layer.allowed(x.shape[-2]), layer.rotary
    name = f"rows, scale {layer.scale}, turned by {None if rotary is None else rotary.norm}, on {x.device}"
    maps = a.of_weights(name, weights, lambda: _maps(a, w, layer.scale, rotary))
    masked = None if allowed is None else ~allowed.to(x.device).unsqueeze(-3)
    query, key, value = projections(layer, X)
    scores = layer.complete(query @ key.mT)  # up to a constant along each row
    P = scores.softmax(-1)
    if rotary is None:
        slope, bend = log_growth(
            P,
            distances_from_means(P, key @ maps.queries @ key.mT),
            query @ maps.crossed @ key.mT,
            ((query @ maps.keys) * query).sum(-1, keepdim=True),
            maps.scores,
        )
    else:
        slope, bend = turned_growth(rotary, query, key, w.w_q * layer.scale, w.w_k, P, maps.scores)
    log_p = a.number(scores.log_softmax(-1))
    p, n = as_ball(P).mid, x.shape[-2]
    exact = a.lift(p)
    value_far, key_far = (_hidden(a.number(distances_from_means(exact, z @ z.mT)), masked) for z in (value, key))
    value_top, key_top = (outward((p * far).sum(-1), n) for far in (value_far, key_far))
    drawn = _drawn(value_top, p)
    query_length = a.number(query.square().sum(-1)).unsqueeze(-2)
    above = a.number(P).clamp(max=1.0)
    if still:  # what the value of a sink does to the output is nothing: it does not move
        above = torch.cat([above[..., :-1], torch.zeros_like(above[..., -1:])], -1)
    norms = norm_of_probabilities(above)
    return AtPoint(
        maps=maps,
        residual=residual,
        fixed=outward(over_heads(norms, maps.output, maps.value) + residual),
        P=above,
        norms=norms,
        p=p,
        rad=as_ball(P).rad,
        log_p=(log_p + log_p.abs() * 2.0**-44).clamp(max=0.0),
        slope=a.number(slope),
        bend=a.number(bend),
        masked=masked,
        query=as_ball(query),
        key=as_ball(key),
        value=as_ball(value),
        value_top=value_top,
        key_top=key_top,
        value_far=value_far,
        key_far=key_far,
        drawn=drawn,
        drawn_top=outward((drawn * query_length).sum(-1), n),
        query_length=query_length,
        share=shares(drawn * query_length),
    )


def projections(layer: AttentionLayer, X: Array) -> tuple[Array, Array, Array]:
    """Queries, with the scale, keys and values (…, h, n, k), the first two turned by their positions.

    A common row is subtracted from keys and values; a key bias, which is one except with rotary positions, is then
    left out too.
    """
    w, rotary = layer.weights(X), layer.rotary
    query, value = project(X, w.w_q, w.b_q) * layer.scale, project(X, w.w_v, None)
    key = project(X, w.w_k, None if rotary is None else w.b_k)
    if rotary is not None:
        query, key = rotary.turn(query), rotary.turn(key)
    return query, _centred(key), _centred(value)


def _drawn(value_top: Float64[Tensor, "*b n"], p: Float64[Tensor, "*b n n"]) -> Float64[Tensor, "*b n n"]:
    return outward(value_top.unsqueeze(-1) * cover(p)).mT


def _centred(z: Array) -> Array:
    """Less a common row, which no covariance sees."""
    return z - as_ball(z).mid.mean(-2, keepdim=True)


def _hidden(x: Tensor, masked: Tensor | None) -> Tensor:
    return (x if masked is None else x.masked_fill(masked, 0.0)).clamp(min=0.0)
