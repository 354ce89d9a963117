"""The page of a run, as text and in a real browser; the table and the figure."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from browser import Browser, missing
from holdfast import InputError
from holdfast.certification import certify, merge, read_examples
from holdfast.report.certificate import render
from holdfast.report.changes import MOST, Thumbnail, changes
from holdfast.results import Certificate, CertificationRun, RadiusEstimate, Target

NASTY = "</script><script>window.broken = true</script>"


def made_up(count: int = 20, method: str = "best", factor: float = 0.5, **changes: object) -> CertificationRun:
    """Attack radii i/10 for i = 1, 2, …, the proved ones a factor below; every tenth input is answered wrongly."""
    records = tuple(
        Certificate(
            index=i,
            label=i % 10,
            prediction=i % 10 if i % 10 else 5,
            margin=1.0 + i,
            radius=factor * i / 10,
            method=method,
            guarantee="proved",
            attack_radius=i / 10,
            seconds=0.25,
        )
        for i in range(1, count + 1)
    )
    settings = {"weights": "w" * 64, "data": "d" * 64, "method": method, "guarantee": "proved", "holdfast": "0.1.0"}
    values = {
        "model": "made up",
        "data": "numbers",
        "radii": (0.3, 1.0),
        "records": records,
        "missing": (),
        "settings": settings,
        "fingerprint": "f" * 64,
        "command": "holdfast certify made-up",
    }
    return CertificationRun(**values | changes)  # type: ignore[arg-type]


# -- on the terminal and as text


def test_the_table_rounds_outward() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(replace(made_up(7), radii=(0.3,)).table())
    text = capture.get()
    assert re.search(r"0\.3 .* 28\.5 % .* 57\.2 %", text)  # 2/7 rounded down, 4/7 rounded up
    assert "7 of 7 inputs. Median certified radius 0.2, of the attack 0.401." in " ".join(text.split())


def test_print_shows_the_table() -> None:
    text = str(made_up(7).table())
    assert "accuracy under l2" in " ".join(text.split())
    assert re.search(r"│ +0\.3 │ +28\.5 % │ +57\.2 % │", text)


def test_a_table_shows_runs_side_by_side() -> None:
    console = Console(width=100)
    lofast = replace(made_up(7, method="lofast", factor=0.1), radii=(0.05,))
    with console.capture() as capture:
        console.print(made_up(7).table(lofast))
    text = " ".join(capture.get().split())
    assert re.search(r"best, proved .* lofast, proved .* attack", text)
    assert re.search(r"0\.3 .* 28\.5 % .* 0\.0 % .* 57\.2 %", text)
    assert re.search(r"0\.05 .* 100\.0 % .* 42\.8 % .* 100\.0 %", text)
    assert "Median certified radius 0.2 (best), 0.04 (lofast), of the attack 0.401." in text


def test_the_figure_has_a_line_for_each_run_and_the_attack(tmp_path: Path) -> None:
    figure = made_up().plot(made_up(method="lofast", factor=0.1))
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert [label.split(":")[-1].strip() for label in labels if "certified" in label] == [
        "best, proved",
        "lofast, proved",
    ]
    assert any("attack" in label for label in labels)
    figure.savefig(tmp_path / "curve.png")


def test_runs_of_different_models_are_not_shown_together() -> None:
    other = made_up()
    other = replace(other, settings={**other.settings, "weights": "x" * 64})
    with pytest.raises(InputError, match="runs with different weights cannot be shown side by side"):
        render([made_up(), other])
    with pytest.raises(InputError, match="has no record yet"):
        render([made_up(records=(), missing=(1,))])


def test_nothing_a_user_wrote_becomes_markup_and_nothing_is_fetched() -> None:
    page = render([made_up(model=NASTY, data=NASTY, command=NASTY)])
    assert page.count("<script") == page.count("</script>") == 2
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert len(json.loads(data[1])["runs"][0]["records"]) == 20


def test_what_is_missing_or_no_certificate_is_said() -> None:
    assert "20 of 23 inputs are done" in render([made_up(missing=(21, 22, 23))])
    numerical = tuple(
        RadiusEstimate(**{**vars(record), "guarantee": "numerical", "side": "estimate"})  # type: ignore[arg-type]
        for record in made_up().records
    )
    run = made_up(records=numerical)
    page = render([replace(run, settings={**run.settings, "guarantee": "numerical"})])
    assert "No certificate." in page
    assert "No certificate." not in render([made_up()])


def test_targets_are_passed_or_missed(tmp_path: Path) -> None:
    run = made_up()
    reached, missed = Target(0.65, 0.3), Target(0.66, 0.3)
    assert (run.meets(reached), run.meets(missed)) == (True, False)
    assert not replace(run, missing=(21,)).meets(reached)
    page = render([run], [reached, missed])
    assert page.count("✓ passed") == page.count("✗ failed") == 1
    run.to_junit(tmp_path / "junit.xml", reached, missed)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.find("failure") is None for case in suite] == [True, False]
    with pytest.raises(InputError, match="the accuracy of a target is 95; expected a share"):
        Target(95, 0.3)


def with_changes(run: CertificationRun, inputs: dict[int, Tensor | tuple[str, ...]], shape: tuple[int, ...]) -> Any:
    """The run with these inputs, each of which is changed most at its first row."""
    delta = torch.full(shape, 0.01)
    delta[0] = -0.1
    records = tuple(replace(record, perturbation=delta) for record in run.records)
    return replace(run, records=records, inputs=inputs)


def test_pictures_are_shown_with_their_nearest_change_and_the_difference() -> None:
    run = made_up(40)
    pictures = {record.index: torch.rand(3, 8, 8) for record in run.records}
    run = with_changes(run, pictures, (24, 8))
    shown = changes(run)
    assert len(shown) == MOST
    assert [change.title.split(",")[0] for change in (shown[0], shown[-1])] == ["Input 1", "Input 39"]
    assert [picture.title for picture in shown[0].pictures] == ["input", "changed", "difference × 5"]
    expected = (
        "No change up to 0.05 alters the answer; this one of 0.101 does; it moves no pixel by more than 26 of 255"
    )
    assert shown[0].caption.startswith(expected)
    assert decoded(shown[0].pictures[0]) == pytest.approx((255 * pictures[1]).round(), abs=1)
    difference = decoded(shown[0].pictures[2])
    assert (float(difference.min()), float(difference[1].min())) == (0, pytest.approx(127.5 + 12.75, abs=1))
    page = render([run])
    assert page.count("<img src=") == 3 * MOST
    assert len(page) < 150_000
    part = replace(run, settings={**run.settings, "perturb": "patch:0,0,2,2"})
    assert all(len(change.pictures) == 1 for change in changes(part))
    assert "what changes their answers" not in render([made_up(40)])


def decoded(picture: Thumbnail) -> Tensor:
    """(3, h, w) from the data URI."""
    content = base64.b64decode(picture.source.partition(",")[2])
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1).float()


def test_sentences_are_shown_with_the_word_that_moves() -> None:
    sentence = ("a", NASTY, "film")
    run = with_changes(made_up(5), dict.fromkeys(range(1, 6), sentence), (8, 4))
    words = changes(run)[0].words
    assert [word.text for word in words] == [*sentence, "padding"]
    assert [word.top for word in words] == [True, False, False, False]
    assert words[0].share == "93 %"
    assert "“a” moves most" in changes(run)[0].caption
    one = with_changes(replace(run, settings={**run.settings, "perturb": "word:2"}), run.inputs, (1, 4))
    assert [word.text for word in changes(one)[0].words if word.top] == ["film"]
    assert render([run]).count("<script") == 2


def test_what_is_neither_a_picture_nor_a_sentence_is_not_shown() -> None:
    def shown(inputs: Tensor) -> int:
        return len(read_examples([(x, 0) for x in inputs]).shown())

    assert [shown(torch.rand(2, *shape)) for shape in ((1, 8, 8), (8, 8), (3, 4, 4))] == [2, 2, 2]
    assert [shown(torch.rand(2, *shape)) for shape in ((5, 8, 8), (16,), (3, 2, 8))] == [0, 0, 0]
    assert shown(torch.randn(2, 8, 8)) == 0


def test_a_page_of_joined_files_shows_the_inputs_or_says_that_it_does_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval(), torch.rand(2, 4, 4)
    labels, file = model(x).argmax(-1), tmp_path / "run.jsonl"
    certify(model, (x, labels), 0.1, "gains", out=file, progress=False)
    assert set(merge([file], data=(x, labels)).inputs) == {0, 1}
    assert "The inputs are not shown" not in render([merge([file], data=(x, labels))])
    with pytest.raises(InputError, match="'given inputs' are not those that the run was made from"):
        merge([file], data=(1 - x, labels))
    assert "The inputs are not shown" in render([merge([file])])


# -- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(browser: Browser, folder: Path, *runs: CertificationRun, width: int = 1200, scheme: str = "light") -> None:
    page = folder / "page.html"
    runs[0].to_html(page, *runs[1:])
    browser.resize(width)
    browser.prefer(scheme)
    browser.open(page)


def text(browser: Browser, selector: str) -> str:
    return str(browser.run("return document.querySelector(arguments[0]).textContent", selector))


def count(browser: Browser, selector: str) -> int:
    return int(browser.run("return document.querySelectorAll(arguments[0]).length", selector))


def choose(browser: Browser, name: str, place: int) -> None:
    script = (
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))"
    )
    browser.run(script, f"pick-{name}", place)


def test_everything_is_drawn(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, made_up(), made_up(method="lofast", factor=0.1))
    assert browser.log() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert count(browser, "#curve path.line") == 3
    assert count(browser, "#table tbody tr") == 20
    assert count(browser, "#table tr.wrong") == 2
    assert count(browser, "#radii tbody tr") == 3
    assert "holdfast certify made-up" in text(browser, "pre")
    assert "f" * 64 in text(browser, "main")
    unnamed = "svg[role]:not([aria-label]), button:not([aria-label]):empty, select:not(label select)"
    assert count(browser, unnamed) == 0


def test_the_numbers_are_those_of_the_run(browser: Browser, tmp_path: Path) -> None:
    best, lofast = made_up(), made_up(method="lofast", factor=0.1)
    show(browser, tmp_path, best, lofast)
    answer = text(browser, "#answer")
    assert "Of 20 inputs 90.0 % are answered correctly" in answer
    assert "up to 0.3, it is proved that at least 65.0 % stay correct; after an attack, at most 75.0 % are." in answer
    cells = "return [...document.querySelectorAll('#radii tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    found = browser.run(cells)
    for (radius, *shares), expected in zip(found, (0.0, 0.3, 1.0), strict=True):
        assert float(radius) == expected
        wanted = (best.accuracy(expected), lofast.accuracy(expected), best.attacked(expected))
        assert [float(share.removesuffix(" %")) for share in shares] == pytest.approx([100 * w for w in wanted])
    choose(browser, "radius", 1)
    assert "up to 1, it is proved that at least 0.0 %" in text(browser, "#answer")
    choose(browser, "run", 1)
    assert "at least 0.0 % stay correct" in text(browser, "#answer")
    assert "(lofast)" in text(browser, "#ratio-text")


def test_the_curve_and_the_histogram_explain_themselves(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, made_up())
    browser.run("document.querySelector('#curve .hit').focus()")
    assert "certified: best, proved: 90.0 %" in text(browser, "#tip")
    browser.press("ArrowRight")
    assert "after the attack" in text(browser, "#tip")
    browser.hover("#ratio .bar:nth-of-type(11)")
    assert text(browser, "#tip") == "0.5 to 0.55: 18 inputs"


def test_the_rows_sort(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, made_up())
    first = "return document.querySelector('#table tbody td').textContent"
    assert browser.run(first) == "1"
    click = "document.querySelectorAll('#table th button')[arguments[0]].click()"
    browser.run(click, 4)
    assert browser.run(first) == "20"
    browser.run(click, 4)
    assert browser.run(first) == "1"


def test_runs_without_an_attack_and_without_a_find(browser: Browser, tmp_path: Path) -> None:
    alone = made_up()
    none = tuple(replace(record, attack_radius=None) for record in alone.records)
    show(browser, tmp_path, replace(alone, records=none))
    assert browser.log() == []
    assert count(browser, "#curve path.line") == 1
    assert browser.run("return document.getElementById('ratio-card').hidden")
    never = tuple(replace(record, attack_radius=math.inf) for record in alone.records)
    show(browser, tmp_path, replace(alone, records=never, radii=(0.0,)))
    assert browser.log() == []
    assert "none found" in text(browser, "#table")


@pytest.mark.parametrize(("width", "scheme"), [(w, s) for w in (400, 1280) for s in ("light", "dark")])
def test_nothing_overflows(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    runs = [
        made_up(100, method, factor) for method, factor in (("best", 0.5), ("margin-gradient", 0.3), ("lofast", 0.1))
    ]
    show(browser, tmp_path, *runs, width=width, scheme=scheme)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.log() == []


def test_the_words_explain_themselves(browser: Browser, tmp_path: Path) -> None:
    run = with_changes(made_up(3), dict.fromkeys(range(1, 4), ("a", "good", "film")), (3, 4))
    show(browser, tmp_path, run, width=400, scheme="dark")
    browser.hover("#inputs .token")
    assert text(browser, "#tip") == "“a”: 98 % of the change"
    browser.run("document.querySelector('#inputs .token').focus()")
    browser.press("ArrowRight")
    assert text(browser, "#tip") == "“good”: 0.98 % of the change"
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert browser.log() == []


def test_the_page_opens_where_the_curves_separate(browser: Browser, tmp_path: Path) -> None:
    run = made_up(radii=(1e-7, 0.5), data="cifar10")
    show(browser, tmp_path, run, made_up(method="lofast", factor=1e-6, radii=(0.5,), data="cifar10"))
    assert "up to 0.5, it is proved" in text(browser, "#answer")  # only the inputs tell that they are pictures
    assert count(browser, "#curve circle.end") == 3
    assert "nothing beyond" in browser.run("return document.querySelector('#curve circle.run-1').dataset.tip")
    assert "no more is true" not in text(browser, "body")
    for side, words in (
        (8, "15.9 of 255 grey levels in each of 64 pixels"),
        (200, "one of 255 grey levels in 16300 pixels"),
    ):
        show(browser, tmp_path, replace(run, inputs={1: torch.rand(side, side)}))
        assert f"up to 0.5 (as far as {words}, or 128 of 255 grey levels in a single" in text(browser, "#answer")
