"""A converted network is its model: every family, every perturbation, and a clear refusal of everything else."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from holdfast.network.conversion.equality import compare, model_logits
from holdfast.network.convert import Converted, check_equal, to_network
from torch import Tensor, nn

from holdfast.bounds.arithmetic import Numerical, Proved
from holdfast.errors import ConversionError, InputError, UnsupportedAttentionError
from holdfast.models import demo_digits, load_digits_vit
from holdfast.models.config import config
from holdfast.models.transformer import Transformer
from holdfast.network.attention import Attention
from holdfast.network.network import Head, Network, Residual
from holdfast.network.pooling import Flatten

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 3}
WORDS = SIZES | {"vocab_size": 50, "max_position_embeddings": 16}
PIXELS = SIZES | {"image_size": 8, "patch_size": 4, "num_channels": 3}
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "vocab_size": 50, "num_labels": 3}

TEXTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("BertForSequenceClassification", "BertConfig", WORDS),
    "RoBERTa": ("RobertaForSequenceClassification", "RobertaConfig", WORDS | {"pad_token_id": 1}),
    "DistilBERT": ("DistilBertForSequenceClassification", "DistilBertConfig", DISTIL | {"pad_token_id": 1}),
}
IMAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ViT": ("ViTForImageClassification", "ViTConfig", PIXELS),
    "DeiT": ("DeiTForImageClassification", "DeiTConfig", PIXELS),
}
IDS = torch.tensor([[5, 9, 12, 7, 30, 21], [6, 11, 40, 22, 9, 3]])
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)


def stir(model: nn.Module) -> nn.Module:
    """Weights that attend to something, norms that do something, a head that is not zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1).add_(0.1 * torch.randn_like(weight))
    return model.eval()


def build(transformers: ModuleType, name: str, implementation: str = "sdpa", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model, config, sizes = (TEXTS | IMAGES)[name]
    made = getattr(transformers, config)(**sizes | options, attn_implementation=implementation)
    return stir(getattr(transformers, model)(made))


def words(padding: str = "none", **more: Tensor) -> dict[str, Tensor]:
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    hidden = {"none": [], "right": [4, 5], "middle": [2, 5]}[padding]
    ids[:, hidden], mask[:, hidden] = 1, 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def pictures(seed: int = 0, count: int = 2, size: int = 8) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def logits(converted: Converted, inputs: Any) -> Tensor:
    found: Tensor = converted.network(converted.encode(inputs))
    return found


def assert_is(converted: Converted, model: nn.Module, inputs: Any) -> None:
    """The network returns what the model itself, in float32, returns."""
    real = model_logits(model, inputs)
    assert real.std() > 0.01
    torch.testing.assert_close(logits(converted, inputs).float(), real, rtol=1e-4, atol=1e-5)


# -- every family


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_model_of_transformers_is_its_network(
    transformers: ModuleType, name: str, implementation: str
) -> None:
    model = build(transformers, name, implementation)
    converted = to_network(model, pictures())
    assert converted.encode(pictures()).shape == (2, 3, 64)
    assert converted.equality is not None
    assert converted.equality.difference < 1e-12
    assert_is(converted, model, pictures(seed=1, count=3))
    assert_is(converted, model, {"pixel_values": pictures(seed=2)})


@pytest.mark.parametrize("padding", ["none", "right", "middle"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_model_is_its_network(transformers: ModuleType, name: str, implementation: str, padding: str) -> None:
    model = build(transformers, name, implementation)
    types = {"token_type_ids": TYPES} if name == "BERT" else {}
    inputs = words(padding, **types)
    converted = to_network(model, inputs)
    assert converted.encode(inputs).shape == (2, 6 if padding == "none" else 4, 16)
    assert converted.equality is not None
    assert converted.equality.difference < 1e-12
    assert_is(converted, model, inputs)
    other = inputs | {"input_ids": torch.where(inputs["input_ids"] == 1, 1, inputs["input_ids"] + 5)}
    assert_is(converted, model, other)


def test_words_without_a_mask_are_a_tensor_too(transformers: ModuleType) -> None:
    model = build(transformers, "DistilBERT")
    assert_is(to_network(model, IDS), model, IDS)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"])
def test_activations_of_transformers(transformers: ModuleType, activation: str) -> None:
    model = build(transformers, "ViT", hidden_act=activation)
    assert_is(to_network(model, pictures()), model, pictures())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qkv_bias": False},
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False},
        {"global_pool": "avg", "fc_norm": False},
        {"init_values": 0.5},
        {"reg_tokens": 2},
        {"no_embed_class": True},
        {"pre_norm": True, "proj_bias": False},
        {"pos_embed": "none"},
        {"final_norm": False},
    ],
    ids=str,
)
def test_vision_transformers_of_timm(timm: ModuleType, options: dict[str, Any]) -> None:
    model = small_timm(timm, **options)
    converted = to_network(model, pictures())
    assert_is(converted, model, pictures(seed=1))


