"""What becomes of a model that was read: its structure, what moves in it, which inputs it serves, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs
from holdfast.data.digits import demo_digits
from holdfast.errors import ConversionError, InputError
from holdfast.graph import Converted, Readings, to_network
from holdfast.graph.equality import model_logits
from holdfast.graph.perturbation import orthonormal, read_perturbation, spelled
from holdfast.graph.prune import pruned
from holdfast.layers.attention.piece import Attention
from holdfast.layers.piece import Piece
from holdfast.layers.tokens.pooling import Flatten
from holdfast.layers.tokens.selection import Selection
from holdfast.linalg.arithmetic import Numerical, Proved
from holdfast.models import load_digits_vit
from holdfast.models.config import config
from holdfast.models.transformer import Transformer
from holdfast.network.network import Head, Network, Residual
from holdfast.testing import make_case

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 3}
WORDS = SIZES | {"vocab_size": 50, "max_position_embeddings": 16}
IDS = torch.tensor([[5, 9, 12, 7, 30, 21], [6, 11, 40, 22, 9, 3]])
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)


def stir(model: nn.Module) -> nn.Module:
    """Weights that attend to something, norms that do something, a head that is not zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1).add_(0.1 * torch.randn_like(weight))
    return model.eval()


@pytest.fixture(scope="module")
def bert(transformers: ModuleType) -> nn.Module:
    torch.manual_seed(0)
    return stir(transformers.BertForSequenceClassification(transformers.BertConfig(**WORDS)))


