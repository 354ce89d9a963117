"""The commands `repro lofast-fig2` and `repro lofast-fig5`, on a grid that trains in a second."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.attacks.auto_pgd import AutoPgd
from holdfast.cli import main
from holdfast.errors import InputError, SoundnessError
from holdfast.studies import StudyRun, Workplace, from_json, lofast_grid, lofast_grid_study
from holdfast.studies.lofast_grid_statements import grid_statements
from holdfast.studies.lofast_grid_study import GridParameters, LofastFigure2, LofastFigure5
from holdfast.studies.processes import Tell, side_by_side
from holdfast.train.config import agrees

Call = Callable[..., tuple[int, str, str]]

GRID = """
[model]
input = "image"
classes = 10
channels = 1
side = 8
patch = 4
width = 8
depth = 1
heads = 1
maps = "sll"
positions = "added"
residual = true
projection = "hard"
feed_forward = "sll"
activation = "relu"
pool = "mean"
head = "sll"
[data]
name = "digits"
validation = 200
[train]
epochs = 1
batch = 128
lr = 0.01
[[train.losses]]
kind = "cross-entropy"
temperature = 0.1
[grid]
depth = [1]
heads = [1, 2]
attention_norm = [0.5, 1.0]
"""


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Puts a tiny grid in the place of the BERTs."""
    configs = tmp_path / "configs"
    configs.mkdir()
    (configs / "lofast-bert.toml").write_text(GRID)
    for module in ("holdfast.models.config", "holdfast.train.config"):
        monkeypatch.setattr(import_module(module), "CONFIGS", configs)


