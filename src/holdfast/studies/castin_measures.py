"""`castin-mean-field`: constants for every number of tokens, against measures at which the slope is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.figure import Figure

from holdfast import api
from holdfast.attacks import adversarial_configuration, two_diracs
from holdfast.attention import AttentionLayer
from holdfast.report.style import PALETTE, draw_range, new_figure
from holdfast.studies.castin_heads import gamma_of, single_head
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study


@final
@dataclass(frozen=True)
class MeasureGrowth:
    """One head on measures, over R.

    Attributes:
        seed: of A.
        a: ‖A‖.
        gamma: as in `BallGrowth`.
        radii: R.
        published: v (1 + 3aR²) e^{2aR²}.
        bound: ours for W_2, proved.
        attained: the slope at two Dirac masses.
        promised: the largest of e^{γR²} √t/(1+t) (1 + 2γR² t/(1+t)) over t.
        masked_bound: ours for causal attention, for d_2, proved.
        masked_slope: the steepest that causal attention was found to be in d_2, at adversarial tokens and at A = 0.
    """

    seed: int
    a: float
    gamma: float
    radii: list[float]
    published: list[float]
    bound: list[float]
    attained: list[float]
    promised: list[float]
    masked_bound: list[float]
    masked_slope: list[float]


@final
@dataclass(frozen=True)
class CesaroNorm:
    """The norm of causal attention without scores (A = 0), on n tokens, where the unmasked constant is 1."""

    tokens: int
    norm: float


@final
@dataclass(frozen=True)
class MeasureParameters:
    """What `repro castin-mean-field` takes."""

    radii: tuple[float, ...] = option((0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0), "R.")
    seeds: int = option(4, "Number of heads.", grid=True, least=1)
    width: int = option(4, "Width of a token.", least=1)
    norm: float = option(0.5, "‖A‖.")
    tokens: tuple[int, ...] = option(
        (2, 10, 100, 1000), "Numbers of tokens for causal attention without scores.", grid=True, least=1
    )


@final
@register_study
class CastinMeasures(Study[MeasureParameters]):
    """Constants that hold for every number of tokens."""

    name = "castin-mean-field"
    title = "Mean-field constants against two Dirac masses over R, and the masked constant"
    paper = "castin2024"
    minutes = 1
    memory = 1
    parameters = MeasureParameters
    kinds: ClassVar = {"head": MeasureGrowth, "flat": CesaroNorm}

    def quick(self) -> MeasureParameters:
        return MeasureParameters((0.5, 1.0), 1, 3, 0.5, (2, 50))

    def plan(self, parameters: MeasureParameters, place: Workplace) -> StudyPlan:
        heads = [StudyPart("head", f"seed {seed}", seed) for seed in range(parameters.seeds)]
        return StudyPlan([[*heads, *(StudyPart("flat", f"no scores, {n} tokens", n) for n in parameters.tokens)]])

    def measure(
        self, parameters: MeasureParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> MeasureGrowth | CesaroNorm:
        if part.kind == "flat":
            x = torch.zeros(part.work, 1, dtype=torch.float64)
            return CesaroNorm(part.work, api.local_lipschitz(_flat(), x).value.item())
        a, seed = parameters.norm, part.work
        layer = single_head(parameters.width, a, seed)
        causal = layer.replace(causal=True)
        gamma, t = gamma_of(layer), torch.logspace(-3, 3, 241, dtype=torch.float64)
        columns: dict[str, list[float]] = {
            key: [] for key in ("published", "bound", "attained", "promised", "masked_bound", "masked_slope")
        }
        for radius in parameters.radii:
            g, s = gamma * radius**2, a * radius**2
            columns["published"].append((1 + 3 * s) * math.exp(2 * s))
            columns["bound"].append(
                api.lipschitz_bound(layer, radius=radius, tokens=2, method="mean-field").value.item()
            )
            columns["attained"].append(two_diracs(layer, radius).lower.item())
            formula = math.exp(g) * t.sqrt() / (1 + t) * (1 + 2 * g * t / (1 + t))
            columns["promised"].append(formula.max().item())
            masked = api.lipschitz_bound(causal, radius=radius, tokens=64, method="mean-field-masked")
            columns["masked_bound"].append(masked.value.item())
            slopes = [adversarial_configuration(causal, radius, n).lower.item() for n in (8, 64, 256)]
            columns["masked_slope"].append(max(slopes))
        return MeasureGrowth(seed, a, gamma, list(parameters.radii), **columns)

    def show(self, parameters: MeasureParameters, records: Records) -> StudyOutput:
        statements = measure_statements(records.of("head"), records.of("flat"))
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Castin et al. 2024, on measures", statements)],
            {"": draw_measures(records.of("head"))},
            statement_page(statements),
        )


def _flat() -> AttentionLayer:
    """Causal attention without scores: running means."""
    one, none = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    return AttentionLayer(none, none, one, one, causal=True)


def measure_statements(heads: Sequence[MeasureGrowth], flat: Sequence[CesaroNorm]) -> list[Statement]:
    """What the numbers say about the mean-field constants."""
    gaps = [b / a for head in heads for b, a in zip(head.published, head.attained, strict=True)]
    better = [b / ours for head in heads for b, ours in zip(head.published, head.bound, strict=True)]
    lower = [a / p for head in heads if head.gamma for a, p in zip(head.attained, head.promised, strict=True)]
    last = [head for head in heads if head.gamma and len(head.radii) > 1]
    growth = [
        math.log(head.attained[-1] / head.attained[-2]) / (head.gamma * (head.radii[-1] ** 2 - head.radii[-2] ** 2))
        for head in last
    ]
    points = [(head, i, head.a * radius**2) for head in heads for i, radius in enumerate(head.radii)]
    weaker = [((1 + 2 * s) * math.exp(s) + s, head.attained[i], head.bound[i]) for head, i, s in points]
    above, larger = [v / slope for v, slope, _ in weaker], [v / ours for v, _, ours in weaker]
    masked = [b / s for head in heads for b, s in zip(head.masked_bound, head.masked_slope, strict=True)]
    steepest = max(flat, key=lambda one: one.norm)
    made = [
        judged(
            "W_p: Lip ≤ ‖V‖ (1 + 3‖A‖R²) e^(2‖A‖R²), for every number of tokens",
            min(gaps) >= 1,
            f"bound / two Dirac masses: {min(gaps):.3g} to {max(gaps):.3g}; ours for p = 2 is "
            f"{min(better):.3g} to {max(better):.3g} times smaller",
            sharper=min(better) > 1,
        ),
        judged(
            "W_2: Lip ≤ ‖V‖ [(1 + 2‖A‖R²) e^(‖A‖R²) + ‖A‖R²]",
            min(above) >= 1,
            f"bound / two Dirac masses: {min(above):.3g} to {max(above):.3g}; ours is "
            f"{min(larger):.3g} to {max(larger):.3g} times smaller",
            sharper=min(larger) > 1,
        ),
    ]
    if lower:
        made += [
            judged(
                "two Dirac masses: Lip ≥ e^(γR²) √t/(1+t) (1 + 2γR²t/(1+t))",
                min(lower) >= 1 - 1e-6,
                f"slope / formula: {min(lower):.4g} to {max(lower):.4g}",
                sharper=min(lower) > 1 + 1e-6,
            ),
            judged(
                "the constant must grow at least like e^(γR²)",
                min(growth) >= 0.99,
                f"d log(slope) / d(γR²) at the largest R: {min(growth):.3g} to {max(growth):.3g}",
            ),
        ]
    return [
        *made,
        judged(
            "masked attention has the unmasked mean-field constant",
            steepest.norm <= 1,
            f"at A = 0 the constant would be 1; the running means of {steepest.tokens} tokens have norm "
            f"{steepest.norm:.4f} (limit 2)",
        ),
        judged(
            "masked, with Hardy's factor: ‖V‖ [2(1 + 2‖A‖R²) e^(2‖A‖R²) + ‖A‖R²] for p = 2 (ours)",
            min(masked) >= 1,
            f"bound / steepest tokens found: {min(masked):.3g} to {max(masked):.3g}",
        ),
    ]


def draw_measures(heads: Sequence[MeasureGrowth]) -> Figure:
    """Constants and slopes over R, on a logarithmic axis; ranges over the heads."""
    figure = new_figure(5.5, 3.6)
    panel = figure.subplots()
    labels = {
        "published": "paper's constant",
        "bound": "our constant, W₂",
        "attained": "two Dirac masses",
        "promised": "paper's lower bound",
        "masked_bound": "our masked constant",
        "masked_slope": "adversarial tokens, masked",
    }
    for colour, (key, label) in zip(PALETTE, labels.items(), strict=False):
        rows, style = [getattr(head, key) for head in heads], "--" if "masked" in key else "-"
        draw_range(panel, heads[0].radii, rows, style, color=colour, label=label)
    panel.set(yscale="log", xlabel="R", ylabel="Lipschitz constant")
    panel.grid(alpha=0.25)
    panel.legend(frameon=False)
    return figure
