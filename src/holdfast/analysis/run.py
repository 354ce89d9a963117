"""Analyzes every attention layer of a model at its real inputs, one layer at a time."""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from holdfast.analysis.inputs import describe, shortened
from holdfast.analysis.result import Analysis, AnalyzedInput, AnalyzedLayer
from holdfast.attacks import ProjectedAscent
from holdfast.attention import AttentionJacobian, AttentionLayer
from holdfast.attention.heads import HeadJacobians
from holdfast.attention.softmax import softmax_jacobian_norm
from holdfast.bounds import bound_named, bounds
from holdfast.errors import InputError, MemoryLimitError, NotApplicableError
from holdfast.graph.trace import TracedLayer, trace
from holdfast.linalg import MatrixOperator, estimate, upper
from holdfast.models.loading import Picture
from holdfast.progress import watching
from holdfast.radii import GivenRadii, check_radii
from holdfast.results import Guarantee
from holdfast.version import __version__

#: From the top singular vector a few steps come within a few per cent of a long search.
_ATTACK = ProjectedAscent(restarts=1, steps=2)
_ATTACK_WORDS = "Projected gradient ascent, 2 steps from the top singular vector and from random directions."
_LOG = logging.getLogger(__name__)
_PACKAGES = ("torch", "transformers", "timm")


@dataclass(frozen=True)
class AnalysisProgress:
    """Where an analysis stands: `done` of `planned` layers are finished, and `name` is next."""

    done: int
    planned: int
    name: str


