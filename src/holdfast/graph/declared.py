"""Models that themselves say which network they are: Holdfast's own, and classes that define `to_network`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import ConversionError, InputError
from holdfast.network.network import Network

#: Methods by which a class says what it computes.
_DECLARING = ("to_network", "pieces")


def declared(model: nn.Module) -> tuple[Network, Callable[[Any], Tensor]] | None:
    """The network that the model's class declares, and what encodes its inputs; None where it declares none.

    A declaration holds for the `forward` that its class was written for. If a subclass has replaced that, if it comes
    from neither the declaring package nor torch, or if it has hooks, the model is treated like any other: its graph is
    read.
    """
    if getattr(model, "to_network", None) is None or not _stands_by(model):
        return None
    ask: Any = model.to_network
    network = ask()
    if not isinstance(network, Network):
        raise ConversionError(
            f"{type(model).__name__} has a to_network that returned {type(network).__name__}; expected a Network"
        )
    encode = getattr(model, "encode", _plain)
    return network, lambda inputs: encode(_tensor(inputs))


def _stands_by(model: nn.Module) -> bool:
    """Whether every module is run by the `forward` that its declaration, or that of the whole model, goes with."""
    trusted = {"torch", _package(_definer(type(model), "to_network"))}
    return all(_as_declared(module, trusted) for module in model.modules())


def _as_declared(module: nn.Module, trusted: set[str]) -> bool:
    forward, order = _definer(type(module), "forward"), type(module).__mro__
    if _hooked(module) or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        return False
    if not {_package(forward), _package(vars(forward)["forward"])} <= trusted:
        return False
    known = [_definer(type(module), method) for method in _DECLARING if hasattr(type(module), method)]
    return all(order.index(declaring) <= order.index(forward) for declaring in known)


def _package(of: Any) -> str:
    """Where a class or a function was written."""
    return str(of.__module__).partition(".")[0]


def _definer(kind: type, method: str) -> type:
    """The class whose method it is."""
    return next(base for base in kind.__mro__ if method in vars(base))


def _hooked(module: nn.Module) -> bool:
    everywhere = torch.nn.modules.module
    around = (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)
    return bool(module._forward_hooks or module._forward_pre_hooks or any(around))


def _tensor(inputs: Any) -> Tensor:
    if isinstance(inputs, Tensor):
        return inputs
    values = list(inputs.values()) if hasattr(inputs, "values") else list(inputs)
    if len(values) == 1 and isinstance(values[0], Tensor):
        return values[0]
    raise InputError(f"the inputs hold {len(values)} values; expected one tensor")


def _plain(x: Tensor) -> Tensor:
    """Images (b, c, height, width) with their pixels in a row; tokens (b, n, d) as they are."""
    return x.flatten(-2, -1) if x.ndim == 4 else x
