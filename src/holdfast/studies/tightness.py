"""How far each bound is above what an attack attains, on random layers in four regimes.

Gaussian d x d matrices scaled to a spectral norm, rows of x scaled to a length, residual 1: near-uniform attention for
unit rows and small weights, one-hot attention for rows of length √d and weights of norm 3; the same layers with rotary
positions, whose frequencies fall from 1 to nearly 1/10,000, where these are asked for; and layers as Qwen3 has: causal,
heads twice as wide, two of them for each of keys and values, RMSNorm of queries and keys before positions turn them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer, HeadNorm, Rotary
from holdfast.bounds import bounds
from holdfast.errors import InputError
from holdfast.report.style import draw_range, new_figure
from holdfast.results import Guarantee
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

_HIGHEST = 1e5  # of a figure: what is above says nothing
RADII = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


@final
@dataclass(frozen=True)
class Regime:
    """A shape, the spectral norm of the four weight matrices, the length of the rows of x, and what tells positions."""

    n: int
    d: int
    h: int
    weight: float
    row: float
    positions: str = "none"

    @property
    def title(self) -> str:
        turned = {"none": "", "rotary": ", rotary positions", "qwen3": ", as in Qwen3"}[self.positions]
        return f"n={self.n} d={self.d} h={self.h}, |W|={self.weight:g}, rows of length {self.row:.3g}{turned}"


def regimes(n: int, d: int, h: int, positions: str = "none") -> list[Regime]:
    """The four regimes of one shape, from flat to peaked attention."""
    return [Regime(n, d, h, weight, row, positions) for row in (1.0, math.sqrt(d)) for weight in (1.0, 3.0)]


def draw(regime: Regime, seed: int) -> tuple[AttentionLayer, Tensor]:
    """A random residual layer and input of the regime."""
    generator = torch.Generator().manual_seed(seed)
    n, d, h = regime.n, regime.d, regime.h

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if regime.positions == "qwen3":
        layer = _as_qwen3(regime, gaussian)
    else:
        maps = [_scaled(gaussian(d, d), regime.weight) for _ in range(4)]
        q, k, v = (w.reshape(d, h, d // h).movedim(1, 0) for w in maps[:3])
        rotary = None if regime.positions == "none" else _turning(n, d // h)
        layer = AttentionLayer(q, k, v, maps[3].reshape(h, d // h, d), residual=1.0, rotary=rotary)
    x = gaussian(n, d)
    return layer, x * (regime.row / torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def _as_qwen3(regime: Regime, gaussian: Callable[..., Tensor]) -> AttentionLayer:
    """Norms undo the size of queries and keys; their own weights are √|W|, so that scores grow with |W|."""
    n, d, h = regime.n, regime.d, regime.h
    g, k = h // 2, 2 * d // h
    w_q, w_k, w_v = (
        _scaled(gaussian(d, heads * k), regime.weight).reshape(d, heads, k).movedim(1, 0) for heads in (h, g, g)
    )
    w_o = _scaled(gaussian(h * k, d), regime.weight).reshape(h, k, d)
    norm = HeadNorm(torch.full((k,), math.sqrt(regime.weight), dtype=torch.float64))
    rotary = _turning(n, k)
    return AttentionLayer(w_q, w_k, w_v, w_o, residual=1.0, causal=True, rotary=rotary, q_norm=norm, k_norm=norm)


def _scaled(w: Tensor, norm: float) -> Tensor:
    scaled: Tensor = w * (norm / torch.linalg.matrix_norm(w, 2))
    return scaled


def _turning(n: int, k: int) -> Rotary:
    """Position i turns the pair m of k/2 by i · 10000^(-2m/k)."""
    frequencies = 10000.0 ** (-2 * torch.arange(k // 2, dtype=torch.float64) / k)
    angles = (torch.arange(n, dtype=torch.float64)[:, None] * frequencies).repeat(1, 2)
    return Rotary(angles.cos(), angles.sin())


@final
@dataclass(frozen=True)
class LayerTightness:
    """One layer: what an attack attained at each radius, and the bounds' ratios to it."""

    regime: Regime
    seed: int
    radii: tuple[float, ...]
    guarantee: Guarantee
    attained: list[float]
    ratios: dict[str, list[float]]
    seconds: dict[str, float]


def measure(
    regime: Regime, seed: int, radii: Sequence[float], guarantee: Guarantee, device: str = "cpu"
) -> LayerTightness:
    """Attacks one random layer and evaluates every bound on it."""
    layer, x = draw(regime, seed)
    layer, x = layer.to(device=device), x.to(device)
    attacked = api.attack(layer, x, list(radii), seed=seed)
    ratios, seconds = {}, {"attack": attacked.seconds}
    for bound in bounds.values():
        if bound.name != "best" and bound.refusal(layer) is None:
            result = bound(layer, x, list(radii), guarantee=guarantee)
            ratios[bound.name] = (result.value / attacked.lower).tolist()
            seconds[bound.name] = result.seconds
    ratios["best"] = [min(column) for column in zip(*ratios.values(), strict=True)]
    return LayerTightness(regime, seed, tuple(radii), guarantee, attacked.lower.tolist(), ratios, seconds)


