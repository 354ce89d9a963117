"""What every composition shares: it finds the largest radius at which a method's margin is proved positive."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar, final

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from holdfast.compositions.search import PRECISION, STRIDE, Reached, decided, largest, widened
from holdfast.compositions.search import Curve as Curve
from holdfast.errors import NotApplicableError, TimeLimitError
from holdfast.linalg.curves import or_unbounded
from holdfast.linalg.rounding import down, frobenius_upper, outward, up
from holdfast.linalg.threat import L2, Threat
from holdfast.method import Method
from holdfast.network.centre import Centre, Stage, lengths, pulled
from holdfast.network.network import Network
from holdfast.network.site import Site
from holdfast.registry import Registry

_SMALLEST, _LARGEST = 1e-12, 1e6  # of a radius, as multiples of the first-order one

#: What a composition bounds margins over: a ball, or a box with its own half-width in every coordinate.
Shape = Literal["ball", "box"]

#: Bounds (b, e) of how far an output moves, for movements (b, e) of the input.
Reach = Callable[[Float64[Tensor, "b e"]], Float64[Tensor, "b e"]]


@dataclass(frozen=True)
class Radii:
    """The radii that a composition proves for a batch of inputs.

    Attributes:
        radius: (b) no perturbation of this length or less changes the prediction; 0 where nothing is proved.
        margin: (b) a lower bound of the margin up to that radius; where that is 0, at the input itself.
        methods: the method behind each radius.
        notes: remarks of the composition: what did not apply.
        losses: for each input what was taken off its margin at that radius, by name; empty where nothing is proved,
            or the time was over before it was known.
        unfinished: what was left out for lack of time.
        lead: (b) lower bounds of the margin at the input itself, at least those of the centre.
    """

    radius: Float64[Tensor, " b"]
    margin: Float64[Tensor, " b"]
    methods: tuple[str, ...]
    lead: Float64[Tensor, " b"]
    notes: tuple[str, ...] = ()
    losses: tuple[dict[str, float], ...] = ()
    unfinished: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Aim:
    """What to prove.

    Attributes:
        threat: what may become of an input.
        at: radii, of which to find the largest that can be proved; empty for the largest radius of all.
    """

    threat: Threat = L2
    at: tuple[float, ...] = ()


LARGEST_BALL = Aim()


class NetworkMethod(Method):
    """What every registered composition says about itself, and that it proves radii.

    Attributes:
        shapes: the regions it has a proof over; one without boxes goes through the balls around them.
        quick: whether it answers quickly, whatever the size of the network.
        for_large: whether it does without norms of maps on all tokens, which cost too much for many numbers.
        most_inputs: the most numbers that may move.
        instead: the name of a composition that reaches about as far at less cost wherever it applies.
        dense: whether it takes dense Jacobians of stages anyway, which may then also bound what rounding did.
    """

    shapes: ClassVar[frozenset[Shape]] = frozenset({"ball"})
    quick: ClassVar[bool] = False
    for_large: ClassVar[bool] = False
    most_inputs: ClassVar[float] = math.inf
    instead: ClassVar[str | None] = None
    dense: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, network: Network) -> str | None:
        """Why the composition has no proof for the network, or None where it has one."""

    def takes_long(self, centre: Centre) -> bool:
        """Whether it is known to take much longer than the composition named in `instead`."""
        return False

    @abstractmethod
    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None, aim: Aim = LARGEST_BALL) -> Radii:
        """The largest radii that it proves; where it proves nothing at `beyond`, it need not look for less."""

    @final
    def through(self, threat: Threat) -> Shape | None:
        """What it goes through if it has no proof for the shape of the perturbations."""
        return "ball" if threat.boxed and "box" not in self.shapes else None


class Composition(NetworkMethod):
    """A way from bounds of pieces to a lower bound of min_j (f_y - f_j) over all points within eps of an input.

    A method states its metadata and writes `refusal` and `_curve`, and `_box_curve` if it bounds margins over boxes.
    What can be proved is guessed first, by the same formulas with iterated norms: these cost little, and the radius
    that they give is hardly ever below the proved one. So a proof is tried once or twice, and not at all if the
    guess is no better than what is known.

    Attributes:
        one_by_one: whether inputs are treated one at a time on a CPU, to save memory.
        needs_no_guess: whether the curve is the same for both guarantees; it is then searched as it is.
        needs_no_slope: whether the search begins without the network's gradient, which costs more than a few radii.
        precision: relative, of a radius.
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

    def _box_curve(self, centre: Centre, half: Float64[Tensor, "b n d"]) -> Curve:
        """The same for boxes with half-widths eps times the given ones; used if "box" is among the shapes."""
        raise NotImplementedError(f"{self.name} names boxes among its shapes, but has no margins over them")

    def _losses(self, centre: Centre, eps: Tensor, half: Tensor | None, left: Tensor) -> tuple[dict[str, float], ...]:
        """For each input what is taken off its margin at eps, by name; empty where eps is 0.

        The radii are those of balls, or, with half-widths, of boxes; `left` is what is left of the margins. A method
        that knows more than the first order tells it here.
        """
        first = centre.first_order_lost(eps, half)
        beyond = centre.margin - left - first
        pairs = zip(eps.tolist(), first.tolist(), beyond.tolist(), strict=True)
        return tuple({"first order": f, "beyond first order": b} if e > 0 else {} for e, f, b in pairs)

    def _check(self, network: Network) -> None:
        refusal = self.refusal(network)
        if refusal is not None:
            raise NotApplicableError(f"composition {self.name!r} does not apply to {network.name}: {refusal}")

    @final
    def curve(self, centre: Centre, threat: Threat = L2) -> Curve:
        """Lower bounds (b) of the smallest margin, as a function of the radii eps (b); -inf where nothing is proved.

        No margin is infinite, so a bound that is proves nothing, whatever its sign.
        """
        return self._followed(centre, threat, self._over)

    @final
    def _followed(
        self, centre: Centre, threat: Threat, over: Callable[[Centre, Float64[Tensor, "b n d"] | None], Curve]
    ) -> Curve:
        """The same by any curve over balls (None) and boxes with half-widths, around all points within eps."""
        self._check(centre.network)
        kept: list[Curve] = []

        def evaluate(eps: Float64[Tensor, " b"]) -> Float64[Tensor, " b"]:
            with torch.no_grad(), centre.a.timed():
                centre.a.in_time()
                region = self._region(centre, threat, eps)
                if region.centre is not centre:
                    margins = over(region.centre, region.half)(region.eps)
                    margins = margins.masked_fill(region.centre.prediction != centre.prediction, -torch.inf)
                else:
                    kept[:] = kept or [over(centre, region.half)]
                    margins = kept[0](region.eps)
                return torch.where(torch.isfinite(margins), margins, -torch.inf)

        return evaluate

    def _over(self, centre: Centre, half: Float64[Tensor, "b n d"] | None) -> Curve:
        return self._curve(centre) if half is None else self._box_curve(centre, half)

    def _region(self, centre: Centre, threat: Threat, eps: Tensor) -> _Enclosing:
        """A region of a shape that the method has a proof over, around all points within eps.

        A clipped box lies around its own middle. Where a positive margin is proved over it, the class that leads there
        leads at the input as well, which is in it.
        """
        if not threat.boxed:
            return _Enclosing(centre, eps)
        if threat.clip is None and "box" in self.shapes:
            return _Enclosing(centre, eps, torch.ones_like(centre.x))
        name = f"{self.name}: the last region of {threat}"
        return centre.a.once(name, lambda: self._around(centre, threat, eps), eps)

    def _around(self, centre: Centre, threat: Threat, eps: Tensor) -> _Enclosing:
        lower, upper = threat.ends(centre.x, eps)
        middle = centre.x if threat.clip is None else (lower + upper) / 2
        half = up(torch.maximum(upper - middle, middle - lower))
        around = centre if threat.clip is None else centre.at(middle)
        if "box" in self.shapes:
            return _Enclosing(around, torch.ones_like(eps), half)
        return _Enclosing(around, frobenius_upper(half))

    @final
    def __call__(self, centre: Centre, beyond: Float64[Tensor, " b"] | None = None, aim: Aim = LARGEST_BALL) -> Radii:
        """The largest radii with a positive margin."""
        self._check(centre.network)
        aim.threat.check(centre.x)
        known = torch.zeros_like(centre.margin) if beyond is None else beyond
        if self.one_by_one and len(known) > 1 and known.device.type == "cpu" and centre.separable:
            pairs = zip(centre.alone(), torch.split(known, 1), strict=True)
            return _joined([self(one, least, aim) for one, least in pairs])
        lead = self.lead(centre)
        reached = self._decide(centre, lead, known, aim) if aim.at else self._search(centre, lead, known, aim.threat)
        losses: tuple[dict[str, float], ...] = ({},) * len(lead)
        if bool((reached.radius > 0).any()):
            # What is proved stays, even if the time is over before its losses are known.
            with torch.no_grad(), suppress(TimeLimitError):
                region = self._region(centre, aim.threat, reached.radius)
                eps = torch.where(reached.radius > 0, region.eps, 0.0)
                losses = self._losses(region.centre, eps, region.half, reached.margin)
        margin = torch.where(reached.radius > 0, reached.margin, lead)
        cut = (f"the time was over before the search of {self.name} had ended",) if reached.cut else ()
        return Radii(reached.radius, margin, (self.name,) * len(lead), lead, losses=losses, unfinished=cut)

    def lead(self, centre: Centre) -> Float64[Tensor, " b"]:
        """Lower bounds of the smallest margin at the inputs themselves; a method may know better than the centre."""
        return centre.margin

    def _decide(self, centre: Centre, lead: Tensor, known: Tensor, aim: Aim) -> Reached:
        guesses = centre.proved and not self.needs_no_guess
        guess = self.curve(centre.numerical, aim.threat) if guesses else None
        return decided(self.curve(centre, aim.threat), guess, lead, aim.at, known)

    def _search(self, centre: Centre, lead: Tensor, known: Tensor, threat: Threat) -> Reached:
        """Around clipped boxes: first the radii of boxes that are not, which hold for what clipping leaves of them."""
        if not bool((lead > 0).any()):
            return Reached(torch.zeros_like(lead), lead)
        first = self._first(centre, threat)
        least = torch.where(known > 0, known, _SMALLEST * first)
        if centre.proved and not self.needs_no_guess:
            guess = self._search(centre.numerical, centre.numerical.margin, known, threat)
            most = guess.radius
            begin, stride, plain = most * (1 - self.precision / 2), 1 - 4 * self.precision, threat
        else:
            most = (_LARGEST * first).clamp(max=threat.most)
            begin, stride, plain = torch.where(known > 0, known, first), STRIDE, replace(threat, clip=None)
        begin = torch.where(lead > 0, begin, 0.0).clamp(max=threat.most)
        reached = Reached(torch.zeros_like(first), lead)
        if bool((begin > 0).any()):
            reached = self._largest(centre, plain, begin, least, most, stride)
        if plain != threat and not reached.cut and threat.cuts(centre.x, 2 * reached.radius):
            reached = widened(self.curve(centre, threat), reached, threat.most)
        return reached

    def _largest(
        self, centre: Centre, threat: Threat, begin: Tensor, least: Tensor, most: Tensor, stride: float
    ) -> Reached:
        """The largest radii with a positive margin; a method may know a shorter way to them."""
        return largest(self.curve(centre, threat), self.lead(centre), begin, least, most, stride, self.precision)

    def _first(self, centre: Centre, threat: Threat) -> Tensor:
        """Where a search begins."""
        if threat.boxed and "box" in self.shapes:
            return centre.first_order(threat)
        ball = centre.head_radius if self.needs_no_slope else centre.first_order_radius
        return ball / math.sqrt(centre.x[0].numel()) if threat.boxed else ball


