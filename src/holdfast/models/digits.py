"""A small vision transformer, trained on the 8×8 handwritten digits of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from holdfast.errors import InputError

SIDE = 8  # pixels along one side of an image
PATCH = 2  # pixels along one side of a patch
CLASSES = 10
MAX_PIXEL = 16  # the digits come in 17 grey levels, 0 to 16

WEIGHTS_FILE = Path(__file__).with_name("digits_vit.safetensors")
DIGITS_FILE = Path(__file__).with_name("digits_test.safetensors")


class Block(nn.Module):
    """A pre-LayerNorm transformer block: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, units: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, units), nn.GELU(), nn.Linear(units, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens (b, n, d) to tokens of the same shape."""
        normed = self.attention_norm(tokens)
        mixed, _ = self.attention(normed, normed, normed, need_weights=False)
        tokens = tokens + mixed
        updated: Tensor = tokens + self.mlp(self.mlp_norm(tokens))
        return updated


class DigitsViT(nn.Module):
    """A vision transformer for 8×8 grey digits: 16 patches of 2×2 pixels and a class token.

    Args:
        depth: number of blocks.
        width: dimension d of a token.
        heads: attention heads per block; must divide `width`.
        mlp: hidden units of every MLP; four times the width unless told.
    """

    def __init__(self, depth: int = 2, width: int = 32, heads: int = 4, mlp: int | None = None) -> None:
        super().__init__()
        patches = (SIDE // PATCH) ** 2
        self.embedding = nn.Linear(PATCH**2, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + patches, width))
        self.blocks = nn.Sequential(*(Block(width, heads, mlp or 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (b, 8, 8) with pixels in [0, 1] to logits (b, 10)."""
        tokens = self.blocks(self._embed(images))
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits

    def attention_inputs(self, images: Tensor) -> dict[str, tuple[nn.MultiheadAttention, Tensor]]:
        """Returns each attention module, by qualified name, with the tensor (b, 17, d) that enters it."""
        inputs = {}
        tokens = self._embed(images)
        for index, block in self.blocks.named_children():
            assert isinstance(block, Block)
            inputs[f"blocks.{index}.attention"] = (block.attention, block.attention_norm(tokens))
            tokens = block(tokens)
        return inputs

    def _embed(self, images: Tensor) -> Tensor:
        if images.shape[1:] != (SIDE, SIDE):
            raise InputError(f"images have shape {tuple(images.shape)}; expected (b, {SIDE}, {SIDE}): pass a batch")
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        class_tokens = self.class_token.expand(len(images), -1, -1)
        return torch.cat([class_tokens, self.embedding(patches)], dim=1) + self.positions


@dataclass(frozen=True)
class Digits:
    """Handwritten digits with their labels.

    Attributes:
        images: (b, 8, 8), float32 pixels in [0, 1].
        labels: (b,), the digit each image shows.
        indices: (b,), the place of each image in `sklearn.datasets.load_digits()`.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor


def load_digits_vit() -> DigitsViT:
    """Loads the trained model, frozen and in evaluation mode."""
    model = DigitsViT()
    model.load_state_dict(load_file(WEIGHTS_FILE))
    return model.eval().requires_grad_(False)


def demo_digits() -> Digits:
    """Loads 32 digits from the test split: none of them was seen in training."""
    stored = load_file(DIGITS_FILE)
    return Digits(stored["images"].float() / MAX_PIXEL, stored["labels"], stored["indices"])
