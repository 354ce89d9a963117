"""Lipschitz constants on balls: no attack exceeds a bound, and each theorem's constants are where they should be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer, NotApplicableError
from holdfast.attention import fold
from holdfast.attention.large_radius import large_radius_limit
from holdfast.attention.measure import WeightedJacobian
from holdfast.attention.paths import paths
from holdfast.attention.query_path import QueryBlocks
from holdfast.attention.rotary import Rotary
from holdfast.bounds import ball_bounds
from holdfast.bounds.token_radius import layer_norm_radius, rms_norm_radius
from holdfast.linalg import estimate
from holdfast.testing import Case, cases, changed, make_case
from holdfast.testing.bounds import dense_jacobian

INF = math.inf
RADII = (0.3, 1.0, 3.0)
METHODS = ("castin-ball", "castin-masked", "castin-sharp", "mean-field", "mean-field-masked")
PLAIN = [case for case in cases() if case.plain and case.layer.score_bias is None]


def one_head(A: Tensor, **options: object) -> AttentionLayer:
    """Scores x_iᵀA x_j, values as they are: the layer of the theorems."""
    eye = torch.eye(len(A), dtype=torch.float64).unsqueeze(0)
    return AttentionLayer(A.double().unsqueeze(0), eye, eye, eye, scale=1.0, **options)  # type: ignore[arg-type]


def random_matrix(d: int, seed: int) -> Tensor:
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- every bound, attacked


KINDS = {
    "plain": {"h": 1},
    "heads": {"h": 3, "residual": 1.0},
    "grouped": {"h": 4, "g": 2, "d_out": 3},
    "biases": {"h": 2, "biases": True},
    "causal": {"h": 2, "causal": True},
    "causal, biases": {"h": 1, "causal": True, "biases": True, "residual": -0.5},
    "mask": {"h": 2, "mask": "shared", "biases": True},
    "causal, mask": {"h": 2, "mask": "shared", "causal": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_ascent_exceeds_a_bound_on_a_ball(kind: str) -> None:
    applied = 0
    seed = list(KINDS).index(kind)
    n = (2, 6)[seed % 2]
    layer = make_case(kind, seed, n=n, d=3, **KINDS[kind]).layer  # type: ignore[arg-type]
    for radius in RADII:
        attained = holdfast.lipschitz_attack(layer, radius, n, restarts=4, steps=15, seed=seed).lower
        for bound in ball_bounds.values():
            if bound.refusal(layer) is None:
                assert attained <= bound(layer, radius, n).value
                applied += 1
    assert applied >= 3 * len(RADII)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_long_ascent_exceeds_a_bound_on_a_ball(kind: str) -> None:
    for seed in range(5):
        for n in (2, 5, 24):
            layer = make_case(kind, seed, n=n, d=2 + seed % 4, **KINDS[kind]).layer  # type: ignore[arg-type]
            for radius in (0.1, 0.5, 1.0, 2.0, 5.0):
                attained = holdfast.lipschitz_attack(layer, radius, n, restarts=16, steps=100, seed=seed).lower
                for bound in ball_bounds.values():
                    if bound.refusal(layer) is None:
                        assert attained <= bound(layer, radius, n).value


def slope_in_p(layer: AttentionLayer, radius: float, n: int, p: float, steps: int = 50, starts: int = 12) -> float:
    """The largest (Σ_i |(DF g)_i|^p)^(1/p) / (Σ_i |g_i|^p)^(1/p) that an ascent over tokens and directions finds."""
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, starts, n, layer.d, generator=generator, dtype=torch.float64)
    g[: starts // 2, 1:] *= 1e-2  # one token moves: the worst case for p = 1
    x, g = x.requires_grad_(), g.requires_grad_()
    optimiser = torch.optim.Adam([x, g], lr=0.1)
    best = 0.0
    for _ in range(steps):
        tokens = radius * x / x.norm(dim=-1, keepdim=True).clamp(min=1)
        moved = paths(layer, tokens, g).total
        ratio = moved.norm(dim=-1).norm(p, dim=-1) / g.norm(dim=-1).norm(p, dim=-1)
        best = max(best, float(ratio.detach().max()))
        optimiser.zero_grad()
        (-ratio.log().sum()).backward()
        optimiser.step()
    return best


@pytest.mark.parametrize("p", [1.0, 1.4, 2.0, 3.0, INF])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bounds_hold_for_every_exponent(p: float, causal: bool) -> None:
    seed = int((p > 1.5) != causal)  # one of two layers for every exponent
    radius = (0.5, 1.5)[seed]
    layer = make_case("p", seed, n=5, d=2, h=1 + seed, biases=bool(seed), causal=causal).layer
    attained = slope_in_p(layer, radius, 5, p)
    names = [b.name for b in ball_bounds.values() if b.refusal(layer, p) is None]
    assert ("mean-field-masked" if causal else "mean-field") in names or (causal and p == 1)
    for name in names:
        assert attained <= holdfast.lipschitz_bound(layer, radius=radius, tokens=5, p=p, method=name).value


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_mean_field_bounds_hold_for_unequal_weights(causal: bool) -> None:
    name = "mean-field-masked" if causal else "mean-field"
    for seed in range(20):
        case = make_case("weights", seed, n=6, d=2, h=2, biases=bool(seed % 2), causal=causal, residual=1.0)
        x = 1.5 * case.x / case.x.norm(dim=-1, keepdim=True)
        weights = torch.exp(3 * torch.randn(2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        slope = estimate(WeightedJacobian(case.layer, x, weights)).value
        assert bool((slope <= holdfast.lipschitz_bound(case.layer, radius=1.5, tokens=6, method=name).value).all())


# -- the formulas


def test_one_head_gives_the_published_formula() -> None:
    A = random_matrix(3, 0)
    a, R, n = torch.linalg.matrix_norm(A, ord=2), 1.7, 9
    published = math.sqrt(3) * (a**2 * R**4 * (4 * n + 1) + n).sqrt()
    for layer, name in ((one_head(A), "castin-ball"), (one_head(A, causal=True), "castin-masked")):
        value = holdfast.lipschitz_bound(layer, radius=R, tokens=n, method=name).value
        torch.testing.assert_close(value, published, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, INF])
def test_mean_field_is_not_above_the_published_formula(p: float) -> None:
    for seed, R in ((0, 0.1), (1, 1.0), (2, 2.0)):
        A = random_matrix(3, seed)
        t = float(torch.linalg.matrix_norm(A, ord=2)) * R**2
        value = float(holdfast.lipschitz_bound(one_head(A), radius=R, tokens=4, p=p, method="mean-field").value)
        assert value <= (1 + 3 * t) * math.exp(2 * t) * (1 + 1e-6)
        if p == 2:
            assert value <= ((1 + 2 * t) * math.exp(t) + t) * (1 + 1e-6)
        if p > 1:
            causal = one_head(A, causal=True)
            masked = holdfast.lipschitz_bound(causal, radius=R, tokens=4, p=p, method="mean-field-masked").value
            hardy = 1 if p == INF else p / (p - 1)
            growth = 1.0 if p == INF else math.exp(2 * t)
            assert masked <= (hardy * (1 + 2 * t) * growth + t) * (1 + 1e-6)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_sharp_is_never_above_the_others(case: Case) -> None:
    n = case.x.shape[-2]
    sharp = ball_bounds["castin-sharp"](case.layer, RADII, n).value
    for name in ("castin-ball", "castin-masked", "mean-field"):
        other = ball_bounds[name]
        if other.refusal(case.layer) is None and case.name not in ("one-hot attention", "zero values"):
            assert bool((sharp <= other(case.layer, RADII, n).value * (1 + 1e-9)).all())


def test_query_bias_counts_and_the_others_do_not() -> None:
    """With A = 0 the plain formula sees nothing of a large query bias, which alone makes the layer steep."""
    zero, one = torch.zeros(1, 2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64).unsqueeze(0)
    b_q = torch.tensor([[40.0, 0.0]], dtype=torch.float64)
    layer = AttentionLayer(zero, one, one, one, b_q=b_q, scale=1.0)
    plain = holdfast.lipschitz_bound(changed(layer, b_q=None), radius=1.0, tokens=2, method="castin-ball").value
    attained = holdfast.lipschitz_attack(layer, 1.0, 2).lower
    assert attained > 4 * plain
    for name in ("castin-ball", "castin-sharp", "mean-field"):
        assert attained <= holdfast.lipschitz_bound(layer, radius=1.0, tokens=2, method=name).value
    biased = changed(layer, b_k=7 * b_q, b_v=5 * b_q, b_o=b_q[0])
    for method in ("castin-ball", "castin-sharp"):
        values = [holdfast.lipschitz_bound(each, radius=1.0, tokens=2, method=method).value for each in (layer, biased)]
        assert values[0] == values[1]


def test_heads_together_are_tighter_than_apart() -> None:
    """At R = 0, four heads that write to different outputs: ‖[W_1^V … W_4^V]‖, where a sum over heads would give 4."""
    case = make_case("apart", h=4, d=4, k=1)
    w_v = case.layer.w_v / case.layer.w_v.norm(dim=1, keepdim=True)
    layer = changed(case.layer, w_o=torch.eye(4, dtype=torch.float64).reshape(4, 1, 4), w_v=w_v)
    value = holdfast.lipschitz_bound(layer, radius=0.0, tokens=4, method="castin-sharp").value
    joint = torch.linalg.matrix_norm(w_v.squeeze(-1), ord=2)
    torch.testing.assert_close(value, joint, rtol=1e-6, atol=0.0)
    # Heads of which each writes the same: now they do add up.
    same = changed(layer, w_o=layer.w_o[:1].expand(4, -1, -1), w_v=w_v[:1].expand(4, -1, -1))
    attained = holdfast.local_lipschitz(same, torch.ones(4, 4, dtype=torch.float64)).value
    value = holdfast.lipschitz_bound(same, radius=0.0, tokens=4, method="castin-sharp").value
    torch.testing.assert_close(value, attained, rtol=1e-6, atol=0.0)


def test_running_means_need_hardys_constant() -> None:
    """At A = 0 causal attention is the Cesàro matrix: its norm tends to 2, above the unmasked constant 1."""
    layer = one_head(torch.zeros(1, 1), causal=True)
    norms = [float(holdfast.local_lipschitz(layer, torch.ones(n, 1, dtype=torch.float64)).value) for n in (4, 64, 1000)]
    unmasked = holdfast.lipschitz_bound(changed(layer, causal=False), radius=1.0, tokens=4, method="mean-field").value
    masked = holdfast.lipschitz_bound(layer, radius=1.0, tokens=1000, method="mean-field-masked").value
    assert unmasked == pytest.approx(1.0)
    assert unmasked < norms[0] < norms[1] < norms[2] <= masked
    assert norms[2] > 1.7
    assert masked == pytest.approx(2.0)


def test_masks_lower_the_column_sums() -> None:
    """A key that few queries may attend to cannot move many outputs."""
    layer = one_head(random_matrix(3, 1))
    window = torch.ones(12, 12, dtype=torch.bool).tril().triu(-1)
    values = [
        holdfast.lipschitz_bound(layer.with_mask(mask), radius=3.0, tokens=12, method="castin-sharp")
        for mask in (None, window, torch.eye(12, dtype=torch.bool))
    ]
    columns = [float(value.terms["column_sum"]) for value in values]
    assert columns == pytest.approx([12.0, 2.0, 1.0], rel=1e-6)


# -- at a point


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_data_bound_is_not_above_the_plain_form(case: Case) -> None:
    """At most c (1 + max|a_i| max|x_j - m_i|) √(max column sum) + max ‖C Cov_i A‖, summed over heads."""
    value = holdfast.lipschitz_bound(case.layer, case.x, "castin-data").value
    layer, x = case.layer, case.x
    w, p = layer.weights(x), layer.attention(x)
    A, C = w.w_q @ w.w_k.mT * layer.scale, w.w_v @ w.w_o
    key = x.unsqueeze(-3) @ A
    if w.b_q is not None:
        key = key + (w.w_k @ w.b_q.unsqueeze(-1) * layer.scale).squeeze(-1).unsqueeze(-2)
    apart = x[:, None, None] - (p @ x.unsqueeze(1)).unsqueeze(-2)
    reach = apart.norm(dim=-1).amax((-2, -1)) * key.norm(dim=-1).amax(-1)
    covariance = torch.einsum("bhij,bhijd,bhije->bhide", p, apart, apart)
    query = torch.linalg.matrix_norm(covariance @ A.mT.unsqueeze(1), ord=2).amax(-1)
    c = torch.linalg.matrix_norm(C, ord=2)
    plain = (c * ((1 + reach) * p.sum(-2).amax(-1).sqrt() + query)).sum(-1) + abs(layer.residual)
    assert bool((value <= plain * (1 + 1e-6) + 1e-12).all())


def test_data_bound_covers_a_score_bias() -> None:
    case = make_case("bias", n=5, h=2, biases=True)
    bias = 2 * torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = changed(case.layer, score_bias=bias)
    norm = torch.stack([torch.linalg.matrix_norm(dense_jacobian(layer, x), ord=2) for x in case.x])
    assert bool((norm <= holdfast.lipschitz_bound(layer, case.x, "castin-data").value).all())


def test_query_blocks_are_what_one_token_moves_by_itself() -> None:
    """With all other tokens held, and the token's copy among the keys held too, only its query moves."""
    case = make_case("query", n=4, d=3, h=2, d_out=5, biases=True, causal=True)
    layer, x = case.layer, case.x[0]
    blocks = QueryBlocks.of(fold(layer, x)).dense()
    w = layer.weights(x)

    def outputs(queries: Tensor) -> Tensor:
        parts = layer.run(x)
        q = queries @ w.w_q.movedim(0, 1).flatten(1)
        q = q.reshape(4, 2, -1).movedim(1, 0) + w.b_q.unsqueeze(-2)  # type: ignore[union-attr]
        p = layer.probabilities(q @ parts.k.mT * layer.scale)
        return layer.output(x, type(parts)(q, parts.k, parts.v, p, p @ parts.v))

    jacobian = torch.func.jacrev(outputs)(x)
    expected = torch.stack([jacobian[i, :, i] for i in range(4)])
    torch.testing.assert_close(blocks, expected)


