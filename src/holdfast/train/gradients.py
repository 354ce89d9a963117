"""The loss of a batch and its gradients: computed each time, or on a GPU recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

_WARM_UPS = 3  # passes before the recording, for libraries to initialise


class Gradients:
    """Computes the loss of a batch, and leaves its gradients in the parameters, which have none before.

    Args:
        objective: from the tensors of a batch to the loss.
    """

    def __init__(self, objective: Callable[..., Tensor]) -> None:
        self._objective = objective

    def __call__(self, *batch: Tensor) -> Tensor:
        """The loss."""
        loss = self._objective(*batch)
        torch.autograd.backward(loss)
        return loss.detach()


@final
class RecordedGradients(Gradients):
    """The same as a CUDA graph: a step takes the time of its kernels, not the longer one of launching them.

    The first batch is recorded; all others have its shape. The loss that is returned changes with the next call.

    Args:
        objective: from the tensors of a batch to the loss, without a look at numbers; what it keeps from one batch to
            the next it changes in place.
        parameters: that get gradients.
    """

    def __init__(self, objective: Callable[..., Tensor], parameters: Iterable[Tensor]) -> None:
        super().__init__(objective)
        self._parameters = [p for p in parameters if p.requires_grad]
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """The loss."""
        if self._graph is None:
            self._graph = self._record(batch)
        for held, given in zip(self._batch, batch, strict=True):
            held.copy_(given)
        self._graph.replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        return self._loss

    def _record(self, batch: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        self._batch = [t.clone() for t in batch]
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                super().__call__(*self._batch)
        torch.cuda.current_stream().wait_stream(beside)
        for p in self._parameters:
            p.grad = None  # the recording makes its own, at places that stay
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = super().__call__(*self._batch)
        self._gradients = [p.grad for p in self._parameters]
        return graph
