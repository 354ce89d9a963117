"""The demo: a model certified on real digits, and its layers one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.certification import read
from holdfast.cli import demo, main
from holdfast.models import DigitsViT
from holdfast.report.numbers import up


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        return " ".join(self.stdout.split())


Run = Callable[..., Done]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the demo in this process, into a folder of its own."""

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["holdfast", "demo", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capfd.readouterr()
        return Done(int(exit_.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is soon certified."""
    torch.manual_seed(0)
    model = DigitsViT(depth=1, width=4, heads=1).eval().requires_grad_(False)
    monkeypatch.setattr(demo, "load_digits_vit", lambda: model)


def test_digits_are_certified_beside_lofast_and_an_attack(run: Run, tiny: None, tmp_path: Path) -> None:
    done = run("--inputs", "1")
    assert done.returncode == 0, done.stderr
    assert "digits on digits-32: accuracy under l2 perturbations" in done.words
    assert "1 of 1 inputs. Median certified radius" in done.words
    for name in ("html", "png", "svg", "json"):
        assert str(tmp_path / f"demo.{name}") in done.stdout
        assert (tmp_path / f"demo.{name}").stat().st_size > 1000
    best, lofast = (read(tmp_path / f"demo-{name}.jsonl").run() for name in ("best", "lofast"))
    for better, paper in zip(best.records, lofast.records, strict=True):
        assert better.attack_radius is not None
        assert 0 < paper.radius < better.radius < better.attack_radius
    told = json.loads((tmp_path / "demo.json").read_text())
    assert [each["settings"]["method"] for each in told["runs"]] == ["best", "lofast"]


def test_an_interrupted_demo_goes_on_and_a_finished_one_begins_anew(
    run: Run, tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient:
        """Presses Ctrl-C once the first input is done."""

        done, planned = 0, 0

        def __call__(self, done: int, planned: int) -> None:
            self.done, self.planned = done, planned
            if done:
                raise KeyboardInterrupt

    @contextmanager
    def telling(title: str) -> Iterator[Impatient]:
        yield Impatient()

    monkeypatch.setattr(demo, "_METHODS", {"lofast": 1})
    file = tmp_path / "demo-lofast.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(demo, "telling", telling)
        done = run("--inputs", "2")
    assert done.returncode == 130
    assert "1 of 2 digits are certified by lofast; the same command resumes from there" in done.stderr
    assert "1 of 2 inputs" in done.words
    first = file.read_text()
    assert run("--inputs", "2", "--json").returncode == 0
    finished = file.read_text()
    assert finished.startswith(first)
    assert run("--inputs", "2").returncode == 0
    assert not file.read_text().startswith(first)  # its times are its own
    for change in (first.replace(f'"{holdfast.__version__}"', '"0.0"'), "no header\n"):
        file.write_text(change)
        assert run("--inputs", "1").returncode == 0


@pytest.mark.slow
def test_layers_are_shown_one_by_one(run: Run, tmp_path: Path) -> None:
    done = run("--layers")
    assert done.returncode == 0, done.stderr
    assert "blocks.1.attention" in done.stdout
    assert "bounds proved and rounded up, attack rounded down" in done.words
    assert "Havens et al. (2024)" in done.words
    assert (tmp_path / "layers.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "layers.svg").read_text()[:1000]
    layers = json.loads((tmp_path / "layers.json").read_text())["layers"]
    for layer in layers:
        low, high = sorted(layer["local_lipschitz"]["upper"]["value"])
        assert f"at most {up(high, 5)} (at most {up(low, 5)} at the flattest of the 2 inputs)" in done.words
        lower = torch.tensor(layer["attack"]["lower"])
        assert set(layer["best"]["terms"]) == {
            each.name for each in holdfast.bounds.bounds.values() if each.in_best
        } - {"best"}
        for values in layer["best"]["terms"].values():
            assert (torch.tensor(values) >= lower).all()
