"""After the build: every link of every page leads somewhere, and no page loads anything from another host."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

LOG = logging.getLogger(__name__)
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("object", "data")}


class Page(HTMLParser):
    """The anchors of a page, what it links to and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src", "data") and value:
                self.links.append(value)
                if (tag, name) in LOADED:
                    self.loads.append(value)


def broken(site: Path) -> list[str]:
    """One line for every link that leads nowhere and for everything that is loaded from another host."""
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if "_static" not in path.parts}
    found = []
    for path, page in pages.items():
        here = path.relative_to(site)
        found += [f"{here} loads {url}" for url in page.loads if urlsplit(url).netloc]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{here} links to {link}, which does not exist")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{here} links to {link}; the page has no such place")
    return found


def _check(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        for line in broken(Path(app.outdir).resolve()):
            LOG.warning(line, type="links")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", _check, priority=900)  # after everything has been copied
    return {"parallel_read_safe": True}
