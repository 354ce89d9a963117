"""Certified accuracy on the terminal, as a figure, and as a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from holdfast.errors import InputError
from holdfast.report.changes import changes
from holdfast.report.html import script_data, template
from holdfast.report.numbers import down, up
from holdfast.results import LOSSES, CertificationRun, Target, at_least, at_most
from holdfast.tables import Table

_COLOURS = ("#0072b2", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")


def run_table(run: CertificationRun, *beside: CertificationRun) -> Table:
    """One row per radius; what is certified is rounded down, what the attack leaves is rounded up."""
    runs = (run, *beside)
    attacked = next((shown for shown in runs if shown.attacked_too), None)
    table = Table(
        title=f"{run.model} on {run.data}: accuracy under {run.perturbations} perturbations", caption=_caption(runs)
    )
    table.add_column("radius", justify="right")
    for shown in runs:
        table.add_column(f"certified\n{shown.settings['method']}, {shown.settings['guarantee']}", justify="right")
    if attacked is not None:
        table.add_column("after the\nattack", justify="right")
    for radius in dict.fromkeys((0.0, *(r for shown in runs for r in shown.radii))) if run.records else ():
        row = [f"{at_least(shown.accuracy(radius))} %" for shown in runs]
        row += [] if attacked is None else [f"{at_most(attacked.attacked(radius))} %"]
        table.add_row(f"{radius:.6g}", *row)
    return table


def _caption(runs: Sequence[CertificationRun]) -> str:
    done, total = len(runs[0].records), len(runs[0].records) + len(runs[0].missing)
    words = [f"{done} of {total} inputs."]
    if done:
        radii = _listed(runs, [down(_median(run, "radius")) for run in runs])
        attacked = next((run for run in runs if run.attacked_too), None)
        nearest = "" if attacked is None else f", of the attack {up(_median(attacked, 'attack_radius'))}"
        words.append(f"Median certified radius {radii}{nearest}.")
        seconds = [_duration(statistics.fmean(record.seconds for record in run.records)) for run in runs]
        words.append(f"{_listed(runs, seconds)} per input.")
    return " ".join(words)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _listed(runs: Sequence[CertificationRun], values: Sequence[str]) -> str:
    """One value per run, with its method if there are several."""
    if len(runs) == 1:
        return values[0]
    return ", ".join(f"{value} ({run.settings['method']})" for run, value in zip(runs, values, strict=True))


def _median(run: CertificationRun, name: str) -> float:
    """Over the correctly classified inputs."""
    values: list[float] = [getattr(record, name) for record in run.records if record.correct]
    return statistics.median(values or [0.0])


def plot_runs(runs: Sequence[CertificationRun]) -> Figure:
    """Certified accuracy against the radius, one line per run, below the attack's."""
    _check(runs)
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    attacked = next((run for run in runs if run.attacked_too), None)
    if attacked is not None:
        ends = [record.attack_radius or 0.0 for record in attacked.records if record.correct]
        _steps(axis, ends, len(attacked.records), "after the attack (no proof can reach higher)", "black")
    for run, colour in zip(runs, _cycled(len(runs)), strict=True):
        ends = [record.radius for record in run.records if record.correct]
        _steps(
            axis, ends, len(run.records), f"certified: {run.settings['method']}, {run.settings['guarantee']}", colour
        )
    axis.axhline(runs[0].clean(), color="#7f7f7f", linestyle="--", linewidth=1, label="clean")
    axis.set(
        xlabel=f"radius ({runs[0].perturbations})",
        ylabel="accuracy",
        ylim=(0, 1.02),
        title=f"{runs[0].model} on {runs[0].data}",
    )
    axis.set_xlim(left=0)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize="small")
    return figure


def _steps(axis: Any, ends: list[float], count: int, label: str, colour: str) -> None:
    """The share of inputs whose radius reaches r: it falls by 1/count at each of the ends."""
    ends = sorted(end for end in ends if math.isfinite(end))
    kept = [(len(ends) - i) / count for i in range(len(ends) + 1)]
    axis.step([0.0, *ends], kept, where="post", color=colour, label=label)


def _cycled(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def render(runs: Sequence[CertificationRun], targets: Sequence[Target] = ()) -> str:
    """The page as text; it is about the first run, and the others are shown beside it."""
    _check(runs)
    data = script_data(_payload(runs))
    shown = next((run for run in runs if run.inputs and run.attacked_too), runs[0])
    places = {name: place for place, name in enumerate(LOSSES)}
    return template("certificate").render(
        runs=runs,
        run=runs[0],
        targets=targets,
        data=data,
        shown=shown,
        changes=changes(shown),
        loss_places=places,
        through=sorted({record.method for run in runs for record in run.records if record.through}),
    )


def _check(runs: Sequence[CertificationRun]) -> None:
    for run in runs:
        if not run.records:
            raise InputError(f"the run of {run.model} has no record yet; there is nothing to draw")
        for name in ("weights", "data", "norm", "clip"):
            if run.settings.get(name) != runs[0].settings.get(name):
                raise InputError(
                    f"runs with different {name} cannot be shown side by side; expected one model, data set and norm"
                )


def _pictures(run: CertificationRun) -> bool:
    """Whether the inputs are images whose numbers lie between 0 and 1; only a run that holds them tells."""
    return isinstance(next(iter(run.inputs.values()), None), Tensor)


def _values(run: CertificationRun) -> int | None:
    """How many numbers an input holds that moves as a whole, if an input or a perturbation shows it."""
    known = [*run.inputs.values(), *(record.perturbation for record in run.records)]
    return next((t.numel() for t in known if isinstance(t, Tensor)), None)


def _payload(runs: Sequence[CertificationRun]) -> dict[str, Any]:
    radii = sorted({radius for run in runs for radius in run.radii})
    return {
        "radii": radii,
        "perturbations": runs[0].perturbations,
        "norm": runs[0].norm,
        "values": _values(runs[0]),
        "pixels": _pictures(runs[0]) and runs[0].settings.get("perturb", "input") in ("input", "pixels"),
        "runs": [
            {
                "method": run.settings["method"],
                "guarantee": run.settings["guarantee"],
                "attacked": run.attacked_too,
                "records": [record.to_dict() for record in run.records],
            }
            for run in runs
        ],
    }
