"""`bounds`, `bound` and `attack`: one layer at given inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from holdfast import api
from holdfast.bounds import bound_named, list_bounds
from holdfast.cli.inputs import (
    ChosenLayer,
    Demo,
    DemoLayer,
    Eps,
    InputFile,
    Inputs,
    Json,
    LayerFile,
    Out,
    Seed,
    read_eps,
    read_subject,
    writable,
)
from holdfast.cli.work import Job, carry_out, emit_json, say_written
from holdfast.errors import InputError
from holdfast.linalg.certified import GIB
from holdfast.report.layer import Panel, plot_panels
from holdfast.report.numbers import down, up
from holdfast.results import AttackResult, BoundResult

_INPUTS_PER_JOB = 8
_CURVE = (0.01, 0.03, 0.1, 0.3, 1.0)  # factors that turn a single eps into a curve
_DIGITS = 6

_SCOPES = {
    "ball at x": "How far the output moves",
    "point": "Slope at x",
    "ball at 0": "Slope everywhere on a ball",
}


def bounds(as_json: Json = False) -> None:
    """List the bounds: name, side, scope, guarantee, cost, reference and assumptions."""
    columns = ("name", "side", "scope", "guarantees", "cost", "reference", "assumptions")
    rows = [{column: getattr(bound, column) for column in columns} for bound in list_bounds()]
    if as_json:
        emit_json("bounds", {"bounds": rows}, stdout=True, out=None)
        return
    for scope, title in _SCOPES.items():
        table = Table("name", "cost", "assumptions", "reference", title=f"{title} (scope “{scope}”)")
        table.columns[0].no_wrap = table.columns[-1].no_wrap = True
        for row in rows:
            if row["scope"] == scope:
                table.add_row(*(str(row[column]) for column in ("name", "cost", "assumptions", "reference")))
        Console().print(table)
    offered = {"; ".join(row["guarantees"]) for row in rows}
    Console().print(f"All are upper bounds; guarantees: {', '.join(sorted(offered))}.")


def bound(
    layer: LayerFile = None,
    x: InputFile = None,
    demo: Demo = False,
    demo_layer: DemoLayer = 0,
    inputs: Inputs = 8,
    eps: Eps = "0.1",
    method: Annotated[
        list[str] | None, typer.Option(help="Name of a bound; repeat for several. Default: best.")
    ] = None,
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Proved, or faster.")] = "proved",
    memory_limit: Annotated[float, typer.Option(min=0, help="GiB that one proved norm may use.")] = 8.0,
    curve: Annotated[
        Path | None, typer.Option(help="Draw bounds, LoFAST and an attack against eps: PNG and SVG.", callback=writable)
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Bound how far the output of a layer can move when its input moves by at most eps."""
    methods, radii = method or ["best"], read_eps(eps)
    if curve is not None:
        if curve.suffix not in ("", ".png", ".svg"):
            raise InputError(
                f"--curve is {str(curve)!r}; expected a name that ends in .png or .svg, or without an ending"
            )
        methods = list(dict.fromkeys((*methods, "lofast")))
        radii = radii if len(radii) > 1 else [radii[0] * step for step in _CURVE]
    for name in methods:
        bound_named(name)
    subject = read_subject(layer, x, demo, demo_layer, inputs)

    def job(name: str, start: int, part: ChosenLayer) -> Job[tuple[int, BoundResult]]:
        def run() -> tuple[int, BoundResult]:
            limit = memory_limit * GIB
            return start, api.bound(part.layer, part.x, radii, name, guarantee=guarantee, memory_limit=limit)

        return Job(name, run)

    jobs = [job(name, start, part) for name in methods for start, part in _parts(subject)]
    done = carry_out(jobs)
    results = [_with_inputs(start, result) for start, result in done.results]
    emit_json("bound", {"layer": repr(subject.layer), "results": results}, stdout=as_json, out=out)
    if not as_json:
        rows = [
            (result.method, str(start + i), *(up(value, _DIGITS) for value in row))
            for start, result in done.results
            for i, row in enumerate(result.value.tolist())
        ]
        console = Console()
        console.print(_table(f"{subject.name}: bounds ({guarantee}), rounded up", "bound", radii, rows, console))
        for note in sorted({note for _, result in done.results for note in result.notes}):
            console.print(note, style="dim")
    figures: list[Path] = []
    if curve is not None and not done.interrupted:
        values: dict[str, list[Tensor]] = {}
        for _, result in done.results:
            values.setdefault(result.method, []).append(result.value)
        curves = {name: torch.cat(parts).cpu() for name, parts in values.items()}
        attained = api.attack(subject.layer, subject.x, radii).lower.cpu()
        figures = plot_panels([Panel(subject.name, radii, curves, attained)], curve.with_suffix(""))
    if not as_json:
        say_written(out, *figures)
    done.exit(len(jobs))


