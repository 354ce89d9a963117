"""`repro lofast-fig2` and `lofast-fig5`: the grids of the LoFAST paper, their tables and their figures."""

from __future__ import annotations

import itertools
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.table import Table

from holdfast.compositions import compositions
from holdfast.errors import InputError
from holdfast.report.style import PALETTE, new_figure
from holdfast.results import Guarantee
from holdfast.studies.lofast_grid import LOFAST, CertifiedNetwork, measure, members
from holdfast.studies.lofast_grid_statements import grid_statements
from holdfast.studies.processes import Tell
from holdfast.studies.statements import statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.train.config import agrees

_SHORT = {"attention_norm": "norm"}
_POINTS = 150  # of a curve; dense near 0, where most of them fall
_WIDTHS = (1.0, 2.0)  # of lines: those of one network stay visible where the next one's cover them


def markdown(study: GridStudy, results: Sequence[CertifiedNetwork]) -> str:
    """One row for each member, as a table of a Markdown page, and a line on how they were made."""
    first = results[0]
    head = [*_keys(first), "seed", "clean %", "content off %", "variation", "‖W_QK‖"]
    head += [f"% at {study.shown(radius)}" for radius in study.radii]
    head += [f"mean radius, {method}" for method in (LOFAST, first.ours)]
    lines = [head, ["---:"] * len(head)]
    for one in results:
        means = [f"{one.mean_radius(method):.4f}" for method in (LOFAST, one.ours)]
        shares = _shares(study, one, ".1f", " / ")
        lines.append([*_place(one), str(one.seed), *_accuracies(one), *shares, *means])
    made = ", ".join(f"{method} {guarantee}" for method, guarantee in first.methods.items())
    note = (
        f"Of the first {len(first.right)} test inputs at each radius: % certified by {LOFAST} / {first.ours} / right "
        f"after the attack ({made}). Clean and content off are on all {first.test_inputs}; variation and ‖W_QK‖ the "
        "largest over the layers; a wrong answer counts as a radius of 0."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{note}\n"


def table(study: GridStudy, results: Sequence[CertifiedNetwork]) -> Table:
    """The same for the screen, shorter."""
    first = results[0]
    made = Table(
        title=study.heading,
        caption=f"{len(first.right)} test inputs. At each radius: % certified by {LOFAST} / by {first.ours} / right "
        "after the attack. off: clean accuracy with content off; TV, QK: variation of P, ‖W_QK‖, largest over layers.",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title_justify="left",
        caption_justify="left",
    )
    for column in (*_keys(first), "clean", "off", "TV", "QK", *map(study.shown, study.radii)):
        made.add_column(column, justify="right", no_wrap=True)
    for one in results:
        made.add_row(*_place(one), *_accuracies(one), *_shares(study, one, ".0f", "/"))
    return made


def _keys(one: CertifiedNetwork) -> list[str]:
    return [_SHORT.get(key, key) for key in one.values]


def _place(one: CertifiedNetwork) -> list[str]:
    return [f"{value:g}" for value in one.values.values()]


def _accuracies(one: CertifiedNetwork) -> list[str]:
    """Clean, content off, variation and ‖W_QK‖."""
    shares = (f"{100 * one.clean:.1f}", f"{100 * one.content_off:.1f}")
    return [*shares, f"{max(one.total_variation):.3f}", f"{max(one.score_norm):.2f}"]


def _shares(study: GridStudy, one: CertifiedNetwork, form: str, between: str) -> list[str]:
    """At each radius: certified by the paper's bound, by ours, and right after the attack."""
    three = [(one.certified(LOFAST, r), one.certified(one.ours, r), one.attacked(r)) for r in study.radii]
    return [between.join(format(100 * share, form) for share in shares) for shares in three]


def draw_grid(study: GridStudy, results: Sequence[CertifiedNetwork]) -> Figure:
    """Certified accuracy against radius: small multiples, with a colour for each of the networks that share a panel."""
    columns, rows = (sorted({key(one) for one in results}) for key in (_column, _row))
    figure = new_figure(7.0, (1.3 if len(rows) > 2 else 2.2) * len(rows) + 0.9)
    panels = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    kinds = sorted({_kind(one) for one in results})
    widths = np.linspace(*_WIDTHS, len(kinds))[::-1]
    lines = {
        kind: Line2D([], [], color=c, linewidth=w, label=kind)
        for kind, c, w in zip(kinds, itertools.cycle(PALETTE), widths)
    }
    end, highest = _end(study, results), 105 * max(one.attacked(0.0) for one in results)
    for one in results:
        panel = panels[rows.index(_row(one)), columns.index(_column(one))]
        _draw(panel, one, end, lines[_kind(one)])
    for (i, j), panel in np.ndenumerate(panels):
        panel.set(xlim=(0, end), ylim=(0, highest))
        panel.set(title=f"norm of $W^V$, $W^O$: {columns[j]:g}" if i == 0 else "")
        panel.set(
            xlabel="l2 radius" if i == len(rows) - 1 else "", ylabel=f"{rows[i]}% of the inputs" if j == 0 else ""
        )
        panel.grid(alpha=0.25)
    handles = list(lines.values())
    ours = results[0].ours
    handles.append(Line2D([], [], color="black", linestyle="-", label=f"certified, {ours}"))
    handles.append(Line2D([], [], color="black", linestyle="--", label=f"certified, {LOFAST}"))
    handles.append(Line2D([], [], color="black", linestyle=":", label="after the attack"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(5, 2 * len(columns)), frameon=False, fontsize="small"
    )
    figure.suptitle(study.heading, wrap=True)
    return figure


def _column(one: CertifiedNetwork) -> float:
    return one.values["attention_norm"]


def _row(one: CertifiedNetwork) -> str:
    """Where a grid has patches of several sizes: those and the depth, for the label of the row."""
    if "patch" not in one.values:
        return ""
    return f"{one.values['depth']:g} layers,\npatches of {one.values['patch']:g}\n"


def _kind(one: CertifiedNetwork) -> str:
    """What tells the networks of a panel apart."""
    heads = f"{one.values['heads']:g} heads"
    return heads if "patch" in one.values else f"{one.values['depth']:g} layers, {heads}"


def _end(study: GridStudy, results: Sequence[CertifiedNetwork]) -> float:
    """The radius at which hardly anything is certified by any bound."""
    reach = np.quantile([r for one in results for r in one.radius[one.ours]], 0.98)
    return max(float(reach), study.radii[-1])


def _draw(panel: Axes, one: CertifiedNetwork, end: float, like: Line2D) -> None:
    radii = end * np.linspace(0, 1, _POINTS) ** 2
    curves = (("-", [one.certified(one.ours, r) for r in radii]), ("--", [one.certified(LOFAST, r) for r in radii]))
    for style, shares in (*curves, (":", [one.attacked(r) for r in radii])):
        heights = [100 * share for share in shares]
        panel.plot(radii, heights, style, color=like.get_color(), linewidth=like.get_linewidth())


@dataclass(frozen=True)
class GridParameters:
    """What `repro lofast-fig5` takes."""

    only: str = option("", "Part of the grid, such as depth=3,heads=4; keys may repeat.", grid=True)
    inputs: int = option(200, "Number of test inputs to certify.", least=1)
    epochs: int | None = option(None, "Epochs of each training, instead of those in the config.", grid=True, least=1)
    seed: int = option(0, "Seed of the trainings.", grid=True, least=0)
    ours: str = option("gains", "The composition beside the paper's.")
    ours_guarantee: Guarantee = option("proved", "Guarantee of that one.")
    guarantee: Guarantee = option("numerical", "Guarantee of the paper's bound; iterated norms favour it.")
    config: str = option("", "A TOML file with one network, instead of the grid.", grid=True)


@final
@dataclass(frozen=True)
class ImageGridParameters(GridParameters):
    """What `repro lofast-fig2` takes."""

    inputs: int = option(1000, "Number of test inputs to certify.", least=1)


class GridStudy(Study[GridParameters], ABC):
    """A grid of networks, trained, certified and attacked.

    Attributes:
        heading: of the table and the figure.
        config: the name whose grid it trains.
        radii: of the table; at each of them there is an attack, too.
        unit: in which radii are written.
        tried: the file of the network that a try trains.
    """

    heading: ClassVar[str]
    config: ClassVar[str]
    radii: ClassVar[tuple[float, ...]]
    unit: ClassVar[float]
    tried: ClassVar[str]
    paper = "havens2024"
    memory = 4
    parameters = GridParameters
    kinds: ClassVar = {"network": CertifiedNetwork}

    @final
    def shown(self, radius: float) -> str:
        """A radius in words."""
        return f"{radius / self.unit:.3g}" + ("" if self.unit == 1 else f"/{1 / self.unit:g}")

    @final
    def quick(self) -> GridParameters:
        return replace(self.parameters(), inputs=2, config=str(Path(__file__).with_name(self.tried)))

    @final
    def plan(self, parameters: GridParameters, place: Workplace) -> StudyPlan:
        compositions[parameters.ours]  # an unknown name is refused here, before any training
        if parameters.ours == LOFAST:
            raise InputError(f"--ours is {parameters.ours!r}, which is certified anyway; name another composition")
        asked = members(
            parameters.config or self.config,
            self.radii,
            {LOFAST: parameters.guarantee, parameters.ours: parameters.ours_guarantee},
            inputs=parameters.inputs,
            seed=parameters.seed,
            only=parameters.only,
            epochs=parameters.epochs,
        )
        return StudyPlan(
            [[StudyPart("network", f"{member.label} seed={member.config.train.seed}", member) for member in asked]]
        )

    @final
    def same(self, part: StudyPart, record: CertifiedNetwork) -> bool:
        return agrees(record.config, part.work.config.to_dict())

    @final
    def measure(
        self, parameters: GridParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> CertifiedNetwork:
        return measure(part.work, place.runs / self.name, place, tell)

    @final
    def show(self, parameters: GridParameters, records: Records) -> StudyOutput:
        results = sorted(records.of("network"), key=lambda one: (*one.values.values(), one.seed))
        radius = self.radii[1]
        statements = grid_statements(results, radius, self.shown(radius))
        return StudyOutput(
            {"statements": to_json(statements)},
            [table(self, results), statement_table(self.heading, statements)],
            {"": draw_grid(self, results)},
            f"{markdown(self, results)}\n{statement_page(statements)}",
        )


@final
@register_study
class LofastFigure2(GridStudy):
    """Certified accuracy of vision transformers on CIFAR-10."""

    name = "lofast-fig2"
    heading = "CIFAR-10, vision transformers of Havens et al. 2024, Figure 2"
    title = f"{heading} (needs a GPU)"
    minutes = 15
    memory = 16
    parameters = ImageGridParameters
    config = "lofast-vit"
    radii = tuple(k / 255 for k in (9, 18, 36))
    unit = 1 / 255
    tried = "quick-images.toml"


@final
@register_study
class LofastFigure5(GridStudy):
    """Certified accuracy of small BERTs on SST-2."""

    name = "lofast-fig5"
    heading = title = "SST-2, small BERTs of Havens et al. 2024, Figure 5"
    minutes = 90
    config = "lofast-bert"
    radii = (0.05, 0.1, 0.3)
    unit = 1.0
    tried = "quick-words.toml"
