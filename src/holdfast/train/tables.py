"""Settings from tables of a TOML file: typed, and the error for an unknown key names the nearest known one."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from fractions import Fraction
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.errors import InputError, UnknownNameError
from holdfast.registry import Registry

T = TypeVar("T")


class Chosen(ABC):
    """A setting with several kinds: its table has a key `kind`, and a word alone is a kind with its defaults."""

    kinds: ClassVar[Registry[Any]]
    kind: ClassVar[str]


def from_table(cls: type[T], table: Any, where: str) -> T:
    """A frozen dataclass from the keys of a table.

    Args:
        cls: the dataclass; its fields are the known keys.
        table: what the file says.
        where: how an error calls the table, such as "[train] in run.toml".

    Example:
        >>> from_table(Pgd, {"radius": "36/255"}, "[[train.losses]]").steps
        7
    """
    assert is_dataclass(cls)
    if not isinstance(table, Mapping):
        raise InputError(f"{where} is {table!r}; expected a table")
    known = {field.name: field for field in fields(cls)}
    for key in table:
        if key not in known:
            raise UnknownNameError(f"key of {where}:", key, known)
    needed = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in table]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}")
    hints = get_type_hints(cls)
    return cls(**{key: _value(value, hints[key], key, where) for key, value in table.items()})


def to_table(value: Any) -> Any:
    """The inverse of `from_table`, ready for JSON."""
    if isinstance(value, tuple):
        return [to_table(item) for item in value]
    if not is_dataclass(value):
        return value
    own = {field.name: to_table(getattr(value, field.name)) for field in fields(value)}
    return {"kind": value.kind, **own} if isinstance(value, Chosen) else own


def _value(value: Any, expected: Any, key: str, where: str) -> Any:
    if get_origin(expected) in (Union, UnionType):  # something, or None
        (own,) = (kind for kind in get_args(expected) if kind is not type(None))
        return None if value is None else _value(value, own, key, where)
    if get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{key} of {where} is {value!r}; expected a list")
        return tuple(_value(item, get_args(expected)[0], key, where) for item in value)
    if choices := get_args(expected):
        if value not in choices:
            raise UnknownNameError(f"{key} of {where}:", str(value), map(str, choices))
        return value
    if issubclass(expected, Chosen):
        return _chosen(expected, value, key, where)
    if expected is float and not isinstance(value, bool | float):
        value = _number(value)
    if type(value) is not expected:
        raise InputError(f"{key} of {where} is {value!r}; expected {expected.__name__}")
    if expected in (int, float) and not value >= 0:
        raise InputError(f"{key} of {where} is {value}; expected a number that is not negative")
    return value


def _chosen(base: type[Chosen], value: Any, key: str, where: str) -> Any:
    options = dict(value) if isinstance(value, Mapping) else {"kind": value}
    if "kind" not in options:
        raise InputError(f"{key} of {where} has no kind; expected one of {', '.join(sorted(base.kinds))}")
    kind = options.pop("kind")
    return from_table(base.kinds[kind], options, f"{kind!r} in {where}")


def _number(value: Any) -> Any:
    """A float from an integer or a fraction in quotes, such as "36/255"; anything else as it is."""
    try:
        return float(Fraction(value))
    except (ValueError, TypeError, ZeroDivisionError):
        return value
