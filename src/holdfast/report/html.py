"""What the pages share: one HTML file with its style and script inside, which loads nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup


@cache
def template(name: str) -> Template:
    """The template NAME.html, with the common style and the script NAME.js after the common one."""
    loader = PackageLoader("holdfast.report")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)

    def source(file: str) -> Markup:
        return Markup(loader.get_source(environment, file)[0])

    environment.globals |= {"style": source("page.css"), "script": source("shared.js") + source(f"{name}.js")}
    return environment.get_template(f"{name}.html")


def script_data(payload: Mapping[str, object]) -> Markup:
    """JSON that is safe inside a script element: no text in it can end the element."""
    text = json.dumps(payload, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
