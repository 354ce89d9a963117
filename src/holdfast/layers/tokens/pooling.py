"""From tokens to one vector: the mean, one token, or all of them in a row."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.layers.module import Layer
from holdfast.layers.piece import LinearPiece, Piece
from holdfast.layers.steepness import Steepness
from holdfast.layers.tokens.rows import Rows
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic


@final
class TokenMean(LinearPiece):
    """The mean of the tokens, (…, n, d) to (…, 1, d); of n - k of them its norm is 1/√(n - k).

    Args:
        tokens: n.
        skip: k, the tokens at the front that are left out.
    """

    kind = "MeanPool"
    pools = True

    def __init__(self, tokens: int, skip: int = 0) -> None:
        if not 0 <= skip < tokens:
            raise InputError(f"{tokens} tokens of which {skip} are skipped; expected at least one that counts")
        self.tokens, self.skip = tokens, skip

    def rows_behind(self, rows: Rows, n: int) -> Rows:
        return torch.arange(self.skip, n)

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        return (TokenMean(len(rows)),)

    def value(self, u: Array) -> Array:
        if u.shape[-2] != self.tokens:
            raise InputError(f"the input has {u.shape[-2]} tokens; this mean was made for {self.tokens}")
        return u[..., self.skip :, :].sum(-2, keepdim=True) / float(self.tokens - self.skip)

    def push(self, u: Array, a: Array) -> Array:
        return self.value(a)

    def pull(self, u: Array, c: Array) -> Array:
        return _spread(c / float(self.tokens - self.skip), self.tokens, slice(self.skip, self.tokens))

    def norm(self, a: Arithmetic[Array]) -> Array:
        return (_one(a) / float(self.tokens - self.skip)).sqrt()


@final
class MeanPool(Layer):
    """The mean of the tokens: (b, n, d) to (b, 1, d).

    Args:
        tokens: n.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    @property
    def gain(self) -> float:
        return 1 / math.sqrt(self.tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (b, n, d)."""
        return x.mean(1, keepdim=True)

    def steepness(self) -> Steepness:
        return Steepness(self.gain, 0.0)

    def pieces(self) -> tuple[Piece, ...]:
        return (TokenMean(self.tokens),)


@final
class ClassToken(LinearPiece):
    """One of the tokens, (…, n, d) to (…, 1, d).

    Args:
        index: which one.
    """

    pools = True

    def __init__(self, index: int = 0) -> None:
        if index < 0:
            raise InputError(f"index is {index}; expected the number of a token, from 0 on")
        self.index = index

    def rows_behind(self, rows: Rows, n: int) -> Rows:
        return torch.tensor([self.index])

    def on_rows(self, rows: Rows, needed: Rows) -> tuple[Piece, ...]:
        return ()  # no other token enters

    def value(self, u: Array) -> Array:
        if self.index >= u.shape[-2]:
            raise InputError(f"the input has {u.shape[-2]} tokens; there is no token {self.index} to choose")
        return u[..., self.index : self.index + 1, :]

    def push(self, u: Array, a: Array) -> Array:
        return self.value(a)

    def pull(self, u: Array, c: Array) -> Array:
        return _spread(c, u.shape[-2], slice(self.index, self.index + 1))

    def norm(self, a: Arithmetic[Array]) -> Array:
        return _one(a)


@final
class Flatten(LinearPiece):
    """All tokens in a row, (…, n, d) to (…, 1, n d)."""

    def value(self, u: Array) -> Array:
        return u.reshape(*u.shape[:-2], 1, u.shape[-2] * u.shape[-1])

    def push(self, u: Array, a: Array) -> Array:
        return self.value(a)

    def pull(self, u: Array, c: Array) -> Array:
        return c.reshape(*c.shape[:-2], *u.shape[-2:])

    def norm(self, a: Arithmetic[Array]) -> Array:
        return _one(a)


def _spread(c: Array, tokens: int, chosen: slice) -> Array:
    """C (…, 1, d) at the chosen tokens, and zero at the others."""
    others = torch.ones(tokens, 1, dtype=torch.bool, device=c.device)
    others[chosen] = False
    return c.expand(*c.shape[:-2], tokens, c.shape[-1]).masked_fill(others, 0.0)


def _one(a: Arithmetic[Array]) -> Array:
    return a.lift(torch.ones((), dtype=torch.float64))
