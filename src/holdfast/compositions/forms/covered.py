"""What is kept of an attention layer at some rows, and of covectors there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from holdfast.linalg.rounding import up


@final
@dataclass
class Covered:
    """Covectors (S) at the heads' outputs: m (S, h, i, k), sup|g|, sup|n| and |E[ℓ g]| for scale 1, the size of Q₂.

    The size of Q₂ is not a number until it is needed. Upper bounds that are large are kept in float32.
    """

    m: Tensor
    size: Tensor  # (S, i) bounds of ‖m‖ over all heads, for rounding
    most_g: Tensor
    n: Tensor
    n_spread: Tensor
    slope: Tensor
    bent: Tensor
    error: Tensor  # (S) of Q₂
    turned: bool = False  # whether the products of first order and rests in Q₂ are carried as turned covectors

    def groups(self) -> list[tuple[Tensor, Tensor]]:
        """Members of the batch that concern the same rows, and these rows."""
        patterns, which = torch.unique(self.size != 0, dim=0, return_inverse=True)
        parts = [((which == i).nonzero().squeeze(-1), row.nonzero().squeeze(-1)) for i, row in enumerate(patterns)]
        return [(index, rows) for index, rows in parts if len(rows)]

    def some(self, index: slice | Tensor) -> Covered:
        """A part of the batch, in float64."""
        parts: dict[str, Any] = {name: x[index].double() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **parts)


@final
@dataclass(frozen=True)
class Softened:
    """Probabilities of rows i: p (h, i, j), its upper ends, which keys are seen; v_j - E[v] (h, i, j, k), and sup ‖v‖.

    θ bounds the relative error of all that is computed of them.
    """

    p: Tensor
    most: Tensor
    seen: Tensor
    spread: Tensor
    value: float
    theta: float

    def at(self, rows: Tensor) -> Softened:
        p, most, seen, spread = (x[:, rows] for x in (self.p, self.most, self.seen, self.spread))
        return Softened(p, most, seen, spread, self.value, self.theta)


Four = tuple[Tensor, Tensor, Tensor, Tensor]  # of queries (h, i, …), keys and values (h, j, …), and logits (h, i, j, …)


@final
@dataclass(frozen=True)
class SettledHeads:
    """Suprema at one scale, (h, i, j): of ℓ to first order, of its rest, of b and its rest, of t, and θ of Lemma 5."""

    radius: float
    rests: Four
    logit: Tensor
    rest_l: Tensor
    most_b: Tensor
    rest_b: Tensor
    tau: Tensor
    beyond: Tensor


def at_rows(parts: Four, rows: Tensor) -> Four:
    """The queries and logits of some rows."""
    q, k, v, logits = parts
    return q[:, rows], k, v, logits[:, rows]


def narrow(x: Tensor) -> Tensor:
    """Numbers that are not negative in float32, rounded up."""
    return up(x, 2.0**-22).float() + 1e-37
