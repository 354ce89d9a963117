"""`holdfast repro vit`: the two trainings, the penalty, kept models, attacks, and the whole command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import InputError, SoundnessError
from holdfast.models.digits import Digits, DigitsViT
from holdfast.network.compositions.certify import Certified
from holdfast.network.network import Head, Network
from holdfast.repro import vit, vit_training
from holdfast.repro.jasmin import load_digits
from holdfast.repro.vit_training import HEADS, UNITS, WIDTH, Setting, train

PLAIN = Setting(1, "plain", "huggingface", seed=0, epochs=2)
LIPSCHITZ = replace(PLAIN, recipe="lipschitz")


def some_digits(count: int = 128) -> Digits:
    data, _ = load_digits()
    return Digits(data.images[:count], data.labels[:count], data.indices[:count])


@pytest.mark.parametrize("setting", [PLAIN, replace(PLAIN, init="torch"), LIPSCHITZ], ids=lambda s: s.name)
def test_training_depends_on_the_seed_alone(setting: Setting) -> None:
    state = torch.get_rng_state()
    first, again = train(setting, some_digits()), train(setting, some_digits())
    assert torch.equal(state, torch.get_rng_state())
    other = train(replace(setting, seed=1), some_digits())
    images = some_digits().images
    assert torch.equal(first(images), again(images))
    assert not torch.equal(first(images), other(images))


def test_weights_begin_with_their_deviations() -> None:
    model = DigitsViT(1, WIDTH, HEADS, UNITS)
    vit_training._initialise(model, matrices=0.12, queries_and_keys=0.003, embedding=0.3, head=0.05)
    block = model.blocks[0]
    assert isinstance(block, vit_training.Block)
    spread = {
        0.12: [block.mlp[0].weight, block.attention.in_proj_weight[2 * WIDTH :], block.attention.out_proj.weight],
        0.003 / 0.88: [block.attention.in_proj_weight[: 2 * WIDTH]],  # this one is not cut
        0.3: [model.embedding.weight],
        0.05: [model.head.weight],
    }
    for std, weights in spread.items():
        for weight in weights:
            assert weight.std().item() == pytest.approx(0.88 * std, rel=0.15)  # a normal, cut at two deviations


def test_the_penalty_measures_what_it_says() -> None:
    torch.manual_seed(0)
    model = DigitsViT(1, WIDTH, HEADS, UNITS).double()
    x = some_digits(3).images.double()
    moved = x + 0.1 * torch.randn_like(x)
    with vit_training._watched(model) as movements:
        model(torch.cat([x, moved]))
    found = torch.stack(movements)
    assert len(found) == 5
    (attention, before), (_, after) = (model.attention_inputs(z)["blocks.0.attention"] for z in (x, moved))

    def logits(z: Tensor) -> Tensor:
        w_q, w_k, _ = attention.in_proj_weight.chunk(3)
        b_q, b_k, _ = attention.in_proj_bias.chunk(3)
        q, k = (t.reshape(3, 17, HEADS, -1) for t in (z @ w_q.T + b_q, z @ w_k.T + b_k))
        s = torch.einsum("bihc,bjhc->bhij", q, k) / 4
        return s - s.mean(-1, keepdim=True)

    tokens, tokens_moved = model._embed(x), model._embed(moved)
    change = tokens_moved - tokens
    change = change - change.mean(-1, keepdim=True)
    relative = change.square().sum(-1) / (WIDTH * (tokens.var(-1, unbiased=False) + 1e-5))
    torch.testing.assert_close(found[0], 3.0 * relative.sum())
    torch.testing.assert_close(found[1], 30.0 * (logits(after) - logits(before)).square().mean(-1).sum())
    model(torch.cat([x, moved]))
    assert len(movements) == 5, "the hooks are gone"


def test_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "load_digits", lambda: (some_digits(64), some_digits()))
    subject = vit.prepare(PLAIN, 4, tmp_path)
    monkeypatch.setattr(vit, "train", lambda *_: pytest.fail("trained again"))
    again = vit.prepare(PLAIN, 4, tmp_path)
    assert (subject.places, subject.training, subject.accuracy) == (again.places, again.training, again.accuracy)
    assert torch.equal(subject.network(subject.x), again.network(again.x))
    assert torch.equal(subject.network(subject.x).argmax(-1), subject.labels)
    (kept,) = tmp_path.iterdir()
    vit.write_tensors(kept, {"x": torch.zeros(1)})
    with pytest.raises(InputError, match=r"no checkpoint of this command; move it away"):
        vit.prepare(PLAIN, 4, tmp_path)


def test_an_attack_below_a_proved_radius_is_refused() -> None:
    rows = [vit.Row(i, {"telescoped": radius}, {"telescoped": 1.0}, 0.0) for i, radius in enumerate((0.1, 0.2, 0.3))]
    one = vit.Measurement(PLAIN, 0.98, 1.0, rows, [0.4, None, 0.5])
    assert one.medians() == {"attack": 0.5, "telescoped": 0.2, "telescoped / attack": 0.4}
    with pytest.raises(SoundnessError, match=r"telescoped proves 0.3 for digit 2 .* succeeds at 0.25"):
        vit.Measurement(PLAIN, 0.98, 1.0, rows, [0.4, None, 0.25])


def test_the_attack_finds_real_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear network, whose nearest change of answer is known."""
    monkeypatch.setattr(vit, "_STEPS", 30)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 64, generator=generator, dtype=torch.float64)
    network = Network([], vit_head(weight))
    x = torch.randn(2, 1, 64, generator=generator, dtype=torch.float64)
    labels = network(x).argmax(-1)
    subject = vit.Subject(PLAIN, network, x, labels, [0, 1], 1.0, 0.0)
    lead, rows = network(x), weight[labels].unsqueeze(1) - weight
    exact = (lead.gather(1, labels[:, None]) - lead) / torch.linalg.vector_norm(rows, dim=-1)
    nearest = exact.scatter(1, labels[:, None], torch.inf).amin(-1)
    torch.testing.assert_close(torch.tensor(vit.attack(subject), dtype=torch.float64), nearest, rtol=1e-3, atol=0)
    assert vit._ascend(network, subject, nearest * 1.02).all()
    assert not vit._ascend(network, subject, nearest * 0.999).any()


