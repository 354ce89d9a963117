"""Standard vision transformers on CIFAR-10: plain, adversarial, and with penalties, a fixed number of steps each.

The penalty of `lipschitz` is that of `holdfast.studies.vit_training` without its gradient term; δ is one
ascent step of the penalty itself. `spectral` penalises the squared norm of every matrix, by one power iteration per
step, `jasmin` is `holdfast.JaSMin`. Nothing is chosen by test accuracy, and the last weights are kept.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from holdfast.data.dataset import Dataset
from holdfast.errors import InputError
from holdfast.models.vit import VisionTransformer
from holdfast.storage import read_metadata, read_tensors, write_tensors
from holdfast.studies.ascent import ascended, unit
from holdfast.studies.penalties import Penalty, charged
from holdfast.studies.vit_training import RAMP, TEMPERATURE, watched
from holdfast.train.gradients import Gradients, RecordedGradients

CifarRecipe = Literal["plain", "pgd", "lipschitz", "jasmin", "spectral"]
RADII = (36 / 255, 0.25, 0.5)  # of the attack on test images, l2 on pixels in [0, 1]

_KEY = "cifar-vit"  # of a file's metadata

_CROP = 4  # pixels by which an image is shifted at most
_WARM = 0.1  # of the steps, in which the rate grows
_INNER_STEPS, _TEST_STEPS = 3, 20  # of PGD, in training and on test images
_DELTA = 0.25  # length of the penalty's δ


@final
@dataclass(frozen=True)
class CifarTraining:
    """How a network is built and trained.

    Attributes:
        recipe: what is added to the cross entropy.
        steps: of AdamW, with a warm-up and half a cosine.
        batch: images of a step, each shifted by up to four pixels and mirrored at random.
        rate: the largest one.
        radius: of the adversarial examples, l2; 0 for none.
        weight: of the penalty.
        k: of JaSMin.
        seed: of weights, order and augmentation.
    """

    recipe: CifarRecipe = "plain"
    patch: int = 8
    depth: int = 2
    width: int = 128
    heads: int = 4
    steps: int = 2037
    batch: int = 512
    rate: float = 1e-3
    radius: float = 0.0
    weight: float = 0.0
    k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.recipe not in get_args(CifarRecipe):
            raise InputError(f"recipe is {self.recipe!r}; expected one of {', '.join(get_args(CifarRecipe))}")
        for name in ("patch", "depth", "width", "heads", "steps", "batch", "rate"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} is {getattr(self, name)}; expected a positive number")

    def network(self) -> VisionTransformer:
        """The network before its training."""
        model = VisionTransformer(32, 3, self.patch, self.depth, self.width, self.heads)
        if self.recipe == "lipschitz":
            _initialise(model, self.width)
        return model


@final
@dataclass(frozen=True)
class CifarNetwork:
    """A trained network's file: how it was trained, and what its training measured.

    Attributes:
        training: the recipe.
        accuracy: on the test images.
        attacked: the share of the first of them that stay right under PGD, for every radius of RADII.
        images: how many test images.
        attacked_images: how many of them were attacked.
        seconds: of the training.
        place: what it was trained on.
    """

    training: CifarTraining
    accuracy: float
    attacked: tuple[float, ...]
    images: int
    attacked_images: int
    seconds: float
    place: str


def train(setting: CifarTraining, data: Dataset, device: str = "cpu") -> VisionTransformer:
    """Trains a network on the images of a split."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = setting.network().to(device)
    images, labels = data.inputs.to(device), data.labels.to(device)
    draws = torch.Generator(device).manual_seed(setting.seed)
    decay = 0.0 if setting.recipe == "lipschitz" else 0.05
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setting.rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: _rate((done + 1) / setting.steps))
    batch = min(setting.batch, len(labels))
    order = torch.empty(0, dtype=torch.long, device=device)
    with charged(model, setting.recipe, setting.weight, setting.k) as penalty:

        def loss(x: Tensor, y: Tensor, ramp: Tensor) -> Tensor:
            if setting.recipe == "lipschitz":
                return _lipschitz_loss(model, x, y, setting, ramp, draws)
            return _loss(model, x, y, setting, penalty, draws)

        # Random numbers that are drawn inside of the loss cannot be recorded.
        recordable = images.is_cuda and setting.recipe != "lipschitz" and not setting.radius
        gradients = RecordedGradients(loss, model.parameters()) if recordable else Gradients(loss)
        for done in range(setting.steps):
            if len(order) < batch:
                order = torch.randperm(len(labels), generator=draws, device=device)
            chosen, order = order[:batch], order[batch:]
            x, y = _augmented(images[chosen], draws), labels[chosen]
            ramp = torch.full((), min(1.0, (done + 1) / (RAMP * setting.steps)), device=device)
            optimizer.zero_grad()
            gradients(x, y, ramp)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval().requires_grad_(False)


def train_and_measure(
    setting: CifarTraining, data: Dataset, test: Dataset, device: str = "cpu", attacked_images: int = 2000
) -> tuple[VisionTransformer, CifarNetwork]:
    """A network with weights that float16 can hold, and its accuracies on test images."""
    began = time.perf_counter()
    model = train(setting, data, device)
    model.load_state_dict({name: t.half().float() for name, t in model.state_dict().items()})
    seconds = time.perf_counter() - began
    x, y = test.inputs.to(device), test.labels.to(device)
    first = slice(0, min(attacked_images, len(y)))
    attacked = tuple(_share(model, ascended(model, x[first], y[first], r, _TEST_STEPS), y[first]) for r in RADII)
    where = torch.cuda.get_device_name() if device.startswith("cuda") else device
    known = CifarNetwork(setting, _share(model, x, y), attacked, len(y), len(y[first]), seconds, where)
    return model, known


