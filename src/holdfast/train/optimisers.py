"""What moves the weights: steps on the manifold, AdamW for the rest, and slow weights that follow both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn

from holdfast.layers import ManifoldStep, manifold_parameters
from holdfast.layers.linear.manifold import nearest_orthonormal
from holdfast.models import Transformer
from holdfast.train.config import TrainConfig


def optimisers(model: Transformer, c: TrainConfig) -> dict[str, torch.optim.Optimizer]:
    """Steps on the manifold for orthogonal maps, AdamW for the rest; each group remembers its full rate."""
    orthogonal, rest = _parameters(model)
    fused = all(p.is_cuda for p in rest)
    both: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW(rest, lr=c.lr, weight_decay=c.weight_decay, betas=(0.9, 0.99), fused=fused)
    }
    if orthogonal:
        both["manifold"] = ManifoldStep(orthogonal, lr=c.manifold_lr, momentum=c.momentum)
    for optimiser in both.values():
        for group in optimiser.param_groups:
            group["full_lr"] = group["lr"]
    return both


def lookahead(model: Transformer, c: TrainConfig) -> Lookahead | None:
    """The slow weights that a config asks for."""
    return Lookahead(*_parameters(model), share=c.lookahead_share) if c.lookahead else None


def _parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Orthogonal maps, and all other parameters."""
    orthogonal = list(manifold_parameters(model))
    ours = {id(p) for p in orthogonal}
    return orthogonal, [p for p in model.parameters() if id(p) not in ours]


@final
class Lookahead(torch.optim.Optimizer):
    """Slow weights, which every step takes a share of the way to the fast ones, and from which these go on.

    The fast weights are those that other optimisers have moved several times meanwhile (Zhang et al. 2019). The slow
    ones of orthogonal maps are brought back to the manifold: the mean of two matrices with orthonormal columns that are
    less than a right angle apart has a polar factor, which lies between them.

    Args:
        orthogonal: weights with orthonormal rows or columns.
        others: all other ones.
        share: of the way.
    """

    def __init__(
        self, orthogonal: Iterable[nn.Parameter], others: Iterable[nn.Parameter], *, share: float = 0.5
    ) -> None:
        groups = [{"params": list(orthogonal), "orthogonal": True}, {"params": list(others), "orthogonal": False}]
        super().__init__([group for group in groups if group["params"]], {"share": share})
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Puts the slow weights where the fast ones are."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the slow weights; the fast ones go on from there."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p]["slow"]
                slow.lerp_(p, group["share"])
                if group["orthogonal"]:
                    slow.copy_(nearest_orthonormal(slow.double()))
                p.copy_(slow)
        return loss
