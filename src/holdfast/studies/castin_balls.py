"""`castin-ball`: bounds on balls that grow like √n, against tokens at which the slope is computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.figure import Figure

from holdfast import api
from holdfast.attacks import adversarial_configuration
from holdfast.report.style import PALETTE, draw_range, new_figure
from holdfast.studies.castin_heads import gamma_of, single_head
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study


@final
@dataclass(frozen=True)
class BallGrowth:
    """One head on balls of one radius, over numbers of tokens.

    Attributes:
        seed: of A.
        masked: whether the head is causal.
        radius: R.
        a: ‖A‖.
        gamma: of the paper's lower bound; 0 where A has no real eigenvalue that serves.
        tokens: n.
        bound: √3 v (a²R⁴(4n + 1) + n)^½, proved.
        sharp: our bound, proved.
        attained: the slope at the configuration with one dominant token.
        promised: √(n-1) / (1 + (n-1) e^{-2γR²}).
        ascended: the slope that gradient ascent finds, for the numbers of tokens up to `ascent`; lower bounds.
    """

    seed: int
    masked: bool
    radius: float
    a: float
    gamma: float
    tokens: list[int]
    bound: list[float]
    sharp: list[float]
    attained: list[float]
    promised: list[float]
    ascended: list[float]


@final
@dataclass(frozen=True)
class BallParameters:
    """What `repro castin-ball` takes."""

    tokens: tuple[int, ...] = option((2, 4, 8, 16, 32, 64, 128, 256, 512), "Numbers of tokens.", least=2)
    radii: tuple[float, ...] = option((1.0, 2.0, 3.0), "R, one for each panel.", grid=True)
    seeds: int = option(3, "Number of heads.", grid=True, least=1)
    width: int = option(4, "Width of a token.", least=1)
    norm: float = option(0.5, "‖A‖.")
    ascent: int = option(32, "Gradient ascent as well, up to this many tokens.")


@final
@register_study
class CastinBallStudy(Study[BallParameters]):
    """Bounds on balls, masked and not, against adversarial tokens."""

    name = "castin-ball"
    title = "The √n bound on balls, masked and not, against adversarial tokens over n and R"
    paper = "castin2024"
    minutes = 2
    memory = 1
    parameters = BallParameters
    kinds: ClassVar = {"head": BallGrowth}

    def quick(self) -> BallParameters:
        return BallParameters((2, 4, 8), (1.0,), 1, 3, 0.5, 4)

    def plan(self, parameters: BallParameters, place: Workplace) -> StudyPlan:
        grid = itertools.product(range(parameters.seeds), (False, True), parameters.radii)
        return StudyPlan(
            [
                [
                    StudyPart(
                        "head", f"seed {seed}, {'masked' if masked else 'full'}, R={radius:g}", (seed, masked, radius)
                    )
                    for seed, masked, radius in grid
                ]
            ]
        )

    def measure(
        self, parameters: BallParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> BallGrowth:
        seed, masked, radius = part.work
        layer = single_head(parameters.width, parameters.norm, seed, causal=masked)
        name, gamma = "castin-masked" if masked else "castin-ball", gamma_of(layer)
        columns: dict[str, list[float]] = {key: [] for key in ("bound", "sharp", "attained", "promised", "ascended")}
        for n in parameters.tokens:
            for key, method in (("bound", name), ("sharp", "castin-sharp")):
                columns[key].append(api.lipschitz_bound(layer, radius=radius, tokens=n, method=method).value.item())
            columns["attained"].append(adversarial_configuration(layer, radius, n).lower.item())
            columns["promised"].append(math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * gamma * radius**2)))
            if n <= parameters.ascent:
                steepest = api.lipschitz_attack(layer, radius, n, restarts=4, steps=40)
                columns["ascended"].append(steepest.lower.item())
        return BallGrowth(seed, masked, radius, parameters.norm, gamma, list(parameters.tokens), **columns)

    def show(self, parameters: BallParameters, records: Records) -> StudyOutput:
        heads: list[BallGrowth] = records.of("head")
        statements = ball_statements(heads)
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Castin et al. 2024, on balls", statements)],
            {"": draw_balls(heads)},
            statement_page(statements),
        )


def ball_statements(heads: Sequence[BallGrowth]) -> list[Statement]:
    """What the numbers say about the paper's bounds on balls."""
    made = []
    for masked in (False, True):
        own = [head for head in heads if head.masked == masked]
        gaps = [b / max(pair) for head in own for b, *pair in zip(head.bound, *_lowers(head), strict=True)]
        better = [b / s for head in own for b, s in zip(head.bound, head.sharp, strict=True)]
        claim = f"{'masked' if masked else 'full'}: Lip ≤ √3 ‖V‖ (‖A‖²R⁴(4n+1) + n)^½"
        numbers = f"bound / largest slope found: {min(gaps):.3g} to {max(gaps):.3g}"
        numbers += f"; ours is {min(better):.3g} to {max(better):.3g} times smaller"
        made.append(judged(claim, min(gaps) >= 1, numbers, sharper=min(better) > 1))
        lower = [
            a / p for head in own for a, p in zip(head.attained, head.promised, strict=True) if head.gamma and p > 0
        ]
        claim = f"{'masked' if masked else 'full'}: Lip ≥ √(n-1) / (1 + (n-1) e^(-2γR²))"
        numbers = f"slope at the tokens / formula: {min(lower):.4g} to {max(lower):.4g}" if lower else "no real γ"
        made.append(judged(claim, not lower or min(lower) >= 1 - 1e-9, numbers, sharper=bool(lower) and min(lower) > 1))
    powers = [power for head in heads if (power := _power_below(head)) is not None]
    if powers:
        claim = "the constant grows at least like √n while n ≲ e^(2γR²)"
        numbers = f"fitted powers of n - 1 at adversarial tokens: {min(powers):.3f} to {max(powers):.3f}"
        made.append(judged(claim, min(powers) >= 0.45, f"{numbers} ({len(powers)} heads)"))
    return made


