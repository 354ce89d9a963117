"""JaSMin on an unmodified model: the attention is watched while the model runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from holdfast.errors import InputError
from holdfast.train.eager import FORBIDDING
from holdfast.train.jasmin import Reduction, check_options, pick, reduce, widened, worst_rows
from holdfast.train.tap import AttentionCall, Tap


@final
class JaSMin:
    """The JaSMin penalty of every attention of a model, gathered while the model runs.

    The model's outputs, its state and its copies are not touched. A forward pass without gradients costs nothing and
    counts nothing. Tokens that no query may attend to (padding) have no row of their own in the penalty.

    Args:
        model: any model whose attention `holdfast.train.tap.Tap` can see.
        k: 0, or at least 2: see `holdfast.jasmin`.
        weight: what the penalty is multiplied by; may be changed at any time.
        reduction: over layers, batch and heads.
        layers: qualified names of the attention modules to count, `*` standing for anything; default all.

    Example:
        >>> penalty = JaSMin(model, k=0, weight=0.01)
        >>> loss = task_loss(model(inputs)) + penalty()
    """

    def __init__(
        self,
        model: nn.Module,
        k: int = 0,
        weight: float = 0.01,
        reduction: Reduction = "mean",
        *,
        layers: Sequence[str] | None = None,
    ) -> None:
        check_options(k, reduction)
        if not math.isfinite(weight):
            raise InputError(f"weight is {weight}; expected a finite number")
        if isinstance(layers, str):
            raise InputError(f"layers is the string {layers!r}; expected a sequence of names")
        self.k, self.weight, self.reduction, self.layers = k, weight, reduction, layers
        self._tap = Tap(_Running(model), self._count)
        self._tapped, self._before_pass = False, 0
        self.reset()
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_Hook(self._before)),
            model.register_forward_hook(_Hook(self._after), prepend=True, always_call=True),  # taps close inside out
        ]

    def __call__(self) -> Float[Tensor, ""]:
        """The weighted penalty of all forward passes since the last call; 0 if they ran without gradients."""
        seen = self._seen
        self.reset()
        if seen.penalties:
            device = seen.penalties[0].device
            return self.weight * reduce(torch.cat([t.to(device) for t in seen.penalties]), self.reduction)
        if seen.names:
            raise InputError(f"layers={self.layers} names none of the attention modules {sorted(seen.names)}")
        if seen.watched:
            raise InputError("no dot-product attention was seen in the model; JaSMin needs one")
        if seen.trained_blindly:
            raise InputError(
                "the model ran in training mode without gradients; use gradient checkpointing with "
                "use_reentrant=False, or call model.eval() where no gradients are wanted"
            )
        if not seen.evaluated:
            raise InputError("the model has not run since the last penalty; call the model first")
        return torch.zeros(())

    def reset(self) -> None:
        """Forgets the forward passes since the last call, such as those of an attack on the model."""
        self._seen = _Seen()

    def remove(self) -> None:
        """Detaches from the model."""
        self._close(failed=True)
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> JaSMin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _before(self, model: nn.Module, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # checkpointing runs the model again during backward: this pass has been counted
        self._close(failed=True)  # torch skips the hook after a pass that Ctrl-C interrupted
        if torch.is_grad_enabled():
            self._seen.watched = True
            self._before_pass = len(self._seen.penalties)
            self._tap.__enter__()
            self._tapped = True
        elif model.training:
            self._seen.trained_blindly = True
        else:
            self._seen.evaluated = True

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        self._close(failed=output is None)

    def _close(self, *, failed: bool) -> None:
        if self._tapped:
            self._tapped = False
            self._tap.__exit__(None, None, None)
            if failed:
                del self._seen.penalties[self._before_pass :]

    def _count(self, call: AttentionCall) -> None:
        self._seen.names.add(call.name)
        if self.layers is not None and not any(fnmatchcase(call.name, pattern) for pattern in self.layers):
            return
        if not torch.is_grad_enabled():
            raise InputError(
                f"the attention of {call.name!r} runs without gradients in a pass that has them; use gradient "
                "checkpointing with use_reentrant=False, or leave the module out with layers="
            )
        # Checkpointing compares what a block saves with what its second run saves; the penalty is not in the second.
        with torch.autocast(call.query.device.type, enabled=False), saved_tensors_hooks(_same, _same):
            self._seen.penalties.append(_penalties(call, self.k).flatten())


@dataclass
class _Seen:
    """The forward passes since the last penalty."""

    penalties: list[Tensor] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    watched: bool = False
    evaluated: bool = False
    trained_blindly: bool = False


def _penalties(call: AttentionCall, k: int) -> Float[Tensor, "b h"]:
    """The largest penalty over the rows of every head."""
    q, key = widened(call.query), widened(call.key).contiguous()
    (b, h, n, _), (_, g, m, _) = q.shape, key.shape
    bias = _bias(call, n, m, q)
    bias = None if bias is None else bias.expand(b, h, n, m)

    def scores(part: slice, row: Int[Tensor, "b h"] | None) -> Float[Tensor, "b h r m"]:
        rows = pick(q[part], row)
        # Heads that share a key stand below each other.
        s = rows.reshape(len(rows), g, -1, rows.shape[-1]) @ key[part].mT * call.scale
        s = s.reshape(*rows.shape[:-1], m)
        return s if bias is None else s + pick(bias[part], row)

    return worst_rows(scores, b, h * n * m, k, q.device)


def _bias(call: AttentionCall, n: int, m: int, like: Tensor) -> Tensor | None:
    """What is added to the scores: -inf for forbidden pairs, and in the rows of tokens that nobody may attend to."""
    if call.mask is None:
        return like.new_full((n, m), -math.inf).triu(1) if call.causal else None
    mask = call.mask
    additive = torch.zeros_like(mask, dtype=like.dtype) if mask.dtype == torch.bool else mask.to(like.dtype)
    forbidden = ~mask if mask.dtype == torch.bool else mask <= FORBIDDING
    if n == m:
        forbidden = forbidden | forbidden.all(-2).unsqueeze(-1)
    return torch.where(forbidden, -math.inf, additive)


@final
class _Running(nn.Module):
    """The parts of a model for a tap that opens when the model is already running: its own pre-hooks are over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules, self._running = model._modules, [model]  # in a list, for it is no part of this module

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        hook(self._running[0], ())
        return super().register_forward_pre_hook(hook, **options)


@final
class _Hook:
    """A hook that does nothing in a copy of its module."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _same(t: Tensor) -> Tensor:
    return t
