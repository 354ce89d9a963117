"""Reads the parts of a model by path, and remembers which: what is left over at the end is named, not passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import ConversionError
from holdfast.network.norms import LayerNorm
from holdfast.tracing.family import find_sites

#: Modules that do nothing when a model is evaluated.
_IDLE = {"Dropout", "Identity", "DropPath", "PatchDropout"}
_ACTIVATIONS = {
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu-tanh",
    "NewGELUActivation": "gelu-tanh",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "Tanh": "tanh",
}
_FUNCTIONS: dict[Callable[..., Tensor], str] = {
    functional.relu: "relu",
    torch.relu: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
    torch.tanh: "tanh",
}


def join(*paths: str) -> str:
    """A path that follows one path after the other."""
    return ".".join(path for path in paths if path)


def refuse(path: str, part: object, why: str) -> ConversionError:
    """An error that names a part of a model and its class."""
    named = f"module {path!r}" if path else "the model"
    return ConversionError(f"{named} ({'absent' if part is None else type(part).__name__}) {why}")


@dataclass(frozen=True)
class Linear:
    """x ↦ x w + b."""

    w: Float64[Tensor, "d c"]
    b: Float64[Tensor, " c"]


@final
class Parts:
    """The parts of a float64 model.

    Args:
        model: with weights that are read here, not copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: set[int] = set()
        for site in find_sites(model):  # what tracing rebuilds and compares need not be named again
            self._note(site.maps)
            self._note((site.out,))
            self._note(site.module.parameters(recurse=False))

    def find(self, path: str) -> Any:
        """The part, or None where it is absent, None or nn.Identity."""
        part: Any = self._model
        for name in filter(None, path.split(".")):
            part = getattr(part, name, None)
        return None if isinstance(part, nn.Identity) else part

    def take(self, path: str) -> Any:
        """The part, which counts as read with all that is in it."""
        part = self.find(path)
        self._note((*part.modules(), *part.parameters()) if isinstance(part, nn.Module) else (part,))
        return part

    def linear(self, path: str) -> Linear:
        """A linear map, with the weights that its forward pass uses."""
        part = self.take(path)
        if not isinstance(part, nn.Linear) or type(part).forward is not nn.Linear.forward:
            raise refuse(path, part, "is not a plain linear map; expected nn.Linear: merge what was added to it")
        w = part.weight.detach().mT
        return Linear(w, w.new_zeros(w.shape[-1]) if part.bias is None else part.bias.detach())

    def norm(self, path: str | None) -> tuple[LayerNorm, ...]:
        """The LayerNorm at the path, if there is one."""
        part = None if path is None else self.take(path)
        if part is None:
            return ()
        if not isinstance(part, nn.LayerNorm) or len(part.normalized_shape) != 1:
            raise refuse(str(path), part, "is not a norm that is known; expected nn.LayerNorm over the last dimension")
        one = torch.ones(part.normalized_shape, dtype=torch.float64)
        gamma = one if part.weight is None else part.weight.detach()
        return (LayerNorm(gamma, one * 0.0 if part.bias is None else part.bias.detach(), part.eps),)

    def activation(self, path: str) -> str:
        """The name of an activation, from its path or from its name."""
        if path in _ACTIVATIONS.values():
            return path
        part = self.take(path)
        if isinstance(part, nn.GELU):
            return {"none": "gelu", "tanh": "gelu-tanh"}[part.approximate]
        name = _ACTIVATIONS.get(type(part).__name__) if isinstance(part, nn.Module) else _FUNCTIONS.get(part)
        if name is None:
            known = ", ".join(sorted(set(_ACTIVATIONS.values())))
            raise refuse(path, part, f"is not an activation that is known; expected one of {known}")
        return name

    def rows(self, path: str) -> Float64[Tensor, "n d"] | None:
        """The vectors of a parameter (…, d), if there is one."""
        part = self.take(path)
        return None if part is None else part.detach().reshape(-1, part.shape[-1])

    def check_all_read(self, unused: Iterable[str]) -> None:
        """Refuses a model with parts that no path has led to."""
        for path in unused:
            self.take(path)
        for path, module in self._model.named_modules():
            if id(module) in self._read:
                continue
            own = [name for name, value in module.named_parameters(recurse=False) if id(value) not in self._read]
            leaf = not any(module.children())
            if own or (leaf and type(module).__name__ not in _IDLE):
                held = f" with the parameter {own[0]!r}" if own else ""
                raise refuse(path, module, f"is a part{held} that has no place in this model as it is known")

    def _note(self, parts: Iterable[object]) -> None:
        self._read.update(id(part) for part in parts if part is not None)
