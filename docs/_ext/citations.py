"""Keys of the bibliography, written as plain words in documents and docstrings, become links to their entry."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

KEYS = re.findall(r"^@\w+\{(\w+),", (Path(__file__).parents[1] / "references.bib").read_text("utf-8"), re.MULTILINE)
NAMED = re.compile(rf"(?<![\w/{{}}:`])`?\b({'|'.join(KEYS)})\b`?(?![\w`])")
FENCED = re.compile(r"(^```.*?^```|^(?: {4}|\t).*?$)", re.MULTILINE | re.DOTALL)


def cite(text: str, role: str) -> str:
    """The text with every key as a citation; `role` is the role's opening, in Markdown or in reStructuredText."""
    return NAMED.sub(lambda key: f"{role}`{key[1]}`", text)


def _read(app: Sphinx, document: str, source: list[str]) -> None:
    if Path(app.env.doc2path(document)).suffix == ".md" and document != "references":
        parts = FENCED.split(source[0])
        source[0] = "".join(part if i % 2 else cite(part, "{cite}") for i, part in enumerate(parts))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
