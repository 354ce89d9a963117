"""Inputs as the page of a run shows them: images with the change that was found, sentences with what moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.analysis.inputs import data_uri
from holdfast.report.numbers import down, nearest, up
from holdfast.results import CertificationRun, RadiusRecord

MOST = 12  # inputs on a page: three thumbnails each, or a sentence
_WHOLE = ("input", "pixels", "embeddings")  # what moves, if a perturbation has the shape of the input
_GREY_LEVELS = 255


@dataclass(frozen=True)
class Thumbnail:
    """A small image on a page, with its title."""

    title: str
    source: str


@dataclass(frozen=True)
class Word:
    """A word, its share of the change's squared length, and a tint for it from 0 to 1."""

    text: str
    share: str
    tint: float
    top: bool


@dataclass(frozen=True)
class ShownInput:
    """One input and, if an attack found one, the nearest change of its answer: images, or words."""

    title: str
    caption: str
    pictures: tuple[Thumbnail, ...] = ()
    words: tuple[Word, ...] = ()


def changes(run: CertificationRun) -> list[ShownInput]:
    """Some correctly classified inputs, from the most easily changed to the one that resists longest."""
    known = [record for record in run.records if record.index in run.inputs and record.correct]
    ranked = sorted(known, key=lambda record: record.radius if record.attack_radius is None else record.attack_radius)
    return [_change(run, record) for record in _spread(ranked)]


def _spread(ranked: Sequence[RadiusRecord]) -> list[RadiusRecord]:
    """At most as many as fit on a page, evenly over the ranks, with the first and the last."""
    if len(ranked) <= MOST:
        return list(ranked)
    return [ranked[round(i * (len(ranked) - 1) / (MOST - 1))] for i in range(MOST)]


def _change(run: CertificationRun, record: RadiusRecord) -> ShownInput:
    shown, delta, perturb = run.inputs[record.index], record.perturbation, run.settings.get("perturb", "input")
    title, facts = f"Input {record.index}, class {record.label}", [_proved(record)]
    if delta is not None and record.attack_radius is not None:
        facts.append(f"this one of {up(record.attack_radius)} does")
    if not isinstance(shown, Tensor):
        words = _words(shown, delta, perturb)
        facts += [f"“{word.text}” moves most" for word in words if word.top]
        return ShownInput(title, "; ".join(facts) + ".", words=words)
    if delta is None or perturb not in _WHOLE or delta.numel() != shown.numel():
        return ShownInput(title, "; ".join(facts) + ".", (Thumbnail("input", _uri(shown)),))
    moved = delta.reshape(shown.shape)
    facts.append(f"it moves no pixel by more than {up(_GREY_LEVELS * float(moved.abs().max()), 2)} of 255 grey levels")
    return ShownInput(title, "; ".join(facts) + ".", _pictures(shown, moved))


def _proved(record: RadiusRecord) -> str:
    numerical = "" if record.guarantee == "proved" else " (by numerical norms)"
    return f"No change up to {down(record.radius)} alters the answer{numerical}"


def _pictures(image: Tensor, moved: Tensor) -> tuple[Thumbnail, ...]:
    """The input, what it becomes, and the difference, in which grey means no change."""
    times = 0.5 / max(float(moved.abs().max()), 1e-12)
    return (
        Thumbnail("input", _uri(image)),
        Thumbnail("changed", _uri(image + moved)),
        Thumbnail(f"difference × {nearest(times, 2)}", _uri(0.5 + times * moved)),
    )


def _uri(image: Tensor) -> str:
    levels = (image.float().clamp(0, 1) * _GREY_LEVELS).round().to(torch.uint8)
    planes = levels if levels.ndim == 3 else levels.unsqueeze(0)
    return data_uri(planes.expand(3, -1, -1).permute(1, 2, 0).contiguous())


def _words(words: Sequence[str], delta: Tensor | None, perturb: str) -> tuple[Word, ...]:
    """The words with their shares; all that follows the last of them is padding, and counts as one word."""
    rows = [] if delta is None else delta.double().square().sum(-1).flatten().tolist()
    named = perturb.partition(":")[2].split(",") if perturb.startswith("word") else range(len(rows))
    energy = [0.0] * (len(words) + 1)
    for place, part in zip(map(int, named), rows, strict=True):
        energy[min(place, len(words))] += part
    whole, most = max(sum(energy), 1e-300), max(energy)
    return tuple(
        Word(text, f"{100 * part / whole:.2g} %", (part / most) ** 0.5 if most else 0.0, part == most > 0)
        for text, part in zip([*words, "padding"], energy, strict=True)
        if text != "padding" or part > 0
    )
