"""The page of an analysis, as text and in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from browser import Browser, missing
from holdfast.analysis import Analysis, AnalyzedInput, AnalyzedLayer
from holdfast.analysis.inputs import data_uri
from holdfast.report.page import render

NASTY = "</script><script>window.broken = true</script>"
REASON = "bound 'cov' does not apply: the layer has rotary positions, and the proof does not cover them"


def made_up(
    layers: int = 3, heads: int = 4, words: tuple[str, ...] = ("the", "fox", "runs"), **changes: object
) -> Analysis:
    """An analysis of two texts with round numbers: the slope of layer i is 2 + i, and token i has a share of i + 1."""
    n = len(words)
    total = n * (n + 1) / 2
    view = AnalyzedInput(words, (False,) * n)
    padded = AnalyzedInput((*words[:-1], ""), (*(False,) * (n - 1), True))
    rows = [tuple((1 + i + j) / 10 for j in range(heads)) for i in range(layers)]
    found = [
        AnalyzedLayer(
            index=i,
            name=f"encoder.{i}.attention",
            layer=f"{heads} heads, width 64",
            rebuild_error=2.5e-7,
            slope=(2.0 + i, 1.0),
            slope_upper=None,
            head_slope=(rows[i], rows[i]),
            softmax_norm=(rows[i], rows[i]),
            softmax_g1=(rows[i], rows[i]),
            attention_norm=(rows[i], rows[i]),
            entropy=(rows[i], rows[i]),
            bound=(((2 + i) * 0.0123411, (2 + i) * 0.2), (0.02, 0.3)),
            bound_note="cov",
            attack=(((2 + i) * 0.0101199, (2 + i) * 0.1), (0.01, 0.1)),
            energy=(tuple((j + 1) / total for j in range(n)), (*(1 / (n - 1),) * (n - 1), 0.0)),
            seconds=0.5,
        )
        for i in range(layers)
    ]
    values = {
        "model": "made up",
        "eps": (0.01, 0.1),
        "guarantee": "numerical",
        "method": "cov",
        "attack": "Projected ascent.",
        "inputs": (view, padded),
        "layers": tuple(found),
        "planned": layers,
        "notes": (),
        "versions": {"holdfast": "0.1.0"},
        "command": "holdfast analyze made-up",
        "seconds": 1.5,
    }
    return Analysis(**values | changes)  # type: ignore[arg-type]


# -- as text


def test_nothing_a_user_wrote_becomes_markup() -> None:
    view = AnalyzedInput((NASTY, "<b>", "&amp;"), (False,) * 3)
    analysis = made_up(model=NASTY, command=NASTY, notes=(NASTY,), versions={"holdfast": NASTY}, inputs=(view, view))
    layers = tuple(replace(layer, name=NASTY, bound_note=NASTY, layer=NASTY) for layer in analysis.layers)
    page = render(replace(analysis, layers=layers))
    assert page.count("<script") == 2
    assert page.count("</script>") == 2
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["inputs"][0]["tokens"][0] == NASTY


def test_the_page_asks_the_network_for_nothing() -> None:
    page = render(made_up())
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address that is fetched


def test_words_are_joined_as_they_were() -> None:
    pieces = {
        ("[CLS]", "un", "##broken", "word"): [False, False, True, False],
        ("Ġone", "two", "Ġthree"): [False, True, False],
        ("<s>", "▁one", "two"): [False, False, True],
        ("[CLS]", "one", " two", "three", "[SEP]"): [False, False, False, True, False],
    }
    for words, glued in pieces.items():
        view = AnalyzedInput(words, (False,) * len(words))
        page = render(made_up(words=words, inputs=(view, view)))
        data = re.search(r'id="data">(.*?)</script>', page)
        assert data is not None
        found = json.loads(data[1])["inputs"][0]
        assert found["glued"][1:] == glued[1:]
        assert not any(token.startswith(("#", "Ġ", "▁", " ")) for token in found["tokens"])


def test_a_large_model_stays_small() -> None:
    page = render(made_up(30, 9, tuple(f"word{i}" for i in range(200))))
    assert len(page.encode()) < 500_000


def test_the_pages_of_the_examples_are_small_and_whole() -> None:
    pages = list((Path(__file__).parents[1] / "examples" / "pages").glob("*.html"))
    assert len(pages) == 3
    for page in pages:
        content = page.read_text(encoding="utf-8")
        assert len(content.encode()) < 500_000
        assert content.rstrip().endswith("</html>")


def test_what_is_missing_is_said() -> None:
    assert "3 of 5 layers were finished" in render(made_up(planned=5))
    assert "weights are random" in render(made_up(notes=("The weights are random.",)))


# -- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(browser: Browser, analysis: Analysis, folder: Path, width: int = 1200, scheme: str = "light") -> None:
    page = folder / "page.html"
    analysis.to_html(page)
    browser.resize(width)
    browser.prefer(scheme)
    browser.open(page)


def text(browser: Browser, selector: str) -> str:
    return str(browser.run("return document.querySelector(arguments[0]).textContent", selector))


def click(browser: Browser, selector: str) -> None:
    browser.run(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))", selector
    )


def count(browser: Browser, selector: str) -> int:
    return int(browser.run("return document.querySelectorAll(arguments[0]).length", selector))


def column(browser: Browser, index: int) -> list[str]:
    script = (
        "return [...document.querySelectorAll(`#table tbody td:nth-child(${arguments[0]})`)].map(c => c.textContent)"
    )
    return list(browser.run(script, index))


def test_everything_is_drawn_without_an_error_or_a_request(browser: Browser, tmp_path: Path) -> None:
    show(browser, made_up(), tmp_path)
    assert browser.log() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert count(browser, "#depth .hit") == 3
    assert count(browser, "#radii .hit") == 2
    assert count(browser, "#depth polyline.bound") == 1
    assert count(browser, "#heat td") == 12
    assert count(browser, "#tokens .token") == 6
    assert "1 × padding, not counted" in text(browser, "#tokens")
    assert "holdfast analyze made-up" in text(browser, "pre")
    unnamed = "svg[role]:not([aria-label]), button:not([aria-label]):empty, select:not(label select)"
    assert count(browser, unnamed) == 0


def test_bounds_are_rounded_up_and_attained_values_down(browser: Browser, tmp_path: Path) -> None:
    show(browser, made_up(), tmp_path)
    browser.run("const s = document.getElementById('pick-eps'); s.value = 0; s.dispatchEvent(new Event('change'))")
    assert "layer 2 moves by at most 0.01, its output moves by at most 0.0494." in text(browser, "#answer")
    assert "moves it by 0.0404" in text(browser, "#answer")  # 0.0493644 and 0.0404796


def test_choosing_a_layer_changes_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    show(browser, made_up(), tmp_path)
    assert "layer 2" in text(browser, "#answer")
    click(browser, "#depth .hit")
    assert "layer 0" in text(browser, "#answer")
    assert "layer 0" in text(browser, "#radii-text")
    assert browser.run("return document.getElementById('pick-layer').value") == "0"
    click(browser, "#heat tbody tr:nth-child(2) td")
    assert "layer 1" in text(browser, "#answer")
    click(browser, "#quantities button:nth-child(4)")
    assert text(browser, "#quantity-meaning").startswith("Entropy")
    assert count(browser, "#quantities [aria-checked=true]") == 1


def test_tooltips_open_by_pointer_and_keyboard(browser: Browser, tmp_path: Path) -> None:
    show(browser, made_up(), tmp_path)
    visible = "return !document.getElementById('tip').hidden"
    assert not browser.run(visible)
    browser.hover("#tokens .token:nth-of-type(3)")
    assert browser.run(visible)
    assert "“fox”" in text(browser, "#tip")
    assert "33 %" in text(browser, "#tip")
    browser.press("Escape")
    assert not browser.run(visible)
    browser.run("document.querySelector('#heat td').focus()")
    assert "Layer 0, head 0" in text(browser, "#tip")
    assert "‖P‖ 0.100" in text(browser, "#tip")
    browser.press("ArrowRight")
    assert "Layer 0, head 1" in text(browser, "#tip")
    browser.press("ArrowDown")
    assert "Layer 1, head 1" in text(browser, "#tip")
    assert count(browser, "#heat [tabindex='0']") == 1


def test_the_table_sorts(browser: Browser, tmp_path: Path) -> None:
    show(browser, made_up(12), tmp_path)
    assert column(browser, 1) == [str(i) for i in range(12)]
    click(browser, "#table th:nth-child(3) button")
    assert column(browser, 1) == [str(i) for i in reversed(range(12))]  # as numbers: 9 before 10
    assert browser.run("return document.querySelectorAll('#table th')[2].getAttribute('aria-sort')") == "descending"
    click(browser, "#table th:nth-child(3) button")
    assert column(browser, 1) == [str(i) for i in range(12)]


def test_light_and_dark_follow_the_system_and_the_button(browser: Browser, tmp_path: Path) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    show(browser, made_up(), tmp_path, scheme="light")
    light = browser.run(ground)
    show(browser, made_up(), tmp_path, scheme="dark")
    dark = browser.run(ground)
    assert light != dark
    click(browser, "#theme")
    assert browser.run(ground) == light
    click(browser, "#theme")
    assert browser.run(ground) == dark


def test_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    view = AnalyzedInput((NASTY, "<img src=x onerror='window.broken = true'>", "&lt;"), (False,) * 3)
    show(browser, made_up(model=NASTY, inputs=(view, view)), tmp_path)
    assert browser.run("return window.broken === undefined")
    assert NASTY in text(browser, "#tokens")
    assert "&lt;" in text(browser, "#tokens")
    assert text(browser, "h1") == NASTY
    assert browser.log() == []


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overflows(browser: Browser, tmp_path: Path, width: int) -> None:
    words = (*(f"word{i}" for i in range(199)), "a" * 120)
    analysis = made_up(30, 32, words, model="organisation/a-rather-long-name-of-a-model-that-goes-on")
    show(browser, analysis, tmp_path, width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return document.querySelector('#depth svg').getBoundingClientRect().right") <= width
    cut = (
        "return [...document.querySelectorAll('#heat td')].filter((e) => !e.innerText || e.scrollWidth > e.clientWidth)"
    )
    assert browser.run(f"{cut}.length") == 0  # every number of the heat map stays; it scrolls


def test_a_model_without_bounds_says_why_in_their_place(browser: Browser, tmp_path: Path) -> None:
    analysis = made_up()
    layers = tuple(replace(layer, bound=None, bound_note=REASON, attack=None) for layer in analysis.layers)
    show(browser, replace(analysis, layers=layers), tmp_path)
    assert browser.log() == []
    for place in ("#answer", "#figures", "#radii"):
        assert "rotary positions" in text(browser, place)
    assert count(browser, "#depth polyline.slope") == 1
    assert count(browser, "#depth polyline.bound") == 0


def test_an_image_has_its_patches_shaded(browser: Browser, tmp_path: Path) -> None:
    pixels = torch.full((8, 8, 3), 200, dtype=torch.uint8)
    words = ("class token", *(f"patch {i}" for i in range(4)))
    view = AnalyzedInput(words, (False,) * 5, data_uri(pixels), (2, 2))
    show(browser, made_up(words=words, inputs=(view, view)), tmp_path)
    assert browser.log() == []
    assert count(browser, ".picture.shaded rect") == 8
    assert browser.run("return document.querySelector('.picture img').naturalWidth") == 8
    assert "class token: 6.7 %" in text(browser, "#tokens")


def test_one_radius_and_one_layer_are_enough(browser: Browser, tmp_path: Path) -> None:
    analysis = made_up(layers=1, eps=(0.1,))
    layer = analysis.layers[0]
    only = replace(layer, bound=((0.4,), (0.4,)), attack=((0.0,), (0.1,)))
    show(browser, replace(analysis, layers=(only,)), tmp_path)
    assert browser.log() == []
    assert "at most 0.4" in text(browser, "#answer")
    assert count(browser, "#radii .hit") == 1
