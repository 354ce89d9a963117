"""What rotary positions do to the queries and keys of an expansion; without them, nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from holdfast.attention.rotary import Rotary
from holdfast.linalg import Array
from holdfast.linalg.rounding import up


@final
@dataclass(frozen=True)
class Positions:
    """R_i of every token."""

    rotary: Rotary | None

    @property
    def norm(self) -> float:
        """A bound of ‖R_i‖."""
        return 1.0 if self.rotary is None else self.rotary.norm

    @property
    def absolute(self) -> float:
        """The same on absolute values: pairs of entries are 2 x 2 matrices, so that this is at most √2 ‖R_i‖."""
        return 1.0 if self.rotary is None else up(math.sqrt(2) * self.norm, 1e-12)

    def turn(self, q: Array) -> Array:
        """R_i q_i for queries or keys (…, h, n, k) of all tokens."""
        return q if self.rotary is None else self.rotary.turn(q)

    def turn_back(self, k: Tensor) -> Tensor:
        """R_iᵀ k_ij for vectors (b, h, i, j, k)."""
        return k if self.rotary is None else self.rotary.turn_back(k.movedim(3, 0)).movedim(0, 3)

    def longest(self, q: Tensor, w_k: Tensor, seen: Tensor) -> Tensor:
        """(b, h, i) ‖W R_jᵀ q_i‖, W (h, d, k); the largest over the keys j that are seen, where it depends on them."""
        if self.rotary is None:
            plain: Tensor = torch.linalg.vector_norm(q @ w_k.mT, dim=-1)
            return plain
        everywhere = q.movedim(2, 0).unsqueeze(3).expand(-1, -1, -1, q.shape[2], -1)  # (i, b, h, j, k)
        lengths: Tensor = torch.linalg.vector_norm(self.rotary.turn_back(everywhere) @ w_k.mT, dim=-1)
        return (lengths.movedim(0, 2) * seen).amax(-1)
