"""`repro minilm`: how far one word may move in a sentence classifier that was fine-tuned from all-MiniLM-L6-v2.

Six layers of width 384 as in BERT (GELU, LayerNorm after every sum), fine-tuned on SST-2. The embedding of one
word of a sentence moves, 384 numbers before positions are added and normalised; every composition that has a proof for
the network is asked how far.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from holdfast import data as datasets
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.errors import InputError, MemoryLimitError, NotApplicableError
from holdfast.graph import to_network
from holdfast.graph.perturbation import attends
from holdfast.linalg.rounding import Ball
from holdfast.network.network import Network, run
from holdfast.report.style import PALETTE, new_figure
from holdfast.results import Guarantee, mean_shares
from holdfast.studies.attacked import check_attacked
from holdfast.studies.losses import finite, lost_most
from holdfast.studies.minilm_training import RANDOM, FineTuned, FineTuning, fine_tuned, tokens
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.usage import processor_seconds

_ATTACK = MinimalAttack(restarts=3, targets=1, steps=40)
_DECADES = tuple(10.0**-k for k in range(3, 9))  # radii that are tried where no larger one is found


@final
@dataclass(frozen=True)
class SentenceModel:
    """The classifier.

    Attributes:
        setting: how it was fine-tuned.
        accuracy: on SST-2's development set.
        training: seconds of the fine-tuning.
        embedding_norm: the mean length of a word's embedding, over the vocabulary.
    """

    setting: FineTuning
    accuracy: float
    training: float
    embedding_norm: float


@final
@dataclass(frozen=True)
class WordProof:
    """What one composition proves of a word.

    Attributes:
        method: the composition.
        guarantee: "proved"; "numerical" for the same theorem without a proof of its numbers.
        radius: no movement of this l2 length or less changes the answer; None where it did not answer.
        seconds: wall time.
        processor_seconds: that it took of one core.
        note: why it did not answer, or what it left out.
        losses: what was taken off the margin at that radius, by name.
    """

    method: str
    guarantee: Guarantee
    radius: float | None
    seconds: float
    processor_seconds: float
    note: str = ""
    losses: dict[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class SentenceWord:
    """One word of a sentence.

    Attributes:
        place: of the sentence in the development set.
        sentence: itself.
        tokens: that the model sees, special ones included.
        word: that moves.
        position: of its token.
        length: of its embedding.
        margin: the answer's lead.
        attack: length of the smallest movement found that changes the answer; None where there is none.
        rounding: behind every attention, how far the rounding of all before it may have moved a number, of the largest
            one there, as ball arithmetic tells; None where it does not.
        proofs: by all compositions that were asked.
    """

    place: int
    sentence: str
    tokens: int
    word: str
    position: int
    length: float
    margin: float
    attack: float | None
    rounding: list[float | None]
    proofs: list[WordProof]

    def __post_init__(self) -> None:
        for proof in self.proofs:
            if proof.guarantee == "proved" and proof.radius is not None:
                check_attacked(proof.method, proof.radius, f"{self.word!r} of {self.sentence!r}", self.attack)


@final
@dataclass(frozen=True)
class MinilmParameters:
    """What `repro minilm` takes."""

    source: str = option("minilm", f"What is fine-tuned: minilm, or {RANDOM} for a small BERT of random weights.")
    layers: int = option(6, "Number of its layers that are kept.", least=1)
    steps: int = option(250, "Steps of the fine-tuning.", least=1)
    batch: int = option(16, "Sentences per step.", least=1)
    rate: float = option(1e-4, "The highest learning rate.")
    seed: int = option(0, "Seed of the fine-tuning.", least=0)
    sentences: int = option(3, "Number of sentences, the first short ones that are answered right.", grid=True, least=1)
    longest: int = option(8, "Most tokens of a sentence, special ones included.", least=4)
    methods: tuple[str, ...] = option(tuple(name for name in compositions if name != "best"), "Compositions.")
    seconds: float = option(600.0, "Time limit for a composition, after which it begins nothing new.", least=0.001)

    @property
    def setting(self) -> FineTuning:
        """The settings of the training."""
        return FineTuning(self.source, self.layers, self.steps, self.batch, self.rate, self.seed)


@final
@register_study
class MinilmStudy(Study[MinilmParameters]):
    """One word of a sentence in a fine-tuned MiniLM."""

    name = "minilm"
    title = "How far one word may move in MiniLM fine-tuned on SST-2: every composition, an attack, and what limits it"
    paper = "holdfast"
    minutes = 60
    memory = 10
    parameters = MinilmParameters
    kinds: ClassVar = {"model": SentenceModel, "word": SentenceWord}

    def quick(self) -> MinilmParameters:
        return MinilmParameters(RANDOM, 2, 1, 2, sentences=1, methods=("gains",))

    def stem(self, parameters: MinilmParameters) -> str:
        return parameters.setting.name

    def plan(self, parameters: MinilmParameters, place: Workplace) -> StudyPlan:
        for method in parameters.methods:
            compositions[method]  # an unknown name is refused here, before any training
        words = [StudyPart("word", f"sentence {i}", i) for i in range(parameters.sentences)]
        return StudyPlan([[StudyPart("model", "model")], words])

    def measure(
        self, parameters: MinilmParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> SentenceModel | SentenceWord:
        tuned = fine_tuned(parameters.setting, place, tell)
        if part.kind == "model":
            lengths = torch.linalg.vector_norm(_embeddings(tuned), dim=-1)
            return SentenceModel(tuned.setting, tuned.accuracy, tuned.seconds, lengths.mean().item())
        dev = datasets.load("sst2", "dev", place.data_dir)
        chosen = _chosen(tuned, dev, parameters.longest, parameters.sentences)[part.work]
        return examine(tuned, chosen, (dev.texts or ())[chosen], parameters, tell)

    def show(self, parameters: MinilmParameters, records: Records) -> StudyOutput:
        (model,), words = records.of("model"), records.of("word")
        summary = {"model": {"accuracy": model.accuracy, "embedding": model.embedding_norm}, "methods": medians(words)}
        return StudyOutput(summary, [radius_table(words)], {"": draw(words)}, _page(model, words))


def _embeddings(tuned: FineTuned) -> Tensor:
    weight: Tensor = tuned.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    return weight


def _chosen(tuned: FineTuned, dev: datasets.Dataset, longest: int, count: int) -> list[int]:
    """Places of the first sentences that are short enough and answered right."""
    places: list[int] = []
    for place, (sentence, label) in enumerate(zip(dev.texts or (), dev.labels.tolist(), strict=True)):
        inputs = tokens(tuned.tokenizer, [sentence])
        if inputs["input_ids"].shape[1] <= longest and int(tuned.model(**inputs).logits.argmax()) == label:
            places.append(place)
        if len(places) == count:
            return places
    raise InputError(f"{count} sentences of at most {longest} tokens are wanted, and {len(places)} are answered right")


def examine(tuned: FineTuned, place: int, sentence: str, parameters: MinilmParameters, tell: Tell) -> SentenceWord:
    """Proofs and an attack for the longest word of a sentence that is one token."""
    inputs = tokens(tuned.tokenizer, [sentence])
    ids = inputs["input_ids"][0]
    names: list[str] = tuned.tokenizer.convert_ids_to_tokens(ids)
    position = max(range(1, len(names) - 1), key=lambda i: 0 if names[i].startswith("##") else len(names[i]))
    converted = to_network(tuned.model, inputs, perturb=("word", position))
    x = converted.encode(inputs)
    logits = converted.network(x)
    nearest = _ATTACK(converted.network, x, logits.argmax(-1)).radius.item()
    proofs = []
    for i, method in enumerate(parameters.methods):
        proofs.append(prove(converted.network, x, method, "proved", parameters.seconds))
        if proofs[-1].radius == 0:
            proofs.append(prove(converted.network, x, method, "numerical", parameters.seconds))
        tell(0.1 + 0.9 * (i + 1) / len(parameters.methods))
    return SentenceWord(
        place=place,
        sentence=sentence,
        tokens=len(names),
        word=names[position],
        position=position,
        length=torch.linalg.vector_norm(_embeddings(tuned)[ids[position]]).item(),
        margin=(logits.max() - logits.min()).item(),
        attack=nearest if math.isfinite(nearest) else None,
        rounding=rounding_growth(converted.network, x),
        proofs=proofs,
    )


def rounding_growth(network: Network, x: Tensor) -> list[float | None]:
    """Behind every attention the largest radius of a ball, of the largest value."""
    ball, shares = Ball.exact(x.double()), list[float | None]()
    for stage in network.stages:
        ball = run(stage, ball)
        if attends(stage):
            share = (ball.rad.max() / ball.mid.abs().max()).item()
            shares.append(share if math.isfinite(share) else None)
    return shares


def prove(network: Network, x: Tensor, method: str, guarantee: Guarantee, seconds: float) -> WordProof:
    """What a composition proves, or why it proves nothing."""
    began, used = time.perf_counter(), processor_seconds()
    try:
        certified = certify_inputs(network, x, method=method, guarantee=guarantee, seconds=seconds)[0]
        if certified.radius == 0 and not certified.unfinished:  # a search that gives up soon may miss a small radius
            (certified,) = certify_inputs(network, x, method=method, guarantee=guarantee, at=_DECADES, seconds=seconds)
    except (NotApplicableError, MemoryLimitError) as refusal:
        return WordProof(method, guarantee, None, time.perf_counter() - began, processor_seconds() - used, str(refusal))
    return WordProof(
        method,
        guarantee,
        certified.radius,
        time.perf_counter() - began,
        processor_seconds() - used,
        "; ".join((*certified.notes, *certified.unfinished)),
        finite(certified.losses),
    )


def _title(method: str, guarantee: Guarantee) -> str:
    return method if guarantee == "proved" else f"{method}, {guarantee}"


def medians(words: Sequence[SentenceWord]) -> dict[str, dict[str, Any]]:
    """For every composition: the median radius over the words, its share of the attack's, seconds, and losses."""
    made: dict[str, dict[str, Any]] = {}
    for asked in dict.fromkeys((p.method, p.guarantee) for word in words for p in word.proofs):
        pairs = [(word, p) for word in words for p in word.proofs if (p.method, p.guarantee) == asked]
        proved = [(word, proof.radius) for word, proof in pairs if proof.radius is not None]
        ratios = [radius / word.attack for word, radius in proved if word.attack is not None]
        made[_title(*asked)] = {
            "words": len(proved),
            "radius": statistics.median(radius for _, radius in proved) if proved else None,
            "of the attack": statistics.median(ratios) if ratios else None,
            "processor_seconds": statistics.median(proof.processor_seconds for _, proof in pairs),
            "losses": mean_shares(proof.losses for _, proof in pairs),
            "note": next((proof.note for _, proof in pairs if proof.note), ""),
        }
    return made


