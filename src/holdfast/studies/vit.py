"""How much of the distance to the nearest change of answer is proved, on standard ViTs trained on digits.

17 tokens of width 64, 4 heads, MLPs with 128 GELU units, pre-LayerNorm, class token, biases; perturbations are l2 on
pixels in [0, 1], and fill the whole ball.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from rich.table import Table
from torch import Tensor

from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.errors import InputError
from holdfast.graph import to_network
from holdfast.models.digits import DigitsViT
from holdfast.network.network import Network
from holdfast.storage import make_folder, read_metadata, read_tensors, write_tensors
from holdfast.studies.attacked import check_attacked
from holdfast.studies.beside_attack import draw_beside_attack
from holdfast.studies.jasmin import load_digits
from holdfast.studies.processes import Tell
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.studies.vit_training import EPOCHS, HEADS, UNITS, WIDTH, DigitsTraining, Initialisation, Recipe, train
from holdfast.usage import peak_memory, processor_seconds

_RESTARTS, _TARGETS = 3, 9  # of both attacks: 27 starts
_STEPS = 60
_HALVINGS = 7  # of the radius below the first attack's


@final
@dataclass(frozen=True)
class TrainedVit:
    """A trained model, and the first test digits that it gets right.

    Attributes:
        network: the model in float64.
        x: (b, 1, 64) pixels.
        labels: (b) the digits, which are also the answers.
        places: (b) where they stand in the test split.
        accuracy: on the whole test split.
        training: seconds that the training took, also where it was an earlier one.
    """

    setting: DigitsTraining
    network: Network
    x: Tensor
    labels: Tensor
    places: list[int]
    accuracy: float
    training: float


@final
@dataclass(frozen=True)
class VitModel:
    """A model: its accuracy on the test split, and the seconds that its training took."""

    setting: DigitsTraining
    accuracy: float
    training: float


@final
@dataclass(frozen=True)
class VitDigit:
    """One digit.

    Attributes:
        setting: of its model.
        place: in the test split.
        radii: proved, by method.
        seconds: by method.
        memory: MiB, the largest resident size of the process until then.
        attack: length of the smallest perturbation found that changes the answer; None where there is none.
        processor_seconds: by method, of one core.
    """

    setting: DigitsTraining
    place: int
    radii: dict[str, float]
    seconds: dict[str, float]
    memory: float
    attack: float | None
    processor_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for method, radius in self.radii.items():
            check_attacked(method, radius, f"digit {self.place} of {self.setting.name}", self.attack)


def medians(digits: Sequence[VitDigit]) -> dict[str, float | None]:
    """Medians of the attack, of every method's radii, and of their ratio to the attack; None where infinite."""
    attack = statistics.median(math.inf if digit.attack is None else digit.attack for digit in digits)
    made: dict[str, float | None] = {"attack": attack if math.isfinite(attack) else None}
    for method in digits[0].radii:
        radius = statistics.median(digit.radii[method] for digit in digits)
        made |= {method: radius, f"{method} / attack": radius / attack}
    return made


def prepare(setting: DigitsTraining, digits: int, folder: Path) -> TrainedVit:
    """Trains a model, or takes the one that an earlier run has left in the folder."""
    training, test = load_digits()
    path = folder / f"vit-{setting.name}.safetensors"
    model = DigitsViT(setting.layers, WIDTH, HEADS, UNITS)
    if path.exists():
        try:
            model.load_state_dict(read_tensors(path))
            seconds = float(json.loads(read_metadata(path)["vit"])["seconds"])
        except (RuntimeError, KeyError, ValueError):
            raise InputError(f"{path} is no checkpoint of this command; move it away or give --out") from None
        model = model.eval().requires_grad_(False)
    else:
        began = time.perf_counter()
        model = train(setting, training)
        seconds = time.perf_counter() - began
        make_folder(folder)
        write_tensors(path, model.state_dict(), {"vit": json.dumps(asdict(setting) | {"seconds": seconds})})
    converted = to_network(model, test.images[:digits])
    x = converted.encode(test.images)
    right = converted.network(x).argmax(-1) == test.labels
    places = right.nonzero().flatten()[:digits]
    accuracy = right.double().mean().item()
    return TrainedVit(setting, converted.network, x[places], test.labels[places], places.tolist(), accuracy, seconds)


def examine(subject: TrainedVit, i: int, methods: Sequence[str]) -> VitDigit:
    """The proved radii of one digit, and an attack on it."""
    certified, processor = {}, {}
    for method in methods:
        began = processor_seconds()
        (certified[method],) = certify_inputs(subject.network, subject.x[i : i + 1], method=method)
        processor[method] = processor_seconds() - began
    radii, seconds = ({name: getattr(one, key) for name, one in certified.items()} for key in ("radius", "seconds"))
    memory = peak_memory()
    alone = replace(subject, x=subject.x[i : i + 1], labels=subject.labels[i : i + 1])
    (nearest,) = attack(alone)
    return VitDigit(subject.setting, subject.places[i], radii, seconds, memory, nearest, processor)


def attack(subject: TrainedVit) -> list[float | None]:
    """The radius of a minimal attack, or a smaller one at which projected gradient ascent still succeeds."""

    # Witnesses are evaluated in float64: balls are too wide at the end of four layers.
    def logits(x: Tensor) -> Tensor:
        values: Tensor = subject.network(x)
        return values

    radius = MinimalAttack(_RESTARTS, _TARGETS, _STEPS)(logits, subject.x, subject.labels).radius
    low, high = torch.zeros_like(radius), radius.clone()
    for _ in range(_HALVINGS):
        middle = (low + high.clamp(max=2.0)) / 2
        changed = _ascend(logits, subject, middle)
        low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    return [value if math.isfinite(value) else None for value in high.tolist()]


