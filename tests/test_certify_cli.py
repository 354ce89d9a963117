"""The commands certify, merge and verify."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.progress import TimeRemainingColumn
from safetensors.torch import save_file

from certify_cases import labelled, linear_network, rows, starve
from holdfast import InputError, certify
from holdfast.certification.examples import ranges
from holdfast.cli import main
from holdfast.cli.certify import read_radii
from holdfast.models import DigitsViT
from holdfast.models.loading import load_classifier
from holdfast.progress import telling

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Runs the command line in this process on a linear model, in a folder with the data file `data.safetensors`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("holdfast.cli.certify.load_classifier", lambda name, **options: linear_network())
    data = labelled(12)
    save_file({"inputs": data.inputs, "labels": data.labels}, tmp_path / "data.safetensors")
    save_file({"inputs": data.inputs, "labels": data.labels + 0.5}, tmp_path / "halves.safetensors")

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *line.split()])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


CERTIFY = "certify linear --data data.safetensors --radii 36/255,0.5 --attack"


def test_certify_shows_accuracies_and_writes_a_file_and_a_page(call: Call, tmp_path: Path) -> None:
    status, out, err = call(f"{CERTIFY} --out run.jsonl --html page.html")
    assert (status, err) == (0, "")
    assert "0.141176" in out
    assert "12 of 12 inputs" in " ".join(out.split())
    assert "Written: run.jsonl, page.html" in out
    assert len(rows(tmp_path / "run.jsonl")) == 12
    assert "holdfast certify linear" in (tmp_path / "page.html").read_text(encoding="utf-8")
    status, out, _ = call(f"{CERTIFY} --out run.jsonl --json")
    found = json.loads(out)
    assert found["command"] == "certify"
    assert len(found["records"]) == 12
    assert found["radii"] == [36 / 255, 0.5]


def test_boxes_radii_and_seconds(call: Call, tmp_path: Path) -> None:
    line = (
        "certify linear --data data.safetensors --norm linf --clip -4,4 --at 1/100,0.2 --seconds-per-input 60 --limit 3"
    )
    status, out, err = call(f"{line} --out run.jsonl --html page.html --json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["radii"] == [0.01, 0.2]
    assert {record["radius"] for record in found["records"]} <= {0.0, 0.01, 0.2}
    assert {record["norm"] for record in found["records"]} == {"linf"}
    assert (found["settings"]["clip"], found["settings"]["seconds"]) == ("-4.0,4.0", "60.0")
    assert "l-infinity, clipped to -4, 4" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert call("verify run.jsonl --all")[0] == 0
    found = json.loads(call("certify linear --data data.safetensors --norm linf --limit 1 --json")[1])
    assert found["radii"] == [1 / 255, 2 / 255, 8 / 255]
    status, _, err = call("certify linear --data data.safetensors --norm linf --clip 1")
    assert (status, err.count("\n")) == (2, 1)
    assert "--clip is '1'; expected two numbers, such as 0,1" in err
    assert "--clip is '0-1'; expected numbers or fractions, such as 0,1" in call(f"{CERTIFY} --clip 0-1 --norm linf")[2]
    assert call(f"{CERTIFY} --norm l1")[2] == "holdfast: Invalid value for '--norm': 'l1' is not one of 'l2', 'linf'.\n"


def test_shards_are_joined_and_checked(call: Call, tmp_path: Path) -> None:
    for i in (1, 2, 3):
        assert call(f"{CERTIFY} --out {i}.jsonl --shard {i}/3 --batch {i}")[0] == 0
    status, out, err = call("merge 1.jsonl 3.jsonl --out part.jsonl")
    assert status == 0
    assert "4 inputs are missing: 1, 4, 7, 10" in err
    status, out, err = call("merge 1.jsonl 2.jsonl 3.jsonl --out run.jsonl --html page.html --json")
    assert (status, err) == (0, "")
    assert json.loads(out)["missing"] == []
    assert "The inputs are not shown" in (tmp_path / "page.html").read_text(encoding="utf-8")  # 2x2 is no picture
    status, out, _ = call("verify run.jsonl --all")
    assert status == 0
    assert "12 records and 12 perturbations: 0 failures" in out
    path = tmp_path / "run.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(lines[5])
    lines[5] = json.dumps(record | {"radius": record["radius"] * (1 + 9e-6)})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    status, out, _ = call("verify run.jsonl --all")
    assert status == 1
    assert "does not hold: input 4: radius 0." in " ".join(out.split())


def test_verify_says_what_it_drew_and_what_it_did_not_check(call: Call) -> None:
    assert call(f"{CERTIFY} --out run.jsonl --limit 8")[0] == 0
    status, out, _ = call("verify run.jsonl --sample 3 --json")
    first = json.loads(out)
    assert (status, len(first["checked"]), first["inputs"], first["available"]) == (0, 3, 8, 12)
    status, out, _ = call(f"verify run.jsonl --sample 3 --seed {first['seed']}")
    assert status == 0
    assert f"0 failures, drawn with seed {first['seed']} (--seed {first['seed']} repeats it)" in out
    assert "linear on data.safetensors (all), the first 8 of 12 inputs: the file claims" in out
    assert "unchecked: the numbers of the 5 records that were not drawn" in out
    assert "unchecked: wall times, what margins were lost to, and the command line" in out
    again = json.loads(call(f"verify run.jsonl --sample 3 --seed {first['seed']} --json")[1])
    assert again["checked"] == first["checked"]
    assert json.loads(call("verify run.jsonl --sample 3 --json")[1])["seed"] != first["seed"]


def test_a_file_goes_on_to_more_inputs(call: Call, tmp_path: Path) -> None:
    assert call(f"{CERTIFY} --out run.jsonl --limit 5")[0] == 0
    status, out, _ = call(f"{CERTIFY} --out run.jsonl")
    assert status == 0
    assert "12 of 12 inputs" in " ".join(out.split())
    assert call("verify run.jsonl --all")[0] == 0
    status, _, err = call(f"{CERTIFY} --out run.jsonl --limit 5")
    assert status == 2
    assert "run.jsonl covers 12 inputs and this run 5, fewer; a file only takes more of the same data" in err


def test_runs_stand_side_by_side_on_a_page(call: Call, tmp_path: Path) -> None:
    assert call(f"{CERTIFY} --method lofast --out lofast.jsonl")[0] == 0
    assert call(f"{CERTIFY} --out best.jsonl --html page.html --beside lofast.jsonl")[0] == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"method":"lofast"' in page
    assert "best, lofast" in page


def test_targets_decide_the_exit_status(call: Call, tmp_path: Path) -> None:
    line = "certify linear --data data.safetensors --radii 0.1 --html page.html --junit junit.xml"
    status, out, err = call(f"{line} --target 0@1/10")
    assert (status, err) == (0, "")
    assert "Written: page.html, junit.xml" in out
    status, _, err = call(f"{line} --target 0@0.1 --target 1@1000")
    assert status == 1
    assert "the target of 100 % at 1000 is missed: 0 % are certified" in err
    assert 'failures="1"' in (tmp_path / "junit.xml").read_text()
    assert "✗ failed" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("certify linear --data data.safetensors --radii 36/0", "--radii is '36/0'; expected numbers or fractions"),
        ("certify linear --data data.safetensors --radii -1", "radii is -1.0; expected a finite number"),
        ("certify linear --data data.safetensors --radii=", "--radii is ''; expected numbers or fractions"),
        ("certify linear --data data.safetensors --at -1", "at is -1.0; expected a finite number"),
        ("certify linear --data halves.safetensors", "the labels are torch.float32; expected whole numbers"),
        ("certify linear --data data.safetensors --device mps", "the device is 'mps'; expected cpu, cuda"),
        ("certify linear --data data.safetensors --shard 0/2", "the shard is 0/2; expected 1/2 to 2/2"),
        ("certify linear --data data.safetensors --shard half", "--shard is 'half'; expected a part"),
        ("certify linear --data digit", "unknown data set 'digit': did you mean 'digits'?"),
        ("certify linear --data data.safetensors --method bst", "unknown composition 'bst': did you mean 'best'?"),
        ("certify linear --data data.safetensors --perturb words", "the perturbation is 'words'; expected"),
        ("certify linear --data data.safetensors --mean 0.5", "one of --mean and --std was given; expected both"),
        ("certify linear --data data.safetensors --target 95", "--target is '95'; expected SHARE@RADIUS"),
        ("certify linear --data data.safetensors --target 95@1", "the accuracy of a target is 95.0; expected a share"),
        ("certify linear --data data.safetensors --junit x.xml", "--junit was given without --target; expected both"),
        ("certify linear --data data.safetensors --beside no.jsonl", "'no.jsonl' cannot be read"),
        ("merge data.safetensors --out x.jsonl", "data.safetensors: the first line is not a header"),
        ("verify no.jsonl", "'no.jsonl' cannot be read"),
    ],
)
def test_bad_calls_get_one_line_and_status_2(call: Call, line: str, message: str) -> None:
    status, out, err = call(line)
    assert (status, out) == (2, "")
    assert err.startswith("holdfast: ")
    assert err.count("\n") == 1
    assert message in err


def test_another_setting_is_refused_in_one_line(call: Call) -> None:
    assert call(f"{CERTIFY} --out run.jsonl")[0] == 0
    status, _, err = call(f"{CERTIFY} --out run.jsonl --seed 3")
    assert status == 2
    assert "seed 0 against 3; write to another file, or start afresh" in err
    assert call(f"{CERTIFY} --out run.jsonl --seed 3 --no-resume")[0] == 0


def test_an_interrupt_says_how_to_go_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.certification import workers

    real, calls = workers.examine, []

    def third_time(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(workers, "examine", third_time)
    status, out, err = call(f"{CERTIFY} --out run.jsonl --batch 2")
    assert status == 130
    assert err == "holdfast: interrupted; 4 of 12 inputs are done; the same command resumes from there\n"
    assert "4 of 12 inputs" in " ".join(out.split())
    assert call(f"{CERTIFY} --out run.jsonl --batch 2")[0] == 0


def test_failed_inputs_are_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    starve(monkeypatch, 4)
    status, _, err = call(f"{CERTIFY} --out run.jsonl --batch 3")
    assert status == 1
    assert err == (
        "holdfast: 1 of 12 inputs failed (4), the first of them by MemoryError: no room; the same command tries them "
        "again\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus-per-task 1", "--gpus-per-task was given without --cluster"),
        ("--cluster nowhere", "the cluster is 'nowhere'; expected auto, or HOST:PORT of its head"),
        ("--cluster 127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
    ],
)
def test_a_cluster_that_cannot_be_used_gets_one_line(call: Call, options: str, message: str) -> None:
    pytest.importorskip("ray")
    status, _, err = call(f"{CERTIFY} {options}")
    assert status == 2
    assert err.count("\n") == 1
    assert message in err


def test_a_file_of_inputs_given_in_python_says_what_verify_needs(call: Call) -> None:
    certify(linear_network(), [(torch.ones(1, 6), 0)], [0.1], out="given.jsonl")
    status, _, err = call("verify given.jsonl")
    assert status == 2
    assert "was made from inputs given in Python; expected them as --data FILE.safetensors, and --model if" in err


def test_the_progress_bar_shows_the_time_that_is_left() -> None:
    with telling("folder/model") as told:
        told(1, 4)
        (task,) = told.bar.tasks
        assert (task.description, task.completed, task.total) == ("model", 1, 4)
        told.show_workers(3)
        assert task.description == "model (3 workers)"
        assert any(isinstance(column, TimeRemainingColumn) for column in told.bar.columns)


def test_classifiers_are_loaded_with_their_heads(transformers: ModuleType, tmp_path: Path) -> None:
    assert isinstance(load_classifier("digits"), DigitsViT)
    with pytest.raises(InputError, match=r"no file 'nowhere\.safetensors'"):
        load_classifier("nowhere.safetensors")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    found = load_classifier(str(tmp_path / "vit"))
    assert type(found).__name__ == "ViTForImageClassification"
    assert not found.training
    config = transformers.BertConfig(**sizes, vocab_size=30, num_labels=2)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    assert type(load_classifier(str(tmp_path / "bert"))).__name__ == "BertForSequenceClassification"
    transformers.BertModel(config).save_pretrained(tmp_path / "headless")
    with pytest.raises(
        InputError, match=r"has no weights for classifier\.bias, classifier\.weight; expected a classifier"
    ):
        load_classifier(str(tmp_path / "headless"))


def test_radii_and_ranges() -> None:
    assert read_radii("36/255, 0.5,1e-3") == [36 / 255, 0.5, 1e-3]
    assert ranges([0, 3, 4, 5, 9]) == "0, 3-5, 9"