def small_timm(timm: ModuleType, **options: Any) -> nn.Module:
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    torch.manual_seed(0)
    return stir(timm.models.vision_transformer.VisionTransformer(**sizes | options))


class Wrapper(nn.Module):
    """What `families/torch.py` describes."""

    def __init__(self, encoder: nn.Module, head: nn.Module, pooling: str = "mean", **parts: Any) -> None:
        super().__init__()
        self.encoder, self.head, self.pooling = encoder, head, pooling
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x)
            x = x.flatten(2).mT if isinstance(self.embedding, nn.Conv2d) else x
        if hasattr(self, "class_token"):
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        if hasattr(self, "positions"):
            x = x + self.positions
        x = self.encoder(x)
        return self.head(x[:, 0] if self.pooling == "first" else x.mean(1))


def torch_encoder(norm_first: bool = True, activation: Any = "gelu", norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.1, activation=activation, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16) if norm else None, enable_nested_tensor=False)


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()], ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_encoders_of_torch(norm_first: bool, activation: Any, pooling: str) -> None:
    model = stir(Wrapper(torch_encoder(norm_first, activation, norm=norm_first), nn.Linear(16, 3), pooling))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3))
    converted = to_network(model, x)
    assert torch.equal(converted.encode(x), x.double())
    assert_is(converted, model, x)


@pytest.mark.parametrize("kind", ["image", "words", "vectors"])
def test_embeddings_around_an_encoder_of_torch(kind: str) -> None:
    embedding, n, inputs = {
        "image": (nn.Conv2d(3, 16, 4, 4), 4, pictures()),
        "words": (nn.Embedding(50, 16), 6, IDS),
        "vectors": (nn.Linear(7, 16, bias=False), 5, torch.randn(2, 5, 7)),
    }[kind]
    head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3, bias=False))
    parts = {"embedding": embedding, "class_token": nn.Parameter(torch.randn(1, 1, 16))}
    model = stir(Wrapper(torch_encoder(), head, "first", **parts, positions=nn.Parameter(torch.randn(1, n + 1, 16))))
    assert_is(to_network(model, inputs), model, inputs)


