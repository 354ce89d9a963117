"""What every composition shares: it finds the largest radius at which a method's margin is proved positive."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.errors import HoldfastError, NotApplicableError
from holdfast.network.centre import Centre, Stage, lengths, pulled
from holdfast.network.curves import or_unbounded, outward
from holdfast.network.network import Network
from holdfast.network.site import Site
from holdfast.registry import Registry

PRECISION = 1e-3  # of a radius, relative
_STEPS = 100
_STRIDE = 0.25
_STEEP = 5.0  # a margin that is missed by more than e⁵ times itself says nothing of where it is met
_SMALLEST, _LARGEST = 1e-12, 1e6  # of a radius, as multiples of the first-order one

#: Lower bounds (b) of the smallest margin over balls of radius eps (b).
Curve = Callable[[Float64[Tensor, " b"]], Float64[Tensor, " b"]]

#: Bounds (b, e) of how far an output moves, for movements (b, e) of the input.
Reach = Callable[[Float64[Tensor, "b e"]], Float64[Tensor, "b e"]]


@dataclass(frozen=True)
class Radii:
    """The radii that a composition proves for a batch of inputs.

    Attributes:
        radius: (b) no perturbation of this length or less changes the prediction; 0 where nothing is proved.
        margin: (b) the lower bound of the margin at that radius.
        methods: the method behind each radius.
        notes: what the composition has to say: what did not apply.
        losses: for each input what was taken off its margin at that radius, by name; empty where it is not known.
    """

    radius: Float64[Tensor, " b"]
    margin: Float64[Tensor, " b"]
    methods: tuple[str, ...]
    notes: tuple[str, ...] = ()
    losses: tuple[dict[str, float], ...] = ()


class Method(ABC):
    """What every registered composition says of itself, and that it proves radii.

    Attributes:
        for_large: whether it does without norms of maps on all tokens, which cost too much for many numbers.
        most_inputs: the most numbers that may move.
    """

    name: ClassVar[str]
    cost: ClassVar[str]
    reference: ClassVar[str]
    assumptions: ClassVar[str] = "none"
    for_large: ClassVar[bool] = False
    most_inputs: ClassVar[float] = math.inf

    @abstractmethod
    def refusal(self, network: Network) -> str | None:
        """Why the composition has no proof for the network, or None where it has one."""

    @abstractmethod
    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None) -> Radii:
        """The largest radii that it proves; where it proves nothing at `beyond`, it need not look for less."""

    @classmethod
    @final
    def check_metadata(cls) -> None:
        """Refuses a class whose metadata is not complete."""
        missing = [field for field in ("name", "cost", "reference") if not isinstance(getattr(cls, field, None), str)]
        if missing:
            raise HoldfastError(f"{cls.__name__} lacks {', '.join(missing)}; see holdfast.network.compositions")


class Composition(Method):
    """A way from bounds of pieces to a lower bound of min_j (f_y - f_j) over the ball of radius eps around an input.

    A method states its metadata and writes `refusal` and `_curve`. What can be proved is guessed first, by the same
    formulas with iterated norms: they cost little, and their radius is hardly ever below the proved one. So a proof is
    tried once or twice, and not at all where nothing is to be hoped for.

    Attributes:
        one_by_one: whether a CPU is better off with one input at a time, for the sake of its memory.
        needs_no_guess: whether the curve is the same for both guarantees; it is then searched as it is.
        needs_no_slope: whether the search begins without the network's gradient, which costs more than a few radii.
        precision: to which a radius is found, relative.
    """

    one_by_one: ClassVar[bool] = False
    needs_no_guess: ClassVar[bool] = False
    needs_no_slope: ClassVar[bool] = False
    precision: ClassVar[float] = PRECISION

    @abstractmethod
    def _curve(self, centre: Centre) -> Curve:
        """Margins as a function of the radii; what does not depend on them is computed here, once.

        A value that is not positive, or not a number, proves nothing, and that is always allowed.
        """

    def _check(self, network: Network) -> None:
        refusal = self.refusal(network)
        if refusal is not None:
            raise NotApplicableError(f"composition {self.name!r} does not apply to {network.name}: {refusal}")

    @final
    def curve(self, centre: Centre) -> Curve:
        """Lower bounds (b) of the smallest margin, as a function of the radii eps (b); -inf where nothing is proved.

        No margin is infinite, so a bound that is proves nothing, whatever its sign.
        """
        self._check(centre.network)
        with torch.no_grad():
            margins = self._curve(centre)

        def evaluate(eps: Float64[Tensor, " b"]) -> Float64[Tensor, " b"]:
            with torch.no_grad():
                found = margins(eps)
                return torch.where(torch.isfinite(found), found, -torch.inf)

        return evaluate

    @final
    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None) -> Radii:
        """The largest radii with a positive margin."""
        self._check(centre.network)
        first = centre.head_radius if self.needs_no_slope else centre.first_order_radius
        known = torch.zeros_like(first) if beyond is None else beyond
        if self.one_by_one and len(first) > 1 and first.device.type == "cpu" and centre.separable:
            return _joined([self(one, least) for one, least in zip(centre.alone(), torch.split(known, 1), strict=True)])
        least = torch.where(known > 0, known, _SMALLEST * first)
        if centre.proved and not self.needs_no_guess:
            most = self(centre.numerical, beyond).radius
            begin, stride = most * (1 - self.precision / 2), 1 - 4 * self.precision
        else:
            most, begin, stride = _LARGEST * first, torch.where(known > 0, known, first), _STRIDE
        begin = torch.where(centre.margin > 0, begin, 0.0)
        radius, margin = torch.zeros_like(first), centre.margin
        if bool((begin > 0).any()):
            radius, margin = _largest(self.curve(centre), centre.margin, begin, least, most, stride, self.precision)
        with torch.no_grad():
            losses = self._losses(centre, radius)
        margin = torch.where(radius > 0, margin, centre.margin)
        return Radii(radius, margin, (self.name,) * len(first), losses=losses)

    def _losses(self, centre: Centre, radius: Float64[Tensor, " b"]) -> tuple[dict[str, float], ...]:
        """For each input what was taken off its margin at the radius, by name, where the method can tell."""
        return ({},) * len(radius)


def _joined(parts: Sequence[Radii]) -> Radii:
    """The radii of one batch from those of its members."""
    return Radii(
        torch.cat([part.radius for part in parts]),
        torch.cat([part.margin for part in parts]),
        tuple(name for part in parts for name in part.methods),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        tuple(each for part in parts for each in part.losses),
    )


def stage_reach(stage: Stage, of: Callable[[Site], Reach]) -> Reach:
    """How far a stage moves, when each of its sites moves as the given function says."""
    reaches = [of(site) for site in stage.sites]

    def reach(rho: Tensor) -> Tensor:
        moved = rho
        for step in reaches:
            moved = step(moved)
        return outward(rho + moved) if stage.skip else moved

    return reach


def linear_end(centre: Centre, most: float = math.inf) -> tuple[list[Stage], Float64[Tensor, "b classes"]]:
    """The stages before the linear ones at the end, and ‖T_jᵀ‖; stages with more numbers than `most` stay."""
    stages, adjoint = list(centre.stages), centre.pairs
    while stages and stages[-1].linear and stages[-1].sites[0].u[0].numel() <= most:
        adjoint = pulled(stages.pop().sites[0], adjoint)
    return stages, lengths(adjoint).squeeze(-1)


def smallest_margin(centre: Centre, lost: Float64[Tensor, "b classes"]) -> Float64[Tensor, " b"]:
    """min_j m_j - lost_j over the other classes, rounded down; what is no loss, or not a number, leaves nothing."""
    left = centre.margins - or_unbounded(outward(lost))
    left = torch.nextafter(left, torch.full_like(left, -torch.inf))
    return over_others(centre.prediction, left)


def over_others(prediction: Int64[Tensor, " b"], margins: Float64[Tensor, "b classes"]) -> Float64[Tensor, " b"]:
    """The smallest margin over every class but the predicted one; not a number where one of them is not."""
    own = torch.nn.functional.one_hot(prediction, margins.shape[-1]).bool()
    return margins.masked_fill(own, torch.inf).amin(-1)


def _largest(
    curve: Curve, lead: Tensor, begin: Tensor, least: Tensor, most: Tensor, stride: float, precision: float = PRECISION
) -> tuple[Tensor, Tensor]:
    """The largest radii (b) with a positive margin, and that margin; 0 where none is found.

    Strides from `begin`, then interpolation of what is lost of the `lead` as a power of the radius, and every third
    time the middle. Every input goes its own way, whatever else is in the batch: not at all from 0, not below `least`,
    and not above `most`.
    """
    eps, searching = begin, begin > 0
    low, high = torch.zeros_like(eps), torch.full_like(eps, torch.inf)
    above, below = lead, torch.full_like(eps, -torch.inf)  # the margins there
    for step in range(_STEPS):
        margin = curve(eps)
        holds, fails = searching & (margin > 0), searching & ~(margin > 0)
        low, above = torch.where(holds, eps, low), torch.where(holds, margin, above)
        high, below = torch.where(fails, eps, high), torch.where(fails, margin, below)
        apart = torch.minimum(high, most) > low * (1 + precision)
        searching = searching & apart & (high > least)
        if not bool(searching.any()):
            break
        little, much = ((1 - end / lead).clamp(min=1e-6).log() for end in (above, below))
        share = -little / (much - little)
        # On the far side of the root, as seen from the nearer end: then both ends come close to it.
        share = share + torch.where(share < 0.5, 1, -1) * (precision / 3) / torch.log(high / low)
        middle = torch.where((much < _STEEP) & (share < 1) & (step % 3 < 2), share, 0.5)
        between = torch.where(low > 0, low * (high / low) ** middle, high * stride)
        eps = torch.where(searching, torch.where(torch.isinf(high), low * 2, between), eps)
        stride = max(stride**4, _STRIDE)
    return low, above


compositions: Registry[Method] = Registry("composition", group="holdfast.compositions")

C = TypeVar("C", bound=type[Method])


def register_composition(cls: C) -> C:
    """Class decorator that registers a composition under its `name`."""
    cls.check_metadata()
    compositions.add(cls.name)(cls())
    return cls
