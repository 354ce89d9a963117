"""How far each bound is above what an attack attains, on random layers in four regimes.

Gaussian d x d matrices scaled to a spectral norm, rows of x scaled to a length, residual 1: near-uniform attention for
unit rows and small weights, one-hot attention for rows of length √d and weights of norm 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.bounds import bounds
from holdfast.report.layer import save_figure
from holdfast.results import Guarantee

RADII = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class Regime:
    """A shape, the spectral norm of the four weight matrices, and the length of the rows of x."""

    n: int
    d: int
    h: int
    weight: float
    row: float

    @property
    def title(self) -> str:
        return f"n={self.n} d={self.d} h={self.h}, |W|={self.weight:g}, rows of length {self.row:.3g}"


def regimes(n: int, d: int, h: int) -> list[Regime]:
    """The four regimes of one shape, from flat to peaked attention."""
    return [Regime(n, d, h, weight, row) for row in (1.0, math.sqrt(d)) for weight in (1.0, 3.0)]


def draw(regime: Regime, seed: int) -> tuple[AttentionLayer, Tensor]:
    """A random residual layer and input of the regime."""
    generator = torch.Generator().manual_seed(seed)
    n, d, h = regime.n, regime.d, regime.h

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [gaussian(d, d) for _ in range(4)]
    w_q, w_k, w_v, w_o = (w * (regime.weight / torch.linalg.matrix_norm(w, 2)) for w in weights)
    q, k, v = (w.reshape(d, h, d // h).movedim(1, 0) for w in (w_q, w_k, w_v))
    x = gaussian(n, d)
    x = x * (regime.row / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    return AttentionLayer(q, k, v, w_o.reshape(h, d // h, d), residual=1.0), x


@dataclass(frozen=True)
class Measurement:
    """One layer: what an attack attained at each radius, and the bounds' ratios to it."""

    regime: Regime
    seed: int
    radii: tuple[float, ...]
    guarantee: Guarantee
    attained: list[float]
    ratios: dict[str, list[float]]
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


def measure(
    regime: Regime, seed: int, radii: Sequence[float], guarantee: Guarantee, device: str = "cpu"
) -> Measurement:
    """Attacks one random layer and evaluates every bound on it."""
    layer, x = draw(regime, seed)
    layer, x = layer.to(device=device), x.to(device)
    found = api.attack(layer, x, list(radii), seed=seed)
    ratios, seconds = {}, {"attack": found.seconds}
    for bound in bounds.values():
        if bound.name != "best":
            result = bound(layer, x, list(radii), guarantee=guarantee)
            ratios[bound.name] = (result.value / found.lower).tolist()
            seconds[bound.name] = result.seconds
    ratios["best"] = [min(column) for column in zip(*ratios.values(), strict=True)]
    return Measurement(regime, seed, tuple(radii), guarantee, found.lower.tolist(), ratios, seconds)


def tables(measurements: Sequence[Measurement]) -> list[Table]:
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


def plot(measurements: Sequence[Measurement], stem: Path) -> list[Path]:
    """Ratio minus one over eps, a panel for each regime, as PNG and SVG."""
    groups = _by_regime(measurements)
    figure = Figure(figsize=(4.2 * len(groups), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, (regime, rows) in zip(panels, groups.items(), strict=True):
        for name in rows[0].ratios:
            if name != "best":
                panel.plot(rows[0].radii, [value - 1 for value in _mean(rows, name)], marker=".", label=name)
        panel.set(xscale="log", yscale="log", title=f"|W|={regime.weight:g}, rows {regime.row:.3g}", xlabel="eps")
        panel.grid(which="major", alpha=0.25)
    panels[0].set_ylabel("bound / attack - 1")
    panels[0].legend(frameon=False, fontsize="small")
    return save_figure(figure, stem)


def _by_regime(measurements: Sequence[Measurement]) -> dict[Regime, list[Measurement]]:
    groups: dict[Regime, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.regime, []).append(measurement)
    return groups


def _mean(rows: Sequence[Measurement], name: str) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*(row.ratios[name] for row in rows), strict=True)]


def _short(value: float) -> str:
    return f"{value:.4f}" if value < 1.1 else f"{value:.3g}"
