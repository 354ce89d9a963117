"""JaSMin: the formula and its edges, and the penalty attached to models that nobody edited."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import holdfast
from holdfast import AttentionLayer, InputError, JaSMin, jasmin
from holdfast.cli.repro import app
from holdfast.extras import require
from holdfast.models import DigitsViT
from holdfast.studies import jasmin as repro
from holdfast.studies.penalties import variants


def literal(p: Tensor, k: int) -> Tensor:
    """The penalty of each row by its definition, all entries allowed."""
    p = p.sort(-1, descending=True).values
    p = torch.cat([p, torch.zeros_like(p[..., :1])], -1)

    def g(j: int) -> Tensor:
        return p[..., j - 1] * (1 - p[..., j - 1] + p[..., j])

    return g(1).log() if k == 0 else (g(1) / g(k)).log()


def scores(*shape: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- the formula


@pytest.mark.parametrize("k", [0, 2, 3, 5])
def test_is_the_mean_of_the_largest_rows(k: int) -> None:
    z = scores(3, 2, 6, 6)
    expected = literal(z.softmax(-1), k).amax(-1)
    for value in (jasmin(z.softmax(-1), k), jasmin(z.log_softmax(-1), k, log_probabilities=True)):
        torch.testing.assert_close(value, expected.mean())
    torch.testing.assert_close(jasmin(z.softmax(-1), k, "sum"), expected.sum())
    torch.testing.assert_close(jasmin(z.softmax(-1), k, "max"), expected.max())
    torch.testing.assert_close(jasmin(z[0, 0].softmax(-1), k), expected[0, 0])


@pytest.mark.parametrize("k", [0, 2, 4])
def test_gradient_is_that_of_the_value(k: int) -> None:
    z = scores(2, 2, 5, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: jasmin(z.softmax(-1), k), z)
    assert torch.autograd.gradcheck(lambda z: jasmin(z.log_softmax(-1), k, "sum", log_probabilities=True), z)


def test_gradient_is_the_closed_form() -> None:
    z = scores(7, 1, 1, 9).requires_grad_()
    (gradient,) = torch.autograd.grad(jasmin(z.softmax(-1), 0, "sum"), z)
    p = z.detach().softmax(-1)
    order = p.argsort(-1, descending=True)
    p_1, p_2 = p.gather(-1, order).split([1, 1, 7], -1)[:2]
    expected = -p * (1 - 2 * p_1 + 2 * p_2) / (1 - p_1 + p_2)
    expected.scatter_(-1, order[..., :1], 1 - 2 * p_1)
    expected.scatter_(-1, order[..., 1:2], 2 * p_2 * (p_1 - p_2) / (1 - p_1 + p_2))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("spread", [1.0, 4.0, 9.0])
def test_the_ratio_pulls_the_largest_score_down_by_at_most_its_distance_from_one(spread: float) -> None:
    """The derivative by the largest score is (1 - p_1) - p_1 (p_k - p_{k+1}) / (1 - p_k + p_{k+1}) ≥ 0."""
    z = scores(9, 1, 1, 9, spread=spread).requires_grad_()
    for k in (2, 5):
        (gradient,) = torch.autograd.grad(jasmin(z.softmax(-1), k, "sum"), z)
        p = z.detach().softmax(-1).sort(-1, descending=True).values
        p_1, p_k, p_next = p[..., 0], p[..., k - 1], p[..., k]
        expected = (1 - p_1) - p_1 * (p_k - p_next) / (1 - p_k + p_next)
        found = gradient.gather(-1, z.argmax(-1, keepdim=True)).squeeze(-1)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-6)
        assert (found > -1e-12).all()


def test_only_the_largest_row_gets_a_gradient() -> None:
    p = scores(2, 3, 5, 5).softmax(-1).requires_grad_()
    (gradient,) = torch.autograd.grad(jasmin(p), p)
    assert gradient.ne(0).any(-1).sum(-1).eq(1).all()


def test_parts_of_a_batch_are_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    p = scores(5, 2, 6, 6).softmax(-1)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    whole = jasmin(p, 3, mask=mask)
    monkeypatch.setattr(sys.modules["holdfast.train.jasmin"], "_CPU_CHUNK", 2 * 6 * 6 * 2)
    assert jasmin(p, 3, mask=mask) == whole


def test_flat_rows_are_free_of_the_ratio() -> None:
    assert jasmin(torch.full((1, 1, 4, 8), 1 / 8), k=3).abs() < 1e-6
    assert jasmin(torch.full((1, 1, 4, 8), 1 / 8), k=100).abs() < 1e-6


def test_peaked_rows_keep_their_digits_in_float32() -> None:
    z = torch.tensor([[[20.0, 1.0, 0.5, 0.2]]])
    for k in (0, 2):
        exact = literal(z.double().softmax(-1), k).item()
        assert jasmin(z.softmax(-1), k).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("k", [0, 2, 3, 10])
@pytest.mark.parametrize("gap", [90.0, 200.0, 1e4, 1e30])
def test_one_hot_rows_are_finite(k: int, gap: float) -> None:
    z = (gap * torch.eye(5)[None]).requires_grad_()
    everywhere = torch.ones(5, 5, dtype=torch.bool)
    for value in (
        jasmin(z.log_softmax(-1), k, log_probabilities=True),
        jasmin(z.softmax(-1), k),
        jasmin(z.softmax(-1), k, mask=everywhere),
    ):
        (gradient,) = torch.autograd.grad(value, z, retain_graph=True)
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert jasmin(z.log_softmax(-1), k, log_probabilities=True).item() == pytest.approx(
        math.log(5) - gap if k == 0 else math.log(5), rel=1e-5
    )


def test_rows_with_one_allowed_entry_are_left_out() -> None:
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    p = scores(2, 3, 4, 4).masked_fill(~causal, -torch.inf).softmax(-1)
    for k in (0, 2):
        assert jasmin(p, k, mask=causal) == jasmin(p[..., 1:, :], k, mask=causal[1:]) == jasmin(p, k)
    assert jasmin(torch.ones(2, 2, 1, 1)) == 0
    no_row = jasmin(torch.eye(3)[None].requires_grad_())
    assert no_row == 0
    assert no_row.requires_grad


def test_a_head_without_rows_does_not_count_in_the_mean() -> None:
    p = torch.stack([scores(3, 3).softmax(-1), torch.eye(3, dtype=torch.float64)])
    assert jasmin(p[None]) == jasmin(p[None, :1])


@pytest.mark.parametrize("allowed", [2, 3, 4, 6])
def test_short_rows_use_what_they_have(allowed: int) -> None:
    z = scores(1, 1, 1, 6)
    mask = torch.arange(6) < allowed
    p = z.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = literal(p[..., :allowed], min(4, allowed - 1)).squeeze() if allowed > 2 else z.new_zeros(())
    torch.testing.assert_close(jasmin(p, 4, mask=mask), expected)
    torch.testing.assert_close(jasmin(p[..., :allowed], 4), expected)


def test_half_precision_is_widened() -> None:
    p = scores(1, 2, 5, 5).softmax(-1).bfloat16()
    assert jasmin(p).dtype == torch.float32
    assert jasmin(p) == jasmin(p.float())


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: jasmin(p, 1), "k is 1; .* always 0: use k=0, or k of at least 2"),
        (lambda p: jasmin(p, -2), "k is -2; expected 0 or an integer of at least 2"),
        (lambda p: jasmin(p, 2.5), "k is 2.5"),
        (lambda p: jasmin(p, reduction="median"), "reduction is 'median'; expected"),
        (lambda p: jasmin(p[0, 0]), r"shape \(3,\); expected probabilities"),
        (lambda p: jasmin(p, mask=torch.ones(3, 3)), "mask is torch.float32; expected a bool tensor"),
        (lambda p: jasmin(p, mask=torch.ones(4, 4).bool()), r"mask has shape \(4, 4\); expected .* broadcasts"),
        (lambda p: JaSMin(nn.Linear(2, 2), k=1), "k is 1"),
        (lambda p: JaSMin(nn.Linear(2, 2), weight=math.nan), "weight is nan"),
        (lambda p: JaSMin(nn.Linear(2, 2), layers="encoder"), "layers is the string 'encoder'"),
    ],
)
def test_refusals(call: Callable[[Tensor], Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        call(torch.full((1, 3, 3), 1 / 3))


# -- attached to models

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 16}
PADDED = (7, 5, 7)  # tokens of the three sentences


def language_model(name: str, attention: str) -> nn.Module:
    transformers = require("transformers", "hf")
    vocabulary = {"vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
    options = SIZES | vocabulary | {"attn_implementation": attention}
    options |= {"num_key_value_heads": 2} if name == "Llama" else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options))
    return spread(model)


def spread(model: nn.Module) -> nn.Module:
    """Attention that is not flat."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def sentences() -> dict[str, Tensor]:
    mask = torch.arange(7) < torch.tensor(PADDED)[:, None]
    return {"input_ids": torch.randint(50, (3, 7), generator=torch.manual_seed(1)), "attention_mask": mask.long()}


