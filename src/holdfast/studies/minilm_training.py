"""A sentence classifier made of all-MiniLM-L6-v2: its layers are fine-tuned on a part of SST-2, its embeddings stay."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast import data as datasets
from holdfast.errors import InputError
from holdfast.extras import require
from holdfast.models.loading import load_tokenizer
from holdfast.storage import make_folder, read_metadata, read_tensors, write_tensors
from holdfast.studies.penalties import PenaltyRecipe, charged
from holdfast.studies.processes import Tell
from holdfast.studies.study import Workplace
from holdfast.studies.texts import LanguageModel, load_source, random_model

RANDOM = "random"  # instead of MiniLM: a BERT of two narrow layers that was not trained before
_LONGEST = 64  # tokens of a sentence
_WARM_UP = 0.1  # of the steps


@final
@dataclass(frozen=True)
class FineTuning:
    """How a classifier is made.

    Attributes:
        source: "minilm", or "random" for a small BERT with random weights.
        layers: that are kept, the first ones.
        steps: of AdamW on cross entropy, with a linear rise and fall of the rate.
        batch: sentences in a step.
        rate: the highest learning rate.
        seed: of the head, the order of the sentences, and dropout.
        recipe: what is added to the cross entropy: nothing, JaSMin, or the norms of all matrices but embeddings.
        weight: of that penalty.
        k: of JaSMin.
        longest: tokens of a sentence in training at most.
    """

    source: str = "minilm"
    layers: int = 6
    steps: int = 250
    batch: int = 16
    rate: float = 1e-4
    seed: int = 0
    recipe: PenaltyRecipe = "plain"
    weight: float = 0.0
    k: int = 0
    longest: int = _LONGEST

    @property
    def name(self) -> str:
        """The name of its file."""
        training = f"steps{self.steps}-batch{self.batch}-rate{self.rate:g}-seed{self.seed}"
        training += "" if self.recipe == "plain" else f"-{self.recipe}-k{self.k}-weight{self.weight:g}"
        training += "" if self.longest == _LONGEST else f"-longest{self.longest}"
        return f"{self.source}-layers{self.layers}-sst2-{training}"


@final
@dataclass(frozen=True)
class FineTuned:
    """A classifier and what is known about it.

    Attributes:
        setting: how it was made.
        model: of two classes, in evaluation mode, float32.
        tokenizer: that goes with it.
        accuracy: on the development set.
        seconds: of the training.
    """

    setting: FineTuning
    model: nn.Module
    tokenizer: Any
    accuracy: float
    seconds: float


def fine_tuned(setting: FineTuning, place: Workplace, tell: Tell) -> FineTuned:
    """The classifier; one that an earlier run has trained is loaded."""
    file = place.runs / f"{setting.name}.safetensors"
    if file.exists():
        stored = json.loads(read_metadata(file)["fine-tuning"])
        if FineTuning(**stored["setting"]) != setting:
            raise InputError(f"{file} was made with other settings; move it away, or give another --runs")
        source = _source(setting.source)
        model = _classifier(source.model, setting)
        model.load_state_dict(read_tensors(file))
        return FineTuned(setting, _frozen(model), source.tokenizer, stored["accuracy"], stored["seconds"])
    tuned = fine_tune(setting, place.data_dir, tell)
    known = {"setting": asdict(setting), "accuracy": tuned.accuracy, "seconds": tuned.seconds}
    make_folder(file.parent)
    write_tensors(file, dict(tuned.model.state_dict()), {"fine-tuning": json.dumps(known)})
    return tuned


def fine_tune(setting: FineTuning, data_dir: Path | None, tell: Tell) -> FineTuned:
    """Trains the classifier; a fixed number of steps, and nothing is chosen by its accuracy."""
    source = _source(setting.source)
    model = _classifier(source.model, setting)
    began = time.perf_counter()
    _train(model, source.tokenizer, setting, data_dir, tell)
    seconds = time.perf_counter() - began
    right = _accuracy(_frozen(model), source.tokenizer, data_dir)
    return FineTuned(setting, model, source.tokenizer, right, seconds)


def _source(name: str) -> LanguageModel:
    if name == "minilm":
        return load_source(name)
    if name != RANDOM:
        raise InputError(f"source is {name!r}; expected minilm or {RANDOM}")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    return LanguageModel(random_model("BertConfig", **sizes), load_tokenizer("minilm"))


def _classifier(encoder: Any, setting: FineTuning) -> Any:
    """The first layers of the encoder with a new head of two classes behind its pooler."""
    config = copy.deepcopy(encoder.config)
    config.num_labels, config.num_hidden_layers = 2, min(setting.layers, config.num_hidden_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = require("transformers", "hf").BertForSequenceClassification(config)
    kept = model.bert.state_dict().keys()
    model.bert.load_state_dict({name: tensor for name, tensor in encoder.state_dict().items() if name in kept})
    return model


def _frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def _train(model: Any, tokenizer: Any, setting: FineTuning, data_dir: Path | None, tell: Tell) -> None:
    train = datasets.load("sst2", "train", data_dir)
    model.get_input_embeddings().requires_grad_(False)  # half of all weights, and most words hardly occur
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=setting.rate, weight_decay=0.01)
    rise = max(1, round(_WARM_UP * setting.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / rise, (setting.steps - i) / max(1, setting.steps - rise))
    )
    model.train()
    with torch.random.fork_rng(devices=[]), charged(model, setting.recipe, setting.weight, setting.k) as penalty:
        torch.manual_seed(setting.seed)
        order = torch.randperm(len(train))
        for step in range(setting.steps):
            places = [int(order[i % len(order)]) for i in range(step * setting.batch, (step + 1) * setting.batch)]
            sentences = [train.texts[i] for i in places] if train.texts is not None else []
            loss = model(**tokens(tokenizer, sentences, setting.longest), labels=train.labels[places]).loss
            loss = loss if penalty is None else loss + penalty()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            tell(0.95 * (step + 1) / setting.steps)


def tokens(tokenizer: Any, sentences: Sequence[str], longest: int = _LONGEST) -> dict[str, Tensor]:
    """What the model takes."""
    encoded = tokenizer(list(sentences), padding=True, truncation=True, max_length=longest, return_tensors="pt")
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


def _accuracy(model: nn.Module, tokenizer: Any, data_dir: Path | None) -> float:
    dev = datasets.load("sst2", "dev", data_dir)
    texts = dev.texts or ()
    places = sorted(range(len(dev)), key=lambda i: len(texts[i]))  # sentences of a length need little padding
    right = 0
    for i in range(0, len(dev), 64):
        some = places[i : i + 64]
        answers = model(**tokens(tokenizer, [texts[j] for j in some])).logits.argmax(1)
        right += int((answers == dev.labels[some]).sum())
    return right / len(dev)
