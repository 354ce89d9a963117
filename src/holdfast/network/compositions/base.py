"""What every composition shares: it finds the largest radius at which a method's margin is proved positive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar, final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.errors import HoldfastError, NotApplicableError, SoundnessError
from holdfast.network.centre import Centre
from holdfast.network.curves import outward
from holdfast.network.network import Network
from holdfast.registry import Registry

PRECISION = 1e-3  # of a radius, relative
_STEPS = 100
_SMALLEST, _LARGEST = 1e-12, 1e6  # of a radius, as multiples of the first-order one

#: Lower bounds (b) of the smallest margin over balls of radius eps (b).
Curve = Callable[[Float64[Tensor, " b"]], Float64[Tensor, " b"]]


@dataclass(frozen=True)
class Radii:
    """The radii that a composition proves for a batch of inputs.

    Attributes:
        radius: (b) no perturbation of this length or less changes the prediction; 0 where nothing is proved.
        margin: (b) the lower bound of the margin at that radius.
        methods: the method behind each radius.
        notes: what the composition has to say: what did not apply.
    """

    radius: Float64[Tensor, " b"]
    margin: Float64[Tensor, " b"]
    methods: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Method(ABC):
    """What every registered composition says of itself, and that it proves radii."""

    name: ClassVar[str]
    cost: ClassVar[str]
    reference: ClassVar[str]
    assumptions: ClassVar[str] = "none"

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

    A method states its metadata and writes `refusal` and `_curve`.
    """

    @abstractmethod
    def _curve(self, centre: Centre) -> Curve:
        """Margins as a function of the radii; what does not depend on them is computed here, once.

        A value that is not positive, or not a number, proves nothing, and that is always allowed.
        """

    @final
    def curve(self, centre: Centre) -> Curve:
        """Lower bounds (b) of the smallest margin, as a function of the radii eps (b)."""
        refusal = self.refusal(centre.network)
        if refusal is not None:
            raise NotApplicableError(f"composition {self.name!r} does not apply to {centre.network.name}: {refusal}")
        with torch.no_grad():
            margins = self._curve(centre)

        def evaluate(eps: Float64[Tensor, " b"]) -> Float64[Tensor, " b"]:
            with torch.no_grad():
                return margins(eps).nan_to_num(nan=-torch.inf)

        return evaluate

    @final
    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None) -> Radii:
        """The largest radii with a positive margin, found to a relative precision of 1e-3 and evaluated once more."""
        curve = self.curve(centre)
        radius = _largest(curve, centre, beyond)
        margin = torch.where(radius > 0, curve(radius), centre.margin)
        if bool(((radius > 0) & ~(margin > 0)).any()):
            raise SoundnessError(f"composition {self.name!r} did not confirm a radius that it had found; please report")
        return Radii(radius, margin, (self.name,) * len(radius))


def smallest_margin(centre: Centre, lost: Float64[Tensor, "b classes"]) -> Float64[Tensor, " b"]:
    """min_j m_j - lost_j, rounded down; a loss that is not a number leaves nothing."""
    left = centre.margins - outward(lost)
    left = torch.nextafter(left, torch.full_like(left, -torch.inf))
    return torch.where(torch.isinf(centre.margins), torch.inf, left).amin(-1)


def _largest(curve: Curve, centre: Centre, beyond: Float64[Tensor, " b"] | None) -> Float64[Tensor, " b"]:
    """Bracketing, then bisection of the logarithm; every input goes its own way, whatever else is in the batch."""
    start = centre.first_order_radius
    given = torch.zeros_like(start) if beyond is None else beyond
    eps = torch.where(given > 0, given, start)
    low, high = torch.zeros_like(start), torch.full_like(start, torch.inf)
    searching = centre.margin > 0
    for step in range(_STEPS):
        positive = curve(eps) > 0
        low = torch.where(searching & positive, eps, low)
        high = torch.where(searching & ~positive, eps, high)
        searching = searching & (high > low * (1 + PRECISION)) & (high > _SMALLEST * start) & (low < _LARGEST * start)
        if step == 0:
            searching = searching & (positive | (given == 0))
        if not bool(searching.any()):
            break
        middle = torch.where(low > 0, torch.sqrt(low * high), high / 4)
        middle = torch.where(torch.isinf(high), low * 2, middle)
        eps = torch.where(searching, middle, eps)
    return low


compositions: Registry[Method] = Registry("composition", group="holdfast.compositions")

C = TypeVar("C", bound=type[Method])


def register_composition(cls: C) -> C:
    """Class decorator that registers a composition under its `name`."""
    cls.check_metadata()
    compositions.add(cls.name)(cls())
    return cls
