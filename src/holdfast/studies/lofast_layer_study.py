"""`lofast-fig1` and `lofast-fig4`: each step of the bound of Havens et al. 2024 over eps, on one trained layer."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from holdfast.report.style import BLUE, GREEN, ORANGE, VERMILION, draw_range, new_figure
from holdfast.results import Guarantee
from holdfast.studies.lofast_layer import (
    CONFIG,
    TRIED,
    LayerCurves,
    LayerTraining,
    curves,
    layer_and_input,
    layer_training,
)
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.train.config import read_training

EPS = tuple(round(0.01 * step, 2) for step in range(1, 11))


@dataclass(frozen=True)
class LayerParameters:
    """What `repro lofast-fig1` takes."""

    images: int = option(3, "Number of test images.", grid=True, least=1)
    norms: tuple[float, ...] = option((4.0,), "Frobenius norms of what enters the layer.", grid=True, least=1e-6)
    eps: tuple[float, ...] = option(EPS, "Radii.", least=1e-6)
    guarantee: Guarantee = option("numerical", "Guarantee of the bounds; proved ones take minutes per image.")
    config: str = option(CONFIG, "The network whose first attention is taken.")
    epochs: int = option(3, "Epochs of its training.", least=1)


@final
@dataclass(frozen=True)
class NormParameters(LayerParameters):
    """What `repro lofast-fig4` takes."""

    norms: tuple[float, ...] = option(
        (1.0, 2.0, 4.0, 8.0, 16.0), "Frobenius norms of what enters the layer.", grid=True, least=1e-6
    )


class LayerStudy(Study[LayerParameters], ABC):
    """Bounds and attacks over eps, at some images and norms.

    Attributes:
        section: of the paper.
    """

    section: ClassVar[str]
    paper = "havens2024"
    memory = 2
    parameters = LayerParameters
    kinds: ClassVar = {"training": LayerTraining, "curves": LayerCurves}

    @final
    def plan(self, parameters: LayerParameters, place: Workplace) -> StudyPlan:
        read_training(parameters.config)  # refused here, before any work
        grid = [(image, norm) for norm in parameters.norms for image in range(parameters.images)]
        return StudyPlan(
            [
                [StudyPart("training", "training")],
                [StudyPart("curves", f"image {image}, norm {norm:g}", (image, norm)) for image, norm in grid],
            ]
        )

    @final
    def measure(
        self, parameters: LayerParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> LayerTraining | LayerCurves:
        if part.kind == "training":
            return layer_training(parameters.config, parameters.epochs, place, tell)
        image, norm = part.work
        layer, x = layer_and_input(parameters.config, parameters.epochs, image, norm, place)
        return curves(layer, x, image, norm, parameters.eps, parameters.guarantee)

    @final
    def show(self, parameters: LayerParameters, records: Records) -> StudyOutput:
        statements, figure = self.read(records.of("curves"))
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table(f"Havens et al. 2024, {self.section}", statements)],
            {"": figure},
            statement_page(statements),
        )

    @abstractmethod
    def read(self, rows: Sequence[LayerCurves]) -> tuple[list[Statement], Figure]:
        """What the curves say, and their figure."""


@final
@register_study
class LofastFigure1(LayerStudy):
    """The paper's Figure 1."""

    name = "lofast-fig1"
    title = "Havens et al. 2024, Figure 1: each step of the bound against eps, with PGD and our bound beside it"
    section = "section 5.1"
    minutes = 20

    def quick(self) -> LayerParameters:
        return LayerParameters(1, (2.0,), (0.05, 0.1), "numerical", TRIED, 1)

    def read(self, rows: Sequence[LayerCurves]) -> tuple[list[Statement], Figure]:
        return layer_statements(rows), draw_steps(rows)


