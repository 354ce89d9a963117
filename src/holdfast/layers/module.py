"""What every layer of a certifiable model is: a torch module that knows the pieces of its certificate."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from holdfast.errors import InputError
from holdfast.layers.piece import Piece
from holdfast.layers.steepness import Steepness

Module = TypeVar("Module", bound=nn.Module)


class Layer(nn.Module, ABC):
    """A map of tokens (b, n, d) to tokens.

    `gain` is the Lipschitz constant that the construction promises in exact arithmetic. No certificate relies on it:
    the pieces recompute the norms of the weights, in float64 and rounded outward.
    """

    @property
    @abstractmethod
    def gain(self) -> float:
        """The Lipschitz constant by construction; infinite where there is none."""

    def steepness(self) -> Steepness:
        """What is known by construction of the norms of the first two derivatives; an infinite curvature is a kink."""
        if not math.isfinite(self.gain):
            raise InputError(f"{type(self).__name__} has no known gain; use another slope, such as margin-gradient")
        return Steepness(self.gain, math.inf)

    @abstractmethod
    def pieces(self) -> tuple[Piece, ...]:
        """The same map for certificates, with the present weights."""


class Chain(nn.Sequential, Layer):
    """Layers one after the other."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__(*layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in order."""
        return tuple(layer for layer in self if isinstance(layer, Layer))

    @property
    def gain(self) -> float:
        product = 1.0
        for layer in self.layers:
            product *= layer.gain
        return product

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for layer in self.layers for piece in layer.pieces())


def plain(module: Module) -> Module:
    """A copy whose weights are ordinary parameters: constraints are evaluated once and then dropped.

    Example:
        >>> exported = plain(model)  # same outputs; exported.state_dict() holds the weights themselves
    """
    copied = copy.deepcopy(module)
    for part in list(copied.modules()):
        if parametrize.is_parametrized(part):
            # torch's remove_parametrizations deletes properties of the class, which the original still uses.
            weights = {name: getattr(part, name).detach() for name in part.get_submodule("parametrizations")._modules}
            part.__class__ = type(part).__bases__[0]
            del part.parametrizations
            for name, weight in weights.items():
                part.register_parameter(name, nn.Parameter(weight.clone()))
    return copied
