"""Today's language models, tiny and random: what `trace` reads of them, and `analyze` and `to_network` say."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from graph_cases import OwnForward, attacked, check, stirred, tokens
from holdfast import UnsupportedAttentionError, to_network, trace
from holdfast.compositions import certify_inputs
from holdfast.errors import InputError
from holdfast.layers import Attention

SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = SIZES | {"head_dim": 6}  # another width of heads than d / h
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}

#: class of the model, class of its configuration, the configuration, and what the layer that is read says of itself.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "Qwen 3": ("Qwen3Model", "Qwen3Config", WIDE, ("k=6", "q_norm=rms", "k_norm=rms", "rotary=(5, 6)")),
    "Gemma 2": (
        "Gemma2Model",
        "Gemma2Config",
        WIDE | {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8, "sliding_window": 3},
        ("soft_cap=1.5", "mask=(5, 5)", "rotary=(5, 6)"),
    ),
    "Gemma 3": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        WIDE | {"sliding_window": 3, "query_pre_attn_scalar": 8},
        ("q_norm=rms", "k_norm=rms", "mask=(5, 5)"),
    ),
    "OLMo 2": ("Olmo2Model", "Olmo2Config", SIZES | {"hidden_size": 16}, ("q_norm=rms", "k_norm=rms")),
    "Cohere": (
        "CohereModel",
        "CohereConfig",
        SIZES | {"hidden_size": 16, "use_qk_norm": True},
        ("q_norm=layer", "k_norm=layer"),
    ),
    "Phi": ("PhiModel", "PhiConfig", SIZES | {"hidden_size": 16, "qk_layernorm": True}, ("q_norm=layer", "(5, 2)")),
    "gpt-oss": (
        "GptOssModel",
        "GptOssConfig",
        WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 3},
        ("sinks", "mask=(5, 5)", "rotary=(5, 6)"),
    ),
    "GPT-NeoX": (
        "GPTNeoXModel",
        "GPTNeoXConfig",
        SIZES | {"hidden_size": 16, "rope_parameters": PARTIAL},
        ("rotary=(5, 2)",),
    ),
    "Llama 3": (
        "LlamaModel",
        "LlamaConfig",
        WIDE | {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
        ("g=2", "rotary=(5, 6)"),
    ),
    "YaRN": ("LlamaModel", "LlamaConfig", WIDE | {"rope_parameters": YARN, "max_position_embeddings": 32}, ("rotary",)),
    "Falcon": (
        "FalconModel",
        "FalconConfig",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40, "multi_query": True}
        | {"bos_token_id": 1, "eos_token_id": 2},
        ("g=1", "rotary=(5, 4)"),
    ),
    "Bloom": (
        "BloomModel",
        "BloomConfig",
        {"hidden_size": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40},
        ("score_bias=(4, 5, 5)",),
    ),
    "MPT": (
        "MptModel",
        "MptConfig",
        {"d_model": 16, "n_layers": 1, "n_heads": 4, "vocab_size": 40, "max_seq_len": 8},
        ("score_bias=(4, 5, 5)",),
    ),
    "GPT-J": (
        "GPTJModel",
        "GPTJConfig",
        {"n_embd": 16, "n_layer": 1, "n_head": 4, "vocab_size": 40, "n_positions": 8, "rotary_dim": 2},
        ("rotary=(5, 2)",),
    ),
    "Mistral": ("MistralModel", "MistralConfig", SIZES | {"hidden_size": 16, "sliding_window": 3}, ("mask=(5, 5)",)),
}
IDS = torch.tensor([[5, 9, 12, 7, 30], [6, 11, 20, 22, 9]])


def build(transformers: ModuleType, name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model, config, sizes, _ = MODELS[name]
    made = getattr(transformers, config)(**(sizes | options), attn_implementation="eager")
    network: nn.Module = getattr(transformers, model)(made).eval()
    with torch.no_grad():  # weights as initialised attend uniformly
        for weight in network.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1).add_(0.3 * torch.randn_like(weight))
    return network


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_that_is_read_is_the_models(transformers: ModuleType, name: str) -> None:
    [read] = trace(build(transformers, name), {"input_ids": IDS})
    assert read.rebuild_error <= 2e-6
    assert all(part in repr(read.layer) for part in MODELS[name][3])
    attained = holdfast.attack(read.layer, read.x, 0.1, restarts=1, steps=3).lower
    assert bool((holdfast.bound(read.layer, read.x, 0.1, "naive").value >= attained).all())


def test_weights_of_norms_are_those_of_the_model(transformers: ModuleType) -> None:
    model = build(transformers, "Qwen 3")
    layer = trace(model, {"input_ids": IDS})[0].layer
    own = model.layers[0].self_attn
    for norm, module in ((layer.q_norm, own.q_norm), (layer.k_norm, own.k_norm)):
        assert norm is not None
        assert torch.equal(norm.weight, module.weight)
        assert norm.eps == module.variance_epsilon
        assert not norm.across
        assert not norm.after_rotation
    across = trace(build(transformers, "OLMo 2"), {"input_ids": IDS})[0].layer
    assert across.q_norm is not None
    assert across.k_norm is not None
    assert across.q_norm.across
    assert across.k_norm.weight.shape == (2, 4)


def test_sinks_are_those_of_the_model(transformers: ModuleType) -> None:
    model = build(transformers, "gpt-oss")
    layer = trace(model, {"input_ids": IDS})[0].layer
    assert layer.sinks is not None
    assert torch.equal(layer.sinks, model.layers[0].self_attn.sinks)


def test_analyze_bounds_them(transformers: ModuleType) -> None:
    for name in ("OLMo 2", "gpt-oss"):
        analysis = holdfast.analyze(build(transformers, name), {"input_ids": IDS[:1]}, eps=[0.01])
        [layer] = analysis.layers
        assert layer.bound is not None
        assert layer.attack is not None
        assert layer.bound[0][0] >= layer.attack[0][0] > 0
        assert layer.bound_note.startswith("second-order")


class Written(nn.Module):
    """Attention that a model writes out itself, with what is done to queries and keys, and to scores."""

    def __init__(self, scores: Any, place: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scores, self.place = scores, place or (lambda q: q)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).reshape(2, 5, 2, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.scores(self.place(q) @ self.place(k).mT) @ v


def rms(q: Tensor) -> Tensor:
    return q * (q.square().mean(-1, keepdim=True) + 1e-3).rsqrt()


ANGLES = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])


def turned(q: Tensor) -> Tensor:
    return q * ANGLES.cos() + torch.cat([-q[..., 2:], q[..., :2]], -1) * ANGLES.sin()


def with_sink(s: Tensor, logit: Tensor) -> Tensor:
    whole = torch.cat([s, logit.expand(*s.shape[:-1], 1)], -1)
    return (whole - whole.amax(-1, keepdim=True)).softmax(-1)[..., :-1]


@pytest.mark.parametrize(
    ("scores", "place", "says"),
    [
        (lambda s: (torch.tanh(s / 3) * 3).softmax(-1), None, "soft_cap=3"),
        (lambda s: (2 * torch.tanh(s)).softmax(-1), None, "soft_cap=2"),
        (lambda s: with_sink(s / 2, torch.zeros(1)), None, "sinks"),
        (lambda s: with_sink(s, torch.tensor([1.0, -1.0]).reshape(2, 1, 1)), None, "sinks"),
        (lambda s: s.softmax(-1), lambda q: rms(turned(q)), "q_norm=rms, after"),
        (lambda s: s.softmax(-1), lambda q: turned(rms(q) * torch.tensor([1.0, 2, 3, 4])), "q_norm=rms"),
        (lambda s: s.softmax(-1), lambda q: turned(nn.functional.layer_norm(q, (4,))), "q_norm=layer"),
        (lambda s: s.softmax(-1), lambda q: nn.functional.rms_norm(q, (4,), eps=1e-2) * 0.5 + 1, "q_norm=rms"),
    ],
)
def test_what_models_may_write_is_read(scores: Any, place: Any, says: str) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    [read] = trace(Written(scores, place), x)
    assert says.removesuffix(", after") in repr(read.layer)
    assert read.rebuild_error < 1e-6
    assert ("after" in says) == (read.layer.q_norm is not None and read.layer.q_norm.after_rotation)


@pytest.mark.parametrize(
    ("scores", "place", "message"),
    [
        (
            lambda s: (torch.tanh(s + torch.eye(5)) * 3).softmax(-1),
            None,
            "takes tanh of scores that are",
        ),
        (lambda s: (torch.tanh(torch.tanh(s)) * 3).softmax(-1), None, "takes tanh of scores that are"),
        (lambda s: with_sink(s, torch.arange(5.0).reshape(5, 1)), None, "different logits for different queries"),
        (lambda s: torch.cat([s, s], -1).softmax(-1)[..., :5], None, "put beside each other"),
        (lambda s: torch.cat([s - s.amax(-1, True), torch.zeros(2, 2, 5, 1)], -1).softmax(-1)[..., :5], None, "beside"),
        (lambda s: (s - s.amax(-2, keepdim=True)).softmax(-1), None, "something other than the keys"),
        (lambda s: (s - 2 * s.amax(-1, keepdim=True)).softmax(-1), None, "in an unknown way"),
        (lambda s: s.exp().softmax(-1), None, "softmax of something other than attention scores"),
        (lambda s: s.softmax(-1), lambda q: turned(rms(turned(q))), "on both sides of their norm"),
        (lambda s: s.softmax(-1), lambda q: rms(q) * torch.arange(5.0).reshape(5, 1), "by head and by token|position"),
    ],
)
def test_what_is_not_known_is_refused_by_name(scores: Any, place: Any, message: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=message):
        trace(Written(scores, place), torch.randn(2, 5, 8))


def test_models_that_cast_to_float32_inside_are_told_so(transformers: ModuleType) -> None:
    model = build(transformers, "Qwen 3")
    with pytest.raises(UnsupportedAttentionError, match=r"casts to float32 inside.* by model\.float\(\)"):
        trace(model.double(), {"input_ids": IDS})
    assert trace(model.float(), {"input_ids": IDS})[0].rebuild_error <= 2e-6


# -- in networks


class Sunk(nn.Module):
    """A classifier of tokens whose attention has sinks and sees earlier tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.sinks, self.head = nn.Parameter(torch.zeros(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (m(x).reshape(len(x), n, 2, 4).transpose(1, 2) for m in list(self.maps)[:3])
        scores = (q @ k.mT / 2).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        y = with_sink(scores, self.sinks.reshape(2, 1, 1)) @ v
        return self.head((x + self.maps[3](y.transpose(1, 2).flatten(2)))[:, -1])


def test_networks_with_sinks_are_certified() -> None:
    check(stirred(Sunk()), tokens())


def test_networks_with_normalised_queries_and_keys_are_certified(transformers: ModuleType) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, tie_word_embeddings=True))
    check(stirred(model), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, close=1e-5)


