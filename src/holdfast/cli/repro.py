"""`repro`: the tables and figures of the documentation, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from holdfast.cli.inputs import Json, read_eps
from holdfast.cli.work import Job, carry_out, emit_json
from holdfast.repro import tightness as module
from holdfast.results import Guarantee

app = typer.Typer(help="Make the tables and figures of the documentation again.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Keeps the name of the figure a sub-command while there is only one."""


@app.command("tightness")
def tightness(
    shape: Annotated[str, typer.Option(help="Tokens, width and heads, separated by commas.")] = "64,64,8",
    seeds: Annotated[int, typer.Option(min=1, help="How many random layers for each regime.")] = 3,
    eps: Annotated[str, typer.Option(help="Radii, separated by commas.")] = ",".join(map(str, module.RADII)),
    guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Of the bounds.")] = "numerical",
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the figure.")] = Path("results"),
    as_json: Json = False,
) -> None:
    """Ratio of every bound to an attack, on random layers from flat to peaked attention."""
    n, d, h = (int(size) for size in read_eps(shape))
    radii = read_eps(eps)

    def job(regime: module.Regime, seed: int, kind: Guarantee) -> Job[module.Measurement]:
        return Job(f"{regime.title}, seed {seed}", lambda: module.measure(regime, seed, radii, kind))

    jobs = [job(regime, seed, guarantee) for regime in module.regimes(n, d, h) for seed in range(seeds)]
    done = carry_out(jobs)
    stem = out / f"tightness-n{n}-d{d}-h{h}-{guarantee}"
    payload = {"layers": [measurement.to_dict() for measurement in done.results]}
    emit_json("repro tightness", payload, stdout=as_json, out=stem.with_suffix(".json"))
    if done.results:
        module.plot(done.results, stem)
    if not as_json:
        Console().print(*module.tables(done.results), f"Written: {stem}.json, .png, .svg", sep="\n")
    done.exit(len(jobs))
