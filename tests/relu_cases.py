"""A small classifier with relu, as a user writes one, and images for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Relu(nn.Module):
    """A classifier as a user writes one: patches, one block of attention and relu without normalisation, a mean."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5
        x = x + scores.softmax(-1) @ self.value(x)
        x = x + self.down(torch.relu(self.up(x)))
        logits: Tensor = self.head(x.mean(1))
        return logits


def images(count: int) -> tuple[nn.Module, list[tuple[Tensor, int]]]:
    """The classifier, and images of which many pixels stand at the ends of [0, 1]."""
    model = Relu().eval()
    pixels = (torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(3)) * 2 - 0.5).clamp(0, 1)
    answers = model((pixels - 0.4) / 0.3).argmax(-1)
    return model, [(x, int(y)) for x, y in zip(pixels, answers, strict=True)]
