"""The result of an analysis: numbers and words, no tensors, so that it can be stored and shown anywhere."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from holdfast.errors import InputError
from holdfast.extras import require
from holdfast.reporting import Shown, writer
from holdfast.results import Guarantee, brief
from holdfast.storage import Pathlike, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from holdfast.tables import Table

SCHEMA = "holdfast.analysis/1"

Row = tuple[float, ...]
Rows = tuple[Row, ...]


@final
@dataclass(frozen=True)
class AnalyzedInput:
    """One input as displayed.

    Attributes:
        tokens: what to call each token, padding included.
        padding: which tokens are padding; they take no part in any number.
        image: the picture as a data URI, where the input is one.
        grid: rows and columns of its patches, which are the last tokens in reading order.
    """

    tokens: tuple[str, ...]
    padding: tuple[bool, ...]
    image: str | None = None
    grid: tuple[int, int] | None = None


@final
@dataclass(frozen=True)
class AnalyzedLayer:
    """One attention layer at b inputs, with h heads, over e radii.

    Attributes:
        index: its place among the attention layers of the model.
        layer: the layer in words.
        rebuild_error: how far the rebuilt layer is from what the model computed, relatively.
        slope: (b) ‖DF(x)‖, an estimate from below.
        slope_upper: (b) the same, proved from above; None where it was not requested or needs too much memory.
        head_slope: (b, h) the same estimate for the contribution of each head alone, without the residual.
        softmax_norm: (b, h) the largest ‖diag(p) - ppᵀ‖ over the rows p of P.
        softmax_g1: (b, h) the closed-form bound g₁ of it, likewise.
        attention_norm: (b, h) ‖P‖, an estimate from below.
        entropy: (b, h) mean entropy of a row of P, in nats.
        bound: (b, e) how far the output can move; None where no bound applies.
        bound_note: which method gave the bound, or why there is none.
        attack: (b, e) how far the best perturbation found moves it; None where none was requested.
        energy: (b, n) share of each token in the direction that moves the output most; 0 for padding.
        seconds: wall time.
    """

    index: int
    name: str
    layer: str
    rebuild_error: float
    slope: Row
    slope_upper: Row | None
    head_slope: Rows
    softmax_norm: Rows
    softmax_g1: Rows
    attention_norm: Rows
    entropy: Rows
    bound: Rows | None
    bound_note: str
    attack: Rows | None
    energy: Rows
    seconds: float


@final
@dataclass(frozen=True, repr=False)
class Analysis(Shown):
    """The attention layers of a model at some inputs.

    Attributes:
        model: what to call the model.
        eps: the radii.
        guarantee: of the bounds.
        method: of the bounds.
        attack: the attack in words.
        inputs: the inputs as displayed.
        layers: the results, in the order of the model.
        planned: how many layers were requested; more than `layers` holds if the run was interrupted.
        notes: what else a reader must know, such as that weights are random.
        versions: of the packages involved.
        command: the command line that made it, where there was one.
        seconds: wall time, with loading and tracing where the caller counted them.
    """

    model: str
    eps: Row
    guarantee: Guarantee
    method: str
    attack: str
    inputs: tuple[AnalyzedInput, ...]
    layers: tuple[AnalyzedLayer, ...]
    planned: int
    notes: tuple[str, ...]
    versions: Mapping[str, str]
    command: str | None = None
    seconds: float = 0.0

    def facts(self) -> dict[str, object]:
        """The line of a prompt."""
        shown: dict[str, object] = {"model": self.model, "layers": f"{len(self.layers)} of {self.planned}"}
        if self.layers:
            steepest = max(self.layers, key=lambda layer: max(layer.slope))
            shown["steepest"] = f"{steepest.name} ({max(steepest.slope):.4g})"
        return shown | {"eps": brief(self.eps), "bounds": f"{self.method}, {self.guarantee}"}

    @property
    def interrupted(self) -> bool:
        """Whether requested layers are missing."""
        return len(self.layers) < self.planned

    @property
    def tightness(self) -> Row:
        """For each radius the median ratio of bound to attack over layers and inputs; empty where either is missing."""
        pairs = [(layer.bound, layer.attack) for layer in self.layers if layer.bound and layer.attack]
        ratios: list[list[float]] = [[] for _ in self.eps]
        for bounds, attacks in pairs:
            for bound, attack in zip(bounds, attacks, strict=True):
                for column, (upper, lower) in zip(ratios, zip(bound, attack, strict=True), strict=True):
                    column.extend([upper / lower] if lower > 0 else [])
        return tuple(statistics.median(column) for column in ratios) if all(ratios) else ()

    def to_json(self) -> str:
        """Everything, with the name of the schema; `from_json` reads it back."""
        return json.dumps({"schema": SCHEMA} | dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Analysis:
        """The analysis that `to_json` wrote."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"this is not JSON: {error}; expected what Analysis.to_json wrote") from None
        schema = fields.pop("schema", None) if isinstance(fields, dict) else None
        if schema != SCHEMA:
            raise InputError(f"the schema is {schema!r}; expected {SCHEMA!r}, as written by Analysis.to_json")
        try:
            inputs = tuple(AnalyzedInput(**_frozen(item)) for item in fields.pop("inputs"))
            layers = tuple(AnalyzedLayer(**_frozen(item)) for item in fields.pop("layers"))
            return cls(inputs=inputs, layers=layers, **_frozen(fields))
        except (TypeError, KeyError) as error:
            raise InputError(f"the fields do not fit {SCHEMA}: {error}; was the file edited?") from None

    def to_dataframe(self) -> DataFrame:
        """A pandas DataFrame with a row for each layer, input and radius; it needs pandas."""
        rows = [
            {
                "layer": layer.index,
                "name": layer.name,
                "input": i,
                "eps": eps,
                "slope": layer.slope[i],
                "slope_upper": None if layer.slope_upper is None else layer.slope_upper[i],
                "bound": None if layer.bound is None else layer.bound[i][e],
                "attack": None if layer.attack is None else layer.attack[i][e],
                "attention_norm": max(layer.attention_norm[i]),
                "softmax_norm": max(layer.softmax_norm[i]),
                "entropy": max(layer.entropy[i]),
            }
            for layer in self.layers
            for i in range(len(self.inputs))
            for e, eps in enumerate(self.eps)
        ]
        frame: DataFrame = require("pandas", "notebook").DataFrame(rows)
        return frame

    def table(self) -> Table:
        """The layers as a table for the terminal."""
        table: Table = writer("analysis").analysis_table(self)
        return table

    def plot(self) -> Figure:
        """The local constants and bounds over depth, and the heads, as a matplotlib figure."""
        figure: Figure = writer("analysis").plot_analysis(self)
        return figure

    def to_html(self, path: Pathlike) -> None:
        """Writes the page: one file that needs nothing else."""
        write_text(path, writer("analysis page").render(self))


def _frozen(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as tuples, all the way down."""
    return {name: _tuples(value) for name, value in fields.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
