"""`demo`: a small trained vision transformer, certified on real test digits; or its attention layers one by one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from holdfast.analysis.layer import LayerReport, report_layer
from holdfast.certification import certify, read
from holdfast.cli.inputs import ChosenLayer, Json, demo_subjects
from holdfast.cli.work import INTERRUPTED, Job, carry_out, emit_json, say_written
from holdfast.errors import HoldfastError
from holdfast.models import load_digits_vit
from holdfast.progress import telling
from holdfast.report.layer import head_table, plot_layers, sensitivity_table
from holdfast.report.style import write_figure
from holdfast.results import CertificationRun
from holdfast.storage import check_folder, make_folder
from holdfast.version import __version__

_METHODS = {"best": 1, "lofast": 8}  # and how many digits are treated at once
_DIGITS = 16
_RADII = (1e-7, 0.01, 0.03, 0.05, 0.1, 0.2)
_WORKERS = 4  # at most: each takes 0.7 GB

_LAYER_DIGITS = 2
_LAYER_RADII = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
_LAYER_SHOWN = (0.001, 0.01, 0.1, 1.0)


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the records, the page and the figures; created if missing.")
    ] = Path("out"),
    inputs: Annotated[int | None, typer.Option(min=1, max=32, help="Test digits; default: 16, for layers 2.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core, at most 4.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Analyze the attention layers one by one.")] = False,
    as_json: Json = False,
) -> None:
    """Certify the bundled digits model: proved radii beside LoFAST's and an attack, as a table, a figure and a page."""
    check_folder(out, "layers.json" if layers else "demo.json")
    make_folder(out)
    if layers:
        _analyze_layers(out, inputs or _LAYER_DIGITS, as_json)
    else:
        _certify_digits(out, inputs or _DIGITS, workers or min(_WORKERS, torch.get_num_threads()), as_json)


def _certify_digits(out: Path, inputs: int, workers: int, as_json: bool) -> None:
    files = [out / f"demo-{method}.jsonl" for method in _METHODS]
    resume, runs, interrupted = _interrupted(files, inputs), list[CertificationRun](), ""
    for (method, batch), file in zip(_METHODS.items(), files, strict=True):
        with telling(f"{inputs} digits: {method}") as told:
            run = certify(
                load_digits_vit(),
                "digits-32",
                _RADII,
                method,
                attack=method == "best",
                out=file,
                resume=resume,
                batch=batch,
                workers=workers,
                limit=inputs,
                name="digits",
                command=shlex.join(["holdfast", *sys.argv[1:]]),
                progress=told,
            )
        runs += [run] if run.records else []
        if told.done < told.planned:
            interrupted = f"{told.done} of {told.planned} digits are certified by {method}"
            break
    _show(runs, files, out, as_json)
    if interrupted:
        typer.echo(f"holdfast: interrupted; {interrupted}; the same command resumes from there", err=True)
        raise typer.Exit(INTERRUPTED)


def _interrupted(files: Sequence[Path], inputs: int) -> bool:
    """Whether an interrupted demo left something to resume; a finished one, or a different one, starts afresh."""
    try:
        stored = [read(file) for file in files if file.exists()]
    except HoldfastError:
        return False
    same = all(part.header.settings["holdfast"] == __version__ for part in stored)
    same = same and all(len(part.header.indices) == inputs for part in stored)
    return same and not (len(stored) == len(files) and all(not part.run().missing for part in stored))


def _show(runs: Sequence[CertificationRun], files: Sequence[Path], out: Path, as_json: bool) -> None:
    emit_json("demo", {"runs": [run.to_dict() for run in runs]}, stdout=as_json, out=out / "demo.json")
    if not runs:
        return
    first, *beside = runs
    pictures = [out / f"demo.{kind}" for kind in ("png", "svg")]
    for picture in pictures:
        write_figure(first.plot(*beside), picture, dpi=150)
    first.to_html(out / "demo.html", *beside)
    if not as_json:
        Console().print(first.table(*beside))
        say_written(out / "demo.html", *pictures, out / "demo.json", *files[: len(runs)])


def _analyze_layers(out: Path, inputs: int, as_json: bool) -> None:
    def job(subject: ChosenLayer) -> Job[LayerReport]:
        return Job(subject.name, lambda: report_layer(subject.name, subject.layer, subject.x, _LAYER_RADII))

    jobs = [job(subject) for subject in demo_subjects(inputs)]
    done = carry_out(jobs)
    reports = [report.to_dict() for report in done.results]
    emit_json("demo", {"inputs": inputs, "layers": reports}, stdout=as_json, out=out / "layers.json")
    figures = plot_layers(done.results, out / "layers") if done.results else []
    if not as_json:
        console = Console()
        for report in done.results:
            console.print(sensitivity_table(report, _LAYER_SHOWN), head_table(report), "")
        say_written(*figures, out / "layers.json")
    done.exit(len(jobs))