@dataclass(frozen=True)
class _Enclosing:
    """A ball of radius eps around a centre's inputs, or a box with half-widths eps · half."""

    centre: Centre
    eps: Float64[Tensor, " b"]
    half: Float64[Tensor, "b n d"] | None = None


def _joined(parts: Sequence[Radii]) -> Radii:
    """The radii of one batch from those of its members."""
    return Radii(
        torch.cat([part.radius for part in parts]),
        torch.cat([part.margin for part in parts]),
        tuple(name for part in parts for name in part.methods),
        torch.cat([part.lead for part in parts]),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        tuple(lost for part in parts for lost in part.losses),
        tuple(dict.fromkeys(note for part in parts for note in part.unfinished)),
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
    return over_others(centre.prediction, down(centre.margins - or_unbounded(outward(lost))))


def over_others(prediction: Int64[Tensor, " b"], margins: Float64[Tensor, "b classes"]) -> Float64[Tensor, " b"]:
    """The smallest margin over every class but the predicted one; not a number where one of them is not."""
    own = torch.nn.functional.one_hot(prediction, margins.shape[-1]).bool()
    return margins.masked_fill(own, torch.inf).amin(-1)


compositions: Registry[NetworkMethod] = Registry("composition", group="holdfast.compositions")

C = TypeVar("C", bound=type[NetworkMethod])


def register_composition(cls: C) -> C:
    """Class decorator that registers a composition under its `name`."""
    cls.check_metadata()
    compositions.add(cls.name)(cls())
    return cls