def _ascend(logits: Any, subject: TrainedVit, radius: Tensor) -> Tensor:
    """(b) whether one of the targeted starts changes the answer on the sphere of this radius or inside."""
    b, classes = len(subject.x), len(subject.network.head.bias)
    generator = torch.Generator().manual_seed(0)
    answers = subject.labels.repeat_interleave(_RESTARTS * (classes - 1))
    others = torch.arange(classes - 1).repeat(b * _RESTARTS)
    targets = others + (others >= answers)
    x, r = (t.repeat_interleave(_RESTARTS * (classes - 1), 0) for t in (subject.x, radius.reshape(-1, 1, 1)))
    delta = r * _unit(torch.randn(x.shape, generator=generator, dtype=torch.float64))
    for step in range(_STEPS):
        at = (x + delta).requires_grad_()
        values = logits(at)
        gain = values.gather(1, targets[:, None]) - values.gather(1, answers[:, None])
        (gradient,) = torch.autograd.grad(gain.sum(), at)
        delta = delta + r * 0.25 * (1 - 0.9 * step / _STEPS) * _unit(gradient)
        delta = torch.where(_length(delta) > r, r * _unit(delta), delta)
    with torch.no_grad():
        changed: Tensor = logits(x + delta).argmax(-1) != answers
    return changed.reshape(b, -1).any(-1)


def table(models: Sequence[VitModel], digits: Sequence[VitDigit]) -> Table:
    """Medians over the digits."""
    groups = {model.setting: [digit for digit in digits if digit.setting == model.setting] for model in models}
    title = f"{models[0].setting.run}: medians over {len(groups[models[0].setting])} digits, proved"
    made = Table(title=title, title_justify="left")
    for column in ("layers", "accuracy %", "method", "radius", "attack", "ratio", "core s", "MiB"):
        made.add_column(column, justify="left" if column == "method" else "right")
    for model in models:
        own = groups[model.setting]
        middle = medians(own) if own else {}
        for method in own[0].radii if own else ():
            seconds = statistics.median((digit.processor_seconds or digit.seconds)[method] for digit in own)
            numbers = [_shown(middle[method], 4), _shown(middle["attack"], 3), _shown(middle[f"{method} / attack"], 3)]
            cells = (str(model.setting.layers), f"{100 * model.accuracy:.1f}", method, *numbers, f"{seconds:.1f}")
            made.add_row(*cells, f"{max(digit.memory for digit in own):.0f}")
    return made


def _shown(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _length(v: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    return length


def _unit(v: Tensor) -> Tensor:
    return v / _length(v).clamp(min=1e-300)


@final
@dataclass(frozen=True)
class VitParameters:
    """What `repro vit` takes."""

    recipe: Recipe = option("plain", "How to train: plain, or so that radii can be proved.")
    layers: tuple[int, ...] = option((2, 4), "Depths.", grid=True)
    digits: int = option(8, "Number of test digits to certify for each model.", grid=True, least=1)
    methods: tuple[str, ...] = option(("telescoped",), "Compositions.")
    init: Initialisation = option("huggingface", "Initialisation of the weights, with the plain recipe.")
    seed: int = option(0, "Seed of the training.", least=0)
    epochs: int | None = option(None, "Epochs; default: 60 for plain, 100 for lipschitz.", least=1)

    @property
    def trainings(self) -> list[DigitsTraining]:
        """One for each depth."""
        length = self.epochs or EPOCHS[self.recipe]
        return [DigitsTraining(depth, self.recipe, self.init, self.seed, length) for depth in self.layers]


@final
@register_study
class VitStudy(Study[VitParameters]):
    """Standard ViTs on digits."""

    name = "vit"
    title = "Proved radius against attack radius on standard ViTs trained on digits"
    paper = "holdfast"
    minutes = 25
    memory = 2
    parameters = VitParameters
    kinds: ClassVar = {"model": VitModel, "digit": VitDigit}

    def quick(self) -> VitParameters:
        return VitParameters("plain", (1,), 1, ("gains",), epochs=1)

    def stem(self, parameters: VitParameters) -> str:
        named = "" if parameters.methods == VitParameters().methods else f"-{'-'.join(parameters.methods)}"
        return f"{self.name}-{parameters.trainings[0].run}{named}"

    def plan(self, parameters: VitParameters, place: Workplace) -> StudyPlan:
        for method in parameters.methods:
            compositions[method]  # an unknown name is refused here, before any training
        trainings = parameters.trainings
        digits = [(one, i) for one in trainings for i in range(parameters.digits)]
        return StudyPlan(
            [
                [StudyPart("model", f"{one.layers} layers", one) for one in trainings],
                [StudyPart("digit", f"{one.layers} layers, digit {i}", (one, i)) for one, i in digits],
            ]
        )

    def measure(
        self, parameters: VitParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> VitModel | VitDigit:
        if part.kind == "model":
            subject = prepare(part.work, 1, place.runs)
            return VitModel(part.work, subject.accuracy, subject.training)
        setting, i = part.work
        return examine(prepare(setting, i + 1, place.runs), i, parameters.methods)

    def show(self, parameters: VitParameters, records: Records) -> StudyOutput:
        models, digits = records.of("model"), records.of("digit")
        summary = {
            model.setting.name: medians(own)
            for model in models
            if (own := [digit for digit in digits if digit.setting == model.setting])
        }
        radii = {
            f"{model.setting.layers} layers, {method}": [(one.radii[method], one.attack) for one in own]
            for model in models
            if (own := [digit for digit in digits if digit.setting == model.setting])
            for method in own[0].radii
        }
        return StudyOutput({"median": summary}, [table(models, digits)], {"": draw_beside_attack(radii)})
