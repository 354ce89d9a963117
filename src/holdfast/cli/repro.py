"""`repro`: the tables and figures of the papers and of the documentation, reproduced."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.app import NamedCommands
from holdfast.cli.inputs import Json
from holdfast.cli.work import INTERRUPTED, say_written, work_through
from holdfast.device import check_device
from holdfast.errors import InputError
from holdfast.storage import read_toml
from holdfast.studies import Study, StudyPlan, StudyRun, Workplace, measure_part, studies
from holdfast.train.tables import from_table, to_table

app = typer.Typer(
    help="Reproduce the tables and figures of the papers and of the documentation.",
    cls=NamedCommands,
    invoke_without_command=True,
)


@app.callback()
def _root(
    context: typer.Context,
    listed: Annotated[bool, typer.Option("--list", help="List the studies, and what each takes.")] = False,
    as_json: Json = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if not listed:
        typer.echo(context.get_help())
        return
    rows = [
        {"name": s.name, "title": s.title, "paper": s.paper, "minutes": s.minutes, "memory": s.memory}
        for s in sorted(studies.values(), key=lambda study: study.name)
    ]
    if as_json:
        typer.echo(json.dumps({"command": "repro --list", "studies": rows}, indent=2))
        return
    note = (
        "Minutes on two cores, or on one H200 where a GPU is needed; GiB of memory for each part of the work (--jobs)."
    )
    table = Table(box=None, pad_edge=False, caption=note, caption_justify="left")
    for column in ("name", "minutes", "GiB", "paper", "what"):
        table.add_column(column, justify="right" if column in ("minutes", "GiB") else "left")
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("name", "minutes", "memory", "paper", "title")))
    Console().print(table)


_PARAMETERS = "A TOML file with values for the options below; what the command line says comes first."
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "parameters": (Annotated[Path | None, typer.Option(help=_PARAMETERS)], None),
    "quick": (Annotated[bool, typer.Option("--quick", help="A quick version that takes less than a minute.")], False),
    "redraw": (Annotated[bool, typer.Option("--redraw", help="Only tables and figures from stored results.")], False),
    "out": (
        Annotated[Path, typer.Option(help="Folder for the numbers and the figures; created if missing.")],
        Path("results"),
    ),
    "runs": (
        Annotated[Path, typer.Option(help="Folder for trained models and records; created if missing.")],
        Path("runs"),
    ),
    "data_dir": (Annotated[Path | None, typer.Option(help="Folder with the data; default: HOLDFAST_DATA.")], None),
    "device": (Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")], None),
    "jobs": (
        Annotated[int, typer.Option(min=1, help="Number of parts at once, each in a process with one thread.")],
        1,
    ),
    "as_json": (Json, False),
}


def _command(cls: type[Study[Any]]) -> Callable[..., None]:
    """The command of a study: an option for every parameter, and those that all studies have."""
    own = {f.name: _option(f, get_type_hints(cls.parameters)[f.name]) for f in fields(cls.parameters)}

    def command(**given: Any) -> None:
        common = {name: given.pop(name) for name in _OPTIONS}
        read = partial(_read, cls(), given, common["parameters"], common["quick"])
        device = str(check_device(common["device"] or ("cuda" if torch.cuda.is_available() else "cpu")))
        line = shlex.join(["holdfast", *sys.argv[1:]])
        place = Workplace(common["runs"], common["data_dir"], device, line)
        run = StudyRun(cls.name, read({}), common["out"], place, common["quick"])
        if common["redraw"]:
            run = replace(run, parameters=read(run.stored_settings()))
        _carry_out(run, common["jobs"], common["redraw"], common["as_json"])

    kinds = {name: hint for name, (hint, _) in {**own, **_OPTIONS}.items()}
    command.__annotations__ = kinds | {"return": None}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
            for name, (hint, default) in {**own, **_OPTIONS}.items()
        ]
    )
    command.__doc__ = f"{cls.title}; what is finished is kept."
    return command


def _option(f: Field[Any], hint: Any) -> tuple[Any, Any]:
    """How the command line takes a parameter: if it is not given, the study's own value stands."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    several, shown = get_origin(hint) is tuple, f.default
    if isinstance(shown, tuple):
        shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in shown)
    text = f.metadata["text"] + (" Separated by commas." if several and not f.metadata["argument"] else "")
    if f.metadata["argument"]:
        return Annotated[list[str] | None, typer.Argument(help=text, show_default=False)], None
    default = str(shown) if shown not in (None, "") else False
    if several:
        return Annotated[str | None, typer.Option(help=text, show_default=default)], None
    least = f.metadata["least"] if hint in (int, float) else None
    return Annotated[hint | None, typer.Option(help=text, show_default=default, min=least)], None


def _read(study: Study[Any], given: dict[str, Any], file: Path | None, quick: bool, stored: Mapping[str, Any]) -> Any:
    """The parameters: the study's own or those of a quick run, then stored ones, a file's, and the command line's."""
    table = to_table(study.quick() if quick else study.parameters())
    table |= {name: value for name, value in stored.items() if name in table}
    hints = get_type_hints(study.parameters)
    if file is not None:
        table |= read_toml(file, "parameters")
    for name, value in given.items():
        if value is None:
            continue
        several = get_origin(hints[name]) is tuple
        items = value.split(",") if several and isinstance(value, str) else value
        table[name] = [_whole(item, name) for item in items] if hints[name] == tuple[int, ...] else items
    return from_table(study.parameters, table, f"the parameters of {study.name}")


def _whole(item: Any, name: str) -> int:
    try:
        return int(item)
    except ValueError:
        option = f"--{name.replace('_', '-')}"
        raise InputError(f"{option} has {item!r}; expected whole numbers separated by commas, such as 0,1,2") from None


def _carry_out(run: StudyRun, jobs: int, redraw: bool, as_json: bool) -> None:
    plan = StudyPlan([]) if redraw else run.plan()
    if not redraw:
        run.begin()
    done = True
    for stage in plan.stages:
        work = [(run, part) for part in run.pending(stage)]
        done = done and work_through(measure_part, work, [part.key for _, part in work], jobs)
    for reason in plan.left_out:
        typer.echo(f"holdfast: left out: {reason}", err=True)
    if run.read():
        shown = run.show(plan)
        if as_json:
            typer.echo(run.numbers.read_text(encoding="utf-8"))
        else:
            Console().print(*shown.tables, sep="\n")
            say_written(*run.written(shown))
    elif done:
        if redraw:
            raise InputError(f"no file {str(run.numbers)!r}; give the options that it was made with, or no --redraw")
        raise InputError(f"{run.stem} has no results to show; the parameters ask for nothing that can be done here")
    if not done:
        total, missing = len(plan.parts), len(run.pending(plan.parts))
        line = f"interrupted; {total - missing} of {total} parts were finished; the same command resumes"
        typer.echo(f"holdfast: {line}", err=True)
        raise typer.Exit(INTERRUPTED)


for _name in studies:
    app.command(_name)(_command(studies[_name]))