class Capped(nn.Module):
    """Attention whose scores are capped before the mask, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        for maps in (self.maps[:4], self.maps[4:]):
            y = self.norm(x)
            q, k, v = (m(y).reshape(len(x), n, 2, 4).transpose(1, 2) for m in list(maps)[:3])
            scores = torch.tanh(q @ k.mT / 2 / 0.8) * 0.8
            p = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
            x = x + maps[3]((p @ v).transpose(1, 2).flatten(2))
        return self.head(x[:, -1])


def test_networks_with_soft_caps_are_certified() -> None:
    torch.manual_seed(0)
    model, example = stirred(Capped()), tokens()
    converted = check(model, example)
    layers = [piece.layer for piece in converted.network.pieces() if isinstance(piece, Attention)]
    assert [layer.soft_cap for layer in layers] == pytest.approx([0.8, 0.8])
    x, own = converted.encode(example)[:1], OwnForward(model, example)
    (record,) = certify_inputs(converted.network, x, method="end-to-end")
    assert float(attacked(own, x, record.prediction, record.radius).min()) >= 0
    assert float(attacked(own, x, record.prediction, 100 * record.radius).min()) < 0


def test_gemma_2_is_read_without_a_cap_of_its_logits(transformers: ModuleType) -> None:
    """The reader compares the network with the model, near and far."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**WIDE, attn_implementation="eager", final_logit_softcapping=None)
    to_network(transformers.Gemma2ForCausalLM(config).eval(), {"input_ids": IDS[:1]})


