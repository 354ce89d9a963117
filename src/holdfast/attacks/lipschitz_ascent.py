"""Ascent of the local Lipschitz constant over sequences of bounded tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from holdfast.attacks.configurations import checked, dominant_tokens, steepest
from holdfast.attention import AttentionJacobian, AttentionLayer
from holdfast.results import LipschitzWitness

_FIRST_STEP, _LONGEST_STEP = 0.1, 2.0  # of all tokens together, in units of R √n
_GROWTH = 1.5
_POWER_STEPS = 2  # towards the top singular vector at every point; it is followed from one point to the next
_FIRST_POWER_STEPS = 10
_TRIED = 4  # starts that are examined for each that climbs


@final
class LipschitzAscent:
    """Maximises ‖DF(X)G‖ / ‖G‖ over X in B_R^n and G together, many starts at once.

    G follows the top singular vector by power steps. With u = DF(X)G / ‖DF(X)G‖ the gradient of the norm in X is that
    of ⟨u, DF(X)G⟩. A step along it is kept if the norm grew; every token is then drawn back to its ball. A step that
    lost is undone and halved.

    Starts: the configurations with a dominant token of every head; tokens around one point with another one apart; and
    random tokens. The best quarter of them climbs.

    Args:
        restarts: starts that climb; that many are held in memory at once.
        steps: gradients for each of them.
    """

    def __init__(self, restarts: int = 16, steps: int = 100) -> None:
        self.restarts, self.steps = restarts, steps

    def __call__(self, layer: AttentionLayer, radius: float, tokens: int, *, seed: int = 0) -> LipschitzWitness:
        """Attacks, and returns the steepest point with the slope that was re-evaluated there, rounded down.

        Args:
            layer: the layer; searched in float64.
            radius: R; no token is longer.
            tokens: n.
            seed: for everything random.
        """
        began = time.perf_counter()
        layer, radius = checked(layer, radius, tokens, ascent=True)
        with torch.no_grad():
            starts = self._starts(layer, radius, tokens, seed)
            looked_at = [_look(layer, x, seed) for x in torch.split(starts, self.restarts)]
            c = _best_of(looked_at, min(self.restarts, len(starts)))
            for _ in range(self.steps):
                c = _step(layer, radius, c)
            witness = steepest(layer, torch.cat([c.x, starts[:1]]), radius, "ascent")
        return replace(witness, seconds=time.perf_counter() - began)

    def _starts(self, layer: AttentionLayer, radius: float, n: int, seed: int) -> Float[Tensor, "s n d"]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(layer.w_q)

        dominant = dominant_tokens(layer.replace(rotary=None, score_bias=None), radius).tokens(n)
        count = max(2 * self.restarts, _TRIED * self.restarts - len(dominant))
        scattered = normal(count, n, layer.d)
        scattered[::2] = 0.1 * scattered[::2] + normal(*scattered[::2, :1].shape)
        scattered[::2, 0] = normal(len(scattered[::2]), layer.d)
        lengths = torch.rand(count, 2, generator=generator, dtype=torch.float64).to(scattered).sqrt()
        scattered = radius * scattered / torch.linalg.vector_norm(scattered, dim=-1, keepdim=True)
        scattered[:, 1:] *= lengths[:, :1, None]
        scattered[:, :1] *= lengths[:, 1:, None]
        return torch.cat([dominant, scattered])


@dataclass(frozen=True)
class _Sequences:
    """Points x and unit directions g (s, n, d), the image DF(x)g, its length (s), and the length of the next step."""

    x: Tensor
    g: Tensor
    image: Tensor
    slope: Tensor
    step: Tensor


def _look(layer: AttentionLayer, x: Tensor, seed: int) -> _Sequences:
    g = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(x).expand_as(x)
    g, image = _follow(layer, x, g, _FIRST_POWER_STEPS)
    slope = torch.linalg.vector_norm(image, dim=(-2, -1))
    return _Sequences(x, g, image, slope, torch.full_like(slope, _FIRST_STEP))


def _step(layer: AttentionLayer, radius: float, c: _Sequences) -> _Sequences:
    reach = radius * c.x.shape[-2] ** 0.5
    gradient = _unit(_gradient(layer, c.x, c.g, _unit(c.image)))
    trial = _into_balls(c.x + reach * c.step[:, None, None] * gradient, radius)
    g, image = _follow(layer, trial, c.g, _POWER_STEPS)
    slope = torch.linalg.vector_norm(image, dim=(-2, -1))
    gained = slope > c.slope
    moved = gained[:, None, None]
    return _Sequences(
        torch.where(moved, trial, c.x),
        torch.where(moved, g, c.g),
        torch.where(moved, image, c.image),
        torch.where(gained, slope, c.slope),
        torch.where(gained, (_GROWTH * c.step).clamp(max=_LONGEST_STEP), c.step / 2),
    )


def _follow(layer: AttentionLayer, x: Tensor, g: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Power steps from g at x: the unit vector they lead to and its image DF(x)g."""
    jacobian = AttentionJacobian(layer, x)
    for _ in range(steps):
        g = _unit(jacobian.rmv(jacobian.mv(g)))
    return g, jacobian.mv(g)


def _gradient(layer: AttentionLayer, x: Tensor, g: Tensor, u: Tensor) -> Tensor:
    """The gradient of ⟨u, DF(x)g⟩ = ⟨DF(x)ᵀu, g⟩ in x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (pulled,) = torch.autograd.grad(layer.output(x, layer.run(x)), x, u, create_graph=True)
        (gradient,) = torch.autograd.grad((pulled * g).sum(), x)
    return gradient


def _best_of(groups: list[_Sequences], count: int) -> _Sequences:
    index = torch.cat([group.slope for group in groups]).topk(count).indices
    return _Sequences(*(torch.cat([getattr(group, f.name) for group in groups])[index] for f in fields(_Sequences)))


def _unit(v: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)
    unit: Tensor = v / torch.where(length > 0, length, torch.inf)
    return unit


def _into_balls(x: Tensor, radius: float) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    pulled: Tensor = x * (radius / length).clamp(max=1).nan_to_num(nan=1.0)
    return pulled