# -- limits and radii


@pytest.mark.parametrize("kind", ["plain", "causal", "heads", "biases"])
def test_large_radius_limit_is_the_limit(kind: str) -> None:
    case = make_case(kind, 3, n=6, d=4, **KINDS[kind])  # type: ignore[arg-type]
    limit = large_radius_limit(case.layer, case.x).value
    far = holdfast.local_lipschitz(case.layer, 1e4 * case.x, tolerance=1e-9).value
    torch.testing.assert_close(limit, far, rtol=1e-6, atol=0.0)


def test_large_radius_limit_counts_rows_with_one_sink() -> None:
    A, x = -torch.eye(2), torch.tensor([[-1.0, -0.05], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3]], dtype=torch.float64)
    assert float(large_radius_limit(one_head(A), x).value) == pytest.approx(math.sqrt(3))
    with pytest.raises(holdfast.InputError, match="two equal largest scores"):
        large_radius_limit(one_head(A), x[[0, 1, 1]])


@pytest.mark.parametrize("d", [1, 2, 7, 64])
def test_layer_norm_stays_within_its_radius(d: int) -> None:
    generator = torch.Generator().manual_seed(d)
    for size in (0.0, 1e-3, 1.0, 30.0):
        w, b = torch.randn(2, d, generator=generator, dtype=torch.float64)
        b = size * b
        radius, plain = layer_norm_radius(w, b), math.sqrt(d) * float(w.abs().max()) + float(b.norm())
        z = torch.randn(64, d, generator=generator, dtype=torch.float64)
        for _ in range(300):  # the maximum of |w z + b| on the sphere |z|² = d is a fixed point of this
            pushed = w * (w * z + b)
            z = math.sqrt(d) * pushed / pushed.norm(dim=-1, keepdim=True)
        largest = float((w * z + b).norm(dim=-1).max())
        assert largest * (1 - 1e-12) <= radius <= plain * (1 + 1e-12)
        assert radius <= largest * (1 + 1e-3)  # it is the exact maximum, up to the grid
        x = 100 * torch.randn(500, d, generator=generator, dtype=torch.float64)
        normed = torch.nn.functional.layer_norm(x, (d,), w, b, eps=1e-12)
        assert float(normed.norm(dim=-1).max()) <= radius * (1 + 1e-12)
        rms = torch.nn.functional.rms_norm(x, (d,), w, eps=1e-12)
        assert float(rms.norm(dim=-1).max()) <= rms_norm_radius(w) * (1 + 1e-12)
    assert layer_norm_radius(w) == rms_norm_radius(w)


