"""Proved radii of the words of a sentence, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.data import Dataset
from holdfast.errors import InputError, SoundnessError
from holdfast.models import ModelConfig, Transformer, save
from holdfast.network.centre import Centre
from holdfast.network.compositions import compositions
from holdfast.network.embedding import Place
from holdfast.repro import words
from holdfast.train.config import TrainingConfig, read_training

_MODEL = ModelConfig(
    input="words",
    classes=2,
    width=8,
    depth=2,
    heads=2,
    tokens=6,
    vocabulary=12,
    word_norm=1.0,
    score_norm=2.0,
    positions="added",
    feed_forward="sll",
    activation="softplus",
    pool="mean",
)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(_MODEL).eval().requires_grad_(False)


@pytest.fixture
def data(model: Transformer) -> Dataset:
    ids = torch.tensor([[5, 2, 9, 3, 0, 0], [7, 4, 4, 0, 0, 0], [2, 3, 5, 8, 9, 6]])
    texts = ("a b c d", "e f f", "b d a g c h")
    return Dataset("sst2", "dev", ids, model(ids).argmax(1), torch.arange(3), "", texts)


@pytest.fixture
def task(tmp_path: Path, model: Transformer, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> words.Task:
    """A task whose training is done."""
    config = replace(read_training("sst2-smooth"), model=_MODEL)
    made = words.Task(config, 2, "telescoped", "gains", tmp_path, None, "holdfast repro words")
    save(model, made.folder / "model.safetensors", {})
    test = {"clean": 1.0, "content_off": 0.5, "total_variation": [0.1, 0.1], "score_norm": [4.0, 4.0]}
    (made.folder / "run.json").write_text(json.dumps({"config": config.to_dict(), "seconds": 1.0, "test": test}))
    monkeypatch.setattr(words, "load", lambda *args: data)
    return made


def test_a_word_that_does_not_move_leaves_the_network_as_it_is(model: Transformer, data: Dataset) -> None:
    network, x = model.to_network(), model.encode(data.inputs[:1])
    still = network.before(Place(x, [2]))(torch.zeros_like(x[:, :1]))
    assert torch.equal(still, network(x))
    torch.testing.assert_close(still, model.double()(data.inputs[:1]), rtol=1e-9, atol=1e-12)


def test_words_that_share_their_sentence_get_the_radii_they_get_alone(model: Transformer, data: Dataset) -> None:
    network, x = model.to_network(), model.encode(data.inputs)
    still, telescoped = torch.zeros_like(x[:1, :1]), compositions["telescoped"]
    first = Centre(network.before(Place(x[:1], [0])), still)
    other_sentence = Centre(network.before(Place(x[2:], [1])), still)
    telescoped(other_sentence)
    for like in (first, other_sentence):  # of the second there is nothing to share, and nothing must be
        word = network.before(Place(x[:1], [1]))
        alone, beside = (telescoped(Centre(word, still, like=each)).radius for each in (None, like))
        assert torch.equal(alone, beside)


def test_radii_are_below_those_of_the_attack_and_are_kept(task: words.Task) -> None:
    assert words.collect(task) is None
    for number in range(task.sentences):
        words.certify((task, number), lambda share: None)
    found = words.collect(task)
    assert found is not None
    assert [len(sentence.words) for sentence in found.sentences] == [
        len(sentence.together.text.split()) for sentence in found.sentences
    ]
    for sentence in found.sentences:
        for moved in (sentence.together, *sentence.words):
            assert 0 < moved.radius < (moved.attack or torch.inf)
        assert all(word.radius >= 0.99 * sentence.together.radius for word in sentence.words)
    assert found.one_word.count == sum(len(sentence.words) for sentence in found.sentences)
    assert 0 < found.embedding_norm <= 1 + 1e-6
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["mean"]["all words"]["count"] == 2
    assert words.table([found]).row_count == 2


def test_a_radius_beyond_the_attack_is_refused() -> None:
    with pytest.raises(SoundnessError, match=r"proves 0\.5 for 'bad' and an attack succeeds at 0\.4"):
        words.Moved("bad", 0.5, 0.4, "telescoped", 1.0)


def test_more_sentences_than_there_are_is_an_error(task: words.Task) -> None:
    with pytest.raises(InputError, match="9 sentences are wanted, and the model gets 3 right"):
        words.certify((replace(task, sentences=9), 0), lambda share: None)


def test_a_model_of_another_config_is_not_taken(task: words.Task) -> None:
    assert task.trained
    other: TrainingConfig = replace(task.config, model=replace(_MODEL, score_norm=1.0))
    with pytest.raises(InputError, match="holds a model of another config"):
        assert replace(task, config=other).trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "0;1"], "--seed is '0;1'; expected whole numbers"),
        (["--method", "telescope"], "telescoped"),
        (["--config", "digits-smooth"], "is a model of images; expected one of words"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["repro", "words", *options])
    assert result.exit_code != 0
    assert message in str(result.exception)
