"""How the outputs of all heads move with their queries, keys and values: the first derivative, in float, fast.

`derivatives.py` has the same derivative for balls, its parts and the higher ones, with whole matrices of scores for
each direction. Products with a Jacobian are taken thousands of times, so here it is written once more: masked keys are
skipped in blocks, maps may be joined with scores, and nothing is kept that a product does not need.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from holdfast.attention.layer import AttentionLayer, AttentionParts
from holdfast.device import waits

_BLOCK = 64  # queries whose masked keys are skipped together, where that is faster than to compute them too


@final
class HeadTangents:
    """The heads of a layer at x, between movements of q, k, v and movements of their outputs y.

    Args:
        layer: the layer.
        x: (…, n, d) where it is.
        parts: the pass of the layer at x.
    """

    def __init__(self, layer: AttentionLayer, x: Float[Tensor, "*b n d"], parts: AttentionParts[Tensor]) -> None:
        slope = layer.cap_slope(parts)
        self._placed = None if layer.rotary is None and layer.beyond_dot_products is None else layer.placed(x)
        # The scale of the scores is carried by q and k, once.
        self.q, self.k = parts.q * layer.scale, parts.k * layer.scale
        self._v, self._p, self._y = parts.v, parts.p, parts.y
        self._steep = parts.p if slope is None else parts.p * slope  # p times the derivative of the soft cap
        self._blocks = _blocks(layer.allowed(x.shape[-2]), x.shape[-2])

    @property
    def placed(self) -> bool:
        """Whether something stands between the maps and the scores: rotary positions, or norms."""
        return self._placed is not None

    def join_scores(self) -> None:
        """From now on dq are movements of scores through the queries, and dk through the keys."""
        n = self._p.shape[-1]
        self.q = self.k = torch.eye(n, dtype=self._p.dtype, device=self._p.device).expand_as(self._p)

    def push(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """(…, h, n, k) the movement of y."""
        if self._placed is not None:
            dq, dk = (placed.push(d) for placed, d in zip(self._placed, (dq, dk), strict=True))
        left = torch.cat([dq, self.q.expand_as(dq)], -1)
        right = torch.cat([self.k.expand_as(dk), dk], -1)
        dy = torch.empty_like(dv)
        for rows, keys in self._blocks:
            p = self._p[..., rows, keys]
            weighted = (left[..., rows, :] @ right[..., keys, :].mT).mul_(self._steep[..., rows, keys])
            # p' = p ∘ (s' - E_p s'), so the mean of s' along a row multiplies the row's output.
            mean = weighted.sum(-1, keepdim=True) * self._y[..., rows, :]
            dy[..., rows, :] = weighted @ self._v[..., keys, :] + p @ dv[..., keys, :] - mean
        return dy

    def pull(self, dy: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> None:
        """The adjoint of `push`, written into dq, dk and dv, which hold zeros."""
        dq, dk, dv = into
        mean = (dy * self._y).sum(-1, keepdim=True)
        for rows, keys in self._blocks:
            p, dy_rows = self._p[..., rows, keys], dy[..., rows, :]
            ds = (dy_rows @ self._v[..., keys, :].mT).sub_(mean[..., rows, :]).mul_(self._steep[..., rows, keys])
            dq[..., rows, :] = ds @ self.k[..., keys, :]
            dk[..., keys, :] += ds.mT @ self.q[..., rows, :]
            dv[..., keys, :] += p.mT @ dy_rows
        if self._placed is not None:
            for placed, t in zip(self._placed, (dq, dk), strict=True):
                t.copy_(placed.pull(t))


def _blocks(allowed: Bool[Tensor, "*b n n"] | None, n: int) -> list[tuple[slice, slice]]:
    """Queries in blocks, each with the keys up to the last one that any of them may attend to."""
    if allowed is None or waits(allowed.device):
        return [(slice(0, n), slice(0, n))]
    numbers = torch.arange(1, n + 1, device=allowed.device)
    reach = (allowed.reshape(-1, n, n).any(0) * numbers).amax(-1).tolist()
    starts = range(0, n, _BLOCK)
    return [(slice(i, min(i + _BLOCK, n)), slice(0, max(reach[i : i + _BLOCK]))) for i in starts]
