"""Modules with parametrizations, sent to other processes."""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def let_pickle(model: nn.Module) -> None:
    """Lets pickle take a model whose parts have parametrizations.

    torch gives each of them a class of its own, which pickle cannot name and whose state it refuses. They are sent as
    what they were before, with their parametrizations, and get such a class again where they arrive.
    """
    for part in model.modules():
        if parametrize.is_parametrized(part):
            copyreg.pickle(type(part), _taken_apart)


def _taken_apart(part: nn.Module) -> tuple[Any, ...]:
    return _put_together, (type(part).__bases__[0], part.__dict__)


def _put_together(kind: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    part = kind.__new__(kind)
    part.__dict__.update(state)
    names = list(part.get_submodule("parametrizations")._modules)
    parametrize._inject_new_class(part)
    for name in names:
        parametrize._inject_property(part, name)
    return part
