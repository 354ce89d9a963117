"""Training: the JaSMin penalty, and a monitor of how smooth attention stays."""

from typing import TYPE_CHECKING, Any

from holdfast.train.jasmin import jasmin
from holdfast.train.monitor import LayerState, Monitor, MonitorRecord
from holdfast.train.penalty import JaSMin

if TYPE_CHECKING:
    from holdfast.train.huggingface import JaSMinTrainer, MonitorCallback

__all__ = ["JaSMin", "JaSMinTrainer", "LayerState", "Monitor", "MonitorCallback", "MonitorRecord", "jasmin"]


def __getattr__(name: str) -> Any:
    """What needs transformers is imported when it is asked for."""
    if name in ("JaSMinTrainer", "MonitorCallback"):
        from holdfast.train import huggingface

        return getattr(huggingface, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
