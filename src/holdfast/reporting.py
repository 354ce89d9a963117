"""How a result asks for its table, plot or page without knowing who draws them.

The package names the modules that do, once; each is imported when a result first asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from html import escape
from types import ModuleType

_WRITERS: dict[str, str] = {}


def register(kind: str, module: str) -> None:
    """Names the module that writes about results of a kind."""
    _WRITERS[kind] = module


def writer(kind: str) -> ModuleType:
    """The module that writes about results of a kind."""
    return importlib.import_module(_WRITERS[kind])


class Shown:
    """A result shown as one short line at a prompt and as a small table in a notebook; `facts` says what to show."""

    def facts(self) -> Mapping[str, object]:
        """What a reader wants to know first, by name."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}: {value}' for name, value in self.facts().items())})"

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in self.facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{''.join(rows)}</table>"
