"""Texts and language models for measurements: nothing is fetched, and what is missing is named in one line."""

from __future__ import annotations

import copy
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from holdfast.data.dataset import find_file
from holdfast.errors import HoldfastError, InputError
from holdfast.extras import require
from holdfast.models.loading import load, load_tokenizer

TEXTS = {"alice": ("alice.txt",), "ag-news": ("ag_news_test.csv", "ag_news_test.csv.gz")}


def find_text(name: str, data_dir: Path | None = None) -> Path:
    """The file of one of TEXTS, in this folder or in the one that HOLDFAST_DATA names."""
    return find_file(data_dir, TEXTS[name], name)


def read_text(name: str, data_dir: Path | None = None) -> str:
    """One of TEXTS as a whole: Alice in Wonderland, or the titles and texts of the AG News test set in their order."""
    path = find_text(name, data_dir)
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8-sig")
    if name == "alice":
        return text
    return "\n".join(" ".join(row[1:]) for row in csv.reader(text.splitlines()))


def chunks(ids: Sequence[int], length: int, sequences: int) -> Int[Tensor, "s n"]:
    """The first consecutive pieces of a tokenised text."""
    if len(ids) < length * sequences:
        raise InputError(f"the text has {len(ids)} tokens; {sequences} sequences of {length} need more; use fewer")
    return torch.tensor(ids[: length * sequences]).reshape(sequences, length)


@dataclass(frozen=True)
class ModelSource:
    """Where a language model comes from.

    Attributes:
        title: what a reader calls it.
        names: names to load its weights by; of a random model, those of the tokenizer whose ids it is given.
        config: class of the library whose defaults give the shape of a model with random weights.
        decoder: whether an encoder is turned into a decoder, so that its attention is causal.
    """

    title: str
    names: tuple[str, ...]
    config: str | None = None
    decoder: bool = False


_BERT, _GPT2 = ("bert-base-uncased", "google-bert/bert-base-uncased"), ("gpt2", "openai-community/gpt2")
SOURCES = {
    "minilm": ModelSource("all-MiniLM-L6-v2", ("minilm",)),
    "minilm-decoder": ModelSource("all-MiniLM-L6-v2 as a decoder", ("minilm",), decoder=True),
    "bert-random": ModelSource("BERT-base, random weights", ("minilm",), config="BertConfig"),
    "gpt2-random": ModelSource("GPT-2, random weights", ("smollm2",), config="GPT2Config"),
    "smollm2": ModelSource("SmolLM2-135M", ("smollm2",)),
    "bert": ModelSource("BERT-base", _BERT),
    "bert-decoder": ModelSource("BERT-base as a decoder", _BERT, decoder=True),
    "gpt2": ModelSource("GPT-2", _GPT2),
}


@dataclass(frozen=True)
class LanguageModel:
    """A model in evaluation mode, and its tokenizer."""

    model: nn.Module
    tokenizer: Any

    def tokenise(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def load_source(name: str) -> LanguageModel:
    """One of SOURCES, from an installed package or the Hugging Face cache."""
    source = SOURCES[name]
    for candidate in source.names:
        try:
            tokenizer = load_tokenizer(candidate)
            model = random_model(source.config) if source.config else load(candidate, text=["text"]).model
        except InputError as error:
            if len(source.names) == 1:
                raise InputError(f"{name!r} cannot be had: {error}") from error
            continue
        return LanguageModel(as_decoder(model) if source.decoder else model, tokenizer)
    raise InputError(f"{name!r} cannot be had: no {' or '.join(source.names)} in the Hugging Face cache")


def refusal(name: str) -> str | None:
    """Why one of SOURCES cannot be had, if so."""
    for candidate in SOURCES[name].names:
        try:
            load_tokenizer(candidate)
        except HoldfastError as error:
            reason = str(error)
        else:
            return None
    several = len(SOURCES[name].names) > 1
    return f"{name!r} cannot be had: " + (
        f"no {' or '.join(SOURCES[name].names)} in the Hugging Face cache" if several else reason
    )


def random_model(config: str, seed: int = 0, **sizes: int) -> nn.Module:
    """A model of the default shape of a configuration class, initialised as the library does; dropout is off."""
    transformers = require("transformers", "hf")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModel.from_config(getattr(transformers, config)(**sizes))
    return model.eval().requires_grad_(False)


def as_decoder(encoder: Any) -> nn.Module:
    """The same weights with causal attention."""
    config = copy.deepcopy(encoder.config)
    config.is_decoder = True
    decoder: nn.Module = type(encoder)(config)
    decoder.load_state_dict(encoder.state_dict())
    return decoder.eval().requires_grad_(False)
