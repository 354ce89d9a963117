"""Training: models that can be certified (`train`); and the JaSMin penalty and a monitor for any model."""

from typing import TYPE_CHECKING, Any

from holdfast.train.config import DataConfig, TrainConfig, TrainingConfig, read_training
from holdfast.train.jasmin import jasmin
from holdfast.train.loop import train
from holdfast.train.losses import LOSSES, Loss
from holdfast.train.monitor import LayerState, Monitor, MonitorRecord
from holdfast.train.outcome import Epoch, TrainingProgress, TrainingRun
from holdfast.train.penalty import JaSMin
from holdfast.train.slopes import SLOPES, MarginSlope

if TYPE_CHECKING:
    from holdfast.train.huggingface import JaSMinTrainer, MonitorCallback

__all__ = [
    "LOSSES",
    "SLOPES",
    "DataConfig",
    "Epoch",
    "JaSMin",
    "JaSMinTrainer",
    "LayerState",
    "Loss",
    "MarginSlope",
    "Monitor",
    "MonitorCallback",
    "MonitorRecord",
    "TrainConfig",
    "TrainingConfig",
    "TrainingProgress",
    "TrainingRun",
    "jasmin",
    "read_training",
    "train",
]


def __getattr__(name: str) -> Any:
    """What needs transformers is imported on first use."""
    if name in ("JaSMinTrainer", "MonitorCallback"):
        from holdfast.train import huggingface

        return getattr(huggingface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
