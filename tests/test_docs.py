"""The site that `make docs` builds: complete, with formulas that are drawn, and without a word to another host."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import holdfast
from browser import Browser, missing

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "docs"
PROOFS = sorted(f"math/{path.stem}" for path in (ROOT / "docs" / "math").glob("*.md") if path.stem != "index")
PAGES = ["index", "methods/bounds", "gallery/plot_01_bound_and_attack", "api", *PROOFS]

built = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="`make docs` has not been run")


@pytest.fixture(scope="module")
def links() -> ModuleType:
    """The build's own check of links."""
    pytest.importorskip("sphinx")
    found = importlib.util.spec_from_file_location("links", ROOT / "docs" / "_ext" / "links.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_broken_links_and_outside_hosts_are_found(links: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.html").write_text('<h1 id="here">There</h1>')
    good = '<a href="other.html#here"><a href="https://example.org/"><a href="#">'
    (tmp_path / "index.html").write_text(good)
    assert links.broken(tmp_path) == []
    bad = '<a href="none.html"><a href="other.html#nowhere"><script src="https://cdn.example.org/x.js"></script>'
    (tmp_path / "index.html").write_text(good + bad)
    found = links.broken(tmp_path)
    assert len(found) == 3
    assert sum("loads https://cdn.example.org/x.js" in line for line in found) == 1


@built
def test_every_name_bound_and_example_has_its_place(links: ModuleType) -> None:
    anchors = {
        page: links.Page((SITE / f"{page}.html").read_text("utf-8")).anchors for page in ("api", "methods/bounds")
    }
    assert {f"holdfast.{name}" for name in holdfast.__all__} <= anchors["api"]
    assert {f"{b.scope.replace(' ', '-')}-{b.name}" for b in holdfast.list_bounds()} <= anchors["methods/bounds"]
    examples = [path.stem for path in (ROOT / "examples" / "gallery").glob("plot_*.py")]
    assert len(examples) >= 8
    for name in examples:
        assert f"sphx_glr_{name}_001.png" in (SITE / "gallery" / f"{name}.html").read_text("utf-8")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@built
@pytest.mark.parametrize("page", PAGES)
def test_pages_are_drawn_without_the_network(browser: Browser, page: str) -> None:
    browser.resize(1280)
    browser.open(SITE / f"{page}.html")
    formulas = int(browser.run("return document.querySelectorAll('span.math, div.math').length"))
    assert (formulas > 10) == (page in PROOFS)
    drawn = "return document.querySelectorAll('mjx-container').length"
    until = time.monotonic() + 30
    while browser.run(drawn) < formulas and time.monotonic() < until:
        time.sleep(0.1)
    assert browser.run(drawn) == formulas
    assert browser.run("return [...document.querySelectorAll('mjx-merror')].map(e => e.textContent)") == []
    assert browser.run("return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)") == []
    assert browser.log() == []
    assert [url for url in browser.requests() if url.startswith("http")] == []
    for width in (1280, 400):
        browser.resize(width)
        assert browser.run("return document.documentElement.scrollWidth") <= width
