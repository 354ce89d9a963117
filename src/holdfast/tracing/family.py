"""Where a family of models keeps the maps of its attention: data, not code. One file for each family in `families/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from holdfast.attention.rotary import Pairing
from holdfast.errors import UnsupportedAttentionError
from holdfast.registry import Registry


@dataclass(frozen=True)
class Family:
    """Modules that attend in one way. Paths lead from the module in which the kernel runs; ".." is its parent.

    Attributes:
        name: of the family.
        package: whose modules they are.
        modules: names of their classes; subclasses count.
        maps: the query, key and value maps, or the one map that holds all three, or () where the module itself does.
        layout: of a map that holds all three: "blocks" (Q of all heads, then K, then V) or "heads" (Q, K, V of the
            first head, then of the second, …).
        out: the output map.
        rotary: how entries are paired, where the module is given `position_embeddings`; None without rotary positions.
        prescaled: whether queries are scaled, by 1/√k, before the kernel; the kernel's own scale says nothing then.

    Example:
        >>> register_family(Family("mine", "mylib", ("MyAttention",), maps=("query", "key", "value"), out="dense"))
    """

    name: str
    package: str
    modules: tuple[str, ...]
    maps: tuple[str, str, str] | tuple[str] | tuple[()]
    out: str
    layout: Literal["blocks", "heads"] = "blocks"
    rotary: Pairing | None = None
    prescaled: bool = False

    def describes(self, module: nn.Module) -> bool:
        """Whether the module, or a class it inherits from, belongs to the family."""
        return any(
            c.__name__ in self.modules and c.__module__.split(".")[0] == self.package for c in type(module).__mro__
        )


families: Registry[Family] = Registry("model family", group="holdfast.families")


def register_family(family: Family) -> None:
    """Makes a family known to `trace`."""
    families.add(family.name)(family)


@dataclass(frozen=True)
class Site:
    """A module that attends, with its maps found.

    Attributes:
        name: qualified.
        maps: the modules that X enters; the module itself where it holds its maps.
        out: the output map.
    """

    name: str
    module: nn.Module
    family: Family
    maps: tuple[nn.Module, ...]
    out: nn.Module

    @property
    def whole(self) -> bool:
        """Whether the module applies its maps itself, so that X enters it and the output leaves it."""
        return not self.family.maps

    def weights(self, h: int, k: int) -> dict[str, Tensor]:
        """The weights and biases as `AttentionLayer` names them, for h heads of width k."""
        if self.whole or len(self.maps) == 1:
            w, b = self._matrix(self.maps[0])
            parts = [self._part(t, i, h, k) for t in (w, b) for i in range(3)]
        else:
            parts = [self._matrix(m)[i] for i in range(2) for m in self.maps]
        w_o, b_o = self._matrix(self.out)
        assert w_o is not None
        if w_o.shape[0] != h * k or any(w is None or w.shape[-1] % k for w in parts[:3]):
            raise UnsupportedAttentionError(f"module {self.name!r}: its maps do not divide into {h} heads of width {k}")
        tensors = {
            name: t if t is None else t.detach().reshape(*t.shape[:-1], -1, k).movedim(-2, 0)
            for name, t in zip(("w_q", "w_k", "w_v", "b_q", "b_k", "b_v"), parts, strict=True)
        }
        tensors |= {"w_o": w_o.detach().reshape(h, k, -1), "b_o": None if b_o is None else b_o.detach()}
        return {name: t for name, t in tensors.items() if t is not None}

    def _part(self, t: Tensor | None, i: int, h: int, k: int) -> Tensor | None:
        """Part i of the three that one map holds."""
        if t is None:
            return None
        if self.family.layout == "blocks":
            return t.chunk(3, -1)[i]
        return t.reshape(*t.shape[:-1], h, 3, k)[..., i, :].flatten(-2)

    def _matrix(self, module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
        """The matrix (inputs, outputs) and the bias of a linear map."""
        if isinstance(module, nn.MultiheadAttention) and module is self.module:
            weight, bias = module.in_proj_weight, module.in_proj_bias
            return None if weight is None else weight.mT, bias
        if isinstance(module, nn.Linear):
            return module.weight.mT, module.bias
        if type(module).__name__ == "Conv1D":  # GPT-2's linear map keeps its matrix the other way round
            return module.weight, module.bias  # type: ignore[return-value]
        raise UnsupportedAttentionError(
            f"module {self.name!r} has a {type(module).__name__} for a linear map; expected nn.Linear"
        )


def find_sites(model: nn.Module) -> Iterator[Site]:
    """Every module of the model that a known family describes, with the maps in their places."""
    known = [families[name] for name in families]
    for name, module in model.named_modules():
        for family in known:
            if not family.describes(module):
                continue
            maps = [_follow(model, name, path) for path in family.maps] or [module]
            out = _follow(model, name, family.out)
            found = tuple(m for m in maps if m is not None)
            if out is not None and len(found) == len(maps):
                yield Site(name, module, family, found, out)
                break


def _follow(model: nn.Module, name: str, path: str) -> nn.Module | None:
    while path.startswith("../"):
        name, path = name.rpartition(".")[0], path.removeprefix("../")
    try:
        return model.get_submodule(f"{name}.{path}" if name else path)
    except AttributeError:
        return None
