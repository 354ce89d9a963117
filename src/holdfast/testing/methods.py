"""What every bound of a layer must satisfy, whatever it bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from holdfast.bounds import LayerMethod
from holdfast.errors import NotApplicableError
from holdfast.testing.layers import Case, cases


class MethodConformance(ABC):
    """A bound says what it is, and refuses the layers for which it has no proof."""

    @abstractmethod
    def name(self) -> str:
        """The name under which the bound is registered."""

    def cases(self) -> Sequence[Case]:
        """Layers of every kind."""
        return cases()

    def test_metadata_is_complete(self) -> None:
        bound = self._bound()
        assert bound in self._registered()
        assert bound.name == self.name()
        assert bound.side == "upper"
        assert bound.scope in ("ball at x", "point", "ball at 0")
        assert bound.guarantees
        for text in (bound.cost, bound.reference, bound.assumptions, type(bound).__doc__):
            assert text is not None
            assert text.strip()

    def test_applies_somewhere_and_refuses_the_rest(self) -> None:
        applicable = self._applicable()
        assert applicable
        for case in self.cases():
            if case not in applicable:
                try:
                    self._call(case)
                except NotApplicableError as error:
                    assert self.name() in str(error)  # noqa: PT017 - the kit does without pytest
                else:
                    raise AssertionError(f"{case.name} was refused and yet bounded")

    # -- parts

    @abstractmethod
    def _bound(self) -> LayerMethod:
        """The registered bound."""

    @abstractmethod
    def _registered(self) -> Sequence[LayerMethod]:
        """All registered bounds of its kind."""

    @abstractmethod
    def _applicable(self) -> list[Case]:
        """The cases that the bound does not refuse."""

    @abstractmethod
    def _call(self, case: Case) -> Any:
        """The bound at a case."""
