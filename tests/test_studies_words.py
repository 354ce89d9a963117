"""Proved radii of the words of a sentence, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.compositions import compositions
from holdfast.data import Dataset
from holdfast.errors import InputError, SoundnessError
from holdfast.layers.tokens.embedding import Place
from holdfast.models import ModelConfig, Transformer, save
from holdfast.network.centre import Centre
from holdfast.studies import StudyRun, Workplace, words
from holdfast.train.config import read_training

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


CONFIG = replace(read_training("sst2-smooth"), model=_MODEL)
PARAMETERS = words.WordsParameters("sst2-smooth", (0,), 2)


@pytest.fixture
def place(tmp_path: Path, model: Transformer, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A place where the training is done."""
    folder = tmp_path / "words-sst2-smooth-seed-0"
    folder.mkdir()
    save(model, folder / "model.safetensors", {})
    test = {"clean": 1.0, "content_off": 0.5, "total_variation": [0.1, 0.1], "score_norm": [4.0, 4.0]}
    (folder / "run.json").write_text(json.dumps({"config": CONFIG.to_dict(), "seconds": 1.0, "test": test}))
    monkeypatch.setattr(words, "load", lambda *args: data)
    monkeypatch.setattr(words, "read_training", lambda name: CONFIG)
    return Workplace(tmp_path)


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


def test_radii_are_below_those_of_the_attack_and_are_kept(place: Workplace, tmp_path: Path) -> None:
    run = StudyRun("words", PARAMETERS, tmp_path / "out", place)
    plan = run.plan()
    run.begin()
    for part in plan.parts:
        run.measure(part, lambda share: None)
    assert run.pending(plan.parts) == []
    sentences, words = run.read().of("sentence"), run.read().of("words")
    for sentence in sentences:
        alone = [word for some in words if some.index == sentence.index for word in some.words]
        assert [word.text for word in alone] == sentence.together.text.split()
        for moved in (sentence.together, *alone):
            assert 0 < moved.radius < (moved.attack or torch.inf)
        assert all(word.radius >= 0.99 * sentence.together.radius for word in alone)
    assert [len(some.words) for some in words] == [4, 2, 4, 0]  # of sentences of six and of four words
    shown = run.show(plan)
    mean = json.loads(run.numbers.read_text())["summary"]["mean"]["seed 0"]
    assert mean["one word"]["count"] == sum(len(some.words) for some in words)
    assert mean["all words"]["count"] == 2
    (model,) = run.read().of("model")
    assert 0 < model.embedding_norm <= 1 + 1e-6
    assert shown.tables[0].row_count == 2


def test_a_radius_beyond_the_attack_is_refused() -> None:
    with pytest.raises(SoundnessError, match=r"proves 0\.5 for 'bad' and an attack succeeds at 0\.4"):
        words.MovedText("bad", 0.5, 0.4, "telescoped", 1.0)


def test_more_sentences_than_there_are_is_an_error(place: Workplace, data: Dataset) -> None:
    folder = place.runs / "words-sst2-smooth-seed-0"
    with pytest.raises(InputError, match="9 sentences are wanted, and the model gets 3 right"):
        words.Sentence.of(folder, data, 9, 0, 0)


def test_a_model_of_another_config_is_not_taken(place: Workplace) -> None:
    assert words.trained(CONFIG, place, lambda share: None).name == "words-sst2-smooth-seed-0"
    with pytest.raises(InputError, match="holds a model of another config"):
        words.trained(replace(CONFIG, model=replace(_MODEL, score_norm=1.0)), place, lambda share: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "0;1"], "--seed has '0;1'; expected whole numbers"),
        (["--method", "telescope"], "telescoped"),
        (["--config", "digits-smooth"], "is a model of images; expected one of words"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["repro", "words", *options])
    assert result.exit_code != 0
    assert message in str(result.exception)
