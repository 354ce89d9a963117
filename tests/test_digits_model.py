from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from holdfast.data.digits import DIGITS_FILE, MAX_PIXEL, Digits, demo_digits
from holdfast.errors import InputError
from holdfast.models import DigitsViT, load_digits_vit
from holdfast.models.digits import WEIGHTS_FILE


@pytest.fixture(scope="module")
def model() -> DigitsViT:
    return load_digits_vit()


@pytest.fixture(scope="module")
def digits() -> Digits:
    return demo_digits()


def test_model_is_frozen(model: DigitsViT) -> None:
    assert not model.training
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in model.parameters())


def test_digits_have_the_documented_form(digits: Digits) -> None:
    assert digits.images.shape == (32, 8, 8)
    assert digits.images.dtype == torch.float32
    assert digits.images.min() >= 0
    assert digits.images.max() <= 1
    assert digits.labels.dtype == digits.indices.dtype == torch.int64
    assert len(set(digits.indices.tolist())) == 32
    assert set(digits.labels.bincount(minlength=10).tolist()) == {3, 4}


def test_model_reads_the_bundled_digits(model: DigitsViT, digits: Digits) -> None:
    accuracy = (model(digits.images).argmax(1) == digits.labels).float().mean()
    assert accuracy >= 0.9


@pytest.mark.parametrize("depth", [1, 3])
def test_attention_inputs_are_what_enters_the_modules(depth: int, digits: Digits) -> None:
    torch.manual_seed(0)
    assert_inputs_match_hooks(DigitsViT(depth=depth), digits.images)


def test_attention_inputs_of_the_trained_model(model: DigitsViT, digits: Digits) -> None:
    assert_inputs_match_hooks(model, digits.images)


def assert_inputs_match_hooks(model: DigitsViT, images: Tensor) -> None:
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        query, key, value = args
        assert query is key is value
        seen[module] = query

    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    handles = [m.register_forward_pre_hook(record) for m in modules.values()]
    model(images)
    for handle in handles:
        handle.remove()

    inputs = model.attention_inputs(images)
    assert {name: module for name, (module, _) in inputs.items()} == modules
    for module, tensor in inputs.values():
        assert tensor.shape == (len(images), 17, 32)
        torch.testing.assert_close(tensor, seen[module])


@pytest.mark.parametrize("shape", [(8, 8), (2, 1, 8, 8), (2, 28, 28)])
def test_wrong_image_shape_is_named(model: DigitsViT, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"expected \(b, 8, 8\)"):
        model(torch.zeros(shape))


def test_files_are_small_and_say_how_they_were_made() -> None:
    assert WEIGHTS_FILE.stat().st_size + DIGITS_FILE.stat().st_size < 1_000_000
    with safe_open(WEIGHTS_FILE, framework="pt") as weights:
        metadata = weights.metadata()
    assert float(metadata["test_accuracy"]) >= 0.97
    assert {"seed", "command"} <= metadata.keys()


def test_bundled_images_are_those_of_scikit_learn(digits: Digits) -> None:
    source = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.from_numpy(source.images)[digits.indices]
    assert torch.equal(digits.images.double() * MAX_PIXEL, images)
    assert torch.equal(digits.labels, torch.from_numpy(source.target)[digits.indices])
