"""`castin-splitting`: how much steeper attention is when tokens may be divided before they move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.figure import Figure

from holdfast.attacks import split_attack
from holdfast.attention import AttentionLayer
from holdfast.report.style import PALETTE, new_figure
from holdfast.studies.castin_heads import single_head
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study


@final
@dataclass(frozen=True)
class SplitDraws:
    """Random heads and tokens: how much doubling tokens gains, and how near a witness comes to the law.

    Attributes:
        scale: of the tokens.
        gains: Lip_split / ‖D_X f‖ of every draw.
        witnessed: what the witness attains / the law, of the draws where doubling helps.
    """

    scale: float
    gains: list[float]
    witnessed: list[float]


@final
@dataclass(frozen=True)
class SplitExample:
    """An example in one dimension (A = -1, V = 1): slope before and after tokens may be divided."""

    name: str
    before: float
    after: float
    witnessed: float


@final
@dataclass(frozen=True)
class SplitParameters:
    """What `repro castin-splitting` takes."""

    draws: int = option(200, "Random heads and tokens for each scale.", least=1)
    scales: tuple[float, ...] = option((1.0, 2.0, 4.0), "Scales of the tokens.", grid=True)
    reaches: tuple[float, ...] = option(
        (2.0, 5.0, 10.0, 30.0, 100.0), "r of (1 - r⁻²)δ_0 + r⁻²δ_{-r}.", grid=True, least=1.1
    )


@final
@register_study
class CastinSplitting(Study[SplitParameters]):
    """Mass splitting."""

    name = "castin-splitting"
    title = "Mass splitting: how much steeper attention is when tokens may be divided before they move"
    paper = "castin2024"
    minutes = 1
    memory = 1
    parameters = SplitParameters
    kinds: ClassVar = {"draws": SplitDraws, "example": SplitExample}

    def quick(self) -> SplitParameters:
        return SplitParameters(10, (2.0,), (5.0,))

    def plan(self, parameters: SplitParameters, place: Workplace) -> StudyPlan:
        draws = [StudyPart("draws", f"random, scale {scale:g}", scale) for scale in parameters.scales]
        examples = [StudyPart("example", f"r = {r:g}", r) for r in parameters.reaches]
        return StudyPlan([[*draws, StudyPart("example", "two tokens", None), *examples]])

    def measure(
        self, parameters: SplitParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> SplitDraws | SplitExample:
        if part.kind == "draws":
            return _split_draws(part.work, parameters.draws)
        one, minus = torch.ones(1, 1, 1, dtype=torch.float64), -torch.ones(1, 1, 1, dtype=torch.float64)
        layer, r = AttentionLayer(minus, one, one, one, scale=1.0), part.work
        x, weights = torch.tensor([[5.5981], [0.4677]], dtype=torch.float64), None
        if r is not None:
            x = torch.tensor([[0.0], [-r]], dtype=torch.float64)
            weights = torch.tensor([1 - r**-2, r**-2], dtype=torch.float64)
        split = split_attack(layer, x, weights, step=1e-8)  # the law is local, and scores are steep at a large r
        return SplitExample(part.key, split.local.item(), split.slope.item(), split.lower.item())

    def show(self, parameters: SplitParameters, records: Records) -> StudyOutput:
        draws, examples = records.of("draws"), records.of("example")
        statements = split_statements(draws, examples)
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Castin et al. 2024, mass splitting", statements)],
            {"": draw_splitting(draws, examples)},
            statement_page(statements),
        )


def _split_draws(scale: float, count: int) -> SplitDraws:
    gains, witnessed = [], []
    for seed in range(count):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
        split = split_attack(single_head(3, 1.0, seed), x)
        gains.append(split.gain.item())
        if gains[-1] > 1 + 1e-9:
            witnessed.append((split.lower / split.slope).item())
    return SplitDraws(scale, gains, witnessed)


def split_statements(draws: Sequence[SplitDraws], examples: Sequence[SplitExample]) -> list[Statement]:
    """What the numbers say about mass splitting."""
    witnessed = [value for one in draws for value in one.witnessed]
    witnessed += [one.witnessed / one.after for one in examples]
    shares = [sum(gain > 1 + 1e-9 for gain in one.gains) / len(one.gains) for one in draws]
    two = next((one for one in examples if one.name == "two tokens"), None)
    far = [one for one in examples if one.name != "two tokens"]
    ratios = [one.after / one.before for one in far]
    made = [
        judged(
            "the slope with division is max(‖D_X f‖, max_i ‖V C_i A‖), and two copies attain it (our law)",
            max(abs(ratio - 1) for ratio in witnessed) < 1e-3,
            f"movement of a witness / law: {min(witnessed):.6f} to {max(witnessed):.6f}",
        ),
        judged(
            "dividing tokens before moving them can beat moving them",
            max(ratios, default=0.0) > 1 or max(shares) > 0,
            f"at random it helps in {100 * min(shares):.1f} to {100 * max(shares):.1f} % of the draws",
        ),
    ]
    if two is not None:
        numbers = f"{two.before:.4f} to {two.after:.4f}"
        right = abs(two.before - 1.3525) < 1e-3 and abs(two.after - 2.0080) < 1e-3
        made.append(judged("tokens (5.5981, 0.4677), A = -1: from 1.3525 to 2.0080", right, numbers))
    if far:
        numbers = ", ".join(f"{ratio:.3g} at {one.name}" for one, ratio in zip(far, ratios, strict=True))
        rising = all(later > former for former, later in itertools.pairwise(ratios))
        made.append(judged("the gain of (1 - r⁻²)δ_0 + r⁻²δ_{-r} is unbounded", rising, f"gain {numbers}"))
    return made


def draw_splitting(draws: Sequence[SplitDraws], examples: Sequence[SplitExample]) -> Figure:
    """Gains of random draws, sorted; and the slopes of the example over r, where there are any."""
    far = [(float(one.name.removeprefix("r = ")), one) for one in examples if one.name.startswith("r = ")]
    figure = new_figure(6.5, 3.0)
    left, *others = figure.subplots(1, 2 if far else 1, squeeze=False)[0]
    for colour, one in zip(PALETTE, draws, strict=False):
        share = torch.linspace(0, 100, len(one.gains))
        left.plot(share, sorted(one.gains), color=colour, label=f"tokens of scale {one.scale:g}")
    left.set(xlabel="% of the draws", ylabel="slope with division / without")
    for right in others:
        for colour, key, label in ((PALETTE[0], "before", "undivided"), (PALETTE[1], "after", "divided")):
            right.plot([r for r, _ in far], [getattr(one, key) for _, one in far], ".-", color=colour, label=label)
        right.set(xscale="log", yscale="log", xlabel="r", ylabel="slope")
    for panel in (left, *others):
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
    return figure
