"""What `repro cifar-vit` records of an image and of a network, and the tables and figures made from that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from matplotlib.figure import Figure
from rich.table import Table

from holdfast.report.style import BLUE, GREEN, PALETTE, VERMILION, new_figure
from holdfast.results import mean_shares
from holdfast.studies.attacked import check_attacked
from holdfast.studies.cifar_training import CifarNetwork
from holdfast.studies.losses import lost_most
from holdfast.train.objective import ContentMeasurement

RADIUS = 36 / 255  # at which robust accuracy on CIFAR-10 is usually compared


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
class CifarContent:
    """Whether the attention of one network attends.

    Attributes:
        network: the name of its file.
        images: how many test images.
        clean: the share of them that are right.
        content: the same without content, and how the scores vary.
    """

    network: str
    images: int
    clean: float
    content: ContentMeasurement


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
        use: what attention makes of content; None where it was not measured.
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
    use: CifarContent | None


def by_network(images: Sequence[CifarImage]) -> dict[str, list[CifarImage]]:
    """The images of each network, networks in the order of their depth and name."""
    groups: dict[str, list[CifarImage]] = {}
    for one in sorted(images, key=lambda one: (one.known.training.depth, one.network)):
        groups.setdefault(one.network, []).append(one)
    return groups


def summed_up(name: str, group: Sequence[CifarImage], use: CifarContent | None = None) -> NetworkSummary:
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
        withstood=withstood(group, RADIUS),
        seconds=_median([one.seconds for one in right]) or 0.0,
        processor_seconds=_median([one.processor_seconds for one in right]) or 0.0,
        memory=max((one.memory for one in right), default=0.0),
        losses=mean_shares(one.losses or {} for one in right),
        use=use,
    )


def withstood(group: Sequence[CifarImage], radius: float) -> float:
    """The share of the images that are right, and that no attack changes within a radius."""
    return sum(one.right and (one.attack is None or one.attack > radius) for one in group) / len(group)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


_COLUMNS = (
    "network", "layers", "recipe", "clean %", "PGD %", "content off %", "variation", "‖W_QK‖", "images", "right",
    "proved", "attack", "ratio", "at 36/255 %", "attacked %", "s", "core s", "GiB", "lost most to",
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
        *_use(row.use),
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


def _use(use: CifarContent | None) -> list[str]:
    """The accuracy without content, and by layer how probabilities vary and the norm behind the scores."""
    if use is None:
        return ["-"] * 3
    by_layer = (use.content.total_variation, use.content.score_norm)
    return [f"{100 * use.content.content_off:.1f}", *(", ".join(f"{one:.2g}" for one in each) for each in by_layer)]


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


def page(rows: Sequence[NetworkSummary]) -> str:
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw_radii(rows: Sequence[NetworkSummary]) -> Figure:
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


def draw_decided(groups: Mapping[str, Sequence[CifarImage]]) -> Figure:
    """What survives the attack, by radius, and the share that is proved at 36/255."""
    figure = new_figure(5.5, 3.4)
    panel = figure.subplots()
    radii = [0.005 * step for step in range(101)]
    for colour, (name, group) in zip(PALETTE, groups.items(), strict=False):
        panel.plot(radii, [100 * withstood(group, r) for r in radii], color=colour, label=f"{name}, attacked")
        proved = 100 * summed_up(name, group).certified
        panel.plot([RADIUS], [proved], "o", color=colour, label=f"{name}, proved at 36/255")
    panel.set(xlabel="l2 radius", ylabel="% of the images", xlim=(0, radii[-1]), ylim=(0, None))
    panel.grid(alpha=0.25)
    panel.legend(frameon=False, fontsize="small")
    return figure
