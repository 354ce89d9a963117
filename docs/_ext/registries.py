"""Directives that write pages from what is registered: bounds, compositions and the public names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from docstrings import plain
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import holdfast
from holdfast.compositions import compositions


def entry(method: object, kind: str) -> Iterator[str]:
    """A method's section: what it says of itself, and where that is proved."""
    name = method.name
    yield from (f".. _{kind}-{name}:", "", name, "~" * len(name), "")
    yield from (plain(line) for line in (inspect.getdoc(type(method)) or "").splitlines())
    yield ""
    guarantees = getattr(method, "guarantees", ("proved", "numerical"))
    facts = {
        "Guarantees": ", ".join(guarantees),
        "Cost": method.cost,
        "Assumptions": method.assumptions,
        "Reference": method.reference.replace("holdfast", "this project"),
    }
    yield from (f":{fact}: {plain(text)}" for fact, text in facts.items())
    yield ""


class Bounds(SphinxDirective):
    """`.. bounds:: ball at x`: the registered bounds of that scope."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        scope = self.arguments[0]
        chosen = [bound for bound in holdfast.list_bounds() if bound.scope == scope]
        if not chosen:
            raise self.error(f"no bound has the scope {scope!r}")
        return _sections(self, (entry(bound, scope.replace(" ", "-")) for bound in chosen))


class Compositions(SphinxDirective):
    """`.. compositions::`: the registered compositions."""

    def run(self) -> list[nodes.Node]:
        return _sections(self, (entry(method, "composition") for method in compositions.values()))


class PublicNames(SphinxDirective):
    """`.. public-names:: functions`, `classes` or `errors`: those among the public names, with their docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kinds = {"functions": [], "classes": [], "errors": []}
        for name in sorted(holdfast.__all__, key=str.lower):
            thing = getattr(holdfast, name)
            error = isinstance(thing, type) and issubclass(thing, Exception)
            kinds["errors" if error else "classes" if isinstance(thing, type) else "functions"].append(name)
        kind = self.arguments[0]
        lines = [".. currentmodule:: holdfast", ""]
        for name in kinds[kind]:
            if not callable(getattr(holdfast, name)):
                lines += [f".. autodata:: {name}", ""]
            elif kind == "functions":
                lines += [f".. autofunction:: {name}", ""]
            elif kind == "classes":
                lines += [f".. autoclass:: {name}", "   :members:", ""]
            else:
                lines += [f".. autoexception:: {name}", "   :no-members:", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _sections(directive: SphinxDirective, entries: Iterable[Iterable[str]]) -> list[nodes.Node]:
    text = "\n".join(line for section in entries for line in section)
    return directive.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("bounds", Bounds)
    app.add_directive("compositions", Compositions)
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True}
