"""What a penalty is to change, beside accuracy: the attention of a trained model, and the movements that fool it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from holdfast import api
from holdfast.attention.softmax import softmax_jacobian_norm
from holdfast.graph.trace import iter_trace


@final
@dataclass(frozen=True)
class AttentionNorms:
    """The attention of a model at some inputs, layer by layer.

    Attributes:
        lipschitz: the largest local constant at the inputs (estimates).
        g_1: the largest over heads and rows, mean over the inputs.
        norm_p: the largest ‖P‖ of a head, mean over the inputs.
    """

    lipschitz: list[float]
    g_1: list[float]
    norm_p: list[float]

    @property
    def columns(self) -> list[float]:
        """The largest constant of all layers, and the means of the others over the layers."""
        return [max(self.lipschitz), statistics.fmean(self.g_1), statistics.fmean(self.norm_p)]


#: Titles of `AttentionNorms.columns`, with the format of their numbers.
ATTENTION_COLUMNS = {"largest constant of a layer": ".1f", "mean g_1": ".3f", "mean ‖P‖": ".2f"}


def attention_norms(model: nn.Module, inputs: Iterable[Any]) -> AttentionNorms:
    """Measures every attention layer of a model at each of the inputs, one at a time."""
    rows = []
    for one in inputs:
        row = []
        for traced in iter_trace(model, one):
            p = traced.layer.attention(traced.x)
            constant = api.local_lipschitz(traced.layer, traced.x, tolerance=1e-3).value.max()
            g_1, norm_p = softmax_jacobian_norm(p, "g1").max(), torch.linalg.matrix_norm(p, 2).max()
            row.append(torch.stack([constant.double(), g_1.double(), norm_p.double()]))
        rows.append(torch.stack(row))
    values = torch.stack(rows)  # (inputs, layers, 3)
    means = values.mean(0)
    return AttentionNorms(values[..., 0].amax(0).tolist(), means[:, 1].tolist(), means[:, 2].tolist())


def median_radius(found: Sequence[float], not_found: int) -> float:
    """The median of the smallest changes of an answer; infinite where none was found for half of the inputs."""
    return middle([*found, *[math.inf] * not_found])


def middle(values: Sequence[float]) -> float:
    """The median; infinite where there is nothing."""
    return statistics.median(values or [math.inf])


def network_constants(logits: Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    """The local constant of a whole network at each of a batch of inputs: the norm of the Jacobian of all logits."""
    at = x.detach().requires_grad_()
    totals = logits(at).sum(0)
    rows = [torch.autograd.grad(total, at, retain_graph=True)[0].flatten(1) for total in totals]
    norms: list[float] = torch.linalg.matrix_norm(torch.stack(rows, 1), 2).tolist()
    return norms
