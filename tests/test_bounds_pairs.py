"""`pairs`: attacked, compared with the Jacobian's norm, and caught where a part of the bound is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer
from holdfast.bounds import bounds, pairs, rows
from holdfast.layers.attention.piece import Attention
from holdfast.linalg.arithmetic import Numerical, Proved
from holdfast.linalg.certified import gram_upper
from holdfast.testing.draw import Dice, draw, plain
from holdfast.testing.layers import Case, make_case

RADII = (1e-6, 1e-3, 0.03, 0.3, 1.0, 3.0)


def two_keys(seed: int, *, n: int = 6, d: int = 8, h: int = 2, weight: float = 1.0, row: float = 1.0) -> Case:
    """Orthogonal maps, and rows between a token and one neighbour."""
    dice = Dice(seed)

    def square(size: float) -> Tensor:
        return size * torch.linalg.qr(dice.normal(d, d)).Q

    q, k, v = (square(size).reshape(d, h, d // h).movedim(1, 0) for size in (weight, weight, 1.0))
    places = torch.eye(n, dtype=torch.float64)
    bias = torch.stack([8 * (places + places.roll(1 + shift, 1)) for shift in range(h)])
    layer = AttentionLayer(q, k, v, square(1.0).reshape(h, d // h, d), score_bias=bias)
    x = dice.normal(2, n, d)
    return Case("two keys", layer, x * (row / torch.linalg.vector_norm(x, dim=-1, keepdim=True)))


def chosen(case: Case, *, proved: bool = True) -> pairs._ChosenPairs:
    a, layer, x = Proved() if proved else Numerical(), case.layer.double(), case.x.double()
    return pairs._chosen(a, layer, x, rows.at_point(a, layer, x))  # type: ignore[arg-type]


def alone(case: Case, radii: tuple[float, ...] = RADII, *, proved: bool = True) -> Tensor:
    """The bound without `rows`."""
    eps = torch.tensor(radii, dtype=torch.float64).expand(len(case.x), -1)
    return chosen(case, proved=proved).gain(eps) * eps


def attained(case: Case, radii: tuple[float, ...] = RADII) -> Tensor:
    """What an ascent reaches; its perturbations are float32, and may be longer than the radius by their rounding."""
    return holdfast.attack(case.layer, case.x, list(radii), restarts=2, steps=20).lower * (1 - 1e-7)


# -- attacks


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(s, marks=pytest.mark.slow) for s in range(5, 300))])
def test_no_attack_moves_a_random_layer_farther(seed: int) -> None:
    case = plain(draw(seed))
    reached = attained(case)
    assert bool((holdfast.bound(case.layer, case.x, RADII, method="pairs").value >= reached).all())
    if case.x.shape[-2] > 1:  # one token has no pairs
        for proved in (True, False):
            assert bool((alone(case, proved=proved) >= reached).all())


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
@pytest.mark.parametrize("weight", [0.3, 1.5, 4.0])
@pytest.mark.parametrize("row", [0.3, 3.0])
def test_no_attack_moves_rows_of_two_keys_farther(seed: int, weight: float, row: float) -> None:
    case = two_keys(seed, weight=weight, row=row)
    assert bool((alone(case) >= attained(case)).all())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("residual", [0.0, 1.0, -0.5])
def test_no_attack_moves_a_masked_layer_farther(causal: bool, residual: float) -> None:
    case = make_case("masked", 3, n=5, d=6, k=2, h=3, sharpness=2.0, size=1.5)
    tensors = case.layer._tensors()
    layer = AttentionLayer(**tensors, scale=case.layer.scale, causal=causal, residual=residual)
    masked = Case("masked", layer, case.x)
    assert bool((alone(masked) >= attained(masked)).all())


# -- every part is needed


def forgotten(part: str) -> Callable[[pairs._ChosenPairs], pairs._ChosenPairs]:
    def without(one: pairs._ChosenPairs) -> pairs._ChosenPairs:
        if part == "values":
            return replace(one, mu=one.mu * 0)
        if part == "pairs":
            return replace(one, gram=one.gram * 0, lengths=one.lengths * 0)
        return replace(one, value_top=one.value_top * 0, here=replace(one.here, value_far=one.here.value_far * 0))

    return without


def narrow(seed: int, n: int, sharpness: float) -> Case:
    """One head of width 1: hardly anything is lost."""
    return make_case("narrow", seed, n=n, d=1, k=1, h=1, sharpness=sharpness, size=2.0)


NEEDED = {"values": range(4), "pairs": range(40)}


@pytest.mark.parametrize("part", NEEDED)
def test_a_part_that_is_left_out_is_caught(part: str) -> None:
    radii = (1e-4, 0.03, 0.3)
    eps = torch.tensor(radii, dtype=torch.float64).expand(2, -1)
    caught = False
    for seed in NEEDED[part]:
        case = narrow(seed, 2 + seed % 3, 1.0 + seed % 4)
        one, reached = chosen(case), attained(case, radii)
        assert bool((one.gain(eps) * eps >= reached).all())
        caught = bool((forgotten(part)(replace(one)).gain(eps) * eps < reached).any())
        if caught:
            break
    assert caught


def test_the_residual_counts_beside_attention_that_does_nothing() -> None:
    case = make_case("", residual=-0.5)
    idle = Case("idle", case.layer.replace(w_o=1e-6 * case.layer.w_o), case.x)
    gain = chosen(idle).gain(torch.tensor((1e-4, 0.3), dtype=torch.float64).expand(2, -1))
    assert bool(((gain >= 0.5) & (gain <= 0.501)).all())


def test_pairs_that_are_not_chosen_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pair for all rows nearly everything is left to the others."""
    monkeypatch.setattr(pairs, "_PAIRS", 0)
    for seed in range(6):
        case = narrow(seed, 4, 3.0)
        assert bool((alone(case) >= attained(case)).all())


