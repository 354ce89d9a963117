"""Tables of results: what `print` shows is what rich shows."""

from __future__ import annotations

from typing import final

from rich import table
from rich.console import Console


@final
class Table(table.Table):
    """A rich table whose text is the table itself, in the width of the terminal.

    Example:
        >>> print(holdfast.analyze(model, inputs).table())
    """

    def __str__(self) -> str:
        console = Console()
        with console.capture() as drawn:
            console.print(self)
        return drawn.get().rstrip()
