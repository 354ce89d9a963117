"""The loss of a batch as one module: what is compiled, and what several processes share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from holdfast.data import Dataset
from holdfast.layers.attention import content
from holdfast.models.transformer import Transformer
from holdfast.train.forward import run
from holdfast.train.losses import Loss
from holdfast.train.slopes import MarginSlope


@final
class TrainingObjective(nn.Module):
    """The weighted sum of the terms of a loss.

    Args:
        model: that is trained.
        losses: the terms.
        bf16: whether products are rounded to bfloat16.
    """

    def __init__(self, model: Transformer, losses: Sequence[Loss], *, bf16: bool = False) -> None:
        super().__init__()
        self.model = model
        self._losses, self._bf16 = tuple(losses), bf16
        self._differentiate = any(loss.differentiates for loss in losses)

    def forward(self, inputs: Tensor, labels: Int64[Tensor, " b"], progress: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss of a batch when this share of the training is done."""
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self._bf16):
            forward_pass = run(self.model, inputs, labels, progress, differentiate=self._differentiate)
            return torch.stack([loss.weight * loss(forward_pass) for loss in self._losses]).sum()


@final
@dataclass(frozen=True)
class Measurement:
    """A model on labelled inputs.

    Attributes:
        clean: share of right answers.
        certified: share that is right and, by the estimate of a slope, stays so within the radius: no certificate.
    """

    clean: float
    certified: float


@final
@dataclass(frozen=True)
class ContentMeasurement:
    """Whether the attention of a model attends: see `holdfast.layers.attention.content`.

    Attributes:
        content_off: share of right answers with the content scores replaced by their mean over the inputs.
        total_variation: of every layer.
        score_norm: of every layer.
    """

    content_off: float
    total_variation: list[float]
    score_norm: list[float]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, whatever the mode is outside."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def measure(
    model: Transformer, data: Dataset, slope: MarginSlope, radius: float, device: torch.device, batch: int = 500
) -> Measurement:
    """Clean accuracy, and an estimate of certified accuracy."""
    right = held = torch.zeros((), dtype=torch.int64, device=device)
    for inputs, labels in _batches(data, device, batch):
        with _evaluating(model):
            forward_pass = run(model, inputs, labels, differentiate=slope.differentiates)
        # The label is not its own rival.
        lead = (forward_pass.margins - radius * slope(forward_pass)).scatter(1, labels.unsqueeze(1), torch.inf).amin(1)
        right = right + (forward_pass.logits.argmax(1) == labels).sum()
        held = held + (lead > 0).sum()
    return Measurement(right.item() / len(data), held.item() / len(data))


@torch.no_grad()
def measure_content(model: nn.Module, data: Dataset, device: torch.device, batch: int = 500) -> ContentMeasurement:
    """What the model makes of the content of its inputs."""
    inputs = data.inputs.to(device)
    with _evaluating(model):
        off = content.content_off(model, inputs, batch)
        right = sum(int((off(x).argmax(1) == labels).sum()) for x, labels in _batches(data, device, batch))
        use = content.content_use(model, inputs, batch)
    return ContentMeasurement(right / len(data), use.total_variation.tolist(), use.score_norm.tolist())


def _batches(data: Dataset, device: torch.device, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(data), batch):
        part = slice(start, start + batch)
        yield data.inputs[part].to(device), data.labels[part].to(device)
