"""The least value of a cubic polynomial on a ball, from below."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.linalg.rounding import frobenius, frobenius_upper, gamma, up

_STEPS = 60


@final
class Cubic:
    """Polynomials g·G + GᵀHG/2 + T[G, G, G]/6.

    With P = (Σ_q T_q²)^{1/2}, T_q the slices of T, every combination Σ v_q T_q with ‖v‖ <= 1 lies between -P and P: its
    square is at most Σ_q T_q² (Cauchy-Schwarz for operators), and the root is operator monotone. So
    T[G, G, G] >= -eps GᵀPG on the ball, and what is left is a quadratic polynomial.

    Args:
        g: (…, p).
        H: (…, p, p), symmetric.
        T: (…, p, p, p), symmetric.
    """

    def __init__(
        self, g: Float64[Tensor, "*b p"], H: Float64[Tensor, "*b p p"], T: Float64[Tensor, "*b p p p"]
    ) -> None:
        self._g, self._H = g, H
        slices = T.flatten(-3, -2)  # (…, p², p)
        square = slices.mT @ slices
        rounding = gamma(slices.shape[-2] + 8) * frobenius_upper(slices).square()
        values, vectors = _decomposed(square)
        root = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
        root = (root + root.mT) / 2
        # Whatever `root` is: Σ T_q² <= R² + ρ I gives P <= |R| + √ρ I, and R is within its own rounding of a square.
        back = Ball.exact(root) @ root
        rho = frobenius_upper(square - back.mid) + frobenius_upper(back.rad) + 2 * rounding
        negative = gamma(4 * T.shape[-1]) * torch.linalg.matrix_norm(root) * T.shape[-1]
        eye = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
        self._P = root + up((rho.sqrt() + 2 * negative)[..., None, None] * eye, 1e-12)

    def least(self, eps: Float64[Tensor, "*b"]) -> Float64[Tensor, "*b"]:
        """A lower bound of the minimum over ‖G‖ <= eps.

        For any μ >= 0 with B = H - (eps/3) P + μ I positive semidefinite and any z, with r = Bz + g,
        g·G + GᵀHG/2 + T[G,G,G]/6 >= -‖r‖ eps - zᵀBz/2 - μ eps²/2: the quadratic form of G - z is not negative.
        """
        third = (eps / 3)[..., None, None]
        exact = Ball.exact(self._H) - Ball.exact(third) * self._P
        A = exact.mid
        w, U = _decomposed(A)
        mu = _multiplier(w, (U.mT @ self._g.unsqueeze(-1)).squeeze(-1), eps)
        off = 4 * _decomposition_error(A, w, U) + frobenius_upper(exact.rad)
        mu = torch.maximum(mu, -w[..., 0] + off).clamp(min=0.0)
        z = -(U @ ((U.mT @ self._g.unsqueeze(-1)) / (w + mu.unsqueeze(-1)).clamp(min=1e-300).unsqueeze(-1)))
        z = torch.where(torch.isfinite(z), z, 0.0)
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        B = exact + Ball.exact(mu[..., None, None] * eye)
        Bz = B @ z
        r = frobenius(Bz + self._g.unsqueeze(-1), (-2, -1))
        bent = (Bz.mT @ z).squeeze(-1).squeeze(-1)
        e = Ball.exact(eps)
        lost: Tensor = (r * e + bent * 0.5 + Ball.exact(mu) * e * e * 0.5).upper
        return -lost


def _multiplier(w: Tensor, g: Tensor, eps: Tensor) -> Tensor:
    """μ with ‖(w + μ)^{-1} g‖ = eps, by bisection; close is good enough."""
    low = (-w[..., 0]).clamp(min=0.0)
    high: Tensor = low + torch.linalg.vector_norm(g, dim=-1) / eps + 1e-300
    for _ in range(_STEPS):
        middle = (low + high) / 2
        short = torch.linalg.vector_norm(g / (w + middle.unsqueeze(-1)), dim=-1) <= eps
        low, high = torch.where(short, low, middle), torch.where(short, middle, high)
    return high


def _decomposed(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors; any where A is not finite: what is made of them and of A is not a number either."""
    w, U = torch.linalg.eigh(torch.where(torch.isfinite(A), A, 0.0))
    return w, U


def _decomposition_error(A: Tensor, w: Tensor, U: Tensor) -> Tensor:
    """How far the least eigenvalue of A may be below w_0: ‖A - U w Uᵀ‖ + ‖w‖ ‖UᵀU - I‖, with the rounding of both."""
    size = w.shape[-1]
    norm = w.abs().amax(-1)
    again = (U * w.unsqueeze(-2)) @ U.mT
    eye = torch.eye(size, dtype=A.dtype, device=A.device)
    turned = torch.linalg.matrix_norm(U.mT @ U - eye) + gamma(size + 8) * size
    error: Tensor = torch.linalg.matrix_norm(A - again)
    error = error + gamma(size + 8) * size * norm + 4 * norm * turned
    return error