@pytest.fixture
def call(grid: None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs the command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> tuple[int, str, str]:
        options = ["--inputs", "4", "--device", "cpu", "--ours", "layerwise", *line.split()]
        monkeypatch.setattr(sys, "argv", ["holdfast", "repro", "lofast-fig5", *options])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def result(**changes: Any) -> lofast_grid.CertifiedNetwork:
    found = lofast_grid.CertifiedNetwork(
        values={"depth": 3.0, "heads": 4.0, "attention_norm": 0.5},
        seed=0,
        config={},
        inputs=4,
        methods={"lofast": "numerical", "layerwise": "proved"},
        command="",
        versions={},
        device="cpu",
        seconds={},
        test_inputs=872,
        clean=0.8,
        content_off=0.75,
        total_variation=[0.01, 0.02],
        score_norm=[1.0, 0.9],
        right=[True, True, False, True],
        radius={"lofast": [0.1, 0.05, 0.3, 0.0], "layerwise": [0.2, 0.1, 0.4, 0.1]},
        attack=[0.5, 0.1, 0.4, None],
    )
    return replace(found, **changes)


def finished(folder: Path) -> list[lofast_grid.CertifiedNetwork]:
    run = StudyRun("lofast-fig5", GridParameters(inputs=4, ours="layerwise"), folder / "results", Workplace())
    return run.read().of("network")


def test_a_grid_from_training_to_figure(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = call("--only heads=2,attention_norm=0.5,attention_norm=1")
    assert status == 0, err
    results = finished(tmp_path)
    assert [(one.values["heads"], one.values["attention_norm"]) for one in results] == [(2.0, 0.5), (2.0, 1.0)]
    for one in results:
        assert one.command.endswith("--only heads=2,attention_norm=0.5,attention_norm=1")
        assert one.config["train"]["epochs"] == 1
        assert set(one.seconds) == {"training", "lofast", "layerwise", "attack"}
        assert one.test_inputs == 360
        assert len(one.right) == 4
        for method in ("lofast", "layerwise"):
            for right, radius, nearest in zip(one.right, one.radius[method], one.attack, strict=True):
                assert (radius > 0) == right
                assert radius <= (math.inf if nearest is None else nearest)
    assert all((tmp_path / "results" / f"lofast-fig5{end}").exists() for end in (".json", ".png", ".svg", ".md"))
    assert "Figure 5" in out
    assert "lofast-fig5.md" in out

    # What is finished is not done again, and the rest of the grid joins it.
    worked: list[str] = []

    def measure(member: lofast_grid.GridNetwork, *_: object) -> lofast_grid.CertifiedNetwork:
        worked.append(member.label)
        return replace(results[0], values=member.values)

    monkeypatch.setattr(lofast_grid_study, "measure", measure)
    assert call("")[0] == 0
    assert worked == [f"depth=1 heads=1 attention_norm={norm}" for norm in ("0.5", "1")]
    page = (tmp_path / "results" / "lofast-fig5.md").read_text()
    assert call("--redraw")[0] == 0
    assert worked[2:] == []
    assert (tmp_path / "results" / "lofast-fig5.md").read_text() == page

    # Another setting does not overwrite it.
    for options in ("--epochs 2 --only heads=2", "--inputs 3"):
        status, _, err = call(options)
        assert status == 2
        assert "other settings" in err


@pytest.mark.slow
def test_members_side_by_side(call: Call, tmp_path: Path) -> None:
    status, _, err = call("--jobs 2 --only heads=1")
    assert status == 0, err
    assert [one.values["attention_norm"] for one in finished(tmp_path)] == [0.5, 1.0]
    assert "finished depth=1 heads=1 attention_norm=0.5" in err


def test_an_interrupted_command_goes_on(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(member: lofast_grid.GridNetwork, *_: object) -> lofast_grid.CertifiedNetwork:
        if member.values["attention_norm"] == 1:
            raise KeyboardInterrupt
        return result(values=member.values)

    monkeypatch.setattr(lofast_grid_study, "measure", first_only)
    status, out, err = call("--only heads=1")
    assert status == 130
    assert "1 of 2 parts were finished; the same command resumes" in err
    assert len(finished(tmp_path)) == 1
    assert "lofast-fig5.png" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--only dept=1", "did you mean 'depth'"),
        ("--only depth=7", "--only says 'depth=7'; the grid has depth = 1"),
        ("--only heads", "the grid has heads = 1, 2"),
        ("--ours layerwide", "did you mean 'layerwise'"),
        ("--ours lofast", "name another composition"),
        ("--redraw", "give the options that it was made with, or no --redraw"),
    ],
)
def test_bad_input_is_one_line(call: Call, line: str, message: str) -> None:
    status, _, err = call(line)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_the_shares() -> None:
    one = result()
    assert one.ours == "layerwise"
    assert [one.certified("lofast", radius) for radius in (0.0, 0.05, 0.1, 0.11)] == [0.75, 0.5, 0.25, 0.0]
    assert [one.attacked(radius) for radius in (0.0, 0.1, 0.5)] == [0.75, 0.5, 0.25]
    assert one.mean_radius("layerwise") == pytest.approx(0.1)


def test_a_certificate_that_an_attack_breaks_is_refused() -> None:
    with pytest.raises(SoundnessError, match=r"layerwise proves 0\.2 for input 1"):
        result(radius={"lofast": [0.0] * 4, "layerwise": [0.1, 0.2, 0.1, 0.1]})


def test_a_config_without_later_keys_is_the_same() -> None:
    asked = {"train": {"epochs": 3, "losses": [{"kind": "emma", "new": 0}]}, "model": {"width": 8}}
    stored = {"train": {"epochs": 3, "losses": [{"kind": "emma"}]}, "model": {"width": 8}}
    assert agrees(stored, asked)
    assert not agrees(asked, stored)
    assert not agrees(stored | {"model": {"width": 16}}, asked)


def test_results_survive_their_file() -> None:
    assert from_json(lofast_grid.CertifiedNetwork, asdict(result())) == result()


def test_tables_and_figure_from_results_alone() -> None:
    values = [
        {"depth": depth, "heads": 4.0, "patch": patch, "attention_norm": 0.5} for depth, patch in ((2, 4), (4, 8))
    ]
    results = [result(values={key: float(v) for key, v in each.items()}) for each in values]
    page = lofast_grid_study.markdown(LofastFigure2(), results)
    head, _, first = ([cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()[:3])
    cells = dict(zip(head, first, strict=True))
    assert cells["% at 9/255"] == "50.0 / 75.0 / 75.0"
    assert cells["% at 36/255"] == "0.0 / 25.0 / 50.0"
    assert cells["variation"] == "0.020"
    assert cells["mean radius, layerwise"] == "0.1000"
    assert lofast_grid_study.table(LofastFigure2(), results).row_count == 2
    drawn = lofast_grid_study.draw_grid(LofastFigure2(), results)
    assert [len(panel.lines) for panel in drawn.axes] == [3, 3]  # a row for each depth and patch: three curves each


def test_the_published_grids() -> None:
    assert len(LofastFigure2().plan(GridParameters(), Workplace()).parts) == 48
    asked = GridParameters("depth=6,heads=8", epochs=1, seed=3)
    chosen = [part.work for part in LofastFigure5().plan(asked, Workplace()).parts]
    assert [one.values["attention_norm"] for one in chosen] == [0.25, 0.5, 0.75]
    assert {(one.config.train.seed, one.config.train.epochs, one.config.model.depth) for one in chosen} == {(3, 1, 6)}


def _fail(item: int, tell: Tell) -> None:
    tell(0.5)
    raise InputError(f"item {item}")


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_error_of_a_piece_of_work_is_told(jobs: int) -> None:
    told: list[tuple[int, float]] = []
    with pytest.raises(InputError, match="item 7"):
        side_by_side(_fail, [7], jobs, lambda *share: told.append(share))
    assert told == [(0, 0.5)]


def test_auto_pgd_meets_the_exact_distance() -> None:
    """A linear classifier, whose nearest change of answer is known."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(20, 3, 4, generator=generator, dtype=torch.float64)

    def logits(z: torch.Tensor) -> torch.Tensor:
        return z.flatten(1) @ weight

    labels = logits(x).argmax(1)
    lead = logits(x).gather(1, labels[:, None]) - logits(x)
    exact = lead / torch.linalg.vector_norm(weight.mT[labels].unsqueeze(1) - weight.mT, dim=-1)
    nearest = exact.scatter(1, labels[:, None], torch.inf).amin(1)
    assert AutoPgd(steps=20, targets=4)(logits, x, labels, nearest * 1.0001).all()
    assert AutoPgd(steps=20, targets=1, restarts=2)(logits, x, labels, nearest * 1.0001).double().mean() > 0.5
    assert not AutoPgd(steps=20)(logits, x, labels, nearest * 0.9999).any()
    with pytest.raises(InputError, match="steps is 0; expected at least 1"):
        AutoPgd(steps=0)


@pytest.mark.parametrize(("size", "radius"), [(1.0, 1e-3), (10.0, 0.05)])
def test_no_change_is_reported_beyond_the_radius(size: float, radius: float) -> None:
    torch.manual_seed(0)
    normal = torch.nn.functional.normalize(torch.randn(16, dtype=torch.float64), dim=0)
    x = size * torch.randn(20, 4, 4)
    # The boundary lies just outside every ball: rounding alone would cross it.
    offset = (x.double().flatten(1) @ normal) - radius * (1 + 1e-9)

    def logits(z: torch.Tensor) -> torch.Tensor:
        lead = z.double().flatten(1) @ normal - offset.repeat_interleave(len(z) // len(offset))
        return torch.stack([lead, torch.zeros_like(lead)], 1)

    labels = torch.zeros(20, dtype=torch.int64)
    assert not AutoPgd(steps=10)(logits, x, labels, torch.full((20,), radius)).any()
    assert AutoPgd(steps=10)(logits, x, labels, torch.full((20,), 1.01 * radius)).all()


def test_parts_that_do_not_fit_are_halved() -> None:
    asked: list[int] = []

    def work(part: slice) -> list[float]:
        asked.append(part.stop - part.start)
        if asked[-1] > 3:
            raise torch.OutOfMemoryError
        return [float(i) for i in range(part.start, part.stop)]

    assert lofast_grid._in_parts(work, 7, 8) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert asked == [7, 4, 2, 2, 2, 1]
    with pytest.raises(torch.OutOfMemoryError):
        lofast_grid._in_parts(lambda part: work(slice(0, 9)), 1, 2)


def test_the_longest_networks_come_first() -> None:
    chosen = lofast_grid.members("lofast-vit", (0.1,), {}, inputs=1, seed=0)
    assert len(chosen) == 48
    sizes = [(one.values["depth"], one.values["patch"]) for one in chosen]
    assert (sizes[0], sizes[-1]) == ((6.0, 4.0), (2.0, 8.0))


def test_statements_compare_networks_that_are_equal_but_for_one_value() -> None:
    def network(depth: float, norm: float, reach: float) -> lofast_grid.CertifiedNetwork:
        radius = {"lofast": [reach] * 4, "layerwise": [0.05] * 4}
        return result(values={"depth": depth, "attention_norm": norm}, radius=radius, attack=[None] * 4)

    results = [network(2, 0.5, 0.05), network(6, 0.5, 0.0), network(2, 1.0, 0.05), network(6, 1.0, 0.05)]
    by_claim = {one.claim: one for one in grid_statements(results, 0.05, "0.05")}
    right = 100 * sum(result().right) / 4
    layers = by_claim["more layers cost certified accuracy"]
    assert layers.judgement == "confirmed"
    assert f"lofast {-right / 2:+.1f} ({-right:+.1f} to +0.0), layerwise +0.0" in layers.evidence
    assert by_claim["larger norms of W^V and W^O cost certified accuracy"].judgement == "refuted"
    assert not any("heads" in claim for claim in by_claim)
