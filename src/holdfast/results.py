"""What the library returns: frozen objects that say how far they may be believed.

`side` is "upper" (a bound), "lower" (attained by a witness) or "estimate" (neither). `guarantee` is "proved" (float64,
rounded outward) or "numerical" (the formula is a theorem, but a number in it came from an iteration or plain rounding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

from torch import Tensor

from holdfast.errors import InputError, SoundnessError
from holdfast.radii import check_radii
from holdfast.storage import Pathlike, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

Side = Literal["upper", "lower", "estimate"]
Guarantee = Literal["proved", "numerical"]
Scope = Literal["ball at x", "point", "ball at 0"]


def _plain(value: object) -> object:
    """Tensors as nested lists, for JSON."""
    return value.tolist() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class NormResult:
    """The largest singular value of a batch of linear maps.

    Attributes:
        value: (b…) the norm.
        side: "estimate" (approached from below) or "upper".
        guarantee: "proved" for an upper value, "numerical" for an estimate.
        residual: (b…) ‖Jᵀu - σv‖ for an estimate: some singular value lies within it of `value`;
            for an upper value, its distance to the estimate that it started from.
        iterations: steps of the iteration, or trial shifts of the proof.
        left: (b…, codomain…) left singular vector of an estimate.
        right: (b…, domain…) right singular vector of an estimate.
        seconds: wall time.
    """

    value: Tensor
    side: Side
    guarantee: Guarantee
    residual: Tensor
    iterations: int
    left: Tensor | None = field(default=None, repr=False)
    right: Tensor | None = field(default=None, repr=False)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the vectors, ready for JSON."""
        names = ("value", "side", "guarantee", "residual", "iterations", "seconds")
        return {name: _plain(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class BoundResult:
    """How far the output of a layer can move.

    Attributes:
        value: (b…) for one eps, (b…, e) for e of them.
        eps: the radius, or the radii, as given.
        terms: the named quantities of the formula; shapes begin with (b…) unless it is a quantity of the weights
            alone, then (h) where it is a head's, then (e) where it depends on eps.
        notes: what the method has to say: which one won, what did not apply.
    """

    value: Tensor
    method: str
    eps: float | tuple[float, ...]
    side: Side
    scope: Scope
    guarantee: Guarantee
    terms: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        fields = {name: _plain(value) for name, value in vars(self).items() if name != "terms"}
        return fields | {"terms": {name: _plain(term) for name, term in self.terms.items()}}


@dataclass(frozen=True)
class LipschitzResult:
    """How steep a layer can be. It says nothing of how far the output moves in a ball around a point.

    Attributes:
        value: (b…) at points; () or (r) on balls around 0.
        scope: "point": the norm of the Jacobian there and nowhere else; "ball at 0": the Lipschitz constant on
            sequences of `tokens` tokens of length at most `radius`, for the W_p distance without a mask and token-wise,
            (Σ_i |x_i - y_i|^p)^{1/p}, otherwise.
        radius: the radius, or the radii, as given; None at points, like `tokens` and `p`.
        terms: the named quantities of the formula.
        notes: what the method has to say: which one won, what did not apply.
    """

    value: Tensor
    method: str
    side: Side
    scope: Scope
    guarantee: Guarantee
    terms: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()
    radius: float | tuple[float, ...] | None = None
    tokens: int | None = None
    p: float | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, which has no infinity."""
        fields = {name: _plain(value) for name, value in vars(self).items() if name != "terms"}
        fields["p"] = "inf" if self.p == float("inf") else self.p
        return fields | {"terms": {name: _plain(term) for name, term in self.terms.items()}}


@dataclass(frozen=True)
class AttackResult:
    """A perturbation that was found, and what it does.

    Attributes:
        lower: (b…), or (b…, h) where heads are attacked apart, then (e) for e radii: the value at the witness,
            rounded down.
        witness: (b…, n, d) the perturbed input X', with heads and radii before n as in `lower`; its distance from X
            is at most eps.
        objective: what was maximised.
    """

    lower: Tensor
    witness: Tensor = field(repr=False)
    objective: str
    eps: float | tuple[float, ...]
    guarantee: Guarantee
    side: Side = "lower"
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the witness, ready for JSON."""
        return {name: _plain(value) for name, value in vars(self).items() if name != "witness"}


@dataclass(frozen=True)
class LipschitzWitness:
    """Tokens at which a layer is steep, and the direction in which it is.

    Attributes:
        lower: () ‖DF(X)G‖ / ‖G‖ at the witness X in the direction G, rounded down where the guarantee is "proved".
        witness: (n, d) the tokens X, none longer than `radius`.
        direction: (n, d) the direction G.
        guaranteed: what the construction promises by a closed formula; None for a point that was searched.
        weights: (n) weights μ of the tokens, whose metric is Σ_i μ_i |·|²; None where all count alike.
        origin: where the witness comes from.
    """

    lower: Tensor
    witness: Tensor = field(repr=False)
    direction: Tensor = field(repr=False)
    radius: float
    origin: str
    guarantee: Guarantee
    guaranteed: float | None = None
    weights: Tensor | None = field(default=None, repr=False)
    side: Side = "lower"
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Everything but the witness and its direction, ready for JSON."""
        return {name: _plain(value) for name, value in vars(self).items() if name not in ("witness", "direction")}


UNDECIDED = -1  # the prediction where rounding errors hide which logit is the largest


@dataclass(frozen=True, kw_only=True)
class RadiusRecord:
    """One input of a classifier, and how far it can move before the answer changes: what both kinds share.

    Attributes:
        index: its place in the data set.
        label: its true class.
        prediction: the class that the model answers in exact arithmetic, or UNDECIDED.
        margin: a lower bound of the smallest difference between the logit of the prediction and another one.
        radius: no perturbation of l2 norm up to it changes the prediction; 0 where nothing could be shown.
        method: which composition gave the radius.
        attack_radius: the norm, rounded up, of a perturbation that changes it, checked in balls or, for deep networks,
            in float64; infinite where a search found none, None where there was no search.
        seconds: wall time.
        perturbation: (n, d) float32: that perturbation.
        side: of the bounds that the radius rests on.
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
    side: Side = "upper"

    def __post_init__(self) -> None:
        where = f"input {self.index}"
        if not math.isfinite(self.radius) or self.radius < 0:
            raise InputError(f"{where}: the radius is {self.radius!r}; expected a finite number that is not negative")
        if not math.isfinite(self.margin):
            raise InputError(f"{where}: the margin is {self.margin!r}; expected a finite number")
        if self.side != "upper":
            raise InputError(f"{where}: the bounds are of side {self.side!r}; a radius rests on upper bounds alone")
        if self.radius > 0 and (self.prediction == UNDECIDED or self.margin <= 0):
            raise SoundnessError(
                f"{where}: the radius is {self.radius!r} with prediction {self.prediction} and margin {self.margin!r}; "
                "a positive radius needs a decided prediction and a positive margin"
            )
        if self.attack_radius is not None and not self.attack_radius >= 0:
            raise InputError(f"{where}: the attack radius is {self.attack_radius!r}; expected a number from 0 on")
        # The ball is closed and the witness lies outside of it, so equality contradicts as well.
        found = math.inf if self.attack_radius is None else self.attack_radius
        if self.radius > found or (self.radius == found and self.prediction != UNDECIDED):
            raise SoundnessError(
                f"{where}: the radius {self.radius!r} is not below the distance {found!r} of a perturbation that "
                "changes the answer; one of the two is wrong: please report the model and the input"
            )

    @property
    def correct(self) -> bool:
        """Whether the prediction is the label; where none is decided it is not, whatever the label."""
        return self.prediction == self.label != UNDECIDED

    def to_dict(self) -> dict[str, Any]:
        """Everything but the perturbation, ready for JSON, which has no infinity."""
        fields = {name: value for name, value in vars(self).items() if name not in ("perturbation", "side")}
        return fields | {"attack_radius": "inf" if self.attack_radius == math.inf else self.attack_radius}


@final
@dataclass(frozen=True, kw_only=True)
class Certificate(RadiusRecord):
    """A proved radius, with the fields of `RadiusRecord`: float64, rounded down. Built from an estimate, it raises."""

    def __post_init__(self) -> None:
        if self.guarantee != "proved":
            raise InputError(
                f"input {self.index}: the guarantee is {self.guarantee!r}; a certificate needs proved bounds: "
                "use guarantee='proved', or a RadiusEstimate"
            )
        super().__post_init__()


@final
@dataclass(frozen=True, kw_only=True)
class RadiusEstimate(RadiusRecord):
    """A radius from a theorem with norms from an iteration, with the fields of `RadiusRecord`: no certificate."""

    def __post_init__(self) -> None:
        if self.guarantee != "numerical":
            raise InputError(
                f"input {self.index}: the guarantee is {self.guarantee!r}; an estimate is 'numerical': "
                "build a Certificate from proved bounds"
            )
        super().__post_init__()


@final
@dataclass(frozen=True)
class CertificationRun:
    """A classifier on a data set: what was proved of every input, and what an attack found.

    Attributes:
        model: what to call the model.
        data: what to call the data set.
        radii: at which accuracies are shown.
        records: one for each input that is done, by index.
        missing: indices of the inputs that are not done.
        settings: everything that the records depend on, in words; the fingerprint is made of it.
        fingerprint: the same for runs whose records may stand in one file.
        command: the command line that made it, where there was one.
    """

    model: str
    data: str
    radii: tuple[float, ...]
    records: tuple[Certificate | RadiusEstimate, ...]
    missing: tuple[int, ...]
    settings: Mapping[str, str]
    fingerprint: str
    command: str | None = None

    @property
    def attacked_too(self) -> bool:
        """Whether every record has an attack."""
        return bool(self.records) and all(record.attack_radius is not None for record in self.records)

    def clean(self) -> float:
        """The share of the inputs that are done whose prediction is the label."""
        return self._share([record.correct for record in self.records])

    def accuracy(self, radius: float) -> float:
        """The share that is right and stays so under every perturbation up to `radius`, shown by the bounds."""
        (radius,) = check_radii(radius, "radius")
        return self._share([record.correct and record.radius >= radius for record in self.records])

    def attacked(self, radius: float) -> float:
        """The share that is right and for which the attack found no perturbation up to `radius`: no more is true."""
        (radius,) = check_radii(radius, "radius")
        if not self.attacked_too:
            raise InputError("the run has no attack; certify with attack=True (--attack)")
        found = [record.correct and (record.attack_radius or 0.0) > radius for record in self.records]
        return self._share(found)

    def _share(self, hits: Sequence[bool]) -> float:
        if not hits:
            raise InputError("no input is done; run certify again to go on")
        return sum(hits) / len(hits)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the perturbations, ready for JSON."""
        fields = {name: value for name, value in vars(self).items() if name != "records"}
        return fields | {
            "accuracy": [self.accuracy(radius) for radius in self.radii] if self.records else [],
            "records": [record.to_dict() for record in self.records],
        }

    def table(self, *beside: CertificationRun) -> Table:
        """Accuracies at the radii, for the terminal, with other runs in the same table."""
        from holdfast.report.certificate import run_table

        return run_table(self, *beside)

    def plot(self, *beside: CertificationRun) -> Figure:
        """Certified accuracy over the radius below the attack's, with other runs in the same figure."""
        from holdfast.report.certificate import plot_runs

        return plot_runs([self, *beside])

    def to_html(self, path: Pathlike, *beside: CertificationRun) -> None:
        """Writes the page, with other runs beside this one: one file that needs nothing else."""
        from holdfast.report.certificate import render

        write_text(path, render([self, *beside]))
