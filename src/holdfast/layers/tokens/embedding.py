"""Where tokens come from: patches of an image, positions, and a few tokens that move among others that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.layers.module import Layer
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.tokens.rows import Rows
from holdfast.layers.tokens.selection import gathered, places
from holdfast.layers.weights import double, weight
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
class PatchEmbedding(LinearPiece):
    """A convolution of an image (…, channels, height · width) to tokens (…, n, d), with fixed tokens in front.

    The convolution is a matrix V (channels · p · q, d) applied to every patch. A pixel occurs in at most m patches, so
    the norm is at most √m ‖V‖. With a stride that is not below the kernel m is 1, and the norm is ‖V‖ itself: an image
    can be zero but for one patch.

    Args:
        w: (d, channels, p, q) the kernel, as in `nn.Conv2d`.
        b: (d), or None.
        size: height and width of the image.
        stride: vertical and horizontal; by default that of patches which touch, (p, q).
        padding: zeros around the image, vertical and horizontal.
        front: (k, d) tokens in front of the patches, such as the class token.
        positions: (k + n, d) added to all tokens at the end.
    """

    def __init__(
        self,
        w: Float[Tensor, "d channels p q"],
        b: Float[Tensor, " d"] | None,
        size: tuple[int, int],
        stride: tuple[int, int] | None = None,
        padding: tuple[int, int] = (0, 0),
        front: Float[Tensor, "k d"] | None = None,
        positions: Float[Tensor, "m d"] | None = None,
    ) -> None:
        d, self.channels, p, q = double(w, "w", 4).shape
        self.size = size
        self.matrix = w.detach().double().flatten(1).mT
        self._patches = _patches(self.channels, size, (p, q), stride or (p, q), padding)  # (n, channels p q)
        n, k = len(self._patches), 0 if front is None else len(double(front, "front", 2))
        constant = torch.zeros(k + n, d, dtype=torch.float64, device=w.device)
        if front is not None:
            constant[:k] = front.detach()
        if b is not None:
            constant[k:] += double(b, "b", 1)
        if positions is not None and positions.shape != constant.shape:
            raise InputError(f"positions have shape {tuple(positions.shape)}; expected {tuple(constant.shape)}")
        self._shifts = (constant,) if positions is None else (constant, double(positions, "positions", 2))
        self._front, self._places = k, places(self._patches, self.channels * size[0] * size[1])
        self._multiplicity = int((self._places >= 0).sum(0).amax())

    def value(self, u: Array) -> Array:
        tokens = self.push(u, u)
        for shift in self._shifts:
            tokens = tokens + weight(shift, u)
        return tokens

    def push(self, u: Array, a: Array) -> Array:
        pixels = self.channels * self.size[0] * self.size[1]
        if a.shape[-2:] != (self.channels, pixels // self.channels):
            expected = (self.channels, pixels // self.channels)
            raise InputError(f"an image has shape {tuple(a.shape[-2:])}; expected (channels, pixels) = {expected}")
        rows = gathered(a.flatten(-2, -1), self._patches) @ weight(self.matrix, u)
        n, k = len(self._patches), self._front
        source = torch.arange(-k, n, device=a.device)
        return rows[..., source.clamp(min=0), :].masked_fill((source < 0).unsqueeze(-1), 0.0)

    def pull(self, u: Array, c: Array) -> Array:
        rows = c[..., self._front :, :] @ weight(self.matrix.mT, u)
        pixels = gathered(rows.flatten(-2, -1), self._places).sum(-2)
        return pixels.reshape(*pixels.shape[:-1], self.channels, self.size[0] * self.size[1])

    def norm(self, a: Arithmetic[Array]) -> Array:
        root = a.lift(self.matrix.new_tensor(float(self._multiplicity))).sqrt()
        return a.matrix_norm(a.lift(self.matrix)) * root


@final
class AddPositions(LinearPiece):
    """x + c: position embeddings, or any other constant.

    Args:
        c: (n, d), or (d) for every token alike; (b, n, d) for inputs that have each their own.
    """

    tokenwise = True

    def __init__(self, c: Float[Tensor, "*n d"]) -> None:
        self.c = double(c, "c", 1, 2, 3)

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        return (AddPositions(self.c[rows]) if self.c.ndim == 2 else self,)

    def value(self, u: Array) -> Array:
        return u + weight(self.c, u)

    def push(self, u: Array, a: Array) -> Array:
        return a

    def pull(self, u: Array, c: Array) -> Array:
        return c

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(self.c.new_ones(()))


@final
class Place(LinearPiece):
    """G (…, k, d) to X (…, n, d) with G added to k chosen tokens: what comes after it is a function of these alone.

    Args:
        x: (…, n, d) X.
        tokens: which ones move; different from each other.

    Example:
        >>> word = network.before(Place(x, [3]))  # perturbs the fourth word alone, around G = 0
    """

    def __init__(self, x: Float[Tensor, "*b n d"], tokens: Sequence[int]) -> None:
        self.x, self.tokens = double(x, "x", *range(2, 9)), list(tokens)
        n = x.shape[-2]
        if not self.tokens or len(set(self.tokens)) < len(self.tokens) or not set(self.tokens) <= set(range(n)):
            raise InputError(f"tokens are {self.tokens}; expected different numbers from 0 to {n - 1}")
        self._source = torch.zeros(n, dtype=torch.long)
        self._source[self.tokens] = torch.arange(len(self.tokens))
        self._fixed = torch.ones(n, 1, dtype=torch.bool)
        self._fixed[self.tokens] = False

    def value(self, u: Array) -> Array:
        return self.push(u, u) + weight(self.x, u)

    def push(self, u: Array, a: Array) -> Array:
        return a[..., self._source.to(a.device), :].masked_fill(self._fixed.to(a.device), 0.0)

    def pull(self, u: Array, c: Array) -> Array:
        return c[..., self.tokens, :]

    def norm(self, a: Arithmetic[Array]) -> Array:
        return a.lift(self.x.new_ones(()))


def _patches(
    channels: int, size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """(n, channels p q) which entry of the flat image stands where in which patch; -1 for the zeros around it."""
    starts = [torch.arange(0, size[i] + 2 * padding[i] - kernel[i] + 1, stride[i]) - padding[i] for i in (0, 1)]
    if min(stride) < 1 or min(padding) < 0 or not all(map(len, starts)):
        raise InputError(f"kernel {kernel}, stride {stride}, padding {padding}: no patch of an image of size {size}")
    rows, columns = (starts[i][:, None] + torch.arange(kernel[i]) for i in (0, 1))  # (n₁, p), (n₂, q)
    inside = [(line >= 0) & (line < size[i]) for i, line in enumerate((rows, columns))]
    plane = rows[:, None, :, None] * size[1] + columns[None, :, None, :]  # (n₁, n₂, p, q)
    known = inside[0][:, None, :, None] & inside[1][None, :, None, :]
    planes = plane.unsqueeze(2) + torch.arange(channels)[:, None, None] * (size[0] * size[1])
    return torch.where(known.unsqueeze(2), planes, -1).flatten(2).flatten(0, 1)


@final
class PositionCodes(Layer):
    """A learned vector added to every token, by its place."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(0.02 * torch.randn(tokens, width))

    @property
    def gain(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        return x + self.codes

    def steepness(self) -> Steepness:
        return Steepness(self.gain, 0.0)

    def pieces(self) -> tuple[Piece, ...]:
        return (AddPositions(self.codes),)
