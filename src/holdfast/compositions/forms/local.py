"""What every piece that is not affine has to say of its rest e(δ) = f(ũ + δ) - f(ũ) - A δ."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.region import Region
from holdfast.linalg.directions import Directions
from holdfast.linalg.rounding import up

if TYPE_CHECKING:
    from holdfast.compositions.forms.softmax import Softmax
    from holdfast.compositions.forms.third import Triples

#: Of triples of directions, what a third order is there.
Twist = Callable[["Triples"], Tensor]

_CHUNK = 2**20

LONGEST = 2**14  # terms of an inner product
NARROW = 2.0**-23  # of the length of numbers for pairs q <= r: more than what float32 takes of all ordered pairs
THETA = 2.0**-37  # of absolute values: more than the rounding of a few nested inner products of that length
UNDERFLOW = 1e-60  # more than what is lost where squares, or their squares, underflow


def token_lengths(T: Tensor) -> Tensor:
    """Bounds of Frobenius norms over the last two dimensions in one pass, for numbers whose squares do not overflow."""
    length: Tensor = torch.linalg.vector_norm(T, dim=(-2, -1))
    return up(length, 1e-9) + 1e-150


def second_lengths(second: Tensor) -> Tensor:
    """(K) the lengths of second orders (K, pairs) in float32, and more than what that takes of very small numbers."""
    parts = torch.split(second, max(1, _CHUNK // max(1, second.shape[-1])))  # each of which is copied in float64
    lengths = torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in parts])
    return up(lengths, 1e-9) + 1e-30


@dataclass(frozen=True)
class Size:
    """The region at one scale.

    Attributes:
        scale: the factor of all first-order rows.
        radius: a bound of scale · ‖a‖, and at least the scale.
        region: all a.
        careful: whether sums of several rows are bounded over a cube itself, not only over the ball around it.
    """

    scale: float
    radius: float
    region: Region
    careful: bool = True

    @classmethod
    def of(cls, region: Region, scale: float, careful: bool = True) -> Size:
        return cls(scale, up(max(1.0, region.radius) * scale, 1e-14), region, careful)

    def cube(self, rows: Tensor) -> Tensor | None:
        """(K, P) coefficients of the rows x·a on the cube's coordinates over their sides; None for a ball."""
        region = self.region
        return region.spread(rows) * region.sides if self.careful and region.sides is not None else None


@dataclass(frozen=True)
class Rests:
    """What a place's functions (K) have beyond first order on a region: between -low and high.

    Attributes:
        tiny: how much of that is rounding, and not the rest of an earlier place.
        unsure: what rounding may have done to all orders that are known.
        together: of a normalisation, how long all rests of w of a token are together, where that is known.
        third: how much of it is beyond their second order, where that is known as one form; `fourth` the same of the
            third order.
    """

    low: Tensor
    high: Tensor
    tiny: Tensor
    third: Tensor | None = None
    fourth: Tensor | None = None
    unsure: Tensor | None = None
    together: Tensor | None = None

    @property
    def most(self) -> Tensor:
        return torch.maximum(self.low, self.high)


