"""`repro vnncomp-l2`: proved l2 radii of the competition's vision transformers, beside an attack.

The networks and images are those of `repro vnncomp`; radii are in units of pixels in [0, 1].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.errors import InputError
from holdfast.graph import Readings, to_network
from holdfast.graph.onnx import OnnxModel
from holdfast.report.style import BLUE, GREEN, new_figure
from holdfast.results import mean_shares
from holdfast.studies.attacked import check_attacked
from holdfast.studies.crown import crown_radius, require_auto_lirpa
from holdfast.studies.losses import finite, lost_most
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.studies.vnncomp import BoxInstance, instances, load_network, plan_instances
from holdfast.usage import processor_seconds

_MEAN, _DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
_ATTACK = MinimalAttack(restarts=2, targets=3)
_NUMBERS = ("radius", "crown", "attack", "seconds", "processor_seconds", "crown_seconds")


@final
class OnPixels(nn.Module):
    """A network of the benchmark on pixels in [0, 1]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: OnnxModel) -> None:
        super().__init__()
        self.network = network
        for name, values in (("mean", _MEAN), ("deviation", _DEVIATION)):
            self.register_buffer(name, torch.tensor(values).reshape(1, 3, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits (b, 10) of images (b, 3, 32, 32)."""
        logits: Tensor = self.network((pixels - self.mean) / self.deviation)
        return logits


def image_of(instance: BoxInstance) -> Tensor:
    """The image (1, 3, 32, 32) whose box of ±1/255, cut to [0, 1] and normalised, is the instance's.

    A pixel is a whole number of 255ths: one more than the lower end, unless that was cut off at 0.
    """
    mean, deviation = (torch.tensor(values).double().reshape(3, 1, 1) for values in (_MEAN, _DEVIATION))
    lower, upper = (
        255 * (corner.double().reshape(3, 32, 32) * deviation + mean) for corner in (instance.lower, instance.upper)
    )
    whole = torch.where(lower > 0.5, lower + 1, upper - 1).round()
    same = torch.maximum(((whole - 1).clamp(min=0) - lower).abs(), ((whole + 1).clamp(max=255) - upper).abs())
    if not bool(same.max() < 0.01):
        raise InputError(f"{instance.network}, image {instance.image}: the box is no image ± 1/255; expected one")
    return (whole / 255).float().unsqueeze(0)


@final
@dataclass(frozen=True)
class ImageRadius:
    """One image of one network.

    Attributes:
        network: its name.
        image: in CIFAR-10's test split.
        radius: what we prove.
        method: the composition that won.
        seconds: wall time of the proof.
        attack: length of a perturbation that changes the answer; None if none was found.
        crown: what auto_LiRPA's CROWN proves; None where it was not asked.
        crown_seconds: that it took.
        losses: what was taken off the margin at our radius, by name.
        processor_seconds: that the proof took of one core.
        unfinished: what was left out for lack of time.
    """

    network: str
    image: int
    radius: float
    method: str
    seconds: float
    attack: float | None
    crown: float | None = None
    crown_seconds: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    processor_seconds: float = 0.0
    unfinished: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_attacked(self.method, self.radius, f"image {self.image} of {self.network}", self.attack)


@final
@dataclass(frozen=True)
class VnncompL2Parameters:
    """What `repro vnncomp-l2` takes."""

    networks: tuple[str, ...] = option(("pgd_2_3_16", "ibp_3_3_8"), "Names of ONNX files.", grid=True)
    images: int = option(10, "Number for each network.", grid=True, least=1)
    method: str = option("forms", "The composition.")
    seconds: float = option(100.0, "Time limit for an image: nothing new is begun after it.", least=0.001)
    auto_lirpa: bool = option(False, "Also run auto_LiRPA's CROWN, which must be installed.")


@lru_cache(maxsize=1)
def _subject(name: str, data_dir: Path | None) -> tuple[OnPixels, Readings]:
    return OnPixels(load_network(name, Workplace(data_dir=data_dir))).eval(), Readings()


@final
@register_study
class VnncompL2Study(Study[VnncompL2Parameters]):
    """l2 radii of the competition's vision transformers."""

    name = "vnncomp-l2"
    title = "VNN-COMP's vision transformers, l2: our proved radii, and an attack"
    paper = "brix2023"
    minutes = 20
    memory = 4
    parameters = VnncompL2Parameters
    kinds: ClassVar = {"instance": ImageRadius}

    def quick(self) -> VnncompL2Parameters:
        return VnncompL2Parameters(("pgd_2_3_16",), 1, "gains")

    def plan(self, parameters: VnncompL2Parameters, place: Workplace) -> StudyPlan:
        compositions[parameters.method]  # an unknown name is refused here
        require_auto_lirpa(parameters.auto_lirpa)
        return plan_instances(parameters.networks, parameters.images, place)

    def measure(
        self, parameters: VnncompL2Parameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> ImageRadius:
        instance = instances(place)[part.work]
        model, readings = _subject(instance.network, place.data_dir)
        image, answer = image_of(instance), torch.tensor([instance.label])
        converted = to_network(model, image, readings=readings)
        x = converted.encode(image)
        if not torch.equal(model(image).argmax(1), answer):
            raise InputError(f"{part.key}: the network gets it wrong; expected the instances of the benchmark")
        used = processor_seconds()
        certified = certify_inputs(converted.network, x, method=parameters.method, seconds=parameters.seconds)[0]
        used = processor_seconds() - used
        tell(0.8)
        attack = _ATTACK(converted.network, x, answer).radius.item()
        crown = crown_radius(model, image, answer) if parameters.auto_lirpa else (None, None)
        return ImageRadius(
            network=instance.network,
            image=instance.image,
            radius=certified.radius,
            method=certified.method,
            seconds=certified.seconds,
            attack=attack if math.isfinite(attack) else None,
            crown=crown[0],
            crown_seconds=crown[1],
            losses=finite(certified.losses),
            processor_seconds=used,
            unfinished=certified.unfinished,
        )

    def show(self, parameters: VnncompL2Parameters, records: Records) -> StudyOutput:
        rows = records.of("instance")
        return StudyOutput({"median": medians(rows)}, [median_table(rows)], {"": draw(rows)}, _page(rows))


def by_network(rows: Sequence[ImageRadius]) -> dict[str, list[ImageRadius]]:
    """The images of each network."""
    groups: dict[str, list[ImageRadius]] = {}
    for row in rows:
        groups.setdefault(row.network, []).append(row)
    return groups


def medians(rows: Sequence[ImageRadius]) -> dict[str, dict[str, Any]]:
    """For each network: medians over its images, and the mean shares of what margins were lost to."""
    made: dict[str, dict[str, Any]] = {}
    for network, own in by_network(rows).items():
        columns: dict[str, list[float | None]] = {name: [getattr(row, name) for row in own] for name in _NUMBERS}
        middle = {name: _median(values) for name, values in columns.items()}
        made[network] = {"images": len(own)} | middle | {"losses": mean_shares(row.losses for row in own)}
    return made


def _median(values: Sequence[float | None]) -> float | None:
    """The median, with None (an attack without success) as infinite; None where it is infinite."""
    middle = statistics.median(math.inf if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


_COLUMNS = ("network", "image", "ours", "CROWN", "attack", "s", "core s", "s, CROWN", "lost most to")


def _cells(row: ImageRadius) -> list[str]:
    numbers = (_number(getattr(row, name)) for name in _NUMBERS)
    return [row.network, str(row.image), *numbers, lost_most(mean_shares([row.losses]))]


def _median_cells(network: str, middle: dict[str, Any]) -> list[str]:
    numbers = (_number(middle[name]) for name in _NUMBERS)
    return [network, f"median of {middle['images']}", *numbers, lost_most(middle["losses"])]


def median_table(rows: Sequence[ImageRadius]) -> Table:
    """One row for each network; what margins were lost to stands on the page."""
    table = Table(title="VNN-COMP's vision transformers: proved l2 radii, medians", title_justify="left")
    for column in _COLUMNS[:-1]:
        table.add_column(column, justify="left" if column == "network" else "right")
    for network, middle in medians(rows).items():
        table.add_row(*_median_cells(network, middle)[:-1])
    return table


def _page(rows: Sequence[ImageRadius]) -> str:
    """One row for each image, and the medians."""
    lines = [_COLUMNS, ("---", *("---:",) * 7, "---"), *map(_cells, rows)]
    lines += [_median_cells(network, middle) for network, middle in medians(rows).items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(rows: Sequence[ImageRadius]) -> Figure:
    """A panel for each network: every image's radii, in the order of the attack's."""
    groups = by_network(rows)
    figure = new_figure(3.2 * len(groups) + 0.3, 3.2)
    for panel, (network, own) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        order = sorted(own, key=lambda row: math.inf if row.attack is None else row.attack)
        looks: dict[str, Any] = {"attack": (".", "attack"), "radius": ("o", "ours"), "crown": ("^", "CROWN")}
        for colour, (name, (marker, label)) in zip(("black", BLUE, GREEN), looks.items(), strict=True):
            values = [getattr(row, name) for row in order]
            if any(value is not None for value in values):
                shown = [math.nan if value is None else value for value in values]
                panel.plot(range(len(order)), shown, marker, color=colour, linestyle="", label=label)
        panel.set(title=network, xlabel="image", ylabel="l2 radius", yscale="log")
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    return figure
