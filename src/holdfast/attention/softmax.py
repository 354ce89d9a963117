"""The Jacobian of softmax, M(p) = diag(p) - ppᵀ: its norm, exactly and by bounds (docs/math/softmax.md).

Rounding leaves rows whose sum S is not quite 1. Such a row stands for p/S, and what is computed is S² M(p/S), which is
diag(Sp) - ppᵀ: so 1 - p_1 is always the sum of the tail. Relative errors of the entries are then relative errors of the
norm, also where p_1 is near 1. The powers of S, and where S is far from 1 other readings of the row, are paid for last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from holdfast.errors import HoldfastError, InputError
from holdfast.linalg.rounding import FLOOR, UNIT, down, up

UpperMethod = Literal["exact", "g1", "u2"]
SoftmaxMethod = Literal["exact", "g1", "u2", "lower"]

_LEAST = 2.0**-1070  # pays for a few roundings of subnormal numbers
_NEWTON_STEPS = 6  # five reach the last digit from the lower bound
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def softmax_jacobian_norm(p: Float[Tensor, "*b n"], method: SoftmaxMethod = "exact") -> Float[Tensor, "*b"]:
    """The spectral norm of the Jacobian of softmax at probabilities p, over the last dimension.

    "exact", "g1" and "u2" are rounded up and "lower" down, for the row p/S with S its sum; and also for diag(p) - ppᵀ
    of the numbers as they stand, except in float64 where S, as computed, is within (n + 16) 2⁻⁵³ of 1. There "exact"
    has a relative accuracy of 1e-10 for n up to 50,000.

    Args:
        p: probabilities, of any floating dtype; computed in float64.
        method: "exact"; "g1" = p_1 (1 - p_1 + p_2), at most 1.172 times the norm; "u2", tighter, from the three largest
            entries; or "lower", a lower bound within a few percent.

    Returns:
        The norms in the dtype of p, differentiable once (as ‖diag(Sp) - ppᵀ‖); at a kink, some subgradient.

    Example:
        >>> softmax_jacobian_norm(torch.tensor([0.5, 0.5, 0.0]), "g1")
        tensor(0.5000)
    """
    if method not in get_args(SoftmaxMethod):
        raise InputError(f"method is {method!r}; expected one of {', '.join(get_args(SoftmaxMethod))}")
    _check(p)
    norm: Tensor = _Norm.apply(p, method)  # type: ignore[no-untyped-call]
    return norm


def g_k(p: Float[Tensor, "*b n"], k: int) -> Float[Tensor, "*b"]:
    """A bound p_k (1 - p_k + p_{k+1}) of the k-th eigenvalue of M(p), from the sorted probabilities, p_{n+1} = 0.

    g_1 >= g_2 >= …, and g_1 <= ½ (Yudin et al. 2025). Rounded up for the rows for which `softmax_jacobian_norm` is, and
    differentiable once.

    Args:
        p: probabilities, of any floating dtype; computed in float64.
        k: from 1 to n.
    """
    _check(p)
    if not isinstance(k, int) or not 1 <= k <= p.shape[-1]:
        raise InputError(f"k is {k!r}; expected a whole number from 1 to the {p.shape[-1]} entries of a row")
    value: Tensor = _Norm.apply(p, k)  # type: ignore[no-untyped-call]
    return value


def covering_norm(q: Float[Tensor, "*b n"], method: UpperMethod) -> Float[Tensor, "*b"]:
    """A proved bound of ‖M(p)‖ for all probabilities p <= q entry by entry, q in float64.

    M(p) ⪯ diag(q) - qqᵀ/S with S the sum of q (docs/math/second-order.md, Lemma 2), and ‖M(p)‖ <= ½.
    """
    rows = SoftmaxRows(q)
    return (rows.upper(method) / rows.total * rows.growth + FLOOR).clamp(max=0.5)


def _check(p: Tensor) -> None:
    if not isinstance(p, Tensor) or not p.dtype.is_floating_point or p.ndim == 0 or p.numel() == 0:
        given = f"{p.dtype} of shape {tuple(p.shape)}" if isinstance(p, Tensor) else type(p).__name__
        raise InputError(f"p is {given}; expected a floating tensor of probabilities (…, n)")
    values = p.detach().double()
    least, off = float(values.amin()), float((values.sum(-1) - 1).abs().amax())
    if not (least >= 0 and off <= max(1e-2, 4 * torch.finfo(p.dtype).eps)):  # a NaN fails too
        raise InputError(
            f"p has the least entry {least:g} and a row that misses the sum 1 by {off:g}; expected probabilities; "
            "for scores, apply softmax first"
        )


@final
class _Norm(torch.autograd.Function):
    """A method of `softmax_jacobian_norm`, or k for g_k: rounded outward, with the derivative of what was rounded."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, method: SoftmaxMethod | int) -> Tensor:
        ctx.save_for_backward(p)
        ctx.method = method
        rows = SoftmaxRows(p.double())
        literal = rows.misses_one | (p.dtype != torch.float64)
        if method == "lower":
            return _narrow(rows.lower_of_all_readings(literal), p.dtype, -1)
        return _narrow(rows.upper_of_all_readings(method, literal), p.dtype, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise HoldfastError("the norm of softmax's Jacobian has no second derivative here; use create_graph=False")
        (p,) = ctx.saved_tensors
        if ctx.method == "exact":
            return (SoftmaxRows(p.double()).exact_slopes() * gradients[0].unsqueeze(-1)).to(p.dtype), None
        with torch.enable_grad():
            q = p.detach().double().requires_grad_()
            value = SoftmaxRows(q).closed_form(ctx.method)
            slopes = torch.autograd.grad(value, q, gradients[0].double())[0]
        return slopes.to(p.dtype), None


def _narrow(value: Tensor, dtype: torch.dtype, side: Literal[-1, 1]) -> Tensor:
    """Values that are not negative, in a narrower type, rounded up (1) or down (-1)."""
    near = value.to(dtype)
    bits = near.view(_BITS[dtype.itemsize])  # neighbouring floats of one sign have neighbouring bits
    wrong = near.double() < value if side == 1 else near.double() > value
    return torch.where(wrong, (bits + side).view(dtype), near)


@final
@dataclass(frozen=True)
class SoftmaxRows:
    """Rows p (…, n) of float64 numbers that are not negative, and what is known about ‖diag(Sp) - ppᵀ‖ = S² ‖M(p/S)‖.

    p_1 >= p_2 >= … are the sorted entries, S their sum, t = S - p_1, r = S - p_1 - p_2.
    """

    p: Float[Tensor, "*b n"]

    @cached_property
    def _padded(self) -> Tensor:
        return pad(self.p, (0, max(0, 3 - self.p.shape[-1])))

    @cached_property
    def _top(self) -> tuple[Tensor, Tensor]:
        """(…, 3) the three largest entries, and where they are."""
        top = self._padded.topk(3, -1)
        return top.values, top.indices

    @cached_property
    def _others(self) -> Tensor:
        """The row without its largest entry."""
        return self._padded.scatter(-1, self._top[1][..., :1], 0.0)

    @cached_property
    def tail(self) -> Tensor:
        """(…) t."""
        return self._others.sum(-1)

    @cached_property
    def _rest(self) -> Tensor:
        """(…) r."""
        return self._others.scatter(-1, self._top[1][..., 1:2], 0.0).sum(-1)

    @cached_property
    def total(self) -> Tensor:
        """(…) S."""
        return self._top[0][..., 0] + self.tail

    @property
    def misses_one(self) -> Tensor:
        """(…) whether S, as computed, differs from 1 by more than rounding explains."""
        return (self.total - 1).abs() > self._unit_errors

    @property
    def _unit_errors(self) -> float:
        """What a sum of n terms and a few operations may lose, relatively."""
        return (self.p.shape[-1] + 16) * UNIT

    # -- closed forms, up to rounding

    def closed_form(self, method: SoftmaxMethod | int) -> Tensor:
        """(…) a method other than "exact" by its name, or g_k by k."""
        value: Tensor = self.g(method) if isinstance(method, int) else getattr(self, method)()
        return value

    def g(self, k: int) -> Tensor:
        """(…) p_k (S - p_k + p_{k+1})."""
        p = pad(self.p, (0, 1))
        top = p.topk(k + 1, -1)
        others = p.scatter(-1, top.indices[..., k - 1 : k], 0.0).sum(-1)
        return top.values[..., k - 1] * (others + top.values[..., k])

    def g1(self) -> Tensor:
        """(…) p_1 (t + p_2)."""
        return self._top[0][..., 0] * (self.tail + self._top[0][..., 1])

    def u2(self) -> Tensor:
        """(…) the larger root m of m² - bm + Sc, b = 2p_1p_2 + (p_1 + p_2)(p_3 + r), c = p_1p_2(2p_3 + r).

        In a form where little cancels: with e = b - 2S p_2, m = S p_2 + (e + (e² + 4S p_2 (p_1 - p_2)(p_2 - p_3))^½)/2.
        Squares are taken in units of g_1, so that they do not underflow.
        """
        (p1, p2, p3), S, r = self._top[0].unbind(-1), self.total, self._rest
        unit = torch.where(self.tail > 0, self.g1(), 1.0).detach()
        e = (r * (p1 - p2) + p1 * p3 - p2 * p2 - p2 * (p2 - p3)) / unit
        square = e * e + 4 * S * (p1 - p2) * (p2 / unit) * ((p2 - p3) / unit)
        root = torch.where(square > 0, square, 1.0).sqrt()  # the derivative of the root of 0 is not finite
        return torch.minimum(S * p2 + unit * (e + torch.where(square > 0, root, 0.0)) / 2, self.g1())

    def lower(self) -> Tensor:
        """(…) the largest of S p_2, (S(p_1 + p_2) - (p_1 - p_2)²)/2 and p_1 (t + Σ_{i>1} p_i²/t).

        The second is (p_1 (t + 3p_2) + p_2 r)/2, where nothing cancels.
        """
        (p1, p2, _), t, r = self._top[0].unbind(-1), self.tail, self._rest
        mean = (self._others * (self._others / torch.where(t > 0, t, 1.0).unsqueeze(-1))).sum(-1)
        return torch.stack([self.total * p2, (p1 * (t + 3 * p2) + p2 * r) / 2, p1 * (t + mean)]).amax(0)

    # -- the eigenvalue

    @cached_property
    def _root(self) -> Tensor:
        """(…) the largest eigenvalue λ of diag(p) - ppᵀ/S, up to rounding: Σ_i p_i/(p_i - λ) = 0.

        With φ(λ) = 1 / Σ_{i>1} p_i/(λ - p_i) the equation reads φ(λ) = (p_1 - λ)/p_1. As a parallel sum of increasing
        linear functions φ is concave, so Newton's iteration climbs to the root from below, in the end quadratically.
        """
        p1, low, high = self._top[0][..., 0], self.lower() / self.total, self.g1() / self.total
        lam = torch.minimum(low, high)
        for _ in range(_NEWTON_STEPS):
            ratios = self._ratios(lam)
            one, two = ratios.sum(-1), ratios.square().sum(-1)
            gap = 1 / one - (p1 - lam) / p1
            slope = 1 / one + two / one / one + lam / p1  # of the gap, times λ: dimensionless, so nothing overflows
            lam = torch.minimum(torch.maximum(lam * (1 - gap / slope), low), high)
        return torch.where(self.tail > 0, lam, 0.0)

    def _ratios(self, lam: Tensor) -> Tensor:
        """(…, n) p_i/(λ - p_i), and 0 for the largest entry."""
        lam = lam.unsqueeze(-1)
        return self._others / torch.maximum(lam - self._others, lam * UNIT)

    def _exact_upper(self) -> Tensor:
        """(…) Sλ from above: a little beyond the root, accepted where the sign there is certain; else g_1."""
        p1, error = self._top[0][..., 0], self._unit_errors
        beyond = self._root * (1 + 4 * error)
        phi = 1 / self._ratios(beyond).sum(-1)
        certain = phi * (1 - 2 * error) >= (p1 - beyond) / p1 * (1 + 2 * error)
        g1 = self.g1() * self.growth
        return torch.where(certain, torch.minimum(beyond * self.total * (1 + 2 * error), g1), g1)

    def exact_slopes(self) -> Tensor:
        """(…, n) the derivative of Sλ by p_k: λ + S μ² λ²/(p_k - λ)², μ⁻² = Σ_i p_i²/(p_i - λ)².

        It is λ + S (μ - v_k)² for the unit eigenvector v_i = μ p_i/(p_i - λ). Entries tied with p_1 share their
        eigenvectors evenly; a one-hot row takes the limit of equal tails.
        """
        p, lam, n = self.p, self._root.unsqueeze(-1), self.p.shape[-1]
        gap = torch.maximum((p - lam).abs(), lam * UNIT)
        slopes = lam + self.total.unsqueeze(-1) * (lam / gap).square() / (p / gap).square().sum(-1, keepdim=True)
        tied = p >= down(self._top[0][..., :1], 8 * UNIT)
        count = tied.sum(-1, keepdim=True)
        slopes = torch.where(count > 1, lam + self.total.unsqueeze(-1) * tied / count, slopes)
        return torch.where(lam > 0, slopes, (~tied) * (n / max(n - 1, 1)))

    # -- rounded outward

    @property
    def growth(self) -> float:
        """Pays for the rounding of the closed forms: sums of n terms and a few operations."""
        return 1 + 8 * self._unit_errors

    def upper(self, method: UpperMethod | int) -> Tensor:
        """(…) not below S² ‖M(p/S)‖, or for a number k not below the k-th eigenvalue of S² M(p/S)."""
        value = self._exact_upper() if method == "exact" else self.closed_form(method) * self.growth
        return torch.where(self.tail > 0, value + _LEAST, value)

    def upper_of_all_readings(self, method: UpperMethod | int, literal: Tensor) -> Tensor:
        """(…) `upper` for S² M(p/S), for M(p/S) and, where `literal`, for diag(p) - ppᵀ.

        The last matrix is diag(Sp) - ppᵀ and (1 - S) diag(p), and it is not below (1 - S) p_1 times the identity.
        """
        p1, (missing, excess) = self._top[0][..., 0], self._off()
        least = self.upper(method) / (1 - missing).square()
        stands = torch.maximum(least + missing * p1, excess * p1)
        return up(torch.where(literal, stands, least), 16 * UNIT)

    def lower_of_all_readings(self, literal: Tensor) -> Tensor:
        """(…) not above the norm of any of them; the largest eigenvalues are at least S p_2, p_2/S and p_2."""
        (p1, p2, _), (missing, excess) = self._top[0].unbind(-1), self._off()
        most = self.lower() / (1 + excess).square()
        stands = torch.maximum(most - excess * p1, p2 * (1 - torch.maximum(missing, excess)))
        return (torch.where(literal, stands, most) * (2 - self.growth) - _LEAST).clamp(min=0)

    def _off(self) -> tuple[Tensor, Tensor]:
        """(…) upper bounds of 1 - S and of S - 1, or 0."""
        short = 1 - self._top[0][..., 0]
        error = (self.tail + short.abs()) * self._unit_errors
        return (short - self.tail + error).clamp(min=0), (self.tail - short + error).clamp(min=0)
