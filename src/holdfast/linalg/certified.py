"""Proved upper bounds of spectral norms."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from holdfast.errors import MemoryLimitError, NotFiniteError
from holdfast.linalg.lanczos import top_eigenvalue
from holdfast.linalg.operator import Gram, ProvableOperator
from holdfast.linalg.rounding import ROOT2, UNIT, Ball, frobenius_upper, gamma
from holdfast.results import NormResult

GIB = 2**30
_FIRST_MARGIN = 5e-9
_BLOCK = 256  # columns of a factor at a time
_AT_ONCE = {"cpu": GIB / 8}  # bytes of several members of a batch: those that leave the cache gain nothing together


def upper(operator: ProvableOperator, *, memory_limit: float = 8 * GIB) -> NormResult:
    """A float64 that is not below the largest singular value of any exact map in the batch.

    The Gram matrix G of the smaller side is enclosed (its error ε_G holds the rounding of the product and of the
    entries of the map). A shift τ slightly above an estimate of λ_max(G) is tried: Cholesky gives a factor L of
    A = fl(τI - G), and whatever L is, LLᵀ is positive semidefinite, hence

        λ_max(G) = τ - λ_min(τI - G) <= τ + ‖A - LLᵀ‖ + ‖A - (τI - G)‖.

    The two norms are bounded from the computed residual R of A - LLᵀ: ‖A - LLᵀ‖ <= ‖R‖_F + γ_{N+4} (‖L‖_F² + ‖R‖_F)
    and the diagonal of A was rounded once. So the factorisation is checked after the fact and need not be trusted
    (Rump 2006 and Demmel 1989 bound the same defect beforehand, by γ_{N+1}/(1-γ_{N+1}) tr A, for a Cholesky by
    substitution). If Cholesky breaks down, τ was too small; it is raised and tried again.

    The estimate only proposes τ; the proof does not use it.

    Args:
        operator: the maps.
        memory_limit: bytes that may be held at once; members of the batch are taken in turn to stay below it.

    Raises:
        MemoryLimitError: if one member alone needs more, before anything is allocated.
    """
    began = time.perf_counter()
    side = min(operator.domain.numel(), operator.codomain.numel())
    need = 8 * (operator.doubles + 3 * side * side)
    if need > memory_limit:
        raise MemoryLimitError(
            f"a proved norm of a {operator.codomain.numel()} x {operator.domain.numel()} map needs "
            f"{need / GIB:.2f} GiB and the limit is {memory_limit / GIB:.2f} GiB; raise memory_limit, use fewer "
            'tokens, or ask for guarantee="numerical"'
        )
    count = operator.batch.numel()
    step = max(1, int(min(count, min(memory_limit, _AT_ONCE.get(operator.device.type, memory_limit)) / need)))
    parts = [_prove(operator.part(i, min(i + step, count)).gram(), _FIRST_MARGIN) for i in range(0, count, step)]
    return NormResult(
        value=_finite(torch.cat([part.value for part in parts])).reshape(operator.batch),
        side="upper",
        guarantee="proved",
        residual=torch.cat([part.residual for part in parts]).reshape(operator.batch),
        iterations=max(part.iterations for part in parts),
        seconds=time.perf_counter() - began,
    )


def gram_upper(matrix: Tensor, error: Tensor, tolerance: float) -> Tensor:
    """√λ_max, proved, of symmetric matrices (b, m, m) that are known within `error` (b); it may be infinite.

    Args:
        matrix: whose lower triangles count.
        error: in the spectral norm.
        tolerance: how far λ_max may be exceeded, relative: a larger one costs less.
    """
    finite = torch.isfinite(error) & torch.isfinite(frobenius_upper(matrix))
    safe = torch.where(finite[:, None, None], matrix, 0.0)
    gram = Gram(safe, torch.where(finite, error, 0.0), torch.ones_like(error))
    return torch.where(finite, _prove(gram, tolerance).value, torch.inf)


def _prove(gram: Gram, tolerance: float) -> NormResult:
    G = gram.matrix
    # ‖G‖_F bounds λ_max without any shift; it serves where G vanishes or no shift succeeds.
    bound = _finite(frobenius_upper(G))
    guess = _largest_eigenvalue(G, tolerance / 5)
    todo = guess > 0
    margin, trials = tolerance, 0
    while bool(todo.any()) and margin < 1:
        index = todo.nonzero().squeeze(-1)
        proved = _shifted(G[index] if len(index) < len(G) else G, guess[index] * (1 + margin))
        bound[index] = torch.minimum(bound[index], proved)
        todo[index] = ~torch.isfinite(proved)
        margin, trials = margin * 10, trials + 1
    value = ((Ball.exact(bound) + gram.error).sqrt() * gram.scale).upper
    return NormResult(value, "upper", "proved", value - guess.clamp(min=0).sqrt() * gram.scale, trials)


def _finite(value: Tensor) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise NotFiniteError("a proved norm is not finite: the map overflows float64; scale the weights or the input")
    return value


def _largest_eigenvalue(G: Tensor, tolerance: float) -> Tensor:
    """An estimate, to propose a shift."""
    if G.shape[-1] <= 96:
        eigenvalues: Tensor = torch.linalg.eigvalsh(G)
        return eigenvalues[..., -1]
    return top_eigenvalue(lambda v: G @ v, G, tolerance)


def _shifted(G: Tensor, tau: Tensor) -> Tensor:
    """A proved bound of λ_max(G) from the shift `tau`; infinite where Cholesky breaks down."""
    A = -G
    A.diagonal(dim1=-2, dim2=-1).add_(tau.unsqueeze(-1))
    rounding = Ball.exact(A.diagonal(dim1=-2, dim2=-1).abs().amax(-1)) * (2 * UNIT)
    holds, defect = _factor(A, _BLOCK)
    proved = (Ball.exact(tau) + defect + rounding).upper
    return torch.where(holds & torch.isfinite(proved), proved, torch.full_like(proved, torch.inf))


def _factor(A: Tensor, block: int) -> tuple[Tensor, Ball]:
    """Puts a factor L in the place of the lower triangle of A, by blocks of columns.

    Returns whether Cholesky went through, and a bound of ‖A - LLᵀ‖ for the symmetric matrix whose lower triangle is
    A's. It is checked where it was made: of a block of columns B = L[start:, :stop], S = fl(A - what the columns before
    it give) less the product of B with its own top is the residual. S and the residual are rounded, by less than
    γ|L||Lᵀ| and the residual itself allow for (docs/math/rounding.md).
    """
    size = A.shape[-1]
    holds = torch.ones(A.shape[:-2], dtype=torch.bool, device=A.device)
    residuals, lengths = [], []
    for start in range(0, size, block):
        stop = min(start + block, size)
        S = A[..., start:, start:stop]
        if start:
            S = S - A[..., start:, :start] @ A[..., start:stop, :start].mT
        top, info = torch.linalg.cholesky_ex(S[..., : stop - start, :])
        L = top = top.tril()  # whatever it is, it is lower triangular
        if stop < size:
            below = torch.linalg.solve_triangular(top.mT, S[..., stop - start :, :], upper=True, left=False)
            L = torch.cat([top, below], -2)
        residuals.append(frobenius_upper(S - L @ top.mT))
        lengths.append(frobenius_upper(L))
        A[..., start:, start:stop] = L
        holds = holds & (info == 0)
        if not bool(holds.any()):
            break
    residual = Ball.exact(_together(residuals)) * ROOT2  # each entry below the diagonal stands twice
    return holds, residual + (Ball.exact(_together(lengths)).square() + residual) * gamma(size + 4)


def _together(norms: list[Tensor]) -> Tensor:
    """A bound of the Frobenius norm of blocks from those of each."""
    return norms[0] if len(norms) == 1 else frobenius_upper(torch.stack(norms, -1), (-1,))
