"""Attention on weighted tokens, and mass splitting: the examples to all printed digits, and the law itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer, HoldfastError, InputError, NotApplicableError
from holdfast.attacks import split_attack, two_diracs
from holdfast.attention.measure import WeightedJacobian, doubled, on_measure
from holdfast.attention.rotary import Rotary
from holdfast.linalg import estimate
from holdfast.testing import Case, cases, changed, make_case

KINDS = ("plain", "grouped heads", "biases", "residual", "shared mask", "causal", "wide output", "everything")


def scalar_layer(a: float = -1.0) -> AttentionLayer:
    """Width 1, scores a x_i x_j, values as they are."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    return AttentionLayer(a * one, one, one, one, scale=1.0)


def chosen_cases() -> list[Case]:
    return [case for case in cases() if case.name in KINDS]


def random_weights(case: Case, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn(case.x.shape[:-1], generator=generator, dtype=torch.float64))


def split(t: Tensor, counts: list[int], dim: int) -> Tensor:
    return t.repeat_interleave(torch.tensor(counts), dim)


def split_layer(layer: AttentionLayer, counts: list[int]) -> AttentionLayer:
    """The layer on tokens of which each stands `counts` times; a copy attends as its original did."""
    n = len(counts)
    allowed = layer.allowed(n)
    return changed(layer, causal=False, mask=None if allowed is None else split(split(allowed, counts, -1), counts, -2))


# -- weighted tokens


@pytest.mark.parametrize("case", chosen_cases(), ids=lambda case: case.name)
def test_whole_weights_are_repeated_tokens(case: Case) -> None:
    n = case.x.shape[-2]
    counts = [1 + i % 3 for i in range(n)]
    weights = torch.tensor(counts, dtype=torch.float64)
    repeated = split_layer(case.layer, counts)(split(case.x, counts, -2))
    torch.testing.assert_close(split(on_measure(case.layer, weights)(case.x), counts, -2), repeated)
    # A common factor does not matter.
    torch.testing.assert_close(on_measure(case.layer, weights / 7)(case.x), on_measure(case.layer, weights)(case.x))


@pytest.mark.parametrize("case", chosen_cases(), ids=lambda case: case.name)
def test_weighted_jacobian_is_the_derivative_in_the_metric_of_the_weights(case: Case) -> None:
    member, weights = case.member(1), random_weights(case)[1]
    dense = WeightedJacobian(member.layer, member.x, weights).dense()
    J = torch.func.jacrev(lambda z: on_measure(member.layer, weights)(z))(member.x)
    root = weights.sqrt()
    expected = J * root[:, None, None, None] / root[None, None, :, None]
    torch.testing.assert_close(dense, expected.reshape(dense.shape))


def test_equal_weights_change_nothing() -> None:
    case = cases()[0]
    weights = torch.full(case.x.shape[:-1], 0.3, dtype=torch.float64)
    weighted = estimate(WeightedJacobian(case.layer, case.x, weights)).value
    torch.testing.assert_close(weighted, holdfast.local_lipschitz(case.layer, case.x).value)


def test_batch_equals_loop() -> None:
    case = make_case("batch", h=3, biases=True)
    weights = random_weights(case)
    together = estimate(WeightedJacobian(case.layer, case.x, weights), tolerance=1e-10).value
    apart = [estimate(WeightedJacobian(case.layer, case.x[i], weights[i]), tolerance=1e-10).value for i in range(2)]
    torch.testing.assert_close(together, torch.stack(apart))


# -- mass splitting


def test_example_of_two_tokens() -> None:
    """With d = 1, A = -1, V = 1, tokens (5.5981, 0.4677) go from 1.3525 to 2.0080."""
    found = split_attack(scalar_layer(), torch.tensor([[5.5981], [0.4677]], dtype=torch.float64))
    assert f"{found.local:.4f}" == "1.3525"
    assert f"{found.slope:.4f}" == "2.0080"
    assert found.guarantee == "proved"
    assert found.slope * (1 - 1e-4) <= found.lower <= found.slope * (1 + 1e-4)


@pytest.mark.parametrize("r", [3.0, 10.0, 100.0])
def test_example_of_unbounded_gain(r: float) -> None:
    """(1 - r⁻²) δ_0 + r⁻² δ_{-r} goes from about 1/r to 1 - r⁻²."""
    x = torch.tensor([[0.0], [-r]], dtype=torch.float64)
    weights = torch.tensor([1 - r**-2, r**-2], dtype=torch.float64)
    found = split_attack(scalar_layer(), x, weights, step=1e-3 / r**2)
    assert float(found.slope) == pytest.approx(1 - r**-2, rel=1e-12)
    assert float(found.local) == pytest.approx(1 / r, rel=2 / r**2)
    assert float(found.lower) == pytest.approx(1 - r**-2, rel=1e-4)
    assert float(found.gain) == pytest.approx(r, rel=3 / r**2)
    assert int(found.token) == 0


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("case", chosen_cases(), ids=lambda case: case.name)
def test_law_of_splitting(case: Case, weighted: bool) -> None:
    """The slope of doubled tokens is the larger of the local constant and the blocks: exactly."""
    weights = random_weights(case) if weighted else None
    found = split_attack(case.layer, case.x, weights)
    x2 = torch.cat([case.x, case.x], -2)
    measure = case.layer if weights is None else on_measure(case.layer, weights)
    pair = doubled(measure, case.x.shape[-2])
    root = (
        torch.ones(2, x2.shape[-2], 1, dtype=torch.float64)
        if weights is None
        else torch.cat([weights] * 2, -1)[..., None].sqrt()
    )
    for i in range(2):
        mask, bias = (t if t is None or t.ndim == own else t[i] for t, own in ((pair.mask, 2), (pair.score_bias, 3)))
        bias = bias if bias is None or bias.ndim < 4 else bias[i]
        member = changed(pair, mask=mask, score_bias=bias)
        J = torch.func.jacrev(lambda z, member=member: member(z))(x2[i])
        J = J * root[i][:, :, None, None] / root[i][None, None]
        exact = torch.linalg.matrix_norm(J.reshape(J.shape[0] * J.shape[1], -1), ord=2)
        torch.testing.assert_close(found.slope[i], exact, rtol=1e-9, atol=1e-12)


