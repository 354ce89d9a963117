"""What a layer and its input must be; every error is one line about the caller's own arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from holdfast.errors import InputError

if TYPE_CHECKING:
    from holdfast.attention.layer import AttentionLayer

_FLOATS = (torch.float32, torch.float64)


def weights(tensors: Mapping[str, Tensor]) -> None:
    """Shapes that fit together, one dtype, one device, finite numbers."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise InputError(f"{name} is {type(t).__name__}; expected a torch tensor")
        if t.dtype not in _FLOATS:
            raise InputError(f"{name} has dtype {t.dtype}; expected float32 or float64")
    for name in ("w_q", "w_k", "w_v", "w_o"):
        if name not in tensors:
            raise InputError(f"{name} is None; expected a tensor of three dimensions, (heads, d, k)")
        if tensors[name].ndim != 3:
            raise InputError(f"{name} has shape {_shape(tensors[name])}; expected three dimensions, (heads, d, k)")
    (h, d, k), (g, d_out) = tensors["w_q"].shape, (tensors["w_k"].shape[0], tensors["w_o"].shape[2])
    if min(h, g, d, k, d_out, tensors["w_v"].shape[2]) == 0:
        raise InputError(f"w_q has shape {_shape(tensors['w_q'])}; every size must be at least 1")
    if h % g:
        raise InputError(f"w_q has {h} heads and w_k {g}; the key-value heads must divide the query heads")
    k_v = tensors["w_v"].shape[2]
    expected = {
        "w_k": (g, d, k),
        "w_v": (g, d, k_v),
        "w_o": (h, k_v, d_out),
        "b_q": (h, k),
        "b_k": (g, k),
        "b_v": (g, k_v),
        "b_o": (d_out,),
    }
    first = tensors["w_q"]
    for name, t in tensors.items():
        if name in expected and tuple(t.shape) != expected[name]:
            raise InputError(
                f"{name} has shape {_shape(t)}; expected {expected[name]} beside w_q of shape {_shape(first)}"
            )
        if t.dtype != first.dtype or t.device != first.device:
            raise InputError(
                f"{name} is {t.dtype} on {t.device} and w_q {first.dtype} on {first.device}; "
                "give all weights one dtype and one device"
            )
        finite(t, name)


def options(layer: AttentionLayer) -> None:
    """Finite scale and residual, a residual only where shapes allow it, a mask that leaves every query a key."""
    for name in ("scale", "residual"):
        value = getattr(layer, name)
        if not math.isfinite(value):
            raise InputError(f"{name} is {value}; expected a finite number")
    if layer.residual and layer.d_out != layer.d:
        raise InputError(
            f"residual is {layer.residual:g} but the layer maps width {layer.d} to {layer.d_out}; "
            "a residual needs equal widths"
        )
    mask = layer.mask
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"mask is {given}; expected a bool tensor, True where attention is allowed")
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        raise InputError(f"mask has shape {_shape(mask)}; expected (n, n) or (b, n, n)")
    allowed = layer.allowed(mask.shape[-1])
    assert allowed is not None
    empty = (~allowed.any(-1)).nonzero()
    if len(empty):
        raise InputError(
            f"mask leaves no key to the query at index {tuple(empty[0].tolist())} ({len(empty)} such rows); "
            "every query needs at least one key, so let padding tokens attend to themselves"
        )


def score_terms(layer: AttentionLayer) -> None:
    """Rotary positions and a score bias of the layer's dtype, device and sizes."""
    rotary, bias = layer.rotary, layer.score_bias
    terms = {} if rotary is None else {"rotary cos": rotary.cos, "rotary sin": rotary.sin}
    for name, t in (terms if bias is None else terms | {"score_bias": bias}).items():
        if not isinstance(t, Tensor) or t.dtype != layer.dtype or t.device != layer.device:
            given = f"{t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise InputError(f"{name} is {given}; expected a tensor of {layer.dtype} on {layer.device}, as the weights")
        finite(t, name)
    if rotary is not None and rotary.r > layer.k:
        raise InputError(f"rotary turns {rotary.r} entries of a head, and a head has {layer.k}")
    if bias is not None and (
        bias.ndim < 2 or bias.shape[-1] != bias.shape[-2] or (bias.ndim > 2 and bias.shape[-3] not in (1, layer.h))
    ):
        raise InputError(
            f"score_bias has shape {_shape(bias)}; expected (n, n), ({layer.h}, n, n) or (b, {layer.h}, n, n)"
        )
    if layer.soft_cap is not None and not 0 < layer.soft_cap < math.inf:
        raise InputError(f"soft_cap is {layer.soft_cap}; expected a positive number, or None for no cap")
    if layer.sinks is not None:
        _like_the_weights(layer, layer.sinks, "sinks", (layer.h,))
    for name, norm, heads in (("q_norm", layer.q_norm, layer.h), ("k_norm", layer.k_norm, layer.g)):
        if norm is not None:
            shape = (layer.k,) if norm.weight.ndim == 1 else (heads, layer.k)
            _like_the_weights(layer, norm.weight, f"the weight of {name}", shape)
            if norm.bias is not None:
                _like_the_weights(layer, norm.bias, f"the bias of {name}", shape)
    tokens = {name: n for name, n, _ in _positional(layer)}
    if len(set(tokens.values())) > 1:
        counts = ", ".join(f"{name} for {n}" for name, n in tokens.items())
        raise InputError(f"the layer's parts are for different numbers of tokens: {counts}")


