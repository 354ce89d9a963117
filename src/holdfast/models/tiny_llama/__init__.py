"""A Llama of two layers that was trained on Alice in Wonderland, word by word; it comes with the package.

`python examples/train_tiny_llama.py alice.txt` makes its files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from holdfast.models.loading import load_decoder

FOLDER = Path(__file__).parent
WORDS_FILE = "words.txt"
UNKNOWN = 0  # the word for all words that it does not know


def split_words(text: str) -> list[str]:
    """Words and punctuation marks, in small letters."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?|[.,;:!?]", text.lower().replace("\u2019", "'"))


def load_tiny_llama() -> nn.Module:
    """The model, frozen, in evaluation mode: `LlamaForCausalLM` of transformers."""
    return load_decoder(str(FOLDER))


def known_words() -> list[str]:
    """What each number stands for."""
    return (FOLDER / WORDS_FILE).read_text(encoding="utf-8").split()


def word_ids(words: Sequence[str], known: Sequence[str]) -> Int64[Tensor, " n"]:
    """The numbers of words."""
    places = {word: i for i, word in enumerate(known)}
    return torch.tensor([places.get(word, UNKNOWN) for word in words])
