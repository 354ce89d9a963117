"""Margins of a network over a ball or a box, from below (docs/math/forms.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float64
from torch import Tensor

from holdfast.compositions.forms.batches import Batches
from holdfast.compositions.forms.kinds import local_at, refusal
from holdfast.compositions.forms.local import LONGEST, Size
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.settled import Leads, Lower, Settled
from holdfast.compositions.forms.walk import CentreWalk, Covectors
from holdfast.errors import InputError, MemoryLimitError, NotApplicableError, TimeLimitError
from holdfast.layers.piece import LinearPiece
from holdfast.linalg.arithmetic import Proved
from holdfast.linalg.rounding import up
from holdfast.network.network import Network

_SLIGHT = 0.005  # a rest of this share of a function's first order is not made smaller
_LITTLE = 0.02  # of a margin: what a place takes of it is not made smaller, where rests are bounded roughly
_GLANCES, _GLANCE = 16, 0.08  # scales that are glanced at, at most, and the precision at which that ends
_BEGIN = 0.75  # the first scale that is tried, as a share of the first-order one
_EARLY, _EARLIER = 0.15, 0.02  # the same with jets, or for a glance; where functions are derived
_FALL, _SLOWLY = 3.0, 2  # of a scale at which nothing is proved; its powers where that has happened more than so often
_FAR, _BLIND = 4.0, 10  # a scale beyond which the search goes down by square roots, so often at most
_SETTLED, _TRIALS, _PROOFS = 8, 8, 4  # scales for which rests are settled, tried for each, and proved at most
_GUESS = 0.08  # the precision of the scale at which the search begins
_BEYOND = 1.02  # how far beyond the scale that is expected the search goes
_NEAR, _NEARER = 6.0, 2.0  # how much nearer, in units of the precision, the search does not come; with jets
_ROUGH, _FARTHER = 0.3, 1.7  # of what sums of suprema prove to what is proved at last, about: at least, and at most
_LARGE, _HOPELESS = 1024, 3.0  # coordinates from which on rests of so many times a margin end a trial at once
_LOST = 1.5  # times a margin, taken by first order, from which on nothing is tried where a sign is asked for
_BRANCHES = 8192  # of a box, at most, where one scale is asked for


@final
class Margins:
    """The margins at one input.

    Args:
        network: the classifier.
        x: (n, d) float64, the centre.
        shape: (n, d) half-widths of a box; None for an l2 ball.
        overdue: tells whether the time is over; what is under way is then given up.

    Attributes:
        walk: the places of the network.
        region: what may be perturbed.
        beyond: for every place that is not affine, at the scale that was settled last: its functions lie between -low
            and high of their first order.
    """

    def __init__(
        self,
        network: Network,
        x: Float64[Tensor, "n d"],
        shape: Float64[Tensor, "n d"] | None = None,
        overdue: Callable[[], bool] = bool,
    ) -> None:
        reason = refusal(network)
        if reason is not None:
            raise NotApplicableError(f"{network.name} has no forms: {reason}")
        self._seen: dict[float, Lower] = {}
        self._decided: dict[float, Lower] = {}
        self._in_time = _giving_up(overdue)
        self._sharp = True  # whether rests are bounded as sharply as is worth it, or by sums of suprema alone
        self._norms: dict[LinearPiece, float] = {}
        with torch.no_grad():
            self.walk = walk = CentreWalk(network, x.double())
            half = None if shape is None else shape.double().flatten()
            for i in walk.curved:
                walk.places[i].local = local_at(walk.places[i].piece, walk.places[i].u)
            walk.check_size()
            self.region = Region.of(walk.beginning(), half)
            if self.region.p > LONGEST:
                raise MemoryLimitError(
                    f"{self.region.p} numbers move; forms take at most {LONGEST}. Move fewer, by perturb="
                )
            self._margins = walk.pulled(walk.rows, len(walk.places), self.region)
            self._slopes = self.region.supremum(self._margins.X)
            self.beyond: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def _batches(self) -> Batches:
        with torch.no_grad():
            return Batches(self.walk, self.region, self._margins, self._in_time)

    @cached_property
    def _leads(self) -> Leads:
        return Leads(self.walk, self.region, self.gradients, self._slopes, self._batches)

    @property
    def functions(self) -> dict[int, tuple[Covectors, Tensor]]:
        """The scalars of places that are not affine, pulled back, and what they were rounded by; unless derived."""
        return self._batches.functions

    def first_order(self, i: int) -> Tensor:
        """(K, p) the first-order rows of the functions of a place that is not affine."""
        derived = self._batches.derived
        if self._batches.stream is not None:
            return self._batches.stream.first[i]
        return derived[i].X if i in derived else self.functions[i][0].X

    @property
    def tokens(self) -> dict[int, Tensor]:
        """For every place that is not affine, the tokens of its output on which a margin depends."""
        return self._batches.tokens

    @property
    def prediction(self) -> int:
        return self.walk.prediction

    @property
    def gradients(self) -> Tensor:
        """(classes - 1, p) of the margins, in the region's coordinates."""
        return self._margins.X

    # -- at a scale

    def at(self, scale: float) -> Lower:
        """Lower bounds of the margins over the region of this scale."""
        _check_scale(scale)
        if scale not in self._seen and self._batches.stream is not None:
            self._seen[scale] = self._glance(scale)
        if scale not in self._seen:
            with torch.no_grad():
                boxed = self.region.sides is not None
                lower = self._settle(scale, careful=False).lower(scale) if boxed else None
                if lower is None or not lower.least > 0:
                    lower = self._settle(scale).lower(scale, branches=_BRANCHES)
                self._seen[scale] = lower
        return self._seen[scale]

    def decide(self, scale: float) -> Lower:
        """The same where only the sign of the least margin counts: what shows that it is positive is not made tighter.

        Where first order alone takes much more than a margin, nothing is tried.
        """
        _check_scale(scale)
        if scale in self._seen or scale in self._decided:
            return self._seen.get(scale) or self._decided[scale]
        first = self._slopes * scale
        if bool((first > _LOST * self.walk.margins).any()):
            margins = torch.full((len(first) + 1,), -math.inf, dtype=torch.float64)
            self._decided[scale] = Lower(margins, -math.inf, {"first order": float(first.amax())})
        elif self.region.sides is None and (glance := self._glance(scale)).least > 0:
            self._decided[scale] = glance
        return self._decided.get(scale) or self.at(scale)

    def _glance(self, scale: float) -> Lower:
        """By sums of suprema alone."""
        with torch.no_grad(), self._roughly():
            return self._settle(scale).glance(scale)

    @contextmanager
    def _roughly(self) -> Iterator[None]:
        """Rests are bounded by sums of suprema inside: these cost little."""
        self._sharp = False
        try:
            yield
        finally:
            self._sharp = True

    def _settle(self, scale: float, careful: bool = True) -> Settled:
        """Every local learns of the scale; then what the margins lose."""
        size = Size.of(self.region, scale, careful)
        moved, radius = self._moved(size), size.radius
        tiny = up(self._margins.tiny(scale, moved[:-1]) + self.walk.row_error * moved[-1], 1e-12)
        if not bool(torch.isfinite(moved).all()):  # nothing is known of what comes after some place
            return Settled(self._leads, radius, tiny, {"carried rests": torch.full_like(tiny, math.inf)})
        if self._batches.expanded:
            return Settled(self._leads, radius, tiny, self._batches.at_end(radius, tiny))
        enough = None if self._sharp else torch.full_like(tiny, math.inf)
        settled = Settled(self._leads, radius, tiny, self._batches.at_end(radius, tiny, enough))
        left = settled.cheap(scale)
        hopeless = not bool((left > -_HOPELESS * self.walk.margins).all())
        if self._sharp or self._batches.vast or hopeless or bool((left > 0).all()):
            return settled
        enough = _LITTLE * self.walk.margins.clamp(min=0.0)
        return Settled(self._leads, radius, tiny, self._batches.at_end(radius, tiny, enough))

    def _moved(self, size: Size) -> Tensor:
        """Bounds of ‖δ‖ at all places, and at the features."""
        moved = torch.zeros(len(self.walk.places) + 1, dtype=torch.float64)
        self.beyond.clear()
        if self._batches.stream is not None:
            self._batches.stream.begin(size)
        u = self.region.reach * size.scale + self.walk.start_defect
        for members, skip, join in self.walk.stages:
            v = u
            for i in members:
                moved[i] = v
                place = self.walk.places[i]
                v = (
                    v * self._norm(place.piece)
                    if isinstance(place.piece, LinearPiece)
                    else self._settle_one(i, size, moved)
                )
                v = up(v + place.defect, 1e-12)
                if not math.isfinite(v):
                    return torch.full_like(moved, math.nan)
            u = up(u + v + join, 1e-12) if skip else v
        moved[-1] = u
        return moved

    def _norm(self, piece: LinearPiece) -> float:
        if piece not in self._norms:
            a = Proved()
            self._norms[piece] = float(a.number(piece.norm(a)))
        return self._norms[piece]

    def _settle_one(self, i: int, size: Size, moved: Tensor) -> float:
        self._in_time()
        batches, local = self._batches, self.walk.local(i)
        if batches.stream is not None:
            rests = batches.stream.rests(i, float(moved[i]))
        elif i in batches.derived:
            rests = batches.derived[i].rests(size.radius, float(moved[i]))
        else:
            functions, error = self.functions[i]
            tiny = up(functions.tiny(size.scale, moved[:-1]) + error * moved[i], 1e-12)
            enough = (_SLIGHT * size.scale if self._sharp else math.inf) * batches.suprema[i].clamp(min=1e-300)
            rests = batches.beyond(i, size.radius, enough, tiny)
        self.beyond[i] = rests.low, rests.high
        attention = local.attention
        if attention is not None and i in batches.bends:
            attention.bending = batches.ranges(batches.bends[i], size.radius)[0]
        moves = local.settle(size, rests, float(moved[i]))
        if attention is not None and i in batches.outputs:
            attention.output_rests = batches.ranges(batches.outputs[i], size.radius)[0]
        return moves

    # -- the largest scale

    def largest(self, precision: float, known: float = 0.0) -> float:
        """About the largest scale at which all margins are proved positive; 0 where none above `known` is found.

        Rests are settled a few times only. What is settled at one scale gives margins on all smaller ones; the largest
        of these with a positive margin is proved, and the next scale is taken between both.
        """
        ends = self.walk.margins / self._slopes.clamp(min=1e-250)
        most = float(ends.min())
        if not (math.isfinite(most) and most > 0):
            return 0.0
        if most <= known * (1 + precision):
            return known if self.at(known).least > 0 else 0.0
        if self._batches.expanded:  # rests are bounded in one way only
            return self._searched(max(_EARLY * most, known), most, 0.0, precision, known)
        vast = self._batches.vast
        if self._batches.stream is not None or (self.region.p > _LARGE and self.region.sides is None):
            roughly = self._glanced(most, _ROUGH * known, precision if vast else _GLANCE)
            if vast:
                return roughly
        else:
            with self._roughly():  # tells where to begin
                roughly = self._searched(max(_BEGIN * most, known), most, 0.0, max(precision, _GUESS), _ROUGH * known)
        if roughly * (1 + precision) >= most:
            return roughly
        begin = min(_BEGIN * most, _FARTHER * roughly) if roughly > 0 else _BEGIN * most
        return self._searched(max(begin, known), most, roughly, precision, known)

    def _glanced(self, most: float, least: float, precision: float = _GLANCE) -> float:
        """About the largest scale below `most` that a glance proves; not looked for below `least`."""
        low, high, scale = (
            0.0,
            most,
            most * (_EARLIER if self._batches.derived or self._batches.stream is not None else _EARLY),
        )
        for _ in range(_GLANCES):
            try:
                lower = self._glance(scale)
            except TimeLimitError:
                break
            if lower.least > 0:
                low, self._decided[scale] = scale, lower
            else:
                high = scale
            if high <= low * (1 + precision) or high <= least:
                break
            ahead = self._bending(scale, lower) if lower.least > 0 or low == 0 else high
            scale = ahead if low < ahead < high else math.sqrt(low * high)
            scale = scale if scale > 0 else high / _FARTHER**4
        return low

    def _searched(self, scale: float, most: float, proved: float, precision: float, known: float) -> float:
        """The largest scale that is proved, from one that is tried first; at least the one that is proved already."""
        first, failed, settled, falls = most, False, 0, 0
        near = _NEARER if self._batches.expanded else _NEAR
        for _ in range(_SETTLED + _BLIND):
            try:
                with torch.no_grad():
                    proved = max(proved, self._largest_settled(scale, proved, precision))
            except TimeLimitError:  # what was seen before stays
                proved = max([proved, *(seen for seen, lower in self._seen.items() if lower.least > 0)])
                break
            if proved < scale:
                most, failed = scale, True
            if proved == 0 and scale > _FAR:  # margins hardly change to first order, which says nothing of where
                scale = max(known, math.sqrt(scale))
                continue
            settled += proved > 0
            if settled == _SETTLED or most <= proved * (1 + precision * (near if failed else 1.0)) or most <= known:
                break
            if failed and proved == 0:  # nothing tells how much smaller the scale must be: after a while ever faster
                falls += 1
                scale = max(known, most / _FALL ** max(1, falls - _SLOWLY))
            elif proved < scale:
                scale = _meeting(first, scale, proved)
            elif failed:
                scale = math.sqrt(proved) * math.sqrt(most)
            else:
                scale = min(most / (1 + precision / 2), _FARTHER * scale, self._expected(scale))
        return proved

    def _expected(self, scale: float) -> float:
        """A bit beyond where margins that are proved at a scale may end."""
        return _BEYOND * max(self._bending(scale, self._seen[scale]), scale) if scale in self._seen else math.inf

    def _bending(self, scale: float, lower: Lower) -> float:
        """Where margins end, if they bend as they did up to a scale; 0 where nothing is known of one there."""
        value, slope, proved = self.walk.margins, self._slopes, lower.margins[self.walk.others]
        bend = ((value - slope * scale - proved) / scale / scale).clamp(min=0.0)
        ends = 2 * value / (slope + (slope.square() + 4 * bend * value).sqrt()).clamp(min=1e-250)
        return float(ends.min())

    def _largest_settled(self, scale: float, known: float, precision: float) -> float:
        """The largest scale with positive margins, given the rests of one that is no smaller; at least `known`.

        Scales are tried by guesses; the one that is found is proved.
        """
        settled = self._settle(scale)
        if self.region.p > _LARGE and bool((settled.lost > _HOPELESS * self.walk.margins).any()):
            return known  # matrices of many numbers would cost more than what they might save
        low, high, trial = known, scale, scale
        above, below = float(self.walk.margins.min()), -math.inf  # the margins there, or at 0
        for _ in range(_TRIALS):
            lower = settled.lower(trial, prove=False)
            if lower.least > 0:
                low, above = trial, lower.least
            else:
                high, below = trial, lower.least
            if low >= scale or high <= low * (1 + precision / 2):
                break
            # Margins bend downwards: their chord meets zero on the safe side. Branches say only that one is positive.
            share = above / (above - below) if math.isfinite(below) else 0.5
            trial = low + (high - low) * min(max(share, 0.1 if self.region.sides is None else 0.4), 0.95)
        for _ in range(_PROOFS):
            if low <= known:
                break
            lower = settled.lower(low)
            if lower.least > 0:
                self._seen[low] = lower
                return low
            low *= 1 - precision
        return known


def _giving_up(overdue: Callable[[], bool]) -> Callable[[], None]:
    """No method of the margins: parts that hold it would keep gigabytes alive until cycles are collected."""

    def in_time() -> None:
        if overdue():
            raise TimeLimitError("the time for this input was over before its forms were")

    return in_time


def _check_scale(scale: float) -> None:
    if not scale >= 0:
        raise InputError(f"the scale of a region is {scale}; expected a number that is not negative")


def _meeting(first: float, scale: float, proved: float) -> float:
    """Where rests that are settled at s are about those of which s itself is proved.

    With rests settled at s about f - c s² is proved, f what first order allows, or not much more than the scale, and
    c from what was proved at one scale.
    """
    f = min(first, 1.5 * scale) / scale
    c = f - proved / scale
    if not c > 0:
        return proved * 1.01
    return max(proved * 1.01, scale * (math.sqrt(1 + 4 * c * f) - 1) / (2 * c))
