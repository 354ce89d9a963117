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


def test_worst_case_of_tiny_values_and_of_masked_keys() -> None:
    # At best the first key outweighs the second, while all that is left of both is e^-300 of the largest weight.
    scores, apart = torch.tensor([[-300.0, 0.0]]).double(), torch.tensor([[200.0, 200.0]]).double()
    values = torch.tensor([[1.0], [0.5]], dtype=torch.float64) * 2.0**-800
    assert 1.0 <= float(largest_means(scores, apart, values)) * 2.0**800 <= 1 + 1e-9
    scores, values = torch.tensor([[-torch.inf, 0.0, 0.0]]).double(), torch.tensor([[9.0], [1.0], [0.5]]).double()
    assert 1.0 <= float(largest_means(scores, torch.full((1, 3), 1e4).double(), values)) <= 1 + 1e-9


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
    same = torch.full((4, 4), 3.0, dtype=torch.float64)
    assert bits is None or bool((rule.error(same) <= 1e-12).all())  # stored exactly
    for tiny in (1e-300, 1e-308, 1e-320):
        assert bool(((rule(tiny * x) - tiny * x).abs() <= rule.error(tiny * x)).all())


@pytest.mark.parametrize("off", [2.0**-25, 2.0**-30])
@pytest.mark.parametrize("ulps", [0.5, 1.5, 3.5, 6.5, 7.5, 8.5])
def test_fp8_of_what_float32_rounds_to_a_tie(ulps: float, off: float) -> None:
    near = 2.0**-9 * ulps * torch.tensor([1 - off, 1 + off], dtype=torch.float64)
    x = torch.cat([near, torch.tensor([448.0], dtype=torch.float64)]).unsqueeze(0)
    rule = Quantiser(None)
    assert bool(((rule(x) - x).abs() <= rule.error(x)).all())


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
    assert bool((r.value <= r.norms).all())
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


@pytest.mark.parametrize("name", CASES)
def test_norms(name: str) -> None:
    layer, x = CASES[name].layer, CASES[name].x
    parts, repeats = layer.run(x), layer.h // layer.g
    shared = [t[..., ::repeats, :, :] for t in (parts.k, parts.v)]
    errors = [0.01 * normal(*t.shape, seed=i).abs() for i, t in enumerate(shared)]
    r = holdfast.cache_error(layer, x, *errors, attack=False)
    k_error, v_error = (t.repeat_interleave(repeats, -3) for t in errors)
    reach = parts.q.abs() @ k_error.mT * layer.scale
    allowed = layer.allowed(x.shape[-2])
    if allowed is not None:
        reach = reach.masked_fill(~allowed.unsqueeze(-3), 0.0)
        reach = reach * (allowed.sum(-1, keepdim=True) > 1).unsqueeze(-3)
    y, p = parts.y, layer.whole_rows(parts.p)
    values = parts.v if layer.sinks is None else torch.nn.functional.pad(parts.v, (0, 0, 0, 1))
    spread = (p * (y.unsqueeze(-2) - values.unsqueeze(-3)).norm(dim=-1)).sum(-1)
    moved = (2 * reach.amax(-1)).expm1() * spread + v_error.norm(dim=-1).amax(-1, keepdim=True)
    torch.testing.assert_close(r.norms, (moved * torch.linalg.matrix_norm(layer.w_o, 2).unsqueeze(-1)).sum(-2))


@pytest.mark.parametrize(("of_values", "of_map"), [(1e-162, 1.0), (1e-300, 1.0), (1e-200, 1e-90), (1e200, 1e60)])
def test_lengths_whose_squares_underflow_or_overflow(of_values: float, of_map: float) -> None:
    layer, x = CASES["masked"].layer, CASES["masked"].x
    assert layer.b_v is not None
    layer = layer.replace(w_v=of_values * layer.w_v, b_v=of_values * layer.b_v, w_o=of_map * layer.w_o)
    # With all values 10 % larger, the output is.
    r = holdfast.cache_error(layer, x, values=0.1 * layer.run(x).v.abs(), attack=False)
    assert bool((r.value >= 0.1 * r.size * (1 - 1e-6)).all())
    assert bool((r.value <= r.size).all())


def test_small_bounds_of_large_values() -> None:
    layer = make_case("", n=3, d=4, k=2, causal=True).layer
    r = holdfast.cache_error(
        layer, normal(3, 4), values=torch.full((layer.g, 3, 2), 1e-200, dtype=torch.float64), attack=False
    )
    moved = 1e-200 * layer.w_o.sum((0, 1)).norm()  # where every value is larger by its bound
    assert bool((r.value >= moved).all())
    assert float(r.value[0]) <= 1e-100  # the first token sees itself alone


@pytest.mark.parametrize("name", ["rotary, grouped", "normed"])
def test_keys_do_not_matter_where_there_is_one(name: str) -> None:
    r = holdfast.cache_error(CASES[name].layer, 100 * CASES[name].x, "int4", attack=False)
    assert bool((r.value[..., 0] <= 1e-100).all())
    assert bool((r.value[..., 1:] > 1e-100).all())


@pytest.mark.parametrize("size", [1e-310, 30.0, 1e5, 1e100, 1e200, 1e300])
@pytest.mark.parametrize("name", CASES)
def test_no_result_is_not_a_number(name: str, size: float) -> None:
    layer, x = CASES[name].layer, CASES[name].x
    for r in (holdfast.cache_error(layer, size * x, "int2", "int4"), _with_bounds(layer, x, size)):
        assert not any(bool(t.isnan().any()) for t in (r.value, r.heads, r.norms, r.lower, r.size))
        assert bool((r.value <= r.norms).all())


def test_a_score_that_overflows_is_not_masked() -> None:
    """Within its bound the second key falls below the first, whose score is no float64 number."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    low = -torch.finfo(torch.float64).max
    layer = holdfast.AttentionLayer(
        w_q=torch.zeros(1, 2, 1, dtype=torch.float64),
        w_k=torch.tensor([[[1.0], [0.0]]], dtype=torch.float64),
        w_v=torch.tensor([[[0.0], [1.0]]], dtype=torch.float64),
        w_o=one,
        b_q=one[0],
        scale=1.0,
        score_bias=torch.tensor([[low, -1.7e308]] * 2, dtype=torch.float64),
    )
    x = torch.tensor([[-1e300, 1.0], [0.0, -1.0]], dtype=torch.float64)
    r = holdfast.cache_error(layer, x, keys=torch.tensor([[[0.0], [1e308]]], dtype=torch.float64), attack=False)
    assert bool((r.value >= 2).all())


def _with_bounds(layer: holdfast.AttentionLayer, x: Tensor, size: float) -> holdfast.CacheError:
    parts, repeats = layer.run(x), layer.h // layer.g
    return holdfast.cache_error(layer, x, *(torch.full_like(t[:, ::repeats], size) for t in (parts.k, parts.v)))


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
    with pytest.raises(InputError, match=">= 0 and finite"):
        holdfast.cache_error(case.layer, case.x, keys=torch.full((2, 2, 5, 3), torch.inf))
    with pytest.raises(InputError, match="token is 7; x has 5 tokens"):
        holdfast.cache_error(case.layer, case.x, keys="int4", token=7)
    with pytest.raises(InputError, match="bits is 0; expected 1 to 16"):
        Quantiser(0)
    with pytest.raises(InputError, match="tolerance is 0"):
        cache_bits({"layer": (case.layer, case.x)}, 0)
