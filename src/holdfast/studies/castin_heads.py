"""The heads on which the statements of Castin, Ablin and Peyré (2024) are measured.

Single heads with C = W^V W^O = I and a Gaussian A of given norm, so that the paper's constants
apply as they stand.
"""

from __future__ import annotations

import torch

from holdfast.attention import AttentionLayer


def single_head(d: int, norm: float, seed: int, *, causal: bool = False) -> AttentionLayer:
    """One head with C = I and scores ⟨A x_i, x_j⟩, ‖A‖ = norm."""
    A = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    identity = torch.eye(d, dtype=torch.float64).unsqueeze(0)
    A = A * (norm / torch.linalg.matrix_norm(A, 2))
    return AttentionLayer(A.unsqueeze(0), identity, identity, identity, scale=1.0, causal=causal)


def gamma_of(layer: AttentionLayer) -> float:
    """The paper's max(-γ_min, γ_max/8) over the real eigenvalues of A."""
    values = torch.linalg.eigvals(layer.w_q[0])
    real = values.real[values.imag.abs() < 1e-12 * values.abs()]
    return max(0.0, -real.min().item(), real.max().item() / 8) if len(real) else 0.0
