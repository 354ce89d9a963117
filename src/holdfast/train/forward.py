"""One pass of a certifiable model, with all that a loss may need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.errors import InputError
from holdfast.layers import SelfAttention
from holdfast.models.transformer import Transformer
from holdfast.train.jasmin import widened


@final
@dataclass(frozen=True)
class ForwardPass:
    """A model at a batch.

    Attributes:
        model: that ran.
        x: (b, …) what an adversary moves: images, or the embeddings of words.
        labels: (b,).
        logits: (b, classes) in float32.
        entering: what enters each attention, in order.
        progress: the share of the training that is done, a scalar.
        pullback: cotangents of the features (b, 1, d) to cotangents of x; None unless it was asked for.
    """

    model: Transformer
    x: Tensor
    labels: Int64[Tensor, " b"]
    logits: Float[Tensor, "b classes"]
    entering: tuple[Tensor, ...]
    progress: Float[Tensor, ""]
    pullback: Callable[[Tensor], tuple[Tensor]] | None = None

    def pull(self, cotangent: Float[Tensor, "b 1 d"]) -> Tensor:
        """The gradient with respect to x of ⟨cotangent, features⟩; it can be differentiated again."""
        if self.pullback is None:
            raise InputError("this pass was run without its pullback; expected run(…, differentiate=True)")
        return self.pullback(cotangent)[0]

    @property
    def margins(self) -> Float[Tensor, "b classes"]:
        """f_y - f_j for every class j."""
        return self.logits.gather(1, self.labels.unsqueeze(1)) - self.logits

    @property
    def rivals(self) -> Int64[Tensor, " b"]:
        """The class with the largest logit other than the label."""
        return self.logits.detach().scatter(1, self.labels.unsqueeze(1), -torch.inf).argmax(1)


def run(
    model: Transformer,
    inputs: Tensor,
    labels: Int64[Tensor, " b"],
    progress: Float[Tensor, ""] | None = None,
    *,
    differentiate: bool = False,
) -> ForwardPass:
    """Runs the model.

    Args:
        model: a certifiable model.
        inputs: images or word ids, as the model takes them.
        labels: of the inputs.
        progress: the share of the training that is done; 1 where there is none.
        differentiate: also give the pullback, by kernels that can be differentiated twice.
    """
    x = inputs if model.words is None else model.words(inputs)
    progress = torch.ones((), device=x.device) if progress is None else progress
    if not differentiate:
        z, entering = features(model, x)
        return ForwardPass(model, x, labels, logits_of(model, z), entering, progress)
    with sdpa_kernel(SDPBackend.MATH):
        outcome: Any = torch.func.vjp(lambda at: features(model, at), x, has_aux=True)
        z, pullback, entering = outcome
    return ForwardPass(model, x, labels, logits_of(model, z), entering, progress, pullback)


def features(model: Transformer, x: Tensor) -> tuple[Float[Tensor, "b 1 d"], tuple[Tensor, ...]]:
    """What enters the head, and what enters each attention before it.

    Args:
        model: that runs.
        x: what enters its body.
    """
    entering: list[Tensor] = []
    for layer in model.body:
        if isinstance(layer, SelfAttention):
            entering.append(x)
        x = layer(x)
    return model.pool(x), tuple(entering)


def features_with(model: Transformer, x: Tensor, content: Sequence[Tensor]) -> Float[Tensor, "b 1 d"]:
    """What would enter the head if every attention had the given scores in the place of those of its content.

    Args:
        model: that runs.
        x: what enters its first attention.
        content: scores for each attention.
    """
    scores = iter(content)
    for layer in itertools.dropwhile(lambda layer: not isinstance(layer, SelfAttention), model.body):
        x = layer(x, next(scores)) if isinstance(layer, SelfAttention) else layer(x)
    pooled: Tensor = model.pool(x)
    return pooled


def logits_of(model: Transformer, z: Float[Tensor, "b 1 d"]) -> Float[Tensor, "b classes"]:
    """The logits of features, in float32 at least."""
    return widened(model.head(z).squeeze(1))