def analyze(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    eps: GivenRadii,
    *,
    layers: Sequence[int] | None = None,
    max_tokens: int | None = None,
    method: str = "second-order",
    guarantee: Guarantee = "numerical",
    proved_slope: bool = False,
    attack: bool = True,
    tokens: Sequence[Sequence[str]] | None = None,
    pictures: Sequence[Picture] | None = None,
    name: str | None = None,
    progress: Callable[[AnalysisProgress], None] | bool = True,
    seed: int = 0,
) -> Analysis:
    """Local constants, softmax norms, bounds, attacks and sensitive tokens of every attention layer.

    An interrupt (Ctrl-C) ends the run; the layers that are finished are returned.

    Args:
        model: any model whose attention `trace` can read.
        inputs: what the model takes: one tensor, or its keyword arguments. Tokens that a two-dimensional
            "attention_mask" leaves out are padding: they are shown and not counted.
        eps: one radius or several: how far the input of each layer may move, in the Frobenius norm.
        layers: which attention layers, counted from 0; default all.
        max_tokens: token ids beyond this many are cut off.
        method: a bound's name, as `list_bounds` shows it; `taylor` takes its place where it has no proof for a layer.
        guarantee: of the bounds: "numerical", or "proved" (slow beyond a few hundred n · d).
        proved_slope: also prove the local constant of each layer from above.
        attack: also search for a perturbation at every eps.
        tokens: what to call the tokens of each input; default their numbers.
        pictures: the images that the inputs come from, to shade their patches.
        name: what to call the model; default its class.
        progress: a function called before each layer, and at the end; by default a bar in a terminal and in a
            notebook, with False none.
        seed: for everything random.

    Example:
        >>> analysis = analyze(model, tokenizer("A sentence.", return_tensors="pt"), eps=[0.01, 0.1])
        >>> analysis.to_html("page.html")
    """
    began = time.perf_counter()
    radii = check_radii(eps)
    bound_named(method)  # an unknown name is refused before any work is done
    if max_tokens is not None:
        inputs = shortened(inputs, max_tokens)
    traced = trace(model, inputs)
    chosen = _chosen(layers, len(traced))
    shown = describe(inputs, traced[0].x, tokens, pictures)
    work = Work(radii, method, guarantee, proved_slope, attack, seed)
    analyzed: list[AnalyzedLayer] = []
    with watching(progress, name or type(model).__name__, lambda now: (now.done, now.planned)) as tell:
        try:
            for index in chosen:
                if tell is not None:
                    tell(AnalysisProgress(len(analyzed), len(chosen), traced[index].name))
                analyzed.append(analyze_layer(index, traced[index], shown, work))
                _LOG.info("layer %d (%s): %.2f s", index, analyzed[-1].name, analyzed[-1].seconds)
        except KeyboardInterrupt:
            if not analyzed:
                raise
        if tell is not None:
            tell(AnalysisProgress(len(analyzed), len(chosen), ""))
    return Analysis(
        model=name or type(model).__name__,
        eps=tuple(radii),
        guarantee=guarantee,
        method=method,
        attack=_ATTACK_WORDS if attack else "No attack was requested.",
        inputs=shown,
        layers=tuple(analyzed),
        planned=len(chosen),
        notes=(),
        versions=_versions(),
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class Work:
    """What to compute for every layer."""

    radii: list[float]
    method: str
    guarantee: Guarantee
    proved_slope: bool
    attack: bool
    seed: int


def analyze_layer(index: int, traced: TracedLayer, shown: tuple[AnalyzedInput, ...], work: Work) -> AnalyzedLayer:
    """One layer at all inputs; inputs with the same padding go together, with the padding removed."""
    began = time.perf_counter()
    groups: dict[tuple[bool, ...], list[int]] = {}
    for place, view in enumerate(shown):
        groups.setdefault(view.padding, []).append(place)
    rows: dict[str, list[Any]] = {}
    notes: dict[str, None] = {}
    for padding, members in groups.items():
        real = ~torch.tensor(padding)
        layer, x = _without_padding(traced.layer, traced.x, members, real)
        measured, note = _measure(layer.double(), x.double(), work)
        notes[note] = None
        energy = torch.zeros(len(members), len(padding), dtype=torch.float64)
        energy[:, real] = measured["energy"].cpu()
        for key, values in (measured | {"energy": energy}).items():
            column = rows.setdefault(key, [None] * len(shown))
            for place, value in zip(members, values.tolist(), strict=True):
                column[place] = tuple(value) if isinstance(value, list) else value
    columns: dict[str, Any] = {key: tuple(column) for key, column in rows.items() if None not in column}
    return AnalyzedLayer(
        index=index,
        name=traced.name,
        layer=_words(traced.layer),
        rebuild_error=float(traced.rebuild_error),
        bound_note="; ".join(notes),
        seconds=time.perf_counter() - began,
        **({"slope_upper": None, "bound": None, "attack": None} | columns),
    )


def _measure(
    layer: AttentionLayer, x: Float[Tensor, "b n d"], work: Work
) -> tuple[dict[str, Float[Tensor, "b ..."]], str]:
    """The numbers of `AnalyzedLayer` at inputs without padding, in float64, and its note on the bound."""
    with torch.no_grad():
        jacobian = AttentionJacobian(layer, x)
        slope = estimate(jacobian, seed=work.seed)
        assert slope.right is not None
        p = layer.run(x).p
        numbers = {
            "slope": slope.value,
            "head_slope": _head_slopes(layer, x, work.seed),
            "softmax_norm": softmax_jacobian_norm(layer.whole_rows(p)).amax(-1),
            "softmax_g1": softmax_jacobian_norm(layer.whole_rows(p), method="g1").amax(-1),
            "attention_norm": estimate(MatrixOperator(p), tolerance=1e-4, seed=work.seed).value,
            "entropy": torch.special.entr(p).sum(-1).mean(-1),
            "energy": slope.right.square().sum(-1),
        }
        if work.proved_slope:
            with suppress(MemoryLimitError):
                numbers["slope_upper"] = upper(jacobian).value
    refusals = []
    for method in dict.fromkeys((work.method, *(bound.name for bound in bounds.values() if bound.stands_in))):
        try:
            result = bound_named(method)(layer, x, work.radii, guarantee=work.guarantee)
        except (NotApplicableError, MemoryLimitError) as error:
            refusals.append(str(error))
        else:
            numbers["bound"] = result.value
            refusals.insert(0, ", ".join((method, *result.notes)))
            break
    if work.attack:
        numbers["attack"] = _ATTACK(layer, x, work.radii, seed=work.seed).lower
    return numbers, "; ".join(refusals)


def _head_slopes(layer: AttentionLayer, x: Float[Tensor, "b n d"], seed: int) -> Float[Tensor, "b h"]:
    """The local constant of each head by itself."""
    if not any(norm is not None and norm.across for norm in (layer.q_norm, layer.k_norm)):
        return estimate(HeadJacobians(layer, x), tolerance=1e-4, seed=seed).value
    slopes = []
    for head in torch.eye(layer.h, dtype=x.dtype, device=x.device):  # one norm over all heads: each needs them all
        alone = layer.replace(w_o=layer.w_o * head[:, None, None], residual=0.0)
        slopes.append(estimate(AttentionJacobian(alone, x), tolerance=1e-4, seed=seed).value)
    return torch.stack(slopes, -1)


def _without_padding(
    layer: AttentionLayer, x: Float[Tensor, "b n d"], members: list[int], real: Bool[Tensor, " n"]
) -> tuple[AttentionLayer, Float[Tensor, "m r d"]]:
    """The layer and its inputs `members`, with the padding taken out.

    No token attends to padding, so the result is the same function of the remaining tokens.
    """
    keep = real.nonzero().squeeze(-1).to(x.device)

    def cut(t: Tensor, own: int, *token_dims: int) -> Tensor:
        for dim in token_dims:
            t = t.index_select(dim, keep)
        return t[members] if t.ndim > own and len(t) > 1 else t

    mask, rotary, bias = layer.mask, layer.rotary, layer.score_bias
    if mask is not None:
        mask = cut(mask, 2, -2, -1)
        mask = None if bool(mask.all()) else mask
    if rotary is not None:
        rotary = replace(rotary, cos=cut(rotary.cos, 2, -2), sin=cut(rotary.sin, 2, -2))
    bias = None if bias is None else cut(bias, 3, -2, -1)
    return layer.replace(mask=mask, rotary=rotary, score_bias=bias), x[members][:, keep]


def _chosen(layers: Sequence[int] | None, count: int) -> list[int]:
    """The requested layers, in the order of the model."""
    if layers is None:
        return list(range(count))
    wrong = [index for index in layers if not 0 <= index < count]
    if wrong or not layers:
        asked = ", ".join(map(str, wrong)) or "no layer"
        raise InputError(f"layers includes {asked}; the model has attention layers 0 to {count - 1}")
    return sorted(set(layers))


def _words(layer: AttentionLayer) -> str:
    """The layer's sizes and options, for a reader."""
    heads = f"{layer.h} heads" + (f" ({layer.g} for keys and values)" if layer.g < layer.h else "")
    words = [heads.replace("1 heads", "1 head") if layer.h == 1 else heads, f"width {layer.d}", f"head width {layer.k}"]
    return ", ".join([*words, *(["causal"] if layer.causal else [])])


def _versions() -> dict[str, str]:
    """Of the packages involved; one that was never imported was not."""
    packages = {name: str(sys.modules[name].__version__) for name in _PACKAGES if name in sys.modules}
    return {"holdfast": __version__, "python": platform.python_version()} | packages
