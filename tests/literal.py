"""Formulas of the LoFAST paper (Havens et al. 2024), written out with dense matrices, for one input (n, d).

The code shares nothing with the library but the layer's arguments and its probabilities. Where a layer has more than
the paper's, the formulas read: the query bias joins x_iᵀ W^Q, pairs that a mask forbids are left out, the scale is any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast import AttentionLayer


def norm(matrix: Tensor) -> Tensor:
    """The spectral norm."""
    return torch.linalg.matrix_norm(matrix, ord=2)


@dataclass(frozen=True)
class Head:
    """One head's matrices; a key-value head may serve several."""

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    b_q: Tensor | float


def heads(layer: AttentionLayer) -> list[Head]:
    group = layer.h // layer.g
    return [
        Head(
            layer.w_q[l],
            layer.w_k[l // group],
            layer.w_v[l // group],
            layer.w_o[l],
            0.0 if layer.b_q is None else layer.b_q[l],
        )
        for l in range(layer.h)  # noqa: E741 - the paper's letter
    ]


def pairs(layer: AttentionLayer, n: int) -> Tensor:
    """(n, n) 1 where attention is allowed."""
    allowed = layer.allowed(n)
    return torch.ones(n, n, dtype=torch.float64) if allowed is None else allowed.double()


def value_matrix(layer: AttentionLayer, x: Tensor) -> Tensor:
    """H ⊗ I + Σ_l P_l ⊗ (W_l^V W_l^O)ᵀ, the matrix in (12); rows of the tokens stand one after another."""
    n, d = x.shape
    matrix = torch.kron(torch.eye(n, dtype=torch.float64), layer.residual * torch.eye(layer.d_out, d).double())
    for P, head in zip(layer.attention(x), heads(layer), strict=True):
        matrix = matrix + torch.kron(P, (head.w_v @ head.w_o).T.contiguous())
    return matrix


def score_matrix(layer: AttentionLayer, x: Tensor, head: Head) -> Tensor:
    """M_l(X) of (20), times the scale."""
    n = len(x)
    eye = torch.eye(n, dtype=torch.float64)
    M = torch.kron(eye, x @ head.w_k @ head.w_q.T)
    for i in range(n):
        M = M + torch.kron(torch.kron(eye[:, i : i + 1], eye), ((x[i] @ head.w_q + head.b_q) @ head.w_k.T).unsqueeze(0))
    return layer.scale * M * pairs(layer, n).reshape(-1, 1)


class Lofast:
    """Every quantity of sections 4 and 5.1; lists over heads are tensors (h)."""

    def __init__(self, layer: AttentionLayer, x: Tensor) -> None:
        every = heads(layer)
        A = [abs(layer.scale) * head.w_q @ head.w_k.T for head in every]
        C = [head.w_v @ head.w_o for head in every]
        queries = [x @ head.w_q + head.b_q for head in every]
        self.norm_X = norm(x)
        self.norm_P = torch.stack([norm(P) for P in layer.attention(x)])
        self.norm_A = torch.stack([norm(a) for a in A])
        self.norm_C = torch.stack([norm(c) for c in C])
        self.norm_XC = torch.stack([norm(x @ c) for c in C])
        self.naive_gain = abs(layer.residual) + (self.norm_C * self.norm_P).sum()  # (9)
        self.zeta = norm(value_matrix(layer, x))  # (12)
        self.norm_M = torch.stack([norm(score_matrix(layer, x, head)) for head in every])  # (20)
        keys = [abs(layer.scale) * q @ head.w_k.T for q, head in zip(queries, every, strict=True)]
        self.xi = torch.stack([norm(a @ x.T) + norm(key) for a, key in zip(A, keys, strict=True)])  # (21)

    def terms(self, method: str, eps: float) -> dict[str, Tensor]:
        """The quantities that depend on eps, and the bound itself."""
        gain = self.naive_gain if method == "naive" else self.zeta
        scores = self.norm_M if method == "lofast" else self.xi
        delta_21 = eps * (scores + eps * self.norm_A)
        delta_22 = self.norm_XC + eps * self.norm_C  # (15)
        delta_2 = (delta_21 * delta_22).sum()
        return {
            "delta_1": eps * gain,
            "delta_21": delta_21,
            "delta_22": delta_22,
            "delta_22_naive": self.norm_C * (self.norm_X + eps),
            "delta_2": delta_2,
            "value": eps * gain + delta_2,
        }


def moved(layer: AttentionLayer, x: Tensor, z: Tensor, objective: str) -> Tensor:
    """What an attack maximises, for a perturbed input z (n, d), or (h, n, d) where each head has its own."""
    every = heads(layer)
    if objective == "output":
        return (layer(z) - layer(x)).norm()
    if objective == "delta-2":  # (13)
        change = layer.attention(z) - layer.attention(x)
        return sum((p @ z @ head.w_v @ head.w_o for p, head in zip(change, every, strict=True)), torch.zeros(1)).norm()
    if objective == "delta-21":  # (16)
        return torch.stack([(layer.attention(z[l]) - layer.attention(x))[l].norm() for l in range(layer.h)])  # noqa: E741
    if objective == "scores":  # (18)
        allowed, results = pairs(layer, len(x)), []
        for head, own in zip(every, z, strict=True):
            G, A = own - x, layer.scale * head.w_q @ head.w_k.T
            key = layer.scale * (x @ head.w_q + head.b_q) @ head.w_k.T
            results.append(((G @ A @ x.T + key @ G.T + G @ A @ G.T) * allowed).norm())
        return torch.stack(results)
    assert objective == "delta-22"  # (15)
    return torch.stack([norm(own @ head.w_v @ head.w_o) for head, own in zip(every, z, strict=True)])
