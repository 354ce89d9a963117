"""Puts a network together from a model in float64, its design, and what one run on an example shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from holdfast.attention import AttentionLayer
from holdfast.network.activations import SmoothActivation, activations
from holdfast.network.affine import Affine
from holdfast.network.attention import Attention
from holdfast.network.base import Piece
from holdfast.network.conversion.design import Classifier, Dense, Encoder, First, Mean, Norm, Step, describe
from holdfast.network.conversion.entrance import Entrance, read_entrance
from holdfast.network.conversion.equality import ModelInputs
from holdfast.network.conversion.example import Seen, watch
from holdfast.network.conversion.parts import Linear, Parts, join, refuse
from holdfast.network.mlp import KinkedMlp, Mlp
from holdfast.network.network import Head, Network, Residual
from holdfast.network.pooling import ClassToken, MeanPool

Stage = Piece | Residual


@dataclass(frozen=True)
class Assembled:
    """A network and the way into it."""

    network: Network
    entrance: Entrance


def assemble(model: nn.Module, inputs: ModelInputs, design: Classifier) -> Assembled:
    """The network that a model is, with every part of the model in it.

    Args:
        model: in float64, evaluating.
        inputs: an example, in float64.
        design: of the model.
    """
    parts = Parts(model)
    prefix, encoder = "", design.encoder
    if isinstance(encoder, str):
        prefix, found = encoder, describe(parts.find(encoder))
        assert isinstance(found, Encoder)
        encoder = found
    seen = watch(model, inputs, [join(prefix, name) for name in encoder.embedding.added])
    entrance = read_entrance(parts, prefix, encoder.embedding, seen, inputs)
    tokens = entrance.encode(inputs)[:1]
    for piece in entrance.pieces:
        tokens = piece.value(tokens)
    n = tokens.shape[-2]

    blocks, steps = join(prefix, encoder.blocks), design.steps
    reader = _Reader(parts, seen, encoder)
    stages = [stage for i in range(len(parts.find(blocks))) for stage in reader.block(join(blocks, str(i)))]
    if isinstance(steps[0], First):
        # All that follows the last attention acts on each token by itself, and one token alone goes on.
        last = max(i for i, stage in enumerate(stages) if attends(stage))
        stages.insert(last + 1, ClassToken())
        steps = steps[1:]
    stages += parts.norm(None if encoder.norm is None else join(prefix, encoder.norm))
    stages += [piece for step in steps for piece in reader.step(step, n)]
    head = parts.linear(design.head)
    parts.check_all_read(design.unused)
    return Assembled(Network((*entrance.pieces, *stages), Head(head.w.mT, head.b), type(model).__name__), entrance)


def attends(stage: Stage) -> bool:
    """Whether attention is in the stage."""
    return any(isinstance(piece, Attention) for piece in (stage.pieces if isinstance(stage, Residual) else (stage,)))


@final
class _Reader:
    """Makes stages of a model's parts."""

    def __init__(self, parts: Parts, seen: Seen, encoder: Encoder) -> None:
        self._parts, self._seen, self._block = parts, seen, encoder.block

    def block(self, path: str) -> list[Stage]:
        """The block at the path: attention and MLP, each with its norm and its residual."""
        parts, block = self._parts, self._block
        norm_first = block.norm_first
        if isinstance(norm_first, str):
            norm_first = bool(parts.find(join(path, norm_first)))
        residual = 0.0 if norm_first else 1.0
        w1, activation, w2 = (join(path, name) for name in block.mlp)
        branches = (
            Attention(self._layer(join(path, block.attention), residual)),
            _perceptron(parts.linear(w1), parts.activation(activation), parts.linear(w2), residual),
        )
        stages: list[Stage] = []
        for branch, norm, scale in zip(branches, block.norms, block.scales or ("", ""), strict=True):
            norms, scales = parts.norm(join(path, norm)), self._scale(join(path, scale)) if scale else ()
            stages += [Residual((*norms, branch, *scales))] if norm_first else [branch, *norms]
        return stages

    def step(self, step: Step, n: int) -> tuple[Piece, ...]:
        """One step after the encoder, of n tokens."""
        match step:
            case First():
                return (ClassToken(),)
            case Mean(skip):
                return (MeanPool(n, skip),)
            case Norm(path):
                return self._parts.norm(path)
            case Dense(path, activation):
                linear = self._parts.linear(path)
                plain = Linear(torch.eye(len(linear.b), dtype=torch.float64), torch.zeros_like(linear.b))
                return (_perceptron(linear, self._parts.activation(activation), plain, 0.0),)

    def _layer(self, name: str, residual: float) -> AttentionLayer:
        """The self-attention of the module of that name, added to `residual` times its input."""
        layer = self._seen.layers.get(name)
        if layer is None:
            raise refuse(name, self._parts.find(name), "did not attend once in a pass; expected one self-attention")
        tensors = {key: getattr(layer, key) for key in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")}
        terms = {key: getattr(layer, key) for key in ("scale", "mask", "causal", "rotary", "score_bias")}
        return AttentionLayer(**tensors, **terms, residual=residual)

    def _scale(self, path: str) -> tuple[Piece, ...]:
        """LayerScale: one factor for each feature."""
        part = self._parts.take(path)
        if part is None:
            return ()
        if type(part).__name__ != "LayerScale":
            raise refuse(path, part, "is not known on a residual branch; expected LayerScale, or nothing")
        return (Affine(part.gamma.detach().diag()),)


def _perceptron(first: Linear, activation: str, second: Linear, residual: float) -> Mlp | KinkedMlp:
    phi = activations[activation]
    kind = Mlp if isinstance(phi, SmoothActivation) else KinkedMlp
    return kind(first.w, first.b, phi, second.w, second.b, residual)