# -- the mathematics


def test_a_covariance_is_a_sum_over_pairs() -> None:
    dice = Dice(0)
    p, f, g = torch.softmax(dice.normal(7), 0), dice.normal(7), dice.normal(7)
    apart = (f[:, None] - f) * (g[:, None] - g) * p[:, None] * p
    whole = (p * f * g).sum() - (p * f).sum() * (p * g).sum()
    torch.testing.assert_close(apart.triu().sum(), whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_the_quadratic_form_is_not_below_that_of_the_functionals(seed: int) -> None:
    """⟨c_s, R c_s'⟩ with R made of dense matrices on all numbers."""
    case = make_case("dense", seed, n=4, d=5, k=2, h=2, sharpness=2.0, size=1.0)
    layer, one = case.layer, chosen(case)
    w_q, w_v = layer.w_q * layer.scale, layer.w_v
    q = torch.einsum("bnd,hdk->bhnk", case.x, w_q)
    if layer.b_q is not None:
        q = q + layer.scale * layer.b_q.unsqueeze(-2)
    k = torch.einsum("bnd,hdk->bhnk", case.x, layer.w_k)
    for b in range(len(case.x)):
        functionals = torch.zeros(one.head.shape[1], 4, 5, dtype=torch.float64)
        for s, (at, i, j, m) in enumerate(zip(one.head[b], one.row[b], one.first[b], one.second[b], strict=True)):
            functionals[s, i] += w_q[at] @ (k[b, at, j] - k[b, at, m])
            drawn = layer.w_k[at] @ q[b, at, i]
            functionals[s, j] += drawn
            functionals[s, m] -= drawn
        D = torch.cat([torch.kron(one.here.p[b, at].contiguous(), w_v[at].mT.contiguous()) for at in range(2)])
        R = torch.linalg.inv(torch.eye(20, dtype=torch.float64) - D.mT @ D / one.mu[b])
        flat = functionals.flatten(1)
        exact = flat @ R @ flat.mT  # the isometry around W^V can only make it larger
        assert float(torch.linalg.eigvalsh(one.gram[b] - exact)[0]) > -1e-9 * float(exact.abs().max())


@pytest.mark.parametrize("seed", range(3))
def test_other_pairs_are_covered(seed: int) -> None:
    dice, n = Dice(seed), 6
    p = torch.softmax(2 * dice.normal(1, 1, 1, n, n), -1)
    top = p[0].topk(2, -1).indices
    taken = dice.normal(1, 1, n, 2, n) > 0
    both = taken.gather(-1, top.flip(-1).unsqueeze(-1)).any(-2, keepdim=True)
    taken = taken.scatter(-1, top.flip(-1).unsqueeze(-1), both.expand(1, 1, n, 2, 1))
    w = pairs._others(p, p, top, taken)[0, 0, 0]
    for i in range(n):
        left = torch.ones(n, n, dtype=torch.bool)
        for side in range(2):
            left[top[0, 0, i, side]] &= ~taken[0, 0, i, side]
            left[:, top[0, 0, i, side]] &= ~taken[0, 0, i, side]
        pi = (p[0, 0, 0, i][:, None] * p[0, 0, 0, i] * left).triu(1)
        laplacian = torch.diag((pi + pi.mT).sum(0)) - pi - pi.mT
        assert float(torch.linalg.eigvalsh(torch.diag(w[i]) - laplacian)[0]) > -1e-12


# -- values


def test_less_than_half_of_what_rows_loses_where_rows_have_two_keys() -> None:
    case, radii = two_keys(0, n=24, d=32, h=4), (1e-3, 0.03, 0.1)
    found, other = (holdfast.bound(case.layer, case.x, radii, method=m).value for m in ("pairs", "rows"))
    reached = attained(case, radii)
    assert bool((reached <= found).all())
    assert bool((found - reached < (other - reached) / 2).all())


def test_proved_is_close_to_numerical() -> None:
    case = two_keys(1, n=8, d=8)
    proved, numerical = alone(case), alone(case, proved=False)
    torch.testing.assert_close(proved, numerical, rtol=1e-5, atol=0)


def test_radii_and_inputs_do_not_depend_on_each_other() -> None:
    case = two_keys(2, weight=2.0)
    piece = Attention(case.layer)
    radii = torch.tensor([[0.1, 0.2], [0.3, 0.05]], dtype=torch.float64)
    together = piece.reach(Numerical(), case.x, radii, "quick")
    one_by_one = torch.cat([piece.reach(Numerical(), case.x[i : i + 1], radii[i], "quick") for i in range(2)])
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("by", "beyond"), [(400, 0), (505, 75)])
def test_no_term_underflows_where_small_weights_meet_large_ones(by: int, beyond: int) -> None:
    case, radii = narrow(1, 4, 3.0), (1e-4, 0.03, 0.3)
    powers = {"q": -by, "k": by, "v": by, "o": -by - beyond}
    tensors = {name: t * 2.0 ** powers[name[2]] for name, t in case.layer._tensors().items()}
    found = alone(Case("scaled", AttentionLayer(**tensors, scale=case.layer.scale), case.x), radii)
    assert bool((found * 2.0**beyond >= attained(case, radii)).all())