def save_network(
    path: Path, model: VisionTransformer, known: CifarNetwork, notes: Mapping[str, str] | None = None
) -> None:
    """Writes a network in float16, with all that is known about it; `holdfast.models.load` reads it, too."""
    halved = {name: t.detach().half().cpu().contiguous() for name, t in model.state_dict().items()}
    write_tensors(path, halved, {_KEY: json.dumps(asdict(known)), **model.notes, **(notes or {})})


def is_network(path: Path) -> bool:
    """Whether `save_network` has written this file."""
    return _KEY in read_metadata(path)


def load_network(path: Path) -> tuple[VisionTransformer, CifarNetwork]:
    """Reads what `save_network` has written; the network is in float32."""
    try:
        table = json.loads(read_metadata(path)[_KEY])
        setting = CifarTraining(**table.pop("training"))
        known = CifarNetwork(setting, **table | {"attacked": tuple(table["attacked"])})
        model = setting.network()
        model.load_state_dict({name: t.float() for name, t in read_tensors(path).items()})
    except (KeyError, TypeError, ValueError, RuntimeError):
        names = ", ".join(f.name for f in fields(CifarTraining))
        raise InputError(f"{path} is no network of this study; expected a safetensors file that says {names}") from None
    return model.eval().requires_grad_(False), known


def _loss(
    model: VisionTransformer,
    x: Tensor,
    y: Tensor,
    setting: CifarTraining,
    penalty: Penalty | None,
    draws: torch.Generator,
) -> Tensor:
    """Cross entropy, in bfloat16 on a GPU, at the images or near them, and the penalty."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
        if setting.radius:
            x = ascended(model, x, y, setting.radius, _INNER_STEPS, _normal(x, draws)).clamp(0, 1)
            if penalty is not None:
                penalty.reset()
        logits = model(x)
    loss = cross_entropy(logits.float(), y)
    return loss if penalty is None else loss + penalty()


def _lipschitz_loss(
    model: VisionTransformer, x: Tensor, y: Tensor, setting: CifarTraining, ramp: Tensor, draws: torch.Generator
) -> Tensor:
    """Cross entropy at a temperature, and how far what a certificate expands moves along δ, divided by ‖δ‖²."""
    delta = (_DELTA * unit(_normal(x, draws))).requires_grad_()
    (gradient,) = torch.autograd.grad(_movement(model, x, delta)[1], delta)
    logits, moved = _movement(model, x, _DELTA * unit(gradient))
    if setting.radius:

        def scaled(at: Tensor) -> Tensor:
            out: Tensor = TEMPERATURE * model(at)
            return out

        near = ascended(scaled, x, y, setting.radius, _INNER_STEPS, _normal(x, draws)).clamp(0, 1)
        logits = model(near)
    return cross_entropy(TEMPERATURE * logits, y) + setting.weight * ramp * moved


def _movement(model: VisionTransformer, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at x, and the mean penalty of an image, in float32: differences are small."""
    with watched(model) as movements:
        logits = model(torch.cat([x, x + delta]))[: len(x)]
        return logits, torch.stack(movements).sum() / (_DELTA**2 * len(x))


def _initialise(model: VisionTransformer, width: int) -> None:
    """A token is a constant with a little signal on top, and attention is flat."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _cut_normal(module.weight, width**-0.5)
        if isinstance(module, nn.MultiheadAttention):
            _cut_normal(module.in_proj_weight, width**-0.5)
            with torch.no_grad():
                module.in_proj_weight[: 2 * width] *= 0.003 * width**0.5
    _cut_normal(model.embedding.weight, 0.5 * model.embedding.in_features**-0.5)
    _cut_normal(model.head.weight, 0.05)
    nn.init.normal_(model.positions, std=2.0)


def _cut_normal(weight: Tensor, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _rate(t: float) -> float:
    return t / _WARM if t < _WARM else 0.5 * (1 + math.cos(math.pi * (min(t, 1.0) - _WARM) / (1 - _WARM)))


def _augmented(x: Tensor, draws: torch.Generator) -> Tensor:
    """Shifted by up to four pixels, with mirrored borders, and every other image mirrored."""
    b, c, side, _ = x.shape
    window = torch.arange(side, device=x.device)
    down, right = torch.randint(2 * _CROP + 1, (2, b, 1), generator=draws, device=x.device) + window
    planes = torch.arange(c, device=x.device)[None, :, None, None]
    place = torch.arange(b, device=x.device)[:, None, None, None]
    x = pad(x, [_CROP] * 4, mode="reflect")[place, planes, down[:, None, :, None], right[:, None, None, :]]
    mirrored = torch.rand(b, 1, 1, 1, generator=draws, device=x.device) < 0.5
    return torch.where(mirrored, x.flip(-1), x)


def _normal(x: Tensor, draws: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=draws, device=x.device)


@torch.no_grad()
def _share(model: VisionTransformer, x: Tensor, y: Tensor) -> float:
    """The share of the images that get the right answer."""
    parts = zip(torch.split(x, 1000), torch.split(y, 1000), strict=True)
    return sum(int((model(a).argmax(1) == b).sum()) for a, b in parts) / len(y)
