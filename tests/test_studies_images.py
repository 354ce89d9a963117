"""The command `repro images`, on a classifier of digits that trains in a second."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.errors import SoundnessError
from holdfast.models import Transformer, config, save
from holdfast.studies import StudyRun, Workplace, images
from holdfast.train import DataConfig, TrainConfig, TrainingConfig, train
from holdfast.train.losses import CrossEntropy


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    model = replace(config("digits-patches"), width=16, depth=1, neck=0)
    setup = TrainingConfig(
        "tiny", model, DataConfig("digits"), TrainConfig(epochs=2, batch=64, losses=(CrossEntropy(temperature=0.1),))
    )
    train(setup, folder / "run", command="holdfast train tiny")
    return folder


def call(folder: Path, line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["holdfast", *line.split()])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def measured(folder: Path) -> list[images.ImageModel]:
    return StudyRun("images", images.ImagesParameters(), folder / "results", Workplace()).read().of("model")


def test_a_model_is_certified_compared_and_attacked(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "repro images run/model.safetensors --inputs 12 --lofast-inputs 3 --attack-inputs 6 --device cpu"
    assert call(trained, line, monkeypatch) == 0
    (one,) = measured(trained)
    assert (len(one.radius), len(one.lofast), len(one.attack)) == (12, 3, 6)
    assert max(one.radius) > 0
    assert all(ours >= theirs - 1e-5 for ours, theirs in zip(one.radius, one.lofast, strict=False))
    radius = images.RADII[0]
    nearer = replace(one, radius=one.radius[:6])
    assert nearer.certified(radius) <= one.attacked(radius) <= sum(found != 0 for found in one.attack) / 6
    assert one.training["command"] == "holdfast train tiny"
    page = (trained / "results" / "images.md").read_text(encoding="utf-8")
    assert "| tiny | 0 |" in page
    capsys.readouterr()
    assert call(trained, "repro images --redraw --json", monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["records"][0]["numbers"]["radius"] == one.radius


def test_what_cannot_be_is_reported(trained: Path) -> None:
    (one,) = measured(trained)
    right = next(i for i, found in enumerate(one.attack) if found != 0)
    attack = [1e-9 if i == right else found for i, found in enumerate(one.attack)]
    with pytest.raises(SoundnessError, match=f"image {right} and an attack succeeds at 1e-09"):
        replace(one, attack=attack, radius=[0.1] * 12)


def test_a_model_without_its_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(Transformer(config("digits-patches")), tmp_path / "bare.safetensors")
    assert call(tmp_path, "repro images bare.safetensors", monkeypatch) == 2
    assert "has no record of a training" in capsys.readouterr().err


def test_a_model_that_was_trained_on_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Transformer(config("digits-patches"))
    save(model, tmp_path / "own.safetensors", {"training": json.dumps({"name": "own", "test": {}})})
    assert call(tmp_path, "repro images own.safetensors", monkeypatch) == 2
    assert "with its test split" in capsys.readouterr().err