def _like_the_weights(layer: AttentionLayer, t: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(t, Tensor) or t.shape != shape or t.dtype != layer.dtype or t.device != layer.device:
        given = f"{_shape(t)}, {t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
        raise InputError(f"{name} is {given}; expected {shape}, {layer.dtype} on {layer.device}")
    finite(t, name)


def input(layer: AttentionLayer, x: Tensor) -> None:
    """An input of the layer's width, with at least one token, finite, that fits the mask."""
    if not isinstance(x, Tensor):
        raise InputError(f"x is {type(x).__name__}; expected a tensor (…, n, {layer.d})")
    if x.dtype not in _FLOATS:
        raise InputError(f"x has dtype {x.dtype}; expected float32 or float64")
    if x.ndim < 2 or x.shape[-1] != layer.d or x.shape[-2] == 0 or x.numel() == 0:
        raise InputError(f"x has shape {_shape(x)}; expected (…, n, {layer.d}) with at least one token")
    if x.device != layer.device:
        raise InputError(f"x is on {x.device} and the layer on {layer.device}; move one of them")
    finite(x, "x")
    for name, n, batch in _positional(layer):
        if x.shape[-2] != n:
            raise InputError(f"x has {x.shape[-2]} tokens and the {name} is for {n}")
        if batch and (len(batch) > x.ndim - 2 or not _broadcasts(batch, x.shape[:-2])):
            raise InputError(f"{name} has batch shape {tuple(batch)} and x {tuple(x.shape[:-2])}; expected the same")


def same_dtype(layer: AttentionLayer, x: Tensor) -> None:
    """The layer's own dtype, so that nothing is rounded unseen."""
    if isinstance(x, Tensor) and x.dtype in _FLOATS and x.dtype != layer.dtype:
        raise InputError(f"x is {x.dtype} and the layer {layer.dtype}; use layer.to(x.dtype) or x.to(layer.dtype)")


def finite(t: Tensor, name: str) -> None:
    """No NaN and no infinity."""
    bad = int((~torch.isfinite(t)).sum())
    if bad:
        raise InputError(f"{name} of shape {_shape(t)} has {bad} NaN or infinite entries; expected finite numbers")


def module(attention: nn.MultiheadAttention) -> None:
    """Plain self-attention: what an `AttentionLayer` can represent."""
    reasons = {
        "is for cross-attention: it has separate key or value widths (kdim, vdim)": attention.in_proj_weight is None,
        "appends bias_k and bias_v tokens": attention.bias_k is not None,
        "appends a zero token (add_zero_attn)": attention.add_zero_attn,
        f"is in training mode with dropout {attention.dropout:g}; call eval() first": (
            attention.training and attention.dropout > 0
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise InputError(f"this nn.MultiheadAttention {reason}, which is not plain self-attention")


def _positional(layer: AttentionLayer) -> list[tuple[str, int, torch.Size]]:
    """What the layer holds for given tokens: its name, the number of tokens, and its batch."""
    mask, rotary, bias = layer.mask, layer.rotary, layer.score_bias
    held = [] if mask is None else [("mask", mask.shape[-1], mask.shape[:-2])]
    held += [] if rotary is None else [("rotary", rotary.n, rotary.batch)]
    return held + ([] if bias is None else [("score_bias", bias.shape[-1], bias.shape[:-3])])


def _shape(t: Tensor) -> tuple[int, ...]:
    return tuple(t.shape)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return all(size in (1, other) for size, other in zip(reversed(shape), reversed(to), strict=False))
