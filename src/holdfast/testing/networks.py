"""Small networks of every kind, with inputs: seeded, and small enough for every composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.layers import Affine, Attention, ClassToken, KinkedMlp, LayerNorm, Mlp, Piece, TokenMean
from holdfast.network import Head, Network, Residual
from holdfast.testing.draw import Dice

_N, _D, _K, _UNITS, _CLASSES, _BATCH = 3, 4, 2, 5, 3, 2


@dataclass(frozen=True, eq=False)
class NetworkCase:
    """A network and inputs for it.

    Attributes:
        name: what is particular about them.
        network: begins with an affine map of the tokens, so that the unit and the basis of the input can be changed.
        x: (b, n, d) float64.
        exact: (b) how near the nearest change of the answer is, where that is known.
    """

    name: str
    network: Network
    x: Tensor
    exact: Float64[Tensor, " b"] | None = None

    @property
    def attends(self) -> bool:
        """Whether there is attention, whose bounds cost more than all the rest."""
        return any(isinstance(piece, Attention) for piece in self.network.pieces())

    def with_head(self, weight: Tensor, bias: Tensor) -> NetworkCase:
        """The same features behind another head."""
        return replace(self, network=Network(self.network.stages, Head(weight, bias), self.network.name), exact=None)

    def through(self, U: Tensor) -> NetworkCase:
        """The same network of x U⁻¹, for an invertible U."""
        first, *others = self.network.stages
        assert isinstance(first, Affine)
        moved = Affine(torch.linalg.inv(U) @ first.w, first.b)
        return NetworkCase(self.name, Network((moved, *others), self.network.head, self.network.name), self.x @ U)


def draw_network(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> NetworkCase:
    """A random network of one kind, with weights of the given dtype, and two inputs."""
    dice = Dice(seed)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * dice.normal(*shape)).to(dtype)

    def attention(residual: float = 0.0, **options: Any) -> Attention:
        maps: dict[str, Any] = {name: normal(2, _D, _K, size=_D**-0.5) for name in ("w_q", "w_k", "w_v")}
        biases: dict[str, Any] = {name: normal(2, _K, size=0.3) for name in ("b_q", "b_k", "b_v")}
        w_o = normal(2, _K, _D, size=0.5)
        return Attention(AttentionLayer(**maps, w_o=w_o, **biases, residual=residual, **options))

    def mlp(activation: str, residual: float = 0.0) -> Piece:
        make = KinkedMlp if activation in ("relu", "abs") else Mlp
        first, second = normal(_D, _UNITS, size=_D**-0.5), normal(_UNITS, _D, size=0.4)
        return make(first, normal(_UNITS, size=0.3), activation, second, normal(_D, size=0.3), residual)

    def norm() -> LayerNorm:
        return LayerNorm(1 + normal(_D, size=0.1), normal(_D, size=0.1), 1e-5)

    stages: list[Piece | Residual] = _KINDS[kind](attention, mlp, norm)
    w = normal(_D, _D, size=_D**-0.5) + torch.eye(_D).to(dtype)
    if kind == "linear":  # no direction is steeper than another, so that norms of maps are exact too
        w = torch.linalg.qr(w).Q
    first = Affine(w, normal(_D, size=0.3))
    network = Network((first, *stages), Head(normal(_CLASSES, _D).double(), normal(_CLASSES).double()), kind)
    x = dice.normal(_BATCH, _N, _D).to(dtype).double()
    return NetworkCase(kind, network, x, _exact(network, x) if kind.startswith("linear") else None)


_KINDS: dict[str, Callable[..., list[Piece | Residual]]] = {
    "linear": lambda attention, mlp, norm: [TokenMean(_N)],
    "linear branch": lambda attention, mlp, norm: [
        Residual((Affine(torch.eye(_D).double().flip(0) / 64),)),
        ClassToken(),
    ],
    "smooth": lambda attention, mlp, norm: [attention(1.0), Residual((norm(), mlp("gelu"))), ClassToken()],
    "kinked branches": lambda attention, mlp, norm: [
        Residual((attention(causal=True),)),
        Residual((mlp("relu"),)),
        TokenMean(_N, 1),
    ],
    "kink at the end": lambda attention, mlp, norm: [ClassToken(1), mlp("abs", 1.0)],
}


#: What `draw_network` draws.
NETWORK_KINDS = tuple(_KINDS)


@cache
def network_cases() -> tuple[NetworkCase, ...]:
    """One network of every kind."""
    return tuple(draw_network(kind) for kind in _KINDS)


def _exact(network: Network, x: Tensor) -> Tensor:
    """Of an affine network: min_j m_j / ‖∇m_j‖."""
    gradients = torch.func.vmap(torch.func.jacrev(lambda z: network(z.unsqueeze(0)).squeeze(0)))(x).flatten(2)
    logits: Tensor = network(x)
    y = logits.argmax(-1, keepdim=True)
    margins = logits.gather(1, y) - logits
    own = gradients[torch.arange(len(x)), y.squeeze(1)].unsqueeze(1)
    slopes = torch.linalg.vector_norm(own - gradients, dim=-1)
    nearest: Tensor = (margins / slopes).scatter(1, y, torch.inf).amin(1)
    return nearest