def test_radius_of_huge_weights_does_not_overflow() -> None:
    w, b = (torch.tensor(row, dtype=torch.float64) for row in ([1e160, 1e160], [1e160, 0.0]))
    assert layer_norm_radius(w, b) == pytest.approx((math.sqrt(2) + 1) * 1e160)


# -- large scores and odd exponents


def test_sharp_bound_does_not_overflow_before_its_value() -> None:
    """αR = 1e20: the smallest probabilities are unknown, but they are small."""
    layer = one_head(-torch.eye(2))
    value = holdfast.lipschitz_bound(layer, radius=1e10, tokens=3, method="castin-sharp").value
    assert float(value) == pytest.approx((math.sqrt(3) + 1) * 1e20)


@pytest.mark.parametrize("dead", ["w_v", "w_o"])
def test_a_head_that_writes_nothing_does_not_overflow(dead: str) -> None:
    case = make_case("dead", h=3, biases=True, residual=0.5)
    weight = getattr(case.layer, dead).clone()
    weight[1] = 0.0
    layer = changed(case.layer, **{dead: weight})
    silent, loud = (
        changed(layer, **{dead: 0 * weight}),
        changed(layer, w_q=layer.w_q * torch.tensor([1, 1e6, 1])[:, None, None]),
    )
    assert holdfast.lipschitz_bound(silent, radius=1e3, tokens=4, method="mean-field").value == pytest.approx(0.5)
    values = [holdfast.lipschitz_bound(each, radius=1.0, tokens=4, method="mean-field").value for each in (layer, loud)]
    assert values[0] == values[1]


