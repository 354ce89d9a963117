"""A small vision transformer, trained on the 8×8 handwritten digits of scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from holdfast.data.digits import CLASSES, SIDE
from holdfast.errors import InputError
from holdfast.models.hub import OnHub
from holdfast.models.vit import Block

PATCH = 2  # pixels along one side of a patch

WEIGHTS_FILE = Path(__file__).with_name("digits_vit.safetensors")


class DigitsViT(OnHub):
    """A vision transformer for 8×8 grey digits: 16 patches of 2×2 pixels and a class token.

    Args:
        depth: number of blocks.
        width: dimension d of a token.
        heads: attention heads per block; must divide `width`.
        mlp: hidden units of every MLP; by default four times the width.
    """

    def __init__(self, depth: int = 2, width: int = 32, heads: int = 4, mlp: int | None = None) -> None:
        super().__init__()
        self._arguments = {"depth": depth, "width": width, "heads": heads, "mlp": mlp}
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

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self._arguments)

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


def load_digits_vit() -> DigitsViT:
    """Loads the trained model, frozen and in evaluation mode."""
    model = DigitsViT()
    model.load_state_dict(load_file(WEIGHTS_FILE))
    return model.eval().requires_grad_(False)
