"""`repro images`: trained image classifiers, certified, compared and attacked."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from holdfast.cli.inputs import Json
from holdfast.cli.work import INTERRUPTED, emit_json, say_written, work_through
from holdfast.repro import images as module
from holdfast.storage import write_text


def images(
    models: Annotated[list[str] | None, typer.Argument(help="Files of train, or names on the shelf.")] = None,
    inputs: Annotated[int, typer.Option(min=1, help="How many test images to certify.")] = 1000,
    lofast_inputs: Annotated[int, typer.Option(min=1, help="How many of them by LoFAST's recursion.")] = 20,
    attack_inputs: Annotated[int, typer.Option(min=1, help="How many of them to attack.")] = 200,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data files; default: HOLDFAST_DATA.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Models at once, each in a process with one thread.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results and the table.")] = Path("results"),
    records: Annotated[Path, typer.Option(help="Folder for the records of certify.")] = Path("runs/images"),
    as_json: Json = False,
) -> None:
    """Certify and attack trained image classifiers; without a name, only make the table again."""
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    line = shlex.join(["holdfast", *sys.argv[1:]])
    chosen = models or []
    folder = out / "images"
    counts = (inputs, lofast_inputs, attack_inputs)
    tasks = [module.Task(name, *counts, folder, records, data_dir, where, line) for name in chosen]
    done = work_through(module.measure, tasks, chosen, jobs)
    results = module.read_all(folder)
    emit_json("repro images", {"models": [asdict(each) for each in results]}, stdout=as_json, out=None)
    if results:
        page = out / "images.md"
        write_text(page, module.markdown(results))
        if not as_json:
            typer.echo(page.read_text(encoding="utf-8"))
            say_written(page)
    if not done:
        typer.echo("holdfast: interrupted; the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)
