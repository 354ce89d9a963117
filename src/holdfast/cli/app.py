"""The application, and the one place where errors become a line and an exit status."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn, cast

import torch
import typer

import holdfast
from holdfast.cli import analyze, campaign, certify, demo, doctor, layers, lipschitz, models, repro, train
from holdfast.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="If the input of a transformer moves by at most eps, how far can its output move, and can you prove it?",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("analyze")(analyze.analyze)
app.command("bounds")(layers.bounds)
app.command("bound")(layers.bound)
app.command("attack")(layers.attack)
app.command("lipschitz")(lipschitz.lipschitz)
app.command("attention")(lipschitz.attention)
app.command("certify")(certify.certify)
app.command("merge")(certify.merge)
app.command("verify")(certify.verify)
app.command("train")(train.train)
app.add_typer(models.app, name="models")
app.command("demo")(demo.demo)
app.command("campaign")(campaign.campaign)
app.command("doctor")(doctor.doctor)
app.add_typer(repro.app, name="repro")

# Older releases of typer take this class from click, newer ones carry their own; only the subclass has a public name.
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_OUT_OF_MEMORY = "out of memory; use fewer inputs or tokens, or --guarantee numerical"


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(holdfast.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Runs the command line: status 0, 2 with one line on bad input, or 130 when interrupted."""
    try:
        status = app(standalone_mode=False)
    except HoldfastError as error:
        _fail(str(error))
    except _USAGE_ERROR as error:
        _fail(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted before anything was finished", status=130)
    except (MemoryError, torch.OutOfMemoryError):
        _fail(_OUT_OF_MEMORY)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        _fail(_OUT_OF_MEMORY)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int = 2) -> NoReturn:
    typer.echo(f"holdfast: {' '.join(message.split())}", err=True)
    sys.exit(status)
