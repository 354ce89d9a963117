"""A model against its network: equal near and far, and attacked by its own forward inside the proved radius."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.compositions.certify import certify_inputs
from holdfast.graph import Converted, to_network
from holdfast.graph.equality import float64_copy, model_logits
from holdfast.network.network import Network

STARTS, STEPS = 8, 6
FAR = (0.3, 3.0, 10.0)  # distances from the input, relative to its length


def stirred(model: nn.Module, seed: int = 1) -> nn.Module:
    """Weights that attend to something, norms that do something, a head that is not zero; in evaluation mode."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand(buffer.shape, generator=draw) + 0.5)
    return model.eval()


def pictures(count: int = 2, channels: int = 1, size: int = 8) -> Tensor:
    return torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(5))


def tokens(count: int = 2, n: int = 4, d: int = 8) -> Tensor:
    return torch.randn(count, n, d, generator=torch.Generator().manual_seed(5))


class OwnForward:
    """The model in float64 as a function of what moves: its one float tensor, or the embeddings of its words.

    It knows nothing of graphs and networks: words are moved by a hook on the module that looks them up.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._model = float64_copy(model).requires_grad_(False)
        self._example = example
        self._moved: Tensor | None = None
        if not _is_image(example):
            self._words(example)

    def _words(self, example: Any) -> None:
        ids = example if isinstance(example, Tensor) else example["input_ids"]
        mask = None if isinstance(example, Tensor) else example.get("attention_mask")
        kept = torch.ones_like(ids[0]) if mask is None else mask[0]
        self._kept = kept.bool()
        named = getattr(self._model, "get_input_embeddings", None)
        lookup = named() if named else next(m for m in self._model.modules() if isinstance(m, nn.Embedding))
        lookup.register_forward_hook(self._replaced)

    def _replaced(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self._moved is None:
            return output
        moved = output.clone()
        moved[:, self._kept] = self._moved
        return moved

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (b, classes) of a batch of what enters the network (b, n, d)."""
        if _is_image(self._example):
            shape = _image_of(self._example).shape[1:]
            given: Any = x.reshape(-1, *shape)
            if not isinstance(self._example, Tensor):
                given = {name: given if v.is_floating_point() else v[:1].expand(len(x), *v.shape[1:])
                         for name, v in self._example.items()}  # fmt: skip
        else:
            self._moved = x
            alone = isinstance(self._example, Tensor)
            named = {"": self._example} if alone else self._example
            given = {name: v[:1].expand(len(x), *v.shape[1:]) for name, v in named.items()}
            given = given[""] if alone else given
        logits = model_logits(self._model, given)
        return logits if logits.ndim == 2 else logits[:, int(self._kept.nonzero().max())]


def _is_image(example: Any) -> bool:
    return any(v.is_floating_point() for v in ([example] if isinstance(example, Tensor) else example.values()))


def _image_of(example: Any) -> Tensor:
    if isinstance(example, Tensor):
        return example
    return next(v for v in example.values() if v.is_floating_point())


def attacked(forward: OwnForward, x: Tensor, label: int, radius: float, seed: int = 0) -> Tensor:
    """The least margin of the label that projected gradient descent finds in the ball: (starts,)."""
    draw = torch.Generator().manual_seed(seed)
    step = torch.randn(STARTS, *x.shape[1:], generator=draw, dtype=torch.float64)
    least = torch.full((STARTS,), torch.inf, dtype=torch.float64)
    for _ in range(STEPS):
        length = torch.linalg.vector_norm(step, dim=(1, 2), keepdim=True)
        delta = (step * (radius * (1 - 1e-9) / length)).requires_grad_()
        logits = forward(x + delta)
        others = logits.clone()
        others[:, label] = -torch.inf
        margin = logits[:, label] - others.amax(-1)
        least = torch.minimum(least, margin.detach())
        (slope,) = torch.autograd.grad(margin.sum(), delta)
        slope = slope / torch.linalg.vector_norm(slope, dim=(1, 2), keepdim=True).clamp(min=1e-300)
        step = delta.detach() - radius * slope  # to the sphere again: the least margin of a slope lies there
    return least


def check(model: nn.Module, example: Any, *, close: float = 1e-8) -> Converted:
    """Converts, compares, certifies and attacks a model; every step may fail.

    Args:
        model: in evaluation mode.
        example: what it takes.
        close: how near the network must be to the model's forward in float64, which may compute some steps in float32.
    """
    converted = to_network(model, example)
    x = converted.encode(example)
    network = converted.network
    own = OwnForward(model, example)
    with torch.no_grad():
        real = own(x[:1])
        torch.testing.assert_close(network(x[:1]), real, rtol=close, atol=close * float(real.abs().max()))
        logits = model_logits(model, example)
        logits = logits if logits.ndim == 2 else logits[:, -1] if real.shape == logits[:1, -1].shape else logits
        if not isinstance(example, dict) or bool(example.get("attention_mask", torch.ones(1)).all()):
            torch.testing.assert_close(
                network(x).to(logits.dtype), logits, rtol=1e-3, atol=1e-3 * float(real.abs().max())
            )
        far(network, own, x, close)
    (record,) = certify_inputs(network, x[:1], method="lofast")
    assert record.radius > 0
    margins = attacked(own, x[:1], record.prediction, record.radius)
    assert float(margins.min()) >= 0, f"the margin reaches {float(margins.min()):.3g} inside {record.radius:.3g}"
    assert float(margins.min()) < record.margin  # the attack moves something
    return converted


def far(network: Network, own: OwnForward, x: Tensor, close: float) -> None:
    """The network is the model far away from its example, too."""
    draw = torch.Generator().manual_seed(3)
    for radius in FAR:
        step = torch.randn(4, *x.shape[1:], generator=draw, dtype=torch.float64)
        size = torch.linalg.vector_norm(x[0]).clamp(min=1.0) / torch.linalg.vector_norm(step, dim=(1, 2), keepdim=True)
        moved = x[:1] + radius * size * step
        real = own(moved)
        torch.testing.assert_close(network(moved), real, rtol=close, atol=close * float(real.abs().max()))
