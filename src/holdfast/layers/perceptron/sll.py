"""Layers that are 1-Lipschitz with a residual inside (Araujo et al. 2023)."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import InputError
from holdfast.layers.activation.base import Activation, SmoothActivation
from holdfast.layers.activation.module import Entrywise
from holdfast.layers.linear.diagonal import sll_diagonal
from holdfast.layers.module import Layer
from holdfast.layers.perceptron.piece import KinkedMlp, Mlp
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.weights import double
from holdfast.linalg import Ball, MatrixOperator, upper
from holdfast.linalg.rounding import frobenius


def sll(
    w: Float[Tensor, "d units"],
    b: Float[Tensor, " units"],
    diagonal: Float[Tensor, " units"],
    activation: Activation,
) -> Mlp | KinkedMlp:
    """The layer x - 2 W T⁻¹ φ(Wᵀx + b), whose gain is at most 1 where WᵀW ⪯ T and the slopes of φ lie in [0, 1].

    Nothing is taken on trust: with θ = ‖W T^-½‖² and D the slopes between two points, J = I - 2 W T⁻¹ D Wᵀ has

        JᵀJ = I - 4 W D T⁻¹ Wᵀ + 4 W D T⁻¹ WᵀW T⁻¹ D Wᵀ ⪯ I + 4 W T⁻¹ (θD² - D) Wᵀ ⪯ (1 + 4θ(θ - 1)) I  for θ >= 1,

    so the gain is at most max(1, 2θ - 1). θ is proved; that the second weights are rounded to float64 is paid for.

    Args:
        w: (d, units) W.
        b: (units) b.
        diagonal: (units) T, positive, such as `sll_diagonal` gives.
        activation: φ: relu, tanh or a softplus.
    """
    if not activation.restricted:
        raise InputError(f"activation {activation.name!r} has slopes outside [0, 1]; expected relu, tanh or softplus")
    w, t = double(w, "w", 2), double(diagonal, "diagonal", 1)
    if t.shape != w.shape[1:] or not bool((t >= 0).all()):
        raise InputError(
            f"the diagonal has {len(t)} entries, the least {float(t.min()):g}; w {tuple(w.shape)} needs "
            f"{w.shape[-1]} positive ones"
        )
    T = Ball.exact(torch.where(t > 0, t, 1.0))
    W = Ball.exact(w)
    theta = Ball.exact(upper(MatrixOperator(W / T.sqrt())).value).square().clamp(min=1.0)
    second = (W * -2.0 / T).mT
    rounding = frobenius(Ball(torch.zeros_like(second.mid), second.rad)) * frobenius(W)
    limit = float((theta * 2.0 - 1.0 + rounding).upper)
    kind = Mlp if isinstance(activation, SmoothActivation) else KinkedMlp
    return kind(w, b, activation, second.mid, w.new_zeros(len(w)), residual=1.0, limit=limit)


@final
class Sll(Layer):
    """x ↦ x - 2 W T⁻¹ σ(Wᵀx + b) with slopes of σ in [0, 1] and the diagonal T of `sll_diagonal` (Araujo et al. 2023).

    Its gain is 1 because WᵀW ⪯ T; `sll` has the proof.

    Args:
        width: d.
        activation: σ; its width is the number of columns of W.
    """

    def __init__(self, width: int, activation: Entrywise) -> None:
        super().__init__()
        hidden = activation.width
        if activation.on_half or not activation.function().restricted:
            raise InputError(
                f"an SLL layer got the activation {activation.kind!r}; expected one with slopes in [0, 1] on all "
                "channels: relu, softplus or tanh"
            )
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(width, hidden)))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.log_q = nn.Parameter(torch.zeros(hidden))
        self.activation = activation

    @property
    def gain(self) -> float:
        return 1.0

    @property
    def diagonal(self) -> Float[Tensor, " hidden"]:
        """T."""
        return sll_diagonal(self.weight, self.log_q.exp())

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        hidden = self.activation(functional.linear(x, self.weight.mT, self.bias))
        return x - 2 * functional.linear(hidden, self.weight / self.diagonal)

    def steepness(self) -> Steepness:
        # With v = T^-½ Wᵀg the second derivative is -2 W T^-½ (σ'' T^½ v²), and ‖W T^-½‖ and ‖v‖ are at most 1.
        return Steepness(self.gain, 2 * self.activation.curvature * self.diagonal.amax().sqrt())

    def pieces(self) -> tuple[Piece, ...]:
        weight, bias, diagonal = (t.detach().double() for t in (self.weight, self.bias, self.diagonal))
        return (sll(weight, bias, diagonal, self.activation.function()),)
