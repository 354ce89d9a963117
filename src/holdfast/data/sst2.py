"""SST-2: sentences and their sentiment, in GLUE's layout (Socher et al. 2013; Wang et al. 2019)."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import torch
from jaxtyping import Int64
from torch import Tensor

from holdfast.data.dataset import Dataset, altered, checksum, data_folder, find_file
from holdfast.data.sources import SOURCES, Source
from holdfast.errors import InputError
from holdfast.storage import Pathlike

TOKENS = 32  # words of a sentence that are read; the rest of a shorter one is padding
PADDING, UNKNOWN = 0, 1
LEAST_COUNT = 2  # a word seen once in training is unknown, so that what stands for unknown words is trained
_CLASS_COUNTS = {"train": (29_780, 37_569), "dev": (428, 444)}


@final
@dataclass(frozen=True)
class Vocabulary:
    """Words by id; id 0 is padding and id 1 stands for every word that is not listed."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[str]) -> Vocabulary:
        """The words that occur at least twice, the most frequent first."""
        counts = Counter(word for sentence in sentences for word in sentence.split())
        kept = sorted((word for word, count in counts.items() if count >= LEAST_COUNT), key=lambda w: (-counts[w], w))
        return cls(("[pad]", "[unk]", *kept))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, sentences: Sequence[str], tokens: int = TOKENS) -> Int64[Tensor, "b tokens"]:
        """The ids of the first words of each sentence, padded at the end."""
        ids = {word: i for i, word in enumerate(self.words)}
        rows = [[ids.get(word, UNKNOWN) for word in sentence.split()[:tokens]] for sentence in sentences]
        return torch.tensor([row + [PADDING] * (tokens - len(row)) for row in rows], dtype=torch.int64)


def vocabulary(data_dir: Pathlike | None = None) -> Vocabulary:
    """The words of the training split."""
    return _vocabulary(data_folder(data_dir).resolve())


@cache
def _vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary.of(_rows(_find("train", folder))[0])


def read(split: str, data_dir: Pathlike | None, verify: bool) -> Dataset:
    """Word ids (b, 32) in the order of the file."""
    path = _find(split, data_dir)
    sentences, labels = _rows(path)
    if verify and tuple(labels.bincount(minlength=2).tolist()) != _CLASS_COUNTS[split]:
        raise altered(path, f"{len(labels)} sentences, not those published")
    ids = vocabulary(data_dir).encode(sentences)
    return Dataset("sst2", split, ids, labels, torch.arange(len(labels)), checksum(ids, labels), sentences)


def _find(split: str, data_dir: Pathlike | None) -> Path:
    return find_file(data_dir, (f"SST-2/{split}.tsv", f"SST-2/{split}.tsv.gz"), "sst2")


def _rows(path: Path) -> tuple[tuple[str, ...], Int64[Tensor, " b"]]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        header, *lines = content.decode("utf-8").splitlines()
        rows = [line.split("\t") for line in lines]
        sentences, labels = tuple(row[0].strip() for row in rows), [int(row[1]) for row in rows]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError, IndexError) as error:
        raise InputError(f"{path} cannot be read as lines of sentence<TAB>label: {error}; fetch it again") from None
    if header.split("\t") != ["sentence", "label"] or not set(labels) <= {0, 1}:
        raise InputError(f"{path}: expected a header sentence<TAB>label and labels 0 or 1; fetch GLUE's SST-2")
    return sentences, torch.tensor(labels, dtype=torch.int64)


SOURCES.add("sst2")(Source(("train", "dev"), 2, read))
