"""How much of the distance to the nearest change of answer is certified, on small random networks.

Two or four times a residual attention layer and an SLL layer, then the mean over tokens and a linear head with ten
classes. Attention has Gaussian d x d matrices scaled to a spectral norm; an SLL layer has d units, a Gaussian W with
entries of variance 1/d, which its own T rescales, no bias, and the centred softplus; the head is Gaussian with entries
of variance 1/d; tokens are Gaussian, scaled to length 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.attention import AttentionLayer
from holdfast.errors import MemoryLimitError, NotApplicableError, SoundnessError
from holdfast.network.activations import Softplus
from holdfast.network.attention import Attention
from holdfast.network.base import Piece
from holdfast.network.centre import Centre
from holdfast.network.compositions import compositions
from holdfast.network.network import Head, Network
from holdfast.network.pooling import MeanPool
from holdfast.network.sll import sll, sll_diagonal
from holdfast.results import Guarantee

LAYERS = (2, 4)
WEIGHTS = (0.5, 1.0, 1.5, 2.0)
_N, _D, _H, _CLASSES = 16, 32, 4, 10


@dataclass(frozen=True)
class Setting:
    """How deep a network is, the spectral norm of its attention matrices, and the seed it is drawn from."""

    layers: int
    weight: float
    seed: int

    @property
    def title(self) -> str:
        return f"{self.layers} layers, |W|={self.weight:g}, seed {self.seed}"


def draw(setting: Setting, inputs: int) -> tuple[Network, Tensor]:
    """A random network and some inputs."""
    generator = torch.Generator().manual_seed(setting.seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def attention() -> Attention:
        weights = [gaussian(_D, _D) for _ in range(4)]
        w_q, w_k, w_v, w_o = (w * (setting.weight / torch.linalg.matrix_norm(w, 2)) for w in weights)
        q, k, v = (w.reshape(_D, _H, _D // _H).movedim(1, 0) for w in (w_q, w_k, w_v))
        return Attention(AttentionLayer(q, k, v, w_o.reshape(_H, _D // _H, _D), residual=1.0))

    def feed_forward() -> Piece:
        w, ones = gaussian(_D, _D) / _D**0.5, torch.ones(_D, dtype=torch.float64)
        return sll(w, ones * 0, sll_diagonal(w, ones), Softplus(centred=True))

    stages = [piece for _ in range(setting.layers) for piece in (attention(), feed_forward())]
    head = Head(gaussian(_CLASSES, _D) / _D**0.5, torch.zeros(_CLASSES, dtype=torch.float64))
    x = gaussian(inputs, _N, _D)
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return Network([*stages, MeanPool(_N)], head, setting.title), x


@dataclass(frozen=True)
class Measurement:
    """One network: the radii that each composition certifies for its inputs, and how near an attack comes."""

    setting: Setting
    guarantee: Guarantee
    attack: list[float | None]  # None where no change of answer was found
    radii: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)

    def ratios(self, method: str) -> list[float]:
        """Certified / attacked for the inputs whose answer an attack has changed."""
        return [r / a for r, a in zip(self.radii[method], self.attack, strict=True) if a is not None]


def measure(setting: Setting, inputs: int, guarantee: Guarantee) -> Measurement:
    """Certifies and attacks the inputs of one random network."""
    network, x = draw(setting, inputs)
    centre = Centre(network, x, guarantee=guarantee)
    attack = MinimalAttack(restarts=5, steps=60)(network, x, centre.prediction, seed=setting.seed)
    radii: dict[str, list[float]] = {}
    for method in compositions.values():
        if method.name == "best":
            continue
        try:
            found = method(centre).radius
        except (MemoryLimitError, NotApplicableError):
            continue
        if guarantee == "proved" and bool((found > attack.radius).any()):
            raise SoundnessError(f"{method.name} certifies more than an attack leaves: {setting.title}; please report")
        radii[method.name] = found.tolist()
    nearest = [radius if math.isfinite(radius) else None for radius in attack.radius.tolist()]
    return Measurement(setting, guarantee, nearest, radii)


def table(measurements: Sequence[Measurement]) -> Table:
    """Mean radii over seeds and inputs, and the mean ratio to the attack."""
    groups: dict[tuple[int, float], list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.setting.layers, measurement.setting.weight), []).append(measurement)
    names = list(measurements[0].radii)
    made = Table(title=f"mean radius (mean of certified / attack), {measurements[0].guarantee}")
    for column in ("layers", "|W|", *names, "attack"):
        made.add_column(column, justify="right")
    for (layers, weight), rows in groups.items():
        cells = []
        for name in names:
            radius = _mean(radius for row in rows for radius in row.radii[name])
            cells.append(f"{radius:.3g} ({_mean(ratio for row in rows for ratio in row.ratios(name)):.3f})")
        attack = _mean(radius for row in rows for radius in row.attack if radius is not None)
        made.add_row(str(layers), f"{weight:g}", *cells, f"{attack:.3g}")
    return made


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else math.nan