class Pooled(nn.Module):
    """A sentence encoder with a small head on the mean of its tokens."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head, self.pooling = encoder, head, "mean"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        count = attention_mask.unsqueeze(-1).to(tokens)
        found: Tensor = self.head((tokens * count).sum(1) / count.sum(1))
        return found


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (nn.Conv2d(3, 16, 4, 4, dilation=2), r"module 'embedding' \(Conv2d\) is no plain convolution"),
        (nn.Conv1d(3, 16, 4), r"module 'embedding' \(Conv1d\) is not an embedding that is known; expected nn.Conv2d"),
    ],
    ids=str,
)
def test_embeddings_that_are_not_known(embedding: nn.Module, message: str) -> None:
    class Images(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.encoder(x.flatten(2)[..., :16]).mean(1))
            return found

    with pytest.raises(ConversionError, match=message):
        to_network(Images(torch_encoder(), nn.Linear(16, 3), embedding=embedding).eval(), pictures())


@pytest.mark.parametrize("padding", ["none", "right"])
def test_a_sentence_encoder_with_a_head(transformers: ModuleType, padding: str) -> None:
    torch.manual_seed(0)
    encoder = transformers.BertModel(transformers.BertConfig(**WORDS))
    model = stir(Pooled(encoder, nn.Linear(16, 2)))
    assert_is(to_network(model, words(padding)), model, words(padding))


def test_an_image_encoder_with_a_head(transformers: ModuleType) -> None:
    torch.manual_seed(0)
    encoder = transformers.ViTModel(transformers.ViTConfig(**PIXELS))

    class Features(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.encoder(x).last_hidden_state[:, 0])
            return found

    model = stir(Features(encoder, nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)), "first"))
    assert_is(to_network(model, pictures()), model, pictures())


def test_causal_attention_stays_causal(transformers: ModuleType) -> None:
    model = build(transformers, "BERT", is_decoder=True)
    converted = to_network(model, words("right"))
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    assert all(torch.equal(p.layer.mask, lower) for p in converted.network.pieces() if isinstance(p, Attention))
    assert_is(converted, model, words("right"))


def test_weights_that_are_computed() -> None:
    model, images = load_digits_vit(), demo_digits().images[:2]
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp[0])
    model.eval()
    assert_is(to_network(model, images), model, images)


@pytest.mark.parametrize("name", ["digits-smooth", "digits-patches"])
def test_models_of_holdfast(name: str) -> None:
    torch.manual_seed(0)
    model, images = Transformer(config(name)).eval(), demo_digits().images[:2].unsqueeze(1)
    assert_is(to_network(model, images), model, images)
    assert to_network(model, images, perturb=("layer", 1)).encode(images).shape[0] == 2


# -- equality


def test_the_trained_digits_model_is_its_network() -> None:
    model, images = load_digits_vit(), demo_digits().images
    converted = to_network(model, images)
    assert converted.encode(images).shape == (32, 1, 64)
    assert_is(converted, model, images)
    found = check_equal(converted, model, images)
    assert found == converted.equality
    assert found.inputs == 32
    assert found.difference < 1e-13
    assert found.radius < 1e-4


def test_one_token_goes_on_as_soon_as_no_other_counts() -> None:
    network = to_network(load_digits_vit(), demo_digits().images).network
    names = [
        [type(p).__name__ for p in s.pieces] if isinstance(s, Residual) else type(s).__name__ for s in network.stages
    ]
    attention, mlp = ["LayerNorm", "Attention"], ["LayerNorm", "Mlp"]
    assert names == ["PatchEmbedding", attention, mlp, attention, "ClassToken", mlp, "LayerNorm"]


def test_post_norm_blocks_are_bounded_with_their_residual(transformers: ModuleType) -> None:
    network = to_network(build(transformers, "BERT"), words()).network
    residuals = [piece.layer.residual for piece in network.pieces() if isinstance(piece, Attention)]
    assert residuals == [1.0, 1.0]
    assert not any(isinstance(stage, Residual) for stage in network.stages)


def test_a_float64_model_and_a_batch_of_one() -> None:
    model, images = load_digits_vit().double(), demo_digits().images[:1].double()
    assert to_network(model, images).equality is not None


class Rounding(nn.Module):
    """A part that changes what goes through it a little."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-6)


def test_a_model_that_does_more_than_its_parts_is_refused() -> None:
    model, images = load_digits_vit(), demo_digits().images[:2]
    model.norm.register_forward_hook(lambda module, args, output: output * (1 + 1e-8))
    with pytest.raises(ConversionError, match=r"DigitsViT: the network is not the model: logits differ by up to \d"):
        to_network(model, images)


def test_a_network_of_other_weights_is_refused() -> None:
    model, images = load_digits_vit(), demo_digits().images[:2]
    converted = to_network(model, images)
    with torch.no_grad():
        model.head.bias[3] += 1e-7
    with pytest.raises(ConversionError, match="the network is not the model"):
        check_equal(converted, model, images)


