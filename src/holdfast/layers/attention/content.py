"""Whether attention attends: what a network loses, and how its probabilities vary, because scores depend on content.

A network whose attention ignores its input is a fixed mixing of positions written as softmax, and any bound certifies
it. So these numbers are published along with every certified number of an attention network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from holdfast.attention import AttentionLayer
from holdfast.errors import InputError
from holdfast.layers.attention.module import SelfAttention
from holdfast.layers.module import Module

_Attention = SelfAttention | nn.MultiheadAttention


@final
@dataclass(frozen=True)
class ContentUse:
    """How much every attention layer makes of its input.

    Attributes:
        total_variation: (layers,) mean distance ½ Σ_j |p_ij - E p_ij| of a row of P from its mean over the inputs.
        score_norm: (layers,) largest ‖W_l^Q W_l^Kᵀ‖ over the heads.
    """

    total_variation: Float[Tensor, " layers"]
    score_norm: Float[Tensor, " layers"]


def content_off(model: Module, inputs: Tensor, batch: int = 500) -> Module:
    """A copy of the model in which the content scores of every attention are replaced by their mean over the inputs.

    A torch `nn.MultiheadAttention` has no other scores.

    Example:
        >>> (content_off(model, images)(images).argmax(1) == labels).double().mean()
    """
    means = _means(model, inputs, batch, lambda attention, x, index: _content_scores(attention, x))
    changed = copy.deepcopy(model)
    for attention, scores in zip(_attentions(changed), means, strict=True):
        scores = scores.to(next(attention.parameters()).dtype)
        if isinstance(attention, SelfAttention):
            attention.fixed_scores = scores
        else:
            attention.register_forward_hook(partial(_mixed_by, scores.softmax(-1)))
    return changed


def content_use(model: nn.Module, inputs: Tensor, batch: int = 500) -> ContentUse:
    """How the attention of a model varies over the inputs."""
    usual = _means(model, inputs, batch, lambda attention, x, index: _probabilities(attention, x))
    apart = _means(
        model,
        inputs,
        batch,
        lambda attention, x, index: (_probabilities(attention, x) - usual[index]).abs().sum(-1) / 2,
    )
    norms = []
    for attention in _attentions(model):
        layer = attention.layer() if isinstance(attention, SelfAttention) else _layer(attention).double()
        norms.append(torch.linalg.matrix_norm(layer.w_q @ layer.w_k.mT, 2).max())
    return ContentUse(torch.stack([distances.mean() for distances in apart]), torch.stack(norms))


@torch.no_grad()
def _means(
    model: nn.Module, inputs: Tensor, batch: int, measure: Callable[[_Attention, Tensor, int], Tensor]
) -> list[Tensor]:
    """The mean over the inputs of something at every attention layer."""
    attentions = _attentions(model)
    sums: list[Any] = [0.0] * len(attentions)

    def add(index: int, module: nn.Module, args: tuple[Tensor]) -> None:
        sums[index] = sums[index] + measure(attentions[index], args[0], index).double().sum(0)

    with ExitStack() as stack:
        for index, attention in enumerate(attentions):
            stack.callback(attention.register_forward_pre_hook(partial(add, index)).remove)
        for start in range(0, len(inputs), batch):
            model(inputs[start : start + batch])
    return [total / len(inputs) for total in sums]


def _attentions(model: nn.Module) -> list[_Attention]:
    attentions = [module for module in model.modules() if isinstance(module, _Attention)]
    if not attentions:
        raise InputError(
            f"{type(model).__name__} has no SelfAttention of holdfast.layers and no nn.MultiheadAttention; nothing can "
            "be switched off"
        )
    return attentions


def _content_scores(attention: _Attention, x: Tensor) -> Float[Tensor, "b h n n"]:
    if isinstance(attention, SelfAttention):
        return attention.content_scores(x)
    layer = _layer(attention)
    parts = layer.run(x)
    return parts.q @ parts.k.mT * layer.scale


def _probabilities(attention: _Attention, x: Tensor) -> Float[Tensor, "b h n n"]:
    return attention.probabilities(x) if isinstance(attention, SelfAttention) else _layer(attention).attention(x)


def _mixed_by(p: Tensor, module: nn.MultiheadAttention, args: tuple[Tensor, ...], out: Any) -> tuple[Tensor, None]:
    """What a torch module returns if these are its probabilities."""
    layer, x = _layer(module), args[0]
    parts = layer.run(x)
    return layer.output(x, replace(parts, p=p, y=p @ parts.v)), None


def _layer(module: nn.MultiheadAttention) -> AttentionLayer:
    if not module.batch_first:
        raise InputError("this nn.MultiheadAttention has batch_first=False; expected inputs (b, n, d)")
    return AttentionLayer.from_module(module)
