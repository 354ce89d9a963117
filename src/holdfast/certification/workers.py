"""What every worker does with a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from holdfast.certification.examine import examine
from holdfast.certification.examples import Batch
from holdfast.certification.settings import Settings
from holdfast.executors import Emit, Task, Work
from holdfast.executors.pickling import let_pickle
from holdfast.graph import Readings
from holdfast.network.network import Network


@final
@dataclass(frozen=True)
class Examination(Task[Batch]):
    """Examines batches, and emits records.

    Attributes:
        model: sent out with the task, once.
        settings: how every input is treated.
        device: where a worker computes.
        readings: what was read from the model in this process; another worker reads it for itself, once.
    """

    model: Network | nn.Module
    settings: Settings
    device: str = "cpu"
    readings: Readings = field(default_factory=Readings)

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module):
            let_pickle(self.model)

    def start(self) -> Work[Batch]:
        def work(batch: Batch, emit: Emit) -> None:
            for record in examine(self.model, batch, self.settings, self.device, self.readings):
                emit(record)

        return work

    def __reduce__(self) -> tuple[Any, ...]:
        return Examination, (self.model, self.settings, self.device)
