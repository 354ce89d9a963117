"""Optional packages: imported when they are needed; the error for a missing one names the extra that installs it."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch

from holdfast.errors import HoldfastError


def require(package: str, extra: Literal["hf", "vision", "onnx", "cluster", "notebook"]) -> ModuleType:
    """Imports an optional package.

    Args:
        package: its import name.
        extra: the extra of Holdfast that installs it.
    """
    if not available(package):
        raise HoldfastError(f"this needs {package}, which is not installed; pip install 'holdfast[{extra}]'")
    _mend_torchvision()
    return importlib.import_module(package)


def available(package: str) -> bool:
    """Whether an optional package is installed."""
    return find_spec(package) is not None


@cache
def _mend_torchvision() -> None:
    """Lets torchvision be imported beside a torch that it was not built for.

    transformers and timm import it for its image transforms, which are pure Python; but its import fails at two
    compiled operators that are then missing, and no model loads. Declared but not defined, they fail only when called.
    """
    if find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