def tables(measurements: Sequence[LayerTightness]) -> list[Table]:
    """One table for each regime: mean ratio over the seeds."""
    made = []
    for regime, rows in _by_regime(measurements).items():
        table = Table(title=f"bound / attack, {regime.title}, mean over {len(rows)} seeds")
        table.add_column("eps")
        for radius in rows[0].radii:
            table.add_column(f"{radius:g}", justify="right")
        for name in rows[0].ratios:
            table.add_row(name, *(_short(value) for value in _mean(rows, name)))
        made.append(table)
    return made


def draw_ratios(measurements: Sequence[LayerTightness]) -> Figure:
    """Ratio minus one over eps, mean and range over the layers: a panel for each regime, a row for all positions."""
    groups = _by_regime(measurements)
    lines = len({regime.positions for regime in groups})
    figure = new_figure(7.0, 0.8 + 1.8 * lines)
    grid = figure.subplots(lines, len(groups) // lines, sharey=True, squeeze=False)
    panels = grid.flatten().tolist()
    names = list(next(iter(groups.values()))[0].ratios)
    for panel, (regime, rows) in zip(panels, groups.items(), strict=True):
        missing = [math.nan] * len(rows[0].radii)  # of a bound that refuses the layer: the next ones keep their styles
        for name in names:
            if name != "best":
                above = torch.tensor([row.ratios.get(name, missing) for row in rows]) - 1
                draw_range(panel, rows[0].radii, above, marker=".", label=name)
        panel.set(xscale="log", yscale="log", title=_panel(regime))
        panel.grid(which="major", alpha=0.25)
    panels[0].set_ylim(top=min(panels[0].get_ylim()[1], _HIGHEST))  # shared by all
    for panel in grid[-1]:
        panel.set_xlabel("eps")
    for panel in grid[:, 0]:
        panel.set_ylabel("bound / attack - 1")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


def _panel(regime: Regime) -> str:
    title = f"|W|={regime.weight:g}, rows {regime.row:.3g}"
    return title if regime.positions == "none" else f"{title}, {regime.positions}"


def _by_regime(measurements: Sequence[LayerTightness]) -> dict[Regime, list[LayerTightness]]:
    groups: dict[Regime, list[LayerTightness]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.regime, []).append(measurement)
    return groups


def _mean(rows: Sequence[LayerTightness], name: str) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*(row.ratios[name] for row in rows), strict=True)]


def _short(value: float) -> str:
    return f"{value:.4f}" if value < 1.1 else f"{value:.3g}"


@final
@dataclass(frozen=True)
class TightnessParameters:
    """What `repro tightness` takes."""

    shape: tuple[int, ...] = option((64, 64, 8), "Tokens, width and heads.")
    positions: tuple[str, ...] = option(
        ("none",), "How positions are encoded: none, rotary, or qwen3, a layer like its.", grid=True
    )
    seeds: int = option(3, "Number of random layers for each regime.", grid=True, least=1)
    eps: tuple[float, ...] = option(RADII, "Radii.", least=1e-6)
    guarantee: Guarantee = option("numerical", "Guarantee of the bounds.")


@final
@register_study
class Tightness(Study[TightnessParameters]):
    """Every bound beside an attack."""

    name = "tightness"
    title = "Ratio of every bound to an attack, on random layers from flat to peaked attention"
    paper = "holdfast"
    minutes = 10
    memory = 2
    parameters = TightnessParameters
    kinds: ClassVar = {"layer": LayerTightness}

    def quick(self) -> TightnessParameters:
        return TightnessParameters((6, 8, 2), ("none", "rotary", "qwen3"), 1, (0.01, 0.1))

    def stem(self, parameters: TightnessParameters) -> str:
        n, d, h = parameters.shape
        return f"{self.name}-n{n}-d{d}-h{h}-{parameters.guarantee}"

    def plan(self, parameters: TightnessParameters, place: Workplace) -> StudyPlan:
        if len(parameters.shape) != 3:
            raise InputError(f"--shape is {parameters.shape}; expected tokens, width and heads, such as 64,64,8")
        if unknown := sorted(set(parameters.positions) - {"none", "rotary", "qwen3"}):
            raise InputError(f"--positions has {', '.join(unknown)}; expected none, rotary or qwen3")
        n, d, h = parameters.shape
        if "rotary" in parameters.positions and d % (2 * h):
            raise InputError(
                f"--shape is {n},{d},{h}; rotary positions turn pairs, so the width of a head must be even"
            )
        if "qwen3" in parameters.positions and (h % 2 or 2 * d % h):
            raise InputError(f"--shape is {n},{d},{h}; a layer like Qwen3's has an even number of heads of width 2 d/h")
        kinds = [regime for positions in parameters.positions for regime in regimes(n, d, h, positions)]
        work = [(regime, seed) for regime in kinds for seed in range(parameters.seeds)]
        return StudyPlan(
            [[StudyPart("layer", f"{regime.title}, seed {seed}", (regime, seed)) for regime, seed in work]]
        )

    def measure(
        self, parameters: TightnessParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> LayerTightness:
        regime, seed = part.work
        return measure(regime, seed, parameters.eps, parameters.guarantee, place.device)

    def show(self, parameters: TightnessParameters, records: Records) -> StudyOutput:
        layers = records.of("layer")
        return StudyOutput(tables=tables(layers), figures={"": draw_ratios(layers)})