def test_the_balls_refuse_what_the_tolerance_lets_pass() -> None:
    network = Network([], Head(torch.eye(3).double(), torch.zeros(3).double()))
    x = torch.tensor([[[1.0, -2.0, 0.5]]], dtype=torch.float64)
    assert compare(network, x, x[0]).difference == 0
    with pytest.raises(ConversionError, match=r"differ by up to 2e-12, the largest is 2"):
        compare(network, x, x[0] * (1 + 1e-12))


# -- what moves


def test_words_that_move_together_or_alone(transformers: ModuleType) -> None:
    model, inputs = build(transformers, "BERT"), words("right")
    everything = to_network(model, inputs, perturb="embeddings")
    alone = to_network(model, inputs, perturb=("word", 2))
    x, g = everything.encode(inputs), alone.encode(inputs)
    torch.testing.assert_close(x.float(), model.bert.embeddings.word_embeddings(inputs["input_ids"][:, :4]))
    assert g.shape == (2, 1, 16)
    assert not g.any()
    step = torch.randn(2, 1, 16, dtype=torch.float64)
    moved = x.clone()
    moved[:, 2:3] += step
    torch.testing.assert_close(alone.network(g + step), everything.network(moved), rtol=1e-12, atol=1e-12)
    embeds = torch.cat([moved, x.new_zeros(2, 2, 16)], 1).float()
    real = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(alone.network(g + step).float(), real, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ViT", "BERT"])
def test_the_input_of_a_block(transformers: ModuleType, name: str) -> None:
    model = build(transformers, name)
    inputs: Any = pictures() if name == "ViT" else words()
    converted = to_network(model, inputs, perturb=("layer", 1))
    kept: list[Tensor] = []
    block = model.vit.layers[1] if name == "ViT" else model.bert.encoder.layer[1]
    hook = block.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    model_logits(model, inputs)
    hook.remove()
    torch.testing.assert_close(converted.encode(inputs).float(), kept[0], rtol=1e-4, atol=1e-5)
    assert_is(converted, model, inputs)


def test_radii_in_units_of_pixels(transformers: ModuleType) -> None:
    model, mean, std = build(transformers, "ViT"), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    converted = to_network(model, pictures(), normalise=(mean, std))
    images = pictures(seed=1)
    assert torch.equal(converted.encode(images), images.double().flatten(2))
    shape = (1, 3, 1, 1)
    prepared = (images - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)
    torch.testing.assert_close(logits(converted, images).float(), model(prepared).logits, rtol=1e-4, atol=1e-5)
    assert check_equal(converted, model, {"pixel_values": images}).difference < 1e-12
    piece, u = converted.normalise, torch.randn(2, 3, 4, dtype=torch.float64)
    assert piece is not None
    v = torch.randn_like(u)
    torch.testing.assert_close(piece.value(u + v) - piece.value(u), piece.push(u, v))
    torch.testing.assert_close((piece.push(u, v) * u).sum(), (piece.pull(u, u) * v).sum())
    for arithmetic in (Proved(), Numerical()):
        assert float(arithmetic.number(piece.norm(arithmetic))) == pytest.approx(5, rel=1e-12)


class Own(nn.Module):
    """A model that says itself what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(images.flatten(1))
        return found

    def to_network(self) -> Network:
        return Network([Flatten()], Head(self.head.weight.detach(), self.head.bias.detach()), "own")


class OwnWords(nn.Module):
    """One that looks its words up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 4), nn.Linear(24, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.words(ids).flatten(1))
        return found

    def encode(self, ids: Tensor) -> Tensor:
        return self.words.weight.detach().double()[ids]

    def to_network(self) -> Network:
        return Network([Flatten()], Head(self.head.weight.detach(), self.head.bias.detach()), "own")


def test_a_model_may_encode_its_inputs_itself() -> None:
    model = OwnWords().eval()
    assert_is(to_network(model, IDS), model, IDS)
    alone = to_network(model, IDS, perturb=("word", 3))
    assert alone.encode(IDS).shape == (2, 1, 4)
    assert_is(alone, model, IDS)