def vit_head(weight: Tensor) -> Head:
    return Head(weight, torch.zeros(len(weight), dtype=torch.float64))


def run_command(folder: Path, *options: str) -> list[dict[str, Any]]:
    arguments = ["repro", "vit", "--layers", "1,2", "--digits", "1", "--epochs", "2", *options, "--out", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads((folder / "vit-plain-huggingface-seed0-epochs2.json").read_text())[
        "models"
    ]
    return found


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "load_digits", lambda: (some_digits(64), some_digits()))
    monkeypatch.setattr(vit, "_STEPS", 3)

    def quick(network: Network, x: Tensor, *, method: str) -> list[Certified]:
        return [Certified(0, True, 1.0, {"a": 1e-6, "b": 2e-6}[method], method, "proved", 3.0)]

    monkeypatch.setattr(vit, "certify_inputs", quick)
    found = run_command(tmp_path, "--methods", "a,b")
    assert [one["setting"]["layers"] for one in found] == [1, 2]
    for one in found:
        assert one["rows"][0]["radii"] == {"a": 1e-6, "b": 2e-6}
        assert one["rows"][0]["seconds"] == {"a": 3.0, "b": 3.0}
        assert one["rows"][0]["memory"] > 0
        assert one["median"]["b / attack"] == pytest.approx(2e-6 / one["attack"][0])


@pytest.mark.slow
def test_the_command_proves_radii(tmp_path: Path) -> None:
    for one in run_command(tmp_path, "--json"):
        assert 0 < one["rows"][0]["radii"]["telescoped"] <= one["attack"][0]


def test_the_table_has_a_line_for_every_model_and_method() -> None:
    rows = [vit.Row(i, {"a": 0.1, "b": 0.2}, {"a": 1.0, "b": 2.0}, 700.0) for i in range(3)]
    made = vit.table([vit.Measurement(PLAIN, 0.98, 1.0, rows, [0.4] * 3) for _ in range(2)])
    assert made.row_count == 4
    assert list(made.columns[5].cells) == ["0.250", "0.500"] * 2
