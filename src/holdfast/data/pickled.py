"""Pickles of plain data, read without running anything that they name."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np

from holdfast.errors import InputError

# Files of old and new versions of numpy name the same three things.
_ARRAY_PARTS = {
    ("numpy", "ndarray"): "type",
    ("numpy", "dtype"): "dtype",
    ("numpy.core.multiarray", "_reconstruct"): "array",
    ("numpy._core.multiarray", "_reconstruct"): "array",
}


@final
class _Bytes:
    """Stands for numpy.dtype, which may only be that of bytes."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}; only bytes are read")

    def __setstate__(self, state: object) -> None:
        """Byte order means nothing to bytes."""


@final
class _Array:
    """Stands for an array under construction: numpy's own code never sees the file's state."""

    def __init__(self, *_: object) -> None:
        self.content: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Bytes) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array that is not made of bytes")
        self.content = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


@final
class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, strings, bytes, lists, dictionaries and arrays of bytes; refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name."""
        part = _ARRAY_PARTS.get((module, name))
        if part is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return {"array": _Array, "dtype": _Bytes, "type": None}[part]

    def persistent_load(self, pid: object) -> NoReturn:
        """Nothing outside the file is loaded."""
        raise pickle.UnpicklingError("it refers to something outside")


def read_pickle(path: Path) -> dict[bytes, Any]:
    """The dictionary in a pickle of Python 2 or 3; strings of Python 2 come as bytes."""
    try:
        with path.open("rb") as file:
            content = _PlainUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(f"{path} cannot be read as a pickle of plain data: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}; expected a dictionary")
    return {key: value.content if isinstance(value, _Array) else value for key, value in content.items()}
