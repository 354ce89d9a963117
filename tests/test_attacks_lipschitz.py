"""Steep configurations: what the formulas promise is attained, and the ascent finds more."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer, HoldfastError, InputError, NotApplicableError
from holdfast.attacks import adversarial_configuration, two_diracs
from holdfast.attacks.configurations import dominant_tokens, inside
from holdfast.attention.rotary import Rotary
from holdfast.testing import changed, make_case
from holdfast.testing.bounds import dense_jacobian


def one_head(A: Tensor, causal: bool = False) -> AttentionLayer:
    eye = torch.eye(len(A), dtype=torch.float64).unsqueeze(0)
    return AttentionLayer(A.double().unsqueeze(0), eye, eye, eye, scale=1.0, causal=causal)


def random_matrix(d: int, seed: int, *, symmetric: bool) -> Tensor:
    A = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (A + A.mT) / 2 if symmetric else A


def gamma(A: Tensor) -> float:
    """max(-γ_min, γ_max/8) over the real eigenvalues, as in the paper; 0 where there are none of use."""
    values = torch.linalg.eigvals(A)
    real = values.real[values.imag.abs() < 1e-12].tolist()
    return max([0.0, *(-v for v in real), *(v / 8 for v in real)])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["any", "symmetric"])
def test_configurations_reach_the_published_formula(symmetric: bool, causal: bool) -> None:
    for seed in range(6):
        A = random_matrix(3, seed, symmetric=symmetric)
        for n, R in ((2, 0.5), (2, 2.0), (20, 1.0), (50, 1.5)):
            found = adversarial_configuration(one_head(A, causal), R, n)
            published = math.sqrt(n - 1) / (1 + (n - 1) * math.exp(-2 * gamma(A) * R**2))
            assert found.guaranteed is not None
            assert found.guaranteed >= published * (1 - 1e-9)
            assert float(found.lower) >= found.guaranteed * (1 - 1e-9)
            assert bool((found.witness.norm(dim=-1) <= R).all())


@pytest.mark.parametrize("A", [-torch.eye(2), torch.diag(torch.tensor([8.0, 0.0]))], ids=["negative", "positive"])
def test_configurations_are_the_papers(A: Tensor) -> None:
    """Most tokens at Ru and one at -Ru; or most at Ru/2 and one at Ru: both have γ = 1."""
    n, R = 10, 1.2
    found = adversarial_configuration(one_head(A), R, n)
    first, others = found.witness[0], found.witness[1:]
    assert bool((others == others[0]).all())
    torch.testing.assert_close(first, -others[0] if A[0, 0] < 0 else 2 * others[0])
    p, G = 1 / (1 + (n - 1) * math.exp(-2 * R**2)), 2 * R**2
    assert found.guaranteed == pytest.approx(math.sqrt(n - 1) * p * (1 + (1 - p) * G))
    for layer in (one_head(A), one_head(A, causal=True)):
        direction = torch.zeros(n, 2, dtype=torch.float64)
        direction[0] = first.flip(0) * torch.tensor([1.0, -1.0]) / R  # orthogonal to u, as in the paper's proof
        moved = (dense_jacobian(layer, found.witness) @ direction.flatten()).norm()
        assert moved >= math.sqrt(n - 1) * p * (1 - 1e-12)


def test_configurations_grow_like_the_root_of_n() -> None:
    for n in (11, 41, 161):
        lower = adversarial_configuration(one_head(-torch.eye(2)), 3.0, n).lower
        assert (n - 1) ** 0.5 <= lower <= holdfast.lipschitz_bound(one_head(-torch.eye(2)), radius=3.0, tokens=n).value


@pytest.mark.parametrize(
    "options",
    [
        {"h": 3, "biases": True},
        {"h": 4, "g": 2, "causal": True, "residual": 1.0},
        {"h": 2, "mask": "shared", "biases": True, "d_out": 2},
    ],
    ids=["biases", "grouped, causal", "mask"],
)
def test_promise_is_the_slope_in_the_direction_of_the_first_token(options: dict[str, object]) -> None:
    """Any number of heads, biases and masks: the closed form is what the dense Jacobian does to the others' outputs."""
    n, R = 5, 1.3
    layer = make_case("promise", 5, n=n, d=3, **options).layer  # type: ignore[arg-type]
    choices = dominant_tokens(layer, R)
    promised = choices.guaranteed(layer, n)
    for x, value in zip(choices.tokens(n), promised, strict=True):
        J = dense_jacobian(layer, x).reshape(n, layer.d_out, n, layer.d)
        moved = (J[1:, :, 0] @ (x[0] / R)).norm()
        torch.testing.assert_close(value, moved, rtol=1e-9, atol=1e-12)


def test_witness_is_what_it_says() -> None:
    layer = make_case("witness", 1, h=2, biases=True, residual=1.0).layer
    found = holdfast.lipschitz_attack(layer, 1.5, 4, restarts=4, steps=20)
    J = dense_jacobian(layer, found.witness)
    slope = (J @ found.direction.flatten()).norm() / found.direction.norm()
    torch.testing.assert_close(found.lower, slope, rtol=1e-10, atol=0.0)
    torch.testing.assert_close(found.lower, torch.linalg.matrix_norm(J, ord=2), rtol=1e-8, atol=0.0)
    assert found.lower <= slope * (1 + 1e-15)
    assert bool((found.witness.norm(dim=-1) <= 1.5).all())
    assert (found.side, found.guarantee, found.origin) == ("lower", "proved", "ascent")
    assert found.to_dict()["lower"] == float(found.lower)


