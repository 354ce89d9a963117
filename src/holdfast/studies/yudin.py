"""`yudin-softmax` and `yudin-layers`: what Yudin, Gaponov, Kudriashov and Rakhuba (2025) state, measured.

The norm of the Jacobian of softmax and its bounds g_k over temperature and length; and the bound of attention's
Jacobian that they build on it, against the true norm, on random layers and on those of real models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from holdfast import api
from holdfast.attention import AttentionLayer
from holdfast.attention.softmax import g_k, softmax_jacobian_norm
from holdfast.errors import NotApplicableError, UnknownNameError
from holdfast.graph.trace import iter_trace
from holdfast.models import demo_digits, load_digits_vit
from holdfast.report.style import PALETTE, draw_range, new_figure
from holdfast.studies.processes import Tell
from holdfast.studies.statements import Statement, judged, statement_page, statement_table, to_json
from holdfast.studies.study import Records, Study, StudyOutput, StudyPart, StudyPlan, Workplace, option, register_study
from holdfast.studies.texts import SOURCES, chunks, find_text, load_source, read_text, refusal

# -- softmax


@final
@dataclass(frozen=True)
class SoftmaxNorms:
    """Random rows of Gaussian logits of one length and deviation.

    Attributes:
        n: length.
        deviation: of the logits, the inverse of a temperature.
        rows: how many.
        norm: the 10, 50 and 90 % points of ‖M(p)‖.
        g_1: the least, the mean and the largest of g_1 / ‖M(p)‖.
        u_2: the same of our bound from the three largest entries.
        largest_g_1: over the rows.
        sharper: whether our bound is nowhere above g_1.
        excess: the largest of λ_k / g_k over the rows and k up to `largest_k`.
        largest_k: as many eigenvalues are compared.
        looseness: the median of g_k / λ_k for each of these k; None where the eigenvalues are too small to be known.
        falling: whether g_1 ≥ g_2 ≥ … in every row.
    """

    n: int
    deviation: float
    rows: int
    norm: list[float]
    g_1: list[float]
    u_2: list[float]
    largest_g_1: float
    sharper: bool
    excess: float
    largest_k: int
    looseness: list[float | None]
    falling: bool


@final
@dataclass(frozen=True)
class SoftmaxParameters:
    """What `repro yudin-softmax` takes."""

    lengths: tuple[int, ...] = option((2, 8, 32, 128, 512), "Lengths of a row.", grid=True, least=2)
    deviations: tuple[float, ...] = option(
        (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0), "Standard deviations of the logits.", grid=True, least=1e-6
    )
    rows: int = option(200, "Random rows for each.", least=1)
    seed: int = option(0, "Seed of the rows.")


@final
@register_study
class YudinSoftmax(Study[SoftmaxParameters]):
    """The Jacobian of softmax."""

    name = "yudin-softmax"
    title = "The norm of the softmax Jacobian and the bounds g_k over temperature and length"
    paper = "yudin2025"
    minutes = 1
    memory = 1
    parameters = SoftmaxParameters
    kinds: ClassVar = {"rows": SoftmaxNorms}

    def quick(self) -> SoftmaxParameters:
        return SoftmaxParameters((2, 16), (0.3, 3.0), 10)

    def plan(self, parameters: SoftmaxParameters, place: Workplace) -> StudyPlan:
        grid = list(itertools.product(parameters.lengths, parameters.deviations))
        return StudyPlan(
            [[StudyPart("rows", f"n={n}, deviation {deviation:g}", (n, deviation)) for n, deviation in grid]]
        )

    def measure(
        self, parameters: SoftmaxParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> SoftmaxNorms:
        n, deviation = part.work
        generator = torch.Generator().manual_seed(parameters.seed)
        p = (deviation * torch.randn(parameters.rows, n, generator=generator, dtype=torch.float64)).softmax(-1)
        exact, g_1, u_2 = (softmax_jacobian_norm(p, method) for method in ("exact", "g1", "u2"))
        largest = min(n - 1, 8)
        eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)).flip(-1)
        bounds = torch.stack([g_k(p, k) for k in range(1, largest + 1)], -1)
        # eigvalsh errs by some n 2⁻⁵³: only eigenvalues from here on are known to the 1e-9 that the verdict asks for.
        told = eigenvalues[:, :largest] > n * 1e-7
        excess = (eigenvalues[:, :largest] / bounds)[told].amax().item() if bool(told.any()) else 0.0
        ratios = (bounds / eigenvalues[:, :largest]).where(told, math.nan).nanmedian(0).values.tolist()
        falling = bool((bounds[:, 1:] <= bounds[:, :-1]).all())
        return SoftmaxNorms(
            n=n,
            deviation=deviation,
            rows=parameters.rows,
            norm=exact.quantile(exact.new_tensor([0.1, 0.5, 0.9])).tolist(),
            g_1=_spread(g_1 / exact),
            u_2=_spread(u_2 / exact),
            largest_g_1=g_1.max().item(),
            sharper=bool((u_2 <= g_1 * (1 + 1e-9)).all()),
            excess=excess,
            largest_k=largest,
            looseness=[None if math.isnan(ratio) else ratio for ratio in ratios],
            falling=falling,
        )

    def show(self, parameters: SoftmaxParameters, records: Records) -> StudyOutput:
        rows = records.of("rows")
        statements = softmax_statements(rows)
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Yudin et al. 2025, softmax", statements)],
            {"": draw_softmax(rows)},
            statement_page(statements),
        )


def softmax_statements(rows: Sequence[SoftmaxNorms]) -> list[Statement]:
    """What the numbers say about the bounds of the softmax Jacobian."""
    excess, most = max(row.excess for row in rows), max(row.largest_k for row in rows)
    count = sum(row.rows for row in rows)
    theirs, ours = (sum(getattr(row, key)[1] for row in rows) / len(rows) for key in ("g_1", "u_2"))
    least, largest = min(row.g_1[0] for row in rows), max(row.g_1[2] for row in rows)
    return [
        judged(
            "‖M(p)‖ ≤ g_1 = p_1(1 - p_1 + p_2)",
            least >= 1 - 1e-9,
            f"g_1 / norm: {least:.4f} to {largest:.4f}, mean {theirs:.4f}, on {count:,} rows; ours from the three "
            f"largest entries: mean {ours:.4f}",
            sharper=all(row.sharper for row in rows) and ours < theirs,
        ),
        judged(
            "λ_k ≤ g_k = p_k(1 - p_k + p_(k+1))",
            excess <= 1 + 1e-9,
            f"largest λ_k / g_k for k up to {most}: {excess:.6f}",
        ),
        judged("g_1 ≥ g_2 ≥ …", all(row.falling for row in rows), f"in all {count:,} rows"),
        judged(
            "g_1 ≤ 1/2, the global constant of softmax",
            max(row.largest_g_1 for row in rows) <= 0.5 + 1e-12,
            f"largest g_1: {max(row.largest_g_1 for row in rows):.6f}",
        ),
    ]


def _spread(ratios: Tensor) -> list[float]:
    return [ratios.min().item(), ratios.mean().item(), ratios.max().item()]


def draw_softmax(rows: Sequence[SoftmaxNorms]) -> Figure:
    """The norm over the deviation of the logits, and how far g_1, our bound and other g_k are above what they bound."""
    figure = new_figure(7.0, 3.2)
    norms, ratios, others = figure.subplots(1, 3)
    for colour, n in zip(itertools.cycle(PALETTE), sorted({row.n for row in rows}), strict=False):
        own = sorted((row for row in rows if row.n == n), key=lambda row: row.deviation)
        at = [row.deviation for row in own]
        low, half, high = zip(*(row.norm for row in own), strict=True)
        norms.plot(at, half, color=colour, label=f"n = {n}")
        norms.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        for key, style in (("g_1", "-"), ("u_2", "--")):
            ratios.plot(at, [getattr(row, key)[1] for row in own], style, color=colour)
        for k, style in ((2, "-"), (8, "--")):
            loose = [(row.deviation, row.looseness[k - 1] or math.nan) for row in own if row.largest_k >= k]
            others.plot([x for x, _ in loose], [ratio for _, ratio in loose], style, color=colour)
    norms.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
    norms.set(xscale="log", yscale="log", title="‖M(p)‖, 10, 50, 90 %")
    ratios.set(xscale="log", title="$g_1$ (–), ours (- -) / ‖M(p)‖")
    others.set(xscale="log", yscale="log", title="$g_2/λ_2$ (–), $g_8/λ_8$ (- -), median")
    for panel in (norms, ratios, others):
        panel.set_xlabel("deviation of the logits")
        panel.grid(alpha=0.25)
    figure.legend(*norms.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return figure


# -- layers

METHODS = ("yudin", "yudin-b2", "yudin-b3", "castin-data")


@final
@dataclass(frozen=True)
class LayerJacobian:
    """One layer at some inputs: its Jacobian's norm, and bounds of it there.

    Attributes:
        source: the model, or "random".
        layer: its number; of a random one, that of the temperature.
        temperature: what the scores of a random layer were multiplied by; None for a model's.
        norm: ‖DF(X)‖ at every input (estimates, from below).
        bounds: by method; those that have no proof for the layer are not there.
        largest_g_1: over heads and rows, at every input.
        norm_p: the largest ‖P‖ of a head, at every input.
    """

    source: str
    layer: int
    temperature: float | None
    norm: list[float]
    bounds: dict[str, list[float]]
    largest_g_1: list[float]
    norm_p: list[float]


@final
@dataclass(frozen=True)
class ModelJacobians:
    """The layers of a model."""

    source: str
    layers: list[LayerJacobian]


@final
@dataclass(frozen=True)
class JacobianParameters:
    """What `repro yudin-layers` takes."""

    models: tuple[str, ...] = option(("digits", "minilm", "smollm2"), "digits, or names of language models.", grid=True)
    temperatures: tuple[float, ...] = option(
        (0.05, 0.3, 1.0, 3.0, 10.0, 30.0), "Temperatures of random layers.", grid=True, least=1e-6
    )
    inputs: int = option(4, "Inputs for every layer.", least=1)
    length: int = option(32, "Tokens per text.", least=2)


@final
@register_study
class YudinLayers(Study[JacobianParameters]):
    """The bound of attention's Jacobian."""

    name = "yudin-layers"
    title = "The bound of attention's Jacobian against its true norm, on random layers and on real models"
    paper = "yudin2025"
    minutes = 8
    memory = 3
    parameters = JacobianParameters
    kinds: ClassVar = {"random": LayerJacobian, "model": ModelJacobians}

    def quick(self) -> JacobianParameters:
        return JacobianParameters(("digits",), (0.3, 3.0), 1, 4)

    def plan(self, parameters: JacobianParameters, place: Workplace) -> StudyPlan:
        left_out, models = [], []
        for name in dict.fromkeys(parameters.models):
            if name != "digits" and name not in SOURCES:
                raise UnknownNameError("model", name, ("digits", *SOURCES))
            reason = None if name == "digits" else refusal(name)
            if reason is not None:
                left_out.append(reason)
                continue
            if name != "digits":
                find_text("alice", place.data_dir)
            models.append(StudyPart("model", name, name))
        random = [
            StudyPart("random", f"random, temperature {temperature:g}", (i, temperature))
            for i, temperature in enumerate(parameters.temperatures)
        ]
        return StudyPlan([[*random, *models]], left_out)

    def measure(
        self, parameters: JacobianParameters, part: StudyPart, place: Workplace, earlier: Records, tell: Tell
    ) -> LayerJacobian | ModelJacobians:
        if part.kind == "random":
            number, temperature = part.work
            layer, x = random_layer(temperature, parameters.inputs)
            return jacobian(layer, x, "random", number, temperature)
        return ModelJacobians(part.work, list(_model_layers(part.work, parameters, place)))

    def show(self, parameters: JacobianParameters, records: Records) -> StudyOutput:
        layers = [*records.of("random"), *(layer for model in records.of("model") for layer in model.layers)]
        statements = jacobian_statements(layers)
        return StudyOutput(
            {"statements": to_json(statements)},
            [statement_table("Yudin et al. 2025, attention", statements)],
            {"": draw_jacobians(layers)},
            statement_page(statements),
        )


