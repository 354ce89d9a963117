"""Counter-examples: signed gradient steps inside a box, from several starts for every case, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import check_counts
from holdfast.vnnlib.specification import Box, OutputCase

#: Outputs (b, k) of inputs (b, i); differentiable.
Outputs = Callable[[Tensor], Tensor]

_FIRST, _LAST = 0.25, 0.005  # of the box's width: the first step and the last
_TOGETHER = 64  # points that move at once


@final
@dataclass(frozen=True)
class Search:
    """Projected descent on the largest excess of a case.

    Args:
        restarts: starts for every case: the box's centre, then random points of it.
        steps: gradient steps for every start.
    """

    restarts: int = 4
    steps: int = 40

    def __post_init__(self) -> None:
        check_counts(**vars(self))

    def __call__(
        self, outputs: Outputs, box: Box, seed: int, overdue: Callable[[], bool] = bool
    ) -> Iterator[Float64[Tensor, " inputs"]]:
        """Points of the box at which some case holds, as they are found; none once it is overdue."""
        generator = torch.Generator().manual_seed(seed)
        most = max(1, _TOGETHER // self.restarts)
        for first in range(0, len(box.cases), most):
            yield from self._descend(outputs, box, box.cases[first : first + most], generator, overdue)

    def _descend(
        self,
        outputs: Outputs,
        box: Box,
        cases: tuple[OutputCase, ...],
        generator: torch.Generator,
        overdue: Callable[[], bool],
    ) -> Iterator[Tensor]:
        width = box.upper - box.lower
        share = torch.rand(len(cases), self.restarts, len(width), dtype=torch.float64, generator=generator)
        share[:, 0] = 0.5
        x = (box.lower + share * width).flatten(0, 1).clamp(box.lower, box.upper)
        for step in range(self.steps + 1):
            if overdue():
                return
            excess, gradient = self._excess(outputs, x, cases)
            yield from x[excess <= 0]
            size = _FIRST * (_LAST / _FIRST) ** (step / self.steps)
            x = (x - size * width * gradient.sign()).clamp(box.lower, box.upper)

    def _excess(self, outputs: Outputs, x: Tensor, cases: tuple[OutputCase, ...]) -> tuple[Tensor, Tensor]:
        """The largest excess of each point's case, and its gradient."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = outputs(x).reshape(len(cases), self.restarts, -1)
            excess = torch.cat([case.excess(own).amax(-1) for case, own in zip(cases, y, strict=True)])
            (gradient,) = torch.autograd.grad(excess.sum(), x)
        return excess.detach(), gradient
