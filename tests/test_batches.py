"""How many inputs are treated at once, where nobody says."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from holdfast.certification.batches import fitting, held_numbers
from holdfast.models import Transformer, config
from holdfast.network.network import Network

MIB = 2**20


@cache
def case() -> tuple[Network, Tensor]:
    model = Transformer(config("digits-smooth"))
    return model.to_network(), model.encode(torch.rand(1, 1, 8, 8))


def test_the_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    held = {"memory_reserved": 0, "memory_allocated": 0}
    for name in held:
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: held[name])
    sizes = []
    for megabytes in (1, 50, 400, 16_000_000):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=megabytes * MIB: (free, free))
        sizes.append(fitting(*case(), "gains", "cuda", 1))
        assert fitting(*case(), "gains", "cuda", 2) in (max(1, sizes[-1] // 2), 1024)
    assert sizes[0] == 1
    assert 2 <= sizes[1] < sizes[2] < 1024
    assert sizes[-1] == 1024
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    held.update(memory_reserved=450 * MIB, memory_allocated=50 * MIB)  # what torch keeps for later is free
    assert fitting(*case(), "gains", "cuda", 1) == sizes[2]


def test_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fitting(*case(), "gains", "cuda", 1) == 8


def test_jacobians_of_all_tokens_count_where_they_are_needed() -> None:
    chosen = config("digits-smooth")
    tokens = chosen.grid[0] * chosen.grid[1]
    assert held_numbers(*case(), "layerwise") >= (tokens * chosen.width) ** 2
    assert held_numbers(*case(), "gains") == (3 * chosen.heads * tokens) ** 2
