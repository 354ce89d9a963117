"""The application, and the one place where errors become a line and an exit status."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.errors import HoldfastError, UnknownNameError
from holdfast.threads import wait_asleep
from holdfast.version import __version__

#: Where each command lives, and its help in one line: the rest of it, and torch, are imported when it is called.
COMMANDS = {
    "analyze": (
        "Analyze every attention layer of a model: local constants, bounds, attacks, heads, and sensitive tokens."
    ),
    "bounds": "List the bounds: name, side, scope, guarantee, cost, reference and assumptions.",
    "bound": "Bound how far the output of a layer can move when its input moves by at most eps.",
    "attack": "Search for a perturbation within eps that moves the output of a layer far.",
    "lipschitz": "Bound the slope of a layer: at its input, or with --radius and --tokens on a ball around 0.",
    "attention": ("Show for every head how peaked it is, its sink token, and which path the layer's slope comes from."),
    "certify": (
        "Prove for every input of a data set how far it can move before the answer changes; or decide a specification."
    ),
    "merge": "Merge the files of shards; refuse records that disagree.",
    "verify": (
        "Recompute records and test the perturbations, from the model alone: status 1 if something does not hold."
    ),
    "train": "Train a model that can be certified; the same command resumes an interrupted training.",
    "models": "The models that come with the package.",
    "demo": (
        "Certify the bundled digits model: proved radii beside LoFAST's and an attack, as a table, a figure and a page."
    ),
    "campaign": (
        "Attack every bound, and its ingredients, on random layers, pieces and networks: status 1 if one is too small."
    ),
    "doctor": "Show versions, devices, threads, and which extras are installed.",
    "repro": "Reproduce the tables and figures of the papers and of the documentation.",
}
_FILES = {"bounds": "layers", "bound": "layers", "attack": "layers", "attention": "lipschitz"}
_FILES |= {"merge": "certify", "verify": "certify"}


def load(name: str) -> Any:
    """A command with all of its options."""
    module = import_module(f"holdfast.cli.{_FILES.get(name, name)}")
    command = getattr(module, "app", None)
    if command is None:
        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command(name)(getattr(module, name))
    return typer.main.get_command(command)


class NamedCommands(TyperGroup):
    """Commands; the error for an unknown one suggests the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is meant, or an error that lists the commands."""
        known = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in known:
            raise UnknownNameError("command", args[0], known)
        return super().resolve_command(ctx, args)


class _Group(NamedCommands):
    """Lists the commands without importing them, and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


app = typer.Typer(
    name="holdfast",
    help="If the input of a transformer moves by at most eps, how far can its output move, and can you prove it?",
    cls=_Group,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

# Older releases of typer take this class from click, newer ones carry their own; only the subclass has a public name.
_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_OUT_OF_MEMORY = "out of memory; use fewer inputs or tokens, or --guarantee numerical"


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Runs the command line: status 0, 2 with one line on bad input, or 130 when interrupted."""
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # what matters of it, the commands say themselves
    wait_asleep()  # before a command imports torch
    try:
        status = app(standalone_mode=False)
    except HoldfastError as error:
        _fail(str(error))
    except _USAGE_ERROR as error:
        _fail(error.format_message().replace(": Value error, ", ": "))  # as newer releases of typer begin
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted before anything was finished", status=130)
    except MemoryError:
        _fail(_OUT_OF_MEMORY)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        _fail(f"{where}{error.strerror or error}")
    except RuntimeError as error:
        if "allocate memory" not in str(error) and type(error).__name__ != "OutOfMemoryError":  # torch's
            raise
        _fail(_OUT_OF_MEMORY)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int = 2) -> NoReturn:
    typer.echo(f"holdfast: {' '.join(message.split())}", err=True)
    sys.exit(status)
