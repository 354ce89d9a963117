"""JaSMin: a penalty on how fast the softmax of an attention layer can move.

After Yudin, Gaponov, Kudriashov and Rakhuba (yudin2025). For a row of probabilities p_1 ≥ p_2 ≥ …, the Jacobian of
softmax has eigenvalues λ_k ≤ g_k = p_k (1 - p_k + p_{k+1}). The penalty of a row is log g_1 (k = 0) or log(g_1 / g_k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from holdfast.errors import InputError

Reduction = Literal["mean", "sum", "max"]

# Entries that are examined together: what a cache holds, or enough to keep a GPU busy.
_CPU_CHUNK, _GPU_CHUNK = 2**16, 2**26


def jasmin(
    p: Float[Tensor, "*b n m"],
    k: int = 0,
    reduction: Reduction = "mean",
    *,
    mask: Bool[Tensor, "*b n m"] | None = None,
    log_probabilities: bool = False,
) -> Float[Tensor, ""]:
    """The JaSMin penalty of attention probabilities: the largest over the rows, then reduced over batch and heads.

    Rows with one allowed entry carry no information and are left out; a row with fewer than k + 1 allowed entries uses
    what it has, as if k were their number less one. Underflowing probabilities give finite values and gradients.

    Args:
        p: (b…, n, m) probabilities, each row a distribution, or their logarithms.
        k: 0 for log g_1, which rows lower by becoming flat or, without end, one-hot; k ≥ 2 for log(g_1 / g_k) ≥ 0,
            which every row lowers by becoming flat, and which is 0 where its k + 1 largest entries are equal.
        reduction: over batch and heads.
        mask: True where a query may attend; broadcasts to p. Without it, an entry of exactly 0 counts as masked: pass
            it where an allowed probability may underflow to 0, or pass logarithms.
        log_probabilities: p holds logarithms, -inf where masked.

    Example:
        >>> p = scores.softmax(-1)  # (b, h, n, n)
        >>> loss = task_loss + 0.01 * jasmin(p, k=10)
    """
    check_options(k, reduction)
    if p.ndim < 2 or not p.is_floating_point() or 0 in p.shape:
        raise InputError(f"p is {p.dtype} of shape {tuple(p.shape)}; expected probabilities (…, n, n)")
    batch = p if p.ndim > 2 else p.unsqueeze(0)
    allowed = None if mask is None else _broadcast(mask, batch)

    def scores(part: slice, row: Int[Tensor, "*b"] | None) -> Tensor:
        chosen = None if allowed is None else pick(allowed[part], row)
        return _logarithms(widened(pick(batch[part], row)), chosen, log_probabilities)

    return reduce(worst_rows(scores, len(batch), batch[0].numel(), k, p.device), reduction)


def check_options(k: int, reduction: str) -> None:
    """Refuses options that make no sense."""
    if k == 1:
        raise InputError("k is 1; log(g_1 / g_1) is always 0: use k=0, or k of at least 2")
    if not isinstance(k, int) or k < 0:
        raise InputError(f"k is {k!r}; expected 0 or an integer of at least 2")
    if reduction not in ("mean", "sum", "max"):
        raise InputError(f'reduction is {reduction!r}; expected "mean", "sum" or "max"')


def worst_rows(
    scores: Callable[[slice, Tensor | None], Tensor], b: int, size: int, k: int, device: torch.device
) -> Float[Tensor, "*b"]:
    """The largest penalty over the rows of each matrix of scores; -inf where no row carries information.

    The gradient of a maximum is that of the row that attains it. So all rows are examined without gradient, and only
    that row is computed again with it.

    Args:
        scores: of a part of the batch: (c, …, n, m) for all rows, (c, …, 1, m) for a row of each; -inf where masked.
        b: size of the batch.
        size: entries of the scores of one member of the batch.
        k: of the penalty.
        device: where the scores are.
    """
    step = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // size)
    with torch.no_grad():
        parts = (slice(start, start + step) for start in range(0, b, step))
        row = torch.cat([row_penalties(scores(part, None), k).argmax(-1) for part in parts])
    return row_penalties(scores(slice(None), row), k).squeeze(-1)


def row_penalties(s: Float[Tensor, "*b m"], k: int) -> Float[Tensor, "*b"]:
    """The penalty log g_1, or log(g_1 / g_k), of softmax(s); -inf where fewer than two entries are allowed.

    With t_1 ≥ t_2 ≥ … the sorted scores, r = t_1 - t_2 and T = Σ_{i≥2} exp(s_i - t_2), the sum of the exponentials is
    exp(t_2 + L), L = log(e^r + T), so p_j = exp(t_j - t_2 - L) and 1 - p_1 + p_2 = (1 + T) e^{-L}. Nothing cancels, and
    nothing over- or underflows.
    """
    if s.shape[-1] < 2:
        return s.new_full(s.shape[:-1], -math.inf)
    t, rest = _leading(s, min(max(k, 1) + 1, s.shape[-1]))
    alone = t[..., 1:2] == -math.inf
    t_2 = t[..., 1:2].masked_fill(alone, 0.0)
    r = t[..., :1].masked_fill(alone, 0.0) - t_2
    T = (rest - t_2).exp_().sum(-1, keepdim=True)
    log_p_1 = -(T * (-r).exp()).log1p()
    L = r - log_p_1
    penalty = log_p_1 + T.log1p()
    if k == 0:
        penalty = penalty - L
    elif t.shape[-1] == 2:
        penalty = torch.zeros_like(penalty)
    else:
        # g_k of the largest k, up to the one given, that has p_{k+1}: p_k ≤ 1/2, so 1 - p_k does not cancel.
        last = (t > -math.inf).sum(-1, keepdim=True) - 1
        at, u = last.clamp(min=2), t - t_2
        u_k, u_next = u.gather(-1, at - 1), u.gather(-1, at)
        spread = ((u_next - L).exp() - (u_k - L).exp()).log1p()
        penalty = torch.where(last > 1, penalty - u_k - spread, 0.0)
    penalty = penalty.masked_fill(alone, -math.inf)
    return penalty.squeeze(-1)


def _leading(s: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row in order, and all but the largest in any order."""
    if s.device.type == "cpu" and not s.requires_grad:
        # numpy sorts a short row five times faster than torch finds its largest entries.
        ascending = torch.from_numpy(np.sort(s.numpy()))
        return ascending[..., -count:].flip(-1), ascending[..., :-1]
    largest = s.topk(count)
    return largest.values, s.scatter(-1, largest.indices[..., :1], -math.inf)