def test_a_model_that_says_something_else_is_refused() -> None:
    model = Own().eval()
    model.to_network = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConversionError, match=r"the model \(Own\) has a to_network that returned NoneType"):
        to_network(model)


def test_a_model_may_say_itself_what_it_is() -> None:
    model, images = Own().eval(), torch.rand(2, 3, 2, 2)
    converted = to_network(model)
    assert converted.network.name == "own"
    assert converted.equality is None
    assert_is(converted, model, images)
    assert to_network(model, images).equality is not None


# -- refusals


REFUSALS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "training": (lambda m: m.train(), r"the model \(DigitsViT\) is in training mode.*model.eval\(\)"),
    "a part": (lambda m: m.blocks[1].train(), r"module 'blocks.1' \(Block\) is in training mode"),
    "a layer on top": (
        lambda m: m.blocks[0].mlp.append(nn.Linear(32, 32).eval()),
        r"module 'blocks.0.mlp.3' \(Linear\) is a part with the parameter 'weight' that has no place",
    ),
    "an idle parameter": (
        lambda m: m.blocks[0].register_parameter("gate", nn.Parameter(torch.ones(3))),
        r"module 'blocks.0' \(Block\) is a part with the parameter 'gate' that has no place",
    ),
    "a part without parameters": (
        lambda m: setattr(m, "rounding", Rounding().eval()),
        r"module 'rounding' \(Rounding\) is a part that has no place",
    ),
    "an activation": (
        lambda m: setattr(m.blocks[1].mlp, "1", nn.Hardswish().eval()),
        r"module 'blocks.1.mlp.1' \(Hardswish\) is not an activation that is known; expected one of gelu, gelu-tanh",
    ),
    "a norm": (
        lambda m: setattr(m, "norm", nn.RMSNorm(32).eval()),
        r"module 'norm' \(RMSNorm\) is not a norm that is known; expected nn.LayerNorm",
    ),
    "a linear map": (
        lambda m: setattr(m.blocks[0].mlp, "0", Adapted(32, 128).eval()),
        r"module 'blocks.0.mlp.0' \(Adapted\) is not a plain linear map; expected nn.Linear",
    ),
}


