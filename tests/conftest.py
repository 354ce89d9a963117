"""What all tests share."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch

pytest.register_assert_rewrite("holdfast.testing")
sys.path.append(str(Path(sys.prefix) / "vision"))  # where `make` puts timm and torchvision

from holdfast import HoldfastError  # noqa: E402 - its assertions are rewritten first
from holdfast.testing import Case, make_case  # noqa: E402
from holdfast.tracing.extras import require  # noqa: E402

_HEADS = {"1 head": (1, 1), "4 heads": (4, 4), "4/2 heads": (4, 2), "4/1 heads": (4, 1)}
_MASKS = {"": None, "mask": "shared", "masks": "each"}
_OUTPUTS = {"": {}, "residual": {"residual": 1.5}, "d_out": {"d_out": 3}}
_COMBINATIONS = [
    {"h": _HEADS[heads][0], "g": _HEADS[heads][1], "biases": bool(biases), "mask": _MASKS[mask], "causal": bool(causal)}
    | _OUTPUTS[output]
    | {"name": " ".join(filter(None, [heads, biases, mask, causal, output]))}
    for heads, biases, mask, causal, output in itertools.product(
        _HEADS, ("", "biases"), _MASKS, ("", "causal"), _OUTPUTS
    )
]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=_COMBINATIONS, ids=lambda options: options["name"])
def combination(request: pytest.FixtureRequest) -> Case:
    """Every combination of heads, grouping, biases, masks, causality, and residual or another output width."""
    return make_case(**request.param, n=5, d=6, k=3)


def _optional(package: str, extra: Literal["hf", "vision"]) -> ModuleType:
    try:
        return require(package, extra)
    except HoldfastError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """The library, or a skipped test."""
    module = _optional("transformers", "hf")
    module.utils.logging.set_verbosity_error()
    module.utils.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """The library, or a skipped test."""
    return _optional("timm", "vision")
