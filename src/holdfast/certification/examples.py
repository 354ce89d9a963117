"""The inputs of a run with their labels, wherever they come from, and how they enter the network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast.certification.settings import Settings
from holdfast.data import Dataset, load
from holdfast.data.dataset import checksum
from holdfast.errors import HoldfastError, InputError
from holdfast.graph import Readings, to_network
from holdfast.network.network import Network
from holdfast.storage import Pathlike

#: One input: a tensor without a batch dimension, or keyword arguments of a batch of one, as a tokenizer returns them.
Example = Tensor | Mapping[str, Tensor]

#: The name of inputs that a caller passed in Python: no other process can load them by it.
GIVEN = "given inputs"

_SMALLEST = 4  # pixels per side: fewer do not make an image


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
        inputs: one for each label; a tensor (b, …) if they fit into one batch.
        checksum: SHA-256 of the whole split.
        words: of each sentence, one for each token that is not padding, if the inputs are sentences.
    """

    name: str
    split: str
    inputs: Tensor | Sequence[Mapping[str, Tensor]]
    labels: tuple[int, ...]
    indices: tuple[int, ...]
    checksum: str
    words: Sequence[tuple[str, ...]] | None = None

    def shown(self) -> dict[int, Tensor | tuple[str, ...]]:
        """What a page can show, by index: the words of sentences, and images whose numbers lie between 0 and 1."""
        if self.words is not None:
            return dict(zip(self.indices, self.words, strict=True))
        if not isinstance(self.inputs, Tensor) or not self.inputs.is_floating_point() or not _are_pictures(self.inputs):
            return {}
        return dict(zip(self.indices, self.inputs, strict=True))

    def batches(self, places: Sequence[int], size: int) -> list[Batch]:
        """The inputs at these positions. Sentences go one by one: each has its own length."""
        together = isinstance(self.inputs, Tensor) and self.inputs.is_floating_point()
        size = size if together else 1
        return [self._batch(places[first : first + size]) for first in range(0, len(places), size)]

    def first(self, limit: int | None) -> Examples:
        """The first inputs, or all."""
        words = None if self.words is None else self.words[:limit]
        return replace(
            self, inputs=self.inputs[:limit], labels=self.labels[:limit], indices=self.indices[:limit], words=words
        )

    def check_labels(self, classes: int) -> None:
        """Refuses a label that the model has no answer for."""
        wrong = [place for place, label in enumerate(self.labels) if not 0 <= label < classes]
        if wrong:
            raise InputError(
                f"the label of input {self.indices[wrong[0]]} of {self.name!r} is {self.labels[wrong[0]]}; the model "
                f"answers with the classes 0 to {classes - 1}"
            )

    def check_finite(self) -> None:
        """Refuses an input with a number that is NaN or infinite."""
        for place, inputs in enumerate(self.inputs):
            for name, t in inputs.items() if isinstance(inputs, Mapping) else (("", inputs),):
                wrong = (~t.isfinite()).nonzero()
                if len(wrong):
                    at = tuple(wrong[0].tolist())
                    raise InputError(
                        f"input {self.indices[place]} of {self.name!r}{name and f' ({name})'}, of shape "
                        f"{tuple(t.shape)}, is {t[at].item()} at {at}; expected finite numbers, and {len(wrong)} of "
                        f"{t.numel()} are not"
                    )

    def _batch(self, places: Sequence[int]) -> Batch:
        inputs = self.inputs[list(places)] if isinstance(self.inputs, Tensor) else self.inputs[places[0]]
        return Batch(inputs, tuple(self.labels[i] for i in places), tuple(self.indices[i] for i in places))


Data = (
    Dataset
    | Examples
    | Pathlike
    | DataLoader[Any]
    | tuple[Tensor | np.ndarray, Tensor | np.ndarray]
    | Iterable[tuple[Example | np.ndarray, int]]
)


def read_examples(data: Data, limit: int | None = None, *, split: str | None = None) -> Examples:
    """The inputs that a caller names or passes, or the first `limit` of them."""
    if isinstance(data, str | os.PathLike):
        data = load(data, split)
    if isinstance(data, Dataset):
        labels, indices = tuple(data.labels.tolist()), tuple(data.indices.tolist())
        words = None if data.texts is None else [tuple(text.split()) for text in data.texts]
        data = Examples(data.name, data.split, data.inputs, labels, indices, data.checksum, words)
    examples = (data if isinstance(data, Examples) else _from_pairs(data)).first(limit)
    if not examples.labels:
        raise InputError(f"the data {examples.name!r} have no inputs; expected at least one")
    examples.check_finite()
    if len(set(examples.indices)) < len(examples.indices):
        raise InputError(f"an index of {examples.name!r} occurs twice; expected a different one for each input")
    return examples