@dataclass
class Problem:
    """What is taken off one margin: a quadratic polynomial of b = scale · a, numbers, and kinks with a free parameter.

    The margin is at least
    value + gradient·b + bᵀ form b - Σ_u weight_u (x_u·b - threshold_u)₊ + Σ_v gain_v (rising_v·b - begin_v)₊.

    Attributes:
        value: the margin at the centre less all numbers.
        gradient: (p).
        form: (p, p), symmetric.
        rounding: what the form may lack, times ‖b‖².
        weight, x, threshold, reach: the kinks; |x_u·b| <= reach_u.
        ceiling: where a kink's unit has not crossed, x_u·b <= ceiling_u; where it has, x_u·b >= threshold_u.
        gain, rising, begin: kinks that the margin gains.
        slight: a number that is not worth a matrix.
        losses: the numbers that were taken off, by name.
        named: the parts of the form, by name: matrices, or rows with weights.
    """

    value: float
    gradient: Tensor
    form: Tensor
    rounding: float
    weight: Tensor
    x: Tensor
    threshold: Tensor
    reach: Tensor
    ceiling: Tensor
    gain: Tensor
    rising: Tensor
    begin: Tensor
    slight: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    named: list[tuple[str, Tensor, Tensor | None]] = field(default_factory=list)

    @classmethod
    def of(cls, value: float, gradient: Tensor, slight: float = 0.0) -> Problem:
        p, none = len(gradient), gradient.new_zeros(0)
        form, rows = gradient.new_zeros(p, p), gradient.new_zeros(0, p)
        return cls(value, gradient, form, 0.0, none, rows, none, none, none, none, rows, none, slight)

    @property
    def finite(self) -> bool:
        """Whether nothing has overflowed."""
        kinks = (self.weight, self.x, self.threshold, self.reach, self.ceiling, self.gain, self.rising, self.begin)
        known = math.isfinite(self.value) and math.isfinite(self.rounding)
        return known and all(bool(torch.isfinite(part).all()) for part in (self.gradient, self.form, *kinks))

    def lose(self, name: str, amount: float) -> None:
        """Takes a number off."""
        self.value -= amount + 1e-15 * abs(self.value)
        self.losses[name] = self.losses.get(name, 0.0) + amount

    def add(self, name: str, form: Tensor, rounding: float) -> None:
        """Adds bᵀ form b, which is known up to rounding · ‖b‖²."""
        self.form += form
        self.named.append((name, form, None))
        self.rounding += rounding

    def add_squares(self, rows: Tensor, weights: dict[str, Tensor], rounding: Tensor, reach: Tensor) -> None:
        """Adds Σ_k w_k (x_k·b)² with |x_k·b| <= reach_k, by name; each square is known up to rounding_k ‖b‖².

        Squares that together are slight are replaced by what they may take off, so that only the others cost a product.
        """
        total = torch.stack(list(weights.values())).sum(0)
        sizes = up(torch.stack(list(weights.values())).abs().sum(0) * reach.square(), 1e-12)
        order = sizes.argsort()
        dropped = order[sizes[order].cumsum(0) <= self.slight]
        kept = torch.ones_like(sizes, dtype=torch.bool)
        kept[dropped] = False
        for name, weight in weights.items():
            below = up(float((weight.clamp(max=0.0).abs()[dropped] * reach[dropped].square()).sum()), 1e-9)
            self.lose(name, below)
            self.named.append((name, rows[kept], weight[kept]))
        x = rows[kept]
        self.form += (x * total[kept].unsqueeze(-1)).mT @ x
        self.rounding += up(float(rounding[kept].sum()), 1e-9)

    def breakdown(self, b: Tensor, lost: float) -> dict[str, float]:
        """How the loss is made up at the point b; the kinks, or without any the relaxation, have what is left of it."""
        parts = {"first order": -float(self.gradient @ b)} | self.losses
        for name, rows, weights in self.named:
            seen = rows @ b
            value = float(b @ seen) if weights is None else float(weights @ seen.square())
            parts[name] = parts.get(name, 0.0) - value
        kinked = len(self.weight) > 0 or len(self.gain) > 0
        parts["kinks" if kinked else "relaxation"] = lost - sum(parts.values())
        return parts


@final
@dataclass(frozen=True)
class Named:
    """Linear functions of δ (n, d), as covectors that are made where they are asked for.

    Attributes:
        count: K.
        made: of indices, (…, n, d).
    """

    count: int
    made: Callable[[Tensor], Tensor]

    def parts(self, together: int) -> Iterator[Tensor]:
        """All of them, so many at a time."""
        return map(self.made, torch.split(torch.arange(self.count), together))

    @property
    def whole(self) -> Float64[Tensor, "K n d"]:
        """All of them at once."""
        return self.made(torch.arange(self.count))


