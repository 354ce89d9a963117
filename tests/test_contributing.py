"""The code that CONTRIBUTING shows does what it says: a bound, a composition and an operator, as they stand there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graph_cases import check, stirred, tokens
from holdfast.bounds import bounds
from holdfast.compositions import compositions
from holdfast.graph import operators
from holdfast.graph.table import OPERATORS
from holdfast.testing import BoundConformance, CompositionConformance, cases
from holdfast.testing.layers import Case

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def run(word: str, names: dict[str, Any]) -> None:
    """Runs the one block with this word in it."""
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if word in block)
    exec(compile(block, "CONTRIBUTING.md", "exec"), names)


class MyBoundKit(BoundConformance):
    def name(self) -> str:
        return "my-bound"

    def cases(self) -> Sequence[Case]:
        return cases()[:3]


class MyCompositionKit(CompositionConformance):
    def name(self) -> str:
        return "my-composition"


def test_the_bound_passes_its_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_items", dict(bounds._items))
    run("class MyBound", {"__name__": "mine"})
    kit = MyBoundKit()
    kit.test_metadata_is_complete()
    kit.test_not_below_the_attack()


def test_the_composition_passes_its_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compositions, "_items", dict(compositions._items))
    run("class MyComposition", {"__name__": "mine"})
    kit = MyCompositionKit()
    kit.test_metadata_is_complete()
    kit.test_not_above_the_exact_radius()


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.lerp(x, torch.tanh(self.inner(x)), 0.3).mean(1))


def test_the_operator_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lerp" not in OPERATORS
    monkeypatch.setitem(OPERATORS, "lerp", None)  # so that it is taken out again
    run("lerp", dict(vars(operators)))
    check(stirred(Mixing()), tokens())
