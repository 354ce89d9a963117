"""Models that a function in a Python file returns, as `mymodel.py:build`; weights are safetensors, never pickles."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from holdfast.errors import HoldfastError, InputError
from holdfast.storage import Pathlike

_SOURCE = re.compile(r"(.+\.py):(\w+)")


def names_function(model: str) -> bool:
    """Whether the name is that of a Python file, with a function as it must be, or without one."""
    return re.fullmatch(r".+\.py(:.*)?", model) is not None


def load_python(
    source: str, *, weights: Pathlike | None = None, arguments: Mapping[str, Any] | None = None
) -> nn.Module:
    """The model that a function returns, in evaluation mode and frozen. The file's code is run.

    Args:
        source: FILE.py:FUNCTION.
        weights: a safetensors file with the model's state.
        arguments: what the function is called with.

    Example:
        >>> load_python("mymodel.py:build", weights="w.safetensors", arguments={"depth": 4})
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise InputError(f"the model is {source!r}; expected FILE.py:FUNCTION")
    function = getattr(_module(Path(match[1])), match[2], None)
    if not callable(function):
        raise InputError(f"{match[1]} has no function {match[2]!r}; expected one that returns a model")
    try:
        model = function(**(arguments or {}))
    except Exception as error:  # whatever the user's code raises
        raise InputError(f"{source} failed: {_reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{source} returned {type(model).__name__}; expected a torch.nn.Module")
    if weights is not None:
        _fill(model, source, Path(weights))
    return model.eval().requires_grad_(False)


def read_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments from "depth=4": numbers, truth values and lists as Python writes them, otherwise text."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--arg is {text!r}; expected NAME=VALUE")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


def _module(path: Path) -> ModuleType:
    """The file as a module of its own name, with its folder to import from, as if Python had been started with it.

    So other processes can import it as well.
    """
    if not path.is_file():
        raise InputError(f"no file {str(path)!r}; expected a Python file")
    name, place = path.stem, path.resolve()
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(place):
        return known
    if known is not None or not name.isidentifier():
        raise InputError(f"{str(path)!r} cannot be imported: the name {name!r} is taken or invalid; rename the file")
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(place.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        del sys.modules[name]
        raise InputError(f"{str(path)!r} cannot be imported: {_reason(error)}") from error
    return module


def _fill(model: nn.Module, source: str, weights: Path) -> None:
    if not weights.is_file():
        raise InputError(f"no file {str(weights)!r}; expected a safetensors file")
    try:
        load_model(model, weights)
    except (SafetensorError, RuntimeError) as error:
        raise InputError(f"{str(weights)!r} does not hold the weights of {source}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())[:200]
    return words if isinstance(error, HoldfastError) else f"{type(error).__name__}: {words}"
