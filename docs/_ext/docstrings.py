"""Docstrings as they are written in the code, with mathematics in Unicode, made safe for reStructuredText."""

from __future__ import annotations

import re

from citations import cite
from sphinx.application import Sphinx

PROOF = re.compile(r"`?docs/math/([\w-]+)\.md`?")


def plain(line: str, folder: str = "/math") -> str:
    """One line without markup but for `names`, citations and links to proofs."""
    if line.lstrip().startswith(">>>") or line.lstrip().startswith("..."):
        return line
    line = re.sub(r"([*|\\])", r"\\\1", line)
    line = re.sub(r"(\w)_(?=[\W]|$)", r"\1\\_", line)
    return PROOF.sub(rf":doc:`{folder}/\1`", cite(line, ":cite:"))


def _process(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    lines[:] = [plain(line) for line in lines]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process, priority=400)  # before napoleon reads the sections
    return {"parallel_read_safe": True}
