"""One layer, analyzed end to end: its local constant, every bound, an attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.results import AttackResult, BoundResult, NormResult


@dataclass(frozen=True)
class LayerReport:
    """What is known about one layer at a batch of inputs, over radii.

    Attributes:
        best: the smallest bound; its terms are the values of all bounds.
        lofast: the LoFAST bounds, for their terms.
    """

    name: str
    layer: AttentionLayer
    radii: tuple[float, ...]
    estimate: NormResult
    lipschitz: NormResult
    best: BoundResult
    lofast: dict[str, BoundResult]
    attack: AttackResult

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "name": self.name,
            "layer": repr(self.layer),
            "local_lipschitz": {"estimate": self.estimate.to_dict(), "upper": self.lipschitz.to_dict()},
            "best": self.best.to_dict(),
            "lofast": {name: result.to_dict() for name, result in self.lofast.items()},
            "attack": self.attack.to_dict(),
        }


def report_layer(name: str, layer: AttentionLayer, x: Tensor, radii: Sequence[float]) -> LayerReport:
    """Analyzes a layer at inputs (b, n, d): local Lipschitz constant, every bound, an attack."""
    layer, x = layer.double(), x.double()
    return LayerReport(
        name=name,
        layer=layer,
        radii=tuple(radii),
        estimate=api.local_lipschitz(layer, x),
        lipschitz=api.local_lipschitz(layer, x, side="upper"),
        best=api.bound(layer, x, radii),
        lofast={name: api.bound(layer, x, radii, name) for name in ("naive", "lofast-xi", "lofast")},
        attack=api.attack(layer, x, radii),
    )