class Local(ABC):
    """A piece at ũ, (n, d). Its rest depends on δ through the functions of δ that `covectors` names.

    The order of calls: `covectors`; `place` with their first-order rows; `prepare` for every batch of covectors at the
    output, once; then for every scale `settle`, and `range` and `take` for the batches.
    """

    @property
    @abstractmethod
    def rest(self) -> str:
        """What its rest is called among the losses of a margin."""

    @property
    @abstractmethod
    def scalars(self) -> int:
        """How many functions `covectors` names, if all tokens matter."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Terms of the longest inner product."""

    @property
    @abstractmethod
    def stride(self) -> int:
        """How many of the functions that follow each other belong to one token."""

    @property
    @abstractmethod
    def numbers(self) -> int:
        """M, how many numbers `seen` gives of a covector."""

    @property
    @abstractmethod
    def kept(self) -> int:
        """Bytes of a covector that `prepare` keeps, about."""

    @property
    def attention(self) -> Softmax | None:
        """The softmax attention that this is, or holds."""
        return None

    def touched(self, tokens: Tensor) -> Tensor:
        """The tokens of the input on which the functions that `covectors` names depend."""
        return tokens

    @abstractmethod
    def pull(self, C: Tensor) -> tuple[Tensor, Tensor]:
        """Aᵀ applied to covectors (K, n, c) at the output, and (K) bounds of what rounding did to them."""

    @abstractmethod
    def covectors(self, tokens: Tensor) -> tuple[Named, Tensor]:
        """Functions (K, n, d) of δ on which the rest of these output tokens depends, and (K) what they were rounded by.

        Covectors at the output vanish at all other tokens.
        """

    @abstractmethod
    def functions(self, T: Tensor) -> Tensor:
        """The functions that `covectors` has named, of (m, n, d), as (K, m)."""

    @abstractmethod
    def most(self, y: Tensor) -> Tensor:
        """(K) bounds of these functions where no entry of δ exceeds that of y (n, d): Σ |c| y, or a bit more."""

    @abstractmethod
    def place(self, X: Tensor, first: Tensor) -> None:
        """First-order rows (K, p) of these functions, and suprema (K) of |x·a| over the region."""

    @abstractmethod
    def prepare(self, mu: Tensor) -> Any:
        """What does not depend on the scale, for covectors (S, n, c) at the output."""

    @abstractmethod
    def settle(self, size: Size, rests: Rests, moved: float) -> float:
        """Takes notice of the scale and of what the functions have beyond first order.

        Returns a bound of ‖f(ũ + δ) - f(ũ)‖ over the tokens that matter, given ‖δ‖ <= moved.
        """

    @abstractmethod
    def range(
        self,
        prepared: Any | None,
        varying: Tensor | None,
        enough: Tensor | None = None,
        *,
        bent: bool = True,
        earlier: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(S), (S): -low <= ⟨μ, e⟩ <= high on the region, for every covector of a batch; None stands for zeros.

        Unless `bent`, the same without the second order of e, and where rests beyond third order were given without
        its third order. Then, where all ways of the covectors lead through this place, `earlier` bounds what earlier
        places add beyond third order.

        Where covectors vary with G, `varying` (S, M) bounds by how much, for the M numbers that `seen` gives of each.
        Bounds below `enough` (S) need not be sharper.
        """

    @abstractmethod
    def take(self, prepared: Any, s: int, problem: Problem, varying: Tensor | None) -> None:
        """Takes a lower bound of ⟨μ_s, e⟩ into the problem; `varying` (M) as in `range`."""

    @abstractmethod
    def seen(self, mu: Tensor) -> tuple[Tensor, float]:
        """(S, M) the numbers of covectors (S, n, c) at the output that count: ⟨μ, e⟩ is their sum times M rests.

        The second number is one relative to which they are accurate, in the Frobenius norm.
        """


class SmoothLocal(Local):
    """A piece with a second and a third order."""

    @abstractmethod
    def push(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """A applied to (K, n, d) at the input, and (K) bounds of what rounding did to them."""

    @abstractmethod
    def second_order(self, directions: Directions) -> tuple[Tensor, float]:
        """The second order of f at first order, as a symmetric form q[b, b] (pairs, n, c), where tokens matter.

        The number is a bound of what rounding did to it, for ‖b‖ <= 1.
        """

    def meet(self, degree: int, order: Tensor, count: Tensor, unsure: float, directions: Directions) -> None:
        """Takes notice of its functions' second order (K, pairs) in float32, or of a part (K, triples) of the third.

        Every coefficient stands for so many; what is computed of a function is accurate within `unsure`.
        """

    @abstractmethod
    def third_order(self, second: Tensor, size: float, directions: Directions) -> tuple[Twist, float]:
        """The third order of f, from first order and `second` (K, pairs), its functions' second order in float32.

        `Twist` gives three times the symmetric coefficients of some triples, (triples, n, c), where tokens matter. The
        number is a bound of what rounding did to the third order for ‖b‖ <= 1, where `size` bounds the length of every
        function's second order.
        """