def gradients(value: Tensor, model: nn.Module) -> list[Tensor]:
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters(), strict=True)]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama"])
def test_language_models_with_padding(name: str, k: int) -> None:
    """Against the probabilities that the eager model returns; padding has no rows."""
    model, batch = language_model(name, "eager"), sentences()
    allowed = batch["attention_mask"].bool()[:, None, None, :].expand(3, 1, 7, 7)
    allowed = allowed if name == "Bert" else allowed & torch.ones(7, 7, dtype=torch.bool).tril()
    layers = model(**batch, output_attentions=True).attentions
    parts = [
        jasmin(p[i : i + 1, :, :n], k, mask=allowed[i : i + 1, :, :n]) for p in layers for i, n in enumerate(PADDED)
    ]
    expected = torch.stack(parts).mean()
    wanted = gradients(expected, model)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        before = model(**batch).last_hidden_state
        with JaSMin(model, k, weight=0.5) as penalty:
            assert torch.equal(model(**batch).last_hidden_state, before)
            value = penalty()
        torch.testing.assert_close(value, 0.5 * expected)
        for found, want in zip(gradients(value, model), wanted, strict=True):
            torch.testing.assert_close(found, 0.5 * want, atol=1e-6, rtol=1e-4)


def huggingface_vit() -> tuple[nn.Module, Tensor]:
    transformers = require("transformers", "hf")
    return transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)), torch.randn(2, 3, 8, 8)


