"""The tap sees what a model computes and changes nothing; traced layers are what the model's modules are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import holdfast
from holdfast import InputError, UnsupportedAttentionError, trace
from holdfast.attention import AttentionJacobian, AttentionLayer
from holdfast.data.digits import demo_digits
from holdfast.linalg import FunctionJacobian
from holdfast.models import VisionTransformer, load_digits_vit
from holdfast.train.eager import FORBIDDING
from holdfast.train.tap import AttentionCall, Tap

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
WORDS = SIZES | {"vocab_size": 50}
ROTARY = WORDS | {"num_key_value_heads": 2}
PIXELS = SIZES | {"image_size": 16, "patch_size": 4}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50}

#: class of the model, class of its configuration, and the configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertModel", "BertConfig", WORDS),
    "RoBERTa": ("RobertaModel", "RobertaConfig", WORDS),
    "DistilBERT": (
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 50},
    ),
    "ALBERT": ("AlbertModel", "AlbertConfig", WORDS | {"embedding_size": 8}),
    "GPT-2": (
        "GPT2Model",
        "GPT2Config",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50, "scale_attn_by_inverse_layer_idx": True},
    ),
    "GPT-NeoX": (
        "GPTNeoXModel",
        "GPTNeoXConfig",
        WORDS | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "OPT": ("OPTModel", "OPTConfig", WORDS | {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "Llama": ("LlamaModel", "LlamaConfig", ROTARY),
    "Mistral": ("MistralModel", "MistralConfig", ROTARY | {"sliding_window": 3}),
    "Qwen2": (
        "Qwen2Model",
        "Qwen2Config",
        ROTARY | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    ),
    "T5": ("T5EncoderModel", "T5Config", T5),
    "ViT": ("ViTModel", "ViTConfig", PIXELS),
    "DeiT": ("DeiTModel", "DeiTConfig", PIXELS),
}
IDS = torch.tensor([[5, 9, 12, 7, 30, 21, 8], [6, 11, 40, 22, 9, 3, 17]])
PADDING = {"none": None, "right": torch.ones_like(IDS), "left": torch.ones_like(IDS)}
PADDING["right"][1, 5:] = 0
PADDING["left"][1, :2] = 0


def build(transformers: ModuleType, name: str, implementation: str = "sdpa", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model, config, sizes = MODELS[name]
    made = getattr(transformers, config)(**sizes, **options, attn_implementation=implementation)
    network: nn.Module = getattr(transformers, model)(made).eval()
    with torch.no_grad():  # weights as initialised attend uniformly
        for weight in network.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1).add_(0.1 * torch.randn_like(weight))
    return network


def words(padding: str = "none") -> dict[str, Tensor]:
    mask = PADDING[padding]
    return {"input_ids": IDS} | ({} if mask is None else {"attention_mask": mask})


def calls_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with Tap(model, calls.append):
        model(*args, **kwargs)
    return calls


def attend(call: AttentionCall) -> Tensor:
    """What the kernel should have computed."""
    key, value = (t.repeat_interleave(call.query.shape[1] // t.shape[1], 1) for t in (call.key, call.value))
    scores = call.query @ key.mT * call.scale
    if call.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask, -torch.inf) if call.mask.dtype == torch.bool else scores + call.mask
    return scores.softmax(-1) @ value


# -- the tap


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5"])
def test_calls_are_what_the_kernel_gets(transformers: ModuleType, name: str, implementation: str) -> None:
    calls = calls_of(build(transformers, name, implementation), **words("right"))
    assert len(calls) == 2
    for call in calls:
        assert call.query.shape == call.output.shape == (2, 4, 7, 4)
        torch.testing.assert_close(attend(call), call.output)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_multihead_attention_is_seen(weights: bool, padded: bool) -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    padding = torch.arange(5).expand(3, 5) > 3 if padded else None
    [call] = calls_of(attention, x, x, x, need_weights=weights, key_padding_mask=padding)
    assert call.query.shape == call.output.shape == (3, 2, 5, 4)
    torch.testing.assert_close(attend(call), call.output)


@pytest.mark.parametrize("training", [True, False])
def test_encoders_are_seen_and_their_fast_path_returns(training: bool) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    assert torch.backends.mha.get_fastpath_enabled()
    calls = calls_of(encoder.train(training), torch.randn(3, 5, 8))
    assert [call.name for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_is_not_changed(transformers: ModuleType, implementation: str) -> None:
    model = build(transformers, "BERT", implementation).train()  # with dropout
    results = []
    for tapped in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        calls: list[AttentionCall] = []
        if tapped:
            with Tap(model, calls.append):
                output = model(**words()).last_hidden_state
        else:
            output = model(**words()).last_hidden_state
        drawn = torch.rand(3)
        output.square().sum().backward()
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        results.append((output.detach(), drawn, *gradients))
    assert all(torch.equal(plain, seen) for plain, seen in zip(*results, strict=True))
    assert {call.dropout for call in calls} == {0.1}


def test_a_penalty_on_what_is_seen_reaches_the_weights(transformers: ModuleType) -> None:
    model = build(transformers, "GPT-2").train()
    penalties = []
    with Tap(model, lambda call: penalties.append((call.query @ call.key.mT).square().mean())):
        model(**words())
    sum(penalties).backward()
    assert bool(model.h[1].attn.c_attn.weight.grad.abs().sum() > 0)


def test_autocast_is_seen() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        [call] = calls_of(attention, x, x, x, need_weights=False)
    assert call.output.dtype == torch.bfloat16


def test_nested_taps_each_see_their_own_model() -> None:
    inner, outer = nn.MultiheadAttention(8, 2), nn.Sequential(nn.Linear(8, 8))
    both = nn.ModuleDict({"one": inner, "two": nn.MultiheadAttention(8, 2)})
    x, seen_inner, seen_both = torch.randn(3, 5, 8), [], []
    with Tap(both, seen_both.append), Tap(inner, seen_inner.append):
        both["one"](x, x, x)
        both["two"](x, x, x)
        outer(x)
    assert [call.name for call in seen_both] == ["one", "two"]
    assert [call.name for call in seen_inner] == [""]
    assert seen_both[0].query.shape == (5, 2, 3, 4)


def test_what_a_callback_computes_is_not_reported() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 5, 8)
    seen: list[AttentionCall] = []
    with Tap(attention, seen.append), Tap(attention, attend):  # type: ignore[arg-type]
        attention(x, x, x)
    assert len(seen) == 1


def test_a_tap_can_be_entered_again() -> None:
    attention, x, seen = nn.MultiheadAttention(8, 2), torch.randn(3, 5, 8), []
    tap = Tap(attention, seen.append)
    with tap, tap:
        attention(x, x, x)
    with tap:
        attention(x, x, x)
    assert len(seen) == 3


def test_an_exception_leaves_nothing_behind() -> None:
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 5, 8)

    def fail(call: AttentionCall) -> None:
        raise KeyError(call.name)

    for _ in range(2):
        with pytest.raises(KeyError), Tap(attention, fail):
            attention(x, x, x)
    assert _get_current_function_mode_stack() == []
    assert torch.backends.mha.get_fastpath_enabled()
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks
    assert len(calls_of(attention, x, x, x)) == 1


class Written(nn.Module):
    """Attention that a model writes out itself."""

    def __init__(self, scores: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).reshape(3, 5, 2, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.scores(q, k).softmax(-1) @ v


LOWER = torch.ones(5, 5, dtype=torch.bool).tril()
BIAS = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "scores",
    [
        lambda q, k: q @ k.mT / 2,
        lambda q, k: torch.matmul(q, k.transpose(-1, -2)).mul_(0.3).add_(BIAS),
        lambda q, k: (q @ k.mT + BIAS) * torch.tensor(0.3),
        lambda q, k: (0.3 * (q @ k.mT)).masked_fill(~LOWER, FORBIDDING),
        lambda q, k: torch.where(LOWER, q @ k.mT, torch.tensor(-1e30)) + BIAS,
        lambda q, k: torch.where(~LOWER, torch.tensor(-1e30), q @ k.mT).masked_fill(BIAS > 1, -torch.inf),
        lambda q, k: (BIAS + q @ k.mT).masked_fill(~LOWER, -torch.inf).float().contiguous(),
    ],
    ids=range(7),
)
def test_written_attention_is_recognised(scores: Callable[[Tensor, Tensor], Tensor]) -> None:
    [call] = calls_of(Written(scores), torch.randn(3, 5, 8))
    torch.testing.assert_close(attend(call), call.output)


@pytest.mark.parametrize(
    ("scores", "found"),
    [
        (lambda q, k: 3 * torch.tanh(q @ k.mT / 3), "soft cap"),
        (lambda q, k: torch.einsum("bhik,bhjk->bhij", q, k), "einsum"),
        (lambda q, k: q @ k.mT * BIAS, "'mul'"),
        (lambda q, k: (q @ k.mT).masked_fill(~LOWER, -1.0), "'masked_fill'"),
        (lambda q, k: (q @ k.mT).abs(), "'abs'"),
        (lambda q, k: (q @ k.mT).softmax(-2), "'softmax'"),
    ],
)
def test_written_attention_of_another_kind_is_refused(scores: Callable[[Tensor, Tensor], Tensor], found: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=f"module '' applies .*{found}"):
        calls_of(Written(scores), torch.randn(3, 5, 8))


# -- traced layers


TEXTS = [name for name in MODELS if name not in ("ViT", "DeiT")]


@pytest.mark.parametrize(
    ("name", "implementation", "padding"),
    [
        # Every model both ways, of which one is quick, and every kind of padding in turn.
        pytest.param(name, implementation, padding, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, name in enumerate(TEXTS)
        for j, implementation in enumerate(("sdpa", "eager"))
        for k, padding in enumerate(("none", "right", "left"))
        if k == (i + 2 * j) % 3
    ],
)
def test_text_models(transformers: ModuleType, name: str, implementation: str, padding: str) -> None:
    layers = trace(build(transformers, name, implementation), words(padding))
    assert len(layers) == 2
    for found in layers:
        assert found.x.shape == (2, 7, 16)
        assert found.rebuild_error <= 2e-6
        assert (found.layer.rotary is not None) == (name in ("GPT-NeoX", "Llama", "Mistral", "Qwen2"))
        assert (found.layer.score_bias is not None) == (name == "T5")


@pytest.mark.parametrize(("name", "tokens", "implementation"), [("ViT", 17, "sdpa"), ("DeiT", 18, "eager")])
def test_vision_models(transformers: ModuleType, name: str, tokens: int, implementation: str) -> None:
    layers = trace(build(transformers, name, implementation), torch.randn(2, 3, 16, 16))
    assert [tuple(found.x.shape) for found in layers] == [(2, tokens, 16)] * 2
    assert max(found.rebuild_error for found in layers) <= 2e-6


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_timm_models(timm: ModuleType, name: str, fused: bool) -> None:
    model = timm.create_model(name, depth=2, img_size=32).eval()
    for block in model.blocks:
        block.attn.fused_attn = fused
    layers = trace(model, torch.randn(2, 3, 32, 32))
    assert [found.name for found in layers] == ["blocks.0.attn", "blocks.1.attn"]
    assert max(found.rebuild_error for found in layers) <= 2e-6


@pytest.mark.parametrize("training", [True, False])
def test_torch_encoders(training: bool) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    x, padding = torch.randn(3, 5, 8), torch.arange(5).expand(3, 5) > 3
    plain, padded = trace(encoder.train(training), x), trace(encoder, {"src": x, "src_key_padding_mask": padding})
    assert plain[0].layer.mask is None
    assert padded[0].layer.mask is not None
    assert torch.equal(padded[0].layer.mask, ~padding[0].expand(5, 5))
    causal = trace(encoder, {"src": x, "mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True})
    assert causal[1].layer.causal
    assert causal[1].layer.mask is None
    assert torch.equal(plain[0].x, x)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(batch_first: bool, weights: bool) -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=batch_first), torch.randn(3, 5, 8)
    [found] = trace(attention, {"query": x, "key": x, "value": x, "need_weights": weights})
    expected = attention(x, x, x)[0]
    torch.testing.assert_close(found.layer(found.x), expected if batch_first else expected.transpose(0, 1))
    [alone] = trace(attention, (x[0], x[0], x[0]))
    assert alone.x.shape == (1, 5, 8)


def test_our_own_model() -> None:
    model, images = load_digits_vit(), demo_digits().images
    layers = trace(model, images)
    for (name, (_, x)), found in zip(model.attention_inputs(images).items(), layers, strict=True):
        assert found.name == name
        torch.testing.assert_close(found.x, x)


def test_x_is_what_enters_the_maps_and_the_layer_is_the_module(transformers: ModuleType) -> None:
    model = build(transformers, "BERT")
    first = trace(model, words())[0]
    torch.testing.assert_close(first.x, model.embeddings(IDS))
    attention = model.encoder.layer[0].attention
    with torch.no_grad():
        expected = attention.output.dense(attention.self(first.x)[0])
    torch.testing.assert_close(first.layer(first.x), expected)


def test_layers_that_share_a_module_are_numbered(transformers: ModuleType) -> None:
    names = [found.name for found in trace(build(transformers, "ALBERT"), words())]
    assert [name[-2:] for name in names] == ["#1", "#2"]


@pytest.mark.parametrize("padding", ["none", "left"])
def test_jacobian_of_a_traced_layer_is_that_of_the_model(transformers: ModuleType, padding: str) -> None:
    model = build(transformers, "Llama").double()
    found = trace(model, words(padding))[1]
    dense = AttentionJacobian(found.layer, found.x).dense()
    torch.testing.assert_close(dense, FunctionJacobian(found.layer, found.x, batch_dims=1).dense())
    attention, rotary = model.layers[1].self_attn, found.layer.rotary
    assert rotary is not None

    def module(x: Tensor) -> Tensor:
        allowed = found.layer.allowed(7)
        assert allowed is not None
        mask = allowed.expand(2, 7, 7).unsqueeze(1)
        positions = (rotary.cos.expand(2, -1, -1), rotary.sin.expand(2, -1, -1))
        return attention(x, position_embeddings=positions, attention_mask=mask)[0]

    torch.testing.assert_close(dense, FunctionJacobian(module, found.x, batch_dims=1).dense())
    proved = holdfast.local_lipschitz(found.layer, found.x, side="upper").value
    assert bool((torch.linalg.matrix_norm(dense, ord=2) <= proved).all())


def test_padding_without_a_key_attends_to_itself(transformers: ModuleType) -> None:
    layer = trace(build(transformers, "GPT-2"), words("left"))[0].layer
    assert layer.mask is not None
    assert layer.mask.any(-1).all()
    assert torch.equal(layer.mask[0], torch.ones(7, 7, dtype=torch.bool).tril())
    assert not layer.mask[1, 2:, :2].any()


def test_sliding_windows_become_masks(transformers: ModuleType) -> None:
    layer = trace(build(transformers, "Mistral"), words())[0].layer
    distance = torch.arange(7)[:, None] - torch.arange(7)
    assert layer.mask is not None
    assert torch.equal(layer.mask, (distance >= 0) & (distance < 3))


def test_relative_bias_becomes_the_score_bias(transformers: ModuleType) -> None:
    model = build(transformers, "T5")
    layer = trace(model, words())[1].layer
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(7, 7)
    torch.testing.assert_close(layer.score_bias, bias[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(transformers: ModuleType, dtype: torch.dtype) -> None:
    found = trace(build(transformers, "Llama").to(dtype), words())[0]
    assert found.layer.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert found.rebuild_error <= {torch.float64: 1e-14, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


def test_a_model_with_a_penalty_attached_can_be_traced(transformers: ModuleType) -> None:
    model = build(transformers, "BERT")
    with Tap(model, attend):  # type: ignore[arg-type]
        assert len(trace(model, words())) == 2


# -- what is refused, and how


def refused(model: nn.Module, inputs: Any, message: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=message):
        trace(model, inputs)
    assert _get_current_function_mode_stack() == []


def test_query_key_norms_of_timm_are_read(timm: ModuleType) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, qk_norm=True).eval()
    [found] = trace(model, torch.randn(1, 3, 32, 32))
    assert found.layer.q_norm is not None
    assert found.layer.q_norm.kind == "layer"


def test_heads_that_pass_a_gate_are_traced_without_an_output_map(timm: ModuleType) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).eval()
    model.blocks[0].attn = timm.layers.Attention(192, 3, qkv_bias=True, gated=True).eval()
    [found] = trace(model, torch.randn(1, 3, 32, 32))
    assert torch.equal(found.layer.w_o.flatten(0, 1), torch.eye(192))


def test_cross_attention_is_named(transformers: ModuleType) -> None:
    inputs = words() | {"decoder_input_ids": IDS}
    model = transformers.T5Model(transformers.T5Config(**T5)).eval()
    refused(model, inputs, "'decoder.block.0.layer.1.EncDecAttention'.* different tensors: cross-attention")
    x = torch.randn(3, 5, 8)
    refused(nn.MultiheadAttention(8, 2), (x, x + 1, x + 1), "different tensors: cross-attention")


def test_dropout_is_named(transformers: ModuleType) -> None:
    refused(build(transformers, "BERT").train(), words(), "'embeddings.dropout': operator 'dropout' .* draws at random")


def test_added_tokens_are_named() -> None:
    x = torch.randn(3, 5, 8)
    refused(
        nn.MultiheadAttention(8, 2, add_bias_kv=True), (x, x, x), "lets 3 queries attend to 4 keys: .* added tokens"
    )


def test_heads_with_masks_of_their_own_are_named() -> None:
    x, mask = torch.randn(3, 5, 8), torch.zeros(6, 5, 5, dtype=torch.bool)
    mask[0, 1, 2] = True
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    refused(attention, {"query": x, "key": x, "value": x, "attn_mask": mask}, "masks the heads differently")


class Doubled(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


class Bent(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_a_layer_is_what_the_model_executes_whatever_its_class_says(transformers: ModuleType) -> None:
    x = torch.randn(3, 5, 8)
    doubled = Doubled(8, 2)
    [found] = trace(doubled, (x, x, x))  # the output map comes first, the factor is not a part of attention
    torch.testing.assert_close(2 * found.layer(found.x), doubled(x, x, x)[0].transpose(0, 1))
    model = build(transformers, "BERT")
    model.encoder.layer[1].attention.self.key = nn.Sequential(nn.Linear(16, 16))
    assert len(trace(model, words())) == 2
    model.encoder.layer[0].attention.self.value = Bent(16, 16)
    refused(model, words(), "'encoder.layer.0.attention.self'.* tanh of queries, keys or values")


def test_attention_that_somebody_wrote_is_traced() -> None:
    model, x = nn.Sequential(MyAttention()), torch.randn(3, 5, 8)
    [found] = trace(model, x)
    assert found.name == "0"
    torch.testing.assert_close(found.layer(x), model(x))


class MyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).reshape(3, 5, 2, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(attended.transpose(1, 2).flatten(-2))


def test_a_model_without_attention_is_refused() -> None:
    refused(nn.Linear(8, 2), torch.randn(3, 8), "Linear computed no dot-product attention")


def test_inputs_that_the_model_does_not_take(transformers: ModuleType) -> None:
    with pytest.raises(InputError, match=r"ViTModel does not take these inputs: .*image size \(8\*8\)"):
        trace(build(transformers, "ViT"), torch.randn(1, 3, 8, 8))
    with pytest.raises(InputError, match="BertModel does not take these inputs"):
        trace(build(transformers, "BERT", max_position_embeddings=4), words())


def test_a_graph_is_read_on_the_cpu_wherever_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is on the device "meta", whose tensors have no numbers: some are drawn where it would copy them."""
    graph_trace = importlib.import_module("holdfast.graph.trace")  # holdfast.graph.trace is the function
    device, real = torch.device("meta"), graph_trace.placed
    read, operators = list[Tensor](), dict(graph_trace.OPERATORS)

    def drawn(value: Any) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten(value)
        found = [torch.randn(t.shape) if isinstance(t, Tensor) and t.device == device else t for t in leaves]
        return real(torch.utils._pytree.tree_unflatten(found, spec))

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = operators[name](*args, **kwargs)
            read.extend(t for t in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
            return out

        return call

    monkeypatch.setattr(graph_trace, "placed", drawn)
    monkeypatch.setattr(graph_trace, "OPERATORS", {name: watched(name) for name in operators})
    monkeypatch.setattr(graph_trace, "_distance", lambda *_: 0.0)
    ends = list[Any]()  # a layer checks its numbers, so none is made of tensors without any
    monkeypatch.setattr(AttentionLayer, "to", lambda self, dtype=None, device=None: ends.append(device) or self)
    model = VisionTransformer(8, 1, 4, 2, 8, 2).eval().to(device)
    layers = trace(model, torch.randn(2, 1, 8, 8, device=device))
    assert read
    assert all(t.device.type == "cpu" for t in read)
    assert len(layers) == 2
    assert all(one.x.device == device for one in layers)
    assert ends.count(device) == 2
    assert layers[0].layer.w_q.shape == (2, 8, 4)
    assert layers[0].x.shape == (2, 5, 8)