def test_two_copies_are_enough_and_unequal_counts_keep_the_law() -> None:
    """Copies that keep the weights: three, two and one of the tokens."""
    layer, x = scalar_layer(), torch.tensor([[5.5981], [0.4677], [-1.0]], dtype=torch.float64)
    slope = split_attack(layer, x, torch.ones(3, dtype=torch.float64)).slope
    counts = [3, 2, 4]
    shares = split(torch.tensor([1 / c for c in counts], dtype=torch.float64), counts, 0)
    divided = estimate(WeightedJacobian(layer, split(x, counts, 0), shares), tolerance=1e-12).value
    torch.testing.assert_close(divided, slope)


def test_witness_attains_the_law_on_random_layers() -> None:
    helped = 0
    for seed in range(40):
        case = make_case("random", seed, n=3, d=2, h=2, sharpness=2.0, size=2.0)
        found = split_attack(case.layer, case.x, step=1e-6)
        assert bool((found.lower <= found.divided.amax(-1) * (1 + 1e-3)).all())
        assert bool((found.lower >= found.divided.amax(-1) * (1 - 1e-3)).all())
        # The witness is the doubled layer at doubled tokens: anyone can run it.
        ratio = (found.layer(found.moved) - found.layer(found.witness)).norm(dim=(-2, -1))
        ratio = ratio / (found.moved - found.witness).norm(dim=(-2, -1))
        torch.testing.assert_close(found.lower, ratio, rtol=1e-4, atol=1e-6)
        helped += int((found.gain > 1.001).sum())
    assert 0 < helped < 40


def test_nothing_moves_at_the_origin() -> None:
    """The step is a share of the longest token: where all are 0 nothing moves, which is no number less than 0."""
    x, weights = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for found in (split_attack(scalar_layer(), x), split_attack(scalar_layer(), x, weights)):
        assert float(found.lower) == 0.0
        assert float(found.gain) == 1.0
    silent = changed(scalar_layer(), w_v=0 * weights[:1, None, None])
    assert float(split_attack(silent, x + 1, weights).gain) == 1.0


def test_inputs_that_overflow_are_refused() -> None:
    x, weights = torch.tensor([[1e200], [-1e200]], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    for given in (None, weights):
        with pytest.raises(HoldfastError, match="overflowed float64; use smaller weights or inputs"):
            split_attack(scalar_layer(), x, given)


# -- two Dirac masses


@pytest.mark.parametrize(("low", "high"), [(-1.0, 0.5), (-0.01, 4.0)], ids=["negative", "positive"])
@pytest.mark.parametrize("R", [0.5, 1.0, 2.0])
def test_two_diracs_reach_the_formula(low: float, high: float, R: float) -> None:
    """e^{γR²} √t/(1+t) (1 + 2γR² t/(1+t)) for every t: the best is attained."""
    eye = torch.eye(2, dtype=torch.float64).unsqueeze(0)
    A = torch.diag(torch.tensor([low, high], dtype=torch.float64)).unsqueeze(0)
    layer = AttentionLayer(A, eye, eye, eye, scale=1.0)
    found = two_diracs(layer, R)
    gamma = max(-low, high / 8)
    t = torch.logspace(-3, 3, 500, dtype=torch.float64)
    formulas = math.exp(gamma * R**2) * t.sqrt() / (1 + t) * (1 + 2 * gamma * R**2 * t / (1 + t))
    assert found.guaranteed is not None
    assert found.guaranteed >= float(formulas.max()) * (1 - 1e-3)
    assert float(found.lower) >= found.guaranteed * (1 - 1e-9)
    assert found.lower <= holdfast.lipschitz_bound(layer, radius=R, tokens=2, method="mean-field").value
    assert found.weights is not None
    assert float(found.weights.sum()) == pytest.approx(1.0)
    assert bool((found.witness.norm(dim=-1) <= R).all())


# -- errors


def test_errors() -> None:
    layer, x = scalar_layer(), torch.zeros(2, 1, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(InputError, match="not positive and finite"):
        on_measure(layer, torch.tensor([1.0, 0.0], dtype=torch.float64))
    with pytest.raises(InputError, match="weights is list; expected a tensor"):
        on_measure(layer, [0.5, 0.5])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="weights has 3 numbers for each input and x 2 tokens"):
        WeightedJacobian(layer, x, torch.ones(3, dtype=torch.float64))
    with pytest.raises(InputError, match="step is -1"):
        split_attack(layer, x, step=-1.0)
    with pytest.raises(NotApplicableError, match="the layer has a mask"):
        two_diracs(changed(layer, causal=True), 1.0)
    turned = changed(make_case("turned", n=2).layer, rotary=Rotary(*torch.ones(2, 2, 2, dtype=torch.float64)))
    with pytest.raises(NotApplicableError, match="rotary"):
        split_attack(turned, torch.zeros(2, 4, dtype=torch.float64), one)
    with pytest.raises(NotApplicableError, match="a copy of a token would stand at another position"):
        doubled(turned, 2)
