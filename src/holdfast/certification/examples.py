"""The inputs of a run with their labels, whatever they came from, and how they enter the network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from holdfast.certification.settings import Settings
from holdfast.data import Dataset, load
from holdfast.data.dataset import checksum
from holdfast.errors import InputError
from holdfast.graph import Readings, to_network
from holdfast.network.network import Network
from holdfast.storage import Pathlike

#: One input: a tensor without a batch dimension, or keyword arguments of a batch of one, as a tokenizer returns them.
Example = Tensor | Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Batch:
    """Some inputs as the model takes them."""

    inputs: Tensor | Mapping[str, Tensor]
    labels: tuple[int, ...]
    indices: tuple[int, ...]


@final
@dataclass(frozen=True)
class Examples:
    """All inputs of a run.

    Attributes:
        name: of the data set.
        split: its part.
        inputs: one for each label; a tensor (b, …) where they can stand in one batch.
        checksum: SHA-256 of the whole split.
    """

    name: str
    split: str
    inputs: Tensor | Sequence[Mapping[str, Tensor]]
    labels: tuple[int, ...]
    indices: tuple[int, ...]
    checksum: str

    def batches(self, places: Sequence[int], size: int) -> list[Batch]:
        """The inputs at these places. Words go one by one: each sentence has its own length."""
        together = isinstance(self.inputs, Tensor) and self.inputs.is_floating_point()
        size = size if together else 1
        return [self._batch(places[first : first + size]) for first in range(0, len(places), size)]

    def _batch(self, places: Sequence[int]) -> Batch:
        inputs = self.inputs[list(places)] if isinstance(self.inputs, Tensor) else self.inputs[places[0]]
        return Batch(inputs, tuple(self.labels[i] for i in places), tuple(self.indices[i] for i in places))


Data = Dataset | Examples | Pathlike | Iterable[tuple[Example, int]]


def read_examples(data: Data, limit: int | None = None, *, split: str | None = None) -> Examples:
    """The inputs that a caller names or gives, or the first `limit` of them."""
    if isinstance(data, str | os.PathLike):
        data = load(data, split)
    if isinstance(data, Dataset):
        labels, indices = tuple(data.labels.tolist()), tuple(data.indices.tolist())
        data = Examples(data.name, data.split, data.inputs, labels, indices, data.checksum)
    found = data if isinstance(data, Examples) else _from_pairs(data)
    found = replace(found, inputs=found.inputs[:limit], labels=found.labels[:limit], indices=found.indices[:limit])
    if not found.labels:
        raise InputError(f"the data {found.name!r} have no input; expected at least one")
    if len(set(found.indices)) < len(found.indices):
        raise InputError(f"an index of {found.name!r} stands twice; expected another one for each input")
    return found


def tokenised(data: Dataset, tokenizer: Callable[..., Mapping[str, Tensor]]) -> Examples:
    """The sentences of a data set as a tokenizer of transformers encodes them."""
    if data.texts is None:
        raise InputError(f"the data {data.name!r} have no sentences, and the model takes text")
    pairs = [(tokenizer(text, return_tensors="pt"), int(y)) for text, y in zip(data.texts, data.labels, strict=True)]
    return replace(_from_pairs(pairs), name=data.name, split=data.split, indices=tuple(data.indices.tolist()))


def _from_pairs(data: Iterable[tuple[Example, int]]) -> Examples:
    try:
        pairs = [(example, int(label)) for example, label in data]
    except (TypeError, ValueError):
        raise InputError(
            "data is no pairs of an input and its label; expected those, a data set, or the name of one"
        ) from None
    tensors = [t for example, _ in pairs for t in (example.values() if isinstance(example, Mapping) else (example,))]
    labels = tuple(label for _, label in pairs)
    whole = checksum(*(t.detach().cpu() for t in tensors), torch.tensor(labels))
    keywords = [example for example, _ in pairs if isinstance(example, Mapping)]
    plain = [example for example, _ in pairs if isinstance(example, Tensor)]
    if len({tuple(t.shape) for t in plain}) > 1 or (plain and keywords):
        raise InputError(
            "the inputs are of several shapes or kinds; expected tensors of one shape, or keyword arguments"
        )
    inputs = torch.stack(plain) if plain else keywords
    return Examples("given inputs", "all", inputs, labels, tuple(range(len(pairs))), whole)


def ranges(indices: Sequence[int]) -> str:
    """Numbers as "0, 3-5".

    Example:
        >>> ranges([0, 3, 4, 5])
        '0, 3-5'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@final
@dataclass(frozen=True)
class Entered:
    """A network, and inputs as they enter it."""

    network: Network
    x: Float64[Tensor, "b n d"]

    def to(self, device: str) -> Entered:
        """The inputs on a device; the network computes where its input is."""
        return replace(self, x=self.x.to(device))


def enter(
    model: Network | nn.Module,
    inputs: Tensor | Mapping[str, Tensor],
    settings: Settings,
    readings: Readings | None = None,
) -> Entered:
    """The model as a network, checked against the model at these inputs; a network as it is.

    Args:
        model: whose inputs they are.
        inputs: a batch.
        settings: what moves.
        readings: what was read of the model before.
    """
    if isinstance(model, Network):
        if settings.perturb is not None or settings.normalise is not None:
            raise InputError(
                "perturb or normalise was given for a Network, whose input moves as it is; expected neither"
            )
        if not isinstance(inputs, Tensor) or inputs.ndim != 3:
            found = f"of shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else "keyword arguments"
            raise InputError(f"the inputs of {model.name} are {found}; expected tensors (n, d), one for each label")
        return Entered(model, inputs.double())
    converted = to_network(model, inputs, perturb=settings.perturb, normalise=settings.normalise, readings=readings)
    return Entered(converted.network, converted.encode(inputs))
