"""Watches the attention of an unmodified model while it runs, in evaluation and in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType, TracebackType
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from holdfast.train.eager import EagerRecogniser

_HIDDEN: ContextVar[bool] = ContextVar("holdfast_hidden", default=False)


@contextmanager
def unseen() -> Iterator[None]:
    """What is computed in this context no tap reports; callbacks run in it."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)


@dataclass(frozen=True)
class AttentionCall:
    """One pass of softmax(scale · Q Kᵀ + mask) V, with the very tensors of the model's own computation.

    Attributes:
        name: qualified name of the innermost module around it.
        query: as the kernel gets it: after biases and rotary positions.
        key: with g heads, where g divides h.
        value: like the key.
        mask: bool (True = may attend) or additive, as the kernel got it; broadcasts to (b, h, n, n).
        causal: whether the kernel was told to hide later keys; a causal mask may also stand in `mask`.
        scale: of the scores; 1 where the query came scaled.
        dropout: the probability that was applied to the attention probabilities.
        output: of the kernel, before the output map.
    """

    name: str
    query: Float[Tensor, "b h n k"]
    key: Float[Tensor, "b g n k"]
    value: Float[Tensor, "b g n k"]
    mask: Tensor | None
    causal: bool
    scale: float
    dropout: float
    output: Float[Tensor, "b h n k"]


@final
class Tap:
    """A context in which every dot-product attention of a model is reported.

    The model computes what it computes without the tap: outputs, gradients and random numbers are its own. Only torch's
    fused encoder for inference, which Python cannot see into, is off meanwhile. Fused kernels are seen, and so is
    attention that is written out as product, softmax, product.

    Args:
        model: the model; only what runs inside it, or inside a part of it, is reported.
        on_call: is given an `AttentionCall` each time, in order.

    Example:
        >>> with Tap(model, lambda call: print(call.name, tuple(call.query.shape))):
        ...     model(inputs)
    """

    def __init__(self, model: nn.Module, on_call: Callable[[AttentionCall], None]) -> None:
        self._model, self._on_call = model, on_call
        self._open: list[ExitStack] = []

    def __enter__(self) -> Tap:
        with ExitStack() as stack:
            modules: list[_RunningModule] = []
            for name, module in self._model.named_modules():
                stack.callback(module.register_forward_pre_hook(partial(_enter, modules, name)).remove)
                stack.callback(module.register_forward_hook(partial(_leave, modules), always_call=True).remove)
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(_Watch(modules, self._on_call))
            self._open.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, trace)


@dataclass(frozen=True)
class _RunningModule:
    """A module that is running."""

    name: str
    module: nn.Module


def _enter(modules: list[_RunningModule], name: str, module: nn.Module, args: object) -> None:
    modules.append(_RunningModule(name, module))


def _leave(modules: list[_RunningModule], module: nn.Module, args: object, output: object) -> None:
    modules.pop()


# torch's multi-head attention hands itself over whole to whoever watches; this is its body, which does not.
_multi_head_attention = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)


@final
class _Watch(TorchFunctionMode):
    """Sees every torch function; reports those that complete an attention."""

    def __init__(self, modules: list[_RunningModule], on_call: Callable[[AttentionCall], None]) -> None:
        super().__init__()
        self._modules, self._on_call = modules, on_call
        self._eager = EagerRecogniser()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._modules or _HIDDEN.get():
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        result = func(*args, **kwargs)
        here = self._modules[-1]
        if func is functional.scaled_dot_product_attention:
            self._report(_kernel_call(here.name, result, *args, **kwargs))
            return result
        seen = self._eager.see(func, args, kwargs, result, here.name)
        if seen is not None:
            s = seen.scores
            query, key, value, output = (_four(t, here.module) for t in (s.query, s.key, seen.value, result))
            mask = _four(s.mask, here.module) if s.mask is not None and s.mask.ndim == 3 else s.mask
            self._report(AttentionCall(here.name, query, key, value, mask, False, s.scale, s.dropout, output))
        return result

    def _report(self, call: AttentionCall) -> None:
        with unseen():
            self._on_call(call)


def _four(t: Tensor, module: nn.Module) -> Tensor:
    """(b h, n, k) as (b, h, n, k); the module knows its heads, or has one."""
    if t.ndim == 4:
        return t
    h = getattr(module, "num_heads", 1)
    return t.unsqueeze(0) if len(t) == 1 else t.reshape(len(t) // h, h, *t.shape[1:])


def _kernel_call(
    name: str,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """The arguments of `functional.scaled_dot_product_attention` as a call."""
    if query.ndim == 3:  # no heads
        query, key, value, output = (t.unsqueeze(1) for t in (query, key, value, output))
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return AttentionCall(name, query, key, value, attn_mask, is_causal, scale, dropout_p, output)
