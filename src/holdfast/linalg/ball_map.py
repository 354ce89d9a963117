"""Functions that take tensors and balls alike, so that what they give can be proved."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.linalg.rounding import Array


class BallMap(ABC):
    """A map whose formula is written once, for tensors and for balls."""

    @abstractmethod
    def __call__(self, x: Array) -> Array:
        """The value: of a ball, a ball that holds the values of all its points."""
