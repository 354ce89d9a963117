"""The vision transformer as it is usually built: pre-LayerNorm, GELU, biases, a class token or the tokens' mean."""

from __future__ import annotations

import json
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.models.hub import OnHub

Pool = Literal["class", "mean"]

VIT_KEY = "holdfast_vit"  # of a file's metadata


@final
class Block(nn.Module):
    """A pre-LayerNorm transformer block: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, units: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, units), nn.GELU(), nn.Linear(units, width))

    def forward(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """Maps tokens to tokens."""
        normed = self.attention_norm(tokens)
        mixed, _ = self.attention(normed, normed, normed, need_weights=False)
        tokens = tokens + mixed
        updated: Tensor = tokens + self.mlp(self.mlp_norm(tokens))
        return updated


@final
class VisionTransformer(OnHub):
    """A vision transformer for square images with pixels in [0, 1].

    No layer is limited in any way. Weights are drawn from a normal distribution of deviation 0.02, truncated at two
    deviations, and biases start at 0, as usual.

    Args:
        side: pixels along one side of an image.
        channels: of an image.
        patch: pixels along one side of a patch; must divide `side`.
        depth: number of blocks.
        width: dimension d of a token.
        heads: attention heads per block; must divide `width`.
        units: hidden units of every MLP; by default four times the width.
        pool: what the head sees: the class token, or the mean of all tokens (there is then no class token).
        classes: number of answers.

    Example:
        >>> model = VisionTransformer(side=32, channels=3, patch=4, depth=4, width=192, heads=3)
        >>> model(torch.rand(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        side: int,
        channels: int,
        patch: int,
        depth: int,
        width: int,
        heads: int,
        units: int | None = None,
        pool: Pool = "class",
        classes: int = 10,
    ) -> None:
        super().__init__()
        if side % patch or width % heads:
            raise InputError(
                f"patch={patch} must divide side={side}, and heads={heads} width={width}; choose other sizes"
            )
        if pool not in ("class", "mean"):
            raise InputError(f'pool is {pool!r}; expected "class" or "mean"')
        self._shape, self._patch, self._pool = (channels, side, side), patch, pool
        sizes = {"side": side, "channels": channels, "patch": patch, "depth": depth, "width": width, "heads": heads}
        self._arguments = {**sizes, "units": units, "pool": pool, "classes": classes}
        self.embedding = nn.Linear(channels * patch**2, width)
        if pool == "class":
            self.class_token = nn.Parameter(torch.empty(1, 1, width))
        tokens = (side // patch) ** 2 + (pool == "class")
        self.positions = nn.Parameter(torch.empty(1, tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads, units or 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, images: Float[Tensor, "b c s s"]) -> Float[Tensor, "b classes"]:
        """The logits of images."""
        tokens = self.blocks(self._embed(images))
        seen = tokens[:, 0] if self._pool == "class" else tokens.mean(1)
        logits: Tensor = self.head(self.norm(seen))
        return logits

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self._arguments)

    @property
    def notes(self) -> dict[str, str]:
        """What the model is built from, under the key by which files of models are known."""
        return {VIT_KEY: json.dumps(self._arguments)}

    @property
    def example(self) -> Float[Tensor, "1 c s s"]:
        """A black image, as the model takes it."""
        return torch.zeros(1, *self._shape)

    def _embed(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self._shape:
            raise InputError(
                f"images have shape {tuple(images.shape)}; expected (b, {', '.join(map(str, self._shape))})"
            )
        (c, side, _), p = self._shape, self._patch
        cut = images.reshape(-1, c, side // p, p, side // p, p).permute(0, 2, 4, 1, 3, 5)
        tokens: Tensor = self.embedding(2 * cut.flatten(3).flatten(1, 2) - 1)
        if self._pool == "class":
            tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], 1)
        return tokens + self.positions
