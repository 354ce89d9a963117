"""What JaSMin does to a small vision transformer: the same training on digits without it, and with several k."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.data.digits import MAX_PIXEL, Digits
from holdfast.errors import HoldfastError
from holdfast.models.digits import DigitsViT
from holdfast.report.style import draw_range, new_figure
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.train import JaSMin
from holdfast.train.jasmin import row_penalties

RADII = (0.25, 0.5)  # l2 on pixels in [0, 1]; a digit has a norm of about 4.5
TEST_SIZE = 360
BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 4e-3, 0.3
ATTACK_STEPS = 30
PROBED = 64  # test digits on which the attention is measured
LEVELS = tuple(round(0.05 * i, 2) for i in range(21))  # of the quantiles


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
        moved = _attack(model, test.images, test.labels, radius)
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


def tables(cells: Sequence[PenaltyOutcome]) -> list[Table]:
    """Mean over the seeds, with the least and the largest."""
    table = Table(title="small ViT on digits: mean over seeds (least to largest)", title_justify="left")
    table.add_column("training")
    names = ("accuracy %", *(f"attacked, l2 {radius:g} %" for radius in RADII))
    for name in (*names, "largest local constant", "median g_1", "median ‖P‖"):
        table.add_column(name, justify="right")
    half = LEVELS.index(0.5)
    for title, group in _by_title(cells).items():
        columns = [[100 * cell.accuracy for cell in group]]
        columns += [[100 * cell.attacked[i] for cell in group] for i in range(len(RADII))]
        numbers = [_spread(column, ".1f") for column in columns]
        numbers.append(_spread([max(cell.lipschitz) for cell in group], ".3g"))
        numbers += [f"{_mean([cell.g_1 for cell in group])[half]:.2g}"]
        numbers += [f"{_mean([cell.norm_p for cell in group])[half]:.3g}"]
        table.add_row(title, *numbers)
    return [table]


def draw_outcomes(cells: Sequence[PenaltyOutcome]) -> Figure:
    """Robustness against smoothness, and the distributions of g_1 and ‖P‖ over heads, with their range over seeds."""
    figure = new_figure(10, 3.6)
    scatter, g_1, norm_p = figure.subplots(1, 3)
    for title, group in _by_title(cells).items():
        style = {"color": "black", "linewidth": 2.5} if title == "plain" else {"linewidth": 1.2}
        colour = draw_range(g_1, LEVELS, [cell.g_1 for cell in group], label=title, **style)
        draw_range(norm_p, LEVELS, [cell.norm_p for cell in group], **style | {"color": colour})
        points = [(max(cell.lipschitz), 100 * cell.attacked[-1]) for cell in group]
        scatter.plot(*zip(*points, strict=True), "o", color=colour, label=title)
    scatter.set(xscale="log", xlabel="largest local constant of a layer", ylabel=f"% right under l2 {RADII[-1]:g}")
    g_1.set(yscale="log", xlabel="quantile", ylabel="largest $g_1$ of a head", title="softmax norm over heads")
    norm_p.set(xlabel="quantile", ylabel="‖P‖", title="norm of the probabilities over heads")
    for panel in (scatter, g_1, norm_p):
        _grid(panel)
    figure.legend(
        *g_1.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize="small"
    )
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


def _attack(model: nn.Module, images: Tensor, labels: Tensor, radius: float) -> Tensor:
    """Projected gradient ascent on the cross entropy, in the l2 ball and in [0, 1]; the last point is kept."""
    moved = images
    for _ in range(ATTACK_STEPS):
        at = moved.detach().requires_grad_()
        loss = nn.functional.cross_entropy(model(at), labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, at)
        step = 2.5 * radius / ATTACK_STEPS
        change = moved + step * gradient / _length(gradient).clamp(min=1e-12) - images
        # The box keeps the ball: every pixel comes nearer to the image's own.
        moved = (images + change * (radius / _length(change)).clamp(max=1)).clamp(0, 1)
    return moved


def _length(images: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(images, dim=(-2, -1), keepdim=True)
    return length


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


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _spread(values: Sequence[float], form: str) -> str:
    mean, least, largest = (format(v, form) for v in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({least} to {largest})" if len(values) > 1 else mean


def _grid(panel: Axes) -> None:
    panel.grid(which="major", alpha=0.25)


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
        summary = {"radii": RADII, "levels": LEVELS}
        return StudyOutput(summary, tables(outcomes), {"": draw_outcomes(outcomes)})
