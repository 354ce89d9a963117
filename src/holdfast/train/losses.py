"""What training minimises: a sum of terms, each a small class."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.attention.layer import split_heads
from holdfast.errors import InputError, check_counts
from holdfast.layers import SelfAttention
from holdfast.registry import Registry
from holdfast.train.forward import ForwardPass, features, features_with, logits_of
from holdfast.train.gains import each_length
from holdfast.train.jasmin import check_options, jasmin, widened
from holdfast.train.slopes import GainsSlope, MarginSlope
from holdfast.train.tables import Chosen

LOSSES: Registry[type[Loss]] = Registry("loss", group="holdfast.losses")


class Loss(Chosen):
    """One term; a kind writes `__call__`, the mean over the batch, and has a weight."""

    kinds: ClassVar[Registry[Any]] = LOSSES
    weight: float

    @property
    def differentiates(self) -> bool:
        """Whether it needs the pullback of the pass."""
        return False

    @abstractmethod
    def __call__(self, run: ForwardPass) -> Float[Tensor, ""]:
        """The term, without its weight."""


@final
@LOSSES.add("cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy of (f - margin · e_y) / temperature (as in Prach and Lampert 2022), or of this, annealed.

    With p the probability that softmax gives the label, -log p is multiplied by (1 - p)^gamma (Lai et al. 2025, there
    with temperature 0.75, margin 2 and gamma 5): an input whose margin is large no longer counts, and the network's
    little slope is spent on those whose margin is not. A margin keeps the others from being given up too early.

    Attributes:
        margin: what the label has to lead by.
        temperature: logits of 1-Lipschitz networks are small; a low temperature makes them count.
        gamma: how soon an input counts less; 0 leaves the cross-entropy as it is.
    """

    margin: float = 0.0
    temperature: float = 1.0
    gamma: float = 0.0
    weight: float = 1.0

    kind = "cross-entropy"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_gamma(self.gamma)

    def __call__(self, run: ForwardPass) -> Float[Tensor, ""]:
        return _annealed(run.logits, run.labels, self.margin, self.temperature, self.gamma)


@final
@LOSSES.add("emma")
@dataclass(frozen=True)
class Emma(Loss):
    """Cross-entropy with every rival j lifted by ε_j L_j, L_j the slope of f_y - f_j (Hu et al. 2023).

    ε_j is the radius at which the margin to j is used up, (f_y - f_j) / L_j, without gradient, but at least 0 and at
    most the present radius, which grows during training. So the loss pushes each margin to what its radius needs.

    Attributes:
        slope: where L comes from.
        radius: in the end.
        first_radius: at the beginning.
        growth: the share of the training after which the last radius is reached.
        margin: see `CrossEntropy`.
        temperature: see there.
        gamma: see there.
    """

    slope: MarginSlope = field(default_factory=GainsSlope)
    radius: float = 54 / 255
    first_radius: float = 0.0
    growth: float = 0.5
    margin: float = 0.0
    temperature: float = 1.0
    gamma: float = 0.0
    weight: float = 1.0

    kind = "emma"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        _check_gamma(self.gamma)

    @property
    def differentiates(self) -> bool:
        return self.slope.differentiates

    def __call__(self, run: ForwardPass) -> Float[Tensor, ""]:
        L = self.slope(run)
        grown = (run.progress / max(self.growth, 1e-9)).clamp(max=1.0)
        eps = self.first_radius + (self.radius - self.first_radius) * grown
        used_up = (run.margins / L.clamp(min=1e-12)).detach().clamp(min=0.0)
        lifted = run.logits + torch.minimum(used_up, eps) * L
        return _annealed(lifted, run.labels, self.margin, self.temperature, self.gamma)


@final
@LOSSES.add("pgd")
@dataclass(frozen=True)
class Pgd(Loss):
    """Cross-entropy at the end of a projected gradient ascent from x in the l2 ball (Madry et al. 2018).

    Attributes:
        radius: of the ball.
        steps: each of length 2.5 · radius / steps.
        temperature: see `CrossEntropy`.
    """

    radius: float = 36 / 255
    steps: int = 7
    temperature: float = 1.0
    weight: float = 1.0

    kind = "pgd"

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)
        check_counts(steps=self.steps)

    def __call__(self, run: ForwardPass) -> Float[Tensor, ""]:
        def loss(x: Tensor) -> Tensor:
            logits = logits_of(run.model, features(run.model, x)[0])
            return functional.cross_entropy(logits / self.temperature, run.labels)

        x = run.x.detach()
        moved = torch.zeros_like(x)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            for _ in range(self.steps):
                uphill = _of_length(torch.func.grad(loss)(x + moved), 1.0)
                moved = _of_length(moved + 2.5 * self.radius / self.steps * uphill, self.radius, at_most=True)
        return loss(run.x + moved)


