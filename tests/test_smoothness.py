"""`repro smoothness`: the sequences, the models, the constants, the fits, and what an interrupted run keeps."""

from __future__ import annotations

import gzip
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast import InputError
from holdfast.cli import main
from holdfast.graph.trace import trace
from holdfast.studies import StudyRun, Workplace, smoothness, smoothness_study, texts
from holdfast.studies.smoothness import BatchConstants, TextBatch

TINY = {
    "BertConfig": {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 16},
    "GPT2Config": {"n_layer": 2, "n_embd": 12, "n_head": 3},
}
VOCABULARY = 60


@dataclass(frozen=True)
class Tiny:
    """A small random model, with weights large enough for attention that is not flat."""

    model: nn.Module
    causal: bool


@pytest.fixture(params=["bert", "bert-decoder", "gpt2"])
def tiny(request: pytest.FixtureRequest, transformers: ModuleType) -> Tiny:
    config = "GPT2Config" if request.param == "gpt2" else "BertConfig"
    model = texts.random_model(config, **TINY[config], vocab_size=VOCABULARY)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(20)
    model = texts.as_decoder(model) if request.param == "bert-decoder" else model
    return Tiny(model, causal=request.param != "bert")


def _ids(sequences: int, n: int) -> Tensor:
    return torch.randint(VOCABULARY, (sequences, n), generator=torch.Generator().manual_seed(0))


# -- texts


def test_chunks_are_consecutive() -> None:
    pieces = texts.chunks(range(100, 200), length=7, sequences=4)
    assert pieces.shape == (4, 7)
    assert pieces.flatten().tolist() == list(range(100, 128))
    with pytest.raises(InputError, match="the text has 27 tokens; 4 sequences of 7 need more"):
        texts.chunks(range(27), length=7, sequences=4)


def test_texts_are_read_from_a_path_or_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = '"3","A ""title""","first, text"\n"1","Other","text"\n'
    (tmp_path / "ag_news_test.csv.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "alice.txt").write_text("\ufeffDown the rabbit hole", encoding="utf-8")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    assert texts.read_text("ag-news") == 'A "title" first, text\nOther text'
    assert texts.read_text("alice", tmp_path / "elsewhere") == "Down the rabbit hole"
    with pytest.raises(InputError, match=r"'alice' is not in .*: put alice.txt there, or name another folder"):
        texts.read_text("alice")


# -- models


def test_a_decoder_does_not_look_ahead_and_nothing_is_dropped(tiny: Tiny) -> None:
    dropouts = [module.p for module in tiny.model.modules() if isinstance(module, nn.Dropout)]
    assert max(dropouts) == 0.1, "the test says nothing of a model without dropout"
    assert not any(module.training for module in tiny.model.modules())
    before = _ids(2, 6)
    after = before.clone()
    after[:, 4:] = (after[:, 4:] + 1) % VOCABULARY
    found = [trace(tiny.model, {"input_ids": ids, "use_cache": False}) for ids in (before, before, after)]
    for first, again, changed in zip(*found, strict=True):
        assert first.layer.causal == tiny.causal
        assert torch.equal(first.x, again.x)
        same = torch.equal(first.layer(first.x)[:, :4], changed.layer(changed.x)[:, :4])
        assert same == tiny.causal


def test_constants_are_the_norms_of_the_dense_jacobians_of_the_modules(tiny: Tiny) -> None:
    ids = _ids(3, 5)
    cell = smoothness.measure(
        texts.LanguageModel(tiny.model, None), ids.flatten().tolist(), TextBatch("tiny", "alice", 5, 3, 1e-6)
    )
    found = trace(tiny.model.double(), {"input_ids": ids, "use_cache": False})
    assert len(cell.constants) == len(found) == 2
    for i, layer in enumerate(found):
        for s, x in enumerate(layer.x):
            jacobian = torch.func.jacrev(_attention(tiny, layer.name))(x).reshape(x.numel(), x.numel())
            norm = torch.linalg.matrix_norm(jacobian, 2).item()
            assert cell.constants[i][s] == pytest.approx(norm, rel=1e-5)
        lengths = torch.linalg.vector_norm(layer.x, dim=-1)
        assert cell.root_mean_square[i] == pytest.approx(lengths.square().mean(-1).sqrt().tolist(), rel=1e-5)
        assert cell.longest[i] == pytest.approx(lengths.amax(-1).tolist(), rel=1e-5)


def _attention(tiny: Tiny, name: str) -> Any:
    """The model's own attention as the theory means it, written down again: its maps, a mask, a softmax."""
    module: Any = tiny.model.get_submodule(name)
    if hasattr(module, "c_attn"):
        w_in, w_out = module.c_attn.weight, module.c_proj.weight
        b_in = module.c_attn.bias
    else:
        maps = (module.query, module.key, module.value)
        w_in, b_in = torch.cat([m.weight for m in maps]).mT, torch.cat([m.bias for m in maps])
        w_out = tiny.model.get_submodule(f"{name.removesuffix('.self')}.output.dense").weight.mT

    def attend(x: Tensor) -> Tensor:
        n, d = x.shape
        q, k, v = ((x @ w_in + b_in)[:, i * d : (i + 1) * d].reshape(n, 3, 4).transpose(0, 1) for i in range(3))
        scores = q @ k.mT / 2
        if tiny.causal:
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, d) @ w_out

    return attend