class Images(nn.Module):
    """A small classifier of images (b, 3, 8, 8), with the attention of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.block = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, norm_first=True, activation="gelu")
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.patches(x).flatten(2).mT).mean(1))
        return found


@pytest.fixture(scope="module")
def images() -> nn.Module:
    return stir(Images())


def words(padding: str = "none", **more: Tensor) -> dict[str, Tensor]:
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    hidden = {"none": [], "right": [4, 5], "middle": [2, 5]}[padding]
    ids[:, hidden], mask[:, hidden] = 1, 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def pictures(seed: int = 0, count: int = 2) -> Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def logits(converted: Converted, inputs: Any) -> Tensor:
    found: Tensor = converted.network(converted.encode(inputs))
    return found


def assert_is(converted: Converted, model: nn.Module, inputs: Any) -> None:
    """The network returns what the model itself, in float32, returns."""
    real = model_logits(model, inputs)
    assert real.std() > 0.01
    torch.testing.assert_close(logits(converted, inputs).float(), real, rtol=1e-4, atol=1e-5)


# -- structure


@cache
def digits() -> Converted:
    return to_network(load_digits_vit(), demo_digits().images)


def test_the_trained_digits_model_is_its_network() -> None:
    converted, images = digits(), demo_digits().images
    assert converted.encode(images)[0].numel() == 64
    assert_is(converted, load_digits_vit(), images)
    assert converted.equality is not None
    assert converted.equality.inputs == 32 + 8  # and points around two of them
    assert converted.equality.difference < 1e-13


def test_one_token_goes_on_as_soon_as_no_other_counts() -> None:
    names = [
        [type(p).__name__ for p in s.pieces] if isinstance(s, Residual) else type(s).__name__
        for s in digits().network.stages
    ]
    attention, mlp = ["LayerNorm", "Attention"], ["LayerNorm", "Mlp"]
    assert names[-6:] == [attention, mlp, attention, "ClassToken", mlp, "LayerNorm"]


def test_post_norm_blocks_are_bounded_with_their_residual(bert: nn.Module) -> None:
    network = to_network(bert, words()).network
    residuals = [piece.layer.residual for piece in network.pieces() if isinstance(piece, Attention)]
    assert residuals == [1.0, 1.0]
    assert not any(isinstance(stage, Residual) for stage in network.stages)


@pytest.mark.parametrize("padding", ["right", "middle"])
def test_padding_is_left_out(bert: nn.Module, padding: str) -> None:
    inputs = words(padding, token_type_ids=TYPES)
    converted = to_network(bert, inputs)
    assert converted.encode(inputs).shape == (2, 4, 16)
    layers = [piece.layer for piece in converted.network.pieces() if isinstance(piece, Attention)]
    assert all(layer.mask is None for layer in layers)
    assert_is(converted, bert, inputs)
    other = inputs | {"input_ids": torch.where(inputs["input_ids"] == 1, 1, inputs["input_ids"] + 5)}
    assert_is(converted, bert, other)


def test_weights_that_are_computed() -> None:
    model, images = load_digits_vit(), demo_digits().images[:2]
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp[0])
    model.eval()
    assert_is(to_network(model, images), model, images)


def test_where_nothing_runs_the_comparison_is_made_on_the_cpu() -> None:
    """A model that was read before is compared with its network on the device, here one that holds no numbers."""
    model, images, readings = load_digits_vit(), demo_digits().images, Readings()
    to_network(model, images[:1], readings=readings)
    again = to_network(model, images[:3], readings=readings, device="meta")
    assert again.equality is not None
    assert again.equality.inputs == 3
    assert next(readings.double(model, torch.device("meta")).parameters()).is_meta
    with torch.no_grad():
        next(iter(readings.double(model).parameters())).mul_(1.5)
    with pytest.raises(ConversionError, match="the network is not the model"):
        to_network(model, images[:3], readings=readings, device="meta")


# -- what moves


def test_words_that_move_together_or_alone(bert: nn.Module) -> None:
    inputs, readings = words("right"), Readings()
    everything = to_network(bert, inputs, perturb="embeddings", readings=readings)
    x = everything.encode(inputs)
    torch.testing.assert_close(x.float(), bert.bert.embeddings.word_embeddings(inputs["input_ids"][:, :4]))
    for perturb, places in ((("word", 2), [2]), (("words", [0, 3]), [0, 3])):
        some = to_network(bert, inputs, perturb=perturb, readings=readings)
        g = some.encode(inputs)
        assert g.shape == (2, len(places), 16)
        assert not g.any()
        step = torch.randn(2, len(places), 16, dtype=torch.float64)
        moved = x.clone()
        moved[:, places] += step
        torch.testing.assert_close(some.network(g + step), everything.network(moved), rtol=1e-12, atol=1e-12)
        embeds = torch.cat([moved, x.new_zeros(2, 2, 16)], 1).float()
        real = bert(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
        torch.testing.assert_close(some.network(g + step).float(), real, rtol=1e-4, atol=1e-5)


def test_the_input_of_a_block(bert: nn.Module) -> None:
    converted = to_network(bert, words(), perturb=("layer", 1))
    kept: list[Tensor] = []
    hook = bert.bert.encoder.layer[1].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    model_logits(bert, words())
    hook.remove()
    torch.testing.assert_close(converted.encode(words()).float(), kept[0], rtol=1e-4, atol=1e-5)
    assert_is(converted, bert, words())


MASK = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(5)) > 0.8
DIRECTIONS = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(
    ("perturb", "numbers"),
    [
        (("patch", (0, 4, 4, 4)), 48),
        (("patches", [(0, 0, 2, 2), (6, 6, 2, 2)]), 24),
        (("mask", MASK), int(MASK.sum())),
        (("directions", DIRECTIONS), 3),
        (("directions", torch.cat([DIRECTIONS, DIRECTIONS])), 3),
        ("brightness", 1),
        ("contrast", 1),
        ("colour", 3),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0] if isinstance(given, tuple) else str(given),
)
def test_a_part_of_an_image(images: nn.Module, reader: Readings, perturb: Any, numbers: int) -> None:
    image = pictures(count=1)
    normalise = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    some = to_network(images, image, perturb=perturb, normalise=normalise, readings=reader)
    start = some.encode(image)
    assert start.shape == (1, 1, numbers)
    step = torch.randn(1, 1, numbers, dtype=torch.float64)
    change = torch.autograd.functional.jvp(lambda a: _image(some, a), start, step)[1]  # of the image itself
    moved = image.double() + change.reshape(image.shape)
    prepared = (moved - _channels(normalise[0])) / _channels(normalise[1])
    real = model_logits(images, prepared.float())
    torch.testing.assert_close(some.network(start + step).float(), real, rtol=1e-4, atol=1e-4)
    # The radius is the length of the change of the image.
    assert float(change.norm() / step.norm()) == pytest.approx(1.0, abs=1e-11)
    if isinstance(perturb, tuple) and perturb[0] == "mask":
        assert not change.reshape(MASK.shape)[~MASK].any()


@pytest.fixture(scope="module")
def reader() -> Readings:
    return Readings()


def _image(converted: Converted, a: Tensor) -> Tensor:
    """The image before it is normalised, from what moves."""
    for stage in converted.network.stages:
        if stage is converted.normalise:
            return a
        a = stage.value(a)  # type: ignore[union-attr]
    raise AssertionError


def _channels(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).reshape(1, -1, 1, 1)


def test_directions_are_measured_by_their_length() -> None:
    rows = torch.randn(4, 30, dtype=torch.float64)
    Q = orthonormal(torch.cat([rows, rows.sum(0, keepdim=True)]))
    assert Q.shape == (4, 30)
    g = torch.randn(1000, 4, dtype=torch.float64) @ Q  # in their span
    a = torch.linalg.lstsq(Q.mT, g.mT).solution.mT
    assert bool((a.norm(dim=-1) <= g.norm(dim=-1)).all())
    torch.testing.assert_close(rows @ Q.mT @ Q, rows)  # and nothing is lost


@pytest.mark.parametrize(
    "perturb",
    ["pixels", "colour", ("word", 3), ("words", [1, 4]), ("layer", 0), ("patch", [0, 1, 2, 3]),
     ("patches", [[0, 1, 2, 3], [4, 4, 1, 1]])],
    ids=str,
)  # fmt: skip
def test_what_moves_can_be_said_in_words(perturb: Any) -> None:
    assert read_perturbation(spelled(perturb)) == perturb


def test_tensors_are_said_by_their_digest() -> None:
    text = spelled(("mask", MASK))
    assert text == spelled(("mask", MASK.clone()))
    assert text != spelled(("mask", ~MASK))
    with pytest.raises(InputError, match="pass it as perturb"):
        read_perturbation(text)


def test_radii_in_units_of_pixels(images: nn.Module) -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    converted = to_network(images, pictures(), normalise=(mean, std))
    other = pictures(seed=1)
    assert torch.equal(converted.encode(other), other.double().flatten(2))
    prepared = ((other - _channels(mean)) / _channels(std)).float()
    torch.testing.assert_close(logits(converted, other).float(), images(prepared), rtol=1e-4, atol=1e-5)
    piece, u = converted.normalise, torch.randn(2, 3, 4, dtype=torch.float64)
    assert piece is not None
    v = torch.randn_like(u)
    torch.testing.assert_close(piece.value(u + v) - piece.value(u), piece.push(u, v))
    torch.testing.assert_close((piece.push(u, v) * u).sum(), (piece.pull(u, u) * v).sum())
    for arithmetic in (Proved(), Numerical()):
        assert float(arithmetic.number(piece.norm(arithmetic))) == pytest.approx(5, rel=1e-12)


def test_fewer_moving_numbers_have_larger_radii(images: nn.Module) -> None:
    label = int(images(pictures(count=1)).argmax())
    data = [(pictures()[0], label)]
    method, guarantee = "margin-gradient", "numerical"
    whole = holdfast.certify(images, data, [0.1], method, guarantee=guarantee).records[0].radius
    patch = ("patch", (0, 0, 4, 4))
    part = holdfast.certify(images, data, [0.1], method, guarantee=guarantee, perturb=patch).records[0].radius
    assert part > 1.1 * whole > 0


def test_pruning_keeps_every_token_that_some_query_needs() -> None:
    layer, x = (case := make_case("", n=5, biases=True, residual=1.0)).layer, case.x
    mask = torch.eye(5).bool()
    mask[1, 4] = mask[2, 3] = True
    index = torch.arange(20).reshape(5, 4)[1:3]
    stages = [Attention(layer.replace(mask=mask)), Selection(index, (5, 4))]
    before, after = x, x
    for stage in stages:
        before = stage.value(before)
    kept = pruned(stages, (5, 4))
    assert kept is not None
    for stage in kept:
        assert isinstance(stage, Piece)
        assert not isinstance(stage, Attention) or after.shape[-2] == 4  # the first token is left out
        after = stage.value(after)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


# -- models that say themselves what they are


class Own(nn.Module):
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


class Inherited(Own):
    """A subclass that computes something other than what it inherits says."""

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(images.flatten(1).relu())
        return found


def test_a_model_may_say_itself_what_it_is() -> None:
    model, images = Own().eval(), torch.rand(2, 3, 2, 2)
    converted = to_network(model)
    assert converted.network.name == "own"
    assert converted.equality is None
    assert_is(converted, model, images)
    assert to_network(model, images).equality is not None


def test_a_model_may_encode_its_inputs_itself() -> None:
    model = OwnWords().eval()
    assert_is(to_network(model, IDS), model, IDS)
    alone = to_network(model, IDS, perturb=("word", 3))
    assert alone.encode(IDS).shape == (2, 1, 4)
    assert_is(alone, model, IDS)


def test_one_word_of_one_sentence_has_forms(bert: nn.Module) -> None:
    one = {name: rows[:1] for name, rows in words().items()}
    alone = to_network(bert, one, perturb=("word", 3))
    x = alone.encode(one)
    assert alone.network(x[0]).shape == (3,)  # a point without a batch
    (certified,) = certify_inputs(alone.network, x, method="forms")
    nearest = MinimalAttack(restarts=1)(alone.network, x, alone.network(x).argmax(-1)).radius.item()
    assert 0 < certified.radius <= nearest


def test_what_is_inherited_says_nothing_of_another_forward() -> None:
    model, images = Inherited().eval(), torch.rand(1, 3, 2, 2)
    network = to_network(model, images).network
    assert network.name == "Inherited"
    assert torch.allclose(network(-images.double().flatten(2)).float(), model(-images), atol=1e-6)


@pytest.mark.parametrize("name", ["digits-smooth", "digits-patches"])
def test_models_of_holdfast(name: str) -> None:
    torch.manual_seed(0)
    model, images = Transformer(config(name)).eval(), demo_digits().images[:2].unsqueeze(1)
    assert_is(to_network(model, images), model, images)
    assert to_network(model, images, perturb=("layer", 1)).encode(images).shape[0] == 2


def test_a_model_that_says_something_else_is_refused() -> None:
    model = Own().eval()
    model.to_network = lambda: None  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ConversionError, match=r"Own has a to_network that returned NoneType; expected a Network"):
        to_network(model)


# -- refusals


REFUSALS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "training": (lambda m: m.train(), r"the model \(DigitsViT\) is in training mode.*model.eval\(\)"),
    "a part": (lambda m: m.blocks[1].train(), r"module 'blocks.1' \(Block\) is in training mode"),
    "an activation": (
        lambda m: setattr(m.blocks[1].mlp, "1", nn.Hardswish().eval()),
        r"module 'blocks.1.mlp.1': operator 'hardswish' \(.*:\d+\) is not known",
    ),
    "no eps": (
        lambda m: setattr(m, "norm", nn.RMSNorm(32).eval()),
        r"module 'norm': operator 'rms_norm' .* has no eps, so that its value depends on the dtype; set it",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_parts_that_are_not_known(name: str) -> None:
    change, message = REFUSALS[name]
    model = load_digits_vit()
    change(model)
    with pytest.raises(ConversionError, match=message):
        to_network(model, demo_digits().images[:1])


def test_inputs_that_do_not_fit(bert: nn.Module, images: nn.Module) -> None:
    with pytest.raises(InputError, match="BertForSequenceClassification needs an example"):
        to_network(bert)
    ragged = words("right")
    ragged["attention_mask"][1] = 1
    with pytest.raises(InputError, match=r"differ from the example .* in shape, padding or types"):
        to_network(bert, ragged)
    converted = to_network(bert, words("right", token_type_ids=TYPES))
    others = (words(token_type_ids=TYPES), words("right", token_type_ids=TYPES * 0))
    short = {name: value[:, :5] for name, value in words(token_type_ids=TYPES).items()}
    for other in (*others, short, words("right")):
        with pytest.raises(InputError, match="a network serves one kind: convert these inputs too"):
            converted.encode(other)
    with pytest.raises(InputError, match=r"inputs are a list; expected a batch of inputs"):
        to_network(images, [pictures()])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"normalise has 1 channels and the images have shape \(2, 3, 8, 8\)"):
        to_network(images, pictures(), normalise=([0.5], [0.5]))
    with pytest.raises(InputError, match="expected one number and one positive number per channel"):
        to_network(images, pictures(), normalise=([0.5] * 3, [0.0] * 3))
    with pytest.raises(InputError, match="a number that is not finite"):
        to_network(images, pictures() / 0)


def test_perturbations_that_do_not_fit(bert: nn.Module, images: nn.Module) -> None:
    readings, reader = Readings(), Readings()
    for perturb, message in (
        ("pixels", "perturb is 'pixels', but the input of BertForSequenceClassification is embeddings"),
        (("word", 4), r"perturb is \('word', 4\); the example has words 0 to 3"),
        (("words", [1, 1]), "each may be named once"),
        ("words", r"perturb is 'words'; expected 'pixels', 'embeddings'"),
        (("layer", 2), r"perturb is \('layer', 2\); .* has layers 0 to 1"),
    ):
        with pytest.raises(InputError, match=message):
            to_network(bert, words("right"), perturb=perturb, readings=readings)  # type: ignore[arg-type]
    for perturb, message in (
        (("word", 0), r"perturb is \('word', 0\), and the input of Images is an image"),
        (("patch", (5, 5, 4, 4)), "not inside an image of 8 x 8 pixels"),
        (("patch", 3), r"a patch is 3; expected \(top, left, height, width\)"),
        (("mask", torch.ones(3)), "expected a bool tensor of the shape of one input"),
        (("mask", torch.zeros(3, 8, 8).bool()), "expected at least one that moves"),
        (("directions", torch.ones(2, 5)), r"the directions are \(2, 5\); expected a tensor \(k, …\) of 192 numbers"),
        (("directions", torch.zeros(2, 192)), "the directions are all zero"),
        ("contrast", "one input at a time"),
    ):
        with pytest.raises(InputError, match=message):
            to_network(images, pictures(), perturb=perturb, readings=reader)  # type: ignore[arg-type]
    alone = to_network(bert, words(), perturb=("word", 1))
    with pytest.raises(InputError, match="these are other inputs; convert them too"):
        alone.encode(words() | {"input_ids": IDS + 1})


def test_a_model_that_takes_other_inputs_says_so_in_its_own_words() -> None:
    with pytest.raises(ConversionError, match=r"DigitsViT cannot be read: images have shape .*: pass a batch$"):
        to_network(load_digits_vit(), torch.rand(1, 3, 32, 32))
    with pytest.raises(ConversionError, match=r"Linear cannot be read: RuntimeError: .*; it was given \(1, 5\)$"):
        to_network(nn.Linear(4, 3).eval(), torch.rand(1, 5))
