"""Certifiable transformers: configs, building, files, and the networks they become."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import InputError, UnknownNameError
from holdfast.graph import to_network
from holdfast.layers import manifold_parameters, plain
from holdfast.layers.attention.piece import Attention
from holdfast.layers.piece import SmoothPiece
from holdfast.linalg import Ball
from holdfast.linalg.arithmetic import Proved
from holdfast.models import ModelConfig, Transformer, config, load, named_configs, read_config, save
from holdfast.models.config import config_from

DESIGNS = sorted({name.split()[0] for name in named_configs()})


def small(name: str) -> ModelConfig:
    """A config of the same design that is quick to run."""
    full = next(c for key, c in named_configs().items() if key.split()[0] == name)
    sizes = {"side": min(full.side, 16), "stem_width": 18, "width": 16, "heads": 4, "depth": 2, "vocabulary": 50}
    parts = ("stem_layers", "neck_layers")
    layers = {part: min(getattr(full, part), 2 if part == "stem_layers" else 1) for part in parts}
    return replace(full, **sizes, **layers, tokens=6, neck=min(full.neck, 12))


def build(name: str, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(small(name)).eval()


def inputs(model: Transformer, count: int = 3) -> torch.Tensor:
    c = model.config
    torch.manual_seed(1)
    if c.input == "words":
        return torch.randint(c.vocabulary, (count, c.tokens))
    return torch.rand(count, c.channels, c.side, c.side)


def test_keys_that_are_gone_are_read_where_they_changed_nothing():
    table = {"input": "image", "classes": 10, "width": 8, "depth": 1, "heads": 2}
    assert config_from({**table, "centring": False, "pool_merge": 1, "dense_layers": 0}) == ModelConfig(**table)
    with pytest.raises(UnknownNameError, match="pool_merge"):
        config_from({**table, "pool_merge": 2})


def test_the_grids_are_the_papers():
    counts = Counter(name.split()[0] for name in named_configs())
    assert counts["lofast-vit"] == 3 * 2 * 2 * 4
    assert counts["lofast-bert"] == 2 * 2 * 3
    chosen = config("lofast-bert depth=6 heads=8 attention_norm=0.75")
    assert (chosen.depth, chosen.heads, chosen.attention_norm, chosen.tokens, chosen.width) == (6, 8, 0.75, 32, 64)


def test_every_shipped_config_can_be_built():
    for chosen in {replace(each, depth=1, vocabulary=min(each.vocabulary, 9)) for each in named_configs().values()}:
        Transformer(chosen)


@pytest.mark.parametrize("name", DESIGNS)
def test_the_network_computes_what_the_model_computes(name):
    model = build(name)
    x = inputs(model)
    logits = model.double()(x if model.words is not None else x.double()).detach()
    found = model.to_network()(Ball.exact(model.encode(x)))
    assert ((found.mid - logits).abs() <= 2 * found.rad + 1e-15).all()
    assert torch.allclose(found.mid, logits, rtol=0, atol=1e-12)
    assert found.rad.max() < 1e-5


@pytest.mark.parametrize("name", ["cifar10-stem", "sst2-smooth"])
def test_the_converter_asks_the_model(name):
    model = build(name)
    converted = to_network(model, inputs(model))
    assert converted.equality.difference < 1e-12
    assert torch.equal(converted.encode(inputs(model)), model.encode(inputs(model)))


@pytest.mark.parametrize("name", DESIGNS)
def test_export_has_the_same_outputs(name):
    model = build(name)
    x = inputs(model)
    exported = plain(model)
    assert torch.equal(exported(x), model(x))
    assert not any("parametrizations" in key for key in exported.state_dict())
    assert torch.allclose(exported.to_network()(exported.encode(x)).float(), model(x), atol=1e-5)


@pytest.mark.parametrize("name", DESIGNS)
def test_all_but_attention_has_gain_one_when_proved(name):
    model = build(name)
    a, u, rho = Proved(), model.encode(inputs(model)), Ball.exact(torch.tensor([0.1], dtype=torch.float64))
    for piece in model.to_network().pieces():
        if not isinstance(piece, Attention):
            assert (piece.reach(a, u, rho).upper <= 0.1 * (1 + 2e-6)).all()
        u = piece.value(u)


@pytest.mark.parametrize("name", [name for name in DESIGNS if "smooth" in name])
def test_smooth_designs_are_smooth_throughout(name):
    assert all(isinstance(piece, SmoothPiece) for piece in build(name).to_network().pieces())


def test_our_designs_have_orthogonal_maps_and_the_papers_have_none():
    assert len(list(manifold_parameters(build("cifar10-stem")))) == 2 + 2 + 2 * 4 + 1 + 2
    assert not list(manifold_parameters(build("lofast-vit")))


@pytest.mark.parametrize("name", DESIGNS)
def test_save_and_load(name, tmp_path):
    model, path = build(name), tmp_path / "model.safetensors"
    save(model, path, {"seed": "0"})
    again = load(path)
    assert again.config == model.config
    assert torch.equal(again(inputs(model)), model(inputs(model)))
    assert not again.training
    assert not list(tmp_path.glob("*.partial"))


def test_save_and_load_with_the_parametrisation_of_torch(tmp_path):
    model = Transformer(replace(small("digits-smooth"), maps="orthogonal-torch"))
    save(model, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path / "model.safetensors")(inputs(model)), model(inputs(model)))


def test_files_that_are_no_models(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(InputError, match="not a model of this package"):
        load(path)
    with pytest.raises(InputError, match="no file"):
        load(tmp_path / "none.safetensors")
    path.write_bytes(b"nonsense")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load(path)
    model = build("digits-smooth")
    save(model, path)
    tensors = load_file(path)
    tensors.pop("head.bias")
    save_file(tensors, path, {"holdfast_model": json.dumps(asdict(model.config))})
    with pytest.raises(InputError, match="do not fit the config"):
        load(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("widht = 3", r"key of \[model\].*'widht': did you mean 'width'"),
        ('maps = "orthogonl"', "maps 'orthogonl': did you mean 'orthogonal'"),
        ("width = 2.5", "width is 2.5; expected int"),
        ("residual = 1", "residual is 1; expected bool"),
        ("neck = -1", "neck is -1; expected a number that is not negative"),
        ("expansion = 0", "expansion is 0; expected a positive number"),
        ('input = "words"', "vocabulary is 0"),
    ],
)
def test_bad_configs(tmp_path, line, message):
    key = line.split(" =")[0]
    lines = ['input = "image"', "classes = 10", "width = 8", "depth = 1", "heads = 2"]
    path = tmp_path / "model.toml"
    path.write_text("\n".join(["[model]", *(each for each in lines if not each.startswith(key + " ")), line]))
    with pytest.raises(InputError, match=message):
        read_config(path)


def test_bad_files_of_configs(tmp_path):
    path = tmp_path / "model.toml"
    with pytest.raises(InputError, match="no file"):
        read_config(path)
    path.write_text("[train]\nlr = 1")
    with pytest.raises(InputError, match=r"no table \[model\]; found train"):
        read_config(path)
    path.write_text("[model]\nwidth = 8\n")
    with pytest.raises(InputError, match="lacks classes, depth, heads, input"):
        read_config(path)
    path.write_text("[model\n")
    with pytest.raises(InputError, match="cannot be read as TOML"):
        read_config(path)
    with pytest.raises(UnknownNameError, match="did you mean 'cifar10-stem'"):
        config("cifar10-stm")


def test_designs_that_do_not_fit():
    chosen = small("lofast-vit")
    for change, message in {
        "activation": ("maxmin", "an SLL layer needs"),
        "heads": (3, "3 heads do not divide"),
        "patch": (3, "do not fit an image"),
    }.items():
        with pytest.raises(InputError, match=message[1]):
            Transformer(replace(chosen, **{change: message[0]}))
    with pytest.raises(InputError, match="needs an even one"):
        Transformer(replace(small("cifar10-stem"), patch=1))


def test_compiles_to_one_graph():
    model = build("cifar10-stem")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = inputs(model)
    assert torch.allclose(compiled(x), model(x), atol=1e-6)
