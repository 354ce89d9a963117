"""What JaSMin does to a small vision transformer: the same training on digits without it, and with several k."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.data.digits import MAX_PIXEL, Digits
from holdfast.errors import HoldfastError
from holdfast.models.digits import DigitsViT
from holdfast.report.style import GREY, PALETTE, draw_range, new_figure
from holdfast.studies.ascent import ascended
from holdfast.studies.penalties import over_seeds, seeds_page, seeds_tables
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.train import JaSMin
from holdfast.train.jasmin import check_options, row_penalties

RADII = (0.25, 0.5)  # l2 on pixels in [0, 1]; a digit has a norm of about 4.5
TEST_SIZE = 360
BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 4e-3, 0.3
ATTACK_STEPS = 30
PROBED = 64  # test digits on which the attention is measured
LEVELS = tuple(round(0.05 * i, 2) for i in range(21))  # of the quantiles
_LOOKS = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "v"))  # of weights, from the smallest


@final
@dataclass(frozen=True)
class PenaltyTraining:
    """One training run: k is None without the penalty."""

    k: int | None
    weight: float
    seed: int
    epochs: int

    @property
    def title(self) -> str:
        return "plain" if self.k is None else f"k={self.k}, weight {self.weight:g}"


@final
@dataclass(frozen=True)
class PenaltyOutcome:
    """A trained model, measured.

    Attributes:
        setting: how it was trained.
        accuracy: on the test digits.
        attacked: accuracy under attack, for every radius of RADII.
        lipschitz: of each layer, the largest local constant over the probed digits (estimates).
        g_1: quantiles, over layers, heads and digits, of the largest g_1 of a head's rows.
        norm_p: quantiles of ‖P‖ over layers, heads and digits.
        seconds: of the training.
    """

    setting: PenaltyTraining
    accuracy: float
    attacked: list[float]
    lipschitz: list[float]
    g_1: list[float]
    norm_p: list[float]
    seconds: float


def settings(seeds: int, epochs: int, ks: Sequence[int], weights: Sequence[float]) -> list[PenaltyTraining]:
    """Without the penalty, then every k and weight; seed by seed, so that an interrupted run can be compared."""
    for k in ks:
        check_options(k, "mean")
    variants = [(None, 0.0), *((k, weight) for k in ks for weight in weights)]
    return [PenaltyTraining(k, weight, seed, epochs) for seed in range(seeds) for k, weight in variants]


def load_digits() -> tuple[Digits, Digits]:
    """The digits of scikit-learn: those to train on, and those to test on."""
    try:
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError:
        raise HoldfastError("this needs scikit-learn, which is not installed; pip install 'holdfast[demo]'") from None
    data = datasets.load_digits()
    images = torch.from_numpy(data.images).float() / MAX_PIXEL
    labels = torch.from_numpy(data.target).long()
    split = train_test_split(range(len(labels)), test_size=TEST_SIZE, random_state=0, stratify=data.target)
    train, test = (torch.tensor(indices) for indices in split)
    return Digits(images[train], labels[train], train), Digits(images[test], labels[test], test)


def measure(setting: PenaltyTraining) -> PenaltyOutcome:
    """Trains one model and measures it."""
    train, test = load_digits()
    began = time.perf_counter()
    model = _train(setting, train)
    seconds = time.perf_counter() - began
    attacked = []
    for radius in RADII:
        moved = ascended(model, test.images, test.labels, radius, ATTACK_STEPS, box=(0.0, 1.0))
        attacked.append(_accuracy(model, moved, test.labels))
    lipschitz, g_1, norm_p = [], [], []
    with torch.no_grad():
        for attention, x in model.attention_inputs(test.images[:PROBED]).values():
            layer = AttentionLayer.from_module(attention)
            p = layer.attention(x)
            lipschitz.append(api.local_lipschitz(layer, x, tolerance=1e-3).value.max().item())
            g_1.append(row_penalties(p.log(), 0).exp().amax(-1).flatten())
            norm_p.append(torch.linalg.matrix_norm(p, 2).flatten())
        accuracy = _accuracy(model, test.images, test.labels)
    return PenaltyOutcome(setting, accuracy, attacked, lipschitz, _quantiles(g_1), _quantiles(norm_p), seconds)


def summary(outcomes: Sequence[PenaltyOutcome]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of every column."""
    groups = {name: [_columns(one) for one in group] for name, group in _by_title(outcomes).items()}
    return over_seeds(groups)


def _columns(one: PenaltyOutcome) -> list[float]:
    shares = [100 * share for share in (one.accuracy, *one.attacked)]
    quantiles = [values[LEVELS.index(level)] for values in (one.g_1, one.norm_p) for level in _SHOWN]
    return [*shares, max(one.lipschitz), *quantiles]


_SHOWN = {0.5: "median", 0.95: "95 %"}
_COLUMNS = {
    **dict.fromkeys(("accuracy %", *(f"attacked, l2 {radius:g} %" for radius in RADII)), ".1f"),
    "largest local constant": ".2f",
    **{f"g_1, {name}": ".3f" for name in _SHOWN.values()},
    **{f"‖P‖, {name}": ".2f" for name in _SHOWN.values()},
}


