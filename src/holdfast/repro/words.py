"""How far the words of a sentence may move: one of them alone, and all of them together (Shi et al. 2020).

A model of SST-2 is trained; sentences of the development set that it gets right are certified in both settings, in
proved arithmetic, and attacked. What is finished is kept in files, so that a command that was interrupted goes on.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Float64, Int64
from rich.table import Table
from torch import Tensor

import holdfast
from holdfast.attacks.minimal import MinimalAttack
from holdfast.data import Dataset, load
from holdfast.data.sst2 import PADDING
from holdfast.errors import HoldfastError, InputError, SoundnessError
from holdfast.models import Transformer
from holdfast.models import load as load_model
from holdfast.network.centre import Centre
from holdfast.network.compositions import certify_inputs, compositions
from holdfast.network.embedding import Place
from holdfast.network.network import Network
from holdfast.repro.processes import Tell
from holdfast.storage import write_text
from holdfast.train.config import TrainingConfig, agrees
from holdfast.train.loop import train

_CHOICE = 0  # the seed that chooses sentences: the same order for every model
_ATTACK = MinimalAttack(restarts=3, targets=1, steps=40)


@final
@dataclass(frozen=True)
class Task:
    """One model, and where its files are.

    Attributes:
        config: of its training, seed included.
        sentences: how many are certified.
        word_method: the composition for one word that moves.
        sentence_method: the composition for all words that move.
        models: folder of trained models and finished sentences.
        data_dir: folder of the data.
        command: the command line.
    """

    config: TrainingConfig
    sentences: int
    word_method: str
    sentence_method: str
    models: Path
    data_dir: Path | None
    command: str

    def __post_init__(self) -> None:
        if self.config.model.input != "words":
            raise InputError(f"{self.config.name!r} is a model of images; expected one of words, such as sst2-content")

    @property
    def stem(self) -> str:
        """Of its files."""
        return f"words-{Path(self.config.name).stem}-seed-{self.config.train.seed}"

    @property
    def folder(self) -> Path:
        return self.models / self.stem

    @property
    def trained(self) -> bool:
        """Whether its model is there."""
        if not (self.folder / "model.safetensors").exists():
            return False
        stored = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))["config"]
        if not agrees(stored, self.config.to_dict()):
            raise InputError(f"{self.folder} holds a model of another config; move it away, or give another --models")
        return True

    def part(self, number: int) -> Path:
        """The file of a finished sentence, the first of those that were chosen having number 0."""
        return self.folder / f"{self.word_method}-{self.sentence_method}-{number}.json"


@final
@dataclass(frozen=True)
class Moved:
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
        if self.attack is not None and self.radius > self.attack:
            raise SoundnessError(
                f"{self.method} proves {self.radius:.4g} for {self.text!r} and an attack succeeds at "
                f"{self.attack:.4g}; please report"
            )


@final
@dataclass(frozen=True)
class Mean:
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
    def of(cls, cases: Sequence[Moved]) -> Mean:
        """The mean of these."""
        radius, seconds = (statistics.fmean(getattr(case, name) for case in cases) for name in ("radius", "seconds"))
        attacks = [case.attack for case in cases if case.attack is not None]
        return cls(len(cases), radius, seconds, statistics.fmean(attacks) if attacks else None, len(attacks))


@final
@dataclass(frozen=True)
class Sentence:
    """One sentence: its place in the development set, all of its words together, and each alone."""

    index: int
    label: int
    together: Moved
    words: list[Moved]


@final
@dataclass(frozen=True)
class Measured:
    """A model, measured.

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
        sentences: those that were certified.
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
    sentences: list[Sentence]

    @property
    def one_word(self) -> Mean:
        """Of every word of every sentence, moved alone."""
        return Mean.of([word for sentence in self.sentences for word in sentence.words])

    @property
    def all_words(self) -> Mean:
        """Of every sentence, all of its words moved together."""
        return Mean.of([sentence.together for sentence in self.sentences])

    def to_dict(self) -> dict[str, Any]:
        """Everything and its summary, ready for JSON."""
        return asdict(self) | {"mean": {"one word": asdict(self.one_word), "all words": asdict(self.all_words)}}


def prepare(task: Task, tell: Tell) -> None:
    """Trains the model of a task, or lets an earlier training go on."""
    run = train(
        task.config,
        task.folder,
        data_dir=task.data_dir,
        device="cpu",
        command=task.command,
        progress=lambda now: tell(0.99 * now.step / now.steps),
    )
    if not run.finished:
        raise KeyboardInterrupt


def certify(work: tuple[Task, int], tell: Tell) -> None:
    """Certifies and attacks one sentence of a task, and writes what was found."""
    task, number = work
    model = load_model(task.folder / "model.safetensors")
    data = load(task.config.data.name, None, task.data_dir)
    place = _chosen(model, data, task.sentences)[number]
    data = data.select([place])
    network, x = model.to_network(task.stem), model.encode(data.inputs)
    kept = task.part(number).with_suffix(".words.json")
    texts = data.texts[0].split() if data.texts is not None else []
    words = _words(task, network, x, texts[: data.inputs.shape[1]], _distances(model, data.inputs[0]), kept, tell)
    nearest = _ATTACK(network, x, data.labels).radius.item()
    proved = certify_inputs(network, x, method=task.sentence_method)[0]
    together = Moved(" ".join(texts), proved.radius, _finite(nearest), proved.method, proved.seconds)
    found = Sentence(place, int(data.labels), together, words)
    write_text(task.part(number), json.dumps(asdict(found), allow_nan=False) + "\n")
    kept.unlink(missing_ok=True)


def _words(
    task: Task,
    network: Network,
    x: Float64[Tensor, "1 n d"],
    texts: Sequence[str],
    distances: Float[Tensor, "words vocabulary"],
    kept: Path,
    tell: Tell,
) -> list[Moved]:
    """Each word of a sentence, moved alone; proofs need the memory of one word at a time, and each is kept."""
    method, answer, still = compositions[task.word_method], network(x).argmax(-1), torch.zeros_like(x[:, :1])
    found = _kept(kept)
    first: Centre | None = None
    for i, text in enumerate(texts[len(found) :], len(found)):
        word = network.before(Place(x, [i]))
        began = time.perf_counter()
        centre = Centre(word, still, like=first)
        radii = method(centre)
        seconds, radius = time.perf_counter() - began, radii.radius.item()
        nearest = _ATTACK(word, still, answer).radius.item()
        others = int((distances[i] <= radius).sum())
        found.append(Moved(text, radius, _finite(nearest), radii.methods[0], seconds, others))
        write_text(kept, json.dumps([asdict(each) for each in found], allow_nan=False) + "\n")
        first = first or centre
        tell(0.9 * (i + 1) / len(texts))
    return found


def _kept(path: Path) -> list[Moved]:
    """The words of a sentence that were finished before an interruption."""
    return [Moved(**each) for each in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def collect(task: Task) -> Measured | None:
    """The result of a task, or None where a part of it is missing."""
    run = task.folder / "run.json"
    parts = [task.part(number) for number in range(task.sentences)]
    if not all(path.exists() for path in (run, *parts)):
        return None
    try:
        training = json.loads(run.read_text(encoding="utf-8"))
        sentences = [_sentence(json.loads(path.read_text(encoding="utf-8"))) for path in parts]
    except (ValueError, TypeError, KeyError) as error:
        raise HoldfastError(f"{task.folder} holds files of something else ({error}); give another --models") from None
    model = load_model(task.folder / "model.safetensors")
    data = load(task.config.data.name, None, task.data_dir)
    ids = torch.tensor(sorted(set(data.inputs.flatten().tolist()) - {PADDING}))
    lengths = torch.linalg.vector_norm(_embeddings(model)[ids], dim=-1)
    test = training["test"]
    return Measured(
        name=task.config.name,
        seed=task.config.train.seed,
        config=task.config.to_dict(),
        command=task.command,
        versions={
            "holdfast": holdfast.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        training=training["seconds"],
        clean=test["clean"],
        content_off=test["content_off"],
        total_variation=test["total_variation"],
        score_norm=test["score_norm"],
        embedding_norm=lengths.mean().item(),
        nearest_word=_distances(model, ids).amin(-1).mean().item(),
        sentences=sentences,
    )


_COLUMNS = ("model", "seed", "clean %", "content off %", "moves", "proved radius", "in lengths", "attack", "s each")


def table(results: Sequence[Measured]) -> Table:
    """One line for every model and setting."""
    made = Table(title="SST-2: proved l2 radii of embeddings, means", title_justify="left")
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column in ("model", "moves") else "right")
    for row in _rows(results):
        made.add_row(*row)
    return made


def markdown(results: Sequence[Measured]) -> str:
    """The same lines, and what is known of each model, for a page of the documentation."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *_rows(results)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    for one in results:
        variation, norms = (
            ", ".join(f"{x:.3g}" for x in by_layer) for by_layer in (one.total_variation, one.score_norm)
        )
        text += (
            f"\n{one.name}, seed {one.seed}: {one.one_word.count} words of {one.all_words.count} sentences; mean "
            f"length of an embedding {one.embedding_norm:.3f}, distance to the nearest other word "
            f"{one.nearest_word:.3f}; total variation by layer {variation}; ‖W_QK‖ by layer {norms}; training "
            f"{one.training:.0f} s.\n"
        )
    return text


def _rows(results: Sequence[Measured]) -> Iterator[tuple[str, ...]]:
    for one in results:
        for moves, mean in (("one word", one.one_word), ("all words", one.all_words)):
            attack = "-" if mean.attack is None else f"{mean.attack:.3f}"
            yield (
                one.name,
                str(one.seed),
                f"{100 * one.clean:.1f}",
                f"{100 * one.content_off:.1f}",
                moves,
                f"{mean.radius:.3f}",
                f"{mean.radius / one.embedding_norm:.3f}",
                attack,
                f"{mean.seconds:.1f}",
            )


def _chosen(model: Transformer, data: Dataset, count: int) -> list[int]:
    """Places of the first sentences, in an order drawn once for all, that are whole and that the model gets right."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(_CHOICE))
    lengths = torch.tensor([len(text.split()) for text in data.texts or ()])
    with torch.no_grad():
        right = model(data.inputs).argmax(1) == data.labels
    good = right & (lengths <= data.inputs.shape[1])
    places: list[int] = order[good[order]][:count].tolist()
    if len(places) < count:
        raise InputError(f"{count} sentences are wanted, and the model gets {len(places)} right; give --sentences")
    return places


def _embeddings(model: Transformer) -> Float[Tensor, "vocabulary d"]:
    assert model.words is not None  # `Task` has asked for a model of words
    return model.words.weight.detach()


def _distances(model: Transformer, ids: Int64[Tensor, " words"]) -> Float[Tensor, "words vocabulary"]:
    """Between these words and all others of the vocabulary; infinite to themselves."""
    all_words = _embeddings(model)
    found = torch.cdist(all_words[ids], all_words, compute_mode="donot_use_mm_for_euclid_dist")
    return found.scatter(1, ids.unsqueeze(1), torch.inf)


def _sentence(found: dict[str, Any]) -> Sentence:
    words = [Moved(**word) for word in found["words"]]
    return Sentence(found["index"], found["label"], Moved(**found["together"]), words)


def _finite(radius: float) -> float | None:
    return radius if math.isfinite(radius) else None
