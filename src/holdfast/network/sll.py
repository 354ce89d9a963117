"""Layers that are 1-Lipschitz with a residual inside (Araujo et al. 2023)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.errors import InputError
from holdfast.linalg import Ball, MatrixOperator, upper
from holdfast.linalg.rounding import frobenius
from holdfast.network.activations import Activation, SmoothActivation
from holdfast.network.mlp import KinkedMlp, Mlp
from holdfast.network.weights import double


def sll_diagonal(w: Float[Tensor, "d units"], q: Float[Tensor, " units"]) -> Float[Tensor, " units"]:
    """T_u = Σ_v |WᵀW|_uv q_v/q_u: T - WᵀW is diagonally dominant up to a scaling, hence positive semidefinite.

    Args:
        w: (d, units) W.
        q: (units) any positive numbers.
    """
    if not bool((q > 0).all()):
        raise InputError(f"the least entry of q is {float(q.min()):g}; expected positive numbers")
    return ((w.mT @ w).abs() * q).sum(-1) / q


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
