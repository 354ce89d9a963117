"""What every piece that is not affine has to say of its rest e(δ) = f(ũ + δ) - f(ũ) - A δ."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holdfast.linalg import Ball
from holdfast.network.forms.region import Region

LONGEST = 2**13  # terms of an inner product
THETA = 2.0**-38  # of absolute values: more than the rounding of a few nested inner products of that length


@dataclass(frozen=True)
class Size:
    """The region at one scale.

    Attributes:
        scale: the factor of all first-order rows.
        radius: a bound of scale · ‖a‖, and at least the scale.
        region: all a.
    """

    scale: float
    radius: float
    region: Region

    @classmethod
    def of(cls, region: Region, scale: float) -> Size:
        return cls(scale, max(1.0, region.radius) * scale * (1 + 1e-14), region)

    def cube(self, rows: Tensor) -> Tensor | None:
        """(K, P) coefficients of the rows x·a on the cube's coordinates over their sides; None for a ball."""
        region = self.region
        return None if region.sides is None else (rows @ region.basis.mT) * region.sides


@dataclass
class Problem:
    """What is taken off one margin: a quadratic polynomial of b = scale · a, numbers, and kinks with a free parameter.

    The margin is at least value + gradient·b + bᵀ form b - Σ_u weight_u (x_u·b - threshold_u)₊.

    Attributes:
        value: the margin at the centre less all numbers.
        gradient: (p).
        form: (p, p), symmetric.
        rounding: what the form may lack, times ‖b‖².
        weight, x, threshold, reach: the kinks; |x_u·b| <= reach_u.
        losses: the numbers that were taken off, by name.
        named: the parts of the form, by name.
    """

    value: float
    gradient: Tensor
    form: Tensor
    rounding: float
    weight: Tensor
    x: Tensor
    threshold: Tensor
    reach: Tensor
    losses: dict[str, float] = field(default_factory=dict)
    named: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, value: float, gradient: Tensor) -> Problem:
        p, none = len(gradient), gradient.new_zeros(0)
        return cls(value, gradient, gradient.new_zeros(p, p), 0.0, none, gradient.new_zeros(0, p), none, none)

    @property
    def finite(self) -> bool:
        """Whether nothing has overflowed."""
        parts = (self.gradient, self.form, self.weight, self.x, self.threshold, self.reach)
        known = math.isfinite(self.value) and math.isfinite(self.rounding)
        return known and all(bool(torch.isfinite(part).all()) for part in parts)

    def lose(self, name: str, amount: float) -> None:
        """Takes a number off."""
        self.value -= amount + 1e-15 * abs(self.value)
        self.losses[name] = self.losses.get(name, 0.0) + amount

    def add(self, name: str, form: Tensor, rounding: float) -> None:
        """Adds bᵀ form b, which is known up to rounding · ‖b‖²."""
        self.form = self.form + form
        self.named[name] = self.named.get(name, torch.zeros_like(form)) + form
        self.rounding += rounding

    def breakdown(self, b: Tensor, lost: float) -> dict[str, float]:
        """How the loss is made up at the point b; what is left of it goes to the kinks."""
        parts = {"first order": -float(self.gradient @ b)}
        parts.update({name: -float(b @ (form @ b)) for name, form in self.named.items()})
        for name, amount in self.losses.items():
            parts[name] = parts.get(name, 0.0) + amount
        parts["kinks"] = lost - sum(parts.values())
        return parts


class Local(ABC):
    """A piece at ũ, (n, d). Its rest depends on δ through the functions of δ that `covectors` names.

    The order of calls: `covectors`; `place` with their first-order rows; `prepare` for every batch of covectors at the
    output, once; then for every scale `settle`, and `range` and `take` for the batches.
    """

    @abstractmethod
    def pull(self, C: Tensor) -> Ball:
        """Aᵀ applied to covectors (K, n, c) at the output."""

    @abstractmethod
    def covectors(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Functions (K, n, d) of δ on which the rest of these output tokens depends, and (K) what they were rounded by.

        Covectors at the output vanish at all other tokens.
        """

    @abstractmethod
    def place(self, X: Tensor, first: Tensor) -> None:
        """First-order rows (K, p) of these functions, and suprema (K) of |x·a| over the region."""

    @abstractmethod
    def prepare(self, mu: Tensor) -> Any:
        """What does not depend on the scale, for covectors (S, n, c) at the output."""

    @abstractmethod
    def settle(self, size: Size, low: Tensor, high: Tensor, tiny: Tensor, moved: float) -> float:
        """Takes notice of the scale and of what the functions have beyond first order, between -low and high.

        Of that, at most `tiny` is rounding, and not the rest of an earlier place.

        Returns a bound of ‖f(ũ + δ) - f(ũ)‖ over all tokens, given ‖δ‖ <= moved.
        """

    @abstractmethod
    def range(self, prepared: Any | None, varying: Tensor | None) -> tuple[Tensor, Tensor]:
        """(S), (S): -low <= ⟨μ, e⟩ <= high on the region, for every covector of a batch; None stands for zeros.

        Where covectors vary with G, `varying` (S, M) bounds by how much, for the M numbers that `seen` gives of each.
        """

    @abstractmethod
    def take(self, prepared: Any, s: int, problem: Problem, varying: Tensor | None) -> None:
        """Takes a lower bound of ⟨μ_s, e⟩ into the problem; `varying` (M) as in `range`."""

    @abstractmethod
    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        """(S, M) the numbers of covectors (S, n, c) at the output that count: ⟨μ, e⟩ is their sum times M rests.

        The second number is one relative to which they are accurate, in the Frobenius norm.
        """