def test_tokens_that_are_all_equal_and_weights_of_zero() -> None:
    case = two_keys(0)
    equal = Case("equal", case.layer, torch.ones_like(case.x))
    assert bool((alone(equal) >= attained(equal)).all())
    tensors = {name: t * (name != "w_v") for name, t in case.layer._tensors().items() if t.ndim == 3}
    still = Case("still", AttentionLayer(**tensors), case.x)
    assert bool((alone(still) >= 0).all())
    assert "pairs" in bounds


def test_what_overflows_stays_infinite_beside_an_ordinary_input() -> None:
    q, k, v = (torch.zeros(1, 3, 2, dtype=torch.float64) for _ in range(3))
    o = torch.zeros(1, 2, 3, dtype=torch.float64)
    q[0, 1, 0], k[0, 0, 0], v[0, 0, 0], o[0, 0, 0] = 1.0, 1.0, 1e30, 1e150
    x = torch.stack([2 * Dice(0).normal(2, 3), torch.tensor([[1e120, 0, 0], [-1e120, 0, 0]], dtype=torch.float64)])
    a, eps = Proved(), torch.tensor([1e-20], dtype=torch.float64)
    found = bounds["pairs"]._evaluate(a, AttentionLayer(q, k, v, o, scale=1.0), x, a.lift(eps)).value
    assert bool(a.number(found)[1].isinf().all())


def test_the_largest_eigenvalue_is_proved_within_the_tolerance() -> None:
    factor = Dice(0).normal(3, 120, 120)
    matrix = factor @ factor.mT
    exact = torch.linalg.eigvalsh(matrix)[..., -1].sqrt()
    for tolerance in (1e-8, 1e-3):
        found = gram_upper(matrix, torch.zeros(3, dtype=torch.float64), tolerance)
        assert bool((found >= exact * (1 - 1e-12)).all())
        assert bool((found <= exact * (1 + 2 * tolerance)).all())
    assert bool(gram_upper(matrix, torch.full((3,), torch.inf, dtype=torch.float64), 1e-3).isinf().all())