def random_layer(temperature: float, inputs: int) -> tuple[AttentionLayer, Tensor]:
    """One head on 24 normalised tokens of width 32, whose scores are multiplied by a number."""
    generator = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    d = 32
    w_q, w_k, w_v, w_o = (gaussian(1, d, d) / d**0.5 for _ in range(4))
    x = torch.nn.functional.layer_norm(gaussian(inputs, 24, d), (d,))
    return AttentionLayer(temperature * w_q, w_k, w_v, w_o), x


def _model_layers(name: str, parameters: JacobianParameters, place: Workplace) -> Iterator[LayerJacobian]:
    if name == "digits":
        entering = load_digits_vit().attention_inputs(demo_digits().images[: parameters.inputs])
        for i, (module, x) in enumerate(entering.values()):
            yield jacobian(AttentionLayer.from_module(module), x, name, i, None)
        return
    source = load_source(name)
    ids = source.tokenise(read_text("alice", place.data_dir))
    inputs = {"input_ids": chunks(ids, parameters.length, parameters.inputs), "use_cache": False}
    for i, traced in enumerate(iter_trace(source.model, inputs)):
        yield jacobian(traced.layer, traced.x, name, i, None)


def jacobian(layer: AttentionLayer, x: Tensor, source: str, number: int, temperature: float | None) -> LayerJacobian:
    """The norm and its bounds at inputs (b, n, d)."""
    layer, x = layer.double(), x.double()
    norm = api.local_lipschitz(layer, x).value
    bounds = {}
    for method in METHODS:
        try:
            bounds[method] = api.lipschitz_bound(layer, x, method, guarantee="numerical").value.tolist()
        except NotApplicableError:
            continue
    p = layer.attention(x)
    g_1 = softmax_jacobian_norm(p, "g1").flatten(1).amax(1)
    norm_p = torch.linalg.matrix_norm(p, 2).amax(-1)
    return LayerJacobian(source, number, temperature, norm.tolist(), bounds, g_1.tolist(), norm_p.tolist())


