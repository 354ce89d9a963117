"""The command line: typer commands that mirror the API one to one."""

from holdfast.cli.app import app, main

__all__ = ["app", "main"]
