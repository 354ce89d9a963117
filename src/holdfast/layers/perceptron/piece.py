"""Two linear maps with an activation between them, for every token (docs/math/pieces.md).

f(x) = r x + φ(x W₁ + b₁) W₂ + b₂. Unit u has the incoming weights w_u, a column of W₁, and the pre-activation t_u. On a
ball of radius ρ it moves by at most ‖w_u‖ ρ. If its slope then differs from a fixed c_u by at most Δ_u,

    ‖Df‖ <= ‖r I + W₁ diag(c) W₂‖ + ‖W₁ (ΔS)^½‖ ‖(Δ/S)^½ W₂‖  for any positive diagonal S.

D²f at the centre is the matrix diag(φ''(t)) W₂ applied to the numbers (w_u·g)², and the vectors w_u ⊗ w_u have the Gram
matrix K = (W₁ᵀW₁)^∘2; so ‖D²f‖² <= ‖W₂ᵀ diag(φ'') K diag(φ'') W₂‖, and what φ'' drifts by enters as Δ_u = drift ‖w_u‖.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.activation.base import Activation, SmoothActivation
from holdfast.layers.activation.functions import activations
from holdfast.layers.expansion import LocalExpansion
from holdfast.layers.perceptron.expansion import LocalPerceptron
from holdfast.layers.piece import Piece, SmoothPiece
from holdfast.layers.weights import double, number, weight
from holdfast.linalg import Array, Ball
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import frobenius, lift, up

_ENTRIES = 2**26  # of matrices held for all tokens and radii of one input; beyond it tokens share the largest Δ


class _Perceptron(Piece):
    """What the smooth and the kinked kind share: the map, and how steep its secants are on a ball.

    Args:
        w1: (d, units) W₁.
        b1: (units) b₁.
        activation: φ.
        w2: (units, c) W₂.
        b2: (c) b₂.
        residual: r; c is d where it is not 0.
        limit: a proved bound of the Lipschitz constant, where more is known than these bounds can tell.
    """

    tokenwise = True

    def __init__(
        self,
        w1: Float[Tensor, "d units"],
        b1: Float[Tensor, " units"],
        activation: Activation | str,
        w2: Float[Tensor, "units c"],
        b2: Float[Tensor, " c"],
        residual: float = 0.0,
        limit: float = math.inf,
    ) -> None:
        activation = activations[activation] if isinstance(activation, str) else activation
        self._check_kind(activation)
        self.w1, self.b1, self.w2, self.b2 = (
            double(w, name, dims) for w, name, dims in ((w1, "w1", 2), (b1, "b1", 1), (w2, "w2", 2), (b2, "b2", 1))
        )
        (d, units), (rows, c) = self.w1.shape, self.w2.shape
        if (rows, len(b1), len(b2)) != (units, units, c):
            shapes = ", ".join(str(tuple(w.shape)) for w in (w1, b1, w2, b2))
            raise InputError(f"w1, b1, w2, b2 have shapes {shapes}; expected (d, units), (units), (units, c), (c)")
        if residual and c != d:
            raise InputError(f"residual is {residual:g} and the widths are {d} and {c}; expected equal widths")
        self.activation, self.residual, self.limit = activation, float(residual), float(limit)

    def with_identity(self) -> Piece | None:
        return None if self.residual else type(self)(self.w1, self.b1, self.activation, self.w2, self.b2, residual=1.0)

    @abstractmethod
    def _check_kind(self, activation: Activation) -> None:
        """Refuses an activation that belongs into the other class."""

    @final
    def value(self, u: Array) -> Array:
        out = self.activation.value(self.before(u)) @ weight(self.w2, u) + weight(self.b2, u)
        return out + u * self.residual if self.residual else out

    def before(self, u: Array) -> Array:
        """(…, n, units) the pre-activations."""
        return u @ weight(self.w1, u) + weight(self.b1, u)

    # -- on a ball

    def _secants(self, a: Arithmetic[Array], u: Tensor, rho: Array, *, shared: bool) -> _Secants[Array]:
        """Slopes on the ball: from c = φ'(t), good if that is small, and from one c for all units."""
        t = self.before(a.lift(u))
        low, high = self._interval(a, t, rho)
        reached = self.activation.slopes(low, high)
        here, middle = self.activation.slope(t), number(sum(self.activation.all_slopes) / 2, t)
        at_centre = self._linear(a, here)
        near = self._drift(a, _distance(here.unsqueeze(-3), reached.low, reached.high), shared=shared)
        far = self._drift(a, _distance(middle, reached.low, reached.high), shared=True)
        on_ball = (at_centre.unsqueeze(-2) + near).minimum(self._linear(a, middle) + far)
        if self.limit < math.inf:
            on_ball = on_ball.minimum(on_ball * 0.0 + self.limit)
        return _Secants(at_centre, on_ball)

    def _interval(self, a: Arithmetic[Array], t: Array, rho: Array) -> tuple[Tensor, Tensor]:
        """(…, e, n, units) the ends of what the pre-activations reach."""
        move = rho.unsqueeze(-1).unsqueeze(-1) * frobenius(weight(self.w1, t), (-2,))
        t = t.unsqueeze(-3)
        return -a.number(move - t), a.number(t + move)

    def _linear(self, a: Arithmetic[Array], c: Array) -> Array:
        """(…, n) ‖r I + W₁ diag(c) W₂‖ for slopes c (…, n, units), or () for one slope."""
        rows = weight(self.w1, c) * (c.unsqueeze(-2) if c.ndim else c)
        matrix = rows @ weight(self.w2, c)
        if self.residual:
            matrix = matrix + lift(torch.eye(len(self.w1), dtype=torch.float64) * self.residual, c)
        return a.matrix_norm(matrix)

    def _drift(self, a: Arithmetic[Array], delta: Tensor, *, shared: bool) -> Array:
        """(…, e, n) ‖W₁ (ΔS)^½‖ ‖(Δ/S)^½ W₂‖ for Δ (…, e, n, units): bounds ‖W₁ diag(δ) W₂‖ over |δ| <= Δ.

        Where it is `shared`, from the largest Δ of all tokens, (…, e, 1): n times fewer norms.
        """
        if shared or math.prod(delta.shape[-3:]) * max(len(self.w1), len(self.b2)) > _ENTRIES:
            delta = delta.amax(-2, keepdim=True)
        # S balances the two factors unit by unit; any positive S serves.
        balance = torch.linalg.vector_norm(self.w2, dim=-1) / torch.linalg.vector_norm(self.w1, dim=-2)
        S = a.lift(torch.where((balance > 1e-100) & (balance < 1e100), balance, 1.0).to(delta))
        D = a.lift(delta)
        left = weight(self.w1, D) * (D * S).sqrt().unsqueeze(-2)
        right = weight(self.w2.mT, D) * (D / S).sqrt().unsqueeze(-2)
        return a.matrix_norm(left, rough=True) * a.matrix_norm(right, rough=True)


