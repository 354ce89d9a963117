"""One small registry: names to objects, with the nearest name in the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from holdfast.errors import HoldfastError, InputError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to registered objects of one kind.

    Args:
        kind: what is registered, for error messages ("bound", "attack objective").
        group: entry-point group through which other packages may add objects.
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind = kind
        self._group = group
        self._items: dict[str, T] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Decorator that registers an object under `name`."""

        def register(item: T) -> T:
            if name in self._items:
                raise HoldfastError(f"{self.kind} {name!r} is registered twice; give the second one another name")
            self._items[name] = item
            return item

        return register

    def __getitem__(self, name: str) -> T:
        self._load_plugins()
        if not isinstance(name, str):
            raise InputError(f"{self.kind} is {name!r}; expected a name, one of {', '.join(sorted(self._items))}")
        if name not in self._items:
            raise UnknownNameError(self.kind, name, self._items)
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(self._items)

    def values(self) -> list[T]:
        """Every registered object, in order."""
        return [self._items[name] for name in self]

    def _load_plugins(self) -> None:
        if self._group is None:
            return
        group, self._group = self._group, None
        for entry in entry_points(group=group):
            entry.load()  # importing the module runs its registrations
