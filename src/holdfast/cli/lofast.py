"""`repro lofast-fig2` and `repro lofast-fig5`: certified accuracy of the LoFAST paper's networks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from holdfast.cli.inputs import Json
from holdfast.cli.work import INTERRUPTED, emit_json, say_written, work_through
from holdfast.errors import InputError
from holdfast.network.compositions import compositions
from holdfast.repro import lofast as module
from holdfast.repro import lofast_figure as figure
from holdfast.results import Guarantee
from holdfast.storage import write_text

_OURS = "gains"


def command_of(study: module.Study) -> Callable[..., None]:
    """The command that makes a study's figure."""

    def command(
        only: Annotated[str, typer.Option(help="Part of the grid, such as depth=3,heads=4; keys may repeat.")] = "",
        inputs: Annotated[int, typer.Option(min=1, help="How many test inputs to certify.")] = study.inputs,
        epochs: Annotated[int | None, typer.Option(min=1, help="Of each training; default: the config's.")] = None,
        seed: Annotated[int, typer.Option(min=0, help="Of the trainings.")] = 0,
        ours: Annotated[str, typer.Option(help="The composition beside the paper's.")] = _OURS,
        ours_guarantee: Annotated[Literal["proved", "numerical"], typer.Option(help="Of that one.")] = "proved",
        guarantee: Annotated[
            Literal["proved", "numerical"], typer.Option(help="Of the paper's bound; iterated norms favour it.")
        ] = "numerical",
        data_dir: Annotated[Path | None, typer.Option(help="Folder of the data files; default: HOLDFAST_DATA.")] = None,
        device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
        jobs: Annotated[int, typer.Option(min=1, help="Networks at once, each in a process with one thread.")] = 1,
        redraw: Annotated[bool, typer.Option("--redraw", help="Only table and figure of what is finished.")] = False,
        out: Annotated[Path, typer.Option(help="Folder for the results and the figure.")] = Path("results"),
        models: Annotated[Path, typer.Option(help="Folder for trained models and checkpoints.")] = Path("runs"),
        as_json: Json = False,
    ) -> None:
        methods: dict[str, Guarantee] = {module.LOFAST: guarantee, _known(ours): ours_guarantee}
        asked = module.members(study, methods, inputs=inputs, seed=seed, only=only, epochs=epochs)
        folder = out / study.name
        missing = [] if redraw else [each for each in asked if module.finished(each, folder) is None]
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        line = shlex.join(["holdfast", *sys.argv[1:]])
        place = module.Place(folder, models / study.name, data_dir, where, line)
        work = [(member, place) for member in missing]
        done = work_through(module.measure, work, [member.label for member in missing], jobs)
        results = module.read_all(folder)
        if results:
            _show(study, results, out, as_json)
        elif done:
            raise InputError(f"{folder} has no results to draw; run the command without --redraw")
        if not done:
            typer.echo("holdfast: interrupted; the same command goes on", err=True)
            raise typer.Exit(INTERRUPTED)

    command.__doc__ = f"{study.title}: trained, certified and attacked; what is finished is kept."
    return command


def _known(ours: str) -> str:
    compositions[ours]  # an unknown name is refused here, before any training
    if ours == module.LOFAST:
        raise InputError(f"--ours is {ours!r}, which is certified anyway; name another composition")
    return ours


def _show(study: module.Study, results: list[module.Measured], out: Path, as_json: bool) -> None:
    stem = out / study.name
    page = stem.with_suffix(".md")
    write_text(page, figure.markdown(study, results))
    drawn = figure.plot(study, results, stem)
    emit_json(f"repro {study.name}", {"networks": [asdict(one) for one in results]}, stdout=as_json, out=None)
    if not as_json:
        Console().print(figure.table(study, results))
        say_written(page, *drawn)
