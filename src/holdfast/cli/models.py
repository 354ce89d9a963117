"""`models`: the configs that come with the package, and the trained models on the shelf."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.certification import read
from holdfast.cli.app import NamedCommands
from holdfast.cli.inputs import Json, ShardSize, writable
from holdfast.cli.work import emit_json, say_written
from holdfast.errors import InputError
from holdfast.models import ModelConfig, files, named_configs
from holdfast.models.card import card
from holdfast.models.shelf import Shelved, put_on_shelf, read_shelved, shelved
from holdfast.results import at_least
from holdfast.storage import parse_size, write_text
from holdfast.studies.cifar_training import is_network
from holdfast.studies.cifar_vit_shelf import put_network_on_shelf

app = typer.Typer(help="The models that come with the package.", cls=NamedCommands, invoke_without_command=True)


@app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the trained models on the shelf, and the configs that `train` knows by name."""
    if context.invoked_subcommand is not None:
        return
    configs, shelf = named_configs(), shelved()
    payload = {
        "shelf": [model.to_dict() for model in shelf],
        "configs": {name: asdict(config) for name, config in configs.items()},
    }
    emit_json("models", payload, stdout=as_json, out=None)
    if not as_json:
        console = Console()
        console.print(_shelf_table(shelf) if shelf else "The shelf holds no trained model.", _config_table(configs))


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Its name on the shelf.")],
    model: Annotated[
        Path, typer.Argument(help="The model.safetensors that train wrote, or a network of repro cifar-vit.")
    ],
    certified: Annotated[
        list[Path] | None,
        typer.Option(help="The file of a run of certify, or for such a network of repro cifar-vit; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a trained model on the shelf, with its certified results."""
    if is_network(model):
        if certified is None or len(certified) != 1:
            raise InputError(f"{str(model)!r} is a network of repro cifar-vit; expected one --certified, its JSON file")
        added = put_network_on_shelf(name, model, certified[0])
    else:
        added = put_on_shelf(name, model, *(read(path).run() for path in certified or ()))
    emit_json("models add", added.to_dict(), stdout=as_json, out=None)
    if not as_json:
        Console().print(_shelf_table((added,)))


@app.command("card")
def write_card(
    name: Annotated[str, typer.Argument(help="A model on the shelf, or the model.safetensors that train wrote.")],
    out: Annotated[Path | None, typer.Option(help="File for the card, such as README.md.", callback=writable)] = None,
) -> None:
    """Write a model card in Markdown: data, recipe, what is proved and what that means, licence."""
    text = card(read_shelved(name), name)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        say_written(out)


@app.command("halve")
def halve(
    model: Annotated[Path, typer.Argument(help="The model.safetensors that train wrote.")],
    out: Annotated[Path, typer.Argument(help="The file to write.", callback=writable)],
    shard_size: ShardSize = None,
) -> None:
    """Round the weights of a trained model to float16, before it is certified."""
    files.halve(model, out, shard_size=None if shard_size is None else parse_size(shard_size))
    say_written(out)


def _shelf_table(shelf: tuple[Shelved, ...]) -> Table:
    table = Table("model", "inputs", "clean", "certified", "content off", title="shelf: accuracies in per cent")
    for column in table.columns:
        column.no_wrap = True
    for model in shelf:
        test = model.training.get("test", {})
        off = ""
        if "content_off" in test:
            off = f"{at_least(test['content_off'])} instead of {at_least(test['clean'])}\nof {test['inputs']} inputs"
        for run in model.certified:
            shares = "\n".join(f"{at_least(share)} at {radius}" for radius, share in run.accuracy.items())
            certified = f"{shares}\n({run.guarantee})"
            table.add_row(model.name, f"{run.inputs} of\n{run.data}", at_least(run.clean), certified, off)
        if not model.certified:
            table.add_row(model.name, "", "", "", off)
    return table


def _config_table(configs: dict[str, ModelConfig]) -> Table:
    """One row per file; a grid shows its first file and how many there are."""
    table = Table("config", "input", "width", "depth", "heads", "tokens", "members", title="configs")
    table.columns[0].overflow = "fold"
    families: dict[str, list[str]] = defaultdict(list)
    for name in configs:
        families[name.split()[0]].append(name)
    for family, members in families.items():
        c = configs[members[0]]
        sizes = (str(size) for size in (c.width, c.depth, c.heads, c.grid[0] * c.grid[1]))
        table.add_row(family if len(members) == 1 else members[0], c.input, *sizes, str(len(members)))
    return table
