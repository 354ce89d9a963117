"""How much of the distance to the nearest change of answer is certified, on small random networks.

Two or four times a residual attention layer and an SLL layer, then the mean over tokens and a linear head with ten
classes. Attention has Gaussian d x d matrices scaled to a spectral norm; an SLL layer has d units, a Gaussian W with
entries of variance 1/d, which its own T rescales, no bias, and the centred softplus; the head is Gaussian with entries
of variance 1/d; tokens are Gaussian, scaled to length 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from rich.table import Table
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.attention import AttentionLayer
from holdfast.compositions import compositions
from holdfast.errors import MemoryLimitError, NotApplicableError, SoundnessError
from holdfast.layers.activation.functions import Softplus
from holdfast.layers.attention.piece import Attention
from holdfast.layers.linear.diagonal import sll_diagonal
from holdfast.layers.perceptron.sll import sll
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.pooling import TokenMean
from holdfast.network.centre import Centre
from holdfast.network.network import Head, Network
from holdfast.results import Guarantee
from holdfast.studies.beside_attack import draw_beside_attack
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

_N, _D, _H, _CLASSES = 16, 32, 4, 10


@final
@dataclass(frozen=True)
class RandomNetwork:
    """How deep a network is, the spectral norm of its attention matrices, and the seed it is drawn from."""

    layers: int
    weight: float
    seed: int

    @property
    def title(self) -> str:
        return f"{self.layers} layers, |W|={self.weight:g}, seed {self.seed}"


def draw(setting: RandomNetwork, inputs: int) -> tuple[Network, Tensor]:
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
    return Network([*stages, TokenMean(_N)], head, setting.title), x


@final
@dataclass(frozen=True)
class NetworkRadii:
    """One network: the radii that each composition certifies for its inputs, and how near an attack comes."""

    setting: RandomNetwork
    guarantee: Guarantee
    attack: list[float | None]  # None where no change of answer was found
    radii: dict[str, list[float]]

    def ratios(self, method: str) -> list[float]:
        """Certified / attacked for the inputs whose answer an attack has changed."""
        return [r / a for r, a in zip(self.radii[method], self.attack, strict=True) if a is not None]


def measure(setting: RandomNetwork, inputs: int, guarantee: Guarantee) -> NetworkRadii:
    """Certifies and attacks the inputs of one random network."""
    network, x = draw(setting, inputs)
    centre = Centre(network, x, guarantee=guarantee)
    attack = MinimalAttack(restarts=5, steps=60)(network, x, centre.prediction, seed=setting.seed)
    radii: dict[str, list[float]] = {}
    for method in compositions.values():
        if method.name == "best":
            continue
        try:
            radius = method(centre).radius
        except (MemoryLimitError, NotApplicableError):
            continue
        if guarantee == "proved" and bool((radius > attack.radius).any()):
            raise SoundnessError(f"{method.name} certifies more than an attack leaves: {setting.title}; please report")
        radii[method.name] = radius.tolist()
    nearest = [radius if math.isfinite(radius) else None for radius in attack.radius.tolist()]
    return NetworkRadii(setting, guarantee, nearest, radii)


def table(measurements: Sequence[NetworkRadii]) -> Table:
    """Mean radii over seeds and inputs, and the mean ratio to the attack."""
    groups: dict[tuple[int, float], list[NetworkRadii]] = {}
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
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


@final
@dataclass(frozen=True)
class NetworksParameters:
    """What `repro networks` takes."""

    layers: tuple[int, ...] = option((2, 4), "Depths.", grid=True)
    weights: tuple[float, ...] = option((0.5, 1.0, 1.5, 2.0), "Spectral norms of the weights.", grid=True)
    seeds: int = option(3, "Number of random networks for each.", grid=True, least=1)
    inputs: int = option(4, "Number of inputs per network.", least=1)
    guarantee: Guarantee = option("proved", "Guarantee of the radii.")


@final
@register_study
class RandomNetworks(Study[NetworksParameters]):
    """Every composition beside an attack."""

    name = "networks"
    title = "Certified radius against attack radius on small random networks, for every composition"
    paper = "holdfast"
    minutes = 60
    memory = 3
    parameters = NetworksParameters
    kinds: ClassVar = {"network": NetworkRadii}

    def quick(self) -> NetworksParameters:
        return NetworksParameters((1,), (1.0,), 1, 1, "numerical")

    def stem(self, parameters: NetworksParameters) -> str:
        return f"{self.name}-{parameters.guarantee}"

    def plan(self, parameters: NetworksParameters, place: Workplace) -> StudyPlan:
        grid = itertools.product(parameters.layers, parameters.weights, range(parameters.seeds))
        settings = [RandomNetwork(*values) for values in grid]
        return StudyPlan([[StudyPart("network", setting.title, setting) for setting in settings]])

    def measure(
        self, parameters: NetworksParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> NetworkRadii:
        return measure(part.work, parameters.inputs, parameters.guarantee)

    def show(self, parameters: NetworksParameters, records: Records) -> StudyOutput:
        networks = records.of("network")
        methods = dict.fromkeys(method for one in networks for method in one.radii)
        radii = {
            method: [pair for one in networks for pair in zip(one.radii.get(method, ()), one.attack, strict=False)]
            for method in methods
        }
        return StudyOutput(tables=[table(networks)], figures={"": draw_beside_attack(radii)})
