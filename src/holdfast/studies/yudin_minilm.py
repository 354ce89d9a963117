"""`repro yudin-minilm`: JaSMin and a spectral penalty beside plain fine-tuning of MiniLM on SST-2, over seeds.

What moves are the embeddings of all words of a sentence, before positions are added and normalised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, final, get_args

from torch import Tensor

from holdfast import data as datasets
from holdfast.attacks.minimal import MinimalAttack
from holdfast.errors import InputError
from holdfast.studies.ascent import ascended
from holdfast.studies.minilm_training import RANDOM, FineTuned, FineTuning, fine_tune, tokens
from holdfast.studies.penalties import (
    PenaltyRecipe,
    draw_seeds,
    over_seeds,
    seeds_page,
    seeds_tables,
    training_title,
    variants,
)
from holdfast.studies.processes import Tell
from holdfast.studies.robustness import (
    ATTENTION_COLUMNS,
    AttentionNorms,
    attention_norms,
    median_radius,
    middle,
    network_constants,
)
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

RADII = (0.1, 0.2)  # l2 over all words of a sentence; one embedding has a length of about 1
_PGD_STEPS = 10
_NEAREST = MinimalAttack(restarts=1, targets=1, steps=20)


@final
@dataclass(frozen=True)
class SentencePenalty:
    """A fine-tuned model, measured.

    Attributes:
        setting: how it was fine-tuned.
        accuracy: on the development set.
        clean: share of the attacked sentences that are answered right.
        attacked: share of them that stay right under PGD, for every radius of RADII.
        sentences: how many were attacked.
        nearest: of the first ones that are answered right, the smallest movement found that changes the answer.
        not_found: for how many of those there is none.
        jacobian: the norms of the model's Jacobian in the words' embeddings, at those.
        lipschitz: of each layer's attention, the largest local constant at the probed sentences (estimates).
        g_1: of each layer, the largest over heads and rows, mean over the probed sentences.
        norm_p: of each layer, the largest ‖P‖ of a head, mean over the probed sentences.
        seconds: of the training.
    """

    setting: FineTuning
    accuracy: float
    clean: float
    attacked: list[float]
    sentences: int
    nearest: list[float]
    not_found: int
    jacobian: list[float]
    lipschitz: list[float]
    g_1: list[float]
    norm_p: list[float]
    seconds: float


@final
@dataclass(frozen=True)
class YudinMinilmParameters:
    """What `repro yudin-minilm` takes."""

    ks: tuple[int, ...] = option((0, 2, 10), "Values of k.", grid=True)
    weights: tuple[float, ...] = option((0.01,), "Weights of JaSMin.", grid=True)
    spectral: tuple[float, ...] = option((1e-3,), "Weights of the spectral penalty.", grid=True)
    seeds: int = option(3, "Number of trainings for each.", grid=True, least=1)
    source: str = option("minilm", f"What is fine-tuned: minilm, or {RANDOM} for a small BERT of random weights.")
    layers: int = option(6, "Number of its layers that are kept.", least=1)
    steps: int = option(80, "Steps of each training.", least=1)
    batch: int = option(16, "Sentences per step.", least=1)
    rate: float = option(2e-4, "The highest learning rate.")
    longest: int = option(24, "Most tokens of a sentence in training.", least=4)
    sentences: int = option(
        48, "Number of sentences that PGD attacks: the first short ones of the development set.", least=1
    )
    shortest: int = option(16, "Most tokens of those, special ones included.", least=4)
    nearest: int = option(10, "For how many of them to search for the smallest change of the answer.", least=1)
    probed: int = option(4, "On how many of them to measure the attention.", least=1)


def settings(parameters: YudinMinilmParameters) -> list[FineTuning]:
    """Every training, seed by seed, so that an interrupted run can be compared."""
    own: dict[str, Any] = {
        key: getattr(parameters, key) for key in ("source", "layers", "steps", "batch", "rate", "longest")
    }
    return [
        FineTuning(seed=seed, recipe=recipe, weight=weight, k=k, **own)
        for seed in range(parameters.seeds)
        for recipe, weight, k in variants(parameters.ks, parameters.weights, parameters.spectral)
    ]


def title(setting: FineTuning) -> str:
    """What is compared."""
    return training_title(setting.recipe, setting.weight, setting.k)


@final
@register_study
class YudinMinilmStudy(Study[YudinMinilmParameters]):
    """Penalties in fine-tuning."""

    name = "yudin-minilm"
    title = "JaSMin and a spectral penalty in MiniLM fine-tuned on SST-2: accuracy, local constants, attacks"
    paper = "yudin2025"
    minutes = 30
    memory = 2
    parameters = YudinMinilmParameters
    kinds: ClassVar = {"training": SentencePenalty}

    def quick(self) -> YudinMinilmParameters:
        return YudinMinilmParameters(
            (2,), (0.1,), (1e-3,), 1, RANDOM, 2, 1, 2, sentences=4, nearest=1, probed=1, shortest=8
        )

    def plan(self, parameters: YudinMinilmParameters, place: Workplace) -> StudyPlan:
        asked = settings(parameters)
        return StudyPlan([[StudyPart("training", f"{title(one)}, seed {one.seed}", one) for one in asked]])

    def measure(
        self, parameters: YudinMinilmParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> SentencePenalty:
        dev = datasets.load("sst2", "dev", place.data_dir)
        tuned = fine_tune(part.work, place.data_dir, lambda share: tell(0.7 * share))
        return examine(tuned, dev, parameters)

    def show(self, parameters: YudinMinilmParameters, records: Records) -> StudyOutput:
        rows = summary(records.of("training"))
        tables = seeds_tables("MiniLM on SST-2: mean ± standard deviation over seeds", _COLUMNS, rows)
        content = {"radii": RADII, "columns": list(_COLUMNS), "trainings": rows}
        return StudyOutput(content, tables, {"": draw_seeds(_PANELS, rows)}, seeds_page(_COLUMNS, rows))


def examine(tuned: FineTuned, dev: datasets.Dataset, parameters: YudinMinilmParameters) -> SentencePenalty:
    """Attacks a model, and measures its attention."""
    chosen = _short(tuned.tokenizer, dev, parameters.shortest, parameters.sentences)
    texts, labels = [(dev.texts or ())[i] for i in chosen], dev.labels[chosen]
    inputs = tokens(tuned.tokenizer, texts)
    logits, x = classifier(tuned.model, inputs)
    right = logits(x).argmax(1) == labels
    attacked = [_share(logits(ascended(logits, x, labels, radius, _PGD_STEPS)), labels) for radius in RADII]
    kept = right.nonzero().squeeze(1)[: parameters.nearest]
    radii, constants = _nearest(tuned, {key: value[kept] for key, value in inputs.items()}, labels[kept])
    probed = (tokens(tuned.tokenizer, [text]) for text in texts[: parameters.probed])
    return SentencePenalty(
        setting=tuned.setting,
        accuracy=tuned.accuracy,
        clean=right.double().mean().item(),
        attacked=attacked,
        sentences=len(texts),
        nearest=[radius for radius in radii if math.isfinite(radius)],
        not_found=sum(not math.isfinite(radius) for radius in radii),
        jacobian=constants,
        **asdict(attention_norms(tuned.model, probed)),
        seconds=tuned.seconds,
    )


def _short(tokenizer: Any, dev: datasets.Dataset, longest: int, count: int) -> list[int]:
    """Places of the first sentences that are short enough: the same ones for every model."""
    lengths = [len(ids) for ids in tokenizer(list(dev.texts or ()))["input_ids"]]
    places = [i for i, length in enumerate(lengths) if length <= longest][:count]
    if len(places) < count:
        raise InputError(f"{count} sentences of at most {longest} tokens are wanted, and there are {len(places)}")
    return places


def classifier(model: Any, inputs: dict[str, Tensor]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The logits as a function of the words' embeddings, any number of them for one sentence; and those embeddings."""
    mask = inputs["attention_mask"]

    def logits(x: Tensor) -> Tensor:
        out: Tensor = model(inputs_embeds=x, attention_mask=mask.expand(len(x), -1)).logits
        return out

    return logits, model.get_input_embeddings()(inputs["input_ids"])


