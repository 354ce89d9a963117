"""`repro vnncomp`: the vision transformers of the verification competition, instance by instance.

The data folder holds the networks (`*.onnx`), `vnncomp_vit_instances.npz` (network, cifar10_test_index, label, lower
and upper corner of each box) and `vnncomp_vit_verdicts.csv` (year, tool, network, cifar10_test_index, verdict,
seconds). To prove: the label's logit is the largest everywhere in the box.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from holdfast.data.dataset import find_file
from holdfast.errors import InputError, SoundnessError
from holdfast.graph.onnx import OnnxModel
from holdfast.report.style import PALETTE, new_figure
from holdfast.results import mean_shares
from holdfast.studies.crown import crown_proves_box, require_auto_lirpa
from holdfast.studies.losses import finite, lost_most
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.usage import processor_seconds
from holdfast.vnnlib import Box, OutputCase, Specification, Verdict, decide
from holdfast.vnnlib.search import Search

INSTANCES, VERDICTS = "vnncomp_vit_instances.npz", "vnncomp_vit_verdicts.csv"
OURS, CROWN = "holdfast", "CROWN"
_CLASSES = 10
_RECHECK = Search(restarts=2, steps=20)


@final
@dataclass(frozen=True)
class BoxInstance:
    """One instance of the benchmark."""

    network: str
    image: int
    label: int
    lower: Tensor
    upper: Tensor

    def specification(self) -> Specification:
        """A counter-example has another logit at least as large as the label's."""
        eye = torch.eye(_CLASSES, dtype=torch.float64)
        zero = torch.zeros(1, dtype=torch.float64)
        cases = tuple(OutputCase((eye[self.label] - eye[j])[None], zero) for j in range(_CLASSES) if j != self.label)
        box = Box(self.lower.double(), self.upper.double(), cases)
        return Specification(len(self.lower), _CLASSES, (box,))


@lru_cache(maxsize=1)
def load_instances(path: Path) -> list[BoxInstance]:
    """The instances of a file."""
    with np.load(path, allow_pickle=False) as content:
        try:
            columns = [content[key] for key in ("network", "cifar10_test_index", "label", "lower", "upper")]
        except KeyError as error:
            raise InputError(f"{path}: {error}; expected the instances of the benchmark") from None
    return [
        BoxInstance(str(network), int(image), int(label), torch.from_numpy(lower), torch.from_numpy(upper))
        for network, image, label, lower, upper in zip(*columns, strict=True)
    ]


@final
@dataclass(frozen=True)
class PublishedVerdict:
    """What a tool of the competition said of an instance."""

    tool: str
    verdict: str
    seconds: float


