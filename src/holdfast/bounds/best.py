"""The smallest bound that applies."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from holdfast.attention import AttentionLayer
from holdfast.bounds.arithmetic import Arithmetic
from holdfast.bounds.base import Bound, Evaluation, list_bounds, register_bound
from holdfast.errors import MemoryLimitError, NotApplicableError
from holdfast.linalg import Array


@final
@register_bound
class Best(Bound):
    """The minimum of the other bounds; `terms` holds each one's value, `notes` who won and who did not apply."""

    name = "best"
    cost = "that of all bounds together"
    reference: ClassVar[str] = "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
        values: dict[str, Tensor] = {}
        notes: list[str] = []
        for bound in list_bounds():
            if bound.scope != self.scope or bound.name == self.name:
                continue
            reason = bound.refusal(layer)
            if reason is None:
                try:
                    values[bound.name] = a.number(bound._evaluate(a, layer, x, eps).value)
                except MemoryLimitError as error:
                    reason = str(error)
            if reason is not None:
                notes.append(f"{bound.name} was left out: {reason}")
        if not values:
            raise NotApplicableError("no bound applies: " + "; ".join(notes))
        smallest = torch.stack(list(values.values())).amin(0)
        wins = {name: int((value == smallest).sum()) for name, value in values.items()}
        for name, count in wins.items():
            if count:
                notes.append(f"{name} is smallest at {count} of {smallest.numel()} values")
        return Evaluation(a.lift(smallest), {name: a.lift(v) for name, v in values.items()}, tuple(notes))
