"""The monitor in a plain loop and in a Hugging Face Trainer, and JaSMin there by one argument."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast import AttentionLayer, InputError, JaSMin
from holdfast.extras import require
from holdfast.models import DigitsViT, load_digits_vit
from holdfast.train import Monitor

IMAGES = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def vit() -> DigitsViT:
    torch.manual_seed(0)
    return DigitsViT()


def test_numbers_are_those_of_the_layers() -> None:
    model = load_digits_vit()
    record = Monitor(model, IMAGES).measure(7)
    assert record.step == 7
    assert [layer.name for layer in record.layers] == ["blocks.0.attention", "blocks.1.attention"]
    for state, (module, x) in zip(record.layers, model.attention_inputs(IMAGES).values(), strict=True):
        layer = AttentionLayer.from_module(module).double()
        p = layer.attention(x.double())
        top = p.topk(2).values
        g_1 = top[..., 0] * (1 - top[..., 0] + top[..., 1])
        assert state.lipschitz == pytest.approx(
            holdfast.local_lipschitz(layer, x.double()).value.max().item(), rel=1e-2
        )
        assert state.g_1 == pytest.approx(g_1.max().item(), rel=1e-4)
        assert state.norm_p == pytest.approx(torch.linalg.matrix_norm(p, 2).max().item(), rel=1e-2)
        assert state.entropy == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-4)
    assert record.largest.lipschitz == max(state.lipschitz for state in record.layers)


def test_measures_every_so_many_steps(vit: DigitsViT, tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    monitor = Monitor(vit, IMAGES, every=3, path=path)
    returned = [monitor.step(step) for step in range(7)]
    assert [record is not None for record in returned] == [True, False, False, True, False, False, True]
    assert monitor.records == tuple(record for record in returned if record is not None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 3, 6]
    assert lines[0]["layers"][0]["lipschitz"] == monitor.records[0].layers[0].lipschitz


def test_training_is_not_disturbed(vit: DigitsViT) -> None:
    vit.train()
    vit.blocks[0].eval()
    modes = [module.training for module in vit.modules()]
    state = torch.get_rng_state()
    penalty = JaSMin(vit)
    loss = vit(IMAGES).sum() + penalty()
    Monitor(vit, IMAGES).measure(0)
    assert [module.training for module in vit.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in vit.parameters())
    torch.autograd.backward(loss)
    assert penalty() == 0  # the probe ran without gradients


def test_modes_come_back_after_an_error(vit: DigitsViT) -> None:
    vit.train()
    with pytest.raises(InputError, match="images have shape"):
        Monitor(vit, IMAGES[0]).measure(0)
    assert vit.training


def enlarge(vit: DigitsViT, block: int, factor: float) -> None:
    with torch.no_grad():
        vit.blocks[block].attention.out_proj.weight.mul_(factor)  # type: ignore[union-attr]


def test_fast_growth_gets_one_warning(vit: DigitsViT) -> None:
    monitor = Monitor(vit, IMAGES, every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step(0)
        enlarge(vit, 1, 1.6)
        monitor.step(1)
    enlarge(vit, 1, 1.6)
    with pytest.warns(
        RuntimeWarning, match=r"^step 2: .* 'blocks.1.attention' is 2.\d+ times .* since step 0; consider"
    ):
        grown = monitor.step(2)
    assert grown is not None
    assert grown.warning is not None
    assert "\n" not in grown.warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step(3)  # the same growth is not reported again
    enlarge(vit, 0, 5.0)
    enlarge(vit, 1, 3.0)
    with pytest.warns(RuntimeWarning, match=r"'blocks.0.attention' .* since step 2 \(1 other"):
        monitor.step(4)


def test_slow_growth_gets_none(vit: DigitsViT) -> None:
    monitor = Monitor(vit, IMAGES, every=1, window=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(5):
            monitor.step(step)
            enlarge(vit, 1, 1.3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": 0}, "every is 0; expected at least 1"),
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"growth": 1.0}, "growth is 1.0; expected a factor above 1"),
    ],
)
def test_refusals(vit: DigitsViT, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Monitor(vit, IMAGES, **options)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        holdfast.train.Trainer  # noqa: B018


# -- in a Trainer


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(50, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[0] % 2}


def bert(dropout: float = 0.0) -> nn.Module:
    transformers = require("transformers", "hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **sizes, **dropouts))


def arguments(folder: Path, **options: Any) -> Any:
    transformers = require("transformers", "hf")
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return transformers.TrainingArguments(str(folder), save_strategy="no", logging_steps=1, **defaults | options)


def test_trainer_with_monitor_and_penalty(tmp_path: Path) -> None:
    model = bert(dropout=0.1)
    probe = {name: t[None] for name, t in Sentences()[0].items() if name != "labels"}
    callback = holdfast.train.MonitorCallback(probe, every=2, path=tmp_path / "monitor.jsonl")
    trainer = holdfast.train.JaSMinTrainer(
        model,
        arguments(tmp_path),
        jasmin=JaSMin(model, k=2, weight=0.1),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.monitor is not None
    assert [record.step for record in callback.monitor.records] == [0, 2, 4]
    assert len((tmp_path / "monitor.jsonl").read_text().splitlines()) == 3
    name = "bert.encoder.layer.0.attention.self"
    logged = [entry for entry in trainer.state.log_history if any(key.startswith(name) for key in entry)]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def trainer_gradients(folder: Path, weight: float, accumulation: int) -> list[Tensor]:
    """The gradients of the first step."""
    transformers = require("transformers", "hf")
    model, seen = bert(), []

    class Look(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    options = {"max_steps": 1, "per_device_train_batch_size": 8 // accumulation, "max_grad_norm": 0.0}
    holdfast.train.JaSMinTrainer(
        model,
        arguments(folder, gradient_accumulation_steps=accumulation, train_sampling_strategy="sequential", **options),
        jasmin=JaSMin(model, weight=weight),
        train_dataset=Sentences(),
        callbacks=[Look()],
    ).train()
    return seen[0]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_penalty_is_added_once(tmp_path: Path, accumulation: int) -> None:
    """What it adds to the gradient of a step is the gradient of its mean over the accumulated batches."""
    model = bert()
    penalty, total = JaSMin(model, weight=10.0), torch.zeros(())
    ids = torch.stack([Sentences()[i]["input_ids"] for i in range(8)])
    for part in ids.chunk(accumulation):
        model(part)
        total = total + penalty() / accumulation
    wanted = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    runs = [trainer_gradients(tmp_path, weight, accumulation) for weight in (10.0, 0.0)]
    for found, plain, want in zip(*runs, wanted, strict=True):
        torch.testing.assert_close(
            found - plain, torch.zeros_like(plain) if want is None else want, atol=1e-6, rtol=1e-4
        )