def load_verdicts(path: Path, year: int) -> dict[tuple[str, int], list[PublishedVerdict]]:
    """The verdicts of one year by network and image."""
    made: dict[tuple[str, int], list[PublishedVerdict]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if int(row["year"]) == year:
                one = PublishedVerdict(row["tool"], row["verdict"], float(row["seconds"]))
                made.setdefault((row["network"], int(row["cifar10_test_index"])), []).append(one)
    return made


@final
@dataclass(frozen=True)
class DecidedInstance:
    """One instance.

    Attributes:
        network: its name.
        image: in CIFAR-10's test split.
        verdict: ours.
        seconds: that ours took, by the clock that was requested.
        counter_example: the input, where the verdict is "sat".
        published: what the competition's tools said.
        parts: into how many the box was divided for the proof, where there is one.
        losses: what was taken off the smallest margin, by name; empty where the time was over before.
        crown: whether auto_LiRPA's CROWN proves it; None where it was not asked.
        crown_seconds: that it took.
        processor_seconds: that our verdict took of one core.
    """

    network: str
    image: int
    verdict: Verdict
    seconds: float
    counter_example: list[float] | None
    published: list[PublishedVerdict]
    parts: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    crown: bool | None = None
    crown_seconds: float | None = None
    processor_seconds: float = 0.0

    def __post_init__(self) -> None:
        opposite = {"unsat": "sat", "sat": "unsat"}.get(self.verdict)
        against = [one.tool for one in self.published if one.verdict == opposite]
        against += [CROWN] if self.crown and opposite == "unsat" else []
        if against:
            place, others = f"{self.network}, image {self.image}", ", ".join(against)
            raise SoundnessError(f"{place}: we say {self.verdict} and {others} {opposite}; please report")


@final
@dataclass(frozen=True)
class VnncompParameters:
    """What `repro vnncomp` takes."""

    networks: tuple[str, ...] = option(("pgd_2_3_16", "ibp_3_3_8"), "Names of ONNX files.", grid=True)
    instances: int = option(50, "Number for each network.", grid=True, least=1)
    timeout: float = option(100.0, "Seconds for each instance.")
    processor_time: bool = option(False, "Count the processor's seconds instead of the clock's, on a busy machine.")
    year: int = option(2025, "Year of the published verdicts.")
    auto_lirpa: bool = option(False, "Also run auto_LiRPA's CROWN, which must be installed.")


@final
@register_study
class VnncompStudy(Study[VnncompParameters]):
    """The competition's vision transformers."""

    name = "vnncomp"
    title = "VNN-COMP's vision transformers, l-infinity 1/255: our verdicts and times beside the published ones"
    paper = "brix2023"
    minutes = 170
    memory = 4
    parameters = VnncompParameters
    kinds: ClassVar = {"instance": DecidedInstance}

    def stem(self, parameters: VnncompParameters) -> str:
        """Seconds of another clock are in files of their own."""
        return f"{self.name}-processor" if parameters.processor_time else self.name

    def quick(self) -> VnncompParameters:
        return VnncompParameters(("pgd_2_3_16",), 1, 30.0)

    def plan(self, parameters: VnncompParameters, place: Workplace) -> StudyPlan:
        find_file(place.data_dir, (VERDICTS,), "vnncomp")
        require_auto_lirpa(parameters.auto_lirpa)
        return plan_instances(parameters.networks, parameters.instances, place)

    def measure(
        self, parameters: VnncompParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> DecidedInstance:
        instance = instances(place)[part.work]
        model = load_network(instance.network, place)
        specification = instance.specification()
        used = processor_seconds()
        decision = decide(model, specification, timeout=parameters.timeout, processor_time=parameters.processor_time)
        used = processor_seconds() - used
        recheck(model, instance, decision.verdict, decision.x)
        crown = _crown(model, instance) if parameters.auto_lirpa else (None, None)
        published = load_verdicts(find_file(place.data_dir, (VERDICTS,), "vnncomp"), parameters.year)
        return DecidedInstance(
            network=instance.network,
            image=instance.image,
            verdict=decision.verdict,
            seconds=decision.seconds,
            counter_example=None if decision.x is None else decision.x.tolist(),
            published=published.get((instance.network, instance.image), []),
            parts=decision.parts,
            losses=finite(decision.losses),
            crown=crown[0],
            crown_seconds=crown[1],
            processor_seconds=used,
        )

    def show(self, parameters: VnncompParameters, records: Records) -> StudyOutput:
        rows = records.of("instance")
        summary = {"solved": solved(rows), "losses": network_losses(rows)}
        return StudyOutput(summary, [verdict_table(rows)], {"": draw_cactus(rows)}, verdict_page(rows))


def instances(place: Workplace) -> list[BoxInstance]:
    """Those of the data folder."""
    return load_instances(find_file(place.data_dir, (INSTANCES,), "vnncomp"))


def load_network(name: str, place: Workplace) -> OnnxModel:
    """A network of the data folder."""
    return OnnxModel(find_file(place.data_dir, (f"{name}.onnx",), "vnncomp"))


def plan_instances(networks: Sequence[str], count: int, place: Workplace) -> StudyPlan:
    """The first instances of each network, each a part of its own."""
    parts = []
    for network in networks:
        find_file(place.data_dir, (f"{network}.onnx",), "vnncomp")
        places = [i for i, one in enumerate(instances(place)) if one.network == network]
        if not places:
            known = ", ".join(sorted({one.network for one in instances(place)}))
            raise InputError(f"--networks has {network!r}, of which there is no instance; there are {known}")
        for i in places[:count]:
            parts.append(StudyPart("instance", f"{network}, image {instances(place)[i].image}", i))
    return StudyPlan([parts])


def _crown(model: OnnxModel, instance: BoxInstance) -> tuple[bool, float]:
    lower, upper = (corner.reshape(1, 3, 32, 32).float() for corner in (instance.lower, instance.upper))
    return crown_proves_box(model, lower, upper, torch.tensor([instance.label]))


def recheck(model: OnnxModel, instance: BoxInstance, verdict: Verdict, x: Tensor | None) -> None:
    """A counter-example must be one for the file as it is executed; after a proof, another search must find none."""
    (box,) = instance.specification().boxes
    place = f"{instance.network}, image {instance.image}"
    if verdict == "sat":
        assert x is not None
        logits = model.executed(x.reshape(1, 3, 32, 32).float())[0]
        inside = bool(((x >= box.lower) & (x <= box.upper)).all())
        if not inside or (logits.argmax().item() == instance.label and bool((logits == logits.max()).sum() == 1)):
            raise SoundnessError(f"{place}: the counter-example is none; please report")
    if verdict == "unsat":

        def outputs(points: Tensor) -> Tensor:
            logits: Tensor = model(points.reshape(-1, 3, 32, 32).float())
            return logits.double()

        for _ in _RECHECK(outputs, box, seed=1):
            raise SoundnessError(f"{place}: proved, and broken; please report")


def _tools(rows: Sequence[DecidedInstance]) -> list[str]:
    published = sorted({one.tool for row in rows for one in row.published})
    return [*published, *([CROWN] if any(row.crown is not None for row in rows) else [])]


def _times(rows: Sequence[DecidedInstance], tool: str) -> list[float]:
    """The seconds of the instances that a tool decided, in order."""
    if tool == OURS:
        return sorted(row.seconds for row in rows if row.verdict in ("sat", "unsat"))
    if tool == CROWN:
        return sorted(row.crown_seconds or 0.0 for row in rows if row.crown)
    decided = (one for row in rows for one in row.published if one.tool == tool and one.verdict in ("sat", "unsat"))
    return sorted(one.seconds for one in decided)


def solved(rows: Sequence[DecidedInstance]) -> dict[str, dict[str, int]]:
    """How many instances of each network every tool decided."""
    made = {}
    for network in dict.fromkeys(row.network for row in rows):
        own = [row for row in rows if row.network == network]
        made[network] = {"instances": len(own)} | {tool: len(_times(own, tool)) for tool in (OURS, *_tools(rows))}
    return made


def network_losses(rows: Sequence[DecidedInstance]) -> dict[str, dict[str, float]]:
    """What the margins of each network were lost to, as mean shares."""
    networks = dict.fromkeys(row.network for row in rows)
    return {network: mean_shares(row.losses for row in rows if row.network == network) for network in networks}


def verdict_table(rows: Sequence[DecidedInstance]) -> Table:
    """How many instances every tool decided: one row for each, which fits a terminal."""
    table, counts = Table(title="VNN-COMP's ViTs: instances decided", title_justify="left"), solved(rows)
    table.add_column("tool")
    for network in counts:
        table.add_column(network, justify="right")
    for key in ("instances", OURS, *_tools(rows)):
        table.add_row(key, *(str(own[key]) for own in counts.values()))
    return table


def verdict_page(rows: Sequence[DecidedInstance]) -> str:
    """One row for each instance: every tool's verdict and seconds."""
    tools = _tools(rows)
    lines = [["network", "image", OURS, "lost most to", *tools], ["---"] * (4 + len(tools))]
    for row in rows:
        by_tool = {one.tool: f"{one.verdict} {one.seconds:.1f} s" for one in row.published}
        if row.crown is not None:
            by_tool[CROWN] = f"{'unsat' if row.crown else 'unknown'} {row.crown_seconds:.1f} s"
        ours = f"{row.verdict} {row.seconds:.1f} s" + (f", {row.parts} parts" if row.parts > 1 else "")
        lost = lost_most(mean_shares([row.losses]))
        lines.append([row.network, str(row.image), ours, lost, *(by_tool.get(tool, "") for tool in tools)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def draw_cactus(rows: Sequence[DecidedInstance]) -> Figure:
    """Instances decided against the time allowed for each, a panel for each network."""
    networks = list(dict.fromkeys(row.network for row in rows))
    figure = new_figure(3.2 * len(networks) + 0.3, 3.2)
    panels = figure.subplots(1, len(networks), squeeze=False)[0]
    for panel, network in zip(panels, networks, strict=True):
        own = [row for row in rows if row.network == network]
        for colour, tool in zip(PALETTE, (OURS, *_tools(rows)), strict=False):
            times = _times(own, tool)
            if times:
                width = 2.2 if tool == OURS else 1.2
                panel.step(times, range(1, len(times) + 1), where="post", color=colour, label=tool, linewidth=width)
        panel.set(title=f"{network}, {len(own)} instances", xlabel="seconds an instance", xscale="log")
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False)
    panels[0].set_ylabel("instances decided")
    return figure
