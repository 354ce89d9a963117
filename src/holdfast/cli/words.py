"""`repro words`: proved radii of the words of SST-2 sentences."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.inputs import Json
from holdfast.cli.work import INTERRUPTED, emit_json, say_written, work_through
from holdfast.errors import InputError
from holdfast.network.compositions import compositions
from holdfast.repro import words as module
from holdfast.storage import write_text
from holdfast.train.config import read_training


def words(
    config: Annotated[str, typer.Option(help="A model of words: a TOML file, or a config by name.")] = "sst2-content",
    seed: Annotated[str, typer.Option(help="Of the trainings, separated by commas.")] = "0",
    sentences: Annotated[int, typer.Option(min=1, help="How many are certified for each model.")] = 10,
    method: Annotated[str, typer.Option(help="The composition for one word that moves.")] = "telescoped",
    together: Annotated[str, typer.Option(help="The composition for all words that move.")] = "gains",
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data files; default: HOLDFAST_DATA.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once, with one thread each.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("results"),
    models: Annotated[Path, typer.Option(help="Folder for trained models and finished sentences.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """How far one word, and all words, of SST-2 sentences may move: proved and attacked; what is finished is kept."""
    for name in (method, together):
        compositions[name]  # an unknown name is refused here, before any training
    chosen, line = read_training(config), shlex.join(["holdfast", *sys.argv[1:]])
    tasks = [
        module.Task(chosen.with_seed(each), sentences, method, together, models, data_dir, line)
        for each in _read_seeds(seed)
    ]
    trainings = [task for task in tasks if not task.trained]
    done = work_through(module.prepare, trainings, [task.stem for task in trainings], jobs)
    parts = [(task, number) for task in tasks for number in range(sentences) if not task.part(number).exists()]
    labels = [f"{task.stem}, sentence {number}" for task, number in parts]
    done = done and work_through(module.certify, parts, labels, jobs)
    results = {out / f"{task.stem}.json": found for task in tasks if (found := module.collect(task)) is not None}
    for path, found in results.items():
        emit_json("repro words", found.to_dict(), stdout=False, out=path)
    emit_json("repro words", {"models": [found.to_dict() for found in results.values()]}, stdout=as_json, out=None)
    if not as_json and results:
        page = out / f"words-{Path(chosen.name).stem}.md"
        write_text(page, module.markdown(list(results.values())))
        Console().print(module.table(list(results.values())))
        say_written(page, *results)
    if not done:
        typer.echo("holdfast: interrupted; the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED)


def _read_seeds(text: str) -> list[int]:
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds):
        raise InputError(f"--seed is {text!r}; expected whole numbers separated by commas, such as 0,1,2")
    return [int(seed) for seed in seeds]