def _power_below(head: BallGrowth) -> float | None:
    """The power of n, fitted to n - 1 up to e^(2γR²); None where there are fewer than three numbers of tokens."""
    reach = math.exp(2 * head.gamma * head.radius**2)
    pairs = [(n, slope) for n, slope in zip(head.tokens, head.attained, strict=True) if 4 <= n <= reach]
    if len(pairs) < 3:
        return None
    x = torch.tensor([n - 1 for n, _ in pairs], dtype=torch.float64).log()
    y = torch.tensor([slope for _, slope in pairs], dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def _lowers(head: BallGrowth) -> tuple[list[float], list[float]]:
    rest = [0.0] * (len(head.tokens) - len(head.ascended))
    return head.attained, head.ascended + rest


def draw_balls(heads: Sequence[BallGrowth]) -> Figure:
    """Bounds and slopes over n, a column for each R, full attention above, masked below; ranges over the heads."""
    radii = sorted({head.radius for head in heads})
    figure = new_figure(7.0, 4.6)
    panels = figure.subplots(2, len(radii), sharex=True, squeeze=False)
    curves = (("bound", "paper's bound"), ("sharp", "our bound"), ("attained", "adversarial tokens"))
    for (row, masked), (column, radius) in itertools.product(enumerate((False, True)), enumerate(radii)):
        panel = panels[row, column]
        own = [head for head in heads if head.masked == masked and head.radius == radius]
        for colour, (key, label) in zip(PALETTE, (*curves, ("promised", "paper's lower bound")), strict=False):
            draw_range(panel, own[0].tokens, [getattr(head, key) for head in own], color=colour, label=label)
        values = torch.tensor([head.ascended for head in own])
        mean = values.mean(0)
        reach = torch.stack([mean - values.amin(0), values.amax(0) - mean]).numpy()
        at = own[0].tokens[: len(mean)]
        panel.errorbar(at, mean, reach, fmt="k.", capsize=2, linewidth=1, label="gradient ascent")
        panel.set(xscale="log", yscale="log", title=f"{'masked' if masked else 'full'}, R = {radius:g}")
        panel.grid(alpha=0.25)
        if row:
            panel.set_xlabel("tokens n")
    panels[0, 0].set_ylabel("Lipschitz constant")
    panels[1, 0].set_ylabel("Lipschitz constant")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure
