"""Runs of real classifiers: converted, certified, attacked and checked again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import holdfast
from holdfast import InputError
from holdfast.certification import MinimalAttack, verify
from holdfast.certification.examples import tokenised
from holdfast.data import Dataset, load
from holdfast.data.dataset import checksum
from holdfast.graph import to_network
from holdfast.models import DigitsViT
from holdfast.network.digest import weights_digest
from holdfast.results import Guarantee

ATTACK = MinimalAttack(restarts=1, targets=3, steps=12)


def small_vit() -> DigitsViT:
    torch.manual_seed(0)
    return DigitsViT(depth=1, width=8, heads=1).eval().requires_grad_(False)


@pytest.mark.parametrize("guarantee", ["numerical", pytest.param("proved", marks=pytest.mark.slow)])
def test_a_vit_on_digits(tmp_path: Path, guarantee: Guarantee) -> None:
    model, data, path = small_vit(), load("digits-32"), tmp_path / "run.jsonl"
    found = holdfast.certify(model, data, 0.1, "lofast", attack=ATTACK, out=path, limit=2, guarantee=guarantee)
    with torch.no_grad():
        top = small_vit().double()(data.inputs[:2].double()).topk(2)
    margins = (top.values[:, 0] - top.values[:, 1]).tolist()
    assert [record.index for record in found.records] == sorted(data.indices[:2].tolist())
    for record in found.records:
        place = data.indices.tolist().index(record.index)
        assert record.prediction == int(top.indices[place, 0])
        assert record.label == int(data.labels[place])
        assert record.margin == pytest.approx(margins[place], rel=1e-3)
        assert record.margin <= margins[place]
        assert record.attack_radius is not None
        assert 0 < record.radius < record.attack_radius
    checked = verify(path, model, "digits-32", sample=1)
    assert checked.sound
    assert checked.witnesses == 1


@pytest.mark.slow
def test_the_bundled_model_on_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast"]
    options = ["--data", "digits-32", "--limit", "1", "--method", "lofast", "--attack", "--out", "run.jsonl"]
    for arguments in (["certify", "digits", *options, "--html", "page.html"], ["verify", "run.jsonl", "--all"]):
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert "1 records and 1 perturbations: 0 failures" in done.stdout
    assert (tmp_path / "page.html").is_file()


def test_sentences_enter_one_by_one_as_their_tokenizer_encodes_them(transformers: ModuleType) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "film", "bad"]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.BertConfig(**sizes, vocab_size=len(words), num_labels=2)
    model = transformers.BertForSequenceClassification(config).eval()
    texts, labels = ("a good film", "bad"), torch.tensor([1, 0])
    ids = torch.zeros(2, 4, dtype=torch.int64)
    data = Dataset("sentences", "dev", ids, labels, torch.tensor([4, 9]), checksum(ids), texts)
    examples = tokenised(data, tokenizer)
    first, second = examples.batches([0, 1], 8)
    assert (first.inputs["input_ids"].shape, second.inputs["input_ids"].shape) == ((1, 5), (1, 3))
    found = holdfast.certify(model, examples, 0.1, "lofast", ATTACK, guarantee="numerical", perturb=("word", 1))
    assert [record.index for record in found.records] == [4, 9]
    assert found.data == "sentences"
    perturbation = found.records[0].perturbation
    assert perturbation is not None
    assert perturbation.shape == (1, 8)  # one word's embedding moves
    with pytest.raises(InputError, match="have no sentences, and the model takes text"):
        tokenised(load("digits-32"), tokenizer)


def test_certifying_leaves_a_network_as_it_was() -> None:
    data = load("digits-32")
    converted = to_network(small_vit(), data.inputs[:1])
    before = weights_digest(converted.network)
    x = converted.encode(data.inputs[:1])
    holdfast.certify(converted.network, [(x[0], 0)], 0.1, "lofast", guarantee="numerical")
    assert weights_digest(converted.network) == before
    assert weights_digest(to_network(small_vit(), data.inputs[1:2]).network) == before
