"""`repro deept`: the MNIST transformer of Bonaert et al. (2021), whose authors published their proved radii.

The data folder holds `deept_mnist_vit.npz`, the weights by their original names, and `deept_mnist_images.npz`: images,
labels, and the l2 radii and seconds of DeepT. Radii are in units of pixels in [0, 1].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.data.dataset import find_file
from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.report.style import BLUE, GREEN, PINK, VERMILION, new_figure
from holdfast.results import Guarantee, mean_shares
from holdfast.studies.attacked import check_attacked
from holdfast.studies.crown import crown_radius, require_auto_lirpa
from holdfast.studies.losses import finite, lost_most
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.usage import processor_seconds

WEIGHTS, IMAGES = "deept_mnist_vit.npz", "deept_mnist_images.npz"
_MEAN, _DEVIATION, _PATCH, _HEADS = 0.1307, 0.3081, 7, 4
_ATTACK = MinimalAttack(restarts=2, targets=3)


class CentredTokens(nn.Module):
    """DeepT's norm: the mean is subtracted, and nothing is divided."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """The tokens, centred."""
        return self.weight * (x - x.mean(-1, keepdim=True)) + self.bias


@final
class DeepTransformer(nn.Module):
    """One block: patches of 7 × 7 pixels, a class token, 4 heads, ReLU.

    Args:
        tensors: the weights by their original names.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        block = "transformer.layers.0"

        def linear(name: str) -> nn.Linear:
            weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            made.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
            return made

        def norm(name: str) -> CentredTokens:
            return CentredTokens(tensors[f"{name}.weight"], tensors[f"{name}.bias"])

        self.patch, self.head = linear("to_patch_embedding.1"), linear("mlp_head.1")
        self.token, self.place = nn.Parameter(tensors["cls_token"]), nn.Parameter(tensors["pos_embedding"])
        self.query, self.key, self.value = (linear(f"{block}.0.fn.fn.to_{name}") for name in "qkv")
        self.out = linear(f"{block}.0.fn.fn.to_out.0")
        self.first, self.second = linear(f"{block}.1.fn.fn.net.0"), linear(f"{block}.1.fn.fn.net.3")
        self.attention_norm, self.mlp_norm = norm(f"{block}.0.fn.norm"), norm(f"{block}.1.fn.norm")
        self.last_norm = norm("mlp_head.0")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (b, 10) of images (b, 28, 28) with pixels in [0, 1]."""
        b, side = len(images), images.shape[-1] // _PATCH
        x = ((images - _MEAN) / _DEVIATION).reshape(b, side, _PATCH, side, _PATCH)
        x = self.patch(x.transpose(2, 3).reshape(b, side * side, _PATCH * _PATCH))
        x = torch.cat((self.token.expand(b, -1, -1), x), 1) + self.place
        y = self.attention_norm(x)
        q, k, v = (
            part(y).reshape(b, y.shape[1], _HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        p = (torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.out(torch.matmul(p, v).transpose(1, 2).reshape(b, y.shape[1], -1))
        x = x + self.second(torch.relu(self.first(self.mlp_norm(x))))
        logits: Tensor = self.head(self.last_norm(x[:, 0]))
        return logits


def load_deept(path: Path) -> DeepTransformer:
    """The network of a file of weights."""
    with np.load(path, allow_pickle=False) as content:
        tensors = {name: torch.from_numpy(content[name]).float() for name in content.files}
    try:
        return DeepTransformer(tensors).eval().requires_grad_(False)
    except KeyError as error:
        raise InputError(f"{path} has no {error}; expected the weights of DeepT's MNIST transformer") from None


@final
@dataclass(frozen=True)
class PublishedImages:
    """Images with pixels in [0, 1], their labels, and what DeepT proved of them."""

    images: Tensor
    labels: list[int]
    places: list[int]
    radii: list[float]
    seconds: list[float]


def load_images(path: Path) -> PublishedImages:
    """The images of a file, with DeepT's l2 radii."""
    with np.load(path, allow_pickle=False) as content:
        try:
            return PublishedImages(
                torch.from_numpy(content["images"]).float() / 255,
                content["label"].tolist(),
                content["mnist_test_index"].tolist(),
                content["deept_l2"].tolist(),
                content["deept_l2_seconds"].tolist(),
            )
        except KeyError as error:
            raise InputError(f"{path}: {error}; expected the images of DeepT's published results") from None


@final
@dataclass(frozen=True)
class PublishedRadius:
    """One image.

    Attributes:
        place: in MNIST's test split.
        radius: what we prove.
        method: the composition that won.
        seconds: wall time of the proof.
        deept: what DeepT proved.
        deept_seconds: on its GPU.
        attack: length of a perturbation that changes the answer, checked by the model itself; None if none was found.
        crown: what auto_LiRPA's CROWN proves; None where it was not asked.
        crown_seconds: that it took.
        losses: what was taken off the margin at our radius, by name.
        processor_seconds: that the proof took of one core.
    """

    place: int
    radius: float
    method: str
    seconds: float
    deept: float
    deept_seconds: float
    attack: float | None
    crown: float | None = None
    crown_seconds: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    processor_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_attacked(self.method, self.radius, f"image {self.place}", self.attack)


@final
@dataclass(frozen=True)
class DeeptParameters:
    """What `repro deept` takes."""

    images: int = option(33, "Number of published images.", grid=True, least=1)
    method: str = option("forms", "The composition.")
    guarantee: Guarantee = option("proved", "Guarantee of the radii.")
    auto_lirpa: bool = option(False, "Also run auto_LiRPA's CROWN, which must be installed.")


@lru_cache(maxsize=1)
def _subject(data_dir: Path | None) -> tuple[DeepTransformer, PublishedImages]:
    network, images = (find_file(data_dir, (name,), "deept") for name in (WEIGHTS, IMAGES))
    return load_deept(network), load_images(images)


@final
@register_study
class DeeptStudy(Study[DeeptParameters]):
    """DeepT's MNIST transformer."""

    name = "deept"
    title = "DeepT's MNIST transformer: our proved l2 radii beside the published ones, and an attack"
    paper = "bonaert2021"
    minutes = 30
    memory = 4
    parameters = DeeptParameters
    kinds: ClassVar = {"image": PublishedRadius}

    def quick(self) -> DeeptParameters:
        return DeeptParameters(1, "gains")

    def plan(self, parameters: DeeptParameters, place: Workplace) -> StudyPlan:
        compositions[parameters.method]  # an unknown name is refused here
        require_auto_lirpa(parameters.auto_lirpa)
        _, published = _subject(place.data_dir)
        count = min(parameters.images, len(published.labels))
        return StudyPlan([[StudyPart("image", f"image {published.places[i]}", i) for i in range(count)]])

    def measure(
        self, parameters: DeeptParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> PublishedRadius:
        model, published = _subject(place.data_dir)
        i = part.work
        image = published.images[i : i + 1]
        answer = model(image).argmax(1)
        if answer.item() != published.labels[i]:
            raise InputError(f"the model gets image {published.places[i]} wrong; expected the published network")
        converted = to_network(model, image)
        used = processor_seconds()
        certified = certify_inputs(
            converted.network, converted.encode(image), method=parameters.method, guarantee=parameters.guarantee
        )[0]
        used = processor_seconds() - used
        tell(0.8)
        crown = crown_radius(model, image, answer) if parameters.auto_lirpa else (None, None)
        return PublishedRadius(
            place=published.places[i],
            radius=certified.radius,
            method=certified.method,
            seconds=certified.seconds,
            deept=published.radii[i],
            deept_seconds=published.seconds[i],
            attack=checked_attack(model, image, answer),
            crown=crown[0],
            crown_seconds=crown[1],
            losses=finite(certified.losses),
            processor_seconds=used,
        )

    def show(self, parameters: DeeptParameters, records: Records) -> StudyOutput:
        rows = records.of("image")
        shares = mean_shares(row.losses for row in rows)
        summary = {"mean": means(rows), "losses": shares}
        page = radius_page(rows) + f"\nMargins are lost to: {lost_most(shares, len(shares))}.\n"
        return StudyOutput(summary, [radius_table(rows)], {"": draw_radii(rows)}, page)


def checked_attack(model: nn.Module, image: Tensor, answer: Tensor) -> float | None:
    """The distance of the nearest point found with another answer, confirmed by the model itself in float64."""
    wide = model.double()
    try:
        radius = _ATTACK(lambda x: wide(x.reshape(-1, *image.shape[1:])), image.double(), answer).radius.item()
    finally:
        model.float()
    return radius if math.isfinite(radius) else None


def means(rows: Sequence[PublishedRadius]) -> dict[str, float]:
    """Over the images."""
    columns = {
        "radius": [row.radius for row in rows],
        "seconds": [row.seconds for row in rows],
        "processor_seconds": [row.processor_seconds for row in rows],
        "deept": [row.deept for row in rows],
        "deept_seconds": [row.deept_seconds for row in rows],
        "attack": [row.attack for row in rows if row.attack is not None],
        "crown": [row.crown for row in rows if row.crown is not None],
    }
    return {name: statistics.fmean(values) for name, values in columns.items() if values}


_COLUMNS = ("image", "ours", "DeepT", "CROWN", "attack", "s", "core s", "s, DeepT")


def _cells(row: PublishedRadius) -> list[str]:
    radii = ("-" if radius is None else f"{radius:.3f}" for radius in (row.radius, row.deept, row.crown, row.attack))
    seconds = (row.seconds, row.processor_seconds, row.deept_seconds)
    return [str(row.place), *radii, *(f"{s:.1f}" for s in seconds)]


def _mean_cells(rows: Sequence[PublishedRadius]) -> list[str]:
    mean = means(rows)
    radii = (f"{mean[key]:.3f}" if key in mean else "-" for key in ("radius", "deept", "crown", "attack"))
    return ["mean", *radii, *(f"{mean[key]:.1f}" for key in ("seconds", "processor_seconds", "deept_seconds"))]


def radius_table(rows: Sequence[PublishedRadius]) -> Table:
    """One row for each image, and their mean."""
    table = Table(title="DeepT's MNIST transformer: proved l2 radii", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*_cells(row))
    table.add_section()
    table.add_row(*_mean_cells(rows))
    return table


def radius_page(rows: Sequence[PublishedRadius]) -> str:
    """The same for a Markdown page."""
    lines = [_COLUMNS, ("---:",) * len(_COLUMNS), *map(_cells, rows), _mean_cells(rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw_radii(rows: Sequence[PublishedRadius]) -> Figure:
    """Every image's radii, in the order of the attack's; and how soon as much is proved as DeepT proves."""
    figure = new_figure(7.0, 3.2)
    left, right = figure.subplots(1, 2)
    order = sorted(rows, key=lambda row: math.inf if row.attack is None else row.attack)
    looks = {"attack": ("k.", "attack"), "radius": ("o", "ours"), "deept": ("s", "DeepT"), "crown": ("^", "CROWN")}
    for colour, (key, (marker, label)) in zip((PINK, BLUE, VERMILION, GREEN), looks.items(), strict=True):
        values = [getattr(row, key) for row in order]
        if any(value is not None for value in values):
            style: dict[str, Any] = {} if marker == "k." else {"color": colour, "linestyle": ""}
            left.plot(range(len(order)), [math.nan if v is None else v for v in values], marker, label=label, **style)
    left.set(xlabel="image", ylabel="l2 radius", ylim=(0, None))
    times = {"ours, one core": [row.processor_seconds for row in rows if row.radius >= row.deept]}
    times["DeepT, a GPU"] = [row.deept_seconds for row in rows]
    for colour, (label, seconds) in zip((BLUE, VERMILION), times.items(), strict=True):
        if seconds:
            right.step(sorted(seconds), range(1, len(seconds) + 1), where="post", color=colour, label=label)
    right.set(xlabel="seconds per image", xlim=(0, None), ylabel="images proved at DeepT's radius")
    for panel in (left, right):
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    return figure