def _nearest(tuned: FineTuned, inputs: dict[str, Tensor], labels: Tensor) -> tuple[list[float], list[float]]:
    """For every sentence, in float64: the smallest movement found that changes the answer, and the Jacobian's norm."""
    model = tuned.model.double()
    radii, constants = [], []
    for i in range(len(labels)):
        length = int(inputs["attention_mask"][i].sum())
        logits, x = classifier(model, {key: value[i : i + 1, :length] for key, value in inputs.items()})
        radii.append(_NEAREST(logits, x, labels[i : i + 1]).radius.item())
        constants += network_constants(logits, x)
    model.float()
    return radii, constants


def _share(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def summary(models: Sequence[SentencePenalty]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of every column; plain training first."""
    recipes = get_args(PenaltyRecipe)
    groups: dict[str, list[list[float]]] = {}
    for one in sorted(models, key=lambda one: (recipes.index(one.setting.recipe), one.setting.k, one.setting.weight)):
        shares = [100 * share for share in (one.accuracy, one.clean, *one.attacked)]
        attention = AttentionNorms(one.lipschitz, one.g_1, one.norm_p).columns
        radius = median_radius(one.nearest, one.not_found)
        groups.setdefault(title(one.setting), []).append([*shares, radius, middle(one.jacobian), *attention])
    return over_seeds(groups)


_COLUMNS = {
    "accuracy %": ".1f",
    "short sentences %": ".1f",
    **{f"PGD, l2 {radius:g} %": ".1f" for radius in RADII},
    "attack radius": ".3f",
    "constant of the network": ".1f",
    **ATTENTION_COLUMNS,
}
_PANELS = {
    0: ("accuracy", "%"),
    3: (f"PGD, l2 {RADII[1]:g}", "%"),
    4: ("attack radius", "l2"),
    5: ("network", "‖DF(x)‖"),
}
