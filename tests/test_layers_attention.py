"""Attention as a piece of a network: derivatives in closed form, and bounds on balls of one radius for each input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.attention.derivatives import AttentionPass
from holdfast.attention.rotary import Rotary
from holdfast.bounds import bounds
from holdfast.bounds.base import EVERY_TERM, Bound, Evaluation, Need
from holdfast.bounds.best import smallest_of
from holdfast.compositions import certify_inputs
from holdfast.errors import InputError, NotApplicableError
from holdfast.layers.attention.piece import Attention
from holdfast.layers.tokens.pooling import TokenMean
from holdfast.linalg import Ball
from holdfast.linalg.arithmetic import Arithmetic, Numerical, Proved
from holdfast.network.network import Head, Network
from holdfast.testing import Case, cases, changed, make_case
from holdfast.testing.probes import climb, directions

TANGENTS = 3


def _more_cases() -> list[Case]:
    """Score terms that `cases` leaves out."""
    plain = make_case("score bias", 1, biases=True, causal=True)
    bias = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    turned = torch.linspace(0, 5, 8, dtype=torch.float64).reshape(4, 2)
    return [
        Case("score bias", changed(plain.layer, score_bias=bias), plain.x),
        Case("rotary", changed(plain.layer, rotary=Rotary(turned.cos(), turned.sin())), plain.x),
        Case("soft cap", changed(plain.layer, soft_cap=0.7, residual=0.5), plain.x),
        Case(
            "soft cap, rotary",
            changed(plain.layer, soft_cap=1.5, score_bias=bias, rotary=Rotary(turned.cos(), turned.sin())),
            plain.x,
        ),
    ]


CASES = [
    case
    for case in [*cases(), *_more_cases()]
    if case.layer.sinks is None and case.layer.q_norm is None and case.layer.k_norm is None
]
THIRD = [case for case in CASES if case.layer.soft_cap is None]  # those with a third derivative
MODERATE = [case for case in CASES if case.name not in ("one-hot attention", "large input", "zero weights")]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_moderate = pytest.mark.parametrize("case", MODERATE, ids=lambda case: case.name)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tangents(case: Case, count: int) -> list[Tensor]:
    return [normal(seed, TANGENTS, *case.x.shape) for seed in range(count)]


def adjoint(case: Case) -> Tensor:
    return normal(9, TANGENTS, *case.x.shape[:-1], case.layer.d_out)


def along(f: Callable[[Tensor], Tensor], x: Tensor, a: Tensor) -> Tensor:
    """Df(x)[a] by forward differentiation; x is repeated for every direction, so f sees a larger batch."""
    result: Tensor = torch.func.jvp(f, (x.expand_as(a).contiguous(),), (a,))[1]
    return result


def close(left: Tensor, right: Tensor, case: Case, tolerance: float = 1e-9) -> bool:
    size = 1 + float(right.abs().max())
    return bool((left - right).abs().max() <= tolerance * size * case.size)


def dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum((-2, -1))


@each_case
def test_value_and_slope_are_the_layers(case: Case) -> None:
    here, (a,) = AttentionPass(case.layer, case.x), tangents(case, 1)
    assert close(here.value, case.layer(case.x), case)
    assert close(here.push(a), along(case.layer, case.x, a), case)


@each_case
def test_higher_derivatives_are_those_of_the_lower_ones(case: Case) -> None:
    here, (a, b, c), m = AttentionPass(case.layer, case.x), tangents(case, 3), adjoint(case)
    twice = along(lambda z: AttentionPass(case.layer, z).push(a), case.x, b)
    assert close(here.push2(a, b), twice, case)
    if case in THIRD:
        thrice = along(lambda z: AttentionPass(case.layer, z).push2(a, b), case.x, c)
        assert close(here.push3(a, b, c), thrice, case, 1e-8)
    pulled = along(lambda z: AttentionPass(case.layer, z).pull(m), case.x, a)
    assert close(here.pull2(m, a), pulled, case)


@each_case
def test_adjoints_and_symmetry(case: Case) -> None:
    here, (a, b, c), m = AttentionPass(case.layer, case.x), tangents(case, 3), adjoint(case)
    assert close(dot(here.pull(m), a), dot(m, here.push(a)), case)
    assert close(dot(here.pull2(m, a), b), dot(m, here.push2(a, b)), case)
    assert close(here.push2(a, b), here.push2(b, a), case)
    if case in THIRD:
        assert close(here.push3(a, b, c), here.push3(c, a, b), case)


@pytest.mark.parametrize("case", [case for case in MODERATE if case in THIRD], ids=lambda case: case.name)
def test_finite_differences_of_push2_give_push3(case: Case) -> None:
    step, (a, b, c) = 1e-5, tangents(case, 3)
    z = torch.stack([case.x + step * c, case.x - step * c])
    ahead, behind = AttentionPass(case.layer, z).push2(a.expand_as(z), b.expand_as(z))
    found = AttentionPass(case.layer, case.x).push3(a, b, c)
    assert close((ahead - behind) / (2 * step), found, case, 1e-6)


def test_pairs_broadcast() -> None:
    case = make_case("everything", 0, h=4, g=2, biases=True, mask="each", causal=True, residual=1.0)
    here, (a, b) = AttentionPass(case.layer, case.x), tangents(case, 2)
    pairs = here.push2(a.unsqueeze(1), b.unsqueeze(0))
    assert pairs.shape == (TANGENTS, TANGENTS, *case.x.shape)
    assert torch.allclose(pairs[1, 2], here.push2(a[1], b[2]))
    m = adjoint(case)
    assert torch.allclose(here.pull2(m[0], a)[1], here.pull2(m[0], a[1]))


@each_moderate
def test_balls_hold_the_float_values_in_any_order_and_are_narrow(case: Case) -> None:
    (a, b, c), m = tangents(case, 3), adjoint(case)
    enclosed = _derivatives(case, *(Ball.exact(t) for t in (case.x, a, b, c, m)))
    order = torch.randperm(case.x.shape[-2], generator=torch.Generator().manual_seed(0))
    moved, back = case.permuted(order.tolist()), order.argsort()
    floats = _derivatives(moved, *(t[..., order, :] for t in (case.x, a, b, c, m)))
    for enclosure, value in zip(enclosed, floats, strict=True):
        # The float value has rounding errors of its own, about as large as the radius.
        off = (enclosure.mid - value[..., back, :]).abs()
        assert bool((off <= 2 * enclosure.rad).all())
        assert float(enclosure.rad.max()) <= 1e-9 * (1e-3 * case.size + float(enclosure.mid.abs().max()))


@each_moderate
def test_balls_hold_every_point_and_direction_in_them(case: Case) -> None:
    (a, b, c), m, r = tangents(case, 3), adjoint(case), 1e-6

    def near(seed: int, t: Tensor) -> Tensor:
        return t + r * normal(seed, *t.shape).clamp(-1, 1)

    enclosed = _derivatives(case, *(Ball(t, torch.full_like(t, r)) for t in (case.x, a, b, c, m)))
    values = _derivatives(case, *(near(seed, t) for seed, t in enumerate((case.x, a, b, c, m))))
    for enclosure, value in zip(enclosed, values, strict=True):
        assert bool(((enclosure.mid - value).abs() <= enclosure.rad).all())


def _derivatives(case: Case, x: Any, a: Any, b: Any, c: Any, m: Any) -> list[Any]:
    here = AttentionPass(case.layer, x)
    third = [here.push3(a, b, c)] if case.layer.soft_cap is None else []
    return [here.value, here.push(a), here.pull(m), here.push2(a, b), here.pull2(m, a), *third]


# -- bounds on balls

RHO = torch.tensor([[0.05, 0.6], [0.3, 0.01]], dtype=torch.float64)  # radii of their own for both inputs
TYPICAL = [case for case in THIRD if case.name in ("peaked attention", "score bias", "everything")]
CAPPED = [case for case in CASES if case not in THIRD]
each_typical = pytest.mark.parametrize("case", TYPICAL, ids=lambda case: case.name)
each_arithmetic = pytest.mark.parametrize("arithmetic", [Numerical, Proved])


def _quick(chosen: list[Case]) -> list[Any]:
    """Every second case, and all typical ones; the others are slow."""
    quick = [case for i, case in enumerate(chosen) if i % 2 == 0 or case in (*TYPICAL, *CAPPED)]
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in chosen]


in_turn = pytest.mark.parametrize(  # a loop costs many norms: each case in one arithmetic
    ("case", "arithmetic"),
    [pytest.param(case, kind, id=case.name) for case, kind in zip(TYPICAL, (Proved, Numerical, Proved), strict=True)],
)
BOUNDS = ("reach", "gain", "curvature")

SLACK = {"numerical": 1e-4, "proved": 0.0}


def evaluate(a: Arithmetic[Any], piece: Attention, name: str, x: Tensor, rho: Tensor, **options: str) -> Tensor:
    return a.number(getattr(piece, name)(a, x, a.lift(rho), **options))


@pytest.mark.parametrize("case", _quick(CASES), ids=lambda case: case.name)
def test_no_ascent_exceeds_a_bound(case: Case) -> None:
    # Proved norms are not below iterated ones, so most cases need not be proved.
    a: Arithmetic[Any] = Proved() if case in (*TYPICAL, *CAPPED) else Numerical()
    piece, x = Attention(case.layer), case.x
    radii = RHO.mT[:, None, :, None, None]  # (e, 1, b, 1, 1)
    starts = torch.stack([directions(case.layer, x, seed) for seed in range(2)])  # (e, m, b, n, d)
    goals: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "reach": lambda move, g: piece.value(x + move) - piece.value(x),
        "gain": lambda move, g: piece.push(x + move, g),
        "curvature": lambda move, g: piece.push2(x + move, g, g),
    }
    for name, moved in goals.items():

        def length(move: Tensor, g: Tensor, moved: Callable[[Tensor, Tensor], Tensor] = moved) -> Tensor:
            size: Tensor = torch.linalg.vector_norm(moved(move, g), dim=(-2, -1))
            return size

        attained = length(*climb(length, radii, radii * starts * (1 - 1e-12), starts)).amax(1).mT
        value = evaluate(a, piece, name, x, RHO)
        # The attained value is rounded, too.
        assert bool((attained <= value * (1 + SLACK[a.guarantee]) + 1e-13 * case.size).all()), name


@each_typical
def test_reach_is_not_below_the_attack(case: Case) -> None:
    value = evaluate(Proved(), Attention(case.layer), "reach", case.x, RHO[:, :1])
    for i, eps in enumerate(RHO[:, 0].tolist()):
        alone = case.member(i)
        bias = alone.layer.score_bias
        assert bias is None or bias.ndim == 3  # shared by the batch
        assert holdfast.attack(alone.layer, alone.x, eps, seed=0).lower <= value[i, 0]


@in_turn
def test_inputs_with_radii_of_their_own_are_as_if_alone(case: Case, arithmetic: type[Arithmetic[Any]]) -> None:
    piece = Attention(case.layer)
    for name in BOUNDS:
        together = evaluate(arithmetic(), piece, name, case.x, RHO)
        for i in range(2):
            alone = evaluate(arithmetic(), Attention(case.member(i).layer), name, case.x[i : i + 1], RHO[i : i + 1])
            assert torch.allclose(together[i : i + 1], alone, rtol=3e-5), name


@in_turn
def test_shared_radii_give_what_the_bounds_give(case: Case, arithmetic: type[Arithmetic[Any]]) -> None:
    a, eps, piece = arithmetic(), torch.tensor([0.25], dtype=torch.float64), Attention(case.layer)
    for method in ("lofast", "cov", "second-order", "rows", "pairs", "best"):
        if bounds[method].refusal(case.layer) is not None:
            continue
        expected = holdfast.bound(case.layer, case.x, [0.25], method=method, guarantee=a.guarantee).value
        needs: dict[str, Need] = {"best": "smallest", "rows": "near", "pairs": "quick"}
        for rho in (eps, eps.expand(2, 1)):
            here = a.at(piece, case.x)
            found = [a.number(smallest_of([bounds[method]], here, case.layer, case.x, a.lift(rho)).value)]
            if method in needs:
                found.append(evaluate(a, piece, "reach", case.x, rho, need=needs[method]))
            assert all(torch.allclose(one, expected, rtol=1e-6) for one in found), method


@pytest.mark.parametrize("case", [*TYPICAL, *CAPPED], ids=lambda case: case.name)
@each_arithmetic
def test_bounds_do_not_decrease_with_the_radius(case: Case, arithmetic: type[Arithmetic[Any]]) -> None:
    a, piece = arithmetic(), Attention(case.layer)
    rho = torch.tensor([0.3, 0.0, 1e-3, 0.1, 2.0], dtype=torch.float64) * torch.tensor([[1.0], [0.4]]).double()
    for name in BOUNDS:
        value = evaluate(a, piece, name, case.x, rho)
        assert bool((value.gather(-1, rho.argsort(-1)).diff(dim=-1) >= 0).all()), name


def test_at_radius_zero_the_gain_is_the_norm_of_the_jacobian() -> None:
    case = make_case("biases", 0, biases=True, residual=1.0)
    value = evaluate(Proved(), Attention(case.layer), "gain", case.x, torch.zeros(2, 1, dtype=torch.float64))
    exact = torch.linalg.matrix_norm(holdfast.attention.AttentionJacobian(case.layer, case.x).dense(), ord=2)
    assert torch.allclose(value[:, 0], exact, rtol=1e-6)


def test_the_curvature_has_its_size_at_the_centre() -> None:
    """Within a factor of 12 of an ascent: a bound that is far too large is a mistake, too."""
    case = make_case("plain", 0)
    starts = directions(case.layer, case.x, 0)
    here = AttentionPass(case.layer, case.x)

    def bend(move: Tensor, g: Tensor) -> Tensor:
        size: Tensor = torch.linalg.vector_norm(here.push2(g, g), dim=(-2, -1))
        return size

    _, g = climb(bend, torch.ones(1, 1), torch.zeros_like(starts), starts)
    value = evaluate(Proved(), Attention(case.layer), "curvature", case.x, torch.zeros(2, 1, dtype=torch.float64))
    assert bool((value[:, 0] <= 12 * bend(g, g).amax(0)).all())


def test_the_curvature_of_a_sharp_cap() -> None:
    """Scores that are linear in the input, where the cap bends most: nothing else is curved as much."""
    layer = holdfast.AttentionLayer(
        torch.zeros(1, 2, 1),
        *(torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[0.0], [1.0]]]), torch.tensor([[[0.0, 1.0]]])),
        b_q=torch.ones(1, 1),
        scale=1.0,
        soft_cap=0.05,
    )
    x = torch.tensor([[[0.033, 1.0], [-0.033, -1.0]]]).double()
    piece, g = Attention(layer), torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]).double() / 2**0.5
    attained = float(piece.push2(x, g, g).norm())
    value = float(evaluate(Proved(), piece, "curvature", x, torch.zeros(1, 1, dtype=torch.float64)))
    assert 5 < attained <= value < 8 * attained


def test_the_residual_is_bounded_jointly() -> None:
    case = make_case("plain", 0)
    rho, a = torch.full((2, 1), 0.01, dtype=torch.float64), Proved()
    alone = evaluate(a, Attention(case.layer), "reach", case.x, rho)
    joint = evaluate(a, Attention(changed(case.layer, residual=1.0)), "reach", case.x, rho)
    assert bool((joint < 0.98 * (alone + rho)).all())


@each_arithmetic
def test_one_arithmetic_serves_many_pieces_inputs_and_radii(arithmetic: type[Arithmetic[Any]]) -> None:
    shared = arithmetic()
    first, second = make_case("plain", 0), make_case("another", 1)
    pieces = [Attention(first.layer), Attention(second.layer)]
    small = RHO[:, :1]
    for piece, x, radii in (
        (pieces[0], first.x, small),
        (pieces[1], first.x, small),
        (pieces[0], first.x, small / 3),
        (pieces[0], second.x, small / 3),
        (pieces[0], first.x, small),
    ):
        for name in BOUNDS:
            kept, fresh = (evaluate(a, piece, name, x, radii) for a in (shared, arithmetic()))
            assert torch.equal(kept, fresh)


def test_errors() -> None:
    plain, a = CASES[0], Numerical()
    with pytest.raises(InputError, match="need is 'lofat'; expected one of"):
        evaluate(a, Attention(plain.layer), "reach", plain.x, RHO, need="lofat")
    with pytest.raises(InputError, match=r"radii have shape \(3, 2\); expected \(r\) or \(2, 'r'\)"):
        evaluate(a, Attention(plain.layer), "curvature", plain.x, torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "h"), [(64, 384, 6), (197, 384, 6)])
def test_numerical_bounds_at_the_size_of_a_vision_transformer(n: int, d: int, h: int) -> None:
    case = holdfast.testing.gaussian_case(0, n=n, d=d, h=h, norm=2.0, row=8.0, residual=0.0)
    a, piece, rho = Numerical(), Attention(case.layer), torch.tensor([[0.1]], dtype=torch.float64)
    gain, bend, reach = (evaluate(a, piece, name, case.x, rho) for name in ("gain", "curvature", "reach"))
    slope = torch.linalg.vector_norm(piece.push(case.x, directions_at_random(case.x)), dim=(-2, -1)).amax()
    assert bool((slope <= gain).all())
    assert bool((reach <= 0.1 * gain * (1 + 1e-4)).all())
    assert bool(torch.isfinite(bend).all())


def directions_at_random(x: Tensor) -> Tensor:
    g = normal(0, 4, *x.shape)
    return g / torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True)


# -- which bounds move attention in a network


@pytest.mark.parametrize(("need", "method"), [("quick", "gains"), ("smallest", "layerwise")])
def test_a_new_bound_reaches_networks_by_what_it_says_of_itself(
    need: Need, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Bound):
        """The residual alone: a network that asked this bound would be said to be flatter than it is."""

        name = "asked"
        score_terms = EVERY_TERM
        cost = reference = "none"
        in_networks = (need,)

        def _refusal(self, layer: holdfast.AttentionLayer) -> str | None:
            return None

        def _evaluate(self, a: Any, layer: holdfast.AttentionLayer, x: Tensor, eps: Any) -> Evaluation[Any]:
            return Evaluation(eps * a.lift(torch.full((*x.shape[:-2], 1), abs(layer.residual), dtype=x.dtype)), {})

    class AskedWithCaps(Asked):
        """… where there are caps alone."""

        name = "asked with caps"
        in_networks_with = "cap"

    x, w = normal(0, 2, 4, 6), [normal(1, 2, 6, 3), normal(2, 2, 6, 3), normal(3, 2, 6, 3), normal(4, 2, 3, 6)]
    plain = holdfast.AttentionLayer(*w, residual=1.0)
    capped = plain.replace(soft_cap=1.0)

    def radius(layer: holdfast.AttentionLayer, *new: type[Bound]) -> Tensor:
        monkeypatch.setattr(bounds, "_items", known | {bound.name: bound() for bound in new})
        network = Network([Attention(layer), TokenMean(4)], Head(normal(5, 3, 6), normal(6, 3)))
        return torch.tensor([one.radius for one in certify_inputs(network, x, method=method)])

    known = dict(bounds._items)
    assert bool((radius(plain, Asked) > radius(plain)).all())
    assert bool((radius(plain, AskedWithCaps) == radius(plain)).all())
    assert bool((radius(capped, AskedWithCaps) > radius(plain)).all())
    if need == "quick":
        with pytest.raises(NotApplicableError, match="pairs: the layer caps its scores"):
            radius(capped)
