"""A piece that acts on a part of what moves while the rest waits: so a chain of stages runs branches of any shape.

The state is one row (…, 1, S) of all numbers that are still needed. With C u the entries that the piece takes, in any
places, and K u those that wait, each once, the output is (K u, f(C u)). Let c = ‖C‖, the root of how often an entry is
taken at most. Where f moves by at most R(ρ) on balls of radius ρ, has the gain L and the curvature β,

    reach² <= ρ² + R(cρ)²,    ‖D‖² <= 1 + c² L(cρ)²,    curvature <= c² β(cρ);

where no entry is both taken and waiting, the gain is at most max(1, c L).
"""

from __future__ import annotations

from typing import Generic, TypeVar, final

import torch
from jaxtyping import Int64
from torch import Tensor

from holdfast.layers.piece import LinearPiece, Piece, SmoothPiece
from holdfast.layers.tokens.selection import gathered, places
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic

P = TypeVar("P", bound=Piece)
S = TypeVar("S", bound=SmoothPiece)


@final
class Part:
    """Which entries of a state of S numbers a piece takes, and which wait.

    Args:
        taken: (n, d) where each entry of what the piece gets stands in the state.
        waiting: (k) which entries stand in front of the output, unchanged; different from each other.
        outputs: (m, c) the shape of what the piece returns.
        size: S.
    """

    def __init__(
        self, taken: Int64[Tensor, "n d"], waiting: Int64[Tensor, " k"], outputs: tuple[int, int], size: int
    ) -> None:
        self.taken, self.waiting, self.outputs = taken, waiting, outputs
        k, new = len(waiting), outputs[0] * outputs[1]
        self._front = torch.cat([waiting, torch.full((new,), -1)])
        self._back = torch.cat([torch.full((k,), -1), torch.arange(new)])
        self._took, self._waited = places(taken, size), places(waiting, size)
        self.times = len(self._took)
        self.apart = not bool(((self._took >= 0).any(0) & (self._waited >= 0).any(0)).any())

    def take(self, u: Array) -> Array:
        """C u."""
        return gathered(u.flatten(-2, -1), self.taken)

    def join(self, u: Array, new: Array) -> Array:
        """(K u, new)."""
        return (gathered(u.flatten(-2, -1), self._front) + gathered(new.flatten(-2, -1), self._back)).unsqueeze(-2)

    def new(self, c: Array) -> Array:
        """The part of a covector of the output that belongs to the piece."""
        tail = c.flatten(-2, -1)[..., len(self.waiting) :]
        return tail.reshape(*tail.shape[:-1], *self.outputs)

    def back(self, c: Array, pulled: Array) -> Array:
        """Kᵀ c + Cᵀ pulled."""
        return gathered(c.flatten(-2, -1), self._waited).sum(-2).unsqueeze(-2) + self.give(pulled)

    def give(self, pulled: Array) -> Array:
        """Cᵀ pulled."""
        return gathered(pulled.flatten(-2, -1), self._took).sum(-2).unsqueeze(-2)

    def root(self, like: Array) -> Array:
        """c, in the arithmetic of `like`."""
        return (like * 0.0 + float(self.times)).sqrt()

    def both(self, gain: Array) -> Array:
        """The gain of the whole, from c L."""
        if not self.apart:
            return (gain.square() + 1.0).sqrt()
        one = gain * 0.0 + 1.0
        return -(-gain).minimum(-one)


def beside(piece: Piece, part: Part) -> Piece:
    """The piece on a part of the state, with the derivatives that it has itself."""
    if isinstance(piece, LinearPiece):
        return LinearBeside(piece, part)
    return SmoothBeside(piece, part) if isinstance(piece, SmoothPiece) else KinkedBeside(piece, part)


class _Beside(Piece, Generic[P]):
    """A piece on a part of the state."""

    def __init__(self, piece: P, part: Part) -> None:
        self.piece, self.part = piece, part

    @final
    def value(self, u: Array) -> Array:
        return self.part.join(u, self.piece.value(self.part.take(u)))


class _SteepBeside(_Beside[S], SmoothPiece):
    """A piece with a derivative on a part of the state."""

    @final
    def push(self, u: Array, a: Array) -> Array:
        return self.part.join(a, self.piece.push(self.part.take(u), self.part.take(a)))

    @final
    def pull(self, u: Array, c: Array) -> Array:
        return self.part.back(c, self.piece.pull(self.part.take(u), self.part.new(c)))


@final
class KinkedBeside(_Beside[Piece]):
    """A piece with kinks on a part of the state."""

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return _reach(self.piece, self.part, a, u, rho)


@final
class SmoothBeside(_SteepBeside[SmoothPiece]):
    """A smooth piece on a part of the state."""

    def push2(self, u: Array, a: Array, b: Array) -> Array:
        take = self.part.take
        return self.part.join(a * b * 0.0, self.piece.push2(take(u), take(a), take(b)))

    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        return self.part.give(self.piece.pull2(self.part.take(u), self.part.new(c), self.part.take(a)))

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        root = self.part.root(rho)
        return self.part.both(self.piece.gain(a, self.part.take(u), rho * root) * root)

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return self.piece.curvature(a, self.part.take(u), rho * self.part.root(rho)) * float(self.part.times)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return _reach(self.piece, self.part, a, u, rho).minimum(self.gain(a, u, rho) * rho)


@final
class LinearBeside(_SteepBeside[LinearPiece], LinearPiece):
    """An affine piece on a part of the state."""

    def norm(self, a: Arithmetic[Array]) -> Array:
        own = self.piece.norm(a)
        return self.part.both(own * self.part.root(own))


def _reach(piece: Piece, part: Part, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
    moved = piece.reach(a, part.take(u), rho * part.root(rho))
    return (rho.square() + moved.square()).sqrt()
