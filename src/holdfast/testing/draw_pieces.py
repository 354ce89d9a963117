"""Pieces of networks drawn at random, of every kind: ordinary ones, and flat, spiky, tiny and large ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from holdfast.layers import (
    AddPositions,
    Affine,
    ClassToken,
    Flatten,
    HardProject,
    KinkedBeside,
    KinkedEntries,
    KinkedMlp,
    LayerNorm,
    LinearBeside,
    Mlp,
    Normalise,
    PairSort,
    PatchEmbedding,
    Piece,
    Place,
    Product,
    Rearrangement,
    RMSNorm,
    Scale,
    Selection,
    SmoothBeside,
    SmoothEntries,
    SmoothProject,
    TokenMean,
    WeightedSelection,
    WindowMax,
    sll,
    sll_diagonal,
)
from holdfast.layers.activation.functions import LeakyRelu, Softplus, activations
from holdfast.layers.beside import Part, beside
from holdfast.testing.draw import Dice
from holdfast.testing.pieces import PieceCase

_SMOOTH = ("gelu", "gelu-tanh", "silu", "tanh", "softplus", "centred-softplus")


def _gamma(dice: Dice, d: int) -> Tensor:
    """Factors of a norm: equal, of one size, or very different from each other."""
    return dice.pick(torch.ones(d).double(), dice.normal(d), torch.exp(2 * dice.normal(d)))


def _eps(dice: Dice) -> float:
    return dice.pick(1e-12, 1e-6, 1e-5, 0.1, 3.0)


def _weights(dice: Dice, size: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d, units = dice.pick(1, 2, 3, 4), dice.pick(1, 3, 6)
    w1, w2 = dice.normal(d, units), dice.normal(units, d)
    if dice.pick(False, False, True):  # units of very different weight, some of them dead
        w1, w2 = w1 * torch.exp(2 * dice.normal(units)), w2 * dice.normal(units, 1).clamp(min=0)
    return w1 * size, dice.normal(units) * dice.pick(0.0, 1.0, 5.0), w2 * dice.pick(0.1, 1.0, 10.0), dice.normal(d)


def _mlp(dice: Dice, size: float) -> tuple[Piece, int]:
    w1, b1, w2, b2 = _weights(dice, size)
    phi = dice.pick(*(activations[name] for name in _SMOOTH), Softplus(0.2), Softplus(10.0, centred=True))
    if dice.pick(False, False, True):
        return _sll(dice, w1, b1, dice.pick("tanh", "softplus", "centred-softplus")), len(w1)
    return Mlp(w1, b1, phi, w2, b2, residual=dice.pick(0.0, 1.0, -0.5)), len(w1)


def _kinked_mlp(dice: Dice, size: float) -> tuple[Piece, int]:
    w1, b1, w2, b2 = _weights(dice, size)
    if dice.pick(False, False, True):
        return _sll(dice, w1, b1, "relu"), len(w1)
    phi = dice.pick(activations["relu"], activations["abs"], LeakyRelu(0.1), LeakyRelu(-0.5))
    return KinkedMlp(w1, b1, phi, w2, b2, residual=dice.pick(0.0, 1.0)), len(w1)


def _sll(dice: Dice, w: Tensor, b: Tensor, phi: str) -> Piece:
    diagonal = sll_diagonal(w, torch.exp(dice.normal(w.shape[-1]))) * dice.pick(1.0, 1.0, 0.7)
    return sll(w, b, diagonal, activations[phi])


def _patches(dice: Dice, size: float) -> tuple[Piece, Tensor]:
    channels, p, q = dice.pick(1, 2), dice.pick(1, 2), dice.pick(1, 2)
    height, width = dice.pick(2, 3, 4), dice.pick(2, 4)
    stride, padding = dice.pick(None, (1, 1), (2, 1)), dice.pick((0, 0), (0, 0), (1, 0))
    w, front = size * dice.normal(3, channels, p, q), dice.pick(None, dice.normal(1, 3))
    piece = PatchEmbedding(w, dice.pick(None, dice.normal(3)), (height, width), stride, padding, front)
    return piece, dice.normal(2, channels, height * width)


def _selection(dice: Dice, size: float, n: int, d: int) -> Piece:
    """Entries in any places, some of them twice, some left out."""
    return Selection(dice.integers(-1, n * d, (dice.pick(1, 3), dice.pick(2, 5))), (n, d))


def _weighted_selection(dice: Dice, size: float, n: int, d: int) -> Piece:
    """The same, each with a weight."""
    index = dice.integers(-1, n * d, (dice.pick(1, 3), dice.pick(2, 5)))
    return WeightedSelection(index, size * dice.normal(*index.shape), (n, d))


def _windows(dice: Dice, size: float, n: int, d: int) -> Piece:
    """Windows of any entries, which overlap, or of neighbours, which do not."""
    if dice.pick(False, True):
        return WindowMax(torch.arange(n * d).reshape(n, d // 2, 2), (n, d))
    index = dice.integers(-1, n * d, (dice.pick(1, 3), dice.pick(1, 2), dice.pick(2, 4)))
    index[..., 0] = index[..., 0].clamp(min=0)
    return WindowMax(index, (n, d))


def _entries(dice: Dice, names: tuple[str, ...], d: int) -> Piece:
    active = torch.arange(d) % dice.pick(1, 2) == 0
    phi = activations[dice.pick(*names)]
    return (SmoothEntries if names is _SMOOTH else KinkedEntries)(phi, active)  # type: ignore[arg-type]


def _part(kind: type[Piece]) -> Callable[[Dice, float], tuple[Piece, Tensor]]:
    """A piece on a part of a state, whose entries wait or are taken, or both."""

    def build(dice: Dice, size: float) -> tuple[Piece, Tensor]:
        piece, u = KINDS[kind](dice, size)
        taken, out = u[0].numel(), piece.value(u).shape[-2:]
        state = taken + dice.pick(1, 3)
        waiting = torch.arange(dice.pick(0, 1, taken), state)
        where = torch.arange(taken) if dice.pick(False, True) else dice.integers(0, state, (taken,))
        part = Part(where.reshape(u.shape[1:]), waiting, (out[0], out[1]), state)
        return beside(piece, part), dice.normal(2, 1, state)

    return build


def _on_tokens(make: Callable[[Dice, float, int, int], Piece]) -> Callable[[Dice, float], tuple[Piece, Tensor]]:
    """A piece that takes any tokens: made for n of width d."""

    def build(dice: Dice, size: float) -> tuple[Piece, Tensor]:
        n, d = dice.pick(1, 2, 3), dice.pick(2, 4, 6)
        return make(dice, size, n, d), dice.normal(2, n, d)

    return build


def _of_width(make: Callable[[Dice, float], tuple[Piece, int]]) -> Callable[[Dice, float], tuple[Piece, Tensor]]:
    """A piece that says which width it takes."""

    def build(dice: Dice, size: float) -> tuple[Piece, Tensor]:
        piece, d = make(dice, size)
        return piece, dice.normal(2, dice.pick(1, 2, 3), d)

    return build


#: How a piece of each kind is drawn, with inputs (2, n, d); the number is the size of its weights.
KINDS: Mapping[type[Piece], Callable[[Dice, float], tuple[Piece, Tensor]]] = MappingProxyType(
    {
        AddPositions: _on_tokens(lambda dice, size, n, d: AddPositions(size * dice.normal(n, d))),
        Affine: _on_tokens(lambda dice, size, n, d: Affine(size * dice.normal(d, 3), dice.pick(None, dice.normal(3)))),
        ClassToken: _on_tokens(lambda dice, size, n, d: ClassToken(n - 1)),
        Flatten: _on_tokens(lambda dice, size, n, d: Flatten()),
        HardProject: _on_tokens(lambda dice, size, n, d: HardProject(size)),
        KinkedBeside: _part(KinkedMlp),
        KinkedEntries: _on_tokens(lambda dice, size, n, d: _entries(dice, ("relu", "abs"), d)),
        KinkedMlp: _of_width(_kinked_mlp),
        LayerNorm: _on_tokens(lambda dice, size, n, d: LayerNorm(size * _gamma(dice, d), dice.normal(d), _eps(dice))),
        LinearBeside: _part(Affine),
        PairSort: _on_tokens(lambda dice, size, n, d: PairSort()),
        TokenMean: _on_tokens(lambda dice, size, n, d: TokenMean(n, dice.pick(0, n - 1))),
        Mlp: _of_width(_mlp),
        Normalise: _on_tokens(
            lambda dice, size, n, d: Normalise(dice.normal(n).tolist(), (size * torch.exp(dice.normal(n))).tolist())
        ),
        PatchEmbedding: _patches,
        Place: _on_tokens(lambda dice, size, n, d: Place(size * dice.normal(n + 2, d), range(1, n + 1))),
        Product: _on_tokens(lambda dice, size, n, d: Product()),
        Rearrangement: _on_tokens(
            lambda dice, size, n, d: Rearrangement(torch.arange(n * d).flip(0).reshape(d, n), (n, d))
        ),
        RMSNorm: _on_tokens(lambda dice, size, n, d: RMSNorm(size * _gamma(dice, d), _eps(dice))),
        Scale: _on_tokens(lambda dice, size, n, d: Scale(size * dice.pick(dice.normal(n, d), dice.normal(d)))),
        Selection: _on_tokens(_selection),
        SmoothBeside: _part(Mlp),
        SmoothEntries: _on_tokens(lambda dice, size, n, d: _entries(dice, _SMOOTH, d)),
        SmoothProject: _on_tokens(lambda dice, size, n, d: SmoothProject(size)),
        WeightedSelection: _on_tokens(_weighted_selection),
        WindowMax: _on_tokens(_windows),
    }
)


def draw_piece(kind: type[Piece], seed: int, *, extreme: bool = True) -> PieceCase:
    """A piece of one kind with two inputs; the same for the same seed."""
    dice = Dice(seed)
    size = dice.pick(1e-4, 0.1, 1.0, 1.0, 3.0, 100.0) if extreme else dice.pick(0.3, 1.0, 3.0)
    piece, u = KINDS[kind](dice, size)
    scale = dice.pick(0.0, 1e-6, 0.1, 1.0, 1.0, 10.0, 1e3) if extreme else dice.pick(0.3, 1.0, 3.0)
    shape = dice.pick("", "flat", "spiky") if extreme else ""
    if shape == "flat":  # nearly the same in every channel
        u = u[..., :1] + 1e-3 * u
    if shape == "spiky":  # one channel far above the others
        u = torch.cat([30 * u[..., :1], u[..., 1:]], -1)
    words = [kind.__name__, f"weights {size:g}", f"input {scale:g}", shape]
    return PieceCase(", ".join(word for word in words if word), piece, scale * u)
