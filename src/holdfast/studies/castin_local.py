"""`castin-local`: the differential, bounds at a point, large radii, biases, heads, norm layers, masks, weighted tokens.

Small random heads whose Jacobian is written out and decomposed, so that nothing is estimated.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.figure import Figure
from torch import Tensor

from holdfast import api
from holdfast.attacks import split_attack
from holdfast.attention import AttentionJacobian, AttentionLayer
from holdfast.attention.large_radius import large_radius_limit
from holdfast.attention.measure import WeightedJacobian, on_measure
from holdfast.bounds.token_radius import layer_norm_radius, rms_norm_radius
from holdfast.report.style import BLUE, VERMILION, new_figure
from holdfast.studies.castin_heads import single_head
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study

_N, _D = 6, 3


@final
@dataclass(frozen=True)
class LocalRatios:
    """Ratios of one statement, for every draw; `CLAIMS` says what they are ratios of."""

    name: str
    ratios: list[float]


@final
@dataclass(frozen=True)
class LocalParameters:
    """What `repro castin-local` takes."""

    draws: int = option(60, "Random heads and tokens for each statement.", least=1)


def _draw(seed: int, scale: float = 1.5, *, causal: bool = False) -> tuple[AttentionLayer, Tensor]:
    x = torch.randn(_N, _D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return single_head(_D, 1.0, seed, causal=causal), x


def jacobian_matrix(layer: AttentionLayer, x: Tensor) -> Tensor:
    """(nd, nd) by automatic differentiation."""
    made: Tensor = torch.func.jacrev(layer)(x)
    return made.reshape(x.numel(), x.numel())


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def differential(draws: int) -> list[float]:
    """‖closed form - automatic‖ / ‖automatic‖, masked in every other draw."""
    ratios = []
    for seed in range(draws):
        layer, x = _draw(seed, causal=seed % 2 == 1)
        J = jacobian_matrix(layer, x)
        ratios.append(_norm(AttentionJacobian(layer, x).dense() - J) / _norm(J))
    return ratios


def at_a_point(draws: int) -> list[float]:
    """`castin-data` / ‖D_X f‖, masked in every other draw."""
    ratios = []
    for seed in range(draws):
        layer, x = _draw(seed, 0.5 + seed / draws, causal=seed % 2 == 1)
        bound = api.lipschitz_bound(layer, x, "castin-data").value.item()
        ratios.append(bound / _norm(jacobian_matrix(layer, x)))
    return ratios


def far_away(draws: int) -> list[float]:
    """‖D_{RX} f‖ / (v √(max_j #{i: σ(i) = j})) at R = 1e5."""
    ratios = []
    for seed in range(draws):
        layer, x = _draw(seed)
        ratios.append(_norm(jacobian_matrix(layer, 1e5 * x)) / large_radius_limit(layer, x).value.item())
    return ratios


def _biased(seed: int) -> tuple[AttentionLayer, Tensor]:
    """A head with A = 0 and a query bias, and tokens so short that several stay near the largest score."""
    layer, x = _draw(seed)
    bias = torch.zeros(1, _D, dtype=torch.float64)
    bias[0, 0] = 40.0
    return layer.replace(w_q=torch.zeros_like(layer.w_q), b_q=bias), 0.1 * x


def with_query_bias(draws: int) -> list[float]:
    """√3 v (a²R⁴(4n + 1) + n)^½ / ‖D_X f‖ with a = 0 and a query bias, which the formula does not see."""
    return [math.sqrt(3 * _N) / _norm(jacobian_matrix(*_biased(seed))) for seed in range(draws)]


def with_query_bias_ours(draws: int) -> list[float]:
    """`castin-ball`, which counts the bias, / ‖D_X f‖ for the same heads."""
    ratios = []
    for seed in range(draws):
        layer, x = _biased(seed)
        radius = float(torch.linalg.vector_norm(x, dim=-1).max())
        bound = api.lipschitz_bound(layer, radius=radius, tokens=_N, method="castin-ball").value.item()
        ratios.append(bound / _norm(jacobian_matrix(layer, x)))
    return ratios


def many_heads(draws: int) -> list[float]:
    """Σ_h ‖D_X (W_h f_h)‖ / ‖D_X Σ_h W_h f_h‖."""
    ratios = []
    for seed in range(draws):
        heads = [_draw(3 * seed + i)[0] for i in range(3)]
        x = _draw(seed)[1]
        matrices = [jacobian_matrix(head, x) for head in heads]
        ratios.append(sum(map(_norm, matrices)) / _norm(torch.stack(matrices).sum(0)))
    return ratios


def after_layer_norm(draws: int) -> list[float]:
    """(√d ‖w‖_∞ + ‖b‖) / the longest token behind a LayerNorm."""
    ratios = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        x, w, b = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((64, 8), (8,), (8,)))
        longest = torch.linalg.vector_norm(torch.nn.functional.layer_norm(5 * x, (8,), w, b), dim=-1).max()
        ratios.append(layer_norm_radius(w, b) / float(longest))
    return ratios


def after_rms_norm(draws: int) -> list[float]:
    """√d ‖w‖_∞ / the longest token behind an RMSNorm."""
    ratios = []
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((64, 8), (8,)))
        longest = torch.linalg.vector_norm(torch.nn.functional.rms_norm(5 * x, (8,), w), dim=-1).max()
        ratios.append(rms_norm_radius(w) / float(longest))
    return ratios