@final
@register_study
class LofastFigure4(LayerStudy):
    """The paper's Figure 4."""

    name = "lofast-fig4"
    title = "Havens et al. 2024, Figure 4: the bound of one layer at several input norms"
    section = "appendix C.2"
    minutes = 25
    parameters = NormParameters

    def quick(self) -> LayerParameters:
        return NormParameters(1, (1.0, 4.0), (0.05, 0.1), "numerical", TRIED, 1)

    def read(self, rows: Sequence[LayerCurves]) -> tuple[list[Statement], Figure]:
        return norm_statements(rows), draw_norms(rows)


def _ratios(rows: Sequence[LayerCurves], upper: str, lower: str) -> Tensor:
    """How many times larger, for every input, head and eps."""
    return torch.cat([(torch.tensor(getattr(r, upper)) / torch.tensor(getattr(r, lower))).flatten() for r in rows])


def _range(ratios: Tensor) -> str:
    return f"{ratios.min().item():.4g} to {ratios.max().item():.4g}"


def layer_statements(rows: Sequence[LayerCurves]) -> list[Statement]:
    """What the numbers say about section 5.1."""
    sound = {
        "Δ₂,₁ ≤ ε(‖M(X)‖ + ε‖A‖), (19) and (20)": ("delta_21", "delta_21_attack"),
        "Δ₂,₂ ≤ ‖XW^VW^O‖ + ε‖W^VW^O‖, (22)": ("delta_22", "delta_22_attack"),
        "Theorem 1: ‖F(X') - F(X)‖_F ≤ δ": ("theorem", "attack"),
    }
    made = []
    for claim, (upper, lower) in sound.items():
        ratios = _ratios(rows, upper, lower)
        evidence = f"bound / PGD: {_range(ratios)}"
        better = _ratios(rows, "theorem", "best") if upper == "theorem" else torch.ones(1)
        if upper == "theorem":
            own = _ratios(rows, "best", "attack")
            evidence += f"; our bound / PGD: {_range(own)}"
        made.append(judged(claim, bool((ratios >= 1).all()), evidence, sharper=bool((better > 1).all())))
    looser = {
        "‖M(X)‖ is tighter than ξ(X), (21)": ("delta_21_xi", "delta_21"),
        "the first form of (22) is tighter than the second": ("delta_22_naive", "delta_22"),
        "ζ(X) is tighter than (9)": ("delta_1_naive", "delta_1"),
    }
    for claim, (loose, tight) in looser.items():
        ratios = _ratios(rows, loose, tight)
        made.append(judged(claim, bool((ratios >= 1).all()), f"looser / tighter: {_range(ratios)}"))
    share = _ratios(rows, "delta_1", "theorem")
    claim = "ζ(X)ε is the dominating term of Theorem 1 (section 4)"
    made.append(judged(claim, bool((share > 0.5).all()), f"its share of δ: {_range(share)}"))
    rest = torch.tensor([1 - row.delta_1[0] / row.theorem[0] for row in rows])
    smallest = f"at ε = {rows[0].eps[0]:g}"
    claim = "the bound of Δ₂ is negligible for small ε (section 5.1)"
    made.append(judged(claim, bool((rest < 0.1).all()), f"its share of δ {smallest}: {_range(rest)}"))
    moved = torch.tensor([row.delta_21 for row in rows])
    slopes = moved[..., 0] / moved[..., -1] * (rows[0].eps[-1] / rows[0].eps[0])
    claim = "the bounds of Δ₂,₁ are quadratic in ε (section 5.1)"
    evidence = f"slope in ε {smallest} / slope at {rows[0].eps[-1]:g}: {_range(slopes)}"
    made.append(judged(claim, bool((slopes < 0.5).all()), evidence))
    return made


