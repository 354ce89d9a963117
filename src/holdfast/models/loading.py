"""Models and inputs for the command line: from a folder, a file, the Hugging Face cache, timm or a model package.

Nothing is downloaded unless requested, no code is run except that of a named Python file, and weights are
safetensors, GGUF or ONNX.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from holdfast.data.pictures import Preparation, read_picture
from holdfast.errors import InputError, check_counts
from holdfast.extras import require
from holdfast.graph.onnx import OnnxModel
from holdfast.models.digits import load_digits_vit
from holdfast.models.files import load as load_certifiable
from holdfast.models.files import shelf_file
from holdfast.models.pretrained import Pretrained, find_pretrained, one_line, quiet
from holdfast.models.python_file import load_python, names_function
from holdfast.models.timm_models import load_timm
from holdfast.storage import Pathlike


@dataclass(frozen=True)
class Picture:
    """An image as the model saw it.

    Attributes:
        pixels: (height, width, 3) after resizing and cropping.
        grid: rows and columns of patches.
        prefix: how many tokens come before the patches (class token, registers).
    """

    pixels: UInt8[Tensor, "height width 3"]
    grid: tuple[int, int]
    prefix: int


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with inputs that it takes.

    Attributes:
        name: as the user gave it.
        model: frozen, on the CPU, float32.
        inputs: keyword arguments, or one tensor; what `trace` takes.
        tokens: the text of each token, so that joined they give the text, special tokens by name; without
            padding, which comes after them. None for an image.
        picture: the image as the model saw it, or None for text.
        note: what a reader must know about the weights, such as that they are random.
    """

    name: str
    model: nn.Module
    inputs: Tensor | dict[str, Tensor]
    tokens: list[list[str]] | None = None
    picture: Picture | None = None
    note: str = ""


def load(
    model: str,
    *,
    text: Sequence[str] | None = None,
    ids: Sequence[Sequence[int]] | None = None,
    image: Pathlike | None = None,
    max_tokens: int | None = None,
    download: bool = False,
) -> LoadedModel:
    """Loads a model with its input.

    Args:
        model: a folder with config.json and safetensors; a .gguf file; a name in the Hugging Face cache; `minilm` or
            `smollm2`, where their packages are installed; `timm:NAME`, `timm:NAME:FILE.safetensors` or
            `timm:NAME:random`.
        text: one or more texts, padded to one length.
        ids: token ids in the place of a text, rows of one length; they need no tokenizer.
        image: an image file, which is resized to what the model takes.
        max_tokens: longer texts are cut to this many tokens; without it, too long a text is an error.
        download: whether missing files may be downloaded.

    Example:
        >>> loaded = load("minilm", text=["A cat sat on the mat."])
        >>> layers = trace(loaded.model, loaded.inputs)
    """
    if sum(given is not None for given in (text, ids, image)) != 1:
        raise InputError(f"model {model!r} needs an input: a text, token ids or an image, one of them")
    check_counts(max_tokens=max_tokens)
    if model.startswith("timm:"):
        if image is None:
            raise InputError(f"{model!r} takes an image, not text")
        return _with_timm(model, image, download)
    source = find_pretrained(model)
    transformers = require("transformers", "hf")
    with quiet(transformers), one_line(model, download):
        config = transformers.AutoConfig.from_pretrained(**source.arguments(download))
        if image is not None and not hasattr(config, "image_size"):
            raise InputError(f"{model!r} ({config.model_type}) takes text, not an image")
        if image is None and not hasattr(config, "vocab_size"):
            raise InputError(f"{model!r} ({config.model_type}) takes an image, not text")
        options = source.arguments(download) | ({} if source.gguf else {"use_safetensors": True})
        network = transformers.AutoModel.from_pretrained(**options, config=config, dtype=torch.float32)
        network = network.eval().requires_grad_(False)
        if image is not None:
            return _with_image(model, network, source, image, download)
        if ids is not None:
            return _with_ids(model, network, [list(row[:max_tokens]) for row in ids])
        assert text is not None
        return _with_text(model, network, source, list(text), max_tokens, download)


