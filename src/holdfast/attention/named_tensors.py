"""A layer as named tensors, which is how a safetensors file holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from holdfast.attention.head_norm import HeadNorm
from holdfast.attention.rotary import Pairing, Rotary
from holdfast.errors import InputError

if TYPE_CHECKING:
    from holdfast.attention.layer import AttentionLayer

WEIGHTS = ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")


def named_options(layer: AttentionLayer) -> dict[str, Tensor]:
    """All of a layer but its weights."""
    options = {
        "scale": torch.tensor(layer.scale, dtype=torch.float64),
        "residual": torch.tensor(layer.residual, dtype=torch.float64),
        "causal": torch.tensor(layer.causal),
    }
    if layer.mask is not None:
        options["mask"] = layer.mask
    if layer.score_bias is not None:
        options["score_bias"] = layer.score_bias
    if layer.rotary is not None:
        options |= {"rotary_cos": layer.rotary.cos, "rotary_sin": layer.rotary.sin}
        options["rotary_interleaved"] = torch.tensor(layer.rotary.pairing == "interleaved")
    for name, norm in (("q_norm", layer.q_norm), ("k_norm", layer.k_norm)):
        if norm is not None:
            options |= {f"{name}_{key}": value for key, value in norm.tensors().items()}
    if layer.soft_cap is not None:
        options["soft_cap"] = torch.tensor(layer.soft_cap, dtype=torch.float64)
    if layer.sinks is not None:
        options["sinks"] = layer.sinks
    return options


def read_arguments(tensors: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    """The constructor's arguments; `source` says in messages where the tensors are from."""
    missing = [name for name in WEIGHTS[:4] if name not in tensors]
    if missing:
        raise InputError(
            f"{source}: no tensor named {', '.join(missing)}; found {', '.join(sorted(tensors)) or 'nothing'}; "
            "a layer needs w_q, w_k, w_v, w_o"
        )
    named: dict[str, Any] = {
        name: tensors[name] for name in (*WEIGHTS, "mask", "score_bias", "sinks") if name in tensors
    }
    for name in ("scale", "residual", "causal", "soft_cap"):
        if name in tensors:
            named[name] = _number(tensors[name], name, source)
    if ("rotary_cos" in tensors) != ("rotary_sin" in tensors):
        raise InputError(f"{source}: one of rotary_cos and rotary_sin is missing; rotary positions need both")
    if "rotary_cos" in tensors:
        interleaved = tensors.get("rotary_interleaved", torch.tensor(False))
        pairing: Pairing = "interleaved" if _number(interleaved, "rotary_interleaved", source) else "half"
        named["rotary"] = Rotary(tensors["rotary_cos"], tensors["rotary_sin"], pairing)
    for name in ("q_norm", "k_norm"):
        own = {key.removeprefix(f"{name}_"): t for key, t in tensors.items() if key.startswith(f"{name}_")}
        if own:
            named[name] = HeadNorm.from_tensors(own, f"{source}: {name}")
    return named


def _number(t: Tensor, name: str, source: str) -> Any:
    if t.numel() != 1:
        raise InputError(f"{source}: {name} has shape {tuple(t.shape)}; expected one number")
    return t.item()
