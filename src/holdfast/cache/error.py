"""How far a layer's output can move when its cache of keys and values is stored in few bits (docs/math/cache.md)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.attention import AttentionLayer, checks
from holdfast.attention.layer import merge_heads, project
from holdfast.cache.quantise import Per, Quantiser, quantiser
from holdfast.cache.worst_case import largest_means
from holdfast.errors import InputError, SoundnessError
from holdfast.linalg import Array, Ball, MatrixOperator, upper
from holdfast.linalg.rounding import FLOOR, down, frobenius, power_of_two, up

Stored = Quantiser | str | Tensor | None
_STEPS, _STARTS = 12, 2  # of the attack
_ROUND = 2.0**-44  # pays for the rounding of a few operations on numbers >= 0 …
_SUMS = 2.0**-40  # … and of sums of some thousand of them
_TINY = 1e-140  # more than a length loses by squares that underflow, where the largest value and weight are about 1


@final
@dataclass(frozen=True)
class CacheError:
    """How far every token's output can move over all caches within the bounds, proved, and how far one cache moves it.

    Attributes:
        value: (b…, n) a proved bound of the movement of the layer's output at each token.
        heads: (b…, h, n) the same of each head's contribution to it.
        norms: (b…, n) what norms alone prove, never less: (e^{2t} - 1) times the mean distance of the values.
        lower: (b…, n) how far the witness moves each token, rounded down.
        witness: the keys (b…, g, n, k) and values (b…, g, n, k_v) of a cache within the bounds.
        moved: (b…, n) how far the quantised cache itself moves each token, rounded down; None for given bounds.
        size: (b…, n) the length of each token's attention output, for comparison.
        seconds: wall time.
    """

    value: Float64[Tensor, "*b n"]
    heads: Float64[Tensor, "*b h n"]
    norms: Float64[Tensor, "*b n"]
    lower: Float64[Tensor, "*b n"]
    witness: tuple[Tensor, Tensor]
    moved: Float64[Tensor, "*b n"] | None
    size: Float64[Tensor, "*b n"]
    seconds: float = 0.0

    @property
    def side(self) -> str:
        return "upper"

    @property
    def guarantee(self) -> str:
        return "proved"


def cache_error(
    layer: AttentionLayer,
    x: Tensor,
    keys: Stored = None,
    values: Stored = None,
    *,
    token: int | None = None,
    attack: bool = True,
    seed: int = 0,
) -> CacheError:
    """How far the output of the layer can move when keys and values are stored with errors.

    The cache holds keys as queries meet them, normalised and turned by their positions, and values with their bias,
    once for each key-value head. Queries are not stored.

    Args:
        layer: the attention layer; computed in float64.
        x: (b…, n, d) the inputs.
        keys: how keys are stored: "int8", "int4", "int2" or "fp8", with "/channel" (the default) or "/token"; a
            `Quantiser`; bounds of every entry's error, (b…, g, n, k); or None for exact keys.
        values: the same for values, (b…, g, n, k_v); the default shares a scale in each token.
        token: which token the attack moves; default all of them together.
        attack: whether to search; otherwise the witness is the quantised cache, or the exact one.
        seed: of the attack.

    Example:
        >>> r = cache_error(layer, x, keys="int4", values="int4")
        >>> r.value / r.size, r.lower
    """
    began = time.perf_counter()
    checks.input(layer, x)
    layer, x = layer.double(), x.detach().double()
    if token is not None and not -x.shape[-2] <= token < x.shape[-2]:
        raise InputError(f"token is {token}; x has {x.shape[-2]} tokens")
    with torch.no_grad():
        cache = _Cache(layer, x, keys, values)
        value, heads, norms = _CacheBound(cache).proved()
        actual = cache.read
        moved = None if actual is None else cache.movement(*actual)
    start = actual or (cache.keys.mid, cache.values.mid)
    witness = _climbed(cache, start, token, seed) if attack else cache.inside(*start)
    with torch.no_grad():
        lower = cache.movement(*witness)
        size = _or_infinite(frobenius(cache.output, (-1,)).upper)
    for attained in (lower, moved):
        if attained is not None and bool((attained > value).any()):
            raise SoundnessError(
                "cache_error found a cache that moves the output further than its bound; please report it"
            )
    return CacheError(value, heads, norms, lower, witness, moved, size, time.perf_counter() - began)


class _Cache:
    """The exact cache of a layer at x, in balls, and the bounds of its entries' errors."""

    def __init__(self, layer: AttentionLayer, x: Tensor, keys: Stored, values: Stored) -> None:
        self.layer, self._x = layer, x
        X, self._repeats = Ball.exact(x), layer.h // layer.g
        placed_q, placed_k = layer.placed(X)
        w = layer.weights(X)
        self.w_o: Ball = w.w_o
        self.query: Ball = placed_q.value
        own = slice(None, None, self._repeats)
        self.keys: Ball = placed_k.value[..., own, :, :]
        self.values: Ball = project(X, w.w_v, w.b_v)[..., own, :, :]
        self.key_error, key_read = _stored(keys, self.keys, "keys", "channel")
        self.value_error, value_read = _stored(values, self.values, "values", "token")
        #: What a quantised cache reads as.
        self.read: tuple[Tensor, Tensor] | None = None
        if not isinstance(keys, Tensor) and not isinstance(values, Tensor):
            self.read = key_read, value_read

    def per_head(self, t: Array) -> Array:
        """(b…, g, n, k) to (b…, h, n, k)."""
        return t if self._repeats == 1 else t.repeat_interleave(self._repeats, -3)

    def attend(self, query: Array, keys: Array, values: Array, w_o: Array) -> Array:
        """(b…, n, d_out) what the heads write with this cache."""
        p = self.layer.probabilities(query @ self.per_head(keys).mT * self.layer.scale)
        return merge_heads(p @ self.per_head(values)) @ w_o.flatten(0, 1)

    @cached_property
    def output(self) -> Ball:
        return self.attend(self.query, self.keys, self.values, self.w_o)

    def movement(self, keys: Tensor, values: Tensor) -> Tensor:
        """(b…, n) how far this cache moves every token, rounded down."""
        there = self.attend(self.query, Ball.exact(keys), Ball.exact(values), self.w_o)
        return frobenius(there - self.output, (-1,)).lower.clamp(min=0.0).nan_to_num(nan=0.0)

    def inside(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest cache whose every entry is, exactly, within its bound."""
        nearest = []
        for t, exact, error in ((keys, self.keys, self.key_error), (values, self.values, self.value_error)):
            room = (down(error, 1e-12) - exact.rad * 2 - exact.mid.abs() * 2.0**-50).clamp(min=0.0)
            nearest.append(torch.minimum(torch.maximum(t, exact.mid - room), exact.mid + room))
        return nearest[0], nearest[1]


def _stored(how: Stored, exact: Ball, name: str, per: Per) -> tuple[Tensor, Tensor]:
    """(b…, g, n, k) a bound of every entry's error, and what is read."""
    if how is None:
        return torch.zeros_like(exact.mid), exact.mid
    if isinstance(how, Tensor):
        if how.shape != exact.shape or not bool(((how >= 0) & (how < math.inf)).all()):
            raise InputError(
                f"{name} has shape {tuple(how.shape)}; expected bounds of every entry, {tuple(exact.shape)}, >= 0 "
                "and finite"
            )
        return how.double(), exact.mid
    rule = quantiser(how, per) if isinstance(how, str) else how
    if not isinstance(rule, Quantiser):
        raise InputError(f"{name} is {type(how).__name__}; expected a quantiser, its name, or a tensor of bounds")
    # The rule is applied to rounded keys; what they are off by is added.
    return rule.error(exact.mid) + exact.rad * 2, rule(exact.mid)


class _CacheBound:
    """Proved bounds of the movement, head by head and together.

    The movement is linear in the values and in W^O. Powers of two bring both to size 1, so that squares of lengths
    neither underflow nor overflow; all but `proved` is in these units.
    """

    def __init__(self, cache: _Cache) -> None:
        layer = cache.layer
        query, keys = cache.query, cache.per_head(cache.keys)
        reach = ((_size(query) @ cache.per_head(cache.key_error).mT) + layer.k * FLOOR) * abs(layer.scale)
        scores = query @ keys.mT * layer.scale
        reach = up(reach, _SUMS)
        low, high = (layer.complete(Ball.exact(t)) for t in (scores.lower - reach, scores.upper + reach))
        masked = (high.mid == -torch.inf) & (high.rad == 0)  # a score that overflows counts
        #: (b…, h, n, 1) rows of one key: its probability is 1 whatever its score.
        self._alone = ((~masked).sum(-1, keepdim=True) == 1) & (layer.sinks is None)
        fixed = masked | self._alone
        self._scores = ((low.lower + high.upper) / 2).masked_fill(fixed, 0.0).masked_fill(masked, -torch.inf)
        apart = (up((high.upper - low.lower) / 2, _ROUND) + self._scores.abs() * 2.0**-50).masked_fill(fixed, 0.0)
        self._reach, self._apart = reach.masked_fill(fixed, 0.0), apart
        self._p, self._sinks = layer.softmax(layer.complete(scores)), layer.sinks is not None
        value, error = cache.per_head(cache.values), cache.per_head(cache.value_error)
        of_values = power_of_two(torch.maximum(_size(value), error), (-3, -2, -1))
        of_map = power_of_two(cache.w_o.mid, (-3, -2, -1))
        self._value, self._error, self._w_o = value / of_values, error / of_values, cache.w_o / of_map
        self._unit = (of_values * of_map).clamp(min=FLOOR).squeeze(-1)  # (b…, 1, 1)
        if layer.sinks is not None:
            sinks = layer.sinks[:, None, None].expand(*apart.shape[:-1], 1)
            self._scores, self._apart = torch.cat([self._scores, sinks], -1), torch.nn.functional.pad(apart, (0, 1))

    @cached_property
    def _basis(self) -> Tensor:
        """(h, k_v, k_v) near the left singular vectors of W_l^O."""
        return torch.linalg.svd(self._w_o.mid, full_matrices=False).U.contiguous() if self._wide else self._eye

    @property
    def _wide(self) -> bool:
        return self._w_o.shape[-1] >= self._w_o.shape[-2]

    @property
    def _eye(self) -> Tensor:
        h, k = self._w_o.shape[:2]
        return torch.eye(k, dtype=torch.float64, device=self._w_o.device).expand(h, k, k)

    @cached_property
    def coordinates(self) -> Tensor:
        """(b…, h, n, k_v) how far each coordinate y_l B_l of a head's mean of the exact values can move.

        That is exact for one head, row and coordinate: the scores of a row fill their box.
        """
        at = self._value @ Ball.exact(self._basis)
        mean = self._p @ at
        high, low = at.upper, at.lower
        if self._sinks:  # one more key, without a value
            high, low = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (high, low))
        above = largest_means(self._scores, self._apart, high) - mean.lower
        below = largest_means(self._scores, self._apart, -low) + mean.upper
        return up(torch.maximum(above, below).clamp(min=0.0), _ROUND).masked_fill(self._alone, 0.0)

    def _stored_values(self, sizes: Tensor) -> Tensor:
        """(b…, h, n) the largest Σ_j p_j size_j, for sizes (b…, h, n) of what values may be off by."""
        if self._sinks:
            sizes = torch.nn.functional.pad(sizes, (0, 1))
        return largest_means(self._scores, self._apart, sizes.unsqueeze(-1)).squeeze(-1)

    def proved(self) -> tuple[Tensor, Tensor, Tensor]:
        """(b…, n), (b…, h, n), (b…, n): `value`, `heads` and `norms` of the result."""
        heads = torch.minimum(self.heads, self.by_norms)
        value = torch.minimum(up(heads.sum(-2), _SUMS), self.together)
        norms = up(self.by_norms.sum(-2), _SUMS)
        value, heads, norms = (up(t + _TINY, _ROUND) for t in (value, heads, norms))
        unit = self._unit.squeeze(-1)
        return value * unit + FLOOR, heads * self._unit + FLOOR, norms * unit + FLOOR

    @cached_property
    def heads(self) -> Tensor:
        """(b…, h, n) what the scores move, by ‖zN‖² <= Σ_c z_c² Σ_c' |N_c · N_c'|, and what the values are off by.

        z = yB are the coordinates, N = BᵀW^O but for rounding, and W^O - BN is bounded by itself.
        """
        B, W = Ball.exact(self._basis), self._w_o
        N = Ball.exact(self._basis.mT @ W.mid)
        weights = up(_size(N @ N.mT).sum(-1), _ROUND)  # (h, k_v)
        moved = up((self.coordinates.square() * weights.unsqueeze(-2)).sum(-1).sqrt(), _SUMS)
        left = up(_size(W - B @ N).square().sum((-2, -1)).sqrt(), _SUMS)  # (h)
        longest = up(_size(self._value).square().sum(-1).sqrt().amax(-1, keepdim=True), _SUMS)
        # |error W|² <= errorᵀ |W Wᵀ| error, and at most |error| ‖W‖.
        d = self._error
        bent = ((d @ _size(W @ W.mT)) * d).sum(-1).sqrt()
        plain = torch.linalg.vector_norm(d, dim=-1) * self._norms.unsqueeze(-1)
        stored = self._stored_values(up(torch.minimum(bent, plain), _SUMS))
        return _or_infinite(up(moved + stored + left.unsqueeze(-1) * longest * 2, _SUMS))

    @cached_property
    def together(self) -> Tensor:
        """(b…, n) ‖W^O‖ times the length of all heads' movements: ‖y‖ <= ‖yB‖ / (1 - ‖BᵀB - 1‖)^½."""
        B = Ball.exact(self._basis)
        off = frobenius(B.mT @ B - self._eye).upper.amax()
        norm = upper(MatrixOperator(self._w_o.flatten(0, 1))).value
        moved = self.coordinates.square().sum(-1).sqrt() / (1 - off).clamp(min=0.0).sqrt()
        stored = self._stored_values(up(torch.linalg.vector_norm(self._error, dim=-1), _SUMS))
        return _or_infinite(up((moved + stored).square().sum(-2).sqrt() * norm, _SUMS))

    @cached_property
    def _norms(self) -> Tensor:
        """(h) ‖W_l^O‖."""
        return upper(MatrixOperator(self._w_o)).value

    @cached_property
    def by_norms(self) -> Tensor:
        """(b…, h, n) by norms: ((e^{2t} - 1) Σ_j p_j |v_j - y| + max_j |error_j|) ‖W_l^O‖, t the largest of a row."""
        y, p = self._p @ self._value, self._p.upper
        mid, rad = self._value.mid, self._value.rad
        if self._sinks:  # one more key, without a value
            p = torch.cat([p, (-(self._p.sum(-1, keepdim=True) - 1.0)).upper], -1)
            mid, rad = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (mid, rad))
        # Differences are taken before they are squared: inner products would cancel where values are close.
        far = torch.cdist(y.mid, mid, compute_mode="donot_use_mm_for_euclid_dist")
        off_y, off_v = (torch.linalg.vector_norm(t, dim=-1) for t in (y.rad, rad))
        spread = (p * (far + off_y.unsqueeze(-1) + off_v.unsqueeze(-2) + _TINY)).sum(-1)
        errors = torch.linalg.vector_norm(self._error, dim=-1).amax(-1, keepdim=True)
        moved = (2 * self._reach.amax(-1)).expm1() * spread + errors
        return _or_infinite(up(moved * self._norms.unsqueeze(-1), 1e-9))


