"""What stands in a table of conformance tests, and what should."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def in_the_table(kit: type[Kind], table: Mapping[str, Any]) -> list[Kind]:
    """The rows below a kit, of the names of a module."""
    rows = [item for name, item in table.items() if name.startswith("Test") and issubclass(item, kit)]
    return [row() for row in rows]


def concrete(base: type[Kind]) -> set[type[Kind]]:
    """Every concrete class of the package below `base`."""
    below = [base, *(sub for direct in base.__subclasses__() for sub in concrete(direct))]
    return {kind for kind in below if not inspect.isabstract(kind) and kind.__module__.startswith("holdfast.")}
