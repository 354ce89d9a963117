"""How fast a margin can fall near an input: estimates that a loss can be differentiated through.

None of them is a bound: power iteration stops early, and a gradient is taken at a few points of a ball. They steer
training and show its progress; what holds is proved afterwards by `holdfast.certify`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.errors import InputError
from holdfast.layers import SelfAttention
from holdfast.layers.steepness import Steepness, length
from holdfast.registry import Registry
from holdfast.train.ball_gains import gain_over_ball
from holdfast.train.forward import ForwardPass, features
from holdfast.train.gains import attention_steepness, each_length
from holdfast.train.tables import Chosen

SLOPES: Registry[type[MarginSlope]] = Registry("slope", group="holdfast.slopes")


class MarginSlope(Chosen):
    """An estimate of the Lipschitz constants of the margins f_y - f_j around each input.

    A kind writes `__call__`, and says whether it needs the pullback of the pass.
    """

    kinds: ClassVar[Registry[Any]] = SLOPES
    differentiates: ClassVar[bool]

    @abstractmethod
    def __call__(self, run: ForwardPass) -> Float[Tensor, "b classes"]:
        """The slope of f_y - f_j for every class j, 0 for the label."""


@final
@SLOPES.add("gains")
@dataclass(frozen=True)
class GainsSlope(MarginSlope):
    """The product of the gains of all layers, those of attention at the input, times ‖w_y - w_j‖ of the head.

    With a radius, those of attention over the ball that what enters it can move in, if the input moves by the radius:
    the price of what content can do there, and not only of its slope at the input (see `holdfast.train.ball_gains`).

    Attributes:
        radius: of the ball; 0 looks at the input alone.
        sample: how many inputs of a batch attention is examined; the mean of their gains then serves all of them. With
            0 every input has its own.
    """

    radius: float = 0.0
    sample: int = 0

    kind = "gains"
    differentiates = False

    def __call__(self, run: ForwardPass) -> Float[Tensor, "b classes"]:
        if self.radius:
            return pair_norms(run) * _over_ball(run, self.radius, self.sample)
        return pair_norms(run) * _network(run, self.sample, curved=False).gain


@final
@SLOPES.add("jacobian")
@dataclass(frozen=True)
class JacobianSlope(MarginSlope):
    """The norm of the Jacobian J of the features at the input, from below, times ‖w_y - w_j‖ of the head.

    ‖Jᵀu‖ with u along J v, and v from the gradient of the closest margin by `steps` further steps of power iteration.

    Attributes:
        steps: each costs as much as two passes.
    """

    steps: int = 0

    kind = "jacobian"
    differentiates = True

    def __call__(self, run: ForwardPass) -> Float[Tensor, "b classes"]:
        with torch.no_grad():
            u = self._pushed(run, run.pull(_between(run)))
            for _ in range(self.steps):
                u = self._pushed(run, run.pull(u))
        return pair_norms(run) * each_length(run.pull(u)).flatten(1)

    def _pushed(self, run: ForwardPass, v: Tensor) -> Tensor:
        """J v / ‖J v‖."""
        # J is the adjoint of the pullback, which is linear.
        transposed: Any = torch.func.vjp(run.pull, _between(run).detach())
        return functional.normalize(transposed[1](v)[0], dim=-1)


@final
@SLOPES.add("margin-gradient")
@dataclass(frozen=True)
class GradientSlope(MarginSlope):
    """‖∇m(x)‖ + curvature/2 · ‖∇m(x') - ∇m(x)‖, m the closest margin, x' the point where it falls fastest.

    With x' = x - radius · ∇m/‖∇m‖ the second term stands for radius · ‖∇²m‖/2, so that radius times the slope is how
    far m can fall to second order. The first-order part charges attention its true price: no norm of a layer enters.

    Attributes:
        radius: of the step to x'.
        curvature: weight of the second term; 0 saves a pass.
    """

    radius: float = 36 / 255
    curvature: float = 1.0

    kind = "margin-gradient"
    differentiates = True

    def __call__(self, run: ForwardPass) -> Float[Tensor, "b classes"]:
        between = _between(run)
        here = run.pull(between)
        slope = each_length(here)
        if self.curvature:
            fallen = run.x - self.radius * (here / slope.clamp(min=1e-30)).detach()
            with sdpa_kernel(SDPBackend.MATH):
                linearised: Any = torch.func.vjp(lambda at: features(run.model, at)[0], fallen)
            slope = slope + self.curvature / 2 * each_length(linearised[1](between)[0] - here)
        others = torch.ones_like(run.logits).scatter(1, run.labels.unsqueeze(1), 0.0)
        return slope.flatten(1) * others


@final
@SLOPES.add("second-order")
@dataclass(frozen=True)
class SecondOrderSlope(MarginSlope):
    """‖∇m(x)‖ + curvature · radius/2 · B ‖w_y - w_j‖, m the closest margin and B the curvature of all layers together.

    B = Σ_k (Π_{i>k} L_i) β_k (Π_{i<k} L_i)² with the gains L and curvatures β of the layers at the input: what the
    certificate from the margin's gradient charges, where `MarginGradient` sees a single direction. Layers need two
    derivatives.

    Attributes:
        radius: at which the two parts are weighed.
        curvature: weight of the second.
    """

    radius: float = 36 / 255
    curvature: float = 1.0

    kind = "second-order"
    differentiates = True

    def __call__(self, run: ForwardPass) -> Float[Tensor, "b classes"]:
        others = (layer for layer in (*run.model.body, *run.model.pool) if not isinstance(layer, SelfAttention))
        kinked = next((layer for layer in others if layer.steepness().curvature == math.inf), None)
        if kinked is not None:
            raise InputError(f"{type(kinked).__name__} has a kink, or no curvature that is known; use another slope")
        bent = self.curvature * self.radius / 2 * _network(run).curvature
        return GradientSlope(self.radius, curvature=0.0)(run) + pair_norms(run) * bent


def pair_norms(run: ForwardPass) -> Float[Tensor, "b classes"]:
    """‖w_y - w_j‖ of the head."""
    w = run.model.head.weight
    with torch.autocast(w.device.type, enabled=False):
        return length(w.unsqueeze(1) - w)[run.labels]


def _between(run: ForwardPass) -> Float[Tensor, "b 1 d"]:
    """w_y - w_j for the closest rival j: the gradient of that margin with respect to the features."""
    w = run.model.head.weight
    return (w[run.labels] - w[run.rivals]).unsqueeze(1)


def _network(run: ForwardPass, sample: int = 0, *, curved: bool = True) -> Steepness:
    """Of the features: the product of the gains G, and B, each (b, 1) or a number."""
    entering = [x[: sample or None] for x in run.entering]
    steepness = attention_steepness(run.model.attentions, entering, curved=curved)
    gains, curvatures = (_each_layer(t, len(entering), mean=sample > 0) for t in (steepness.gain, steepness.curvature))
    own = zip(gains, curvatures, strict=True)
    G: Tensor | float = 1.0
    B: Tensor | float = 0.0
    for layer in (*run.model.body, *run.model.pool):
        known = layer.steepness() if not isinstance(layer, SelfAttention) else Steepness(*next(own))
        B = known.gain * B + known.curvature * G**2 if curved else math.inf
        G = known.gain * G
    return Steepness(G, B)


def _over_ball(run: ForwardPass, radius: float, sample: int) -> Tensor | float:
    """How far the features move, relative to the radius, (b, 1) or a number: every layer over the ball that it sees."""
    entering = iter(run.entering)
    G: Tensor | float = 1.0
    for layer in (*run.model.body, *run.model.pool):
        if isinstance(layer, SelfAttention):
            x = next(entering)[: sample or None]
            moved = torch.as_tensor(radius * G, device=x.device).expand(len(x), 1).squeeze(-1)
            gain = gain_over_ball(layer, x, moved)
            G = G * (gain.mean() if sample else gain.unsqueeze(-1))
        else:
            G = G * layer.steepness().gain
    return G


def _each_layer(values: Tensor | float, layers: int, *, mean: bool) -> list[Tensor | float]:
    """(b, 1) of every layer from (layers, b); a number where they share the mean."""
    if isinstance(values, float):
        return [values] * layers
    return list((values.mean(1, keepdim=True) if mean else values).unsqueeze(-1).unbind())
