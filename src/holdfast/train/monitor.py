"""Monitors how smooth a model's attention is while it trains, on a fixed batch of inputs."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from holdfast import api
from holdfast.errors import InputError, check_counts
from holdfast.graph.program import ModelInputs
from holdfast.graph.trace import TracedLayer, Tracer
from holdfast.linalg import MatrixOperator, estimate
from holdfast.storage import Pathlike, check_output
from holdfast.train.jasmin import row_penalties


@dataclass(frozen=True)
class LayerState:
    """One attention layer on the probe batch; every number is an estimate.

    Attributes:
        name: qualified name of its module.
        lipschitz: the largest local Lipschitz constant over the inputs.
        g_1: the largest g_1 of a row, which bounds the norm of the softmax Jacobian: at most 1/2.
        norm_p: the largest ‖P‖ of a head: from 1 to the root of the number of tokens.
        entropy: of the rows in nats, their mean.
    """

    name: str
    lipschitz: float
    g_1: float
    norm_p: float
    entropy: float


@dataclass(frozen=True)
class MonitorRecord:
    """All attention layers of a model at one step.

    Attributes:
        step: of the training.
        layers: in the order in which they run.
        warning: what grew too fast, or None.
        seconds: that the measurement took.
    """

    step: int
    layers: tuple[LayerState, ...]
    warning: str | None
    seconds: float

    @property
    def largest(self) -> LayerState:
        """The layer with the largest local constant."""
        return max(self.layers, key=lambda layer: layer.lipschitz)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return asdict(self)


@final
class Monitor:
    """Measures every attention layer of a model on a fixed batch, at regular intervals of a training loop.

    The probe runs in evaluation mode and without gradients; the training's modes and random state are restored.

    Args:
        model: a model that `holdfast.trace` can trace.
        probe_batch: a tensor, a mapping of keyword arguments or a tuple of arguments. A few inputs are enough: the
            cost grows with their number.
        every: steps between measurements.
        path: a file that gets one line of JSON per record.
        growth: factor above which the growth of a layer's constant is worth a warning …
        window: … over this number of records.

    Example:
        >>> monitor = Monitor(model, {"input_ids": ids[:4]}, every=100)
        >>> for step, batch in enumerate(loader):
        ...     train_step(batch)
        ...     monitor.step(step)
        >>> monitor.records[-1].largest.lipschitz
    """

    def __init__(
        self,
        model: nn.Module,
        probe_batch: ModelInputs,
        every: int = 100,
        *,
        path: Pathlike | None = None,
        growth: float = 2.0,
        window: int = 5,
    ) -> None:
        check_counts(every=every, window=window)
        if not growth > 1:
            raise InputError(f"growth is {growth}; expected a factor above 1")
        self.every, self.growth, self.window = every, growth, window
        self._model, self._probe = model, probe_batch
        self._tracer: Tracer | None = None
        if path is not None:
            check_output(path)
        self._path = None if path is None else Path(path)
        self._records: list[MonitorRecord] = []
        self._calm_since = 0  # the first record that growth is measured from

    @property
    def records(self) -> tuple[MonitorRecord, ...]:
        """What has been measured."""
        return tuple(self._records)

    def step(self, step: int) -> MonitorRecord | None:
        """Measures if `step` is a multiple of `every`; warns where a constant has grown fast."""
        return None if step % self.every else self.measure(step)

    def measure(self, step: int) -> MonitorRecord:
        """Measures now."""
        began = time.perf_counter()
        with _undisturbed(self._model), torch.no_grad():
            self._tracer = self._tracer or Tracer(self._model, self._probe)
            layers = tuple(_state(traced) for traced in self._tracer.layers(self._probe))
        warning = self._growth(step, layers)
        record = MonitorRecord(step, layers, warning, time.perf_counter() - began)
        self._records.append(record)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record.to_dict()) + "\n")
        if warning is not None:
            self._calm_since = len(self._records) - 1
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
        return record

    def _growth(self, step: int, layers: tuple[LayerState, ...]) -> str | None:
        """One line about the layer that grew most, where some grew too fast."""
        earlier = self._records[self._calm_since :][-self.window :]
        if not earlier:
            return None
        least: dict[str, float] = {}
        for then in (layer for record in earlier for layer in record.layers):
            least[then.name] = min(then.lipschitz, least.get(then.name, math.inf))
        ratios = {now.name: now.lipschitz / max(least.get(now.name, now.lipschitz), 1e-30) for now in layers}
        grown = [name for name, ratio in ratios.items() if ratio > self.growth]
        if not grown:
            return None
        worst = max(grown, key=lambda name: ratios[name])
        others = f" ({len(grown) - 1} other layers grew fast too)" if len(grown) > 1 else ""
        return (
            f"step {step}: the local Lipschitz constant of {worst!r} is {ratios[worst]:.3g} times its least value "
            f"since step {earlier[0].step}{others}; consider a lower learning rate, or JaSMin"
        )


def _state(traced: TracedLayer) -> LayerState:
    p = traced.layer.attention(traced.x)
    return LayerState(
        name=traced.name,
        lipschitz=api.local_lipschitz(traced.layer, traced.x, tolerance=1e-2).value.max().item(),
        g_1=row_penalties(p.log(), 0).exp().max().item(),
        norm_p=estimate(MatrixOperator(p), tolerance=1e-2).value.max().item(),
        entropy=torch.special.entr(p).sum(-1).mean().item(),
    )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module has its own mode again, and random numbers go on as before."""
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices, key=str)):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