@dataclass(frozen=True)
class _Secants(Generic[Array]):
    """Of every token: ‖Df(u)‖ (…, n), and a bound of all slopes on the ball (…, e, n)."""

    here: Array
    on_ball: Array


def _distance(c: Array, low: Tensor, high: Tensor) -> Tensor:
    """How far the numbers between low and high are from c, at most."""
    least, most = (c.lower, c.upper) if isinstance(c, Ball) else (c, c)
    return up(torch.maximum(high - least, most - low)).clamp(min=0.0)


@final
class Mlp(_Perceptron, SmoothPiece):
    """f(x) = residual · x + φ(x W₁ + b₁) W₂ + b₂ for every token, with a smooth φ.

    Args:
        w1: (d, units) W₁; the transpose of the weight of `nn.Linear`, as is w2.
        b1: (units) b₁.
        activation: φ, or its name: "gelu", "gelu-tanh", "silu", "tanh", "softplus", "centred-softplus".
        w2: (units, c) W₂.
        b2: (c) b₂.
        residual: 0, or what x is added with.
        limit: a proved bound of the Lipschitz constant, where more is known than the bounds here can tell.
    """

    def _check_kind(self, activation: Activation) -> None:
        if not isinstance(activation, SmoothActivation):
            raise InputError(f"activation {activation.name!r} has a kink; a smooth one is expected: use KinkedMlp")
        self.smooth_activation = activation

    # -- derivatives

    def without_expansion(self) -> str | None:
        return None

    def expand(self, u: Tensor, directions: Directions) -> LocalExpansion:
        t = self.before(Ball.exact(u))
        return LocalPerceptron(u, directions, t, self.w1, self.smooth_activation, self.w2, self.residual)

    def push(self, u: Array, a: Array) -> Array:
        moved = self.smooth_activation.derivative(1, self.before(u)) * (a @ weight(self.w1, u)) @ weight(self.w2, u)
        return moved + a * self.residual if self.residual else moved

    def pull(self, u: Array, c: Array) -> Array:
        moved = (
            self.smooth_activation.derivative(1, self.before(u)) * (c @ weight(self.w2.mT, u)) @ weight(self.w1.mT, u)
        )
        return moved + c * self.residual if self.residual else moved

    def push2(self, u: Array, a: Array, b: Array) -> Array:
        w1 = weight(self.w1, u)
        return self.smooth_activation.derivative(2, self.before(u)) * (a @ w1) * (b @ w1) @ weight(self.w2, u)

    def pull2(self, u: Array, c: Array, a: Array) -> Array:
        bent = (
            self.smooth_activation.derivative(2, self.before(u))
            * (a @ weight(self.w1, u))
            * (c @ weight(self.w2.mT, u))
        )
        return bent @ weight(self.w1.mT, u)

    # -- on a ball

    def gain(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """The largest over tokens of the bound of all slopes and of ‖Df(u)‖ + ρ β(ρ)."""
        s = self._secants(a, u, rho, shared=True)
        near = s.here.unsqueeze(-2) + rho.unsqueeze(-1) * self._curvatures(a, u, rho)
        return s.on_ball.minimum(near).amax(-1)

    def curvature(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        return self._curvatures(a, u, rho).amax(-1)

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """ρ times the largest over tokens of the bound of all slopes and of ‖Df(u)‖ + ρ β(ρ)/2."""
        s = self._secants(a, u, rho, shared=True)
        near = s.here.unsqueeze(-2) + rho.unsqueeze(-1) * self._curvatures(a, u, rho) * 0.5
        return s.on_ball.minimum(near).amax(-1) * rho

    def _curvatures(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        """(…, e, n) β for every token: from φ'' at the centre and its drift, or from the largest |φ''|."""
        t = self.before(a.lift(u))
        low, high = self._interval(a, t, rho)
        reached, here = self.smooth_activation.range(2, low, high), self.smooth_activation.derivative(2, t)
        lengths = a.number(frobenius(weight(self.w1, t), (-2,)))
        every = self._drift(a, up(reached.magnitude * lengths), shared=False)
        if math.prod(t.shape[-2:]) * len(self.b2) > _ENTRIES:
            return every
        w1, bent = weight(self.w1, t), weight(self.w2, t) * here.unsqueeze(-1)
        K = (w1.mT @ w1).square()
        at_centre = a.matrix_norm(bent.mT @ (K @ bent)).sqrt()
        moved = up(_distance(here.unsqueeze(-3), reached.low, reached.high) * lengths)
        return every.minimum(at_centre.unsqueeze(-2) + self._drift(a, moved, shared=False))


@final
class KinkedMlp(_Perceptron):
    """f(x) = residual · x + φ(x W₁ + b₁) W₂ + b₂ for every token, with a φ that has kinks: relu or |·|.

    A unit that cannot reach its kink on the ball counts with its true slope; the arguments are those of `Mlp`.
    """

    def _check_kind(self, activation: Activation) -> None:
        if isinstance(activation, SmoothActivation):
            raise InputError(f"activation {activation.name!r} is smooth; relu or abs is expected: use Mlp")

    def reach(self, a: Arithmetic[Array], u: Tensor, rho: Array) -> Array:
        if self.limit < math.inf:
            return rho * self.limit  # the steepest token of such a layer hardly stays below it, and costs norms to find
        return self._secants(a, u, rho, shared=False).on_ball.amax(-1) * rho