class Adapted(nn.Linear):
    """A linear map that adds something to its weights."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


@pytest.mark.parametrize("name", REFUSALS)
def test_parts_that_are_not_known(name: str) -> None:
    change, message = REFUSALS[name]
    model = load_digits_vit()
    change(model)
    with pytest.raises(ConversionError, match=message):
        to_network(model, demo_digits().images[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_pool": "max"},
            r"the model \(VisionTransformer\) pools by global_pool='max'; expected",
        ),
        ({"global_pool": "map"}, r"pools by global_pool='map'"),
        ({"scale_mlp_norm": True}, r"module 'blocks.0.mlp.norm' \(LayerNorm\) is a part with the parameter 'weight'"),
        ({"embed_norm_layer": nn.LayerNorm}, r"module 'patch_embed.norm' \(LayerNorm\) is a part"),
    ],
    ids=str,
)
def test_vision_transformers_of_timm_that_are_not_known(
    timm: ModuleType, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConversionError, match=message):
        to_network(small_timm(timm, **options), pictures())


def test_attention_that_is_not_known(timm: ModuleType) -> None:
    with pytest.raises(UnsupportedAttentionError, match="query-key norm"):
        to_network(small_timm(timm, qk_norm=True), pictures())


def test_models_that_are_not_known(transformers: ModuleType) -> None:
    encoder = build(transformers, "BERT").bert
    with pytest.raises(ConversionError, match=r"the model \(Linear\) is of no class that is known: holdfast.DigitsViT"):
        to_network(nn.Linear(3, 2).eval(), torch.randn(2, 3))
    with pytest.raises(ConversionError, match=r"the model \(BertModel\) has no classification head; wrap it"):
        to_network(encoder, words())

    class Subclass(type(build(transformers, "BERT"))):  # type: ignore[misc]
        pass

    with pytest.raises(ConversionError, match=r"the model \(Subclass\) is of no class that is known"):
        to_network(Subclass(encoder.config).eval(), words())
    odd = Pooled(encoder, nn.Linear(16, 2)).eval()
    odd.pooling = "max"
    with pytest.raises(ConversionError, match=r"\(Pooled\) has pooling='max' beside its encoder; expected"):
        to_network(odd, words())
    with pytest.raises(ConversionError, match=r"module 'head' \(Identity\) is no classification head"):
        to_network(Pooled(encoder, nn.Identity()).eval(), words())
    twice = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 2))
    with pytest.raises(ConversionError, match=r"module 'head.1' \(Linear\) has no place here"):
        to_network(Pooled(encoder, twice).eval(), words())
    with pytest.raises(ConversionError, match=r"module 'head' \(Sequential\) has no place here"):
        to_network(Pooled(encoder, nn.Sequential(nn.Linear(16, 2), nn.Tanh())).eval(), words())


def test_inputs_that_do_not_fit(transformers: ModuleType) -> None:
    model, vit = build(transformers, "BERT"), build(transformers, "ViT")
    with pytest.raises(InputError, match="BertForSequenceClassification needs an example"):
        to_network(model)
    ragged = words("right")
    ragged["attention_mask"][1] = 1
    with pytest.raises(InputError, match=r"the attention mask \(2, 6\) is not one row of 0 and 1 for all inputs"):
        to_network(model, ragged)
    with pytest.raises(InputError, match="hides the first token"):
        to_network(model, words() | {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]] * 2)})
    with pytest.raises(InputError, match=r"module 'bert.embeddings.token_type_embeddings' adds something else"):
        to_network(model, words(token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]])))
    converted = to_network(model, words("right", token_type_ids=TYPES))
    for other in (words(token_type_ids=TYPES), words("right"), words("right", token_type_ids=TYPES * 0)):
        with pytest.raises(InputError, match="in length, padding or types; a network serves one length"):
            converted.encode(other)
    with pytest.raises(InputError, match="inputs of 5 tokens differ from the example's 6"):
        converted.encode({name: value[:, :5] for name, value in words(token_type_ids=TYPES).items()})
    with pytest.raises(InputError, match=r"inputs are a tuple; expected a batch of inputs"):
        to_network(vit, (pictures(),))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"normalise has 1 channels and the images have shape \(2, 3, 8, 8\)"):
        to_network(vit, pictures(), normalise=([0.5], [0.5]))
    with pytest.raises(InputError, match="expected one number and one positive number a channel"):
        to_network(vit, pictures(), normalise=([0.5] * 3, [0.0] * 3))


def test_perturbations_that_do_not_fit(transformers: ModuleType) -> None:
    model, vit = build(transformers, "BERT"), build(transformers, "ViT")
    with pytest.raises(
        InputError, match="perturb is 'pixels', but the input of BertForSequenceClassification is embeddings"
    ):
        to_network(model, words(), perturb="pixels")
    with pytest.raises(InputError, match=r"perturb is \('word', 0\), and there is an image"):
        to_network(vit, pictures(), perturb=("word", 0))
    with pytest.raises(InputError, match=r"perturb is \('word', 4\); the example has words 0 to 3"):
        to_network(model, words("right"), perturb=("word", 4))
    with pytest.raises(InputError, match=r"perturb is \('layer', 2\); ViTForImageClassification has layers 0 to 1"):
        to_network(vit, pictures(), perturb=("layer", 2))
    with pytest.raises(InputError, match=r"perturb is 'words'; expected 'pixels', 'embeddings'"):
        to_network(model, words(), perturb="words")  # type: ignore[arg-type]
    alone = to_network(model, words(), perturb=("word", 1))
    with pytest.raises(InputError, match="these are other inputs; convert them too"):
        alone.encode(words() | {"input_ids": IDS + 1})