def test_ascent_is_not_below_the_configurations_nor_a_random_search() -> None:
    for seed in range(4):
        n, R = 6, 1.0
        layer = make_case("ascent", seed, n=n, d=3, h=1 + seed % 2, causal=seed == 3).layer
        found = holdfast.lipschitz_attack(layer, R, n, steps=60).lower
        assert found >= adversarial_configuration(layer, R, n).lower * (1 - 1e-9)
        x = torch.randn(2000, n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = R * x / x.norm(dim=-1, keepdim=True)
        assert found >= holdfast.local_lipschitz(layer, x).value.max()


def test_ascent_comes_near_the_bound() -> None:
    """The sharp bound is within a factor of three of the truth here; the published one within a factor of nine."""
    A = random_matrix(4, 0, symmetric=False)
    A = A / torch.linalg.matrix_norm(A, ord=2)
    for n in (4, 64):
        layer = one_head(A)
        found = holdfast.lipschitz_attack(layer, 1.5, n, restarts=8, steps=60).lower
        sharp, published = (
            holdfast.lipschitz_bound(layer, radius=1.5, tokens=n, method=name).value
            for name in ("castin-sharp", "castin-ball")
        )
        assert found <= sharp <= 3 * found
        assert published <= 9 * found


def test_seed_decides() -> None:
    layer = make_case("seed", 2).layer
    runs = [holdfast.lipschitz_attack(layer, 1.0, 4, restarts=2, steps=3, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(runs[0].witness, runs[1].witness)
    assert not torch.equal(runs[0].witness, runs[2].witness)


@pytest.mark.parametrize("radius", [0.0, 1e-8, 1e3])
def test_any_radius(radius: float) -> None:
    layer = make_case("radius", 0, biases=True).layer
    found = holdfast.lipschitz_attack(layer, radius, 4, restarts=2, steps=5)
    assert bool(torch.isfinite(found.lower))
    assert bool((found.witness.norm(dim=-1) <= radius).all())
    assert found.lower <= holdfast.lipschitz_bound(layer, radius=radius, tokens=4).value


@pytest.mark.parametrize(("radius", "digits"), [(1e3, 1e-8), (1e4, 1e-6), (1e5, 1e-2)])
def test_large_scores_cost_few_digits(radius: float, digits: float) -> None:
    """Scores of 1e10: two tokens attend to the third and to nothing else, so the slope is √2."""
    found = adversarial_configuration(one_head(-torch.eye(2)), radius, 3)
    assert math.sqrt(2) * (1 - digits) <= found.lower <= math.sqrt(2)


@pytest.mark.parametrize("radius", [1e77, 1e150])
def test_radii_that_overflow_are_refused(radius: float) -> None:
    for attack in (
        lambda: adversarial_configuration(one_head(-torch.eye(2)), radius, 3),
        lambda: two_diracs(one_head(-torch.eye(2)), radius),
    ):
        with pytest.raises(HoldfastError, match="overflowed float64; use a smaller radius"):
            attack()


def test_one_token_is_linear() -> None:
    layer = make_case("one", 0, h=2, residual=1.0).layer
    norm = holdfast.local_lipschitz(layer, torch.ones(1, 4, dtype=torch.float64)).value
    torch.testing.assert_close(holdfast.lipschitz_attack(layer, 1.0, 1, restarts=1, steps=1).lower, norm)


def test_tokens_are_pulled_inside_exactly() -> None:
    x = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pulled = inside(x, 0.7)
    assert bool((pulled.norm(dim=-1) <= 0.7).all())
    short = x.norm(dim=-1) < 0.69
    assert torch.equal(pulled[short], x[short])


def test_errors() -> None:
    layer = make_case("errors", 0).layer
    with pytest.raises(InputError, match="radius is -1"):
        holdfast.lipschitz_attack(layer, -1.0, 4)
    with pytest.raises(InputError, match="tokens is 0"):
        holdfast.lipschitz_attack(layer, 1.0, 0)
    with pytest.raises(InputError, match="steps is 0; expected at least 1"):
        holdfast.lipschitz_attack(layer, 1.0, 4, steps=0)
    with pytest.raises(InputError, match="needs at least one other"):
        adversarial_configuration(layer, 1.0, 1)
    with pytest.raises(InputError, match=r"the mask has shape \(3, 3\); expected \(4, 4\)"):
        adversarial_configuration(layer.with_mask(torch.ones(3, 3, dtype=torch.bool)), 1.0, 4)
    turned = changed(layer, rotary=Rotary(*torch.ones(2, 4, 2, dtype=torch.float64)))
    with pytest.raises(NotApplicableError, match="without rotary positions"):
        adversarial_configuration(turned, 1.0, 4)
    with pytest.raises(InputError, match="not those of 3 tokens"):
        holdfast.lipschitz_attack(turned, 1.0, 3)
