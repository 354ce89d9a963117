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
from holdfast.compositions.certify import Certified
from holdfast.data.digits import Digits
from holdfast.errors import InputError, SoundnessError
from holdfast.models.digits import DigitsViT
from holdfast.network.network import Head, Network
from holdfast.studies import vit, vit_training
from holdfast.studies.jasmin import load_digits
from holdfast.studies.vit_training import HEADS, UNITS, WIDTH, DigitsTraining, train

PLAIN = DigitsTraining(1, "plain", "huggingface", seed=0, epochs=2)
LIPSCHITZ = replace(PLAIN, recipe="lipschitz")


def some_digits(count: int = 128) -> Digits:
    data, _ = load_digits()
    return Digits(data.images[:count], data.labels[:count], data.indices[:count])


@pytest.mark.parametrize("setting", [PLAIN, replace(PLAIN, init="torch"), LIPSCHITZ], ids=lambda s: s.name)
def test_training_depends_on_the_seed_alone(setting: DigitsTraining) -> None:
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
    with vit_training.watched(model) as movements:
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


def digit(place: int, radius: float, attack: float | None) -> vit.VitDigit:
    return vit.VitDigit(PLAIN, place, {"a": radius, "b": 2 * radius}, {"a": 1.0, "b": 2.0}, 700.0, attack)


def test_an_attack_below_a_proved_radius_is_refused() -> None:
    digits = [digit(0, 0.1, 0.4), digit(1, 0.2, None), digit(2, 0.25, 0.5)]
    assert vit.medians(digits) == {"attack": 0.5, "a": 0.2, "a / attack": 0.4, "b": 0.4, "b / attack": 0.8}
    with pytest.raises(SoundnessError, match=r"b proves 0.6 for digit 2 .* succeeds at 0.55"):
        digit(2, 0.3, 0.55)


def test_the_attack_finds_real_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear network, whose nearest change of answer is known."""
    monkeypatch.setattr(vit, "_STEPS", 30)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 64, generator=generator, dtype=torch.float64)
    network = Network([], vit_head(weight))
    x = torch.randn(2, 1, 64, generator=generator, dtype=torch.float64)
    labels = network(x).argmax(-1)
    subject = vit.TrainedVit(PLAIN, network, x, labels, [0, 1], 1.0, 0.0)
    lead, rows = network(x), weight[labels].unsqueeze(1) - weight
    exact = (lead.gather(1, labels[:, None]) - lead) / torch.linalg.vector_norm(rows, dim=-1)
    nearest = exact.scatter(1, labels[:, None], torch.inf).amin(-1)
    torch.testing.assert_close(torch.tensor(vit.attack(subject), dtype=torch.float64), nearest, rtol=1e-3, atol=0)
    assert vit._ascend(network, subject, nearest * 1.02).all()
    assert not vit._ascend(network, subject, nearest * 0.999).any()


def vit_head(weight: Tensor) -> Head:
    return Head(weight, torch.zeros(len(weight), dtype=torch.float64))


def run_command(folder: Path, *options: str, named: str = "") -> dict[str, Any]:
    arguments = ["repro", "vit", "--layers", "1,2", "--digits", "1", "--epochs", "2", *options]
    result = CliRunner().invoke(app, [*arguments, "--out", str(folder), "--runs", str(folder)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((folder / f"vit-plain-huggingface-seed0-epochs2{named}.json").read_text())
    return found


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "load_digits", lambda: (some_digits(64), some_digits()))
    monkeypatch.setattr(vit, "_STEPS", 3)

    def quick(network: Network, x: Tensor, *, method: str) -> list[Certified]:
        return [Certified(0, True, 1.0, {"lofast": 1e-6, "gains": 2e-6}[method], method, "proved", 3.0)]

    monkeypatch.setattr(vit, "certify_inputs", quick)
    content = run_command(tmp_path, "--methods", "lofast,gains", named="-lofast-gains")
    digits = [entry["numbers"] for entry in content["records"] if entry["kind"] == "digit"]
    assert [one["setting"]["layers"] for one in digits] == [1, 2]
    for one in digits:
        assert one["radii"] == {"lofast": 1e-6, "gains": 2e-6}
        assert one["seconds"] == {"lofast": 3.0, "gains": 3.0}
        assert one["processor_seconds"].keys() == one["seconds"].keys()
        assert one["memory"] > 0
        name = f"plain-huggingface-seed0-epochs2-layers{one['setting']['layers']}"
        assert content["summary"]["median"][name]["gains / attack"] == pytest.approx(2e-6 / one["attack"])


@pytest.mark.slow
def test_the_command_proves_radii(tmp_path: Path) -> None:
    for entry in run_command(tmp_path, "--json")["records"]:
        if entry["kind"] == "digit":
            assert 0 < entry["numbers"]["radii"]["telescoped"] <= entry["numbers"]["attack"]


def test_the_table_has_a_line_for_every_model_and_method() -> None:
    other = replace(PLAIN, layers=2)
    digits = [replace(digit(i, 0.1, 0.4), setting=setting) for setting in (PLAIN, other) for i in range(3)]
    made = vit.table([vit.VitModel(setting, 0.98, 1.0) for setting in (PLAIN, other)], digits)
    assert made.row_count == 4
    assert list(made.columns[5].cells) == ["0.250", "0.500"] * 2
