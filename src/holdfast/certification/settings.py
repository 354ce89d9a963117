"""What the records of a run depend on, and nothing else: it becomes the fingerprint by which runs are told apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.errors import InputError
from holdfast.network.compositions import compositions
from holdfast.network.convert import Perturbation
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
            "perturb": "input" if self.perturb is None else ":".join(map(str, _listed(self.perturb))),
            "normalise": json.dumps(self.normalise),
            "attack": str(self.attack or "none"),
        }
        return words if self.attack is None else words | {"seed": str(self.seed)}

    @classmethod
    def from_dict(cls, words: Mapping[str, str]) -> Settings:
        """The settings in words again, without the attack."""
        guarantee: Guarantee = "numerical" if words["guarantee"] == "numerical" else "proved"
        perturb = None if words["perturb"] == "input" else read_perturbation(words["perturb"])
        normalise = json.loads(words["normalise"])
        return cls(
            words["method"],
            guarantee,
            perturb=perturb,
            normalise=normalise and (tuple(normalise[0]), tuple(normalise[1])),
        )


def _listed(perturb: Perturbation) -> tuple[str | int, ...]:
    return (perturb,) if isinstance(perturb, str) else perturb


def read_perturbation(text: str) -> Perturbation:
    """What moves, from "pixels", "embeddings", "word:3" or "layer:1"."""
    if text == "pixels":
        return "pixels"
    if text == "embeddings":
        return "embeddings"
    part, _, number = text.partition(":")
    if part not in ("word", "layer") or not number.isdecimal():
        raise InputError(f"the perturbation is {text!r}; expected pixels, embeddings, word:NUMBER or layer:NUMBER")
    return ("word", int(number)) if part == "word" else ("layer", int(number))


def fingerprint(settings: Mapping[str, str]) -> str:
    """One word for all settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def weights_digest(network: Network) -> str:
    """SHA-256 of what a network is made of: the kinds of its pieces, in order, with all their numbers."""
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
    elif callable(value) and hasattr(value, "__qualname__"):
        _feed(digest, value.__qualname__)
    else:
        kind = type(value)
        digest.update(f"{kind.__qualname__} ".encode())
        # What is computed from the rest on first use adds nothing.
        computed = {name for base in kind.__mro__ for name, v in vars(base).items() if isinstance(v, cached_property)}
        _feed(digest, {name: each for name, each in vars(value).items() if name not in computed})
