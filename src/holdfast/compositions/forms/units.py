"""Functions of one number inside a piece: how these numbers are read from its input and written to its output.

A piece of units is u ↦ S u + O φ(R u + c): φ acts entry by entry, R reads, O writes, and S passes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.compositions.forms.local import THETA, Named, token_lengths
from holdfast.layers.perceptron.piece import KinkedMlp, Mlp
from holdfast.layers.tokens.maxima import WindowMax
from holdfast.linalg import Ball
from holdfast.linalg.rounding import UNIT, frobenius_upper, up

_NEVER = 1e300  # how far below the largest entry of its window one is that is not there


class Links(ABC):
    """How units read their numbers from a piece's input, and write to its output."""

    #: Of so many units that follow each other, the rests are never together more than the largest of what bounds each.
    shared: int = 1

    @abstractmethod
    def before(self, u: Tensor) -> Ball:
        """(m, U) what the units take at u, (n, d): U units for every token of the output."""

    @abstractmethod
    def covectors(self, tokens: Tensor, n: int) -> Named:
        """(K, n, d) what the units of these tokens take, as functions of all n tokens of the input: exactly."""

    @abstractmethod
    def functions(self, tokens: Tensor, T: Tensor) -> Tensor:
        """(K, m) these functions of (m, n, d)."""

    @abstractmethod
    def most(self, tokens: Tensor, y: Tensor) -> Tensor:
        """(K) what these functions are at most where no entry exceeds that of y (n, d)."""

    def touched(self, tokens: Tensor) -> Tensor:
        """The tokens of the input from which the units of these tokens read."""
        return tokens

    @abstractmethod
    def written(self, mu: Tensor) -> Tensor:
        """Oᵀ applied to covectors (S, m, c), (S, m, U)."""

    @abstractmethod
    def accuracy(self) -> Tensor:
        """(U) how far rounding may have taken these numbers, over the length of a covector at their token."""

    @abstractmethod
    def pull(self, C: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        """The transpose of S + O diag(slopes) R applied to covectors (K, m, c), for slopes (m, U); (K) its rounding."""

    @abstractmethod
    def grown(self, moved: float, units: float) -> float:
        """A bound of how far the output moves, where the input moves by `moved` and the units' values by `units`."""


class Wiring(Links):
    """R, O and S of one piece that treats all tokens alike: of width d, with U units each."""

    @abstractmethod
    def read(self) -> Tensor:
        """(U, d) R, exactly."""

    @final
    def covectors(self, tokens: Tensor, n: int) -> Named:
        rows = self.read()

        def made(index: Tensor) -> Tensor:
            C = torch.zeros(len(index), n, rows.shape[1], dtype=torch.float64)
            C[torch.arange(len(index)), tokens[index // len(rows)]] = rows[index % len(rows)]
            return C

        return Named(len(tokens) * len(rows), made)

    @final
    def functions(self, tokens: Tensor, T: Tensor) -> Tensor:
        return (T[:, tokens] @ self.read().mT).flatten(1).mT

    @final
    def most(self, tokens: Tensor, y: Tensor) -> Tensor:
        return up((y[tokens] @ self.read().abs().mT).flatten(), 1e-9)

    def push(self, T: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        """S + O diag(slopes) R applied to (K, n, d), and its rounding; a symmetric one is its own transpose."""
        return self.pull(T, slopes)

    @abstractmethod
    def write(self, values: Tensor) -> Tensor:
        """O applied to (K, n, U), (K, n, c)."""

    @abstractmethod
    def lengths(self) -> Tensor:
        """(U) bounds of how long what a unit writes is."""


@final
class Hidden(Wiring):
    """The units of a perceptron: r x + φ(x W₁ + b₁) W₂ + b₂."""

    def __init__(self, piece: Mlp | KinkedMlp) -> None:
        self._piece = piece

    def before(self, u: Tensor) -> Ball:
        return self._piece.before(Ball.exact(u))

    def read(self) -> Tensor:
        return self._piece.w1.mT

    def written(self, mu: Tensor) -> Tensor:
        return mu @ self._piece.w2.mT

    def accuracy(self) -> Tensor:
        return up(THETA, 1e-9) * frobenius_upper(self._piece.w2, (-1,))

    def pull(self, C: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        back = (C @ self._piece.w2.mT) * slopes.mid @ self._piece.w1.mT
        if self._piece.residual:
            back = back + C * self._piece.residual
        return back, frobenius_upper(C) * self._lost(slopes)

    def push(self, T: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        out = (T @ self._piece.w1) * slopes.mid @ self._piece.w2
        if self._piece.residual:
            out = out + T * self._piece.residual
        return out, token_lengths(T) * self._lost(slopes)

    def _lost(self, slopes: Ball) -> float:
        """What rounding does to the derivative and to its transpose, in norm."""
        w1, w2 = (float(frobenius_upper(w)) for w in (self._piece.w1, self._piece.w2))
        steep, unsure = float(slopes.mid.abs().max()), float(slopes.rad.max())
        return up(w1 * w2 * (4 * THETA * steep + unsure) + 4 * THETA * abs(self._piece.residual), 1e-9)

    def write(self, values: Tensor) -> Tensor:
        return values @ self._piece.w2

    def lengths(self) -> Tensor:
        return frobenius_upper(self._piece.w2, (-1,))

    def grown(self, moved: float, units: float) -> float:
        return float(frobenius_upper(self._piece.w2)) * units + abs(self._piece.residual) * moved


@final
class Entries(Wiring):
    """The entries of some channels; the others pass."""

    def __init__(self, active: Tensor) -> None:
        self._active = active

    def before(self, u: Tensor) -> Ball:
        return Ball.exact(u[:, self._active])

    def read(self) -> Tensor:
        return torch.eye(len(self._active), dtype=torch.float64)[self._active]

    def written(self, mu: Tensor) -> Tensor:
        return mu[..., self._active]

    def accuracy(self) -> Tensor:
        return torch.zeros(int(self._active.sum()), dtype=torch.float64)

    def pull(self, C: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        back = Ball.exact(C[..., self._active]) * slopes
        mid = C.clone()
        mid[..., self._active] = back.mid
        return mid, frobenius_upper(back.rad)

    def write(self, values: Tensor) -> Tensor:
        out = values.new_zeros(*values.shape[:-1], len(self._active))
        out[..., self._active] = values
        return out

    def lengths(self) -> Tensor:
        return torch.ones(int(self._active.sum()), dtype=torch.float64)

    def grown(self, moved: float, units: float) -> float:
        return units + moved


@final
class SortedPairs(Wiring):
    """Neighbouring channels x, y that become (x + y + |x - y|)/2 and (x + y - |x - y|)/2; the units are x - y."""

    def __init__(self, width: int) -> None:
        self._width = width

    def before(self, u: Tensor) -> Ball:
        return Ball.exact(u[:, 0::2]) - u[:, 1::2]

    def read(self) -> Tensor:
        eye = torch.eye(self._width, dtype=torch.float64)
        return eye[0::2] - eye[1::2]

    def written(self, mu: Tensor) -> Tensor:
        return (mu[..., 0::2] - mu[..., 1::2]) / 2

    def accuracy(self) -> Tensor:
        return torch.full((self._width // 2,), THETA, dtype=torch.float64)

    def pull(self, C: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        high, low = Ball.exact(C[..., 0::2]), Ball.exact(C[..., 1::2])
        both, apart = (high + low) * 0.5, (high - low) * 0.5 * slopes
        first, second = both + apart, both - apart
        mids, rads = (first.mid, second.mid), (first.rad, second.rad)
        return torch.stack(mids, -1).flatten(-2), frobenius_upper(torch.stack(rads, -1).flatten(-2))

    def write(self, values: Tensor) -> Tensor:
        return torch.stack([values, -values], -1).flatten(-2) / 2

    def lengths(self) -> Tensor:
        return torch.ones(self._width // 2, dtype=torch.float64)

    def grown(self, moved: float, units: float) -> float:
        return moved  # sorting moves no two points apart


@final
class Windows(Links):
    """Maxima: the entry j that is largest at ũ, and for every other one of its window the unit relu(u_k - u_j).

    max_k u_k - u_j is the largest of these units, and 0 where none is positive.

    Args:
        piece: the windows.
        u: (n, d) ũ.
    """

    def __init__(self, piece: WindowMax, u: Tensor) -> None:
        index, self._shape, self._times = piece.filled, piece.shape, piece.times
        self.shared = index.shape[-1] - 1
        best = u.flatten()[index].argmax(-1, keepdim=True)
        others = torch.arange(self.shared).expand(*index.shape[:-1], -1)
        others = others + (others >= best)
        self._best, self._others = index.gather(-1, best), index.gather(-1, others)
        self._there = (piece.index.gather(-1, others) >= 0) & (self._others != self._best)

    def before(self, u: Tensor) -> Ball:
        x = Ball.exact(u.flatten())
        apart = x[self._others] - x[self._best]
        return Ball(apart.mid.where(self._there, -_NEVER), apart.rad.where(self._there, 0.0)).flatten(-2, -1)

    def covectors(self, tokens: Tensor, n: int) -> Named:
        others, best, there = self._entries(tokens)

        def made(index: Tensor) -> Tensor:
            C = torch.zeros(len(index), math.prod(self._shape), dtype=torch.float64)
            unit, some = torch.arange(len(index))[there[index]], index[there[index]]
            C[unit, others[some]] = 1.0
            C[unit, best[some]] = -1.0
            return C.reshape(-1, *self._shape)

        return Named(len(there), made)

    def functions(self, tokens: Tensor, T: Tensor) -> Tensor:
        others, best, there = self._entries(tokens)
        flat = T.flatten(1)
        return ((flat[:, others] - flat[:, best]) * there).mT

    def most(self, tokens: Tensor, y: Tensor) -> Tensor:
        others, best, there = self._entries(tokens)
        return up((y.flatten()[others] + y.flatten()[best]) * there, 1e-9)

    def _entries(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every unit the entry, the largest one of its window, and whether it is there."""
        parts = self._others, self._best.expand(self._others.shape), self._there
        others, best, there = (part[tokens].flatten() for part in parts)
        return others, best, there

    def touched(self, tokens: Tensor) -> Tensor:
        entries = torch.cat([self._best[tokens].flatten(), self._others[tokens].flatten()])
        rows: Tensor = torch.unique(entries // self._shape[1])
        return rows

    def written(self, mu: Tensor) -> Tensor:
        return mu.repeat_interleave(self.shared, -1)

    def accuracy(self) -> Tensor:
        return torch.zeros(self._others[0].numel(), dtype=torch.float64)

    def pull(self, C: Tensor, slopes: Ball) -> tuple[Tensor, Tensor]:
        """No unit is positive at ũ: the slopes are 0."""
        back = C.new_zeros(len(C), math.prod(self._shape))
        back.index_add_(1, self._best.flatten(), C.flatten(1))
        lost = frobenius_upper(C) * up(self._times**1.5 * UNIT, 1e-9)
        return back.reshape(-1, *self._shape), lost

    def grown(self, moved: float, units: float) -> float:
        return up(moved * math.sqrt(self._times), 1e-15)


@dataclass(frozen=True)
class Written:
    """What units count in covectors: c (S, m U), and the covectors' lengths (S, m) at the units' m tokens."""

    c: Tensor
    lengths: Tensor
    accuracy: Tensor  # (U) of c, over these lengths

    @classmethod
    def of(cls, wiring: Links, mu: Tensor, strength: float = 1.0) -> Written:
        """For covectors (S, m, c) at the tokens of the units, times a number."""
        lengths = torch.linalg.vector_norm(mu, dim=-1) * up(strength, 1e-12)
        return cls((wiring.written(mu) * strength).flatten(1), lengths, wiring.accuracy())

    def lost(self, weights: Tensor) -> Tensor:
        """(S) bounds of Σ_u |rounding of c_u| w_u, for w >= 0 (m U)."""
        return up(self.lengths @ (weights.reshape(self.lengths.shape[1], len(self.accuracy)) @ self.accuracy), 1e-9)

    @property
    def size(self) -> float:
        """A number relative to which all c are accurate within θ₀, in the Frobenius norm."""
        outer = torch.linalg.vector_norm(self.lengths) * torch.linalg.vector_norm(self.accuracy)
        return up(float(outer), 1e-9) / THETA

    def errors(self, units: Tensor) -> Tensor:
        """(S, …) bounds of the rounding of some c."""
        width = len(self.accuracy)
        return up(self.lengths[:, units // width] * self.accuracy[units % width], 1e-12)
