"""The commands train and models, and the shelf."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.cli import main
from holdfast.cli.train import _line
from holdfast.data.digits import demo_digits
from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.models import Transformer, VisionTransformer, config, files, load, put_on_shelf, save, shelved
from holdfast.models.files import load_transformer
from holdfast.models.loading import load_classifier
from holdfast.network.digest import weights_digest
from holdfast.train import Epoch, TrainingProgress, read_training

Call = Callable[..., tuple[int, str, str]]

RUN = """
[model]
input = "image"
classes = 10
channels = 1
side = 8
patch = 4
width = 8
depth = 1
heads = 2
neck = 8
activation = "half-smooth-abs"
[data]
name = "digits.safetensors"
[train]
epochs = 2
batch = 16
radius = "1/4"
"""


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs the command line in a folder with a config, data and an empty shelf."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "SHELF", tmp_path / "shelf")
    digits = demo_digits()
    save_file({"inputs": digits.images, "labels": digits.labels}, tmp_path / "digits.safetensors")
    (tmp_path / "run.toml").write_text(RUN)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *line.split()])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def test_train_writes_a_model_that_certify_takes(call: Call, tmp_path: Path) -> None:
    status, out, err = call("train run.toml --device cpu --json")
    assert (status, err) == (0, "")
    record = json.loads(out)
    assert record["finished"]
    assert record["config"]["train"]["radius"] == 0.25
    assert len(record["history"]) == 2
    folder = tmp_path / "runs" / "run-seed-0"
    assert json.loads((folder / "run.json").read_text())["command"] == "holdfast train run.toml --device cpu --json"
    line = f"certify {folder / 'model.safetensors'} --data digits-32 --limit 2 --guarantee numerical --method lofast"
    assert call(line)[0] == 0


def test_train_speaks_and_takes_another_seed(call: Call, tmp_path: Path) -> None:
    status, out, _ = call("train run.toml --device cpu --seed 3 --out there")
    assert status == 0
    assert "Written: there/model.safetensors" in out
    assert json.loads((tmp_path / "there" / "run.json").read_text())["seed"] == 3


@pytest.mark.slow
def test_an_estimate_stands_beside_what_was_proved(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "run.toml").write_text(RUN.replace("digits.safetensors", "digits").replace("epochs = 2", "epochs = 1"))
    status, out, _ = call("train run.toml --device cpu")
    assert status == 0
    assert re.search(r"certified at 0\.25 .* by the estimate in training, which is no proof\n", out)
    assert re.search(r"Proved at 0\.25: \d of the first 5 inputs, in at most 10 s each", out)


def test_an_interrupted_training_says_how_to_go_on(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.train.loop._TELL_EVERY", 1)
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.cli.train._line", stop)
        status, _, err = call("train run.toml --device cpu --out there")
    assert status == 130
    assert err == "holdfast: interrupted; the same command resumes from there\n"
    assert call("train run.toml --device cpu --out there")[0] == 0


def test_a_training_ends_after_its_time_and_its_files_stay_small(call: Call, tmp_path: Path) -> None:
    line = "train run.toml --device cpu --out there --shard-size 64kB --seconds 0"
    status, out, err = call(line)
    assert (status, out) == (0, "")
    assert err == "holdfast: 0 s are over at step 1 of 4; the same command resumes from there\n"
    record = json.loads(call(f"{line} --json")[1])
    assert not record["finished"]
    assert all(file.stat().st_size <= 64_000 for file in (tmp_path / "there").iterdir())
    status, out, _ = call("train run.toml --device cpu --out there")
    assert (status, "Written: there/model.safetensors" in out) == (0, True)
    assert "'15apples' is not a file size" in call("train run.toml --shard-size 15apples")[2]
    assert "'1kB' is not a file size" in call("train run.toml --shard-size 1kB")[2]


def test_the_progress_line() -> None:
    chosen = read_training("cifar10-stem")
    assert _line(chosen, TrainingProgress(1, 9, 2.5, None)) == "loss 2.500"
    line = _line(chosen, TrainingProgress(1, 9, 2.5, Epoch(1, 2.5, 0.5, 0.25, 1.0)))
    assert line == "loss 2.500  clean 50.0 %  certified at 0.141, estimated: 25.0 %"


def test_bad_configs_are_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("epochs", "epoch"))
    status, out, err = call("train run.toml")
    assert (status, out) == (2, "")
    assert "did you mean 'epochs'" in err
    assert "'--checkpoint-seconds'" in call("train run.toml --checkpoint-seconds nan")[2]
    assert "'--seed'" in call("train run.toml --seed 9999999999")[2]
    assert call("train nothing.toml")[2].startswith("holdfast: no file 'nothing.toml'")


def test_models_lists_configs_and_the_shelf(call: Call, tmp_path: Path) -> None:
    status, out, _ = call("models")
    assert status == 0
    assert "cifar10-stem" in out
    assert "The shelf holds no trained model." in out
    assert call("train run.toml --device cpu --out run")[0] == 0
    model = "run/model.safetensors"
    certified = f"certify {model} --data digits-32 --limit 3 --method lofast --radii 1/100 --attack --out run.jsonl"
    assert call(certified)[0] == 0
    status, out, err = call(f"models add tiny {model} --certified run.jsonl")
    assert (status, err) == (0, "")
    (found,) = json.loads(call("models --json")[1])["shelf"]
    assert (found["name"], found["seed"]) == ("tiny", "0")
    assert found["command"] == "holdfast train run.toml --device cpu --out run"
    (run,) = found["certified"]
    assert (run["guarantee"], run["inputs"], run["command"]) == ("proved", 3, f"holdfast {certified}")
    assert 0 <= run["accuracy"]["0.01"] <= run["attacked"]["0.01"] <= run["clean"]
    assert "tiny" in call("models")[1]
    assert call("certify tiny --data digits-32 --limit 1 --method lofast --guarantee numerical")[0] == 0


def test_a_standard_transformer_is_saved_halved_shelved_and_certified(call: Call, tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(VisionTransformer(8, 1, 4, 1, 8, 2), tmp_path / "vit.safetensors")
    assert call("models halve vit.safetensors half.safetensors")[0] == 0
    digits = demo_digits()
    save_file({"inputs": digits.images[:, None], "labels": digits.labels}, tmp_path / "square.safetensors")
    line = "certify half.safetensors --data square.safetensors --limit 2 --method lofast"
    line += " --guarantee numerical --out run.jsonl"
    assert call(line)[0] == 0
    assert "certified other weights" in call("models add mine vit.safetensors --certified run.jsonl")[2]
    assert call("models add mine half.safetensors --certified run.jsonl")[0] == 0
    assert call("verify run.jsonl --model mine")[0] == 0
    assert torch.equal(load("mine")(torch.ones(1, 1, 8, 8)), load("half.safetensors")(torch.ones(1, 1, 8, 8)))
    with pytest.raises(InputError, match="'mine' is a VisionTransformer; expected a model of holdfast train"):
        load_transformer("mine")


def tiny(seed: int) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replace(config("digits-smooth"), width=8, depth=1, neck=8))


def test_models_are_loaded_by_name(call: Call, tmp_path: Path) -> None:
    save(tiny(0), tmp_path / "model.safetensors")
    assert put_on_shelf("mine", tmp_path / "model.safetensors").certified == ()
    assert [each.name for each in shelved()] == ["mine"]
    x = demo_digits().images[:2]
    assert torch.equal(load("mine")(x), tiny(0)(x))
    assert torch.equal(load_classifier("mine")(x), tiny(0)(x))
    with pytest.raises(InputError, match="no file"):
        load("others")


def test_a_halved_model_is_another_one_of_half_the_size(call: Call, tmp_path: Path) -> None:
    save(Transformer(replace(config("digits-smooth"), width=64, depth=2)), tmp_path / "whole.safetensors")
    assert call("models halve whole.safetensors half.safetensors")[0] == 0
    whole, half = (load(tmp_path / f"{name}.safetensors") for name in ("whole", "half"))
    assert (tmp_path / "half.safetensors").stat().st_size < 0.6 * (tmp_path / "whole.safetensors").stat().st_size
    image = demo_digits().images[:1]
    assert 0 < (whole(image) - half(image)).abs().max() < 0.01
    huge = Transformer(config("digits-smooth"))
    huge.head.bias.data.fill_(1e6)
    save(huge, tmp_path / "huge.safetensors")
    assert "it cannot be halved" in call("models halve huge.safetensors half.safetensors")[2]


def test_what_the_shelf_refuses(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (0, 1):
        save(tiny(seed), tmp_path / f"{seed}.safetensors")
    call("certify 0.safetensors --data digits-32 --limit 1 --method lofast --guarantee numerical --out run.jsonl")
    assert "certified other weights" in call("models add mine 1.safetensors --certified run.jsonl")[2]
    assert call("models add mine 0.safetensors --certified run.jsonl")[0] == 0
    assert "expected a word without slashes" in call("models add a/b 0.safetensors")[2]
    monkeypatch.setattr("holdfast.models.shelf.LIMIT", 100)
    assert "the shelf takes files of at most 100" in call("models add other 0.safetensors")[2]


def test_every_model_on_the_shelf_is_small_and_can_be_loaded() -> None:
    found = shelved()
    assert len(found) <= 5
    for each in found:
        file = files.shelf_file(each.name)
        assert file is not None
        assert file.stat().st_size <= 8_000_000
        assert type(load(each.name)).__name__ == each.kind
        assert each.command
        assert each.certified


@pytest.mark.parametrize("name", ["cifar10-best", "cifar10-vit"])
def test_stored_records_are_of_the_weights_on_the_shelf(name: str) -> None:
    with gzip.open(Path(__file__).parents[1] / "results" / f"{name}.jsonl.gz", "rt") as lines:
        certified = json.loads(next(lines))["settings"]["weights"]
    assert weights_digest(to_network(load(name), torch.zeros(1, 3, 32, 32)).network) == certified