def draw_outcomes(outcomes: Sequence[PenaltyOutcome]) -> Figure:
    """Robustness against smoothness, and the distributions of g_1 and ‖P‖ over heads, with their range over seeds.

    A colour for each k; a style of line and a mark for each weight.
    """
    figure = new_figure(7.0, 3.2)
    robust, *norms = figure.subplots(1, 3)
    settings = [one.setting for one in outcomes]
    ks, weights = (sorted({getattr(one, key) for one in settings if one.k is not None}) for key in ("k", "weight"))
    colours = {**dict(zip(ks, itertools.cycle(PALETTE), strict=False)), None: "black"}
    looks = {**dict(zip(weights, itertools.cycle(_LOOKS), strict=False)), 0.0: ("-", "D")}
    for group in _by_title(outcomes).values():
        k, weight = group[0].setting.k, group[0].setting.weight
        (line, mark), style = looks[weight], {"color": colours[k], "linewidth": 2 if k is None else 1}
        for panel, key in zip(norms, ("g_1", "norm_p"), strict=True):
            draw_range(panel, LEVELS, [getattr(one, key) for one in group], line, **style)
        points = [(max(one.lipschitz), 100 * one.attacked[-1]) for one in group]
        robust.plot(*zip(*points, strict=True), mark, color=colours[k], markersize=4)
    robust.set(xlabel="largest local constant of a layer", ylabel=f"% right under l2 {RADII[-1]:g}")
    for panel, label in zip(norms, ("largest $g_1$ of a head", "‖P‖ of a head"), strict=True):
        panel.set(xlabel="quantile", ylabel=label)
    for panel in (robust, *norms):
        panel.grid(alpha=0.25)
    shown = [Line2D([], [], color=c, label="plain" if k is None else f"k = {k}") for k, c in colours.items()]
    for weight in weights:
        line, mark = looks[weight]
        shown.append(Line2D([], [], color=GREY, linestyle=line, marker=mark, markersize=4, label=f"weight {weight:g}"))
    figure.legend(handles=shown, loc="outside lower center", ncols=7, frameon=False, columnspacing=1.2)
    return figure


def _train(setting: PenaltyTraining, data: Digits) -> DigitsViT:
    """A fixed number of epochs; the last weights are kept, and nothing is chosen by test accuracy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = DigitsViT()
        penalty = None if setting.k is None else JaSMin(model, setting.k, setting.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        steps = setting.epochs * math.ceil(len(data.labels) / BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
        for _ in range(setting.epochs):
            for batch in torch.split(torch.randperm(len(data.labels)), BATCH):
                loss = nn.functional.cross_entropy(model(data.images[batch]), data.labels[batch])
                loss = loss if penalty is None else loss + penalty()
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                schedule.step()
        if penalty is not None:
            penalty.remove()
    return model.eval().requires_grad_(False)


def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    right: Tensor = model(images).argmax(-1) == labels
    return right.double().mean().item()


def _quantiles(parts: Sequence[Tensor]) -> list[float]:
    values = torch.cat(list(parts)).double()
    quantiles: list[float] = values.quantile(values.new_tensor(LEVELS)).tolist()
    return quantiles


def _by_title(cells: Sequence[PenaltyOutcome]) -> dict[str, list[PenaltyOutcome]]:
    groups: dict[str, list[PenaltyOutcome]] = {}
    for cell in cells:
        groups.setdefault(cell.setting.title, []).append(cell)
    return groups


@final
@dataclass(frozen=True)
class JasminParameters:
    """What `repro jasmin` takes."""

    ks: tuple[int, ...] = option((0, 2, 10), "Values of k.", grid=True)
    weights: tuple[float, ...] = option((0.01, 0.1, 1.0), "Weights of the penalty.", grid=True)
    seeds: int = option(3, "Number of trainings for each.", grid=True, least=1)
    epochs: int = option(60, "Epochs of each training.", least=1)


@final
@register_study
class JasminStudy(Study[JasminParameters]):
    """The same training with and without the penalty."""

    name = "jasmin"
    title = "What the JaSMin penalty does to a small ViT on digits"
    paper = "yudin2025"
    minutes = 40
    memory = 1
    parameters = JasminParameters
    kinds: ClassVar = {"training": PenaltyOutcome}

    def quick(self) -> JasminParameters:
        return JasminParameters((2,), (0.1,), 1, 1)

    def plan(self, parameters: JasminParameters, place: Workplace) -> StudyPlan:
        asked = settings(parameters.seeds, parameters.epochs, parameters.ks, parameters.weights)
        return StudyPlan([[StudyPart("training", f"{one.title}, seed {one.seed}", one) for one in asked]])

    def measure(
        self, parameters: JasminParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> PenaltyOutcome:
        return measure(part.work)

    def show(self, parameters: JasminParameters, records: Records) -> StudyOutput:
        outcomes = records.of("training")
        rows = summary(outcomes)
        tables = seeds_tables("small ViT on digits: mean ± standard deviation over seeds", _COLUMNS, rows)
        content = {"radii": RADII, "levels": LEVELS, "columns": list(_COLUMNS), "trainings": rows}
        return StudyOutput(content, tables, {"": draw_outcomes(outcomes)}, seeds_page(_COLUMNS, rows))
