"""`lofast-fig1` and `lofast-fig4`: the bounds of Havens et al. 2024 on one trained attention layer.

The first attention of our own ViT of their section 5.2 with 8 heads and 16 tokens, at test images of CIFAR-10. What
enters it is scaled to a Frobenius norm of 4, as in their section 5.1: 16 tokens of length 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, final

import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.data import load
from holdfast.errors import HoldfastError
from holdfast.layers.attention.piece import Attention
from holdfast.layers.piece import Piece
from holdfast.models import Transformer
from holdfast.models.files import load_transformer
from holdfast.report.style import PALETTE, draw_range, new_figure
from holdfast.results import Guarantee
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.studies.trained import train_once, training_record
from holdfast.train.config import TrainingConfig, read_training

CONFIG = "lofast-vit depth=2 heads=8 patch=8 attention_norm=1"
EPS = tuple(round(0.01 * step, 2) for step in range(1, 11))
TRIED = str(Path(__file__).with_name("quick-images.toml"))


# -- the layer


@final
@dataclass(frozen=True)
class LayerTraining:
    """The training of the network whose first attention is taken: its share of right answers, and its seconds."""

    clean: float
    content_off: float
    seconds: float


def trained_network(config: str, epochs: int, place: Workplace, tell: Tell) -> Path:
    """The folder of the network."""
    chosen = _training(config, epochs)
    folder = place.runs / f"lofast-layer-{Path(chosen.name).stem.replace(' ', '-')}-epochs{epochs}"
    return train_once(chosen, folder, place, tell)


def _training(config: str, epochs: int) -> TrainingConfig:
    chosen = read_training(config)
    return replace(chosen, train=replace(chosen.train, epochs=epochs, precision="float32"))


def layer_and_input(
    config: str, epochs: int, image: int, norm: float, place: Workplace
) -> tuple[AttentionLayer, Float[Tensor, "n d"]]:
    """The first attention of the trained network, and what enters it for an image, scaled to this Frobenius norm."""
    layer, model = _first_layer(config, epochs, place)
    data = load(read_training(config).data.name, None, place.data_dir)
    return layer, _entering(model, data.inputs[image : image + 1], norm)[0]


@lru_cache(maxsize=1)
def _first_layer(config: str, epochs: int, place: Workplace) -> tuple[AttentionLayer, Transformer]:
    """The first attention of the trained network, and the network."""
    folder = trained_network(config, epochs, place, lambda share: None)
    model = load_transformer(folder / "model.safetensors")
    for stage in model.to_network().stages:
        if isinstance(stage, Attention):
            return stage.layer, model
    raise HoldfastError(f"{config!r} has no attention")


def _entering(model: Transformer, images: Tensor, norm: float) -> Tensor:
    """(b, n, d) what enters the first attention, scaled to this Frobenius norm."""
    x = model.encode(images)
    for stage in model.to_network().stages:
        if isinstance(stage, Attention):
            break
        if not isinstance(stage, Piece):
            raise HoldfastError("a residual stands before the first attention")
        x = stage.value(x)
    length: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x * (norm / length)


def layer_training(config: str, epochs: int, place: Workplace, tell: Tell) -> LayerTraining:
    """Trains the network, unless that is done already, and returns what is known about it."""
    stored = training_record(trained_network(config, epochs, place, tell))
    return LayerTraining(stored["test"]["clean"], stored["test"]["content_off"], stored["seconds"])


# -- Figures 1 and 4


@final
@dataclass(frozen=True)
class LayerCurves:
    """One input at one norm, over eps. Lists are over eps; where heads are apart, over heads first.

    Attributes:
        image: its place in the test split.
        norm: ‖X‖_F.
        eps: the radii.
        delta_1: ζ(X) ε, equations (11) and (12), which is attained.
        delta_1_naive: (9).
        delta_21: with ‖M(X)‖, (20).
        delta_21_xi: with ξ(X), (21).
        delta_21_attack: what PGD attains of (16).
        delta_22: the first form of (22).
        delta_22_naive: the second form.
        delta_22_attack: what PGD attains.
        theorem: Theorem 1 with M.
        theorem_xi: Theorem 1 with ξ.
        naive: Theorem 1 with ξ, and (9) in the place of ζ.
        best: the smallest bound of ours.
        attack: what PGD attains of (5).
        guarantee: of the bounds.
    """

    image: int
    norm: float
    eps: list[float]
    delta_1: list[float]
    delta_1_naive: list[float]
    delta_21: list[list[float]]
    delta_21_xi: list[list[float]]
    delta_21_attack: list[list[float]]
    delta_22: list[list[float]]
    delta_22_naive: list[list[float]]
    delta_22_attack: list[list[float]]
    theorem: list[float]
    theorem_xi: list[float]
    naive: list[float]
    best: list[float]
    attack: list[float]
    guarantee: Guarantee


def curves(
    layer: AttentionLayer, x: Tensor, image: int, norm: float, eps: Sequence[float], guarantee: Guarantee
) -> LayerCurves:
    """Every bound and every attack of Figure 1 at one input (n, d)."""
    named = {name: api.bound(layer, x, eps, name, guarantee=guarantee) for name in ("lofast", "lofast-xi", "naive")}
    lofast, xi, naive = (named[name].terms for name in ("lofast", "lofast-xi", "naive"))
    attacks = {
        objective: api.attack(layer, x, eps, objective=objective, restarts=4, steps=40).lower
        for objective in ("output", "delta-21", "delta-22")
    }
    best = api.bound(layer, x, eps, "best", guarantee=guarantee)
    return LayerCurves(
        image=image,
        norm=norm,
        eps=list(eps),
        delta_1=lofast["delta_1"].tolist(),
        delta_1_naive=naive["delta_1"].tolist(),
        delta_21=lofast["delta_21"].tolist(),
        delta_21_xi=xi["delta_21"].tolist(),
        delta_21_attack=attacks["delta-21"].tolist(),
        delta_22=lofast["delta_22"].tolist(),
        delta_22_naive=lofast["delta_22_naive"].tolist(),
        delta_22_attack=attacks["delta-22"].tolist(),
        theorem=named["lofast"].value.tolist(),
        theorem_xi=named["lofast-xi"].value.tolist(),
        naive=named["naive"].value.tolist(),
        best=best.value.tolist(),
        attack=attacks["output"].tolist(),
        guarantee=guarantee,
    )


@dataclass(frozen=True)
class LayerParameters:
    """What `repro lofast-fig1` takes."""

    images: int = option(3, "Number of test images.", grid=True, least=1)
    norms: tuple[float, ...] = option((4.0,), "Frobenius norms of what enters the layer.", grid=True)
    eps: tuple[float, ...] = option(EPS, "Radii.")
    guarantee: Guarantee = option("numerical", "Guarantee of the bounds; proved ones take minutes per image.")
    config: str = option(CONFIG, "The network whose first attention is taken.")
    epochs: int = option(3, "Epochs of its training.", least=1)


@final
@dataclass(frozen=True)
class NormParameters(LayerParameters):
    """What `repro lofast-fig4` takes."""

    norms: tuple[float, ...] = option(
        (1.0, 2.0, 4.0, 8.0, 16.0), "Frobenius norms of what enters the layer.", grid=True
    )


class LayerStudy(Study[LayerParameters]):
    """Bounds and attacks over eps, at some images and norms."""

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
@register_study
class LofastFigure1(LayerStudy):
    """The paper's Figure 1."""

    name = "lofast-fig1"
    title = "Havens et al. 2024, Figure 1: each step of the bound against eps, with PGD and our bound beside it"
    minutes = 20

    def quick(self) -> LayerParameters:
        return LayerParameters(1, (2.0,), (0.05, 0.1), "numerical", TRIED, 1)

    def show(self, parameters: LayerParameters, records: Records) -> StudyOutput:
        rows = records.of("curves")
        statements = layer_statements(rows)
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Havens et al. 2024, section 5.1", statements)],
            {"": draw_steps(rows)},
            statement_page(statements),
        )


