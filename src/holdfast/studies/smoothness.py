"""Local Lipschitz constants of the attention layers of language models against the length of their input.

The experiment of Castin, Ablin and Peyré (2024): a text is tokenised once and cut into consecutive sequences; each
attention layer is taken at what enters it, without residual, norm or dropout and with its mask, and the norm of its
Jacobian there is computed. Beside it stand the paper's bound on the ball of the longest token, and the paper's
configuration with one dominant token on the ball of the root mean square length.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import final

import numpy as np
import torch
from torch import Tensor

from holdfast import api
from holdfast.attacks.configurations import DominantTokens, dominant_tokens
from holdfast.attention import AttentionLayer
from holdfast.graph.trace import iter_trace
from holdfast.studies.texts import LanguageModel, chunks

LENGTHS = (2, 4, 8, 16, 32, 64, 128, 256, 500)
TOLERANCE = 1e-4  # looser ones stop at a singular value that is not the largest now and then
LEAST_SEQUENCES = 2
_CHOICES = 6  # configurations for every head
_DIGITS = 6


@final
@dataclass(frozen=True)
class TextBatch:
    """One batch for a model: the first consecutive sequences of a text, all of one length."""

    model: str
    text: str
    length: int
    sequences: int
    tolerance: float = TOLERANCE

    @property
    def title(self) -> str:
        return f"{self.model}: {self.text}, {self.sequences} sequences of {self.length}"


@final
@dataclass(frozen=True)
class BatchConstants:
    """One batch through one model: lists over the layers, then over the sequences.

    Attributes:
        setting: which sequences.
        constants: ‖DF(X)‖ of the layer F at its input X (estimates).
        root_mean_square: of the lengths |x_i| of the tokens that enter the layer.
        longest: the largest |x_i|.
        seconds: wall time.
    """

    setting: TextBatch
    constants: list[list[float]]
    root_mean_square: list[list[float]]
    longest: list[list[float]]
    seconds: float


@final
@dataclass(frozen=True)
class ReferenceCurve:
    """Curves of one layer that do not depend on the text.

    Attributes:
        layer: its number.
        head: the head for which the configuration is made.
        radius: R of the configuration, the root mean square length of the layer's tokens, or the paper's.
        lengths: numbers of tokens.
        adversarial: ‖DF(X)‖ of the layer at the configuration (estimates), for every length.
        adversarial_head: the same of that head alone, before the output map: what the paper's theorem is about.
        bound_radius: R of the bound, which no token of the measured sequences exceeds.
        bound: castin-ball or castin-masked at the least and the largest length ("numerical").
    """

    layer: int
    head: int
    radius: float
    lengths: list[int]
    adversarial: list[float]
    adversarial_head: list[float]
    bound_radius: float
    bound: list[float]


@final
@dataclass(frozen=True)
class ReferenceCurves:
    """Those of a model; none with rotary positions, for which neither bound nor configuration is known."""

    model: str
    curves: list[ReferenceCurve]


@final
@dataclass(frozen=True)
class PowerLaw:
    """constant = coefficient · n^exponent, with a 95 % confidence interval of the exponent."""

    coefficient: float
    exponent: float
    low: float
    high: float

    def __str__(self) -> str:
        exponent = round(self.exponent, 2) + 0.0  # no minus before a zero
        return f"{self.coefficient:.3g} n^{exponent:.2f}±{self.high - self.exponent:.2f}"


@final
@dataclass(frozen=True)
class Published:
    """A curve of the paper, coefficient · n^exponent; with the radius and head of a configuration, if it is one."""

    layer: int
    coefficient: float
    exponent: float
    radius: float | None = None
    head: int | None = None


PUBLISHED = {
    "bert": (Published(0, 14.3, 0.24), Published(0, 4.39, 0.5, radius=15.5, head=0)),
    "bert-decoder": (Published(6, 6.44, 0.25), Published(6, 5.73, 0.5, radius=21.5, head=7)),
    "gpt2-random": (Published(6, 0.445, 0.25), Published(6, 0.92, 0.5, radius=100.0)),
    "gpt2": (Published(0, 35.3, 0.26), Published(6, 25.0, 0.51), Published(0, 46.9, 0.5, radius=10.0)),
}


def batches(model: str, texts: Iterable[str], lengths: Sequence[int], sequences: int, tokens: int) -> list[TextBatch]:
    """All batches of a model, short ones first: so many sequences, fewer where they have more tokens than that."""
    counts = {n: min(sequences, max(LEAST_SEQUENCES, tokens // n)) for n in sorted(lengths)}
    return [TextBatch(model, text, n, count) for n, count in counts.items() for text in texts]


def measure(source: LanguageModel, ids: Sequence[int], setting: TextBatch) -> BatchConstants:
    """The constants of all layers on one batch of a tokenised text."""
    began = time.perf_counter()
    constants, root_mean_square, longest = [], [], []
    inputs = {"input_ids": chunks(ids, setting.length, setting.sequences), "use_cache": False}
    for traced in iter_trace(source.model, inputs):
        constants.append(_rounded(api.local_lipschitz(traced.layer, traced.x, tolerance=setting.tolerance).value))
        squares = traced.x.double().square().sum(-1)
        root_mean_square.append(_rounded(squares.mean(-1).sqrt()))
        longest.append(_rounded(squares.amax(-1).sqrt()))
    return BatchConstants(setting, constants, root_mean_square, longest, time.perf_counter() - began)


def references(name: str, source: LanguageModel, cells: Sequence[BatchConstants]) -> list[ReferenceCurve]:
    """The bound and the configuration of every layer, at the radii that were measured, and at those of the paper.

    There are none with rotary positions, for which neither is known.
    """
    lengths = sorted({cell.setting.length for cell in cells})
    inputs = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "use_cache": False}
    made = []
    for i, traced in enumerate(iter_trace(source.model, inputs)):
        if traced.layer.rotary is not None:
            return []
        rows = [cell.root_mean_square[i] for cell in cells]
        radius = math.sqrt(statistics.fmean(statistics.fmean(r * r for r in row) for row in rows))
        longest = max(max(cell.longest[i]) for cell in cells) * (1 + 10.0 ** (1 - _DIGITS))
        made.append(_reference(i, traced.layer, radius, longest, lengths, None))
        for curve in PUBLISHED.get(name, ()):
            if curve.layer == i and curve.radius is not None:
                made.append(_reference(i, traced.layer, curve.radius, curve.radius, lengths, curve.head))
    return made


def _reference(
    i: int, layer: AttentionLayer, radius: float, longest: float, lengths: list[int], head: int | None
) -> ReferenceCurve:
    choices = dominant_tokens(layer.double(), radius)
    if head is None:
        head = int(choices.guaranteed(layer, lengths[-1]).argmax()) // _CHOICES
    own = slice(_CHOICES * head, _CHOICES * (head + 1))
    choices = DominantTokens(*(getattr(choices, f.name)[own] for f in fields(choices)))
    method = "castin-masked" if layer.causal else "castin-ball"
    adversarial, of_head = [], []
    for n in lengths:
        x = choices.tokens(n)[choices.guaranteed(layer, n).argmax()].to(layer.dtype)
        adversarial.append(api.local_lipschitz(layer, x, tolerance=TOLERANCE).value)
        of_head.append(api.local_lipschitz(_alone(layer, head), x, tolerance=TOLERANCE).value)
    bound = [
        api.lipschitz_bound(layer, radius=longest, tokens=n, method=method, guarantee="numerical").value
        for n in (lengths[0], lengths[-1])
    ]
    values = (_rounded(torch.stack(curve)) for curve in (adversarial, of_head, bound))
    adversarial_values, head_values, bound_values = values
    return ReferenceCurve(i, head, radius, lengths, adversarial_values, head_values, longest, bound_values)


def _alone(layer: AttentionLayer, head: int) -> AttentionLayer:
    """One head before the output map."""
    w, own = layer.weights(layer.w_q), slice(head, head + 1)
    b_q = None if w.b_q is None else w.b_q[own]
    identity = torch.eye(layer.k, dtype=layer.dtype).unsqueeze(0)
    return AttentionLayer(w.w_q[own], w.w_k[own], w.w_v[own], identity, b_q=b_q, scale=layer.scale, causal=layer.causal)


# -- fits


def fit(lengths: Sequence[int], constants: Sequence[Sequence[float]]) -> PowerLaw:
    """Least squares of log constant on log n.

    Sequences of one length share what a power law misses at that length, so they are one observation, the mean of their
    logarithms: a standard error clustered by length. The interval is Student's with (number of lengths - 2) degrees.

    Args:
        lengths: numbers of tokens, all different; at least 3.
        constants: for every length those of its sequences.
    """
    x = np.log(np.asarray(lengths, dtype=np.float64))
    y = np.array([np.log(row).mean() for row in constants])
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    degrees = len(x) - 2
    error = math.sqrt(float(residuals @ residuals) / degrees / float(centred @ centred))
    reach = _student(degrees) * error
    return PowerLaw(math.exp(float(y.mean() - slope * x.mean())), slope, slope - reach, slope + reach)


def fits(cells: Sequence[BatchConstants]) -> dict[tuple[str, int], PowerLaw]:
    """The fit of every text and layer with batches of three lengths or more."""
    fits = {}
    for text in sorted({cell.setting.text for cell in cells}):
        by_length = {cell.setting.length: cell for cell in cells if cell.setting.text == text}
        if len(by_length) >= 3:
            for i in range(len(cells[0].constants)):
                fits[text, i] = fit(list(by_length), [cell.constants[i] for cell in by_length.values()])
    return fits


@cache
def _student(degrees: int) -> float:
    """The 97.5 % point of Student's distribution: t = √ν tan θ has a density in θ proportional to cos^(ν-1) θ."""
    theta = np.linspace(0, math.pi / 2, 200_001)
    mass = np.cumsum(np.cos((theta[1:] + theta[:-1]) / 2) ** (degrees - 1))
    return math.sqrt(degrees) * math.tan(theta[1:][np.searchsorted(mass, 0.95 * mass[-1])])


def _rounded(values: Tensor) -> list[float]:
    return [float(f"{value:.{_DIGITS}g}") for value in values.tolist()]
