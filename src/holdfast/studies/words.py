"""How far the words of a sentence may move: one of them alone, and all of them together (Shi et al. 2020).

A model of SST-2 is trained; sentences of the development set that it gets right are certified in both settings, in
proved arithmetic, and attacked.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, final

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.data import Dataset, load
from holdfast.data.sst2 import PADDING
from holdfast.errors import InputError
from holdfast.layers.tokens.embedding import Place
from holdfast.models import Transformer
from holdfast.models.files import load_transformer
from holdfast.network.centre import Centre
from holdfast.network.network import Network
from holdfast.studies.beside_attack import draw_beside_attack
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.studies.trained import train_once, training_record
from holdfast.studies.words_summary import (
    MovedText,
    SentenceRadii,
    WordModel,
    WordRadii,
    WordResults,
    markdown,
    table,
)
from holdfast.train.config import TrainingConfig, read_training
from holdfast.version import __version__

_CHOICE = 0  # the seed that chooses sentences: the same order for every model
_ATTACK = MinimalAttack(restarts=3, targets=1, steps=40)
_TOGETHER = 4  # words of a sentence that are one part of the work: they share what does not depend on which one moves


def trained(config: TrainingConfig, place: Workplace, tell: Tell) -> Path:
    """The folder of a trained model."""
    folder = place.runs / f"words-{Path(config.name).stem}-seed-{config.train.seed}"
    return train_once(config, folder, place, tell, device="cpu")


def describe(config: TrainingConfig, folder: Path, place: Workplace) -> WordModel:
    """What is known about a trained model."""
    training = training_record(folder)
    model = load_transformer(folder / "model.safetensors")
    data = load(config.data.name, None, place.data_dir)
    ids = torch.tensor(sorted(set(data.inputs.flatten().tolist()) - {PADDING}))
    lengths = torch.linalg.vector_norm(_embeddings(model)[ids], dim=-1)
    test = training["test"]
    return WordModel(
        name=config.name,
        seed=config.train.seed,
        config=config.to_dict(),
        command=place.command,
        versions={
            "holdfast": __version__,
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
    )


@final
@dataclass(frozen=True)
class Sentence:
    """One of the sentences that a model gets right.

    Attributes:
        seed: of the model's training.
        index: its place in the development set.
        label: its class.
        network: the model, on embeddings.
        x: (1, n, d) the embeddings.
        texts: its words.
        distances: (n, vocabulary) from its words to all others.
    """

    seed: int
    index: int
    label: Int64[Tensor, " 1"]
    network: Network
    x: Float64[Tensor, "1 n d"]
    texts: list[str]
    distances: Float[Tensor, "n vocabulary"]

    @classmethod
    def of(cls, folder: Path, data: Dataset, count: int, seed: int, number: int) -> Sentence:
        """One of so many sentences."""
        model = load_transformer(folder / "model.safetensors")
        index = _chosen(model, data, count)[number]
        data = data.select([index])
        texts = data.texts[0].split() if data.texts is not None else []
        x, distances = model.encode(data.inputs), _distances(model, data.inputs[0])
        return cls(seed, index, data.labels, model.to_network(folder.name), x, texts, distances)

    def together(self, method: str) -> SentenceRadii:
        """All of its words move."""
        nearest = _ATTACK(self.network, self.x, self.label).radius.item()
        proved = certify_inputs(self.network, self.x, method=method)[0]
        moved = MovedText(" ".join(self.texts), proved.radius, _finite(nearest), proved.method, proved.seconds)
        return SentenceRadii(self.seed, self.index, int(self.label), moved)

    def alone(self, method: str, begin: int, tell: Tell) -> WordRadii:
        """Some of its words move, one by one: proofs need the memory of one word at a time."""
        composition, still = compositions[method], torch.zeros_like(self.x[:, :1])
        answer = self.network(self.x).argmax(-1)
        moved: list[MovedText] = []
        first: Centre | None = None
        for i, text in list(enumerate(self.texts))[begin : begin + _TOGETHER]:
            word = self.network.before(Place(self.x, [i]))
            began = time.perf_counter()
            centre = Centre(word, still, like=first)
            radii = composition(centre)
            seconds, radius = time.perf_counter() - began, radii.radius.item()
            nearest = _ATTACK(word, still, answer).radius.item()
            others = int((self.distances[i] <= radius).sum())
            moved.append(MovedText(text, radius, _finite(nearest), radii.methods[0], seconds, others))
            first = first or centre
            tell((i + 1 - begin) / _TOGETHER)
        return WordRadii(self.seed, self.index, moved)


def _chosen(model: Transformer, data: Dataset, count: int) -> list[int]:
    """Places of the first sentences, in an order drawn once and for all, that fit and that the model gets right."""
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
    assert model.words is not None  # the plan has asked for a model of words
    return model.words.weight.detach()


def _distances(model: Transformer, ids: Int64[Tensor, " words"]) -> Float[Tensor, "words vocabulary"]:
    """Between these words and all others of the vocabulary; infinite to themselves."""
    all_words = _embeddings(model)
    distances = torch.cdist(all_words[ids], all_words, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.scatter(1, ids.unsqueeze(1), torch.inf)


def _finite(radius: float) -> float | None:
    return radius if math.isfinite(radius) else None


@final
@dataclass(frozen=True)
class WordsParameters:
    """What `repro words` takes."""

    config: str = option("sst2-content", "A model of words: a TOML file, or a config by name.")
    seed: tuple[int, ...] = option((0,), "Seeds of the trainings.", grid=True)
    sentences: int = option(10, "Number of sentences certified for each model.", least=1)
    method: str = option("telescoped", "The composition for one word that moves.")
    together: str = option("gains", "The composition for all words that move.")


@final
@register_study
class WordsStudy(Study[WordsParameters]):
    """Words of SST-2."""

    name = "words"
    title = "How far one word, and all words, of SST-2 sentences may move: proved and attacked"
    paper = "holdfast"
    minutes = 240
    memory = 4
    parameters = WordsParameters
    kinds: ClassVar = {"model": WordModel, "sentence": SentenceRadii, "words": WordRadii}

    def quick(self) -> WordsParameters:
        return WordsParameters(str(Path(__file__).with_name("quick-words.toml")), (0,), 1, "gains")

    def stem(self, parameters: WordsParameters) -> str:
        return f"{self.name}-{Path(parameters.config).stem}"

    def plan(self, parameters: WordsParameters, place: Workplace) -> StudyPlan:
        for method in (parameters.method, parameters.together):
            compositions[method]  # an unknown name is refused here, before any training
        config = read_training(parameters.config)
        if config.model.input != "words":
            raise InputError(f"{config.name!r} is a model of images; expected one of words, such as sst2-content")
        sentences = {
            f"seed {seed}, sentence {i}": (seed, i) for seed in parameters.seed for i in range(parameters.sentences)
        }
        begins = range(0, config.model.tokens, _TOGETHER)
        return StudyPlan(
            [
                [StudyPart("model", f"seed {seed}", seed) for seed in parameters.seed],
                [StudyPart("sentence", key, (*work, 0)) for key, work in sentences.items()]
                + [
                    StudyPart("words", f"{key}, words from {begin}", (*work, begin))
                    for key, work in sentences.items()
                    for begin in begins
                ],
            ]
        )

    def measure(
        self, parameters: WordsParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> WordModel | SentenceRadii | WordRadii:
        config = read_training(parameters.config)
        if part.kind == "model":
            config = config.with_seed(part.work)
            return describe(config, trained(config, place, tell), place)
        seed, number, begin = part.work
        folder = trained(config.with_seed(seed), place, lambda share: None)
        data = load(config.data.name, None, place.data_dir)
        sentence = Sentence.of(folder, data, parameters.sentences, seed, number)
        if part.kind == "sentence":
            return sentence.together(parameters.together)
        return sentence.alone(parameters.method, begin, tell)

    def show(self, parameters: WordsParameters, records: Records) -> StudyOutput:
        sentences, words = records.of("sentence"), records.of("words")
        results = [
            WordResults(model, own, moved)
            for model in records.of("model")
            if (own := [sentence for sentence in sentences if sentence.seed == model.seed])
            and (moved := [word for some in words if some.seed == model.seed for word in some.words])
        ]
        means = {
            f"seed {one.model.seed}": {"one word": asdict(one.one_word), "all words": asdict(one.all_words)}
            for one in results
        }
        radii = {
            "one word": [(word.radius, word.attack) for some in words for word in some.words],
            "all words": [(one.together.radius, one.together.attack) for one in sentences],
        }
        return StudyOutput({"mean": means}, [table(results)], {"": draw_beside_attack(radii)}, markdown(results))
