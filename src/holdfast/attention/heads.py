"""The Jacobian of every head alone: how much each contributes to the slope of its layer."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.layer import AttentionLayer
from holdfast.errors import NotApplicableError
from holdfast.linalg.operator import LinearOperator


@final
class HeadJacobians(LinearOperator):
    """X ↦ P_l X W_l^V W_l^O at x for each head l, up to isometries that leave every singular value alone.

    The batch is that of x, then the heads. A head sees a direction G only through G [W^Q, W^K, W^V] and answers in the
    row space of W^O. With QR decompositions [W^Q, W^K, W^V] = U R and (W^O)ᵀ = V T, it is therefore enough to know it
    between (n, 3k) and (n, k): Z ↦ (dY of Z R) Tᵀ.
    """

    def __init__(self, layer: AttentionLayer, x: Float[Tensor, "*b n d"]) -> None:
        if (layer.q_norm is not None and layer.q_norm.across) or (layer.k_norm is not None and layer.k_norm.across):
            raise NotApplicableError("a norm over all heads together leaves no head alone")
        w, parts = layer.weights(x), layer.run(x)
        self._placed = layer.placed(x)
        slope = layer.cap_slope(parts)
        self._widths = [map_.shape[-1] for map_ in (w.w_q, w.w_k, w.w_v)]
        self._r = torch.linalg.qr(torch.cat([w.w_q, w.w_k, w.w_v], -1), mode="r").R
        self._t = torch.linalg.qr(w.w_o.mT, mode="r").R.mT
        self._q, self._k = parts.q * layer.scale, parts.k * layer.scale
        self._v, self._p, self._y = parts.v, parts.p, parts.y
        self._steep = parts.p if slope is None else parts.p * slope
        n = x.shape[-2]
        domain, codomain = torch.Size((n, self._r.shape[-2])), torch.Size((n, self._t.shape[-1]))
        super().__init__(torch.Size((*x.shape[:-2], layer.h)), domain, codomain, x)

    def mv(self, v: Float[Tensor, "*m h n r"]) -> Float[Tensor, "*m h n t"]:
        dq, dk, dv = (v @ self._r).split(self._widths, -1)
        dq, dk = (placed.push(d) for placed, d in zip(self._placed, (dq, dk), strict=True))
        weighted = self._steep * (dq @ self._k.mT + self._q @ dk.mT)
        # p' = p ∘ (s' - E_p s'), so the mean of s' along a row multiplies the row's output.
        dy = weighted @ self._v + self._p @ dv - weighted.sum(-1, keepdim=True) * self._y
        out: Tensor = dy @ self._t
        return out

    def rmv(self, u: Float[Tensor, "*m h n t"]) -> Float[Tensor, "*m h n r"]:
        dy = u @ self._t.mT
        ds = self._steep * (dy @ self._v.mT - (dy * self._y).sum(-1, keepdim=True))
        dq, dk = (placed.pull(d) for placed, d in zip(self._placed, (ds @ self._k, ds.mT @ self._q), strict=True))
        out: Tensor = torch.cat([dq, dk, self._p.mT @ dy], -1) @ self._r.mT
        return out