def timm_vit() -> tuple[nn.Module, Tensor]:
    timm = require("timm", "vision")
    model = timm.models.VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3)
    return model, torch.randn(2, 3, 8, 8)


def torch_encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(16, 4, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(2, 6, 16)


def torch_attention() -> tuple[nn.Module, Any]:
    x = torch.randn(2, 6, 16)
    return nn.MultiheadAttention(16, 4, batch_first=True), (x, x, x)


def our_vit() -> tuple[nn.Module, Tensor]:
    return DigitsViT(), torch.rand(2, 8, 8)


OTHERS = [huggingface_vit, timm_vit, torch_encoder, torch_attention, our_vit]


@pytest.fixture(params=OTHERS, ids=lambda make: make.__name__)
def other(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, x = request.param()
    return spread(model), x


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_vision_and_torch_models(other: tuple[nn.Module, Any], training: bool) -> None:
    """Against the layers that `trace` rebuilds."""
    model, inputs = other
    traced = holdfast.trace(model, inputs)
    model.train(training)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    before = first(model(*arguments))
    with JaSMin(model, k=2, weight=1.0) as penalty:
        assert torch.equal(first(model(*arguments)), before)
        value = penalty()
    expected = torch.stack([jasmin(found.layer.attention(found.x), 2) for found in traced]).mean()
    torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-4)
    assert any(g.ne(0).any() for g in gradients(value, model))


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@pytest.fixture
def vit() -> Iterator[DigitsViT]:
    torch.manual_seed(0)
    yield DigitsViT()
    assert not _get_current_function_mode_stack()  # every tap is closed again


IMAGES = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


def reference(model: DigitsViT, images: Tensor, names: tuple[str, ...] = ("0", "1")) -> Tensor:
    inputs = [model.attention_inputs(images)[f"blocks.{name}.attention"] for name in names]
    return torch.stack([jasmin(AttentionLayer.from_module(m).attention(x)) for m, x in inputs]).mean()


def test_several_passes_count_together(vit: DigitsViT) -> None:
    penalty = JaSMin(vit, weight=1.0)
    vit(IMAGES[:1])
    vit(IMAGES[1:2])
    together = penalty()
    torch.testing.assert_close(together, (reference(vit, IMAGES[:1]) + reference(vit, IMAGES[1:2])) / 2)
    vit(IMAGES[:1])
    penalty.reset()
    vit(IMAGES[1:2])
    torch.testing.assert_close(penalty(), reference(vit, IMAGES[1:2]))


def test_layers_are_chosen_by_name(vit: DigitsViT) -> None:
    penalty = JaSMin(vit, weight=1.0, layers=["blocks.1.*"])
    vit(IMAGES)
    torch.testing.assert_close(penalty(), reference(vit, IMAGES, ("1",)))
    penalty.remove()
    nothing = JaSMin(vit, layers=["encoder.*"])
    vit(IMAGES)
    with pytest.raises(InputError, match=r"'encoder.\*'.* names none of .*'blocks.0.attention'"):
        nothing()


def test_passes_without_gradients_cost_nothing(vit: DigitsViT) -> None:
    penalty = JaSMin(vit)
    with pytest.raises(InputError, match="has not run since the last penalty"):
        penalty()
    with torch.no_grad():
        vit.eval()(IMAGES)
        assert penalty() == 0
        vit.train()(IMAGES)
        with pytest.raises(InputError, match=r"training mode without gradients; .* use_reentrant=False"):
            penalty()


def test_a_model_without_attention_is_refused() -> None:
    model = nn.Linear(2, 2)
    penalty = JaSMin(model)
    model(torch.ones(1, 2))
    with pytest.raises(InputError, match="no dot-product attention was seen"):
        penalty()


def test_removal(vit: DigitsViT) -> None:
    with JaSMin(vit) as penalty:
        vit(IMAGES)
        penalty()
    vit(IMAGES)
    with pytest.raises(InputError, match="has not run"):
        penalty()
    assert not vit._forward_hooks
    assert not vit._forward_pre_hooks


def test_two_penalties_on_one_model(vit: DigitsViT) -> None:
    fast = torch.backends.mha.get_fastpath_enabled()
    one, two = JaSMin(vit, weight=1.0), JaSMin(vit, k=2, weight=1.0)
    vit(IMAGES)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    torch.testing.assert_close(one(), reference(vit, IMAGES))
    assert two() > 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_fails_leaves_nothing(vit: DigitsViT, error: type[BaseException]) -> None:
    penalty = JaSMin(vit, weight=1.0)

    def fail(*_: Any) -> None:
        raise error

    handle = vit.norm.register_forward_hook(fail)
    with pytest.raises(error):
        vit(IMAGES[:1])
    if error is ValueError:  # torch runs no hooks for the other; the next pass or `remove` closes the tap
        assert not _get_current_function_mode_stack()
    handle.remove()
    vit(IMAGES)
    torch.testing.assert_close(penalty(), reference(vit, IMAGES))


def test_copies_and_files_know_nothing_of_it(vit: DigitsViT) -> None:
    names = set(vit.state_dict())
    penalty = JaSMin(vit)
    assert set(vit.state_dict()) == names
    for twin in (copy.deepcopy(vit), pickle.loads(pickle.dumps(vit))):
        assert torch.equal(twin(IMAGES), vit(IMAGES))
        penalty.reset()
        twin(IMAGES)
        with pytest.raises(InputError, match="has not run"):
            penalty()


def test_autocast(vit: DigitsViT) -> None:
    penalty = JaSMin(vit, weight=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        vit(IMAGES)
        value = penalty()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, reference(vit, IMAGES), atol=0.02, rtol=0.02)
    assert all(g.isfinite().all() for g in gradients(value, vit))


def test_checkpointing_changes_nothing() -> None:
    model, batch = language_model("Bert", "sdpa").train(), sentences()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    found = []
    with JaSMin(model, k=2, weight=1.0) as penalty:
        for checkpointed in (False, True):
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            loss = model(**batch).last_hidden_state.square().mean() + penalty()
            found.append([loss.detach(), *gradients(loss, model)])
            with pytest.raises(InputError, match="has not run"):  # the second run of the blocks is not counted
                penalty()
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with JaSMin(model) as penalty, pytest.raises(InputError, match=r"runs without gradients .* use_reentrant=False"):
        model(inputs_embeds=torch.randn(1, 4, 16, requires_grad=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_checkpointing_the_whole_model(attention: str) -> None:
    model, batch = language_model("GPT2", attention), sentences()
    found = []
    with JaSMin(model, weight=1.0) as penalty:
        for run in (model, lambda **b: checkpoint(model, use_reentrant=False, **b)):
            loss = run(**batch).last_hidden_state.square().mean() + penalty()
            found.append(gradients(loss, model))
            with pytest.raises(InputError, match="has not run"):
                penalty()
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other)


def test_training_lowers_the_penalty(vit: DigitsViT) -> None:
    penalty, before = JaSMin(vit, k=0, weight=1.0), reference(vit, IMAGES)
    optimizer = torch.optim.AdamW(vit.parameters(), 1e-2)
    for _ in range(10):
        vit(IMAGES)
        optimizer.zero_grad()
        torch.autograd.backward(penalty())
        optimizer.step()
    assert reference(vit, IMAGES) < before - 0.05


# -- the experiment on digits


@pytest.fixture(scope="module")
def cells() -> list[repro.PenaltyOutcome]:
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repro, "ATTACK_STEPS", 3)
        patch.setattr(repro, "PROBED", 8)
        return [repro.measure(setting) for setting in repro.settings(1, 1, [2], [0.1])]


def test_a_penalty_that_is_always_0_is_refused_before_any_training() -> None:
    for asked in (lambda: repro.settings(1, 1, [0, 1], [0.1]), lambda: variants([1], [0.1], [])):
        with pytest.raises(InputError, match=r"k is 1; .* is always 0"):
            asked()


def test_cells_are_measured(cells: list[repro.PenaltyOutcome]) -> None:
    plain, ratio = cells
    assert (plain.setting.title, ratio.setting.title) == ("plain", "k=2, weight 0.1")
    assert ratio.g_1 != plain.g_1
    for cell in cells:
        assert 0 <= cell.attacked[1] <= cell.attacked[0] <= 1
        assert cell.g_1 == sorted(cell.g_1)
        assert cell.g_1[0] >= 1 / 17 - 1e-6
        assert cell.g_1[-1] <= 0.5 + 1e-6
        assert cell.norm_p[0] >= 1 - 1e-5
        assert cell.norm_p[-1] <= math.sqrt(17) + 1e-5


def test_tables_and_figure(cells: list[repro.PenaltyOutcome]) -> None:
    plain, ratio = repro.summary([*cells, replace(cells[0], accuracy=cells[0].accuracy - 0.02)])
    assert (plain["seeds"], plain["means"][0]) == (2, pytest.approx(100 * cells[0].accuracy - 1))
    assert (plain["stds"][0], ratio["stds"][0]) == (pytest.approx(2**0.5), None)
    assert ratio["means"][3] == max(cells[1].lipschitz)
    assert len(repro.draw_outcomes(cells).axes) == 3


def test_finished_trainings_are_not_repeated(
    cells: list[repro.PenaltyOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def measure(setting: repro.PenaltyTraining) -> repro.PenaltyOutcome:
        trained.append(setting)
        return replace(cells[1], setting=setting)

    monkeypatch.setattr(repro, "measure", measure)
    arguments = ["jasmin", "--ks", "2", "--weights", "0.1", "--epochs", "3", "--out", str(tmp_path)]
    for seeds in ("1", "2"):
        done = CliRunner().invoke(app, [*arguments, "--seeds", seeds])
        assert done.exit_code == 0, done.output
    assert [(s.k, s.seed) for s in trained] == [(None, 0), (2, 0), (None, 1), (2, 1)]
