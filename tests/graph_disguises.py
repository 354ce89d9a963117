"""Models that differ from what they look like. Each is a small attention classifier with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from holdfast.models.config import ModelConfig
from holdfast.models.transformer import Transformer

D = 8


class Plain(nn.Module):
    """Attention of two heads and an MLP on tokens (b, 4, 8); subclasses change one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.second, self.act = nn.LayerNorm(D), nn.ReLU()
        self.up, self.down, self.head = nn.Linear(D, 6), nn.Linear(6, D), nn.Linear(D, 3)

    def start(self, x: Tensor) -> Tensor:
        return x

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(q.shape[-1])

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def value(self, v: Tensor) -> Tensor:
        return v

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        p = self.weigh(self.score(q, k))
        return self.out((p @ self.value(v)).transpose(1, 2).flatten(2))

    def activate(self, u: Tensor) -> Tensor:
        return self.act(u)

    def pool(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def end(self, logits: Tensor) -> Any:
        return logits

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        x = x + self.attend(x)
        x = x + self.down(self.activate(self.up(self.second(x))))
        return self.end(self.head(self.pool(x)))


Step = Callable[..., Any]


def with_(**steps: Step) -> Callable[[], nn.Module]:
    """The plain model with some of its steps replaced, each a function of the model and its argument."""
    return lambda: type("Plain", (Plain,), dict(steps))()


# -- things that are not what their name says


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.elu(x, alpha=3.0)


class ReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(x, 0.3)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Counting(Plain):
    """Another function from the hundredth call on."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 100 else -1)


class Remembering(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return super().forward(x)


class OwnCall(Plain):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x).tanh()


class Straight(torch.autograd.Function):
    """Tanh, whose derivative claims to be that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class Shifted(nn.Module):
    """A parametrisation that depends on a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((), 0.3))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.shift


def changed(change: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """The plain model after something was done to it."""

    def build() -> nn.Module:
        model = Plain()
        found = change(model)
        return found if isinstance(found, nn.Module) else model

    return build


def replaced(**modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The plain model with some of its modules replaced."""

    def build() -> nn.Module:
        model = Plain()
        for name, make in modules.items():
            setattr(model, name, make())
        return model

    return build


def parametrised(model: Any) -> None:
    parametrize.register_parametrization(model.out, "weight", Shifted())


def own_forward(model: Any) -> None:
    model.head.forward = lambda x: functional.linear(x.abs(), model.head.weight, model.head.bias)


def bound_forward(model: Any) -> None:
    model.act.forward = type(model.act).forward.__get__(nn.ReLU())
    model.forward = lambda x: Plain.forward(model, x)


def relu_written(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def through_view(self: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0].mul_(2.0)
    x.view(len(x), -1)[:, -3:] += 1
    return x


def aliased(self: Any, x: Tensor) -> Tensor:
    first = x[:, :1]
    y = x.clone()
    y[:, 1:2] = first * 3
    y[:, 2] = 0.5
    return y


def of_constants(self: Any, v: Tensor) -> Tensor:
    return v.flip(-2)


class Memory(Plain):
    """Tokens attend to learned ones, too."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 2, D))

    def start(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.memory.expand(len(x), -1, -1)], 1)


class KeyMemory(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 2, D // 2))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = (torch.cat([t, self.keys.expand(len(x), -1, -1, -1)], 2) for t in (k, v))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Hyper(Plain):
    """Weights that depend on the input."""

    def activate(self, u: Tensor) -> Tensor:
        return u @ (u.mT @ u)


class TwoInputs(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x + y)


def heads_masked(self: Any, s: Tensor) -> Tensor:
    mask = torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, :, 0] = True
    return s.masked_fill(mask, -math.inf).softmax(-1)


def row_masked(self: Any, s: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    return s.masked_fill(mask, -math.inf).softmax(-1).nan_to_num()


def soft_mask(self: Any, s: Tensor) -> Tensor:
    return (s + torch.ones(4, 4).triu(1) * -1e4).softmax(-1)


def unmasked_again(self: Any, s: Tensor) -> Tensor:
    return (s.masked_fill(torch.ones(4, 4).triu(1).bool(), -1e30) * 1e-30).softmax(-1)


def least(self: Any, s: Tensor) -> Tensor:
    return s.masked_fill(torch.ones(4, 4).triu(1).bool(), torch.finfo(s.dtype).min).softmax(-1)


CONFIG = ModelConfig("image", classes=3, width=8, depth=1, heads=2, channels=1, side=8, activation="tanh")


class Inherited(Transformer):  # type: ignore[misc]
    """Holdfast's own model with another forward, and the network that it inherits."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.elu(super().forward(inputs), alpha=3.0)


class InheritedCall(Transformer):  # type: ignore[misc]
    def __call__(self, inputs: Tensor) -> Any:
        return functional.elu(super().__call__(inputs) + 100.0, alpha=3.0) - 100.0


def own(change: Callable[[Any], Any] | None = None, kind: type[Transformer] = Transformer) -> Callable[[], nn.Module]:
    """Holdfast's own transformer after something was done to it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        model = kind(CONFIG)
        if change is not None:
            change(model)
        return model

    return build


def noisy(self: Any, x: Tensor) -> Tensor:
    return x + 1e-13 * torch.randn_like(x)