def reduce(penalties: Tensor, reduction: Reduction) -> Float[Tensor, ""]:
    """Over all that carry information (not -inf); 0 where nothing does."""
    counted = penalties > -math.inf
    kept = penalties.masked_fill(~counted, 0.0)
    match reduction:
        case "mean":
            return kept.sum() / counted.sum().clamp(min=1)
        case "sum":
            return kept.sum()
        case "max":
            return torch.where(counted.any(), penalties.amax(), 0.0)


def pick(t: Tensor, row: Tensor | None) -> Tensor:
    """Row row[i] of each matrix t[i], or all rows: (…, n, m) to (…, 1, m)."""
    return t if row is None else t.take_along_dim(row[..., None, None], -2)


def widened(t: Tensor) -> Tensor:
    """In float32 at least."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _logarithms(p: Tensor, allowed: Tensor | None, done: bool) -> Tensor:
    if done:
        return p if allowed is None else p.masked_fill(~allowed, -math.inf)
    allowed = p > 0 if allowed is None else allowed
    # The clamp keeps the derivative 1/p finite.
    return p.clamp(min=torch.finfo(p.dtype).tiny).log().masked_fill(~allowed, -math.inf)


def _broadcast(mask: Tensor, p: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise InputError(f"mask is {mask.dtype}; expected a bool tensor, True where attention is allowed")
    try:
        return mask.expand(p.shape)
    except RuntimeError:
        raise InputError(
            f"mask has shape {tuple(mask.shape)}; expected one that broadcasts to {tuple(p.shape)}"
        ) from None
