"""What the records of a run depend on, and nothing else: it becomes the fingerprint by which runs are told apart."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.errors import InputError
from holdfast.graph.perturbation import Perturbation, read_perturbation, spelled
from holdfast.network.compositions import compositions
from holdfast.network.network import Network
from holdfast.results import Guarantee

#: Mean and standard deviation of each channel.
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


@final
@dataclass(frozen=True)
class Settings:
    """How every input is treated, whatever the batch, the worker and the shard that it falls into."""

    method: str = "best"
    guarantee: Guarantee = "proved"
    attack: MinimalAttack | None = None
    seed: int = 0
    perturb: Perturbation | None = None
    normalise: Normalisation | None = None

    def __post_init__(self) -> None:
        compositions[self.method]  # refused before anything is written
        if self.guarantee not in ("proved", "numerical"):
            raise InputError(f'guarantee is {self.guarantee!r}; expected "proved" or "numerical"')

    def to_dict(self) -> dict[str, str]:
        """In words; the seed counts where something is random."""
        words = {
            "method": self.method,
            "guarantee": self.guarantee,
            "perturb": "input" if self.perturb is None else spelled(self.perturb),
            "normalise": json.dumps(self.normalise),
            "attack": str(self.attack or "none"),
        }
        return words if self.attack is None else words | {"seed": str(self.seed)}

    @classmethod
    def from_dict(cls, words: Mapping[str, str], perturb: Perturbation | None = None) -> Settings:
        """The settings in words again; what moves may be given, since words do not hold a tensor."""
        guarantee: Guarantee = "numerical" if words["guarantee"] == "numerical" else "proved"
        found = cls(
            words["method"],
            guarantee,
            _read_attack(words["attack"]),
            int(seed) if re.fullmatch(r"-?\d+", seed := words.get("seed", "0")) else 0,
            perturb or (None if words["perturb"] == "input" else read_perturbation(words["perturb"])),
            _read_normalisation(words["normalise"]),
        )
        for name, word in found.to_dict().items():
            if words.get(name) != word:
                raise InputError(f"the setting {name} is {words.get(name)!r}; expected words such as {word!r}")
        return found


def _read_attack(text: str) -> MinimalAttack | None:
    counts = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", text)}
    try:
        return None if text == "none" else MinimalAttack(**counts)
    except TypeError:
        raise InputError(f"the setting attack is {text!r}; expected none, or {MinimalAttack()}") from None


def _read_normalisation(text: str) -> Normalisation | None:
    try:
        found = json.loads(text)
        return found and (tuple(found[0]), tuple(found[1]))
    except (ValueError, TypeError, LookupError):
        raise InputError(f"the setting normalise is {text!r}; expected null, or two lists of numbers") from None


def names_of_settings(attacked: bool) -> set[str]:
    """What is said of a run: how inputs are treated, of which weights and data, and by which Holdfast."""
    return {*Settings(attack=MinimalAttack() if attacked else None).to_dict(), "weights", "data", "holdfast"}


def checksum_of_inputs(indices: Sequence[int]) -> str:
    """SHA-256 of the indices of inputs, in order."""
    return hashlib.sha256(repr(tuple(indices)).encode()).hexdigest()


def fingerprint(settings: Mapping[str, str]) -> str:
    """One word for all settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def weights_digest(network: Network) -> str:
    """SHA-256 of what a network is made of: the kinds of its pieces, in order, with all their numbers.

    A kind is the name of a class, wherever that stands. One that is renamed keeps the digests of stored runs by saying
    what it was called: `kind = "Affine"` in its body.
    """
    digest = hashlib.sha256()
    _feed(digest, network.stages)
    _feed(digest, network.head)
    return digest.hexdigest()


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        _feed(digest, (str(value.dtype), *value.shape))
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, Mapping):
        _feed(digest, tuple(sorted(value.items())))
    elif isinstance(value, Sequence):
        digest.update(f"{len(value)}:".encode())
        for each in value:
            _feed(digest, each)
    elif callable(value) and hasattr(value, "__name__"):
        _feed(digest, value.__name__)
    else:
        kind = type(value)
        digest.update(f"{vars(kind).get('kind', kind.__name__)} ".encode())
        # What is computed from the rest on first use adds nothing.
        computed = {name for base in kind.__mro__ for name, v in vars(base).items() if isinstance(v, cached_property)}
        _feed(digest, {name: each for name, each in vars(value).items() if name not in computed})