def _excess(layers: Sequence[LayerJacobian], method: str) -> Tensor:
    """Bound / norm, for all inputs of the layers for which the method has a proof."""
    parts = [torch.tensor(one.bounds[method]) / torch.tensor(one.norm) for one in layers if method in one.bounds]
    return torch.cat(parts) if parts else torch.ones(0)


def jacobian_statements(layers: Sequence[LayerJacobian]) -> list[Statement]:
    """What the numbers say about the bound of attention's Jacobian."""
    made = []
    for source in dict.fromkeys(one.source for one in layers):
        own = [one for one in layers if one.source == source]
        ratios = {method: _excess(own, method) for method in METHODS}
        if not len(ratios["yudin"]):
            continue
        theirs = ratios["yudin"]
        others = [f"{name} {ratios[name].mean().item():.3g}" for name in METHODS[1:] if len(ratios[name])]
        evidence = f"bound / norm: {theirs.min().item():.3g} to {theirs.max().item():.3g}, mean "
        evidence += f"{theirs.mean().item():.3g}; ours, mean: {', '.join(others)}"
        smaller = len(ratios["yudin-b3"]) > 0 and bool((ratios["yudin-b3"] < theirs).all())
        sound = all(bool((values >= 1 - 1e-6).all()) for values in ratios.values())
        claim = f"{source}: ‖DF(X)‖ ≤ ‖W_V‖(‖P‖ + 2‖X‖²‖A‖ max g_1)"
        made.append(judged(claim, sound, evidence, sharper=smaller))
    return made


def draw_jacobians(layers: Sequence[LayerJacobian]) -> Figure:
    """Bound / norm, mean and range over inputs: over the temperature of random layers, and the layers of models."""
    sources = list(dict.fromkeys(one.source for one in layers))
    figure = new_figure(7.0, 3.0)
    panels = figure.subplots(1, len(sources), sharey=True, squeeze=False)[0]
    for panel, source in zip(panels, sources, strict=True):
        own = [one for one in layers if one.source == source]
        for colour, method in zip(PALETTE, METHODS, strict=False):
            known = [one for one in own if method in one.bounds]
            if known:
                at = [one.layer if one.temperature is None else one.temperature for one in known]
                ratios = torch.stack([_excess([one], method) for one in known], -1)
                draw_range(panel, at, ratios, ".-", color=colour, label=method)
        panel.set(title=source, yscale="log", xlabel="factor of the scores" if source == "random" else "layer")
        if source != "random":
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if source == "random":
            panel.set_xscale("log")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("bound / ‖DF(X)‖")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure
