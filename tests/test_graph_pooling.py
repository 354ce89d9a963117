"""Pooling is read as torch computes it, whatever its options."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graph_cases import stirred
from holdfast.errors import ConversionError
from holdfast.graph import to_network
from holdfast.graph.windows import adaptive, sliding, together
from holdfast.layers import WindowMax
from holdfast.layers.maxmin import PairSort


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def largest(x: Tensor, windows: Tensor) -> Tensor:
    """Of an image (height, width), by the piece."""
    return WindowMax(windows, (x.shape[0], x.shape[1])).value(x)


def test_windows_are_those_of_torch() -> None:
    x = numbers(7, 6)
    options = itertools.product((2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True))
    for kernel, stride, padding, dilation, ceil in options:
        tables = [sliding(size, kernel, stride, padding, dilation, ceil=ceil) for size in x.shape]
        expected = functional.max_pool2d(x[None], kernel, stride, padding, dilation, ceil)[0]
        assert torch.equal(largest(x, together(tables, x.shape)), expected)
    for outputs in itertools.product((1, 2, 3, 5), (1, 4, 6)):
        tables = [adaptive(size, count) for size, count in zip(x.shape, outputs, strict=True)]
        windows = together(tables, x.shape)
        padded = torch.cat([windows, torch.full((*windows.shape[:-1], 1), -1)], -1)  # two entries at least
        assert torch.equal(largest(x, padded), functional.adaptive_max_pool2d(x[None], outputs)[0])


def test_a_pair_is_sorted_as_windows_say() -> None:
    x = numbers(3, 4)
    pairs = torch.arange(12).reshape(3, 2, 2)
    assert torch.equal(WindowMax(pairs, (3, 4)).value(x), PairSort().value(x)[:, 0::2])


class Every(nn.Module):
    """Pooling of all kinds, in one row."""

    def __init__(self, pools: tuple[int, ...]) -> None:
        super().__init__()
        self.pools, self.stem, self.head = pools, nn.Conv2d(1, 2, 2, 2), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        line = x.flatten(2)
        every = [
            lambda: functional.max_pool2d(x.tanh(), 3, 2, 1, ceil_mode=True),
            lambda: functional.max_pool2d_with_indices(functional.pad(x, (1, 0, 0, 1), value=-torch.inf), 2)[0],
            lambda: functional.max_pool1d(functional.leaky_relu(line, 0.1), 3, dilation=2),
            lambda: functional.adaptive_max_pool2d(-2 * x.relu(), (3, 2)),
            lambda: functional.adaptive_max_pool1d(line, 5),
            lambda: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
            lambda: functional.avg_pool1d(line, 3, 2, 1),
            lambda: functional.avg_pool1d(line, 3, 2, 1, ceil_mode=True),
            lambda: functional.adaptive_avg_pool2d(x, (3, 2)),
            lambda: functional.adaptive_avg_pool1d(line, 5),
            lambda: x.amax((2, 3)),
            lambda: x.max(-1, keepdim=True).values,
            lambda: x.amin(1),
            lambda: torch.minimum(x[:, :1], line[:, :, :1, None].relu()),
            lambda: torch.maximum(x, torch.zeros(())),
            lambda: functional.max_pool2d(x, 1, 2),
        ]
        pooled: Tensor = self.head(torch.cat([every[i]().flatten(1) for i in self.pools], 1))
        return pooled


@pytest.mark.parametrize("pools", [range(5), range(5, 10), range(10, 16)], ids=["max", "mean", "extremes"])
def test_every_kind_is_read(pools: range) -> None:
    """The reader compares the network with the model by itself, near and far."""
    torch.manual_seed(0)
    images = numbers(2, 1, 8, 8).float()
    model = Every(tuple(pools))
    model(images)
    network = to_network(stirred(model), images).network
    assert any(type(getattr(piece, "piece", piece)) is WindowMax for piece in network.pieces()) == (5 not in pools)


class _Unpooled(nn.Module):
    """Puts maxima back where they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.back, self.head = nn.MaxPool1d(2, return_indices=True), nn.MaxUnpool1d(2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.back(*self.pool(x)).flatten(1))
        return logits


def test_the_places_of_maxima_are_refused_by_name() -> None:
    with pytest.raises(ConversionError, match="asks for the places of maxima"):
        to_network(_Unpooled().eval(), torch.rand(1, 2, 4))