@final
@register_study
class LofastFigure4(LayerStudy):
    """The paper's Figure 4."""

    name = "lofast-fig4"
    title = "Havens et al. 2024, Figure 4: the bound of one layer at several input norms"
    minutes = 25
    parameters = NormParameters

    def quick(self) -> LayerParameters:
        return NormParameters(1, (1.0, 4.0), (0.05, 0.1), "numerical", TRIED, 1)

    def show(self, parameters: LayerParameters, records: Records) -> StudyOutput:
        rows = records.of("curves")
        statements = norm_statements(rows)
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Havens et al. 2024, appendix C.2", statements)],
            {"": draw_norms(rows)},
            statement_page(statements),
        )


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


def _line(panel: Axes, rows: Sequence[LayerCurves], key: str, colour: str, label: str, style: str = "-") -> None:
    """The mean over inputs and heads, with the range."""
    values = torch.cat([torch.tensor(getattr(row, key)).reshape(-1, len(row.eps)) for row in rows])
    draw_range(panel, rows[0].eps, values, style, color=colour, label=label)


def draw_steps(rows: Sequence[LayerCurves]) -> Figure:
    """Δ₁, Δ₂,₁, Δ₂,₂ and the whole bound over eps; ranges over images and heads."""
    figure = new_figure(7.0, 5.2)
    first, second, third, whole = figure.subplots(2, 2).flat
    _line(first, rows, "delta_1", PALETTE[0], "ζ(X)ε, attained (12)")
    _line(first, rows, "delta_1_naive", PALETTE[1], "(9)")
    _line(second, rows, "delta_21", PALETTE[0], "‖M(X)‖ (20)")
    _line(second, rows, "delta_21_xi", PALETTE[1], "ξ(X) (21)")
    _line(second, rows, "delta_21_attack", "black", "PGD", ":")
    _line(third, rows, "delta_22", PALETTE[0], "(22), first form")
    _line(third, rows, "delta_22_naive", PALETTE[1], "(22), second form")
    _line(third, rows, "delta_22_attack", "black", "PGD", ":")
    third.margins(y=0.3)  # room for the legend
    _whole(whole, rows)
    titles = {first: "Δ₁", second: "Δ₂,₁, by head", third: "Δ₂,₂, by head", whole: "all heads"}
    for panel, title in titles.items():
        panel.set(title=title, xlabel="ε")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    return figure


def _whole(panel: Axes, rows: Sequence[LayerCurves]) -> None:
    _line(panel, rows, "naive", PALETTE[1], "naive, (9)")
    _line(panel, rows, "theorem_xi", PALETTE[5], "Theorem 1, ξ")
    _line(panel, rows, "theorem", PALETTE[0], "Theorem 1, M")
    _line(panel, rows, "best", PALETTE[2], "ours, best")
    _line(panel, rows, "attack", "black", "PGD", ":")


def draw_norms(rows: Sequence[LayerCurves]) -> Figure:
    """The whole bound over eps, a panel for each input norm."""
    norms = sorted({row.norm for row in rows})
    figure = new_figure(2.2 * len(norms) + 0.4, 3.2)
    panels = figure.subplots(1, len(norms), squeeze=False)[0]
    for panel, norm in zip(panels, norms, strict=True):
        _whole(panel, [row for row in rows if row.norm == norm])
        panel.set(title=f"$\\Vert X\\Vert_F$ = {norm:g}", xlabel="ε")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("movement of the output")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure
