"""Every self-attention of an unmodified model as an `AttentionLayer` at its real input, checked against the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from holdfast.attention import AttentionLayer
from holdfast.errors import HoldfastError, InputError, UnsupportedAttentionError
from holdfast.tracing.family import Site, find_sites
from holdfast.tracing.rebuild import Pass, Record, verify
from holdfast.tracing.tap import AttentionCall, Tap, unseen

Inputs = Tensor | Mapping[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class TracedLayer:
    """One self-attention of a model.

    Attributes:
        name: qualified name of its module; with #1, #2, … where the module runs more than once.
        layer: its output map included, without residual. Weights of float32 and float64 models are shared, not copied.
        x: what enters the query, key and value maps.
        rebuild_error: ‖layer(x) - what the module returned‖ / ‖what it returned‖, with layer(x) in float64. Queries
            without any key (padding) are left out: the layer lets them attend to themselves.
    """

    name: str
    layer: AttentionLayer
    x: Float[Tensor, "b n d"] = field(repr=False)
    rebuild_error: float


def trace(model: nn.Module, inputs: Inputs) -> list[TracedLayer]:
    """Finds every dot-product self-attention of a model.

    Args:
        model: unmodified, in the state in which it is to be analysed: `eval()` unless it has no dropout.
        inputs: one tensor; a mapping of keyword arguments (what a tokenizer returns); or a tuple of arguments.

    Raises:
        UnsupportedAttentionError: some attention of the model is not what an `AttentionLayer` can stand for, or the
            rebuilt layer does not return what the module returned; the message names the module and what was found.

    Example:
        >>> for found in trace(bert, tokenizer(["a sentence"], return_tensors="pt")):
        ...     print(found.name, local_lipschitz(found.layer, found.x).value)
    """
    return list(iter_trace(model, inputs))


def iter_trace(model: nn.Module, inputs: Inputs) -> Iterator[TracedLayer]:
    """The layers of `trace` one after the other: half-precision weights are then converted for one layer at a time."""
    records = _Recorder(model).run(inputs)
    passes, seen = Counter(record.site.name for record in records), Counter[str]()
    for record in records:
        name = record.site.name
        seen[name] += 1
        shown = name if passes[name] == 1 else f"{name}#{seen[name]}"
        yield TracedLayer(shown, record.layer(), record.x, record.rebuild_error)


class _Recorder:
    """Runs a model once and verifies each attention as soon as its output is there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sites = {site.name: site for site in find_sites(model)}
        self._passes = {name: Pass() for name in self._sites}
        self._records: list[Record] = []

    def run(self, inputs: Inputs) -> list[Record]:
        with ExitStack() as stack:
            for site in self._sites.values():
                hooks = [site.module.register_forward_pre_hook(partial(self._begin, site), with_kwargs=True)]
                hooks += [m.register_forward_pre_hook(partial(self._enter, site), with_kwargs=True) for m in site.maps]
                hooks.append(
                    (site.module if site.whole else site.out).register_forward_hook(partial(self._leave, site))
                )
                for hook in hooks:
                    stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(Tap(self._model, self._see))
            self._call(inputs)
        for name, left in self._passes.items():
            if left.call is not None:
                raise UnsupportedAttentionError(f"module {name!r} attends, but its output map was not called")
        if not self._records:
            raise UnsupportedAttentionError(
                f"{type(self._model).__name__} computed no dot-product attention on this input; expected a transformer"
            )
        return self._records

    def _call(self, inputs: Inputs) -> None:
        try:
            if isinstance(inputs, Tensor):
                self._model(inputs)
            elif isinstance(inputs, Mapping):
                self._model(**inputs)
            else:
                self._model(*inputs)
        except HoldfastError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{type(self._model).__name__} does not take these inputs: {reason}") from error

    def _begin(self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._passes[site.name] = Pass(positions=kwargs.get("position_embeddings"))

    def _enter(self, site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = (kwargs[name] for name in ("query", "key", "value", "input", "x") if name in kwargs)
        entered = [*(args[:3] if site.whole else args[:1]), *named]
        first, own = entered[0], _batched(site, entered[0])
        self._passes[site.name].entered += [own if t is first else _batched(site, t) for t in entered]

    def _see(self, call: AttentionCall) -> None:
        if call.name not in self._sites:
            raise UnsupportedAttentionError(
                f"module {call.name!r} of class {type(self._model.get_submodule(call.name)).__name__} attends, and no "
                "known family describes it; describe it by holdfast.tracing.register_family"
            )
        self._passes[call.name].call = call

    def _leave(self, site: Site, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen, self._passes[site.name] = self._passes[site.name], Pass()
        seen.before_out = None if site.whole else args[0]
        seen.output = _batched(site, output[0]) if site.whole else output
        with unseen(), torch.autocast(seen.entered[0].device.type, enabled=False):
            self._records.append(verify(site, seen))


def _batched(site: Site, t: Tensor) -> Tensor:
    """(b, n, d), from what a module that applies its maps itself takes or returns."""
    if t.ndim == 2:
        return t.unsqueeze(0)
    return t.transpose(0, 1) if site.whole and not getattr(site.module, "batch_first", True) else t
