"""Dense layers that are 1-Lipschitz with a residual inside."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import InputError
from holdfast.network.base import Piece
from holdfast.network.sll import sll
from holdfast.nn.activations import Entrywise
from holdfast.nn.layer import Layer
from holdfast.nn.linear import sll_diagonal


@final
class Sll(Layer):
    """x ↦ x - 2 W T⁻¹ σ(Wᵀx + b) with slopes of σ in [0, 1] and the diagonal T of `sll_diagonal` (Araujo et al. 2023).

    With D the slopes of σ between two points, the difference quotient is J = I - 2 W T⁻¹ D Wᵀ, and
    JᵀJ = I - 4 W D T⁻¹ Wᵀ + 4 W D T⁻¹ WᵀW T⁻¹ D Wᵀ ⪯ I - 4 W D (I - D) T⁻¹ Wᵀ ⪯ I, because WᵀW ⪯ T.

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
        return sll_diagonal(self.weight, self.log_q)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        hidden = self.activation(functional.linear(x, self.weight.mT, self.bias))
        return x - 2 * functional.linear(hidden, self.weight / self.diagonal)

    def pieces(self) -> tuple[Piece, ...]:
        weight, bias, diagonal = (t.detach().double() for t in (self.weight, self.bias, self.diagonal))
        return (sll(weight, bias, diagonal, self.activation.function()),)