def with_residual(draws: int) -> list[float]:
    """(|H| + ‖D_X f‖) / ‖H + D_X f‖, H of both signs."""
    ratios = []
    for seed in range(draws):
        layer, x = _draw(seed)
        H = (-1.0) ** seed
        alone, together = (_norm(jacobian_matrix(one, x)) for one in (layer, layer.replace(residual=H)))
        ratios.append((abs(H) + alone) / together)
    return ratios


def masked_rows(draws: int) -> list[float]:
    """The ratio of v(1 + 3aR²) and the norm of D_X f for the longest token (p = ∞), causal."""
    ratios = []
    for seed in range(draws):
        layer, x = _draw(seed, 0.2 + seed / draws, causal=True)
        radius = float(torch.linalg.vector_norm(x, dim=-1).max())
        blocks = jacobian_matrix(layer, x).reshape(_N, _D, _N, _D).transpose(1, 2)
        ratios.append((1 + 3 * radius**2) / _longest_output(blocks))
    return ratios


def _longest_output(blocks: Tensor) -> float:
    """The largest |Σ_j J_ij ε_j| over rows i and |ε_j| ≤ 1, (n, n, d, d): ascent from many directions, from below."""
    u = torch.randn(64, _N, _D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(50):
        u = u / torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        pulled = torch.einsum("ijab,sia->sijb", blocks, u)  # the best ε_j points along it
        lengths = torch.linalg.vector_norm(pulled, dim=-1, keepdim=True)
        u = torch.einsum("ijab,sijb->sia", blocks, pulled / lengths.clamp(min=1e-300))
    return float(torch.linalg.vector_norm(u, dim=-1).max())


def masked_sums(draws: int) -> list[float]:
    """The norm of running means of 1, 2, … tokens for sums of lengths (p = 1), which a constant would bound."""
    one, none = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    means = AttentionLayer(none, none, one, one, causal=True)
    tokens = (torch.zeros(n, 1, dtype=torch.float64) for n in range(1, draws + 1))
    return [float(jacobian_matrix(means, x).abs().sum(0).max()) for x in tokens]


def divided_heads(draws: int) -> list[float]:
    """How far the copies of a token carry the output when they move apart / max_i ‖Σ_h W_h V_h C_i^h A_h‖, 3 heads."""
    ratios = []
    for seed in range(draws):
        heads = [_draw(3 * seed + i)[0] for i in range(3)]
        w_q, w_k, w_v, w_o = (torch.cat([getattr(one, w) for one in heads]) for w in ("w_q", "w_k", "w_v", "w_o"))
        layer = AttentionLayer(w_q, w_k, w_v, w_o, scale=1.0)
        split = split_attack(layer, _draw(seed)[1], step=1e-6)
        ratios.append((split.lower / split.divided.amax(-1)).item())
    return ratios


def weighted(draws: int) -> list[float]:
    """‖diag(√μ) D diag(1/√μ)‖ by hand / that of our operator for weighted tokens."""
    ratios = []
    for seed in range(draws):
        layer, x = _draw(seed)
        mu = torch.rand(_N, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
        D = jacobian_matrix(on_measure(layer, mu), x)
        root = mu.sqrt().repeat_interleave(_D)
        ratios.append(_norm(root[:, None] * D / root) / _norm(WeightedJacobian(layer, x, mu).dense()))
    return ratios


@final
@dataclass(frozen=True)
class LocalClaim:
    """A statement, how its ratios are measured, and when they bear it out."""

    text: str
    measure: Callable[[int], list[float]]
    evidence: str
    holds: Callable[[Sequence[float]], bool]


def _near_one(ratios: Sequence[float]) -> bool:
    return all(abs(ratio - 1) < 1e-6 for ratio in ratios)


def _above_one(ratios: Sequence[float]) -> bool:
    return min(ratios) >= 1 - 1e-9


CLAIMS = {
    "differential": LocalClaim(
        "the differential of f, masked or not",
        differential,
        "relative difference from automatic differentiation",
        lambda ratios: max(ratios) < 1e-10,
    ),
    "point": LocalClaim(
        "‖D_X f‖ ≤ v[(1 + max|Ax_i| max|x_j - m_i|) √(max_j Σ_i P_ij) + max‖C_iA‖] (ours)",
        at_a_point,
        "bound / norm",
        _above_one,
    ),
    "large radius": LocalClaim(
        "‖D_RX f‖ → v √(max_j #{i: σ(i) = j}) as R grows",
        far_away,
        "norm at R = 1e5 / limit",
        _near_one,
    ),
    "query bias": LocalClaim(
        "the ball bound without a term for b_Q holds with a query bias",
        with_query_bias,
        "formula / norm",
        _above_one,
    ),
    "query bias, ours": LocalClaim(
        "the ball bound with β = ‖W_K b_Q‖/√k holds (ours)", with_query_bias_ours, "bound / norm", _above_one
    ),
    "heads": LocalClaim("Lip ≤ Σ_h ‖W_h‖ Lip(f_h)", many_heads, "sum / norm", _above_one),
    "norm layer": LocalClaim(
        "tokens behind a LayerNorm are at most √d‖w‖_∞ + ‖b‖ long", after_layer_norm, "bound / longest", _above_one
    ),
    "RMSNorm": LocalClaim(
        "tokens behind an RMSNorm are at most √d‖w‖_∞ long", after_rms_norm, "bound / longest", _above_one
    ),
    "residual": LocalClaim("a residual adds |H|", with_residual, "sum / norm", _above_one),
    "masked, p = ∞": LocalClaim("masked, p = ∞: Lip ≤ v(1 + 3aR²) (ours)", masked_rows, "bound / norm", _above_one),
    "masked, p = 1": LocalClaim(
        "masked, p = 1: no constant for every number of tokens",
        masked_sums,
        "norm at A = 0, for one token more in each draw",
        lambda norms: all(abs(b - a - 1 / (i + 2)) < 1e-12 for i, (a, b) in enumerate(itertools.pairwise(norms))),
    ),
    "division, heads": LocalClaim(
        "many heads, divided tokens: the slope is max_i ‖Σ_h W_h V_h C_i^h A_h‖ (our law)",
        divided_heads,
        "movement of a witness / law",
        lambda ratios: all(abs(ratio - 1) < 1e-3 for ratio in ratios),
    ),
    "weights": LocalClaim("weighted tokens: the norm is that of diag(√μ) D diag(1/√μ)", weighted, "ratio", _near_one),
}


_NO_RATIOS = ("differential", "weights", "masked, p = 1", "division, heads")  # not drawn: 0, 1 or no ratio


@final
@register_study
class CastinLocal(Study[LocalParameters]):
    """Statements about a point."""

    name = "castin-local"
    title = "The differential, bounds at a point, large radii, biases, heads, norm layers, masks and weighted tokens"
    paper = "castin2024"
    minutes = 1
    memory = 1
    parameters = LocalParameters
    kinds: ClassVar = {"ratios": LocalRatios}

    def quick(self) -> LocalParameters:
        return LocalParameters(4)

    def plan(self, parameters: LocalParameters, place: Workplace) -> StudyPlan:
        return StudyPlan([[StudyPart("ratios", name) for name in CLAIMS]])

    def measure(
        self, parameters: LocalParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> LocalRatios:
        return LocalRatios(part.key, CLAIMS[part.key].measure(parameters.draws))

    def show(self, parameters: LocalParameters, records: Records) -> StudyOutput:
        rows = records.of("ratios")
        statements = [local_statement(row) for row in rows]
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Castin et al. 2024, at a point", statements)],
            {"": draw_ratios([row for row in rows if row.name not in _NO_RATIOS])},
            statement_page(statements),
        )


def local_statement(row: LocalRatios) -> Statement:
    """What the ratios say of their statement."""
    claim = CLAIMS[row.name]
    evidence = f"{claim.evidence}: {min(row.ratios):.4g} to {max(row.ratios):.4g} ({len(row.ratios)} draws)"
    return judged(claim.text, claim.holds(row.ratios), evidence)


def draw_ratios(rows: Sequence[LocalRatios]) -> Figure:
    """The ratios of every statement: a point for each draw, and the median."""
    figure = new_figure(5.5, 0.8 + 0.28 * len(rows))
    panel = figure.subplots()
    for place, row in enumerate(rows):
        panel.plot(row.ratios, [place] * len(row.ratios), "|", color=BLUE, markersize=9, alpha=0.5)
        panel.plot(statistics.median(row.ratios), place, "D", color=VERMILION, markersize=4)
    panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    panel.set(xscale="log", xlabel="ratio, one line for each draw, and the median")
    panel.set_yticks(range(len(rows)), [f"{row.name}: {CLAIMS[row.name].evidence}" for row in rows])
    panel.invert_yaxis()
    panel.grid(alpha=0.25)
    return figure
