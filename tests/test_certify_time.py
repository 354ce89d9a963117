"""Time under control: what is quick comes first, deadlines hold inside long work, and what was left out is said."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from certify_cases import labelled, linear_network
from holdfast.attacks.minimal import MinimalAttack
from holdfast.certification import certify, read, verify
from holdfast.compositions import best as best_composition
from holdfast.compositions import certify_inputs, compositions
from holdfast.compositions.search import Reached
from holdfast.network.centre import Centre, _Clock
from holdfast.results import CertificationRun
from relu_cases import images

ATTACK = MinimalAttack(restarts=2, steps=10)


def linear_run(path: Path, **options: Any) -> CertificationRun:
    return certify(linear_network(), labelled(4), [0.05], out=path, **{"attack": ATTACK} | options)


def failures(path: Path) -> tuple[str, ...]:
    return verify(path, linear_network(), labelled(4), sample=None).failures


def test_time_that_is_over_is_said_and_such_files_stand(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run = linear_run(path, seconds_per_input=1e-9)
    assert all(record.radius == 0 < (record.attack_radius or 0) for record in run.records)
    assert all(record.prediction >= 0 for record in run.records)
    assert all("the time was over before" in note and count == 4 for note, count in run.left_out().items())
    assert failures(path) == ()
    run.to_html(tmp_path / "page.html")
    assert "Time was short." in (tmp_path / "page.html").read_text(encoding="utf-8")
    plenty = linear_run(tmp_path / "plenty.jsonl", seconds_per_input=60.0, attack=False)
    assert failures(tmp_path / "plenty.jsonl") == ()
    assert all(record.radius > 0 for record in plenty.records)
    assert plenty.left_out() == {}


def test_best_begins_with_what_is_quick_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until the quick composition has answered, and then the time is over."""
    tried: list[str] = []
    for method in compositions.values():
        kind = type(method)
        if method.name != "best" and "_search" not in vars(kind):
            plain = kind._search  # type: ignore[attr-defined]
            monkeypatch.setattr(kind, "_search", _noting(plain, tried), raising=False)
    monkeypatch.setattr(Centre, "overdue", property(lambda self: bool(tried)))
    (one,) = certify_inputs(linear_network(), labelled(1).inputs.double(), seconds=1.0)
    assert tried == ["gains"]
    assert one.unfinished[-1].startswith("the time was over before forms, telescoped")


def _noting(plain: Callable[..., Any], tried: list[str]) -> Callable[..., Any]:
    def search(self: Any, *given: Any) -> Any:
        found = plain(self, *given)
        tried.append(self.name)
        return found

    return search


def test_a_quick_composition_that_is_slow_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(self: Any, centre: Centre, *given: Any) -> Reached:
        while not centre.numerical.overdue:
            time.sleep(0.01)
        return Reached(torch.zeros_like(centre.margin), centre.margin, cut=True)

    monkeypatch.setattr(type(compositions["gains"]), "_search", waiting, raising=False)
    began = time.monotonic()
    (one,) = certify_inputs(linear_network(), labelled(1).inputs.double(), seconds=8.0)
    assert time.monotonic() - began < 7
    assert one.radius > 0
    assert one.method != "gains"
    assert one.unfinished == ("the time was over before the search of gains had ended",)


def test_the_quick_composition_has_what_the_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut off at first, and nobody else proves anything."""
    kept = {name: compositions[name] for name in ("layerwise", "gains", "best")}
    monkeypatch.setattr(compositions, "_items", kept)
    tried: list[str] = []

    def searching(self: Any, centre: Centre, *given: Any) -> Reached:
        tried.append(self.name)
        radius = torch.full_like(centre.margin, 0.1 if len(tried) > 2 else 0.0)
        return Reached(radius, centre.margin, cut=len(tried) == 1)

    for name in ("layerwise", "gains"):
        monkeypatch.setattr(type(compositions[name]), "_search", searching, raising=False)
    (one,) = certify_inputs(linear_network(), labelled(1).inputs.double(), seconds=60.0)
    assert tried == ["gains", "layerwise", "gains"]
    assert (one.method, one.radius) == ("gains", 0.1)


def test_on_large_attention_best_answers_soon_and_goes_on_only_where_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_composition, "_MANY", 4)
    model, data = images(1)
    run = certify(model, data, [0.01])
    assert run.records[0].method == "gains"
    assert [note for note in run.left_out() if note.startswith("forms may reach farther, but takes minutes")]
    patient = certify(model, data, [0.01], seconds_per_input=600.0)
    assert patient.records[0].method == "forms"
    assert patient.records[0].radius > run.records[0].radius > 0
    assert patient.left_out() == {}


def test_a_deadline_holds_in_the_midst_of_long_work_and_what_was_proved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = images(1)
    clock = itertools.count()
    monkeypatch.setattr(_Clock, "overdue", lambda self: next(clock) < 0)
    whole = certify(model, data, [0.01], "forms", seconds_per_input=1.0).records[0].radius
    total, radii = next(clock), []
    for asked in (1, total // 20, total * 9 // 10):
        clock = itertools.count()
        monkeypatch.setattr(_Clock, "overdue", lambda self, n=asked, clock=clock: next(clock) > n)
        (record,) = certify(model, data, [0.01], "forms", seconds_per_input=1.0).records
        assert record.unfinished == ("the time was over before the search of forms had ended",)
        assert next(clock) < asked + 50  # hardly anything was begun after that
        assert torch.is_grad_enabled()  # what was given up left no mode behind
        radii.append(record.radius)
    assert radii[0] == 0
    assert sorted(radii) == radii
    assert 0 < radii[-1] <= whole


def test_each_input_is_on_the_disk_when_it_is_done(tmp_path: Path) -> None:
    path, seen = tmp_path / "run.jsonl", []
    linear_run(path, progress=lambda done, planned: seen.append((done, len(read(path).records))))
    assert seen == [(i, i) for i in range(5)]