def attack(
    layer: LayerFile = None,
    x: InputFile = None,
    demo: Demo = False,
    demo_layer: DemoLayer = 0,
    inputs: Inputs = 8,
    eps: Eps = "0.1",
    objective: Annotated[str, typer.Option(help="output, delta-2, delta-21, scores or delta-22.")] = "output",
    restarts: Annotated[int, typer.Option(help="Starting points for every input.")] = 10,
    steps: Annotated[int, typer.Option(help="Gradient steps for every start.")] = 100,
    seed: Seed = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Search for a perturbation within eps that moves the output of a layer far."""
    radii = read_eps(eps)
    subject = read_subject(layer, x, demo, demo_layer, inputs)

    def job(start: int, part: ChosenLayer) -> Job[tuple[int, AttackResult]]:
        def run() -> tuple[int, AttackResult]:
            options = {"restarts": restarts, "steps": steps, "seed": seed}
            return start, api.attack(part.layer, part.x, radii, objective=objective, **options)

        return Job(objective, run)

    jobs = [job(start, part) for start, part in _parts(subject)]
    done = carry_out(jobs)
    results = [_with_inputs(start, result) for start, result in done.results]
    emit_json("attack", {"layer": repr(subject.layer), "results": results}, stdout=as_json, out=out)
    if not as_json:
        rows = []
        for start, result in done.results:
            for i, value in enumerate(result.lower):
                for head, row in enumerate(value.reshape(-1, len(radii)).tolist()):
                    name = objective if value.ndim == 1 else f"{objective}, head {head}"
                    rows.append((name, str(start + i), *(down(number, _DIGITS) for number in row)))
        console = Console()
        title = f"{subject.name}: attained by an attack, rounded down"
        console.print(_table(title, "objective", radii, rows, console))
        say_written(out)
    done.exit(len(jobs))


def _parts(subject: ChosenLayer) -> list[tuple[int, ChosenLayer]]:
    starts = range(0, len(subject.x), _INPUTS_PER_JOB)
    return [(start, subject.part(start, min(start + _INPUTS_PER_JOB, len(subject.x)))) for start in starts]


def _with_inputs(start: int, result: BoundResult | AttackResult) -> dict[str, object]:
    """A result for JSON, with the inputs of the batch that it is about."""
    values = result.value if isinstance(result, BoundResult) else result.lower
    return {"inputs": [start, start + len(values)], **result.to_dict()}


def _table(title: str, first: str, radii: list[float], rows: list[tuple[str, ...]], console: Console) -> Table:
    """A column for every radius; or a row for each, if a number would not fit the console's width."""
    table = Table(first, "input", title=title)
    for radius in radii:
        table.add_column(f"eps {radius:g}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum <= console.width:
        return table
    table = Table(first, "input", "eps", "value", title=title)
    for name, place, *values in rows:
        for radius, value in zip(radii, values, strict=True):
            table.add_row(name, place, f"{radius:g}", value, end_section=radius == radii[-1])
    return table
