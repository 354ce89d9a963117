"""What the records of a run depend on, and nothing else: the fingerprint by which runs are told apart is made of it."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import compositions
from holdfast.errors import InputError
from holdfast.graph.perturbation import Perturbation, read_perturbation, spelled
from holdfast.linalg.threat import L2, Threat
from holdfast.results import Guarantee

#: Mean and standard deviation of each channel.
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


@final
@dataclass(frozen=True)
class Settings:
    """How every input is treated, whichever batch, worker and shard it falls into."""

    method: str = "best"
    guarantee: Guarantee = "proved"
    attack: MinimalAttack | None = None
    seed: int = 0
    perturb: Perturbation | None = None
    normalise: Normalisation | None = None
    threat: Threat = L2
    at: tuple[float, ...] = ()
    seconds: float | None = None

    def __post_init__(self) -> None:
        compositions[self.method]  # refused before anything is written
        self._check_threat()
        if not all(0 < radius < math.inf for radius in self.at):
            raise InputError(f"at is {', '.join(map(str, self.at))}; expected positive radii")
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"seconds_per_input is {self.seconds:g}; expected a positive number")
        if self.guarantee not in ("proved", "numerical"):
            raise InputError(f'guarantee is {self.guarantee!r}; expected "proved" or "numerical"')

    def _check_threat(self) -> None:
        """Refuses what makes no sense for changes of a part of the input."""
        moved = "" if self.perturb is None else self.perturb if isinstance(self.perturb, str) else self.perturb[0]
        if self.threat.boxed and moved in ("directions", "brightness", "contrast", "colour"):
            raise InputError(f"the norm is linf and {moved} moves, which has an l2 length; expected norm='l2'")
        if self.threat.clip is not None and moved in ("word", "words", "patch", "patches", "mask"):
            raise InputError(
                f"clip is {self.threat.clip} and perturb is {spelled(self.perturb) if self.perturb else None}, whose "
                "numbers are changes of a part of the input; expected no clip, or the whole input"
            )

    def to_dict(self) -> dict[str, str]:
        """In words; the seed is included if something is random, and unused options are left out."""
        words = {
            "method": self.method,
            "guarantee": self.guarantee,
            "perturb": "input" if self.perturb is None else spelled(self.perturb),
            "normalise": json.dumps(self.normalise),
            "attack": str(self.attack or "none"),
            **self.threat.to_dict(),
        }
        if self.at:
            words["at"] = ",".join(map(repr, self.at))
        if self.seconds is not None:
            words["seconds"] = repr(self.seconds)
        return words if self.attack is None else words | {"seed": str(self.seed)}

    @classmethod
    def from_dict(cls, words: Mapping[str, str], perturb: Perturbation | None = None) -> Settings:
        """The settings from their words; what moves may be given, since words cannot hold a tensor."""
        guarantee: Guarantee = "numerical" if words["guarantee"] == "numerical" else "proved"
        settings = cls(
            words["method"],
            guarantee,
            _read_attack(words["attack"]),
            int(seed) if re.fullmatch(r"-?\d+", seed := words.get("seed", "0")) else 0,
            perturb or (None if words["perturb"] == "input" else read_perturbation(words["perturb"])),
            _read_normalisation(words["normalise"]),
            Threat("linf" if "norm" in words else "l2", _read_clip(words.get("clip"))),
            _read_floats("at", words["at"]) if "at" in words else (),
            _read_floats("seconds", words["seconds"])[0] if "seconds" in words else None,
        )
        for name, word in settings.to_dict().items():
            if words.get(name) != word:
                raise InputError(f"the setting {name} is {words.get(name)!r}; expected words such as {word!r}")
        return settings


def _read_attack(text: str) -> MinimalAttack | None:
    counts = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", text)}
    try:
        return None if text == "none" else MinimalAttack(**counts)
    except TypeError:
        raise InputError(f"the setting attack is {text!r}; expected none, or {MinimalAttack()}") from None


def _read_clip(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    ends = _read_floats("clip", text)
    if len(ends) != 2:
        raise InputError(f"the setting clip is {text!r}; expected two numbers")
    return ends[0], ends[1]


def _read_floats(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise InputError(f"the setting {name} is {text!r}; expected numbers") from None


def _read_normalisation(text: str) -> Normalisation | None:
    try:
        numbers = json.loads(text)
        return numbers and (tuple(numbers[0]), tuple(numbers[1]))
    except (ValueError, TypeError, LookupError):
        raise InputError(f"the setting normalise is {text!r}; expected null, or two lists of numbers") from None


def are_settings(words: Mapping[str, str]) -> bool:
    """Whether a run has all these words: how inputs are treated, the weights, the data, and the version of Holdfast."""
    attack = None if words.get("attack") == "none" else MinimalAttack()
    expected = {*Settings(attack=attack).to_dict(), "weights", "data", "holdfast"}
    return words.keys() - {"norm", "clip", "at", "seconds"} == expected


def checksum_of_inputs(indices: Sequence[int]) -> str:
    """SHA-256 of the indices of inputs, in order."""
    return hashlib.sha256(repr(tuple(indices)).encode()).hexdigest()


def fingerprint(settings: Mapping[str, str]) -> str:
    """One word for all settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
