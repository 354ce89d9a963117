"""Results at a prompt, in a notebook and as tables of pandas; and what users have at hand as data, radii and models."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast import extras
from holdfast.certification.examples import read_examples
from holdfast.errors import HoldfastError, InputError
from holdfast.progress import watching
from holdfast.results import at_least, at_most

X, Y = torch.arange(12.0).reshape(3, 2, 2), torch.tensor([0, 1, 1])


def small_run() -> holdfast.CertificationRun:
    records = [
        holdfast.Certificate(
            index=i, label=0, prediction=0, margin=1.0, radius=0.1 * i, method="gains", guarantee="proved"
        )
        for i in range(3)
    ]
    settings = {"weights": "f" * 64, "data": "e" * 64, "method": "gains", "guarantee": "proved", "norm": "l2"}
    return holdfast.CertificationRun("a <model>", "digits", (0.1,), tuple(records), (3,), settings, "d" * 64)


def test_a_run_prints_accuracies_and_no_hashes() -> None:
    run = small_run()
    line = repr(run)
    assert "certified at 0.1: 66.7 %" in line
    assert "3 of 4" in line
    assert not any(digest * 64 in line for digest in "def")
    assert "a &lt;model&gt;" in run._repr_html_()
    assert repr(run.records[1]) == (
        "Certificate(input: 1, answer: 0 for 0, radius: 0.1 (l2), method: gains, guarantee: proved)"
    )


def test_tables_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(extras, "available", lambda package: False)
        with pytest.raises(HoldfastError, match=r"needs pandas, .* pip install 'holdfast\[notebook\]'"):
            small_run().to_dataframe()
    pytest.importorskip("pandas")
    frame = small_run().to_dataframe()
    assert list(frame.radius) == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    "data",
    [
        [(x, int(y)) for x, y in zip(X, Y, strict=True)],
        (X, Y),
        (X.numpy(), Y.numpy()),
        [(x.numpy(), y) for x, y in zip(X, Y, strict=True)],
        DataLoader(TensorDataset(X, Y), batch_size=2),
        TensorDataset(X, Y),
    ],
    ids=["pairs", "tensors", "arrays", "arrays in pairs", "loader", "data set of torch"],
)
def test_kinds_of_data(data: object) -> None:
    found = read_examples(data)  # type: ignore[arg-type]
    assert isinstance(found.inputs, torch.Tensor)
    torch.testing.assert_close(found.inputs, X)
    assert found.labels == (0, 1, 1)


def test_batches_of_words() -> None:
    rows = [{"input_ids": torch.tensor([i, 7]), "label": i} for i in range(3)]
    found = read_examples(DataLoader(rows, batch_size=2))  # type: ignore[arg-type, var-annotated]
    assert found.labels == (0, 1, 2)
    assert found.inputs[1]["input_ids"].tolist() == [[1, 7]]  # type: ignore[index, union-attr]


def test_labels_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"inputs have shape \(3, 2, 2\) and the labels \(2,\); expected one label"):
        read_examples((X, Y[:2]))


def test_modules_and_tensors_at_the_front_doors() -> None:
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.randn(3, 4)
    layer = holdfast.AttentionLayer.from_module(module)
    expected = holdfast.bound(layer, x, 0.5, "naive").value
    for eps in (torch.tensor(0.5), np.float64(0.5)):
        torch.testing.assert_close(holdfast.bound(module, x, eps, "naive").value, expected)
    several = holdfast.bound(module, x, torch.tensor([0.25, 0.5]), "naive")
    assert several.value.shape == (2,)
    assert several.eps == (0.25, 0.5)
    assert "eps: [0.1, 0.2]" in repr(holdfast.bound(module, x, torch.tensor([0.1, 0.2]), "naive"))
    assert "method: naive" in repr(several)
    assert holdfast.attack(module, x, np.array([0.5]), restarts=1, steps=1).lower[0] <= expected


def test_progress_is_a_function_a_bar_or_nothing() -> None:
    told: list[tuple[int, int]] = []
    with watching(lambda done, planned: told.append((done, planned)), "title") as tell:
        assert tell is not None
        tell(1, 2)
    assert told == [(1, 2)]
    with watching(False, "title") as tell:
        assert tell is None
    with watching(True, "title") as tell:  # no terminal: the bar stays silent
        assert tell is not None
        tell(1, 2)


def test_a_model_by_name_and_a_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        run = holdfast.certify("digits", "digits-32", 0.01, "lofast", limit=1, guarantee="numerical", progress=False)
    assert run.model == "digits"
    assert "input " in caplog.text


def test_shares_claim_no_more_than_was_found() -> None:
    assert [at_least(share) for share in (0.3019, 0.3, 2 / 3, 0.9999, 1.0, 0.0)] == [
        "30.1",
        "30.0",
        "66.6",
        "99.9",
        "100.0",
        "0.0",
    ]
    assert [at_most(share) for share in (0.3011, 0.3, 1 / 3, 1.0, 0.0)] == ["30.2", "30.0", "33.4", "100.0", "0.0"]