class Remembering(nn.Module):
    """A decoder's block, whose memory is the same for every input; some of it is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True)
        self.memory, self.head = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        allowed = torch.arange(3) <= torch.arange(x.shape[1]).unsqueeze(1)
        y = self.block(x, self.memory.expand(len(x), -1, -1), memory_mask=~allowed)
        return self.head(y[:, -1])


def test_networks_attend_to_a_fixed_memory() -> None:
    torch.manual_seed(0)
    check(stirred(Remembering()), tokens())


def test_a_fixed_memory_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"multihead_attn.*cross-attention to a fixed memory"):
        trace(Remembering().eval(), torch.randn(2, 5, 8))
    with pytest.raises(InputError, match="TransformerDecoderLayer, whose cross-attention"):
        holdfast.AttentionLayer.from_module(nn.TransformerDecoderLayer(8, 2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cross-attention"):
        holdfast.AttentionLayer.from_module(nn.MultiheadAttention(8, 2, kdim=6, vdim=6))


def test_cross_attention_is_refused_by_name(transformers: ModuleType) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    model = transformers.T5Model(transformers.T5Config(**sizes)).eval()
    with pytest.raises(UnsupportedAttentionError, match=r"EncDecAttention.*different tensors: cross-attention"):
        trace(model, {"input_ids": IDS, "decoder_input_ids": IDS})