def norm_statements(rows: Sequence[LayerCurves]) -> list[Statement]:
    """What the numbers say about appendix C.2."""
    norms = sorted({row.norm for row in rows})
    by_norm = {norm: [row for row in rows if row.norm == norm] for norm in norms}
    theirs = [_ratios(own, "theorem", "attack").mean().item() for own in by_norm.values()]
    ours = [_ratios(own, "best", "attack").mean().item() for own in by_norm.values()]
    theirs_shown, ours_shown = (
        ", ".join(f"{value:.3g} at {norm:g}" for norm, value in zip(norms, values, strict=True))
        for values in (theirs, ours)
    )
    rising = all(later >= former for former, later in itertools.pairwise(theirs))
    return [
        judged("the bound loses tightness as the input norm grows", rising, f"Theorem 1 / PGD, mean: {theirs_shown}"),
        judged(
            "our bound stays within 1 % of PGD at these norms (ours)",
            max(ours) <= 1.01,
            f"our bound / PGD, mean: {ours_shown}",
        ),
    ]


#: The panels of Figure 1: their title, and the curves of each with colour and label.
_PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Δ₁": {"delta_1": (BLUE, "ζ(X)ε, attained (12)"), "delta_1_naive": (VERMILION, "(9)")},
    "Δ₂,₁, by head": {
        "delta_21": (BLUE, "‖M(X)‖ (20)"),
        "delta_21_xi": (VERMILION, "ξ(X) (21)"),
        "delta_21_attack": ("black", "PGD"),
    },
    "Δ₂,₂, by head": {
        "delta_22": (BLUE, "(22), first form"),
        "delta_22_naive": (VERMILION, "(22), second form"),
        "delta_22_attack": ("black", "PGD"),
    },
    "all heads": {
        "naive": (VERMILION, "naive, (9)"),
        "theorem_xi": (ORANGE, "Theorem 1, ξ"),
        "theorem": (BLUE, "Theorem 1, M"),
        "best": (GREEN, "ours, best"),
        "attack": ("black", "PGD"),
    },
}


def _draw_panel(panel: Axes, rows: Sequence[LayerCurves], title: str) -> None:
    """Curves over eps: the mean over inputs and heads, with the range."""
    for key, (colour, label) in _PANELS[title].items():
        values = torch.cat([torch.tensor(getattr(row, key)).reshape(-1, len(row.eps)) for row in rows])
        draw_range(panel, rows[0].eps, values, ":" if key.endswith("attack") else "-", color=colour, label=label)
    panel.grid(alpha=0.25)


def draw_steps(rows: Sequence[LayerCurves]) -> Figure:
    """Δ₁, Δ₂,₁, Δ₂,₂ and the whole bound over eps; ranges over images and heads."""
    figure = new_figure(7.0, 5.2)
    for panel, title in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        _draw_panel(panel, rows, title)
        panel.set(title=title, xlabel="ε")
        if "delta_21" in _PANELS[title]:
            panel.set_yscale("log")  # PGD is far below
            panel.margins(y=0.25)
        else:
            panel.set_ylim(0, 1.35 * panel.get_ylim()[1])  # room for the legend
        panel.legend(frameon=False, ncols=2 if "best" in _PANELS[title] else 1)
    return figure


def draw_norms(rows: Sequence[LayerCurves]) -> Figure:
    """Figure 1 on logarithmic axes, a row for each of its panels and a column for each input norm."""
    norms = sorted({row.norm for row in rows})
    figure = new_figure(7.0, 6.4)
    grid = figure.subplots(len(_PANELS), len(norms), sharex=True, sharey="row", squeeze=False)
    for panels, title in zip(grid, _PANELS, strict=True):
        for panel, norm in zip(panels, norms, strict=True):
            _draw_panel(panel, [row for row in rows if row.norm == norm], title)
            panel.set(yscale="log")
        panels[0].set_ylabel(title)
        panels[0].yaxis.set_minor_formatter(NullFormatter())
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for panel, norm in zip(grid[0], norms, strict=True):
        panel.set_title(f"$\\Vert X\\Vert_F$ = {norm:g}")
    for panel in grid[-1]:
        panel.set_xlabel("ε")
    return figure
