"""A pre-LayerNorm ViT on digits, trained in the ordinary way, or so that a cubic polynomial describes it on a ball.

The second recipe adds a penalty to the cross entropy. Every image comes twice, the second time moved by a random δ of
fixed length, and what a certificate has to expand should move little, each part by its own measure:

    LayerNorm     Σ_tokens ‖Δx̃‖² / (m s²)       relative to the token: LayerNorm is nearly affine
    softmax       Σ_rows mean_j Δs_ij²           logits: attention is nearly linear in its values
    activation    Σ_units Δt²                    pre-activations

all divided by ‖δ‖². None of the three limits how steep the network is: its head may be as large as it likes. The
margin's gradient should change little as well: ‖Δ∇m‖ / ‖δ‖ with m = f_y - log Σ_{j≠y} exp(τ f_j) / τ, measured on a
part of the batch. Position embeddings begin large and the patch embedding small, so that a token is a constant with a
little signal on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, pad

from holdfast.attention.layer import split_heads
from holdfast.data.digits import SIDE, Digits
from holdfast.models.digits import DigitsViT
from holdfast.models.vit import Block, VisionTransformer

Recipe = Literal["plain", "lipschitz"]
Initialisation = Literal["huggingface", "torch"]

WIDTH, HEADS, UNITS = 64, 4, 128
EPOCHS: dict[Recipe, int] = {"plain": 60, "lipschitz": 100}
_BATCH = 64
_STEP_LENGTH = 0.5  # of δ
TEMPERATURE = 4.0  # of the logits in the second recipe's cross entropy
_NORM, _LAST_NORM, _LOGITS, _UNITS = 3.0, 30.0, 30.0, 0.03  # weights of the penalty
_BEND = 0.3  # weight of the gradient's change
_BENT = 16  # images of a batch on which it is measured
RAMP = 0.3  # of the training, in which the penalty grows to its full weight


@dataclass(frozen=True)
class DigitsTraining:
    """How a model is trained. `init` concerns the plain recipe; the other has its own."""

    layers: int
    recipe: Recipe
    init: Initialisation
    seed: int
    epochs: int

    @property
    def run(self) -> str:
        """The name of what all depths have in common."""
        kind = f"plain-{self.init}" if self.recipe == "plain" else self.recipe
        return f"{kind}-seed{self.seed}-epochs{self.epochs}"

    @property
    def name(self) -> str:
        return f"{self.run}-layers{self.layers}"


def train(setting: DigitsTraining, data: Digits) -> DigitsViT:
    """A fixed number of epochs; the last weights are kept, and nothing is chosen by test accuracy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        model = DigitsViT(setting.layers, WIDTH, HEADS, UNITS)
        if setting.recipe == "plain":
            if setting.init == "huggingface":
                _initialise(model, matrices=0.02, queries_and_keys=0.02, embedding=0.02, head=0.02)
                nn.init.trunc_normal_(model.class_token, std=0.02)
            _train_plain(model, data, setting.epochs)
        else:
            _initialise(model, matrices=0.12, queries_and_keys=0.003, embedding=0.3, head=0.05)
            nn.init.normal_(model.positions, std=2.0)
            _train_lipschitz(model, data, setting.epochs)
    return model.eval().requires_grad_(False)


