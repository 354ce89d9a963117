"""Layers drawn at random from everything a layer can be: the ordinary, the degenerate and the extreme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, get_args

import torch
from torch import Tensor

from holdfast.attention import HeadNorm
from holdfast.attention.head_norm import Kind
from holdfast.attention.rotary import Pairing
from holdfast.testing.layers import Case, changed, make_case, turning

T = TypeVar("T")

_MAPS = ("w_q", "w_k", "w_v", "w_o")


class Dice:
    """Seeded choices."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def pick(self, *choices: T) -> T:
        return choices[int(torch.randint(len(choices), (), generator=self._generator))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """Whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator)


def draw(seed: int) -> Case:
    """A layer with two inputs; the same for the same seed. Every third one is rounded to float32."""
    dice = Dice(seed)
    d, g = dice.pick(1, 2, 3, 5, 7), dice.pick(1, 1, 2)
    residual = dice.pick(0.0, 0.0, 1.0, 1.0, -0.5)
    sharpness = dice.pick(0.0, 1e-3, 0.1, 0.3, 1.0, 1.0, 1.0, 3.0, 10.0, 100.0, 1e4)
    size = dice.pick(1e-8, 1e-3, 0.1, 0.3, 1.0, 1.0, 1.0, 3.0, 30.0, 1e4)
    case = make_case(
        f"sharpness {sharpness:g}, size {size:g}",
        seed,
        n=dice.pick(1, 2, 2, 3, 4, 5, 8),
        d=d,
        k=dice.pick(1, 2, 3),
        h=g * dice.pick(1, 2, 3),
        g=g,
        d_out=d if residual else dice.pick(d, d, 1, 4),
        biases=dice.pick(False, True),
        mask=dice.pick(None, None, None, "shared", "each"),
        causal=dice.pick(False, False, False, True),
        scale=dice.pick(None, None, None, -0.7),
        residual=residual,
        sharpness=sharpness,
        size=size,
    )
    change = dice.pick(*_CHANGES, *(_as_it_is,) * len(_CHANGES))
    case = change(case, dice)
    name = f"{change.__name__.strip('_').replace('_', ' ')}, {case.name}"
    case = Case(name, case.layer, case.x)
    return dice.pick(case, case, case.float())


def plain(case: Case) -> Case:
    """The case without caps, sinks and norms of queries and keys, for which most bounds have no proof."""
    return replace(case, layer=case.layer.replace(soft_cap=None, sinks=None, q_norm=None, k_norm=None))


def _as_it_is(case: Case, dice: Dice) -> Case:
    return case


def _sink(case: Case, dice: Dice) -> Case:
    """Every query attends mostly to the first token: its bias points along that token's key."""
    layer, x = case.layer, case.x
    keys = (x[0, 0] @ layer.w_k).repeat_interleave(layer.h // layer.g, 0)
    return Case(case.name, changed(layer, b_q=4 * keys), torch.cat([x[:1, :1].expand(len(x), 1, -1), x[:, 1:]], 1))


def _equal_tokens(case: Case, dice: Dice) -> Case:
    return Case(case.name, case.layer, case.x[:, :1].expand_as(case.x).contiguous())


def _two_equal_tokens(case: Case, dice: Dice) -> Case:
    return Case(case.name, case.layer, torch.cat([case.x[:, -1:], case.x[:, 1:]], 1))


def _far_from_zero(case: Case, dice: Dice) -> Case:
    """The tokens differ little beside what they share."""
    return Case(case.name, case.layer, case.x + 100 * case.x.abs().max() * dice.normal(case.x.shape[-1]))


def _one_large_token(case: Case, dice: Dice) -> Case:
    return Case(case.name, case.layer, torch.cat([100 * case.x[:, :1], case.x[:, 1:]], 1))


def _zero_weights(case: Case, dice: Dice) -> Case:
    names = dice.pick(_MAPS, *((name,) for name in _MAPS))
    zeros = {name: torch.zeros_like(getattr(case.layer, name)) for name in names}
    return Case(case.name, changed(case.layer, **zeros), case.x)


def _rank_one_weights(case: Case, dice: Dice) -> Case:
    maps = {name: getattr(case.layer, name) for name in _MAPS}
    return Case(case.name, changed(case.layer, **{n: w[..., :1] @ w[..., :1, :] for n, w in maps.items()}), case.x)


def _unequal_heads(case: Case, dice: Dice) -> Case:
    """Heads of very different sharpness and weight."""
    layer = case.layer
    sharper, heavier = (torch.exp(2 * dice.normal(layer.h, 1, 1)) for _ in range(2))
    return Case(case.name, changed(layer, w_q=layer.w_q * sharper, w_o=layer.w_o * heavier), case.x)


def _scores_from_biases(case: Case, dice: Dice) -> Case:
    """The scores are linear in the tokens, and the heads disagree: some are flat, some peaked."""
    layer = case.layer
    b_q = dice.normal(layer.h, layer.k) * torch.exp(3 * dice.normal(layer.h, 1))
    heavier = torch.exp(2 * dice.normal(layer.h, 1, 1))
    return Case(case.name, changed(layer, w_q=0 * layer.w_q, b_q=b_q, w_o=layer.w_o * heavier), case.x)


def _score_bias(case: Case, dice: Dice) -> Case:
    """A constant is added to every score."""
    n = case.x.shape[-2]
    return Case(case.name, changed(case.layer, score_bias=2 * dice.normal(case.layer.h, n, n)), case.x)


def _rotary(case: Case, dice: Dice) -> Case:
    """Rotary positions: rotations of all entries or some, scaled ones, or any numbers; for all inputs or for each."""
    layer, (b, n, _) = case.layer, case.x.shape
    r = dice.pick(layer.k - layer.k % 2, 2) if layer.k > 1 else 0
    batch = dice.pick((), (), (b,))
    rotary = turning(3 * dice.normal(*batch, n, r // 2), dice.pick(*get_args(Pairing)))
    factor = dice.pick(1.0, 1.0, 1.3, 0.5)
    cos, sin = dice.pick(
        *((factor * rotary.cos, factor * rotary.sin),) * 3, (2 * dice.normal(*batch, n, r), rotary.sin)
    )
    return Case(case.name, layer.replace(rotary=replace(rotary, cos=cos, sin=sin)), case.x)


def _capped(case: Case, dice: Dice) -> Case:
    """A soft cap, sinks, or both."""
    cap, sinks = dice.pick((0.5, None), (3.0, None), (None, 1.0), (2.0, 3.0))
    return Case(
        case.name,
        case.layer.replace(soft_cap=cap, sinks=None if sinks is None else sinks * dice.normal(case.layer.h)),
        case.x,
    )


def _normed(case: Case, dice: Dice) -> Case:
    """Normalised queries or keys or both, of each head or of all together, before or after positions turn them."""
    layer = dice.pick(case, _rotary(case, dice)).layer
    kind, across, after = dice.pick(*get_args(Kind)), dice.pick(False, True), dice.pick(False, True)

    def norm(heads: int) -> HeadNorm:
        shape = (heads, layer.k) if across else dice.pick((layer.k,), (heads, layer.k))
        bias = dice.pick(None, dice.normal(*shape))
        return HeadNorm(dice.normal(*shape), bias, dice.pick(1e-6, 0.1), kind, across, after)

    query, key = norm(layer.h), norm(layer.g)
    one = dice.pick(None, None, None, "q", "k")
    return Case(
        case.name, layer.replace(q_norm=None if one == "k" else query, k_norm=None if one == "q" else key), case.x
    )


def _tiny_values(case: Case, dice: Dice) -> Case:
    return Case(case.name, changed(case.layer, w_v=case.layer.w_v * 1e-9), case.x)


def _huge_values(case: Case, dice: Dice) -> Case:
    return Case(case.name, changed(case.layer, w_o=case.layer.w_o * 1e9), case.x)


_CHANGES: tuple[Callable[[Case, Dice], Case], ...] = (
    _sink,
    _equal_tokens,
    _two_equal_tokens,
    _far_from_zero,
    _one_large_token,
    _zero_weights,
    _rank_one_weights,
    _unequal_heads,
    _scores_from_biases,
    _score_bias,
    _rotary,
    _rotary,
    _rotary,
    _capped,
    _normed,
    _normed,
    _tiny_values,
    _huge_values,
)