def test_exponents_next_to_one() -> None:
    layer, p = one_head(random_matrix(2, 0), causal=True), 1 + 2.0**-52
    value = holdfast.lipschitz_bound(layer, radius=0.5, tokens=3, p=p, method="mean-field-masked").value
    assert 2.0**52 <= value < math.inf
    with pytest.raises(
        holdfast.InputError, match="p is a whole number beyond float64; expected a number from 1 to inf"
    ):
        holdfast.lipschitz_bound(layer, radius=0.5, tokens=3, p=10**400)


# -- refusals


def test_refusals() -> None:
    plain, causal = one_head(random_matrix(2, 0)), one_head(random_matrix(2, 0), causal=True)
    masked = causal.with_mask(torch.ones(3, 3, dtype=torch.bool))
    turned = changed(plain, rotary=Rotary(*torch.ones(2, 3, 2, dtype=torch.float64)))
    expected = [
        (causal, "castin-ball", 2.0, "use castin-masked"),
        (plain, "castin-masked", 2.0, "use castin-ball"),
        (plain, "castin-ball", 1.0, "proved for p = 2, not for p = 1"),
        (causal, "mean-field", 2.0, "the constant is false then"),
        (plain, "mean-field-masked", 2.0, "not causal"),
        (masked, "mean-field-masked", 2.0, "a mask beside the causal one"),
        (causal, "mean-field-masked", 1.0, "no such constant at p = 1"),
        *((turned, name, 2.0, "rotary") for name in ("mean-field", "mean-field-masked")),
    ]
    for layer, name, p, reason in expected:
        with pytest.raises(NotApplicableError, match=reason):
            holdfast.lipschitz_bound(layer, radius=1.0, tokens=3, p=p, method=name)


def test_radius_errors() -> None:
    w = torch.ones(3)
    with pytest.raises(holdfast.InputError, match=r"bias has shape \(2,\) and weight \(3,\)"):
        layer_norm_radius(w, torch.ones(2))
    with pytest.raises(holdfast.InputError, match="weight is shape"):
        rms_norm_radius(torch.ones(2, 2))
    with pytest.raises(holdfast.InputError, match=r"bias of shape \(3,\) has 1 NaN"):
        layer_norm_radius(w, torch.tensor([0.0, math.nan, 0.0]))
