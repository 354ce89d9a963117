"""`lipschitz` and `attention`: how steep a layer is, and what its heads look like."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.attention.diagnostics import attention_report
from holdfast.cli.inputs import Demo, DemoLayer, InputFile, Inputs, Json, LayerFile, Out, read_subject
from holdfast.cli.work import Job, carry_out, emit_json, say_written
from holdfast.errors import InputError
from holdfast.linalg.certified import GIB
from holdfast.report.numbers import up
from holdfast.results import LipschitzResult


def lipschitz(
    layer: LayerFile = None,
    x: InputFile = None,
    demo: Demo = False,
    demo_layer: DemoLayer = 0,
    inputs: Inputs = 8,
    method: Annotated[
        list[str] | None, typer.Option(help="Name of a bound; repeat for several. Default: best.")
    ] = None,
    radius: Annotated[float | None, typer.Option(help="On the ball of this radius around 0, not at the input.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Number of tokens, with --radius.")] = None,
    p: Annotated[float, typer.Option(help="Exponent of the W_p distance, with --radius.")] = 2.0,
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Proved, or faster.")] = "proved",
    memory_limit: Annotated[float, typer.Option(min=0, help="GiB that one proved norm may use.")] = 8.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Bound the slope of a layer: at its input, or with --radius and --tokens on a ball around 0."""
    limit, on_ball = memory_limit * GIB, radius is not None or tokens is not None
    point: Tensor | None = None
    if on_ball:
        if layer is None or x is not None or demo:
            raise InputError("--radius and --tokens need a layer's safetensors file, and no input")
        if radius is None or tokens is None:
            given, missing = ("--tokens", "--radius") if radius is None else ("--radius", "--tokens")
            raise InputError(f"{given} was given and {missing} is missing; a ball around 0 needs both")
        name, which = layer.name, AttentionLayer.load(layer)
    else:
        subject = read_subject(layer, x, demo, demo_layer, inputs)
        name, which, point = subject.name, subject.layer, subject.x

    def job(chosen: str) -> Job[LipschitzResult]:
        def run() -> LipschitzResult:
            return api.lipschitz_bound(
                which, point, chosen, radius=radius, tokens=tokens, p=p, guarantee=guarantee, memory_limit=limit
            )

        return Job(chosen, run)

    jobs = [job(chosen) for chosen in method or ["best"]]
    done = carry_out(jobs)
    results = [result.to_dict() for result in done.results]
    emit_json("lipschitz", {"layer": repr(which), "results": results}, stdout=as_json, out=out)
    if not as_json:
        table = Table("bound", "scope", "input", "slope", title=f"{name}: slope at most ({guarantee})")
        table.columns[-1].no_wrap = True
        for result in done.results:
            for i, value in enumerate(result.value.reshape(-1).tolist()):
                table.add_row(result.method, result.scope, "" if on_ball else str(i), up(value, 6))
        console = Console()
        console.print(table)
        for note in sorted({note for result in done.results for note in result.notes}):
            console.print(note, style="dim")
        say_written(out)
    done.exit(len(jobs))


def attention(
    layer: LayerFile = None,
    x: InputFile = None,
    demo: Demo = False,
    demo_layer: DemoLayer = 0,
    inputs: Inputs = 1,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Show for every head how peaked it is, its sink token, and which path the layer's slope comes from."""
    subject = read_subject(layer, x, demo, demo_layer, inputs)
    report = attention_report(subject.layer, subject.x)
    emit_json("attention", {"layer": repr(subject.layer), "report": report.to_dict()}, stdout=as_json, out=out)
    if not as_json:
        Console().print(report.table())
        say_written(out)
