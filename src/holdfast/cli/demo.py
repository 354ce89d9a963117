"""`demo`: the attention layers of a small trained vision transformer, at real test digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.inputs import Json, Subject, demo_subjects
from holdfast.cli.work import Job, carry_out, emit_json, say_written
from holdfast.report.layer import LayerReport, head_table, plot_layers, report_layer, sensitivity_table

_RADII = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
_SHOWN = (0.001, 0.01, 0.1, 1.0)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the figure (PNG, SVG) and the numbers (JSON).")] = Path("out"),
    inputs: Annotated[int, typer.Option(min=1, max=32, help="How many test digits.")] = 2,
    as_json: Json = False,
) -> None:
    """Analyse the attention layers of the bundled digits model: local Lipschitz constant, bounds, attack, figure."""

    def job(subject: Subject) -> Job[LayerReport]:
        return Job(subject.name, lambda: report_layer(subject.name, subject.layer, subject.x, _RADII))

    jobs = [job(subject) for subject in demo_subjects(inputs)]
    done = carry_out(jobs)
    reports = [report.to_dict() for report in done.results]
    emit_json("demo", {"inputs": inputs, "layers": reports}, stdout=as_json, out=out / "demo.json")
    figures = plot_layers(done.results, out / "demo") if done.results else []
    if not as_json:
        console = Console()
        for report in done.results:
            console.print(sensitivity_table(report, _SHOWN), head_table(report), "")
        say_written(*figures, out / "demo.json")
    done.exit(len(jobs))