_COLUMNS = ("composition", "words", "median radius", "of the attack", "core s", "lost most to")


def _rows(words: Sequence[SentenceWord]) -> list[list[str]]:
    return [
        [
            method,
            str(middle["words"]),
            "-" if middle["radius"] is None else f"{middle['radius']:.3g}",
            "-" if middle["of the attack"] is None else f"{middle['of the attack']:.2g}",
            f"{middle['processor_seconds']:.0f}",
            lost_most(middle["losses"]) if middle["losses"] else middle["note"] or "-",
        ]
        for method, middle in medians(words).items()
    ]


def radius_table(words: Sequence[SentenceWord]) -> Table:
    """One row for each composition."""
    table = Table(title=f"One word of {len(words)} sentences: proved l2 radii", title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("composition", "lost most to") else "right")
    for row in _rows(words):
        table.add_row(*row)
    return table


def _page(model: SentenceModel, words: Sequence[SentenceWord]) -> str:
    lines: list[Sequence[str]] = [_COLUMNS, ("---", *("---:",) * 4, "---"), *_rows(words)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    text += f"\nAccuracy {100 * model.accuracy:.1f} %; mean length of an embedding {model.embedding_norm:.2f}.\n\n"
    for word in words:
        attack = "none found" if word.attack is None else f"{word.attack:.3g}"
        growth = ", ".join("-" if share is None else f"{share:.0e}" for share in word.rounding)
        text += (
            f"- *{word.sentence}*: {word.word!r} of length {word.length:.2f}, {word.tokens} tokens; attack {attack}; "
            f"rounding behind each attention, relative: {growth}\n"
        )
    return text


def draw(words: Sequence[SentenceWord]) -> Figure:
    """Every word: what the compositions prove, below the attack."""
    figure = new_figure(5.5, 3.2)
    panel = figure.subplots()
    for colour, method in zip(PALETTE, medians(words), strict=False):
        points = [
            (i, proof.radius)
            for i, word in enumerate(words)
            for proof in word.proofs
            if _title(proof.method, proof.guarantee) == method and proof.radius
        ]
        if points:
            panel.plot(*zip(*points, strict=True), "o", color=colour, label=method)
    panel.plot(range(len(words)), [word.attack or math.nan for word in words], "k.", label="attack")
    panel.set(ylabel="l2 radius", yscale="log")
    panel.set_xticks(range(len(words)), [word.word for word in words])
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    return figure
