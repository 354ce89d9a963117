"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import api
from holdfast.cli import main
from holdfast.cli.inputs import demo_subjects
from holdfast.report.layer import Panel, draw_panels
from holdfast.report.numbers import down, nearest, up


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process, through its real entry point."""

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capfd.readouterr()
        return Done(int(exit_.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A saved layer and a saved batch of three inputs."""
    torch.manual_seed(0)
    layer = holdfast.AttentionLayer.from_module(torch.nn.MultiheadAttention(12, 3).eval(), residual=1.0)
    layer.save(tmp_path / "layer.safetensors")
    save_file({"x": torch.randn(3, 5, 12)}, tmp_path / "x.safetensors")
    return tmp_path / "layer.safetensors", tmp_path / "x.safetensors"


def test_bounds_lists_every_registered_bound(run: Run) -> None:
    done = run("bounds", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["bounds"]
    assert {row["name"] for row in rows} == {bound.name for bound in holdfast.list_bounds()}
    assert set(rows[0]) == {"name", "side", "scope", "guarantees", "cost", "reference", "assumptions"}
    assert "lofast-xi" in run("bounds").stdout


def test_bound_and_attack_agree_with_the_library(run: Run, saved: tuple[Path, Path], tmp_path: Path) -> None:
    layer_file, x_file = saved
    out = tmp_path / "bound.json"
    done = run("bound", layer_file, x_file, "--eps", "0.01,0.1", "--method", "lofast", "--json", "--out", out)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads(out.read_text())
    (result,) = printed["results"]
    layer = holdfast.AttentionLayer.load(layer_file)
    x = holdfast.storage.read_tensors(x_file)["x"]
    expected = holdfast.bound(layer, x, [0.01, 0.1], "lofast")
    assert result["value"] == expected.value.tolist()
    assert result["guarantee"] == "proved"
    assert result["terms"]["zeta"] == expected.terms["zeta"].tolist()

    done = run("attack", layer_file, x_file, "--eps", "0.1", "--steps", "20", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["results"]
    lower = torch.tensor(found["lower"]).squeeze(-1)
    assert (lower > 0).all()
    assert (lower <= expected.value[:, 1]).all()


def test_tables_show_the_numbers(run: Run, saved: tuple[Path, Path]) -> None:
    done = run("bound", *saved, "--method", "naive", "--method", "best", "--inputs", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("naive") == 2
    assert "second-order is smallest at 2 of 2 values" in done.stdout
    heads = run("attack", *saved, "--objective", "delta-22", "--steps", "3", "--inputs", "1")
    assert "head 2" in heads.stdout


def test_numbers_are_rounded_outward() -> None:
    assert (up(1.6993136, 6), down(1.6993136, 6), nearest(1.6993136, 6)) == ("1.69932", "1.69931", "1.69931")
    assert (up(0.25), down(0.25), up(0.0)) == ("0.25", "0.25", "0")
    assert (up(Fraction(1, 3)), down(Fraction(2, 3)), up(float("inf"))) == ("0.334", "0.666", "inf")
    generator = torch.Generator().manual_seed(0)
    for value in (10 ** (20 * torch.rand(200, generator=generator, dtype=torch.float64) - 10)).tolist():
        for digits in (3, 6):
            low, high = float(down(value, digits)), float(up(value, digits))
            assert value * (1 - 10 ** (1 - digits)) < low < value < high < value * (1 + 10 ** (1 - digits))


@pytest.mark.parametrize("command", ["bound", "lipschitz", "attack"])
def test_printed_numbers_stay_on_their_side(run: Run, saved: tuple[Path, Path], tmp_path: Path, command: str) -> None:
    out = tmp_path / "exact.json"
    options = {"attack": ("--steps", "3"), "bound": ("--method", "naive"), "lipschitz": ("--method", "yudin")}[command]
    done = run(command, *saved, *options, "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"Written: {out}" in done.stdout
    printed = [float(row.split("│")[-2]) for row in done.stdout.splitlines() if row.startswith("│")]
    (result,) = json.loads(out.read_text())["results"]
    exact = torch.tensor(result["lower" if command == "attack" else "value"]).flatten().tolist()
    assert len(printed) == 3
    for shown, value in zip(printed, exact, strict=True):
        assert shown == pytest.approx(value, rel=1e-4)
        assert shown <= value if command == "attack" else shown >= value


def test_no_number_is_cut(run: Run, saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    radii = ",".join(f"{1e-5 * 3**i:.3g}" for i in range(9))
    for command in ("bound", "attack"):
        more = ("--steps", "2") if command == "attack" else ("--method", "second-order")
        shown = run(command, *saved, "--eps", radii, "--inputs", "1", *more).stdout
        assert "…" not in shown
        assert len(re.findall(r"│ \S+ +│ 0 +│ \S+ +│ \S+ +│", shown)) == 9


def test_titles_name_the_file_alone(run: Run, saved: tuple[Path, Path]) -> None:
    shown = run("bound", *saved, "--method", "naive").stdout
    assert "layer.safetensors: bounds" in " ".join(shown.split())
    assert str(saved[0].parent) not in shown


def test_a_curve_is_drawn(run: Run, saved: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("bound", *saved, "--method", "naive", "--inputs", "1", "--curve", tmp_path / "curve.png")
    assert done.returncode == 0, done.stderr
    assert "lofast" in done.stdout
    assert "0.001" in done.stdout
    assert f"Written: {tmp_path / 'curve.png'}, {tmp_path / 'curve.svg'}" in done.stdout
    assert (tmp_path / "curve.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "curve.svg").read_text()[:1000]


def test_every_line_of_a_figure_has_its_own_look() -> None:
    curves = {name: torch.ones(1, 2) for name in (*holdfast.bounds.bounds, "‖DF(x)‖ eps (first order)")}
    (axis,) = draw_panels([Panel("", (0.1, 1.0), curves, torch.ones(1, 2))]).axes
    looks = [(line.get_color(), line.get_linestyle()) for line in axis.lines]
    assert len(set(looks)) == len(curves) + 1


def test_an_input_may_stand_in_the_layer_file(run: Run, tmp_path: Path, saved: tuple[Path, Path]) -> None:
    tensors = holdfast.storage.read_tensors(saved[0]) | {"x": torch.randn(5, 12)}
    save_file(tensors, tmp_path / "both.safetensors")
    assert run("bound", tmp_path / "both.safetensors", "--method", "naive").returncode == 0


def test_no_share_is_a_negative_zero(run: Run) -> None:
    shown = run("attention", "--demo").stdout
    assert " 0.00" in shown
    assert "-0.00" not in shown


@pytest.mark.parametrize("method", ["yudin", "castin-ball"])
def test_a_slope_bound_is_refused_with_the_line_of_the_library(run: Run, method: str) -> None:
    subject = demo_subjects(1)[0]
    with pytest.raises(holdfast.InputError, match="proves nothing about a ball around x") as said:
        holdfast.bound(subject.layer, subject.x, 0.1, method)
    for command in ("bound", "analyze"):
        done = run(command, "--demo", "--method", method)
        assert (done.returncode, done.stderr) == (2, f"holdfast: {said.value}\n")


def test_doctor_names_versions_and_extras(run: Run) -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["torch"] == torch.__version__
    assert "scipy" in found["extras"]["data"]
    assert "threads" in run("doctor").stdout


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout.strip() == holdfast.__version__
    assert "Usage" in run().stdout


BAD_CALLS = {
    "unknown method": (("bound", "--demo", "--method", "lofst"), "did you mean 'lofast'"),
    "unknown objective": (("attack", "--demo", "--objective", "outptu"), "did you mean 'output'"),
    "negative eps": (("bound", "--demo", "--eps=-1"), "eps is -1.0"),
    "NaN eps": (("bound", "--demo", "--eps", "nan"), "eps is nan"),
    "eps is no number": (("bound", "--demo", "--eps", "big"), "expected numbers separated by commas"),
    "no layer": (("bound",), "pass a safetensors file"),
    "no such file": (("bound", "nowhere.safetensors"), "no file 'nowhere.safetensors'"),
    "no such demo layer": (("bound", "--demo", "--demo-layer", "7"), "layers 0 to 1"),
    "demo and a file": (("bound", "a.safetensors", "--demo"), "choose one"),
    "unknown option": (("bound", "--foo"), "--foo"),
    "unknown command": (("boundz",), "boundz"),
    "unknown guarantee": (("bound", "--demo", "--guarantee", "hoped"), "hoped"),
    "memory limit": (("bound", "--demo", "--memory-limit", "0.0001", "--method", "lofast"), "raise memory_limit"),
    "curve": (("bound", "--demo", "--curve", "c.txt"), "ends in .png or .svg"),
    "radius alone": (("lipschitz", "a.safetensors", "--radius", "2"), "--tokens is missing"),
    "tokens alone": (("lipschitz", "a.safetensors", "--tokens", "5"), "--radius is missing"),
    "no restarts": (("attack", "--demo", "--restarts", "0"), "restarts is 0"),
    "a seed beyond 32 bits": (("attack", "--demo", "--seed", "99999999999999999999"), "'--seed'"),
    "a folder for a file": (("bound", "."), "'.' is a folder; expected a safetensors file"),
    "unknown study": (("repro", "vt"), "unknown command 'vt': did you mean 'vit'?"),
    "unknown part of models": (("models", "crad"), "unknown command 'crad': did you mean 'card'?"),
    "parameters in a folder": (("repro", "vit", "--parameters", "."), "'.' is a folder; expected a TOML file"),
    "two inputs": (("analyze", "a", "--text", "a", "--image", "b"), "--text and --image were given"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_get_one_line_and_status_2(run: Run, case: str) -> None:
    arguments, message = BAD_CALLS[case]
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("holdfast: ")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_files_get_one_line_and_status_2(run: Run, value: float, tmp_path: Path, saved: tuple[Path, Path]) -> None:
    save_file({"x": torch.full((5, 12), value)}, tmp_path / "bad.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    save_file({"y": torch.zeros(5, 12)}, tmp_path / "unnamed.safetensors")
    save_file({"x": torch.zeros(5, 11)}, tmp_path / "wide.safetensors")
    save_file({"x": torch.zeros(12)}, tmp_path / "flat.safetensors")
    save_file({"x": torch.zeros(0, 5, 12)}, tmp_path / "none.safetensors")
    for name, message in {
        "bad": "NaN or infinite",
        "text": "cannot be read as safetensors",
        "unnamed": "no tensor named x; found y",
        "wide": "expected (…, n, 12)",
        "flat": "x has shape (12,); expected (…, n, d), and at least one input",
        "none": "x has shape (0, 5, 12); expected (…, n, d), and at least one input",
    }.items():
        done = run("bound", saved[0], tmp_path / f"{name}.safetensors")
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_an_interrupt_leaves_what_was_finished(
    run: Run,
    saved: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    real, calls = api.bound, []

    def interrupted(*arguments: Any, **options: Any) -> holdfast.BoundResult:
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(api, "bound", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores the signal
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    out = tmp_path / "bound.json"
    methods = [part for name in ("naive", "lofast-xi", "lofast", "best") for part in ("--method", name)]
    done = run("bound", *saved, *methods, "--out", out)
    assert done.returncode == 130
    assert "interrupted; 2 of 4 parts were finished" in done.stderr
    assert "lofast-xi" in done.stdout
    finished = json.loads(out.read_text())["results"]
    assert [result["method"] for result in finished] == ["naive", "lofast-xi"]


def test_the_module_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "bound", "--demo", "--method", "lofst"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