def tokenised(data: Dataset, tokenizer: Any) -> Examples:
    """The sentences of a data set as a transformers tokenizer encodes them, with its names for their tokens."""
    if data.texts is None:
        raise InputError(f"the data {data.name!r} have no sentences, and the model takes text")
    encoded = [tokenizer(text, return_tensors="pt") for text in data.texts]
    words = [tuple(map(str, tokenizer.convert_ids_to_tokens(ids["input_ids"][0].tolist()))) for ids in encoded]
    examples = _from_pairs(zip(encoded, data.labels.tolist(), strict=True))
    return replace(examples, name=data.name, split=data.split, indices=tuple(data.indices.tolist()), words=words)


def _pairs(data: Any) -> Iterator[tuple[Any, Any]]:
    """Inputs with their labels, one by one: from whole arrays (X, y), from batches of a loader, or as they are."""
    if isinstance(data, DataLoader):
        for batch in data:
            yield from _pairs(tuple(batch) if isinstance(batch, list) else batch)
    elif isinstance(data, Mapping):  # a batch from a transformers loader
        words = {name: t for name, t in data.items() if name not in ("label", "labels")}
        for i, label in enumerate(data["labels" if "labels" in data else "label"]):
            yield {name: t[i : i + 1] for name, t in words.items()}, label
    elif isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in data):
        inputs, labels = data
        if labels.ndim != 1 or len(inputs) != len(labels):
            raise InputError(
                f"the inputs have shape {tuple(inputs.shape)} and the labels {tuple(labels.shape)}; expected one label "
                "for each input"
            )
        yield from zip(inputs, labels, strict=True)
    else:
        yield from data


def _from_pairs(data: Any) -> Examples:
    try:
        pairs = [
            (torch.from_numpy(example) if isinstance(example, np.ndarray) else example, _class(label))
            for example, label in _pairs(data)
        ]
    except HoldfastError:
        raise
    except (TypeError, ValueError, KeyError):
        raise InputError(
            "data does not consist of pairs (input, label); expected such pairs, (X, y), a DataLoader, a data set, "
            "or the name of one"
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
    return Examples(GIVEN, "all", inputs, labels, tuple(range(len(pairs))), whole)


def _class(label: Any) -> int:
    if not float(label).is_integer():
        raise InputError(f"a label is {label!r}; expected whole numbers, the classes from 0 on")
    return int(label)


def _are_pictures(inputs: Tensor) -> bool:
    """Whether inputs (b, h, w) or (b, c, h, w) of one or three channels hold numbers from 0 to 1."""
    sized = inputs.ndim in (3, 4) and min(inputs.shape[-2:]) >= _SMALLEST
    channels = inputs.ndim == 3 or inputs.shape[1] in (1, 3)
    return sized and channels and bool(((inputs >= 0) & (inputs <= 1)).all())


def check_channels(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> None:
    """Refuses images (b, height, width) for a model that takes them only with a channel axis."""
    if not isinstance(inputs, Tensor) or inputs.ndim != 3 or not inputs.is_floating_point():
        return
    if not _takes(model, inputs) and _takes(model, inputs.unsqueeze(1)):
        height, width = inputs.shape[1:]
        raise InputError(
            f"the inputs have shape ({height}, {width}), and the model takes images with a channel axis; pass them as "
            f"(1, {height}, {width}): x.unsqueeze(0) for each, or let the model's forward begin with that"
        )


def _takes(model: nn.Module, inputs: Tensor) -> bool:
    """Whether the model runs on such inputs."""
    known = next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype)
    try:
        with torch.no_grad():
            model(inputs.to(known))
    except Exception:  # anything that the model's own code raises
        return False
    return True


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


def enter(
    model: Network | nn.Module,
    inputs: Tensor | Mapping[str, Tensor],
    settings: Settings,
    readings: Readings | None = None,
    device: str = "cpu",
) -> Entered:
    """The model as a network, checked against the model at these inputs, which are put on the device.

    Args:
        model: whose inputs they are.
        inputs: a batch.
        settings: what moves.
        readings: what was read from the model before.
        device: where the inputs go, and where a model that was read before is compared; a network is taken as it is.
    """
    if isinstance(model, Network):
        if settings.perturb is not None or settings.normalise is not None:
            raise InputError(
                "perturb or normalise was given for a Network, whose input moves as it is; expected neither"
            )
        if not isinstance(inputs, Tensor) or inputs.ndim != 3:
            received = f"of shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else "keyword arguments"
            raise InputError(f"the inputs of {model.name} are {received}; expected tensors (n, d), one for each label")
        return Entered(model, inputs.double().to(device))
    converted = to_network(
        model, inputs, perturb=settings.perturb, normalise=settings.normalise, readings=readings, device=device
    )
    return Entered(converted.network, converted.encode(inputs).to(device))
