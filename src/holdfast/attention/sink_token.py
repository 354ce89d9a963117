"""Sinks as one more token that does not move: the layer becomes one without sinks (docs/math/scores.md)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from holdfast.attention.layer import AttentionLayer
from holdfast.attention.rotary import Rotary

_FAR = 2.0**30  # how far out the token stands: the weights that only it meets are so much smaller


def with_sink_token(
    layer: AttentionLayer, x: Float[Tensor, "*b n d"]
) -> tuple[AttentionLayer, Float[Tensor, "*b m e"]]:
    """A layer without sinks and its input, of which the first n rows of the output are the layer's own less residual.

    The token is the last one. Its key and value are 0, its scores the sinks, as a score bias; it attends to itself
    alone. Where keys or values have a bias it stands in a channel of its own, whose weights take the bias off.
    """
    layer_of_token, token = sink_token(layer, x.shape[-2])
    wide = pad(x, (0, len(token) - x.shape[-1]))
    return layer_of_token, torch.cat([wide, token.to(x).expand(*x.shape[:-2], 1, -1)], -2)


def sink_token(layer: AttentionLayer, n: int) -> tuple[AttentionLayer, Float[Tensor, " e"]]:
    """The layer of `with_sink_token` for n tokens, and the token."""
    assert layer.sinks is not None
    assert layer.q_norm is None
    assert layer.k_norm is None
    biases = [b for b in (layer.b_k, layer.b_v) if b is not None]
    far = _FAR if all(torch.equal(b / _FAR * _FAR, b) for b in biases) else 1.0  # no bias may underflow
    token = layer.w_q.new_tensor([0.0] * layer.d + [far] * bool(biases))
    changed: dict[str, Any] = {"sinks": None, "residual": 0.0, "causal": False}
    if biases:
        changed["w_q"] = pad(layer.w_q, (0, 0, 0, 1))
        for name, b in (("w_k", layer.b_k), ("w_v", layer.b_v)):
            w = pad(getattr(layer, name), (0, 0, 0, 1))
            if b is not None:
                w[:, -1] = -b / far
            changed[name] = w
    allowed = layer.allowed(n)
    every = torch.ones(n, n, dtype=torch.bool, device=layer.device) if allowed is None else allowed
    mask = pad(every, (0, 1, 0, 1))
    mask[..., -1] = True
    bias = layer.w_q.new_zeros(layer.h, n, n) if layer.score_bias is None else layer.score_bias
    bias = pad(bias.expand(*bias.shape[:-3], layer.h, n, n), (0, 1, 0, 1))
    bias[..., :n, n] = layer.sinks.unsqueeze(-1)
    changed |= {"mask": mask, "score_bias": bias}
    if layer.rotary is not None:
        cos, sin = pad(layer.rotary.cos, (0, 0, 0, 1), value=1.0), pad(layer.rotary.sin, (0, 0, 0, 1))
        changed["rotary"] = Rotary(cos, sin, layer.rotary.pairing)
    return layer.replace(**changed), token
