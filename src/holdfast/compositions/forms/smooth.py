"""Units with a smooth function: the exact second order, and what the second derivative varies by.

A unit φ(t + h) has the rest ε(h) = ½φ''(ξ)h² with ξ between t and t + h. With h = x·b + r, |x·b| <= ρ, |r| <= R, and
|φ''(ξ) - φ''(t)| <= Δ wherever t + h gets to (docs/math/forms.md, section 3),

    |ε - ½φ''(t)(x·b)²| <= ½(Δ(1 + η) + |φ''(t)|η)(x·b)² + ½(Δ + |φ''(t)|)(R² + ρR),    η = R/ρ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
)
from holdfast.compositions.forms.suprema import QuadraticSums, worth
from holdfast.compositions.forms.third import Triples
from holdfast.compositions.forms.units import Wiring, Written
from holdfast.layers.activation.base import SmoothActivation
from holdfast.linalg import Ball
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import down, up

_TOGETHER = 1024  # units whose second orders may cancel in a scalar; those of one token always do
_SMALL = 1e-100
_CHUNK = 2**20
_TINY = 1e-37  # what float32 takes of a number that is too small for it


@dataclass(frozen=True)
class Bends:
    """What units count in covectors, in float32; which of the units these are; (S) norms of the second orders.

    A norm is not a number until it is needed.
    """

    written: Written
    tokens: Tensor
    norm: Tensor


@final
class SmoothUnits(SmoothLocal):
    """Units of one piece with a smooth function.

    Args:
        u: (n, d) the piece's input.
        wiring: where the units stand.
        phi: the function.
    """

    def __init__(self, u: Tensor, wiring: Wiring, phi: SmoothActivation) -> None:
        self.u, self.wiring, self._phi = u, wiring, phi
        self._t = wiring.before(u)
        self._slopes = phi.derivative(1, self._t)

    @property
    def rest(self) -> str:
        return "activation rest"

    @property
    def scalars(self) -> int:
        return self._t.mid.numel()

    @property
    def longest(self) -> int:
        # Matrices of squares, the only longer sums that may cancel, have 32 times the allowance of other ones.
        return max(self.stride, _TOGETHER, self.scalars // 32)

    @property
    def stride(self) -> int:
        return self._t.mid.shape[-1]

    @property
    def numbers(self) -> int:
        return len(self._tokens) * self.stride

    @property
    def kept(self) -> int:
        return 4 * self.numbers

    def pull(self, C: Tensor) -> tuple[Tensor, Tensor]:
        return self.wiring.pull(C, self._slopes)

    def push(self, T: Tensor) -> tuple[Tensor, Tensor]:
        return self.wiring.push(T, self._slopes)

    def second_order(self, directions: Directions) -> tuple[Tensor, float]:
        n, units = self._t.mid.shape
        x, bend = (part.reshape(-1, units, *part.shape[1:]) for part in (self._x, self._bend))
        out = []
        for some in torch.split(torch.arange(len(directions.first)), max(1, _CHUNK // (n * units))):
            first, second = directions.first[some], directions.second[some]
            squares = torch.zeros(len(some), n, units, dtype=torch.float64)
            squares[:, self._tokens] = (x[..., first] * x[..., second] * (bend / 2).unsqueeze(-1)).movedim(-1, 0)
            out.append(self.wiring.write(squares))
        sizes = bend.abs() / 2 * self._lengths.square().reshape(-1, units) @ self.wiring.lengths()
        return torch.cat(out), 32 * THETA * float(torch.linalg.vector_norm(sizes))

    def functions(self, T: Tensor) -> Tensor:
        return self.wiring.functions(self._tokens, T)

    def most(self, y: Tensor) -> Tensor:
        return self.wiring.most(self._tokens, y)

    def third_order(self, second: Tensor, size: float, directions: Directions) -> tuple[Twist, float]:
        (n, units), x = self._t.mid.shape, self._x
        bend, turn = self._bend.unsqueeze(-1), self._turn.unsqueeze(-1)

        def at(t: Triples) -> Tensor:
            new = t.added(x, second) * bend + turn / 2 * (x[:, t.q, None] * x[:, t.r] * x[:, t.s])
            out = torch.zeros(len(t.r), n, units, dtype=torch.float64)
            out[:, self._tokens] = new.mT.reshape(len(t.r), -1, units)
            return self.wiring.write(out)

        lengths = self._lengths.reshape(-1, units)
        sizes = self._bend.abs().reshape(-1, units) * size + self._turn.abs().reshape(-1, units) * lengths.square()
        own = self._bend.abs().reshape(-1, units) * second_lengths(second).reshape(-1, units)
        total, kept = (torch.linalg.vector_norm((x * lengths) @ self.wiring.lengths()) for x in (sizes, own))
        return at, 32 * THETA * float(total) + NARROW * float(kept)

    def covectors(self, tokens: Tensor) -> tuple[Named, Tensor]:
        self._tokens = tokens
        t = self._t[tokens].reshape(-1)
        self._low, self._high = t.lower, t.upper
        self._bend = self._phi.derivative(2, Ball.exact(t.mid)).mid  # any number does: Δ is measured from it
        self._turn = self._phi.derivative(3, Ball.exact(t.mid)).mid
        own = self._phi.derivative(2, t)
        self._unsure = up((own.mid - self._bend).abs() + own.rad)  # of the second derivative at t
        C = self.wiring.covectors(tokens, len(self.u))
        return C, torch.zeros(C.count, dtype=torch.float64)

    def place(self, X: Tensor, first: Tensor) -> None:
        self._x, self._first = X, first
        self._lengths = up(torch.linalg.vector_norm(X, dim=-1), 1e-12)
        self._units = self.stride

    def forget(self) -> None:
        """Drops the first-order rows, which sums of suprema do without."""
        self._x = self._x.new_zeros(0)

    @property
    def bends(self) -> tuple[Tensor, Tensor, Tensor]:
        """(t, U) bounds at the last scale: of |ε|, of how far units move, and of what is beyond first order of that."""
        steep, reach, rest = (x.reshape(-1, self._units) for x in (self._steep, self._reach, self._rest))
        return steep, reach, rest

    @cached_property
    def _groups(self) -> list[tuple[slice, QuadraticSums]]:
        """Inner products of the squares of rows, of some tokens' units at a time."""
        X, squares = self._x, self._lengths.square()
        parts = _parts(len(X), max(1, _TOGETHER // self._units) * self._units)
        return [(part, QuadraticSums((X[part] @ X[part].mT).square(), squares[part])) for part in parts]

    def prepare(self, mu: Tensor) -> Bends:
        mu = mu[:, self._tokens]
        seen = (mu != 0).any(-1).any(0).nonzero().squeeze(-1)
        written = Written.of(self.wiring, mu[:, seen])
        return Bends(replace(written, c=written.c.float()), seen, torch.full((len(mu),), torch.nan).double())

    def _norms(self, c: Tensor, tokens: Tensor) -> Tensor:
        """(S) the norms of ½Σ_u c_uφ''_u x_u x_uᵀ."""
        every = torch.zeros(len(c), len(self._tokens), self._units, dtype=torch.float64)
        every[:, tokens] = c.reshape(len(c), len(tokens), self._units)
        weights, norm = every.flatten(1) * self._bend / 2, torch.zeros(len(c), dtype=torch.float64)
        for part, form in self._groups:
            if bool((weights[:, part] != 0).any()):
                norm = norm + form.most(weights[:, part])
        return up(norm, 1e-10)

    def _among(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Of numbers of all units those at some of their tokens."""
        return x.reshape(-1, self._units)[tokens].flatten()

    def settle(self, size: Size, rests: Rests, moved: float) -> float:
        self._size = size
        self._rho = rho = up(self._first * size.scale, 1e-12)
        rest, third = rests.most, rests.third
        self._rest, self._reach = rest, (reach := up(rho + rest, 1e-12))
        low, high = down(self._low - reach), up(self._high + reach)
        reached = self._phi.range(2, low, high)
        drift = up(torch.maximum(reached.high - self._bend, self._bend - reached.low)).clamp(min=0.0)
        bend = self._bend.abs()
        self._steep = up((bend + drift) / 2 * reach.square(), 1e-12)  # sup |ε|
        self._second = up(bend / 2 * rho.square(), 1e-12)
        eta = rest / rho.clamp(min=_SMALL)
        self._form = up((drift * (1 + eta) + bend * eta) / 2, 1e-12)
        self._number = up((drift + bend) / 2 * (rest.square() + rho * rest), 1e-12)
        self._third = up(self._form * rho.square() + self._number, 1e-12)
        self._left = self._third
        if third is not None:
            turned = self._phi.range(3, low, high)
            drift = up(torch.maximum(turned.high - self._turn, self._turn - turned.low)).clamp(min=0.0)
            left = bend * (rho * third + rest.square() / 2) + self._unsure / 2 * reach.square()
            left = left + self._turn.abs() / 2 * reach.square() * rest  # |h³ - (x·b)³| <= 3h²|r|
            self._left = up(left + drift / 6 * reach**3, 1e-12)
        slopes = self._phi.range(1, low, high).magnitude
        return up(self.wiring.grown(moved, float(torch.linalg.vector_norm(slopes * reach))), 1e-10)

    def range(
        self,
        prepared: Bends | None,
        varying: Tensor | None,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        beyond = torch.zeros((), dtype=torch.float64) if varying is None else varying @ self._steep
        if prepared is None:
            return up(beyond, 1e-10), up(beyond, 1e-10)
        c, tokens = prepared.written.c.double(), prepared.tokens
        third, steep, second, sign = (
            self._among(x, tokens)
            for x in (self._third if bent else self._left, self._steep, self._second, self._bend.sign())
        )
        most = torch.maximum(steep, third)  # of what a coefficient multiplies
        narrow = NARROW * (c.abs() @ most) + _TINY * most.sum()
        beyond = beyond + c.abs() @ third + prepared.written.lost(most) + narrow
        if not bent:
            return up(beyond, 1e-9), up(beyond, 1e-9)
        turned = c * sign
        low, high = (part.clamp(min=0.0) @ second for part in (-turned, turned))
        large = worth(torch.maximum(low, high), enough)
        unknown = large[prepared.norm[large].isnan()]
        for part in torch.split(unknown, _TOGETHER):
            prepared.norm[part] = self._norms(c[part], tokens)
        norm = prepared.norm * (self._size.radius * self._size.radius)
        low, high = (torch.where(norm < part, norm, part) + beyond for part in (low, high))
        return up(low, 1e-9), up(high, 1e-9)

    def take(self, prepared: Bends, s: int, problem: Problem, varying: Tensor | None) -> None:
        c, tokens = prepared.written.c[s].double(), prepared.tokens
        bend, form, number, steep, rho, lengths = (
            self._among(x, tokens)
            for x in (self._bend, self._form, self._number, self._steep, self._rho, self._lengths)
        )
        weights = {"second order": c * bend / 2, "activation rest": -c.abs() * form}
        rounding = 8 * THETA * weights["second order"].abs() + 1e-9 * weights["activation rest"].abs()
        x = self._x.reshape(-1, self._units, self._x.shape[-1])[tokens].flatten(0, 1)
        problem.add_squares(x, weights, 2 * rounding * lengths.square(), rho)
        problem.lose("carried rests", up(float(c.abs() @ number), 1e-9))
        narrow = NARROW * float(c.abs() @ steep) + _TINY * float(steep.sum())
        problem.lose("rounding", up(float(prepared.written.lost(steep)[s]) + narrow, 1e-9))
        if varying is not None:
            problem.lose("carried rests", up(float(varying @ self._steep), 1e-9))

    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        written = Written.of(self.wiring, mu[:, self._tokens])
        return written.c, written.size


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
