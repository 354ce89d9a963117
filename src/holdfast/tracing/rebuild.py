"""Builds the layer that a module is, from its weights alone, and compares it with what the module did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from holdfast.attention import AttentionLayer, Rotary
from holdfast.attention.layer import merge_heads
from holdfast.errors import UnsupportedAttentionError
from holdfast.tracing.eager import FORBIDDING
from holdfast.tracing.family import Site
from holdfast.tracing.tap import AttentionCall

#: How far a rebuilt output may be from the model's own, relative to it, by the dtype the model computes in.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass
class Pass:
    """What was seen of one pass through a module.

    Attributes:
        entered: what entered its query, key and value maps.
        positions: cos and sin of its rotary positions.
        call: what its kernel computed.
        before_out: what entered its output map, where that is a module.
        output: what left it.
    """

    entered: list[Tensor] = field(default_factory=list)
    positions: tuple[Tensor, Tensor] | None = None
    call: AttentionCall | None = None
    before_out: Tensor | None = None
    output: Tensor | None = None


@dataclass(frozen=True)
class Record:
    """A pass that was verified, with what is needed to build its layer again."""

    site: Site
    x: Float[Tensor, "b n d"]
    h: int
    k: int
    terms: Mapping[str, Any]
    rebuild_error: float = math.inf

    def layer(self) -> AttentionLayer:
        """The layer, in the dtype of x."""
        weights: dict[str, Any] = {name: t.to(self.x.dtype) for name, t in self.site.weights(self.h, self.k).items()}
        return AttentionLayer(**weights, **self.terms)


def verify(site: Site, seen: Pass) -> Record:
    """Rebuilds the layer in float64 and compares; the record of the pass, if they agree."""
    call, output = seen.call, seen.output
    if call is None:
        implementation = getattr(getattr(site.module, "config", None), "_attn_implementation", "unknown")
        raise _unsupported(
            site,
            f"ran, but no dot-product attention was seen in it (attention implementation: {implementation}); "
            'load the model with attn_implementation="sdpa" or "eager"',
        )
    assert output is not None
    x = seen.entered[0]
    _check_call(site, seen, call, x)
    _, h, n, k = call.query.shape
    tolerance = max(TOLERANCE[t.dtype] for t in (x, call.query, call.output, output))
    x = x if x.dtype == torch.float64 else x.float()
    masking = _masking(site, call)
    terms = {
        "scale": None if site.family.prescaled else call.scale,
        "mask": masking.mask,
        "causal": masking.causal,
        "score_bias": None if masking.bias is None else masking.bias.to(x),
        "rotary": _rotary(site, seen.positions, x.dtype),
    }
    record = Record(site, x, h, k, terms)
    layer = record.layer().double()
    rows = torch.ones(n, dtype=torch.bool, device=x.device) if masking.keyed is None else masking.keyed
    error = _distance(layer(x.double()), output, rows)
    if not error <= tolerance:
        raise _unsupported(
            site,
            f"does not return what its weights say (relative error {error:.1e}, expected at most {tolerance:g}): "
            f"{_diagnose(site, layer, x.double(), seen, call, rows, tolerance)}",
        )
    return replace(record, rebuild_error=error)


def _unsupported(site: Site, found: str) -> UnsupportedAttentionError:
    return UnsupportedAttentionError(f"module {site.name!r} ({type(site.module).__name__}) {found}")


def _check_call(site: Site, seen: Pass, call: AttentionCall, x: Tensor) -> None:
    """Self-attention of all tokens of x, without dropout."""
    if call.dropout:
        raise _unsupported(site, f"has dropout {call.dropout:g} on its probabilities; call model.eval() first")
    if any(t is not x and not (t.shape == x.shape and torch.equal(t, x)) for t in seen.entered):
        raise _unsupported(site, "is cross-attention: its keys and values come from another tensor than its queries")
    queries, keys, tokens = call.query.shape[-2], call.key.shape[-2], x.shape[-2]
    if (queries, keys) != (tokens, tokens):
        raise _unsupported(
            site,
            f"attends from {queries} queries to {keys} keys where {tokens} tokens enter it: past keys (a cache), added "
            "tokens or cross-attention; expected self-attention, with use_cache=False and no past_key_values",
        )
    if call.query.shape[0] != x.shape[0] or call.value.shape[-1] != call.query.shape[-1]:
        raise _unsupported(
            site,
            f"gives its kernel queries {tuple(call.query.shape)} and values {tuple(call.value.shape)} for an input "
            f"{tuple(x.shape)}: windows, or values of another width; expected (b, h, n, k)",
        )


@dataclass(frozen=True)
class _Masking:
    """A kernel's mask in the layer's terms; `keyed` marks queries that have a key, where some have none."""

    mask: Bool[Tensor, "*b n n"] | None = None
    causal: bool = False
    bias: Float[Tensor, "*b h n n"] | None = None
    keyed: Bool[Tensor, "*b n"] | None = None


def _masking(site: Site, call: AttentionCall) -> _Masking:
    """Splits a mask into what it forbids and what it adds."""
    if call.mask is None:
        return _Masking(causal=call.causal)
    n = call.key.shape[-2]
    given = call.mask[(None,) * (4 - call.mask.ndim)].expand(-1, -1, n, n)
    allowed = given if given.dtype == torch.bool else given > FORBIDDING
    bias = None if given.dtype == torch.bool else _once(given.masked_fill(~allowed, 0.0))
    if not bool((allowed == allowed[:, :1]).all()):
        raise _unsupported(site, "masks each head in a way of its own; expected one mask for all heads")
    lower = torch.ones(n, n, dtype=torch.bool, device=given.device).tril()
    allowed = _once(allowed[:, 0])
    if call.causal:
        allowed = allowed & lower
    keyed = allowed.any(-1)
    every = bool(keyed.all())
    if not every:  # padding that may attend to nothing: to itself, then, where a layer needs a key
        allowed = allowed | (~keyed.unsqueeze(-1) & torch.eye(n, dtype=torch.bool, device=given.device))
    causal = allowed.ndim == 2 and torch.equal(allowed, lower)
    return _Masking(
        mask=None if causal or bool(allowed.all()) else allowed,
        causal=causal,
        bias=None if bias is None or not bool(bias.any()) else bias,
        keyed=None if every else keyed,
    )


def _rotary(site: Site, positions: tuple[Tensor, Tensor] | None, dtype: torch.dtype) -> Rotary | None:
    if site.family.rotary is None or positions is None:
        return None
    both = torch.cat(positions, -1).detach().to(dtype)
    cos, sin = (_once(both) if both.ndim == 3 else both).chunk(2, -1)
    return Rotary(cos, sin, site.family.rotary)


def _once(t: Tensor) -> Tensor:
    """One member of the batch, where all are the same."""
    return t[0] if bool((t == t[:1]).all()) else t


def _distance(found: Tensor, real: Tensor, rows: Tensor) -> float:
    """The relative distance over the rows (…, n) that count, of tensors (b, …, n, m)."""
    count = rows if rows.ndim == 1 else rows.reshape(len(rows), *(1 for _ in range(found.ndim - 3)), -1)
    difference = (found - real.double()) * count.unsqueeze(-1)
    size = torch.linalg.vector_norm(real.double() * count.unsqueeze(-1))
    return float(torch.linalg.vector_norm(difference) / size) if bool(size) else float(torch.linalg.vector_norm(found))


def _diagnose(
    site: Site, layer: AttentionLayer, x: Tensor, seen: Pass, call: AttentionCall, rows: Tensor, tolerance: float
) -> str:
    """The first place where the module and the layer part."""
    parts = layer.run(x)
    k, v = (t.repeat_interleave(layer.h // t.shape[1], 1) for t in (call.key, call.value))
    stages = {"q": (parts.q * layer.scale, call.query * call.scale), "k": (parts.k, k), "v": (parts.v, v)}
    apart = {name for name, (found, real) in stages.items() if not _distance(found, real, rows) <= 2 * tolerance}
    if apart & {"q", "k"}:
        norms = [name for name, m in site.module.named_children() if "norm" in name and not isinstance(m, nn.Identity)]
        named = f"a query-key norm ({', '.join(norms)})" if norms else "a query-key norm, or positions of another kind"
        return f"its queries or keys are not a linear map of its input; found {named}"
    if apart:
        return "its values are not a linear map of its input"
    if not _distance(parts.y, call.output, rows) <= 2 * tolerance:
        return "its probabilities are not the softmax of its scores"
    if seen.before_out is not None and not _distance(merge_heads(parts.y), seen.before_out, rows) <= 2 * tolerance:
        return "the heads' outputs change before the output map; found a gate or a norm there"
    return "the output map adds something of its own"
