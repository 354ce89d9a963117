"""`lofast-fig3`: the bound of Havens et al. 2024 when one matrix of a trained attention layer is perturbed (C.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.report.style import PALETTE, new_figure
from holdfast.results import Guarantee
from holdfast.studies.lofast_layer import CONFIG, TRIED, LayerTraining, layer_and_input, layer_training
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.train.config import read_training

_PLACES = ("W^Q", "W^K", "W^V", "W^O", "X")


@final
@dataclass(frozen=True)
class PerturbedBound:
    """Theorem 1 and our bound with one of the matrices moved.

    Attributes:
        place: which one.
        size: Frobenius norm of the movement.
        theorem: Theorem 1 of every sample.
        best: our smallest bound of the first samples.
    """

    place: str
    size: float
    theorem: list[float]
    best: list[float]


@final
@dataclass(frozen=True)
class AblationParameters:
    """What `repro lofast-fig3` takes."""

    sizes: tuple[float, ...] = option(
        (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0), "Frobenius norms of the perturbations.", grid=True, least=0
    )
    samples: int = option(10, "Samples for each matrix and size.", least=1)
    ours: int = option(2, "How many of the samples to bound by ours, too.", least=1)
    eps: float = option(0.1, "Radius of the bound.", least=1e-6)
    norm: float = option(4.0, "Frobenius norm of what enters the layer.", least=1e-6)
    guarantee: Guarantee = option("numerical", "Guarantee of the bounds.")
    config: str = option(CONFIG, "The network whose first attention is taken.")
    epochs: int = option(3, "Epochs of its training.", least=1)


@final
@register_study
class LofastFigure3(Study[AblationParameters]):
    """The paper's Figure 3."""

    name = "lofast-fig3"
    title = "Havens et al. 2024, Figure 3: the bound when W^Q, W^K, W^V, W^O or X of a trained layer is perturbed"
    paper = "havens2024"
    minutes = 20
    memory = 2
    parameters = AblationParameters
    kinds: ClassVar = {"training": LayerTraining, "bounds": PerturbedBound}

    def quick(self) -> AblationParameters:
        return AblationParameters((0.0, 1.0), 1, config=TRIED, epochs=1)

    def plan(self, parameters: AblationParameters, place: Workplace) -> StudyPlan:
        read_training(parameters.config)  # refused here, before any work
        grid = [(name, size) for name in _PLACES for size in parameters.sizes]
        parts = [StudyPart("bounds", f"{name} by {size:g}", (name, size)) for name, size in grid]
        return StudyPlan([[StudyPart("training", "training")], parts])

    def measure(
        self, parameters: AblationParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> LayerTraining | PerturbedBound:
        if part.kind == "training":
            return layer_training(parameters.config, parameters.epochs, place, tell)
        name, size = part.work
        layer, x = layer_and_input(parameters.config, parameters.epochs, 0, parameters.norm, place)
        theorem, best = [], []
        for sample in range(parameters.samples if size else 1):
            moved, at = perturbed(layer, x, name, size, sample)
            options: dict[str, Any] = {"eps": parameters.eps, "guarantee": parameters.guarantee}
            theorem.append(api.bound(moved, at, method="lofast", **options).value.item())
            if sample < parameters.ours:
                best.append(api.bound(moved, at, method="best", **options).value.item())
            tell(0.99 * (sample + 1) / parameters.samples)
        return PerturbedBound(name, size, theorem, best)

    def show(self, parameters: AblationParameters, records: Records) -> StudyOutput:
        rows = records.of("bounds")
        growth = {name: _growth(rows, name, "theorem") for name in _PLACES}
        statements = ablation_statements(rows)
        return StudyOutput(
            {"growth": growth, "statements": to_json(statements)},
            [_ablation_table(rows), statement_table("Havens et al. 2024, appendix C.1", statements)],
            {"": draw_ablation(rows)},
            statement_page(statements),
        )


def perturbed(layer: AttentionLayer, x: Tensor, name: str, size: float, seed: int) -> tuple[AttentionLayer, Tensor]:
    """The layer and input with a Gaussian movement of this Frobenius norm in one of them."""
    generator = torch.Generator().manual_seed(seed)

    def moved(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=t.dtype)
        there: Tensor = t + noise * (size / torch.linalg.vector_norm(noise))
        return there

    if name == "X":
        return layer, moved(x)
    key = "w_" + name[-1].lower()
    return layer.replace(**{key: moved(getattr(layer, key))}), x


def _growth(rows: Sequence[PerturbedBound], name: str, key: str) -> float:
    """How many times larger the mean bound is at the largest movement than at the smallest."""
    own = sorted((row for row in rows if row.place == name), key=lambda row: row.size)
    first, last = (torch.tensor(getattr(row, key)).mean().item() for row in (own[0], own[-1]))
    return last / first


def ablation_statements(rows: Sequence[PerturbedBound]) -> list[Statement]:
    """What the numbers say about appendix C.1: nothing is decided where samples overlap those of W^Q and W^K."""
    size = max(row.size for row in rows)
    samples = {row.place: row.theorem for row in rows if row.size == size}
    weak = max(max(samples[name]) for name in ("W^Q", "W^K") if name in samples)
    weakest = min(min(samples[name]) for name in ("W^Q", "W^K") if name in samples)
    made = []
    for name in ("W^V", "W^O", "X"):
        if name in samples:
            own = samples[name]
            evidence = f"bound with it moved by {size:g}: {min(own):.5g} to {max(own):.5g}"
            evidence += f"; W^Q, W^K: {weakest:.5g} to {weak:.5g}"
            claim = f"the bound is more sensitive to {name} than to W^Q and W^K"
            told = min(own) > weak or max(own) < weakest
            made.append(judged(claim, min(own) > weak, evidence) if told else Statement(claim, "undecided", evidence))
    growth = {name: _growth(rows, name, "best") for name in _PLACES if name in samples}
    grown = [growth[name] for name in ("W^V", "W^O") if name in growth]
    still = [growth[name] for name in ("W^Q", "W^K", "X") if name in growth]
    evidence = f"our bound grows with a movement of {size:g}: " + ", ".join(f"{g:.3g} ({n})" for n, g in growth.items())
    made.append(judged("our bound grows with W^V and W^O alone (ours)", max(still) < 1.01 < min(grown), evidence))
    return made


def _ablation_table(rows: Sequence[PerturbedBound]) -> Table:
    sizes = sorted({row.size for row in rows})
    table = Table(title="Bounds over the size of the perturbation, mean over the samples", title_justify="left")
    table.add_column("moved")
    table.add_column("bound", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:g}", justify="right")
    for name in _PLACES:
        own = {row.size: row for row in rows if row.place == name}
        for bound, key in (("Theorem 1", "theorem"), ("ours, best", "best")):
            means = [torch.tensor(getattr(own[size], key)).mean().item() if size in own else None for size in sizes]
            table.add_row(name, bound, *("" if mean is None else f"{mean:.3f}" for mean in means))
    return table


def draw_ablation(rows: Sequence[PerturbedBound]) -> Figure:
    """Both bounds over the size of the movement, a colour for each matrix; error bars are the samples' range."""
    figure = new_figure(6.8, 3.2)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, key, title in zip(panels, ("theorem", "best"), ("Theorem 1", "ours, best"), strict=True):
        for colour, mark, name in zip(PALETTE, "os^vD", _PLACES, strict=False):
            own = sorted((row for row in rows if row.place == name), key=lambda row: row.size)
            values = [torch.tensor(getattr(row, key)) for row in own]
            mean = torch.stack([samples.mean() for samples in values])
            least, largest = (torch.stack([pick(samples) for samples in values]) for pick in (torch.amin, torch.amax))
            reach = torch.stack([mean - least, largest - mean]).clamp(min=0)
            sizes = [row.size for row in own]
            panel.errorbar(
                sizes, mean, reach.numpy(), fmt=f"{mark}-", capsize=2, markersize=3, color=colour, label=f"${name}$"
            )
        panel.set(title=title, xlabel="Frobenius norm of the perturbation")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("bound of the movement")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    return figure
