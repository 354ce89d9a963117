"""What a training run reports while it runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from holdfast.models import Transformer
from holdfast.train.config import TrainingConfig


@final
@dataclass(frozen=True)
class Epoch:
    """The state at the end of an epoch.

    Attributes:
        epoch: its number, from 1 on.
        loss: mean over the steps of the last one.
        clean: accuracy on the held-out inputs, or on some of the training inputs.
        certified: there, by the estimate of the config.
        seconds: since the beginning of the training.
    """

    epoch: int
    loss: float
    clean: float
    certified: float
    seconds: float


@final
@dataclass(frozen=True)
class TrainingRun:
    """The result of a training run.

    Attributes:
        config: of the training.
        model: as it is now; in evaluation mode.
        history: the measurements, in order.
        test: accuracies on the held-out split, and what attention makes of content; empty unless finished.
        finished: whether all epochs are done.
        interrupted: whether Ctrl-C ended it, rather than the time limit.
        step: steps that are saved.
        steps: of the whole training.
        seconds: of training, over all starts.
        folder: of model.safetensors, checkpoint.safetensors and run.json.
        writes: whether this process wrote them; with several processes only the first does.
    """

    config: TrainingConfig
    model: Transformer
    history: tuple[Epoch, ...]
    test: dict[str, Any]
    finished: bool
    interrupted: bool
    step: int
    steps: int
    seconds: float
    folder: Path
    writes: bool


@final
@dataclass(frozen=True)
class TrainingProgress:
    """How far a training has come.

    Attributes:
        step: steps that are done.
        steps: of the whole training.
        loss: of the last step that was looked at.
        last: the last measurement, or None.
    """

    step: int
    steps: int
    loss: float
    last: Epoch | None