@final
@LOSSES.add("jasmin")
@dataclass(frozen=True)
class JaSMinTerm(Loss):
    """The JaSMin penalty of all attention layers: see `holdfast.jasmin`.

    Attributes:
        k: 0, or at least 2.
    """

    k: int = 0
    weight: float = 0.01

    kind = "jasmin"

    def __post_init__(self) -> None:
        check_options(self.k, "mean")

    def __call__(self, run: ForwardPass) -> Float[Tensor, ""]:
        layers = zip(run.model.attentions, run.entering, strict=True)
        rows = [widened(attention.probabilities(x)).clamp(min=1e-30).log() for attention, x in layers]
        return torch.stack([jasmin(row, self.k, log_probabilities=True) for row in rows]).mean()


@final
@LOSSES.add("content-floor")
@dataclass(frozen=True)
class ContentFloor(Loss):
    """max(0, log(floor / U)), U the use that attention makes of content, a mean over layers and inputs.

    Certified training is cheapest for attention that ignores its input; this term forbids that way out. Where W^Q and
    W^K are small, U is their product to first order: of U itself the gradient would vanish, of its logarithm it grows.
    See `holdfast.layers.attention.content`.

    Attributes:
        floor: of U; layers may share it as they like.
        of: "probabilities" takes the total variation between P and its mean over the batch; "output" the share of the
            heads' output that comes from their difference; "logits" the length of what all logits, minus their mean,
            change by when every layer has the mean of its content scores over the batch instead. Only the last cannot
            be kept up without an effect on the answer.
    """

    floor: float = 0.05
    of: Literal["probabilities", "output", "logits"] = "probabilities"
    weight: float = 0.1

    kind = "content-floor"

    def __post_init__(self) -> None:
        if not self.floor > 0:
            raise InputError(f"floor is {self.floor}; expected a positive number")

    def __call__(self, run: ForwardPass) -> Float[Tensor, ""]:
        layers = zip(run.model.attentions, run.entering, strict=True)
        if self.of == "logits":
            usual = [attention.content_scores(x).mean(0) for attention, x in layers]
            change = run.logits - logits_of(run.model, features_with(run.model, run.entering[0], usual))
            use = each_length(change - change.mean(1, keepdim=True)).mean()
        else:
            use = torch.stack([self._use(attention, x) for attention, x in layers]).mean()
        return (self.floor / use.clamp(min=1e-12)).log().clamp(min=0.0)

    def _use(self, attention: SelfAttention, x: Tensor) -> Float[Tensor, ""]:
        p = widened(attention.probabilities(x))
        apart = p - p.mean(0)
        if self.of == "probabilities":
            return apart.abs().sum(-1).mean() / 2
        v = widened(split_heads(attention.value(x), attention.heads))
        return (each_length(apart @ v) / each_length(p @ v).clamp(min=1e-30)).mean()


def _of_length(t: Tensor, length: float, *, at_most: bool = False) -> Tensor:
    norm = each_length(t).clamp(min=1e-30)
    return t * ((length / norm).clamp(max=1.0) if at_most else length / norm)


def _annealed(logits: Tensor, labels: Tensor, margin: float, temperature: float, gamma: float) -> Float[Tensor, ""]:
    """The formula of `CrossEntropy`."""
    if margin:
        logits = logits - torch.zeros_like(logits).scatter(1, labels.unsqueeze(1), margin)
    if not gamma:
        return functional.cross_entropy(logits / temperature, labels)
    lost = functional.cross_entropy(logits / temperature, labels, reduction="none")
    return ((-torch.expm1(-lost)) ** gamma * lost).mean()


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}; expected a positive number")


def _check_gamma(gamma: float) -> None:
    if 0 < gamma < 1:
        raise InputError(f"gamma is {gamma}; expected 0, or at least 1: below, its slope has no limit")
