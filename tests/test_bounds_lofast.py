"""Every term of the LoFAST bounds against the paper, written out with dense matrices and exact singular values."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

import holdfast
import literal
from holdfast import BoundResult
from holdfast.bounds import bounds
from holdfast.testing import Case, cases, changed, gaussian_case, random_case
from holdfast.testing.layers import members

METHODS = ("naive", "lofast-xi", "lofast")
RADII = (1e-3, 1.0)
NOTHING = 1e-100  # what proved arithmetic makes of zero stays far below
PER_HEAD = {"delta-21": "delta_21", "scores": "delta_21", "delta-22": "delta_22"}


PLAIN = [case for case in cases() if case.plain]


def every_case(function: object) -> object:
    return pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)(function)  # type: ignore[arg-type]


@cache
def bound(case: Case, method: str, eps: float | tuple[float, ...] = RADII) -> BoundResult:
    return holdfast.bound(case.layer, case.x, eps, method)


def assert_just_above(value: Tensor, exact: Tensor) -> None:
    """A proved number is not below the exact one, which is itself rounded here, and close to it."""
    assert value.shape == exact.shape
    assert bool((value >= exact * (1 - 1e-12)).all())
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=NOTHING)


# -- the formulas


@every_case
def test_terms_are_those_of_the_paper(case: Case) -> None:
    for member in members(case):
        exact = literal.Lofast(member.layer, member.x)
        for method in METHODS:
            assert_terms_of_the_paper(method, exact, bound(member, method))


def assert_terms_of_the_paper(method: str, exact: literal.Lofast, result: BoundResult) -> None:
    gain = {"naive": ("norm_P", "naive_gain")}.get(method, ("zeta",))
    by_radius = [exact.terms(method, eps) for eps in RADII]
    names = (*gain, "norm_M" if method == "lofast" else "xi", "norm_A", "norm_XC", "norm_C", "norm_X")
    assert set(result.terms) == {*names, *by_radius[0]} - {"value"}
    for name in names:
        assert_just_above(result.terms[name], getattr(exact, name))
    for name in by_radius[0]:
        value = result.value if name == "value" else result.terms[name]
        assert_just_above(value, torch.stack([terms[name] for terms in by_radius], -1))


@pytest.mark.parametrize("H", [0.0, 1.0])
def test_theorem_1_as_printed(H: float) -> None:
    """Both forms, with 1/sqrt(d/h) in front, for H = 0 and H = I; the second is equation (23)."""
    case = gaussian_case(0, n=6, d=8, h=4, norm=2.0, row=1.5, residual=H)
    layer, x, eps = case.layer, case.x[0], 0.4
    n, d, h = 6, 8, 4
    root = 1 / math.sqrt(d / h)
    P, norm, eye = layer.attention(x), literal.norm, torch.eye(n, dtype=torch.float64)
    C = [layer.w_v[l] @ layer.w_o[l] for l in range(h)]  # noqa: E741
    W = [layer.w_q[l] @ layer.w_k[l].T for l in range(h)]  # noqa: E741
    zeta = norm(H * torch.eye(n * d).double() + sum(torch.kron(P[l], C[l].T.contiguous()) for l in range(h)))  # noqa: E741
    first, second, naive = zeta, zeta, H + sum(norm(C[l]) * norm(P[l]) for l in range(h))  # noqa: E741
    for l in range(h):  # noqa: E741
        rows = torch.cat([(x[i] @ W[l].T).unsqueeze(0) for i in range(n)])
        M = torch.kron(eye, rows)
        for i in range(n):
            M = M + torch.kron(torch.kron(eye[:, [i]], eye), (x[i] @ W[l]).unsqueeze(0))
        values = norm(x @ C[l]) + norm(C[l]) * eps
        first = first + root * (norm(M) + norm(W[l]) * eps) * values
        xi = norm(W[l] @ x.T) + norm(x @ W[l])
        second, naive = (total + root * (xi + norm(W[l]) * eps) * values for total in (second, naive))
    one = Case(case.name, layer, x)
    assert_just_above(bound(one, "lofast", eps).value, eps * first)
    assert_just_above(bound(one, "lofast-xi", eps).value, eps * second)
    assert_just_above(bound(one, "naive", eps).value, eps * naive)


@pytest.mark.parametrize("method", METHODS)
def test_of_the_biases_only_that_of_the_query_counts(method: str) -> None:
    case = next(case for case in cases() if case.name == "biases")
    layer = case.layer
    value = bound(case, method).value
    without = changed(layer, b_k=None, b_v=None, b_o=None)
    torch.testing.assert_close(bound(Case("others", without, case.x), method).value, value, rtol=1e-7, atol=0.0)
    assert layer.b_q is not None
    stronger = bound(Case("query", changed(layer, b_q=4 * layer.b_q), case.x), method).value
    assert bool(((stronger - value).abs() > 1e-3 * value).all())


def test_mask_leaves_forbidden_pairs_out() -> None:
    case = next(case for case in cases() if case.name == "mask for each input")
    masks = (None, torch.ones(4, 4, dtype=torch.bool), case.layer.mask)
    results = (bound(Case(case.name, case.layer.with_mask(mask), case.x), "lofast") for mask in masks)
    free, all_allowed, masked = (result.terms["norm_M"] for result in results)
    torch.testing.assert_close(all_allowed, free, rtol=1e-7, atol=0.0)
    assert bool((masked < 0.999 * free).all())


@pytest.mark.parametrize("name", ["biases", "everything"])
def test_plus_is_its_formula(name: str) -> None:
    """ε ζ + ½ (‖stack of the centred values‖ + ε ‖C‖)(ε ‖stack of the centred scores‖ + ε² ‖A‖), all heads together."""
    case = next(case for case in cases() if case.name == name).member(0)
    layer, x, norm = case.layer, case.x, literal.norm
    every, n = literal.heads(layer), len(x)
    C, A = [h.w_v @ h.w_o for h in every], [layer.scale * h.w_q @ h.w_k.T for h in every]
    values = torch.cat([x @ c - (x @ c).mean(0) for c in C])
    allowed = literal.pairs(layer, n).double().reshape(n, n, 1)
    scores = []
    for head in every:
        rows = literal.score_matrix(layer, x, head).reshape(n, n, -1)
        scores.append((rows - rows.sum(1, keepdim=True) / allowed.sum(1, keepdim=True)) * allowed)
    moved = norm(torch.stack(scores).flatten(0, 2))
    bilinear = min(norm(torch.cat(A, 1)), norm(torch.cat(A, 0)))
    for eps in RADII:
        spread = norm(values) + eps * norm(torch.cat(C))
        exact = eps * literal.Lofast(layer, x).zeta + spread * (eps * moved + eps**2 * bilinear) / 2
        assert_just_above(bound(case, "plus", eps).value, exact)


# -- order


@pytest.mark.parametrize("case", [*PLAIN, *map(random_case, range(8))], ids=lambda case: case.name)
def test_each_form_is_tighter_than_the_one_before(case: Case) -> None:
    naive, xi, lofast = (bound(case, method) for method in METHODS)
    pairs = [(naive.value, xi.value), (xi.value, lofast.value)]
    pairs += [(naive.terms["naive_gain"], xi.terms["zeta"]), (xi.terms["xi"], lofast.terms["norm_M"])]
    pairs += [(lofast.terms["delta_22_naive"], lofast.terms["delta_22"])]
    for looser, tighter in pairs:
        assert bool((looser >= tighter * (1 - 1e-7) - NOTHING).all())


def test_best_is_the_smallest_and_says_which() -> None:
    case = cases()[0]
    result = bound(case, "best")
    values = {
        row.name: row(case.layer, case.x, RADII).value for row in bounds.values() if row.in_best and row.name != "best"
    }
    torch.testing.assert_close(result.value, torch.stack(list(values.values())).amin(0), rtol=1e-12, atol=0.0)
    assert set(result.terms) == set(values)
    assert any("is smallest at" in note for note in result.notes)


# -- soundness


@pytest.mark.parametrize("case", PLAIN[::3], ids=lambda case: case.name)
@pytest.mark.parametrize("objective", ["output", "delta-2", *PER_HEAD])
def test_inner_quantities_dominate_their_attacks(objective: str, case: Case) -> None:
    """Δ_21 and the movement of the scores <= δ_21, Δ_22 <= δ_22, Δ_2 <= δ_2; and each attack is what it is called."""
    attack = holdfast.attack(case.layer, case.x, RADII, objective=objective, restarts=1, steps=12)
    for method in METHODS:
        result = bound(case, method)
        limit = {"output": result.value, "delta-2": result.terms["delta_2"]}.get(objective)
        limit = result.terms[PER_HEAD[objective]] if limit is None else limit
        assert bool((attack.lower <= limit).all())
    for i in range(len(case.x)):
        member = case.member(i)
        for e in range(len(RADII)):
            witness = attack.witness[i, ..., e, :, :]
            value = literal.moved(member.layer, member.x, witness, objective)
            torch.testing.assert_close(attack.lower[i, ..., e], value, rtol=1e-6, atol=1e-9 * float(1 + value.max()))


@pytest.mark.parametrize("case", PLAIN[::2], ids=lambda case: case.name)
def test_movement_of_the_scores_is_lemma_2_to_first_order(case: Case) -> None:
    """As eps vanishes, the largest movement is eps ‖M_l(X)‖, and the attack finds it."""
    eps = 1e-6
    found = holdfast.attack(case.layer, case.x, eps, objective="scores", restarts=2, steps=60).lower
    norm = bound(case, "lofast").terms["norm_M"]
    norm_A = bound(case, "lofast").terms["norm_A"]
    assert bool((found <= eps * (norm + eps * norm_A)).all())
    assert bool((found >= eps * norm * (1 - 1e-3) - 1e-15).all())


REGIMES = {"flat": (1.0, 1.0), "strong": (3.0, 1.0), "long": (1.0, 32**0.5), "peaked": (3.0, 32**0.5)}


@pytest.mark.parametrize(("regime", "dtype"), list(zip(REGIMES, [torch.float32, torch.float64] * 2, strict=True)))
def test_bounds_hold_against_a_strong_attack(regime: str, dtype: torch.dtype) -> None:
    norm, row = REGIMES[regime]
    case = gaussian_case(1, n=16, d=32, h=4, norm=norm, row=row)
    layer, x = case.layer.to(dtype), case.x.to(dtype)
    radii = (1e-8, 1e-4, 0.1, 10.0)
    attained = holdfast.attack(layer, x, radii, restarts=3, steps=40).lower
    gain = holdfast.local_lipschitz(layer, x, side="upper").value
    assert bool((attained[..., 1] >= 0.99 * radii[1] * gain).all())  # the attack is no straw man
    for method in METHODS:
        assert bool((holdfast.bound(layer, x, radii, method).value >= attained).all())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_bounds_hold_for_random_layers(seed: int) -> None:
    case = random_case(1000 + seed)
    radii = (1e-8, 1e-3, 0.1, 1.0, 10.0)
    attained = holdfast.attack(case.layer, case.x, radii, restarts=8, steps=150).lower
    for row in bounds.values():
        if row.refusal(case.layer) is None:
            assert bool((row(case.layer, case.x, radii).value >= attained).all()), row.name


# -- shapes


@pytest.mark.parametrize("method", METHODS)
def test_shapes_follow_x_and_eps(method: str) -> None:
    case = cases()[0]
    x, h = case.x, case.layer.h
    for given, batch in ((x, (2,)), (x[0], ()), (x.expand(3, 2, 4, 4), (3, 2))):
        for eps, radii in ((0.5, ()), ((0.5,), (1,)), ([0.1, 0.5, 2.0], (3,))):
            result = holdfast.bound(case.layer, given, eps, method)
            assert result.value.shape == (*batch, *radii)
            if method == "lofast":
                assert result.terms["zeta"].shape == batch
                assert result.terms["norm_M"].shape == (*batch, h)
                assert result.terms["delta_21"].shape == (*batch, h, *(radii or (1,)))