def load_classifier(
    model: str,
    *,
    download: bool = False,
    weights: Pathlike | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A classifier in evaluation mode, frozen, float32.

    Args:
        model: what `load` takes for a model with a classification head; a file that `holdfast.models.save` wrote; a
            name on the shelf (`holdfast models`); an ONNX file; FILE.py:FUNCTION, which returns the model; or `digits`,
            the bundled ViT.
        download: whether missing files may be downloaded.
        weights: a safetensors file for the model of a Python function.
        arguments: for that function.
    """
    if names_function(model):
        return load_python(model, weights=weights, arguments=arguments)
    if weights is not None or arguments:
        raise InputError(f"weights or arguments were given for {model!r}; they belong to FILE.py:FUNCTION")
    if model.endswith(".onnx"):
        return OnnxModel(model).requires_grad_(False)
    if model == "digits":
        return load_digits_vit()
    file = shelf_file(model) or Path(model)
    if file.suffix == ".safetensors" and not (file.parent / "config.json").is_file():
        return load_certifiable(file)
    if model.startswith("timm:"):
        return load_timm(require("timm", "vision"), model, download)
    source, transformers = find_pretrained(model), require("transformers", "hf")
    with quiet(transformers), one_line(model, download):
        config = transformers.AutoConfig.from_pretrained(**source.arguments(download))
        words = hasattr(config, "vocab_size")
        kind = (
            transformers.AutoModelForSequenceClassification if words else transformers.AutoModelForImageClassification
        )
        loaded, report = kind.from_pretrained(
            **source.arguments(download), use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(f"{model!r} has no weights for {missing}; expected a classifier that was trained")
    network: nn.Module = loaded
    return network.eval().requires_grad_(False)


def load_decoder(model: str, *, download: bool = False) -> nn.Module:
    """A language model with its head: it returns the logits of the next token; named as for `load`."""
    source, transformers = find_pretrained(model), require("transformers", "hf")
    with quiet(transformers), one_line(model, download):
        options = source.arguments(download) | ({} if source.gguf else {"use_safetensors": True})
        network: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32)
    return network.eval().requires_grad_(False)


def load_tokenizer(model: str, *, download: bool = False) -> Any:
    """The tokenizer of a text model, by any name that `load` takes for one."""
    source, transformers = find_pretrained(model), require("transformers", "hf")
    with quiet(transformers), one_line(model, download):
        return transformers.AutoTokenizer.from_pretrained(**source.arguments(download))


# -- text


def _with_text(
    name: str, model: nn.Module, source: Pretrained, texts: list[str], max_tokens: int | None, download: bool
) -> LoadedModel:
    tokenizer = require("transformers", "hf").AutoTokenizer.from_pretrained(
        **source.arguments(download), config=model.config
    )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise InputError(f"{name!r} comes without the files of its tokenizer; add them, or give token ids")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    limit = min(tokenizer.model_max_length, _positions(model))
    cut = {} if max_tokens is None else {"truncation": True, "max_length": min(max_tokens, limit)}
    encoded = tokenizer(texts, padding=len(texts) > 1, padding_side="right", **cut)
    longest = max(len(ids) for ids in encoded["input_ids"])
    if longest == 0:
        raise InputError("the text has no tokens")
    if longest > limit:
        raise InputError(f"the text has {longest} tokens and {name!r} takes {limit}; cut it by max_tokens")
    taken = inspect.signature(model.forward).parameters
    inputs = {key: torch.tensor(value) for key, value in encoded.items() if key in taken}
    tokens = [_pieces(tokenizer, encoded, i, text) for i, text in enumerate(texts)]
    return LoadedModel(name, model, inputs, tokens=tokens)


def _with_ids(name: str, model: nn.Module, rows: list[list[int]]) -> LoadedModel:
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise InputError(f"ids has rows of {[len(row) for row in rows]} tokens; expected rows of one length")
    most = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    wrong = [i for row in rows for i in row if not 0 <= i < most]
    if wrong:
        raise InputError(f"a token has the id {wrong[0]}; {name!r} knows 0 to {most - 1}")
    return LoadedModel(name, model, {"input_ids": torch.tensor(rows)}, tokens=[[str(i) for i in row] for row in rows])


def _positions(model: nn.Module) -> int:
    """How many tokens the model has positions for."""
    config: Any = model.config
    # RoBERTa counts positions from behind its padding index.
    reserved = config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    return int(getattr(config, "max_position_embeddings", None) or 10**9) - reserved


def _pieces(tokenizer: Any, encoded: Any, index: int, text: str) -> list[str]:
    """The part of the text each token stands for, with the space before it."""
    ids = [i for i, real in zip(encoded["input_ids"][index], encoded["attention_mask"][index], strict=True) if real]
    names: list[str] = tokenizer.convert_ids_to_tokens(ids)
    if not tokenizer.is_fast:
        return names
    pieces, end = [], 0
    for position, name in enumerate(names):
        span = encoded.token_to_chars(index, position)
        if span is None or span.end <= span.start:  # a special token
            pieces.append(name)
            continue
        pieces.append(text[min(end, span.start) : span.end] if span.end > end else "")
        end = max(end, span.end)
    return pieces


# -- images


def _with_image(name: str, model: nn.Module, source: Pretrained, image: Pathlike, download: bool) -> LoadedModel:
    config: Any = model.config
    height, width = _pair(config.image_size)
    rows, columns = (side // patch for side, patch in zip((height, width), _pair(config.patch_size), strict=True))
    options = source.arguments(download)
    file = require("transformers", "hf").utils.cached_file(
        options.pop("pretrained_model_name_or_path"),
        "preprocessor_config.json",
        **options,
        _raise_exceptions_for_missing_entries=False,
    )
    stated = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    mean, std = (tuple(stated.get(key) or (0.5, 0.5, 0.5)) for key in ("image_mean", "image_std"))
    prepared = read_picture(image, Preparation((height, width), mean, std))
    positions = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    prefix = positions.shape[-2] - rows * columns if isinstance(positions, Tensor) else 1
    picture = Picture(prepared.pixels, (rows, columns), prefix)
    return LoadedModel(name, model, {"pixel_values": prepared.values}, picture=picture)


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Sequence) else (size, size)
    return int(height), int(width)


def _with_timm(model: str, image: Pathlike, download: bool) -> LoadedModel:
    timm = require("timm", "vision")
    network = load_timm(timm, model, download)
    name, _, weights = model.removeprefix("timm:").partition(":")
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    if grid is None:
        raise InputError(f"timm's {name!r} has no grid of patches; expected a ViT or DeiT")
    data = timm.data.resolve_model_data_config(network)
    prepared = read_picture(
        image, Preparation(tuple(data["input_size"][-2:]), data["mean"], data["std"], data["crop_pct"])
    )
    picture = Picture(prepared.pixels, tuple(grid), int(network.num_prefix_tokens))  # type: ignore[arg-type]
    note = "random weights" if weights == "random" else ""
    return LoadedModel(model, network, prepared.values, picture=picture, note=note)