def _or_infinite(bound: Tensor) -> Tensor:
    """What is not a number bounds nothing."""
    return bound.masked_fill(bound.isnan(), torch.inf)


def _size(t: Ball) -> Tensor:
    """The largest absolute value of every entry."""
    return t.upper.abs().maximum(t.lower.abs())


def _climbed(cache: _Cache, start: tuple[Tensor, Tensor], token: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """A cache at a corner of the box that moves the output far: steps to the corner that the gradient points to."""
    generator = torch.Generator().manual_seed(seed)
    query, w_o = cache.query.mid, cache.w_o.mid
    here = cache.output.mid
    exact, errors = (cache.keys.mid, cache.values.mid), (cache.key_error, cache.value_error)

    def moved(keys: Tensor, values: Tensor) -> Tensor:
        lengths = torch.linalg.vector_norm(cache.attend(query, keys, values, w_o) - here, dim=-1)
        length: Tensor = lengths.square().sum(-1) if token is None else lengths[..., token]
        return length

    def corner(signs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        keys, values = (t + e * s for t, e, s in zip(exact, errors, signs, strict=True))
        return keys, values

    def noise(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t).sign()

    best, most = start, moved(*start)
    for trial in range(_STARTS):
        at = start if trial == 0 and any(bool((t != e).any()) for t, e in zip(start, exact, strict=True)) else None
        point = at or corner(tuple(noise(t) for t in exact))
        for _ in range(_STEPS):
            point = tuple(t.detach().requires_grad_() for t in point)  # type: ignore[assignment]
            with torch.enable_grad():
                gradients = torch.autograd.grad(moved(*point).sum(), point)
            point = corner(tuple(g.sign() for g in gradients))
            reached = moved(*point)
            better = (reached > most)[..., None, None, None]
            best = (torch.where(better, point[0], best[0]), torch.where(better, point[1], best[1]))
            most = torch.maximum(most, reached)
    return cache.inside(*(t.detach() for t in best))