def _initialise(model: DigitsViT, matrices: float, queries_and_keys: float, embedding: float, head: float) -> None:
    """Truncated normal weights with these standard deviations, no biases."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            std = {model.embedding: embedding, model.head: head}.get(module, matrices)
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.MultiheadAttention):
            nn.init.trunc_normal_(module.in_proj_weight, std=matrices, a=-2 * matrices, b=2 * matrices)
            nn.init.trunc_normal_(module.in_proj_weight[: 2 * WIDTH], std=queries_and_keys)
            nn.init.zeros_(module.in_proj_bias)


def _train_plain(model: DigitsViT, data: Digits, epochs: int) -> None:
    """AdamW, one cycle, half of the images shifted by up to a pixel."""
    steps = epochs * math.ceil(len(data.labels) / _BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(data.labels)), _BATCH):
            loss = cross_entropy(model(_shifted(data.images[batch])), data.labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()


def _shifted(images: Tensor) -> Tensor:
    windows = pad(images, (1, 1, 1, 1)).unfold(1, SIDE, 1).unfold(2, SIDE, 1)  # (b, 3, 3, side, side)
    down, right = torch.randint(3, (2, len(images)))
    return torch.where(torch.rand(len(images), 1, 1) < 0.5, windows[torch.arange(len(images)), down, right], images)


def _train_lipschitz(model: DigitsViT, data: Digits, epochs: int) -> None:
    """Cross entropy at a temperature, and the penalty; no weight decay, no augmentation."""
    steps = epochs * math.ceil(len(data.labels) / _BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, cycle_momentum=False)
    done = 0
    with watched(model) as movements:
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(data.labels)), _BATCH):
                x, labels = data.images[batch], data.labels[batch]
                delta = torch.randn_like(x)
                delta *= _STEP_LENGTH / torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
                movements.clear()
                logits = model(torch.cat([x, x + delta]))[: len(x)]
                penalty = torch.stack(movements).sum() / (_STEP_LENGTH**2 * len(x))
                penalty = penalty + _BEND * _bend(model, x[:_BENT], delta[:_BENT], labels[:_BENT])
                weight = min(1.0, done / (RAMP * steps))
                loss = cross_entropy(TEMPERATURE * logits, labels) + weight * penalty
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                done += 1


def _bend(model: DigitsViT, x: Tensor, delta: Tensor, labels: Tensor) -> Tensor:
    """How much the margin's gradient changes along δ, per length."""
    at = torch.cat([x, x + delta]).requires_grad_()
    answers = labels.repeat(2)[:, None]
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        logits = model(at)
        rivals = (TEMPERATURE * logits).scatter(1, answers, -torch.inf).logsumexp(1) / TEMPERATURE
        margin = logits.gather(1, answers).squeeze(1) - rivals
        (gradient,) = torch.autograd.grad(margin.sum(), at, create_graph=True)
    before, after = gradient.chunk(2)
    change: Tensor = torch.linalg.vector_norm(after - before, dim=(-2, -1)).mean() / _STEP_LENGTH
    return change


@contextmanager
def watched(model: DigitsViT | VisionTransformer) -> Iterator[list[Tensor]]:
    """A list that every pass fills: how far each part moves from the first half of the batch to the second."""
    movements: list[Tensor] = []

    def norm(weight: float) -> Any:
        def hook(module: nn.LayerNorm, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0] - inputs[0].mean(-1, keepdim=True)
            before, after = x.chunk(2)
            variance = before.square().mean(-1, keepdim=True) + module.eps
            movements.append(weight * ((after - before).square() / (x.shape[-1] * variance)).sum())

        return hook

    def logits(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> None:
        projected = linear(inputs[0], module.in_proj_weight, module.in_proj_bias)
        q, k, _ = (split_heads(part, module.num_heads) for part in projected.chunk(3, -1))
        s = q @ k.mT / module.head_dim**0.5
        before, after = (s - s.mean(-1, keepdim=True)).chunk(2)  # a common shift of a row changes nothing
        movements.append(_LOGITS * (after - before).square().mean(-1).sum())

    def units(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        before, after = inputs[0].chunk(2)
        movements.append(_UNITS * (after - before).square().sum())

    handles = [model.norm.register_forward_pre_hook(norm(_LAST_NORM))]
    for block in model.blocks:
        assert isinstance(block, Block)
        handles += [
            block.attention_norm.register_forward_pre_hook(norm(_NORM)),
            block.mlp_norm.register_forward_pre_hook(norm(_NORM)),
            block.attention.register_forward_pre_hook(logits),
            block.mlp[1].register_forward_pre_hook(units),
        ]
    try:
        yield movements
    finally:
        for handle in handles:
            handle.remove()
