"""Linear maps of limited spectral norm, and what holds the limit while they are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from holdfast.errors import InputError, UnknownNameError
from holdfast.layers.linear.diagonal import sll_diagonal
from holdfast.layers.linear.piece import Affine
from holdfast.layers.module import Layer
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness, norm_estimate

#: How a map keeps its norm: stepped on the manifold of orthonormal matrices by `ManifoldStep`; by torch's orthogonal
#: parametrisation; by the rescaling of SLL layers; not at all.
MapKind = Literal["orthogonal", "orthogonal-torch", "sll", "free"]


@final
class OnManifold(nn.Module):
    """Marks a weight with orthonormal rows or columns that `ManifoldStep` keeps so; the map uses `norm` times it."""

    def __init__(self, norm: float = 1.0) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, weight: Tensor) -> Tensor:
        """The weight of the map."""
        return weight if self.norm == 1 else self.norm * weight


@final
class Scaled(nn.Module):
    """A weight times a number."""

    def __init__(self, norm: float) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, weight: Tensor) -> Tensor:
        """The weight of the map."""
        return self.norm * weight


@final
class SllRescaling(nn.Module):
    """norm · W T^(-1/2) with the diagonal T of `sll_diagonal`, on the shorter side of W (Araujo et al. 2023).

    T ⪰ WᵀW, so T^(-1/2) WᵀW T^(-1/2) ⪯ I and the spectral norm is at most `norm`.
    """

    def __init__(self, rows: int, columns: int, norm: float) -> None:
        super().__init__()
        self.norm = norm
        self.log_q = nn.Parameter(torch.zeros(min(rows, columns)))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight of the map."""
        wide = weight.shape[0] < weight.shape[1]
        tall = weight.mT if wide else weight
        rescaled = tall * (self.norm * sll_diagonal(tall, self.log_q.exp()).rsqrt())
        return rescaled.mT if wide else rescaled


@final
class UnitRows(nn.Module):
    """Rows of length 1 (Singla et al. 2022): every logit has the same gain, and so has every pair at the same angle."""

    def forward(self, weight: Tensor) -> Tensor:
        """The weight of the map."""
        return functional.normalize(weight, dim=1)


@final
class Linear(nn.Linear, Layer):
    """x ↦ W x + b on every token, with ‖W‖ <= norm.

    Args:
        d_in: width of the input.
        d_out: width of the output.
        norm: limit of the spectral norm; an orthogonal map attains it in every direction it does not lose.
        kind: how the limit is kept; a "free" map only starts near it.
        bias: whether there is a b.

    Example:
        >>> Linear(48, 64)(torch.randn(2, 16, 48)).shape
        torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        norm: float = 1.0,
        kind: MapKind = "orthogonal",
        bias: bool = True,
    ) -> None:
        if kind not in get_args(MapKind):
            raise UnknownNameError("kind of linear map", kind, get_args(MapKind))
        if not (math.isfinite(norm) and norm > 0):
            raise InputError(f"norm is {norm}; expected a positive number")
        super().__init__(d_in, d_out, bias)
        self._gain = math.inf if kind == "free" else norm
        if bias:
            nn.init.zeros_(self.bias)
        nn.init.orthogonal_(self.weight, gain=norm if kind == "free" else 1.0)
        if kind == "orthogonal":
            parametrize.register_parametrization(self, "weight", OnManifold(norm))
        elif kind == "orthogonal-torch":
            parametrizations.orthogonal(self)
            parametrize.register_parametrization(self, "weight", Scaled(norm))
        elif kind == "sll":
            parametrize.register_parametrization(self, "weight", SllRescaling(d_out, d_in, norm))

    @property
    def gain(self) -> float:
        return self._gain

    @torch.no_grad()
    def start_as_inverse(self, other: Linear) -> None:
        """Takes the transpose of another map on the manifold, if both are there: together they lose nothing at first.

        Independent orthogonal maps around a wider layer would lose most of what passes.
        """
        own, first = (list(manifold_parameters(linear)) for linear in (self, other))
        if own and first:
            own[0].copy_(first[0].mT)

    def steepness(self) -> Steepness:
        return Steepness(self.gain if math.isfinite(self.gain) else norm_estimate(self.weight), 0.0)

    def pieces(self) -> tuple[Piece, ...]:
        return (Affine(self.weight.mT, self.bias),)


@final
class UnitRowHead(nn.Linear):
    """Logits whose weights have length 1: margins are certified pair by pair, with ‖w_y - w_j‖."""

    def __init__(self, d_in: int, classes: int) -> None:
        super().__init__(d_in, classes)
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)
        parametrize.register_parametrization(self, "weight", UnitRows())


def manifold_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights that `ManifoldStep` has to step: those of "orthogonal" maps."""
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList) and any(isinstance(p, OnManifold) for p in module):
            original = module.original
            assert isinstance(original, nn.Parameter)
            yield original
