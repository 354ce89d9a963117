"""The monitor and the penalty in a Hugging Face `Trainer`."""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from holdfast.extras import require
from holdfast.graph.program import ModelInputs
from holdfast.storage import Pathlike
from holdfast.train.monitor import Monitor
from holdfast.train.penalty import JaSMin

require("transformers", "hf")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402


@final
class MonitorCallback(TrainerCallback):
    """A `Monitor` that follows a `Trainer`; each record also enters the trainer's log history.

    Args:
        probe_batch: see `Monitor`, and likewise for the rest; tensors must be where the model trains.
        every: steps between measurements.
        path: a file that gets one line of JSON per record.
        growth: factor that is worth a warning.
        window: number of records over which it is measured.

    Example:
        >>> trainer = Trainer(model, args, callbacks=[MonitorCallback(probe, every=100)], …)
    """

    def __init__(
        self,
        probe_batch: ModelInputs,
        every: int = 100,
        *,
        path: Pathlike | None = None,
        growth: float = 2.0,
        window: int = 5,
    ) -> None:
        self._options: dict[str, Any] = {"every": every, "path": path, "growth": growth, "window": window}
        self._probe = probe_batch
        self.monitor: Monitor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures the model as it starts."""
        if state.is_world_process_zero:
            self.monitor = Monitor(kwargs["model"], self._probe, **self._options)
            self._log(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measures if the step is due."""
        self._log(state)

    def _log(self, state: TrainerState) -> None:
        record = None if self.monitor is None else self.monitor.step(state.global_step)
        if record is not None:
            numbers = {
                f"{layer.name}/{key}": getattr(layer, key)
                for layer in record.layers
                for key in ("lipschitz", "g_1", "norm_p", "entropy")
            }
            state.log_history.append({"step": record.step, **numbers})


@final
class JaSMinTrainer(Trainer):
    """A `Trainer` that adds a JaSMin penalty to the loss of every training step; evaluation losses stay as they are.

    Example:
        >>> trainer = JaSMinTrainer(model, args, jasmin=JaSMin(model, k=0, weight=0.01), train_dataset=data)
    """

    def __init__(self, *args: Any, jasmin: JaSMin, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.jasmin = jasmin

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of the task and the penalty."""
        self.jasmin.reset()
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        penalty = self.jasmin()
        by_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if model.training and (by_items or self.compute_loss_func is not None):
            # The loss of the task is already divided by the items of all accumulated batches.
            penalty = penalty / self.current_gradient_accumulation_steps
        loss = loss + penalty.to(loss.device)
        return (loss, outputs) if return_outputs else loss
