"""`repro cifar-vit`: what can be proved about standard vision transformers on CIFAR-10, beside an attack.

A folder holds the networks, each a file that says how it was trained (`holdfast.studies.cifar_training`; the script
`examples/train_cifar_vits.py` makes more). Perturbations are l2 on pixels in [0, 1], all 3,072 of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from holdfast import data as datasets
from holdfast.attacks.minimal import MinimalAttack
from holdfast.clock import peak_memory, processor_seconds
from holdfast.compositions import certify_inputs, compositions
from holdfast.errors import InputError
from holdfast.graph import Readings, to_network
from holdfast.models.vit import VisionTransformer
from holdfast.report.style import BLUE, GREEN, VERMILION, new_figure
from holdfast.results import mean_shares
from holdfast.studies.attacked import check_attacked
from holdfast.studies.cifar_training import CifarNetwork, CifarTraining, load_network
from holdfast.studies.losses import finite, lost_most
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

RADIUS = 36 / 255  # at which robust accuracy on CIFAR-10 is usually compared
RANDOM = "random"  # instead of a folder: a small network that was not trained, and noise for an image
_ATTACK = MinimalAttack(restarts=2, targets=3)


@final
@dataclass(frozen=True)
class CifarImage:
    """One test image and one network.

    Attributes:
        network: the name of its file.
        known: how it was trained, and what its training measured.
        place: of the image in the test split.
        right: whether the network's answer is the label; if not, nothing else is measured.
        margin: a lower bound of the answer's lead.
        radius: proved.
        attack: length of the smallest perturbation found that changes the answer; None where there is none.
        losses: what was taken off the margin at the proved radius, by name.
        seconds: wall time of the proof.
        processor_seconds: processor time of the proof.
        unfinished: what was left out for lack of time.
        decided: whether only 36/255 was tested.
        memory: MiB, the largest resident size of the process until then; 0 where it was not measured.
    """

    network: str
    known: CifarNetwork
    place: int
    right: bool
    margin: float = 0.0
    radius: float = 0.0
    attack: float | None = None
    losses: dict[str, float] | None = None
    seconds: float = 0.0
    processor_seconds: float = 0.0
    unfinished: tuple[str, ...] = ()
    decided: bool = False
    memory: float = 0.0

    def __post_init__(self) -> None:
        check_attacked("the certificate", self.radius, f"image {self.place} of {self.network}", self.attack)


@final
@dataclass(frozen=True)
class CifarVitParameters:
    """What `repro cifar-vit` takes."""

    networks: str = option("results/cifar-vits", "Folder with the networks, one of its files, or random.", grid=True)
    images: int = option(3, "Number of test images, the first ones.", grid=True, least=1)
    decide: bool = option(False, "Decide only at 36/255, which is quicker than finding the largest radius.", grid=True)
    method: str = option("forms", "The composition.")
    seconds: float = option(3600.0, "Time limit for the proof of an image.", least=0.001)


@lru_cache(maxsize=1)
def _subject(path: str) -> tuple[VisionTransformer, CifarNetwork, Readings]:
    if path == RANDOM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            setting = CifarTraining(patch=16, depth=1, width=8, heads=2)
            model = setting.network().eval().requires_grad_(False)
        return model, CifarNetwork(setting, 0.0, (0.0, 0.0, 0.0), 0, 0, 0.0, "not trained"), Readings()
    return *load_network(Path(path)), Readings()


@lru_cache(maxsize=1)
def _test_images(data_dir: Path | None) -> tuple[Tensor, Tensor]:
    test = datasets.load("cifar10", "test", data_dir)
    return test.inputs, test.labels


@final
@register_study
class CifarVitStudy(Study[CifarVitParameters]):
    """Standard vision transformers on CIFAR-10."""

    name = "cifar-vit"
    title = "Standard ViTs on CIFAR-10, trained plainly, with PGD and with a penalty: proved l2 radii and an attack"
    paper = "holdfast"
    minutes = 60
    memory = 8
    parameters = CifarVitParameters
    kinds: ClassVar = {"image": CifarImage}

    def quick(self) -> CifarVitParameters:
        return CifarVitParameters(RANDOM, 1)

    def stem(self, parameters: CifarVitParameters) -> str:
        decided = "-decided" if parameters.decide else ""
        return self.name + decided + ("" if parameters.method == "forms" else f"-{parameters.method}")

    def plan(self, parameters: CifarVitParameters, place: Workplace) -> StudyPlan:
        compositions[parameters.method]  # an unknown name is refused here
        if parameters.networks == RANDOM:
            paths = [Path(RANDOM)]
        else:
            named = Path(parameters.networks)
            paths = [named] if named.is_file() else sorted(named.glob("*.safetensors"))
            _test_images(place.data_dir)
        if not paths:
            raise InputError(f"no network in {parameters.networks}; expected what examples/train_cifar_vits.py writes")
        images = range(parameters.images)
        return StudyPlan([[StudyPart("image", f"{p.stem}, image {i}", (str(p), i)) for i in images for p in paths]])

    def measure(
        self, parameters: CifarVitParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> CifarImage:
        path, i = part.work
        model, known, readings = _subject(path)
        if path == RANDOM:
            image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(i))
            label = model(image).argmax(1)
        else:
            images, labels = _test_images(place.data_dir)
            image, label = images[i : i + 1], labels[i : i + 1]
        answer, name = model(image).argmax(1), Path(path).stem
        if not torch.equal(answer, label):
            return CifarImage(name, known, i, right=False)
        converted = to_network(model, image, readings=readings)
        x = converted.encode(image)
        used = processor_seconds()
        at = (RADIUS,) if parameters.decide else ()
        (certified,) = certify_inputs(converted.network, x, method=parameters.method, at=at, seconds=parameters.seconds)
        used, memory = processor_seconds() - used, peak_memory()
        tell(0.8)
        attack = _ATTACK(converted.network, x, answer).radius.item()
        return CifarImage(
            network=name,
            known=known,
            place=i,
            right=True,
            margin=certified.margin,
            radius=certified.radius,
            attack=attack if math.isfinite(attack) else None,
            decided=parameters.decide,
            losses=finite(certified.losses),
            seconds=certified.seconds,
            processor_seconds=used,
            unfinished=certified.unfinished,
            memory=memory,
        )

    def show(self, parameters: CifarVitParameters, records: Records) -> StudyOutput:
        rows = [summed_up(name, group) for name, group in by_network(records.of("image")).items()]
        return StudyOutput(
            {"networks": [asdict(row) for row in rows]}, [radius_table(rows)], {"": draw(rows)}, _page(rows)
        )


@final
@dataclass(frozen=True)
class NetworkSummary:
    """All images of one network; medians are over those with the right answer.

    Attributes:
        proved: the median of the proved radii, unless only 36/255 was tested.
        attack: the median of the attack's.
        ratio: of these medians.
        certified: the share of all images that are right with a proved radius of 36/255 or more.
        withstood: the share that are right, and that no attack changes within 36/255.
        processor_seconds: their median; `memory` the most of all.
        losses: the mean share of each loss, of all that the margin lost.
    """

    network: str
    known: CifarNetwork
    images: int
    right: int
    proved: float | None
    attack: float | None
    ratio: float | None
    certified: float
    withstood: float
    seconds: float
    processor_seconds: float
    memory: float
    losses: dict[str, float]


def by_network(images: Sequence[CifarImage]) -> dict[str, list[CifarImage]]:
    """The images of each network, networks in the order of their depth and name."""
    groups: dict[str, list[CifarImage]] = {}
    for one in sorted(images, key=lambda one: (one.known.training.depth, one.network)):
        groups.setdefault(one.network, []).append(one)
    return groups


def summed_up(name: str, group: Sequence[CifarImage]) -> NetworkSummary:
    """What the images of a network have in common."""
    right = [one for one in group if one.right]
    proved = None if any(one.decided for one in group) else _median([one.radius for one in right])
    attack = _median([math.inf if one.attack is None else one.attack for one in right])
    attack = None if attack is None or not math.isfinite(attack) else attack
    return NetworkSummary(
        network=name,
        known=group[0].known,
        images=len(group),
        right=len(right),
        proved=proved,
        attack=attack,
        ratio=None if proved is None or attack is None else proved / attack,
        certified=sum(one.right and one.radius >= RADIUS for one in group) / len(group),
        withstood=sum(one.right and (one.attack is None or one.attack > RADIUS) for one in group) / len(group),
        seconds=_median([one.seconds for one in right]) or 0.0,
        processor_seconds=_median([one.processor_seconds for one in right]) or 0.0,
        memory=max((one.memory for one in right), default=0.0),
        losses=mean_shares(one.losses or {} for one in right),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


_COLUMNS = (
    "network", "layers", "recipe", "clean %", "PGD %", "images", "right", "proved", "attack", "ratio", "at 36/255 %",
    "attacked %", "s", "core s", "GiB", "lost most to",
)  # fmt: skip


def _cells(row: NetworkSummary) -> list[str]:
    setting = row.known.training
    recipe = str(setting.recipe)
    if setting.radius:
        recipe += f" {setting.radius:.2g}"
    if setting.weight:
        recipe += f", weight {setting.weight:g}"
    return [
        row.network,
        str(setting.depth),
        recipe,
        f"{100 * row.known.accuracy:.1f}",
        f"{100 * row.known.attacked[0]:.1f}",
        str(row.images),
        str(row.right),
        _number(row.proved),
        _number(row.attack),
        _number(row.ratio),
        f"{100 * row.certified:.3g}",
        f"{100 * row.withstood:.3g}",
        f"{row.seconds:.0f}",
        f"{row.processor_seconds:.0f}",
        f"{row.memory / 1024:.1f}",
        lost_most(row.losses),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


_SHOWN = ("network", "clean %", "right", "proved", "attack", "ratio", "at 36/255 %", "attacked %", "core s")


def radius_table(rows: Sequence[NetworkSummary]) -> Table:
    """One row per network, with what fits a terminal."""
    table = Table(title="ViTs on CIFAR-10: median proved and attacked l2 radii", title_justify="left")
    for column in _SHOWN:
        table.add_column(column, justify="left" if column == "network" else "right")
    for row in rows:
        cells = dict(zip(_COLUMNS, _cells(row), strict=True))
        table.add_row(*(cells[column] for column in _SHOWN))
    return table


def _page(rows: Sequence[NetworkSummary]) -> str:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw(rows: Sequence[NetworkSummary]) -> Figure:
    """Proved and attacked radii against clean accuracy."""
    figure = new_figure(5.5, 3.4)
    panel = figure.subplots()
    looks: dict[str, Any] = {"plain": (VERMILION, "s"), "pgd": (GREEN, "^"), "lipschitz": (BLUE, "o")}
    for recipe, (colour, marker) in looks.items():
        own = [row for row in rows if row.known.training.recipe == recipe and row.proved and row.attack]
        if own:
            clean = [100 * row.known.accuracy for row in own]
            panel.plot(clean, [row.proved or 0.0 for row in own], marker, color=colour, label=f"{recipe}, proved")
            attack = [row.attack or 0.0 for row in own]
            panel.plot(clean, attack, marker, color=colour, fillstyle="none", label="attack")
    panel.axhline(RADIUS, color="black", linewidth=0.8, linestyle=":")
    panel.set(xlabel="clean accuracy, %", ylabel="median l2 radius", yscale="log")
    panel.grid(alpha=0.25)
    if any(row.proved and row.attack for row in rows):
        panel.legend(frameon=False, fontsize="small")
    return figure
