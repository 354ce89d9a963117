"""Every kind of model is converted from its graph, certified, and attacked by its own forward inside the radius."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from graph_cases import OwnForward, attacked, check, pictures, stirred, tokens
from holdfast.compositions import certify_inputs

Build = Callable[[], nn.Module]

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "num_labels": 3}
WORDS = SIZES | {"vocab_size": 30, "max_position_embeddings": 16}
PIXELS = SIZES | {"image_size": 8, "patch_size": 4, "num_channels": 1}
DECODER = WORDS | {"pad_token_id": 0}
IDS = torch.tensor([[5, 9, 12, 7], [6, 11, 20, 22]])
PADDED = {"input_ids": torch.tensor([[5, 9, 12, 0, 0]] * 2), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]] * 2)}
PLAIN = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}

slow = pytest.mark.slow

HUGGING_FACE = [
    ("ViT", "ViTForImageClassification", "ViTConfig", PIXELS, pictures()),
    pytest.param("DeiT", "DeiTForImageClassification", "DeiTConfig", PIXELS, pictures(), marks=slow),
    ("BERT", "BertForSequenceClassification", "BertConfig", WORDS | {"hidden_act": "gelu_new"}, PADDED),
    ("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", WORDS | {"pad_token_id": 0}, PADDED),
    ("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig",
     {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12, "vocab_size": 30, "num_labels": 3}, PADDED),
    ("ALBERT", "AlbertForSequenceClassification", "AlbertConfig",
     WORDS | {"embedding_size": 6, "num_hidden_layers": 2}, PADDED),
    ("GPT-2", "GPT2LMHeadModel", "GPT2Config",
     {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16}, IDS),
    pytest.param("GPT-2 classifier", "GPT2ForSequenceClassification", "GPT2Config",
     {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16, "num_labels": 3, "pad_token_id": 0},
     PADDED, marks=slow),
    pytest.param("Llama", "LlamaForCausalLM", "LlamaConfig",
     DECODER | {"num_key_value_heads": 1, "tie_word_embeddings": True}, PADDED),
    pytest.param("Qwen2", "Qwen2ForCausalLM", "Qwen2Config",
     DECODER | {"num_key_value_heads": 2}, PLAIN, marks=slow),
    pytest.param("Mistral", "MistralForSequenceClassification", "MistralConfig",
     DECODER | {"num_key_value_heads": 1}, PADDED, marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "model", "config", "sizes", "example"), HUGGING_FACE)
def test_models_of_transformers(
    transformers: ModuleType, name: str, model: str, config: str, sizes: dict[str, Any], example: Any
) -> None:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes)
    single = 1e-5 if "rms_norm_eps" in dir(made) else 1e-8  # RMSNorm of transformers computes in float32 always
    check(stirred(getattr(transformers, model)(made)), example, close=single)


@pytest.mark.parametrize(
    "options",
    [{}, {"global_pool": "avg", "class_token": False, "init_values": 0.5}, {"reg_tokens": 2, "pre_norm": True}],
    ids=str,
)
def test_vision_transformers_of_timm(timm: ModuleType, options: dict[str, Any]) -> None:
    sizes = {
        "img_size": 8,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 8,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
    }
    check(stirred(timm.models.VisionTransformer(**sizes, **options)), pictures())


# -- nn.TransformerEncoder


class Encoded(nn.Module):
    """The encoder of torch behind nothing, its mean token in front of a head; masks as the model's author sets them."""

    def __init__(self, mask: str = "none", depth: int = 1, nested: bool = False, norm: bool = False, **options: Any):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, **options)
        self.encoder = nn.TransformerEncoder(
            layer, depth, norm=nn.LayerNorm(8) if norm else None, enable_nested_tensor=nested
        )
        self.first = options.get("batch_first", False)
        self.head, self.mask = nn.Linear(8, 3), mask

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {}
        if self.mask == "causal":
            given = {
                "mask": nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype),
                "is_causal": True,
            }
        if self.mask == "bool":
            given = {"mask": torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)}
        if self.mask == "padding":
            hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
            hidden[:, -1] = True
            given = {"src_key_padding_mask": hidden}
        x = x if self.first else x.transpose(0, 1)
        y = self.encoder(x, **given)
        y = y if self.first else y.transpose(0, 1)
        return self.head(y[:, 0] if self.mask == "padding" else y.mean(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True, "activation": "gelu", "norm": True, "batch_first": True},
        {"mask": "causal", "batch_first": True, "activation": "gelu"},
        {"mask": "bool", "bias": False, "activation": functional.silu, "norm_first": True},
        {"mask": "padding", "batch_first": True, "nested": True},
        {"batch_first": True, "nested": True, "depth": 2, "activation": "gelu"},
    ],
    ids=["plain", "norm first", "causal", "bool mask", "padding", "two layers"],
)
def test_encoders_of_torch(options: dict[str, Any]) -> None:
    check(stirred(Encoded(**options)), tokens())