def test_missing_weights_are_one_line(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = texts.ModelSource("Nothing", ("no-such-model", "nobody/no-such-model"))
    monkeypatch.setitem(texts.SOURCES, "bert", absent)
    line = "'bert' cannot be had: no no-such-model or nobody/no-such-model in the Hugging Face cache"
    with pytest.raises(InputError, match=line):
        texts.load_source("bert")


# -- curves beside the constants


def test_the_configuration_grows_like_the_root_of_n_below_the_bound(tiny: Tiny) -> None:
    source = texts.LanguageModel(tiny.model, None)
    ids = _ids(2, 24).flatten().tolist()
    cells = [smoothness.measure(source, ids, TextBatch("tiny", "alice", n, 2)) for n in (3, 6, 24)]
    curves = smoothness.references("gpt2-tiny", source, cells)
    assert [curve.layer for curve in curves] == [0, 1]
    for i, curve in enumerate(curves):
        assert curve.lengths == [3, 6, 24]
        assert curve.radius <= curve.bound_radius
        assert all(cell.longest[i][s] <= curve.bound_radius for cell in cells for s in range(2))
        assert max(max(cell.constants[i]) for cell in cells) < curve.bound[-1]
        assert 0 < curve.adversarial[0] < curve.bound[0]
        assert curve.adversarial[-1] < curve.bound[-1]
        assert curve.adversarial_head[-1] / curve.adversarial_head[0] == pytest.approx(math.sqrt(24 / 3), rel=0.25)


# -- fits


def test_the_fit_recovers_an_exponent_and_its_interval_covers_it() -> None:
    law = smoothness.fit([2, 8, 32, 128], [[3 * n**0.25] * 2 for n in (2, 8, 32, 128)])
    assert (law.coefficient, law.exponent, law.low, law.high) == pytest.approx((3, 0.25, 0.25, 0.25))
    random, lengths = np.random.default_rng(0), smoothness.LENGTHS
    covered = 0
    for _ in range(400):
        shared = random.normal(scale=0.2, size=len(lengths))  # what all sequences of one length have in common
        noise = np.exp(shared[:, None] + random.normal(scale=0.1, size=(len(lengths), 10)))
        law = smoothness.fit(lengths, [row * 3 * n**0.25 for n, row in zip(lengths, noise, strict=True)])
        covered += law.low <= 0.25 <= law.high
    assert 0.92 < covered / 400 < 0.98


def test_students_points() -> None:
    assert [smoothness._student(v) for v in (1, 7, 30)] == pytest.approx([12.7062, 2.36462, 2.04227], rel=1e-4)


# -- the command


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transformers: ModuleType) -> list[str]:
    """A data folder, a tiny model that stands for MiniLM, and the lengths that were measured."""
    (tmp_path / "alice.txt").write_text("abcdefgh" * 40, encoding="utf-8")
    (tmp_path / "ag_news_test.csv").write_text("1,title," + "hgfedcba" * 40, encoding="utf-8")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    model = texts.random_model("BertConfig", **TINY["BertConfig"], vocab_size=VOCABULARY)

    def load(name: str) -> texts.LanguageModel:
        return texts.LanguageModel(model, lambda text, **_: {"input_ids": [ord(c) % VOCABULARY for c in text]})

    measured: list[str] = []

    def count(source: Any, ids: Any, setting: TextBatch) -> BatchConstants:
        measured.append(setting.title)
        return smoothness.measure(source, ids, setting)

    smoothness_study._loaded.cache_clear()
    monkeypatch.setattr(smoothness_study, "load_source", load)
    monkeypatch.setattr(
        smoothness_study, "refusal", lambda name: None if name == "minilm" else f"{name!r} cannot be had: not here"
    )
    monkeypatch.setattr(smoothness_study, "measure", count)
    return measured


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["holdfast", "repro", "smoothness", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_finished_batches_are_kept_and_missing_models_left_out(
    prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--models", "minilm,gpt2", "--sequences", "3", "--tokens", "20", "--out", tmp_path)
    assert _run(monkeypatch, *arguments, "--lengths", "2,4,8") == 0
    assert prepared[:2] == ["minilm: alice, 3 sequences of 2", "minilm: ag-news, 3 sequences of 2"]
    assert prepared[-1] == "minilm: ag-news, 2 sequences of 8"
    captured = capfd.readouterr()
    assert "BERT" not in captured.out
    assert captured.err.splitlines()[-1] == "holdfast: left out: 'gpt2' cannot be had: not here"
    assert (tmp_path / "smoothness-minilm.png").read_bytes()[:4] == b"\x89PNG"
    assert not list(tmp_path.glob("smoothness-gpt2*"))
    content = json.loads((tmp_path / "smoothness.json").read_text())
    assert [entry["kind"] for entry in content["records"]] == ["batch"] * 6 + ["curves"]
    assert len(content["records"][-1]["numbers"]["curves"]) == 2
    assert len(content["summary"]["fits"]) == 4

    prepared.clear()
    assert _run(monkeypatch, *arguments, "--lengths", "2,4,8", "--json") == 0
    assert prepared == []
    again = json.loads(capfd.readouterr().out)
    assert (again["records"], again["summary"]) == (content["records"], content["summary"])
    assert _run(monkeypatch, *arguments, "--lengths", "2,4,8,16") == 0
    assert prepared == ["minilm: alice, 2 sequences of 16", "minilm: ag-news, 2 sequences of 16"]
    latest = _finished(tmp_path).of("curves")[-1].curves
    assert latest[0].lengths == [2, 4, 8, 16]


def _finished(folder: Path) -> Any:
    return StudyRun("smoothness", smoothness_study.SmoothnessParameters(), folder, Workplace()).read()


def test_an_interrupt_keeps_what_is_finished(
    prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop_at_four(source: Any, ids: Any, setting: TextBatch) -> BatchConstants:
        if setting.length == 4:
            raise KeyboardInterrupt
        return smoothness.measure(source, ids, setting)

    monkeypatch.setattr(smoothness_study, "measure", stop_at_four)
    assert _run(monkeypatch, "--models", "minilm", "--lengths", "2,4", "--out", tmp_path) == 130
    assert "2 of 5 parts were finished" in capfd.readouterr().err
    assert [batch.setting.length for batch in _finished(tmp_path).of("batch")] == [2, 2]
    assert _finished(tmp_path).of("curves") == []


def test_no_model_at_all_is_an_error(prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, "--models", "gpt2", "--out", tmp_path) == 2


def test_one_length_has_no_fit(prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, "--models", "minilm,minilm", "--lengths", "4", "--out", tmp_path) == 0
    assert json.loads((tmp_path / "smoothness.json").read_text())["summary"]["fits"] == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--lengths", "1,2"), "--lengths has 1; expected at least 2"),
        (("--models", "minilm,bort"), "unknown model 'bort': did you mean 'bert'?"),
        (("--models", "minilm", "--lengths", "300"), "the text has 320 tokens; 4 sequences of 300 need more"),
    ],
)
def test_bad_calls_are_one_line(
    prepared: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    line: str,
) -> None:
    assert _run(monkeypatch, *arguments, "--out", tmp_path) == 2
    assert line in capfd.readouterr().err
