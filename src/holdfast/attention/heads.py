"""The Jacobian of every head alone: how much each contributes to the slope of its layer."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attention.layer import AttentionLayer
from holdfast.attention.tangents import HeadTangents
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
        w = layer.weights(x)
        self._heads = HeadTangents(layer, x, layer.run(x))
        self._widths = [map_.shape[-1] for map_ in (w.w_q, w.w_k, w.w_v)]
        self._r = torch.linalg.qr(torch.cat([w.w_q, w.w_k, w.w_v], -1), mode="r").R
        self._t = torch.linalg.qr(w.w_o.mT, mode="r").R.mT
        n = x.shape[-2]
        domain, codomain = torch.Size((n, self._r.shape[-2])), torch.Size((n, self._t.shape[-1]))
        super().__init__(torch.Size((*x.shape[:-2], layer.h)), domain, codomain, x)

    def mv(self, v: Float[Tensor, "*m h n r"]) -> Float[Tensor, "*m h n t"]:
        out: Tensor = self._heads.push(*torch.split(v @ self._r, self._widths, -1)) @ self._t
        return out

    def rmv(self, u: Float[Tensor, "*m h n t"]) -> Float[Tensor, "*m h n r"]:
        moved = u.new_zeros(*u.shape[:-1], self._r.shape[-1])
        dq, dk, dv = torch.split(moved, self._widths, -1)
        self._heads.pull(u @ self._t.mT, (dq, dk, dv))
        out: Tensor = moved @ self._r.mT
        return out