# -- vision transformers as people write them


class Rearranging(nn.Module):
    """Patches by reshape and permute, heads by einsum, RMSNorm and GELU written out, all tokens flattened."""

    def __init__(self, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.patch, self.place = nn.Linear(16, d), nn.Parameter(torch.randn(4, d))
        self.w = nn.ParameterList([nn.Parameter(torch.randn(d, heads, d // heads) / 3) for _ in range(3)])
        self.out = nn.Parameter(torch.randn(heads, d // heads, d) / 3)
        self.gain = nn.Parameter(torch.ones(d))
        self.up, self.down = nn.Parameter(torch.randn(d, 12) / 3), nn.Parameter(torch.randn(12, d) / 3)
        self.bias, self.head = nn.Parameter(torch.randn(12)), nn.Linear(4 * d, 3)

    def norm(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        b, c, height, width = x.shape
        x = x.reshape(b, c, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 16 * c)
        x = self.patch(x) + self.place
        q, k, v = (torch.einsum("bnd,dhk->bhnk", self.norm(x), w) for w in self.w)
        p = torch.einsum("bhnk,bhmk->bhnm", q, k).div(math.sqrt(q.shape[-1])).softmax(-1)
        x = x + torch.einsum("bhnm,bhmk,hkd->bnd", p, v, self.out)
        u = self.norm(x) @ self.up + self.bias
        u = u * 0.5 * (1 + torch.erf(u / math.sqrt(2)))
        return self.head((x + u @ self.down).flatten(1))


class FusedQkv(nn.Module):
    """One map for q, k, v, cut by chunk; class token; LayerNorm and quick GELU written out; tied MLP weights."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(1, d, 4, 4), nn.Parameter(torch.randn(1, 1, d))
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.up, self.head = nn.Linear(d, d, bias=False), nn.Linear(d, 3)

    def norm(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        b, n, d = x.shape
        q, k, v = (t.view(b, n, 2, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        u = self.up(self.norm(x))
        x = x + functional.linear(u * torch.sigmoid(1.702 * u), self.up.weight.t())
        return self.head(self.norm(x)[:, 0])


class Block(nn.Module):
    """nn.MultiheadAttention and an MLP: one after the other, or both beside each other."""

    def __init__(self, d: int = 8, parallel: bool = False, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.norm, self.second, self.parallel = nn.LayerNorm(d), nn.LayerNorm(d), parallel
        self.mlp = nn.Sequential(nn.Linear(d, 12), activation or nn.GELU("tanh"), nn.Dropout(0.1), nn.Linear(12, d))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        attended = self.attention(y, y, y, need_weights=False)[0]
        if self.parallel:
            return x + attended + self.mlp(y)
        x = x + attended
        return x + self.mlp(self.second(x))


class Blocks(nn.Module):
    """Convolution, blocks, mean, head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.patch, self.blocks, self.head = nn.Conv2d(1, 8, 4, 4), nn.Sequential(*blocks), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).mT).mean(1))


class GatedBlock(nn.Module):
    """SwiGLU or GeGLU, one map for both halves or two."""

    def __init__(self, d: int = 8, fused: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.fused = nn.Linear(d, 10), nn.Linear(d, 5), nn.Linear(5, d), fused
        self.norm = nn.RMSNorm(d, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.fused:
            gate, up = self.gate(y).chunk(2, -1)
            return x + self.down(functional.gelu(gate) * up)
        return x + self.down(functional.silu(self.gate(y)[..., :5]) * self.up(y))


class Hybrid(nn.Module):
    """ConvMixer-like convolutions with BatchNorm, then attention in shifted windows with a bias for each pair."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, d, 2, 2), nn.GELU(), nn.BatchNorm2d(d))
        self.deep = nn.Sequential(nn.Conv2d(d, d, 3, padding="same", groups=d), nn.GELU(), nn.BatchNorm2d(d))
        self.wide = nn.Sequential(nn.Conv2d(d, d, 1), nn.BatchNorm2d(d))
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.bias = nn.Parameter(torch.randn(2, 4, 4))
        self.head = nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.wide(x + self.deep(x)).permute(0, 2, 3, 1)  # (b, 4, 4, d)
        b, height, width, d = x.shape
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(b, 2, 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
        q, k, v = self.qkv(y).reshape(-1, 4, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        p = (q * (d // 2) ** -0.5 @ k.transpose(-2, -1) + self.bias).softmax(-1)
        y = self.out((p @ v).transpose(1, 2).reshape(-1, 4, d))
        y = y.view(b, 2, 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, height, width, d)
        return self.head((x + torch.roll(y, (1, 1), (1, 2))).mean((1, 2)))


class Pooled(nn.Module):
    """Max-pooling with overlap behind BatchNorm and ReLU, attention, and the largest of all tokens."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, d, 3, 2, 1), nn.BatchNorm2d(d), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.attention, self.head = nn.MultiheadAttention(d, 2, batch_first=True), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).flatten(2).mT
        return self.head((y + self.attention(y, y, y, need_weights=False)[0]).amax(1))


# -- networks of the literature, with random weights


class Centred(nn.Module):
    """DeepT's norm: the mean is taken off, and nothing divided."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) + self.bias


class DeepT(nn.Module):
    def __init__(self, d: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.patch, self.token = nn.Linear(16, d), nn.Parameter(torch.randn(1, 1, d))
        self.place = nn.Parameter(torch.randn(1, 5, d))
        self.norms = nn.ModuleList(Centred(d) for _ in range(3))
        self.qkv, self.out = nn.Linear(d, 3 * heads * d, bias=False), nn.Linear(heads * d, d)
        self.net, self.head = nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, d)), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.unfold((x - 0.1307) / 0.3081, 4, stride=4).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), self.patch(x)), 1) + self.place
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, d).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        p = (torch.matmul(q, k.transpose(-1, -2)) * d**-0.5).softmax(-1)
        x = self.out(torch.matmul(p, v).transpose(1, 2).reshape(b, n, -1)) + x
        x = self.net(self.norms[1](x)) + x
        return self.head(self.norms[2](x[:, 0]))


class TokenBatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class VnnComp(nn.Module):
    def __init__(self, d: int = 6, heads: int = 3) -> None:
        super().__init__()
        self.patch, self.token, self.heads = nn.Conv2d(3, d, 4, 4), nn.Parameter(torch.randn(1, 1, d)), heads
        self.place = nn.Parameter(torch.randn(1, 5, d))
        self.first, self.second, self.last = TokenBatchNorm(d), TokenBatchNorm(d), nn.BatchNorm1d(d)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.mlp, self.head = nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, d)), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(-1, -2)
        x = torch.cat([self.token.repeat(len(x), 1, 1), x], 1) + self.place
        y = self.first(x)
        q, k, v = (m(y).reshape(*y.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for m in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.permute(0, 1, 3, 2) / math.sqrt(q.shape[-1]), dim=-1)
        x = x + self.out((p @ v).permute(0, 2, 1, 3).flatten(2))
        x = x + self.mlp(self.second(x))
        return self.head(self.last(x.mean(1)))


# -- weights that are computed, sums of maps, hooks


class LowRank(nn.Module):
    """A map and a low-rank correction beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


def low_rank() -> nn.Module:
    model = FusedQkv()
    model.qkv, model.out = LowRank(model.qkv), LowRank(model.out)  # type: ignore[assignment]
    return model


def parametrised() -> nn.Module:
    model = Blocks(Block(activation=nn.LeakyReLU(0.2)))
    parametrizations.weight_norm(model.head)
    parametrizations.orthogonal(model.blocks[0].attention.out_proj)
    parametrize.register_parametrization(model.patch, "weight", nn.Tanh())
    return model


def old_weight_norm() -> nn.Module:
    model = Blocks(Block(activation=nn.SiLU()))
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.head)
    return model


def hooked() -> nn.Module:
    model = Blocks(Block(activation=nn.Tanh()))
    model.head.register_forward_hook(lambda module, args, output: 2 * output + args[0][:, :3])
    model.blocks.register_forward_pre_hook(lambda module, args: (args[0].flip(1),))
    return model


OWN: dict[str, tuple[Build, Tensor]] = {
    "reshape, einsum and formulas": (Rearranging, pictures()),
    "fused qkv": (FusedQkv, pictures()),
    "nn.MultiheadAttention": (lambda: Blocks(Block()), pictures()),
    "parallel blocks": (lambda: Blocks(Block(parallel=True)), pictures()),
    "SwiGLU and GeGLU": (lambda: Blocks(GatedBlock(), GatedBlock(fused=True)), pictures()),
    "convolutions and windows": (Hybrid, pictures()),
    "DeepT": (DeepT, pictures()),
    "VNN-COMP": (VnnComp, pictures(channels=3)),
    "LoRA": (low_rank, pictures()),
    "parametrisations": (parametrised, pictures()),
    "weight norm": (old_weight_norm, pictures()),
    "hooks": (hooked, pictures()),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) if name == "LoRA" else name for name in OWN])
def test_models_that_people_write(name: str) -> None:
    torch.manual_seed(0)
    build, example = OWN[name]
    check(stirred(build()), example)


def test_max_pooling() -> None:
    """Its forms are nearly the truth: the model's own forward keeps its answer inside, and loses it soon outside."""
    torch.manual_seed(0)
    model, example = stirred(Pooled()), pictures()
    converted = check(model, example)
    x, own = converted.encode(example)[:1], OwnForward(model, example)
    (record,) = certify_inputs(converted.network, x, method="forms")
    inside, outside = (attacked(own, x, record.prediction, r * record.radius) for r in (1.0, 1.1))
    assert float(outside.min()) < 0 <= float(inside.min())
