"""What is known about a classifier on a whole data set, and what it was required to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from holdfast.errors import InputError
from holdfast.extras import require
from holdfast.radii import check_radii
from holdfast.reporting import Shown, writer
from holdfast.results.kinds import Norm
from holdfast.results.losses import mean_shares
from holdfast.results.records import Certificate, RadiusEstimate
from holdfast.storage import Pathlike, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from holdfast.tables import Table


@final
@dataclass(frozen=True)
class Target:
    """What a run must show: at least this share of all its inputs right and proved to stay so up to the radius."""

    accuracy: float
    radius: float

    def __post_init__(self) -> None:
        check_radii(self.radius, "the radius of a target")
        if not 0 <= self.accuracy <= 1:
            raise InputError(f"the accuracy of a target is {self.accuracy!r}; expected a share from 0 to 1")

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.4g} % at {self.radius:.6g}"


@final
@dataclass(frozen=True, repr=False)
class CertificationRun(Shown):
    """A classifier on a data set: what was proved for every input, and what an attack found.

    Attributes:
        model: what to call the model.
        data: what to call the data set.
        radii: at which accuracies are shown.
        records: one for each input that is done, by index.
        missing: indices of the inputs that are not done.
        settings: everything that the records depend on, in words; the fingerprint is made of it.
        fingerprint: the same for runs whose records may stand in one file.
        command: the command line that made it, where there was one.
        failures: why an input that is missing could not be done, by index.
        inputs: how they can be shown, by index: an image (c, h, w) or (h, w) with numbers from 0 to 1, or the
            words of a sentence; empty where they are neither, and where a run was read from its file alone.
    """

    model: str
    data: str
    radii: tuple[float, ...]
    records: tuple[Certificate | RadiusEstimate, ...]
    missing: tuple[int, ...]
    settings: Mapping[str, str]
    fingerprint: str
    command: str | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    inputs: Mapping[int, Tensor | tuple[str, ...]] = field(default_factory=dict, compare=False)

    def facts(self) -> dict[str, object]:
        """The line of a prompt: the accuracies, and no hashes."""
        done = len(self.records)
        shown: dict[str, object] = {
            "model": self.model,
            "data": self.data,
            "inputs": f"{done} of {done + len(self.missing)}",
        }
        if self.records:
            shown["clean"] = f"{100 * self.clean():.1f} %"
            for radius in self.radii:
                shown[f"certified at {radius:.4g}"] = f"{100 * self.accuracy(radius):.1f} %"
        words = ("method", "guarantee")
        return shown | {name: self.settings[name] for name in words if name in self.settings}

    @property
    def attacked_too(self) -> bool:
        """Whether every record has an attack."""
        return bool(self.records) and all(record.attack_radius is not None for record in self.records)

    def clean(self) -> float:
        """The share of finished inputs whose prediction is the label."""
        return self._share([record.correct for record in self.records])

    def accuracy(self, radius: float) -> float:
        """The share that is right and stays so under every perturbation up to `radius`, shown by the bounds."""
        (radius,) = check_radii(radius, "radius")
        return self._share([record.correct and record.radius >= radius for record in self.records])

    def shown(self, target: Target) -> float:
        """What counts towards a target: a share of all inputs; one that is not done or not proved counts as lost."""
        hits = [r.correct and r.radius >= target.radius and r.guarantee == "proved" for r in self.records]
        return sum(hits) / (len(hits) + len(self.missing)) if hits else 0.0

    def meets(self, target: Target) -> bool:
        """Whether a target is reached."""
        return self.shown(target) >= target.accuracy

    def attacked(self, radius: float) -> float:
        """The share that is right and for which the attack found no perturbation up to `radius`.

        No proof can show more.
        """
        (radius,) = check_radii(radius, "radius")
        if not self.attacked_too:
            raise InputError("the run has no attack; certify with attack=True (--attack)")
        unchanged = [record.correct and (record.attack_radius or 0.0) > radius for record in self.records]
        return self._share(unchanged)

    def losses(self) -> dict[str, float]:
        """What the margins of proved inputs were lost to at their radii: the mean share of each loss, by name."""
        return mean_shares(record.losses for record in self.records)

    def left_out(self) -> dict[str, int]:
        """What was left out for lack of time, in words, and for how many inputs."""
        return dict(Counter(note for record in self.records for note in record.unfinished))

    @property
    def norm(self) -> Norm:
        """The norm of the perturbations."""
        return "linf" if self.settings.get("norm") == "linf" else "l2"

    @property
    def perturbations(self) -> str:
        """What the radii measure, in words."""
        clip = self.settings.get("clip")
        within = "" if clip is None else f", clipped to {', '.join(f'{float(end):g}' for end in clip.split(','))}"
        return ("l-infinity" if self.norm == "linf" else "l2") + within

    def _share(self, hits: Sequence[bool]) -> float:
        if not hits:
            raise InputError("no input is done; run certify again to resume")
        return sum(hits) / len(hits)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the inputs and the perturbations, ready for JSON."""
        fields = {name: value for name, value in vars(self).items() if name not in ("records", "inputs")}
        return fields | {
            "accuracy": [self.accuracy(radius) for radius in self.radii] if self.records else [],
            "records": [record.to_dict() for record in self.records],
        }

    def to_dataframe(self) -> DataFrame:
        """The records as a pandas DataFrame, one row per input; it needs pandas."""
        rows = [record.to_dict() | {"attack_radius": record.attack_radius} for record in self.records]
        frame: DataFrame = require("pandas", "notebook").DataFrame(rows)
        return frame.set_index("index") if rows else frame

    def table(self, *beside: CertificationRun) -> Table:
        """Accuracies at the radii, for the terminal, with other runs in the same table."""
        table: Table = writer("certificate").run_table(self, *beside)
        return table

    def plot(self, *beside: CertificationRun) -> Figure:
        """Certified accuracy against the radius, below the attack's, with other runs in the same figure."""
        figure: Figure = writer("certificate").plot_runs([self, *beside])
        return figure

    def to_html(self, path: Pathlike, *beside: CertificationRun, targets: Sequence[Target] = ()) -> None:
        """Writes the page, with other runs beside this one, as one self-contained file."""
        write_text(path, writer("certificate").render([self, *beside], targets))

    def to_junit(self, path: Pathlike, *targets: Target) -> None:
        """Writes the targets as JUnit XML, which continuous integration systems read."""
        write_text(path, writer("junit").render(self, targets))
