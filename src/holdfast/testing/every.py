"""One test for many cases: it checks all of them, and says which ones failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar


class WithName(Protocol):
    """What a case has."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
C = TypeVar("C", bound=WithName)


def for_every(items: Iterable[T], check: Callable[[T], Any], name: Callable[[T], str] = str) -> None:
    """Runs a check for every item; raises one AssertionError that names every item for which it failed.

    An item costs no more than its check: cases that share a cached value need no test of their own each.

    Args:
        items: the cases; there must be one.
        check: raises where something is wrong.
        name: what a case is called.

    Example:
        >>> for_every(cases(), lambda case: self.check(case), name=lambda case: case.name)
    """
    failures: dict[str, Exception] = {}
    looked_at = 0
    for item in items:
        looked_at += 1
        try:
            check(item)
        except Exception as error:
            failures[name(item)] = error
    if not looked_at:
        raise AssertionError("there is nothing to check")
    if failures:
        lines = [f"  {case}: {type(error).__name__}: {error}" for case, error in failures.items()]
        raise AssertionError(f"{len(failures)} of {looked_at} cases fail\n" + "\n".join(lines)) from next(
            iter(failures.values())
        )


def over(cases_of: Callable[[Any], Iterable[C]]) -> Callable[[Callable[[Any, C], None]], Callable[..., None]]:
    """Decorator of a kit's check of one case: as a test it looks at every case, called with a case at that one alone.

    Args:
        cases_of: the cases of a kit; each has a `name`.
    """

    def decorate(check: Callable[[Any, C], None]) -> Callable[..., None]:
        def test(self: Any, case: C | None = None) -> None:  # pytest takes no argument with a default for a fixture
            chosen = cases_of(self) if case is None else [case]
            for_every(chosen, lambda one: check(self, one), lambda one: one.name)

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        return test

    return decorate
