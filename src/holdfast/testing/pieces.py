"""What every piece of a network must satisfy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers import Piece, SmoothPiece
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic, Numerical, Proved
from holdfast.linalg.rounding import frobenius
from holdfast.testing.every import over
from holdfast.testing.probes import climb, directions, inside, unit

RADII = (0.0, 1e-6, 1e-3, 0.1, 1.0, 10.0, 1e4)
_AGREE = 1e-6
_NOTHING = 1e-100


@dataclass(frozen=True, eq=False)
class PieceCase:
    """A piece and inputs for it.

    Attributes:
        name: what is particular about them.
        piece: the piece.
        u: (b, n, d) float64.
    """

    name: str
    piece: Piece
    u: Tensor


#: The constants of a piece that bound something on a ball.
CONSTANTS = ("reach", "gain", "curvature")


def constants(piece: Piece) -> tuple[str, ...]:
    """Which of them the piece has."""
    return CONSTANTS if isinstance(piece, SmoothPiece) else CONSTANTS[:1]


def bound(a: Arithmetic[Array], piece: Piece, constant: str, u: Tensor, radii: Sequence[float] | Tensor) -> Tensor:
    """(b…, e) the value of a constant."""
    with torch.no_grad():
        value: Array = getattr(piece, constant)(a, u, a.lift(torch.as_tensor(radii, dtype=torch.float64).to(u)))
        return a.number(value).expand(*u.shape[:-2], -1)


def truth(piece: Piece, constant: str, u: Array, z: Array, g: Array) -> Array:
    """What the constant bounds, at one point z of the ball and for one direction g with ‖g‖ <= 1."""
    if constant == "reach":
        return frobenius(piece.value(z) - piece.value(u))
    assert isinstance(piece, SmoothPiece)
    return frobenius(piece.push(z, g) if constant == "gain" else piece.push2(z, g, g))


def attained(case: PieceCase, radii: Sequence[float], seed: int) -> dict[str, Tensor]:
    """(b…, e) what an ascent over each ball reaches of every constant, rounded down; `radii` must grow."""
    piece, u = case.piece, case.u
    r = torch.tensor(radii, dtype=torch.float64).reshape(-1, *(1 for _ in u.shape))
    ways = directions(piece.value, u, seed).unsqueeze(1)
    ways = ways.expand(ways.shape[0], len(r), *u.shape)
    pool = [(r * ways, ways.flip(0)), (-r * ways, ways), (0 * r * ways, ways)]
    for constant in constants(piece):

        def share(moves: Tensor, g: Tensor, constant: str = constant) -> Tensor:
            return truth(piece, constant, u, u + moves, g)

        start = (torch.cat([part[i][::2] for part in pool[:2]]) for i in (0, 1))
        pool.append(climb(share, r, *start))
    best = {name: torch.zeros(len(r), *u.shape[:-2], dtype=torch.float64) for name in constants(piece)}
    with torch.no_grad():
        for moves, g in pool:
            z, short = Ball.exact(inside(u, u + moves, r)), Ball.exact(unit(g) * (1 - 1e-12))
            for name in best:
                values = truth(piece, name, Ball.exact(u), z, short).lower.nan_to_num(nan=0.0, neginf=0.0)
                best[name] = torch.maximum(best[name], values.amax(0))
    return {name: value.cummax(0).values.movedim(0, -1) for name, value in best.items()}


@cache
def _cases(kit: type[PieceConformance]) -> Sequence[PieceCase]:
    """Drawn once, so that what is computed for a case can be kept."""
    return kit().cases()


_every = over(lambda kit: _cases(kit.__class__))


class PieceConformance(ABC):
    """A piece computes its derivatives, and no constant of it is below what is attained on the ball."""

    @abstractmethod
    def cases(self) -> Sequence[PieceCase]:
        """Pieces of one kind, each with inputs."""

    # -- the map and its derivatives

    @_every
    def test_ball_holds_the_value(self, case: PieceCase) -> None:
        """Up to the rounding of the float64 value itself, and hardly wider."""
        value, ball = case.piece.value(case.u), case.piece.value(Ball.exact(case.u))
        size = 1e-13 * (1 + float(value.abs().max()) + float(case.u.abs().max()))
        assert bool(((value - ball.mid).abs() <= ball.rad + size).all())
        assert bool((ball.rad <= 1e-9 * (1 + float(value.abs().max()))).all())

    @_every
    def test_members_of_a_ball_stay_in_its_value(self, case: PieceCase) -> None:
        rad = 1e-4 * (1 + case.u.abs())
        ball = case.piece.value(Ball(case.u, rad))
        for sign in _normal(0, 5, *case.u.shape).sign():
            value = case.piece.value(case.u + 0.999 * sign * rad)
            assert bool(((value - ball.mid).abs() <= ball.rad + 1e-12 * (1 + value.abs())).all())

    @_every
    def test_push_is_the_derivative(self, case: PieceCase) -> None:
        if isinstance(case.piece, SmoothPiece):
            a, _ = self._tangents(case)
            self._same(case.piece.push(case.u, a), _jvp(case.piece.value, case.u, a))

    @_every
    def test_pull_is_the_adjoint_of_push(self, case: PieceCase) -> None:
        if isinstance(case.piece, SmoothPiece):
            a, _ = self._tangents(case)
            moved = case.piece.push(case.u, a)
            c = _normal(2, *moved.shape)
            self._same((moved * c).sum((-2, -1)), (a * case.piece.pull(case.u, c)).sum((-2, -1)))

    @_every
    def test_push2_is_the_derivative_of_push_and_symmetric(self, case: PieceCase) -> None:
        piece = case.piece
        if isinstance(piece, SmoothPiece):
            a, b = self._tangents(case)
            self._same(piece.push2(case.u, a, b), _jvp(lambda z: piece.push(z, a), case.u, b))
            self._same(piece.push2(case.u, a, b), piece.push2(case.u, b, a))

    @_every
    def test_pull2_is_the_derivative_of_pull(self, case: PieceCase) -> None:
        piece = case.piece
        if isinstance(piece, SmoothPiece):
            a, _ = self._tangents(case)
            c = _normal(2, *piece.push(case.u, a).shape)
            self._same(piece.pull2(case.u, c, a), _jvp(lambda z: piece.pull(z, c), case.u, a))

    @_every
    def test_derivatives_of_balls_hold_those_of_tensors(self, case: PieceCase) -> None:
        piece = case.piece
        if isinstance(piece, SmoothPiece):
            a, b = self._tangents(case)
            c = _normal(2, *piece.push(case.u, a).shape)
            for name, arguments in (("push", (a,)), ("pull", (c,)), ("push2", (a, b)), ("pull2", (c, a))):
                value = getattr(piece, name)(case.u, *arguments)
                ball = getattr(piece, name)(*(Ball.exact(t) for t in (case.u, *arguments)))
                size = 1e-11 * (1 + float(value.abs().max()))
                assert bool(((value - ball.mid).abs() <= ball.rad + size).all())
                assert bool((ball.rad <= 1e4 * size).all())

    # -- on a ball

    @_every
    def test_no_constant_is_below_what_is_attained(self, case: PieceCase) -> None:
        reached = attained(case, RADII, seed=0)
        for constant in constants(case.piece):
            assert bool((_value(case, constant) >= reached[constant]).all()), constant

    @_every
    def test_constants_are_finite_and_grow_with_the_radius(self, case: PieceCase) -> None:
        for constant in constants(case.piece):
            value = _value(case, constant)
            assert bool(torch.isfinite(value).all())
            assert bool((value[..., :1] >= 0).all())
            assert bool((value[..., 1:] >= value[..., :-1] * (1 - 1e-12)).all()), constant

    @_every
    def test_nothing_moves_on_a_ball_of_radius_zero(self, case: PieceCase) -> None:
        assert RADII[0] == 0
        assert bool((_value(case, "reach")[..., 0] <= _NOTHING).all())

    @_every
    def test_reach_of_a_small_ball_is_the_gain_at_its_centre(self, case: PieceCase) -> None:
        if isinstance(case.piece, SmoothPiece):
            exact = frobenius(case.piece.push(case.u, directions(case.piece.value, case.u, 0))).amax(0)
            least = RADII[1]
            assert bool((_value(case, "reach")[..., 1] >= least * exact * (1 - 1e-6)).all())

    @_every
    def test_proved_is_above_numerical_and_close(self, case: PieceCase) -> None:
        for constant in constants(case.piece):
            proved, numerical = _value(case, constant), bound(Numerical(), case.piece, constant, case.u, RADII)
            assert bool((proved >= numerical * (1 - 1e-9)).all()), constant
            assert bool((proved <= numerical * (1 + 1e-3) + 1e-9).all()), constant

    @_every
    def test_batch_equals_loop(self, case: PieceCase) -> None:
        members = [PieceCase(case.name, case.piece, u) for u in case.u]
        self._same(case.piece.value(case.u), torch.stack([case.piece.value(u) for u in case.u]))
        for constant in constants(case.piece):
            loop = torch.stack([_value(member, constant) for member in members])
            self._same(_value(case, constant), loop)

    @_every
    def test_radii_of_each_input(self, case: PieceCase) -> None:
        """Radii (b, e) mean for every input what its own mean alone."""
        radii = torch.tensor(RADII, dtype=torch.float64) * torch.arange(1, len(case.u) + 1).unsqueeze(-1)
        for constant in constants(case.piece):
            alone = [bound(Proved(), case.piece, constant, u, r) for u, r in zip(case.u, radii, strict=True)]
            self._same(bound(Proved(), case.piece, constant, case.u, radii), torch.stack(alone))

    @_every
    def test_float32_is_not_mixed_in(self, case: PieceCase) -> None:
        """Weights are float64: an input of another kind is refused, or there are no weights."""
        try:
            value = case.piece.value(case.u.float())
        except InputError as error:
            assert "float64" in str(error)  # noqa: PT017 - the kit does without pytest
        else:
            assert value.dtype == torch.float32

    # -- helpers

    @staticmethod
    def _tangents(case: PieceCase) -> tuple[Tensor, Tensor]:
        both = _normal(1, 2, 3, *case.u.shape)
        return both[0], both[1]

    @staticmethod
    def _same(values: Tensor, expected: Tensor) -> None:
        size = float(expected.abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(values, expected, rtol=_AGREE, atol=1e-11 * size + _NOTHING)


@cache
def _value(case: PieceCase, constant: str) -> Tensor:
    return bound(Proved(), case.piece, constant, case.u, RADII)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _jvp(function: Callable[[Tensor], Any], u: Tensor, a: Tensor) -> Tensor:
    points = u.expand_as(a).contiguous() if a.ndim > u.ndim else u
    derivative: Tensor = torch.func.jvp(function, (points,), (a,))[1]
    return derivative
