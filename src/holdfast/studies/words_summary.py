"""Radii of words and of sentences, and their means: what `repro words` keeps and shows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from rich.table import Table

from holdfast.studies.attacked import check_attacked


@final
@dataclass(frozen=True)
class MovedText:
    """What may move, and how far.

    Attributes:
        text: the word, or the sentence.
        radius: proved: no movement of this l2 length or less changes the answer.
        attack: the length of a movement that was found to change it; None where none was.
        method: that proved the radius.
        seconds: that the proof took, on one core.
        others: words of the vocabulary that lie within the radius of this one; None for a sentence.
    """

    text: str
    radius: float
    attack: float | None
    method: str
    seconds: float
    others: int | None = None

    def __post_init__(self) -> None:
        check_attacked(self.method, self.radius, repr(self.text), self.attack)


@final
@dataclass(frozen=True)
class MeanRadius:
    """Over words or sentences.

    Attributes:
        count: of them.
        radius: proved.
        seconds: of a proof.
        attack: over those where it succeeded; None if it never did.
        attacked: how many these are.
    """

    count: int
    radius: float
    seconds: float
    attack: float | None
    attacked: int

    @classmethod
    def of(cls, cases: Sequence[MovedText]) -> MeanRadius:
        """The mean of these."""
        radius, seconds = (statistics.fmean(getattr(case, name) for case in cases) for name in ("radius", "seconds"))
        attacks = [case.attack for case in cases if case.attack is not None]
        return cls(len(cases), radius, seconds, statistics.fmean(attacks) if attacks else None, len(attacks))


@final
@dataclass(frozen=True)
class SentenceRadii:
    """One sentence: its model's seed, its place in the development set, and all of its words together."""

    seed: int
    index: int
    label: int
    together: MovedText


@final
@dataclass(frozen=True)
class WordRadii:
    """Some words of a sentence, each moved alone; none where the sentence has ended before."""

    seed: int
    index: int
    words: list[MovedText]


@final
@dataclass(frozen=True)
class WordModel:
    """A trained model.

    Attributes:
        name: of the config.
        seed: of the training.
        config: of the training.
        command: the command line.
        versions: of what computed it.
        training: seconds.
        clean: accuracy on the development set.
        content_off: the same with content scores replaced by their mean over it.
        total_variation: of the attention from its mean, by layer.
        score_norm: ‖W_QK‖ by layer.
        embedding_norm: mean length of a word's embedding, over the words of the development set.
        nearest_word: mean distance from such a word to the nearest other one of the vocabulary.
    """

    name: str
    seed: int
    config: dict[str, Any]
    command: str
    versions: dict[str, str]
    training: float
    clean: float
    content_off: float
    total_variation: list[float]
    score_norm: list[float]
    embedding_norm: float
    nearest_word: float


@final
@dataclass(frozen=True)
class WordResults:
    """A model with its sentences and their words."""

    model: WordModel
    sentences: list[SentenceRadii]
    words: list[MovedText]

    @property
    def one_word(self) -> MeanRadius:
        """The mean over every word of every sentence, moved alone."""
        return MeanRadius.of(self.words)

    @property
    def all_words(self) -> MeanRadius:
        """The mean over every sentence, all of its words moved together."""
        return MeanRadius.of([sentence.together for sentence in self.sentences])


_COLUMNS = ("model", "seed", "clean %", "content off %", "moves", "proved radius", "in lengths", "attack", "s each")


def table(results: Sequence[WordResults]) -> Table:
    """One line for every model and setting."""
    made = Table(title="SST-2: proved l2 radii of embeddings, means", title_justify="left")
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column in ("model", "moves") else "right")
    for row in _rows(results):
        made.add_row(*row)
    return made


def markdown(results: Sequence[WordResults]) -> str:
    """The same lines, and what is known about each model, for a page of the documentation."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *_rows(results)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    for one in results:
        model = one.model
        variation, norms = (
            ", ".join(f"{x:.3g}" for x in by_layer) for by_layer in (model.total_variation, model.score_norm)
        )
        text += (
            f"\n{model.name}, seed {model.seed}: {one.one_word.count} words of {one.all_words.count} sentences; mean "
            f"length of an embedding {model.embedding_norm:.3f}, distance to the nearest other word "
            f"{model.nearest_word:.3f}; total variation by layer {variation}; ‖W_QK‖ by layer {norms}; training "
            f"{model.training:.0f} s.\n"
        )
    return text


def _rows(results: Sequence[WordResults]) -> Iterator[tuple[str, ...]]:
    for one in results:
        for moves, mean in (("one word", one.one_word), ("all words", one.all_words)):
            attack = "-" if mean.attack is None else f"{mean.attack:.3f}"
            yield (
                one.model.name,
                str(one.model.seed),
                f"{100 * one.model.clean:.1f}",
                f"{100 * one.model.content_off:.1f}",
                moves,
                f"{mean.radius:.3f}",
                f"{mean.radius / one.model.embedding_norm:.3f}",
                attack,
                f"{mean.seconds:.1f}",
            )
