"""What is known about one input of a classifier: how far it can move before the answer changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from holdfast.errors import InputError, SoundnessError
from holdfast.reporting import Shown
from holdfast.results.kinds import Guarantee, Norm, Side

UNDECIDED = -1  # the prediction where rounding errors hide which logit is the largest


@dataclass(frozen=True, kw_only=True, repr=False)
class RadiusRecord(Shown):
    """One input of a classifier, and how far it can move before the answer changes: what both kinds share.

    Attributes:
        index: its place in the data set.
        label: its true class.
        prediction: the class that the model answers in exact arithmetic, or UNDECIDED.
        margin: a lower bound of the lead of the prediction's logit at the input itself, whatever the radius.
        radius: no perturbation up to this size, in the record's norm, changes the prediction; 0 where nothing is shown.
        method: which composition gave the radius.
        attack_radius: the norm, rounded up, of a perturbation that changes it, checked in balls or, for deep networks,
            in float64; infinite where a search found none, None where there was no search.
        seconds: wall time.
        perturbation: (n, d) float32: that perturbation.
        norm: of perturbations: "l2", or "linf" in the units of the input.
        through: "ball" where l-infinity boxes were requested and the radius was shown over the balls around them.
        losses: what was taken off the margin at the radius, by name; empty where nothing is shown, or the time was over
            before it was known.
        unfinished: what was left out for lack of time, in words.
        side: of the radius: a proved one is a lower bound of the true one.
    """

    index: int
    label: int
    prediction: int
    margin: float
    radius: float
    method: str
    guarantee: Guarantee
    attack_radius: float | None = None
    seconds: float = 0.0
    perturbation: Tensor | None = field(default=None, repr=False, compare=False)
    norm: Norm = "l2"
    through: str | None = None
    losses: Mapping[str, float] = field(default_factory=dict, repr=False)
    unfinished: tuple[str, ...] = field(default=(), repr=False)
    side: Side = "estimate"

    def __post_init__(self) -> None:
        where = f"input {self.index}"
        if not math.isfinite(self.radius) or self.radius < 0:
            raise InputError(f"{where}: the radius is {self.radius!r}; expected a finite number that is not negative")
        if not math.isfinite(self.margin):
            raise InputError(f"{where}: the margin is {self.margin!r}; expected a finite number")
        if self.radius > 0 and (self.prediction == UNDECIDED or self.margin <= 0):
            raise SoundnessError(
                f"{where}: the radius is {self.radius!r} with prediction {self.prediction} and margin {self.margin!r}; "
                "a positive radius needs a decided prediction and a positive margin"
            )
        if self.attack_radius is not None and not self.attack_radius >= 0:
            raise InputError(f"{where}: the attack radius is {self.attack_radius!r}; expected a number from 0 on")
        # The ball is closed and the witness lies outside it, so equality is a contradiction as well.
        nearest = math.inf if self.attack_radius is None else self.attack_radius
        if self.radius > nearest or (self.radius == nearest and self.prediction != UNDECIDED):
            raise SoundnessError(
                f"{where}: the radius {self.radius!r} is not below the distance {nearest!r} of a perturbation that "
                "changes the answer; one of the two is wrong: please report the model and the input"
            )

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        answer = "undecided" if self.prediction == UNDECIDED else f"{self.prediction} for {self.label}"
        shown = {"input": self.index, "answer": answer, "radius": f"{self.radius:.4g} ({self.norm})"}
        shown |= {} if self.attack_radius is None else {"changed at": f"{self.attack_radius:.4g}"}
        return shown | {"method": self.method, "guarantee": self.guarantee}

    @property
    def correct(self) -> bool:
        """Whether the prediction is the label; where none is decided it is not, whatever the label."""
        return self.prediction == self.label != UNDECIDED

    def to_dict(self) -> dict[str, Any]:
        """Everything but the perturbation, ready for JSON, which has no infinity."""
        fields = {name: value for name, value in vars(self).items() if name != "perturbation"}
        attacked = "inf" if self.attack_radius == math.inf else self.attack_radius
        return fields | {"attack_radius": attacked, "losses": dict(self.losses), "unfinished": list(self.unfinished)}


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Certificate(RadiusRecord):
    """A proved radius, with the fields of `RadiusRecord`: float64, rounded down. Built from an estimate, it raises."""

    side: Side = "lower"

    def __post_init__(self) -> None:
        if self.side != "lower":
            raise InputError(
                f"input {self.index}: the side is {self.side!r}; a proved radius is a lower bound of the true one"
            )
        if self.guarantee != "proved":
            raise InputError(
                f"input {self.index}: the guarantee is {self.guarantee!r}; a certificate needs proved bounds: "
                "use guarantee='proved', or a RadiusEstimate"
            )
        super().__post_init__()


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class RadiusEstimate(RadiusRecord):
    """A radius from a theorem with norms from an iteration, with the fields of `RadiusRecord`: no certificate."""

    def __post_init__(self) -> None:
        if self.side != "estimate":
            raise InputError(f"input {self.index}: the side is {self.side!r}; a numerical radius is an estimate")
        if self.guarantee != "numerical":
            raise InputError(
                f"input {self.index}: the guarantee is {self.guarantee!r}; an estimate is 'numerical': "
                "build a Certificate from proved bounds"
            )
        super().__post_init__()
