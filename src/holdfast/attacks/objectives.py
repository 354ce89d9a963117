"""What an attack maximises over the ball: the movement of the output, and the inner quantities of LoFAST.

An objective is a function of perturbed inputs Z (r, e, b…, n, d), or (r, e, b…, h, n, d) where each head has its own:
r restarts, e radii. It is written once for tensors, to climb, and for balls, to check what was reached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, TypeVar, final

import torch
from torch import Tensor

from holdfast.attention import AttentionJacobian, AttentionLayer, score_operator
from holdfast.attention.head_norm import Placed
from holdfast.errors import NotApplicableError
from holdfast.linalg import Array, Ball, LinearOperator
from holdfast.linalg.rounding import frobenius
from holdfast.registry import Registry


class Objective(ABC):
    """A quantity of a layer at x that a perturbation may enlarge.

    Args:
        layer: float64.
        x: (b…, n, d) float64.
    """

    name: ClassVar[str]
    reference: ClassVar[str]
    per_head: ClassVar[bool]

    def __init__(self, layer: AttentionLayer, x: Tensor) -> None:
        self.layer, self.x = layer, x

    @property
    @final
    def centre(self) -> Tensor:
        """The points that are perturbed: x, once for each head where heads are attacked apart."""
        norms = [norm for norm in (self.layer.q_norm, self.layer.k_norm) if norm is not None]
        if self.per_head and any(norm.across for norm in norms):
            raise NotApplicableError("a norm over all heads together leaves no head to attack alone")
        return (
            self.x.unsqueeze(-3).expand(*self.x.shape[:-2], self.layer.h, *self.x.shape[-2:])
            if self.per_head
            else self.x
        )

    @abstractmethod
    def values(self, z: Array) -> Array:
        """The quantity at z, over the leading dimensions of z."""

    @abstractmethod
    def linear(self) -> LinearOperator:
        """A linear map whose top singular vector is a good direction to start in."""

    def _probabilities(self, z: Array) -> Array:
        """P_l(z_l), each head at its own input: (…, h, n, d) to (…, h, n, n)."""
        return self.layer.probabilities(self._scores(z))

    def _scores(self, z: Array) -> Array:
        """Scale · QKᵀ up to a constant along each row, each head at its own input."""
        return self._queries(z) @ self._keys(z).mT * self.layer.scale

    def _queries(self, z: Array) -> Array:
        w, layer = self.layer.weights(z), self.layer
        q = z @ w.w_q if w.b_q is None else z @ w.w_q + w.b_q.unsqueeze(-2)
        return Placed(q, layer.q_norm, layer.rotary).value

    def _keys(self, z: Array) -> Array:
        """The keys, minus a common row where softmax does not see it."""
        w, layer = self.layer.weights(z), self.layer
        k = z @ w.w_k
        if layer.beyond_dot_products is not None:
            k = k if w.b_k is None else k + w.b_k.unsqueeze(-2)
            return Placed(k, layer.k_norm, layer.rotary).value
        return k if layer.rotary is None else layer.rotary.turn_keys(k, w.b_k)

    def _values(self, z: Array) -> Array:
        """The values of each head at its own input; their bias counts where rows of probabilities do not sum to 1."""
        w = self.layer.weights(z)
        v = z @ w.w_v
        return (v if self.layer.sinks is None or w.b_v is None else v + w.b_v.unsqueeze(-2)) @ w.w_o

    def _lifted(self, like: Array) -> Array:
        """The centre, in the arithmetic of `like`."""
        return Ball.exact(self.centre) if isinstance(like, Ball) else self.centre


objectives: Registry[type[Objective]] = Registry("objective")

O_ = TypeVar("O_", bound=type[Objective])


def _register(cls: O_) -> O_:
    objectives.add(cls.name)(cls)
    return cls


@final
@_register
class OutputMovement(Objective):
    """‖F(X') - F(X)‖_F, the quantity (5) that every bound bounds."""

    name = "output"
    reference = "havens2024, (5)"
    per_head = False

    def values(self, z: Array) -> Array:
        x = self._lifted(z)
        return frobenius(self.layer.output(z, self.layer.run(z)) - self.layer.output(x, self.layer.run(x)))

    def linear(self) -> LinearOperator:
        return AttentionJacobian(self.layer, self.x)


@final
@_register
class SplitMovement(Objective):
    """Δ₂ = ‖Σ_l (P_l(X') - P_l(X)) X' W_l^V W_l^O‖_F (13)."""

    name = "delta-2"
    reference = "havens2024, (13)"
    per_head = False

    def values(self, z: Array) -> Array:
        change = self.layer.run(z).p - self.layer.run(self._lifted(z)).p
        return frobenius((change @ self._values(z.unsqueeze(-3))).sum(-3))

    def linear(self) -> LinearOperator:
        return AttentionJacobian(self.layer, self.x)


@final
@_register
class ProbabilityMovement(Objective):
    """Δ₂₁ = ‖P_l(X') - P_l(X)‖_F (16), each head by itself."""

    name = "delta-21"
    reference = "havens2024, (16)"
    per_head = True

    def values(self, z: Array) -> Array:
        return frobenius(self._probabilities(z) - self._probabilities(self._lifted(z)))

    def linear(self) -> LinearOperator:
        return score_operator(self.layer, self.x)


@final
@_register
class ScoreMovement(Objective):
    """‖Γ A_l Xᵀ + X A_l Γᵀ + Γ A_l Γᵀ‖_F over the allowed pairs (18), each head by itself."""

    name = "scores"
    reference = "havens2024, (18)"
    per_head = True

    def values(self, z: Array) -> Array:
        x = self._lifted(z)
        queries, keys = (project(z) - project(x) for project in (self._queries, self._keys))
        moved = queries @ self._keys(z).mT + self._queries(x) @ keys.mT
        allowed = self.layer.allowed(z.shape[-2])
        if allowed is not None:
            moved = moved.masked_fill(~allowed.unsqueeze(-3), 0.0)
        return frobenius(moved * self.layer.scale)

    def linear(self) -> LinearOperator:
        return score_operator(self.layer, self.x)


@final
@_register
class ValueNorm(Objective):
    """Δ₂₂ = ‖X' W_l^V W_l^O‖, a spectral norm, each head by itself."""

    name = "delta-22"
    reference = "havens2024, section 5.1"
    per_head = True

    def values(self, z: Array) -> Array:
        matrix = self._values(z)
        if isinstance(matrix, Ball):
            # ‖M‖ >= ‖Mv‖ / ‖v‖ for any v.
            v = Ball.exact(torch.linalg.svd(matrix.mid, full_matrices=False).Vh[..., :1, :].mT)
            return frobenius(matrix @ v) / frobenius(v)
        norm: Tensor = torch.linalg.matrix_norm(matrix, ord=2)
        return norm

    def linear(self) -> LinearOperator:
        return score_operator(self.layer, self.x)
