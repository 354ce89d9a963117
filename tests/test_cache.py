"""A cache in few bits: quantisers keep their rule, bounds hold for every cache, the worst case is a vertex."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import InputError
from holdfast.attention import HeadNorm
from holdfast.cache import Quantiser, cache_bits
from holdfast.cache.worst_case import largest_means
from holdfast.testing import Case, make_case
from holdfast.testing.draw import draw

CASES = {
    "rotary, grouped": make_case("", n=6, d=8, k=4, h=4, g=2, biases=True, causal=True, rotary=4),
    "masked": make_case("", n=5, d=6, k=3, h=2, mask="each", biases=True),
    "capped, sinks": make_case("", n=5, d=6, k=4, h=2, biases=True),
    "normed": make_case("", n=4, d=6, k=4, h=2, causal=True, rotary=2),
}
CASES["capped, sinks"] = Case(
    "", CASES["capped, sinks"].layer.replace(soft_cap=2.0, sinks=torch.tensor([0.5, -1.0]).double()), CASES["masked"].x
)
WEIGHT = torch.linspace(0.5, 2, 4, dtype=torch.float64)
NORMED = CASES["normed"].layer.replace(q_norm=HeadNorm(WEIGHT), k_norm=HeadNorm(WEIGHT))
CASES["normed"] = Case("", NORMED, CASES["normed"].x)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_worst_case_is_the_best_of_all_vertices() -> None:
    scores, apart, values = normal(3, 5), normal(3, 5, seed=1).abs(), normal(5, 2, seed=2)
    scores[0, 3] = -torch.inf
    corners = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=5)), dtype=torch.float64)
    at = (scores + corners[:, None] * apart).softmax(-1) @ values
    found = largest_means(scores, apart, values)
    torch.testing.assert_close(found, at.amax(0))
    assert bool((found >= at.amax(0)).all())
    wide = largest_means(scores, apart * 1e4, values)  # all weights of a cut may underflow
    assert bool((wide >= at.amax(0)).all())
    assert bool(torch.isfinite(wide).all())


@pytest.mark.parametrize("per", ["channel", "token"])
@pytest.mark.parametrize("bits", [2, 4, 8, None])
def test_quantisers_keep_their_rule(bits: int | None, per: str) -> None:
    x = normal(3, 7, 5) * torch.logspace(-3, 3, 5, dtype=torch.float64)
    x[0, 2] = x[0, 2, 0]  # a constant token
    rule = Quantiser(bits, per)  # type: ignore[arg-type]
    read = rule(x)
    assert bool(((read - x).abs() <= rule.error(x)).all())
    if bits is not None:
        dim = -2 if per == "channel" else -1
        step = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / (2**bits - 1)
        levels = ((read - x.amin(dim, keepdim=True)) / step).nan_to_num(nan=0.0)
        torch.testing.assert_close(levels, levels.round(), atol=1e-6, rtol=0)
        assert bool(((rule(read) - read).abs() <= 1e-9 * x.abs().max()).all())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("keys", "values"), [("int8", "int8"), ("int4", "int2"), ("fp8", None), (None, "int4/channel")]
)
def test_bounds_hold_for_random_caches(name: str, keys: str | None, values: str | None) -> None:
    case = CASES[name]
    layer, x = case.layer, case.x
    r = holdfast.cache_error(layer, x, keys, values)
    assert r.moved is not None
    assert bool((r.moved <= r.value).all() and (r.lower <= r.value).all())
    assert bool((r.heads.sum(-2) >= r.value * (1 - 1e-9)).all())
    parts, repeats = layer.run(x), layer.h // layer.g
    K, V = parts.k[..., ::repeats, :, :], parts.v[..., ::repeats, :, :]
    k_error, v_error = (_errors(how, t, per) for how, t, per in ((keys, K, "channel"), (values, V, "token")))
    for seed in range(20):
        signs = [normal(*t.shape, seed=2 * seed + i).sign() for i, t in enumerate((K, V))]
        there = _attend(layer, parts.q, K + k_error * signs[0], V + v_error * signs[1])
        moved = there - _attend(layer, parts.q, K, V)
        assert bool((moved.sum(-3).norm(dim=-1) <= r.value * (1 + 1e-9) + 1e-12).all())
        assert bool((moved.norm(dim=-1) <= r.heads * (1 + 1e-9) + 1e-12).all())


def _errors(how: str | None, exact: Tensor, per: str) -> Tensor:
    if how is None:
        return torch.zeros_like(exact)
    kind, _, shared = how.partition("/")
    bits = None if kind == "fp8" else int(kind[3:])
    return Quantiser(bits, shared or per).error(exact)  # type: ignore[arg-type]


def _attend(layer: holdfast.AttentionLayer, q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """(b, h, n, d_out) what each head writes."""
    repeats = layer.h // layer.g
    K, V = (t.repeat_interleave(repeats, -3) for t in (K, V))
    return layer.probabilities(q @ K.mT * layer.scale) @ V @ layer.w_o


@pytest.mark.parametrize("seed", range(40))
def test_drawn_layers(seed: int) -> None:
    case = draw(seed)
    layer, x = case.layer, case.x
    k_v = layer.w_v.shape[-1]
    bounds = [normal(len(x), layer.g, x.shape[-2], k, seed=seed).abs() for k in (layer.k, k_v)]
    r = holdfast.cache_error(layer, x, *bounds, seed=seed)
    assert r.moved is None
    assert bool(torch.isfinite(r.value).all())
    assert bool((r.lower <= r.value).all())
    assert r.value.shape == x.shape[:-1]


def test_exact_cache_moves_nothing_and_one_value_alone_is_exact() -> None:
    case = CASES["rotary, grouped"]
    r = holdfast.cache_error(case.layer, case.x)
    assert bool((r.value <= 1e-9 * r.size).all())
    # The first token sees itself alone, so that keys do not matter and its value's error goes through the output map.
    error = torch.zeros(2, 2, 6, 4, dtype=torch.float64)
    error[:, 0, 0, 1] = 0.25
    r = holdfast.cache_error(case.layer, case.x, values=error)
    expected = 0.25 * case.layer.w_o[:2, 1].sum(0).norm()
    torch.testing.assert_close(r.lower[:, 0], expected.expand(2))
    assert bool((r.value[:, 0] <= 0.25 * case.layer.w_o[:2, 1].norm(dim=-1).sum() * (1 + 1e-6)).all())


def test_the_attack_of_one_token_is_close_to_its_bound() -> None:
    case = CASES["rotary, grouped"]
    r = holdfast.cache_error(case.layer, case.x, "int8", "int8", token=-1)
    assert bool((r.value[:, -1] <= 3 * r.lower[:, -1]).all())


def test_bits_for_a_tolerance() -> None:
    case = CASES["rotary, grouped"]
    table = cache_bits({"layer": (case.layer, case.x)}, tolerance=0.2, bits=(2, 4, 8, 12))
    (row,) = table.layers
    assert row.proved is not None
    assert row.actual is not None
    assert row.actual <= row.proved
    assert row.movement[row.proved][2] <= 0.2
    assert all(bits is not None and bits <= row.proved for bits in row.heads)
    assert "proved" in str(table)
    hard = cache_bits({"layer": (case.layer, case.x)}, tolerance=1e-6, bits=(2,))
    assert "more" in str(hard)


def test_errors() -> None:
    case = CASES["masked"]
    with pytest.raises(InputError, match="'int' is not a quantiser"):
        holdfast.cache_error(case.layer, case.x, keys="int")
    with pytest.raises(InputError, match=r"keys has shape \(2,\); expected bounds of every entry, \(2, 2, 5, 3\)"):
        holdfast.cache_error(case.layer, case.x, keys=torch.zeros(2))
    with pytest.raises(InputError, match="token is 7; x has 5 tokens"):
        holdfast.cache_error(case.layer, case.x, keys="int4", token=7)
    with pytest.raises(InputError, match="bits is 0; expected 1 to 16"):
        Quantiser(0)
    with pytest.raises(InputError, match="tolerance is 0"):
        cache_bits({"layer": (case.layer, case.x)}, 0)
