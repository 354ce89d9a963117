"""What rounding does to an expansion, against 150 digits: the counted defects are above the true errors."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer
from holdfast.compositions.telescoped.expansion import Expansion
from holdfast.layers import Affine, LayerNorm, Mlp, Piece, TokenMean
from holdfast.layers.attention.piece import Attention
from holdfast.network.network import Head, Network, Residual
from holdfast.testing.draw import Dice
from holdfast.testing.expansions import LocalCase

STEP = mpmath.mpf(10) ** -30  # of difference quotients: small beside all numbers here, and large beside 1e-150


@pytest.fixture(autouse=True)
def digits() -> Any:
    with mpmath.workdps(150):
        yield


def exact(x: Tensor) -> Any:
    """A tensor as an array of exact numbers."""
    return np.vectorize(mpmath.mpf, otypes=[object])(x.double().numpy())


def each(function: Any, x: Any) -> Any:
    return np.vectorize(function, otypes=[object])(x)


def value(piece: Piece, u: Any) -> Any:
    """The output (m, c) of a piece for u (n, d)."""
    if isinstance(piece, LayerNorm):
        x = u - u.sum(-1, keepdims=True) / u.shape[-1]
        s = each(mpmath.sqrt, (x * x).sum(-1, keepdims=True) / u.shape[-1] + mpmath.mpf(piece.kappa))
        return exact(piece.gamma) * x / s + exact(piece.beta)
    if isinstance(piece, Mlp):
        hidden = each(mpmath.tanh, u @ exact(piece.w1) + exact(piece.b1))
        return hidden @ exact(piece.w2) + exact(piece.b2) + mpmath.mpf(piece.residual) * u
    if isinstance(piece, Affine):
        return u @ exact(piece.w) + exact(piece.b)
    if isinstance(piece, TokenMean):
        return u.sum(0, keepdims=True) / len(u)
    assert isinstance(piece, Attention)
    out, layer = mpmath.mpf(piece.layer.residual) * u, piece.layer
    for q, k, v, o in zip(*(exact(getattr(layer, name)) for name in ("w_q", "w_k", "w_v", "w_o")), strict=True):
        weights = each(mpmath.exp, mpmath.mpf(layer.scale) * (u @ q) @ (u @ k).T)
        out = out + (weights / weights.sum(-1, keepdims=True)) @ (u @ v) @ o
    return out


def derivative(f: Any, G: Any, ways: tuple[int, ...]) -> Any:
    """A mixed derivative of f at G, by central differences."""
    if not ways:
        return f(G)
    ahead, behind = G.copy(), G.copy()
    ahead[ways[0]] += STEP
    behind[ways[0]] -= STEP
    return (derivative(f, ahead, ways[1:]) - derivative(f, behind, ways[1:])) / (2 * STEP)


def attention(dice: Dice, size: float, residual: float = 0.0) -> Attention:
    maps = [dice.normal(2, 3, 2) for _ in range(3)]
    return Attention(AttentionLayer(size * maps[0], maps[1], maps[2], dice.normal(2, 2, 3), residual=residual))


def perceptron(dice: Dice, residual: float = 0.0) -> Mlp:
    return Mlp(dice.normal(3, 4), dice.normal(4), "tanh", dice.normal(4, 3), dice.normal(3), residual=residual)


def layer_norm(dice: Dice, eps: float = 1e-12) -> LayerNorm:
    return LayerNorm(dice.normal(3), dice.normal(3), eps)


def ill_conditioned(name: str, dice: Dice) -> tuple[Piece, Tensor]:
    u = dice.normal(1, 2, 3)
    return {
        "centring cancels": lambda: (layer_norm(dice), u + 1e9),
        "one token's centring cancels": lambda: (layer_norm(dice), u + torch.tensor([[1e9], [0.0]]).double()),
        "tiny variance": lambda: (layer_norm(dice), 1e-9 * u + 3.0),
        "tokens of different size": lambda: (layer_norm(dice), u * torch.tensor([[1e-9], [1e9]]).double()),
        "scores of size 100": lambda: (attention(dice, 30.0, 1.0), 3 * u),
        "scores cancel": lambda: (attention(dice, 1.0), u + 1e5),
        "values cancel": lambda: (attention(dice, 1e-6), u + 1e5),
        "pre-activations cancel": lambda: (perceptron(dice, 1.0), u + 1e8),
        "plain perceptron": lambda: (perceptron(dice), u),
        "a residual that is no float32": lambda: (perceptron(dice, 0.7), u),
    }[name]()


CONDITIONS = (
    "centring cancels",
    "one token's centring cancels",
    "tiny variance",
    "tokens of different size",
    "scores of size 100",
    "scores cancel",
    "values cancel",
    "pre-activations cancel",
    "plain perceptron",
    "a residual that is no float32",
)


@pytest.mark.parametrize("name", CONDITIONS)
def test_errors_of_jets_are_within_the_defects(name: str) -> None:
    dice = Dice(CONDITIONS.index(name))
    piece, u = ill_conditioned(name, dice)
    size = float((u - u.mean(-1, keepdim=True)).norm()) if isinstance(piece, LayerNorm) else 1.0
    J, H = size * dice.normal(2, 1, 2, 3), size * dice.normal(3, 1, 2, 3)
    case = LocalCase(name, piece, u, J, H, torch.zeros(1, 2, 2, 2), 1.0)
    local, first, second = case.local()
    c = dice.normal(1, 1, *first.shape[-2:])
    with torch.no_grad():
        twist = case.directions.symmetric(local.twist(c))[0, 0]
    start, jets, bends = exact(u[0]), exact(J[:, 0]), exact(case.directions.full(H)[:, :, 0])

    def moved(G: Any) -> Any:
        return value(piece, start + np.tensordot(G, jets, 1) + np.tensordot(G, np.tensordot(G, bends, 1), 1) / 2)

    zero = exact(torch.zeros(2))
    for t, direction in enumerate([(0,), (1,)]):
        off = derivative(moved, zero, direction) - exact(first[t, 0])
        assert worst_token(off) <= float(local._error(1))
    for t, pair in enumerate([(0, 0), (0, 1), (1, 1)]):
        off = derivative(moved, zero, pair) - exact(second[t, 0])
        assert worst_token(off) <= float(local._error(2))
    for triple in ((0, 0, 0), (0, 1, 1)):
        off = (derivative(moved, zero, triple) * exact(c[0, 0])).sum() - mpmath.mpf(float(twist[triple]))
        assert abs(off) <= float(local._error(3) * torch.linalg.vector_norm(c, dim=-1).sum())


def worst_token(off: Any) -> float:
    return float(max(mpmath.sqrt(x) for x in (off * off).sum(-1)))


@pytest.mark.parametrize("far", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("eps", [1e-9, 1e-5, 1e-3])
def test_what_is_left_out_covers_rounding(far: float, eps: float) -> None:
    """At such radii the remainders are small beside rounding, most of all where the first norm cancels."""
    dice = Dice(3)
    network = Network(
        [
            layer_norm(dice, 1e-5),
            Residual((Affine(dice.normal(3, 3)), attention(dice, 1.0))),
            Residual((layer_norm(dice, 1e-5), perceptron(dice))),
            TokenMean(2),
        ],
        Head(dice.normal(2, 3), dice.normal(2)),
    )
    x = dice.normal(1, 2, 3) + far
    with torch.no_grad():
        at = Expansion(network, x)
        left_out = at.left_out(torch.full((1,), eps, dtype=torch.float64))[0]
    y = int(at.prediction)
    g, H, T = (exact(t[0, 1 - y]) for t in (at.gradient, at.hessian, at.twist))
    for seed in range(3):
        G = Dice(seed).normal(2, 3)
        G = exact(G * (eps / G.norm() * (1 - 1e-12)))
        z = exact(x[0]) + G
        for stage in network.stages:
            v = z
            for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
                v = value(piece, v)
            z = z + v if isinstance(stage, Residual) else v
        logits = z[0] @ exact(network.head.weight).T + exact(network.head.bias)
        flat = G.reshape(-1)
        bent, twisted = H @ flat, (T @ flat) @ flat
        polynomial = mpmath.mpf(float(at.margins[0, 1 - y])) + flat @ (g + bent / 2 + twisted / 6)
        below = polynomial - (logits[y] - logits[1 - y])
        assert below <= float(left_out[1 - y])
        assert float(left_out[1 - y]) < 1.0 or far > 1e6
