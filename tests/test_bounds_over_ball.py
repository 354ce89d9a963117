"""What holds on a ball: weights of third moments against the exact matrices, and what bends in normalised scores."""

from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.attention import AttentionJacobian, AttentionLayer, HeadNorm, Rotary, ValueOperator
from holdfast.bounds import second_order, yudin
from holdfast.bounds.over_ball import OverBall, _covered_norm
from holdfast.layers import Attention
from holdfast.linalg.arithmetic import Numerical, Proved
from holdfast.testing import gaussian_case, make_case
from holdfast.testing.ingredients import Situation, ingredients_of

AT_X = torch.zeros(1, dtype=torch.float64)


def centred(weights: Tensor) -> Tensor:
    """The matrix of f ↦ min over c of Σ_j w_j (f_j - c)²."""
    total = weights.sum(-1)[..., None, None]
    return torch.diag_embed(weights) - weights.unsqueeze(-1) * weights.unsqueeze(-2) / total


def third_moment(p: Tensor, D: Tensor) -> Tensor:
    """The matrix of f ↦ Σ_j p_j D_j (f_j - E_p f)²."""
    off = torch.eye(p.shape[-1], dtype=p.dtype) - p.unsqueeze(-2).expand(*p.shape, p.shape[-1])
    return off.mT @ torch.diag_embed(p * D) @ off


def excess(w: Tensor, p: Tensor, D: Tensor) -> Tensor:
    """The largest eigenvalue of the third moment less its bound, relative to the largest weight."""
    return torch.linalg.eigvalsh(third_moment(p, D) - centred(w)).amax(-1) / w.amax(-1)


@pytest.mark.parametrize("row", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_weights_cover_third_moments(seed: int, row: float) -> None:
    case = gaussian_case(seed, n=9, d=6, h=3, norm=2.0, row=row)
    for a in (Numerical(), Proved()):
        ball = OverBall(a, case.layer, case.x, a.lift(AT_X))
        w, D, p = ball.third_weights[0], a.number(ball.value_reach[0]), a.number(ball.f.p)
        assert bool((excess(w, p, D) < 1e-12).all())


def test_some_weights_are_below_those_of_the_largest_distance() -> None:
    a = Numerical()
    case = gaussian_case(0, n=9, d=6, h=3, norm=2.0, row=3.0)
    ball = OverBall(a, case.layer, case.x, AT_X)
    largest = ball.q * ball.value_reach.amax(-1, keepdim=True)
    assert bool((ball.third_weights <= largest * (1 + 1e-9) + 1e-300).any())
    assert float((ball.third_weights / largest).amin()) < 0.9


def test_weights_one_percent_smaller_would_not_cover() -> None:
    """Two tokens that share the attention evenly: here the weights are attained."""
    a = Numerical()
    case = gaussian_case(1, n=2, d=3, h=1, norm=2.0, row=1.0)
    old = case.layer
    layer = AttentionLayer(torch.zeros_like(old.w_q), old.w_k, old.w_v, old.w_o)
    ball = OverBall(a, layer, case.x, AT_X)
    w, D, p = ball.third_weights[0], ball.value_reach[0], ball.f.p
    assert float(excess(w, p, D).amax()) == pytest.approx(0, abs=1e-12)
    assert float(excess(0.99 * w, p, D).amin()) > 0.009


@pytest.mark.parametrize("method", ["second-order", "mixed"])
def test_values_far_from_the_origin_keep_their_differences(method: str) -> None:
    """A common offset of the values of 1e8 used to cancel all digits of their distances."""
    scores, eye = torch.diag(torch.tensor([6.0, 6.0, 0.0])).double()[None], torch.eye(3).double()[None]
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 2] = 1e8
    layer = AttentionLayer(scores, scores, eye, eye, scale=1.0)
    value = holdfast.bound(layer, x, 0.02, method=method, guarantee="numerical").value
    assert value >= holdfast.attack(layer, x, 0.02).lower


@pytest.mark.parametrize("method", ["second-order", "mixed"])
def test_an_overflow_is_not_taken_for_zero(method: str) -> None:
    case = gaussian_case(0, n=3, d=3, h=1, norm=1.0, row=1.0)
    old = case.layer
    layer = AttentionLayer(old.w_q, old.w_k, old.w_v * 1e155, old.w_o)
    with pytest.raises(holdfast.HoldfastError, match="overflowed float64"):
        holdfast.bound(layer, case.x, 0.01, method=method, guarantee="numerical")


def test_a_row_on_one_key_keeps_its_small_norm() -> None:
    """The largest probability must not be rounded up: the norm falls as it grows."""
    a, tail = Proved(), 5e-21
    weights = torch.tensor([1.0, tail], dtype=torch.float64)
    assert float(_covered_norm(a, weights).upper) >= 2 * tail


@pytest.mark.parametrize("turned", [0, 2])
def test_large_layers_are_bounded_at_the_asked_radii_alone(turned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer nodes and no split of directions are looser, never below the attack, and equal as eps vanishes."""
    case = make_case("", n=5, d=4, k=2, rotary=turned, sharpness=2.0)
    radii = [1e-7, 0.05, 0.5]
    fine = holdfast.bound(case.layer, case.x, radii, "second-order")
    monkeypatch.setattr(second_order, "_LARGE", 0)
    monkeypatch.setattr(second_order, "_LITTLE", 2.0)
    coarse = holdfast.bound(case.layer, case.x, radii, "second-order")
    attained = holdfast.attack(case.layer, case.x, radii, restarts=3, steps=30).lower
    assert "other" not in coarse.terms
    assert bool((coarse.value >= attained).all())
    assert bool((coarse.value >= fine.value * (1 - 1e-5)).all())
    torch.testing.assert_close(coarse.value[:, 0], fine.value[:, 0], rtol=1e-5, atol=0)
    monkeypatch.setattr(second_order, "_LITTLE", 0.0)
    split = holdfast.bound(case.layer, case.x, radii, "second-order").value
    assert bool(((split >= attained) & (split <= coarse.value * (1 + 1e-5))).all())


@pytest.mark.parametrize("residual", [0.0, 1.0])
def test_the_value_path_is_bounded_on_the_whole_ball(residual: float) -> None:
    """‖H ⊗ I + Σ_l P_l(Z) ⊗ C_lᵀ‖ grows with the distance of Z from X, and the bound with it."""
    case = make_case("", 3, n=3, d=3, residual=residual)
    radii, a = torch.tensor([1e-3, 0.03], dtype=torch.float64), Proved()
    ball = OverBall(a, case.layer, case.x, a.lift(radii))
    at_x = a.norm(ValueOperator(case.layer, case.x))
    bound = yudin.value_path_on_balls(ball, at_x, residual, yudin.attention_movement(ball)).upper
    ways = torch.randn(64, *case.x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ways = ways / torch.linalg.vector_norm(ways, dim=(-2, -1), keepdim=True) * (1 - 1e-12)
    for radius, most in zip(radii, bound, strict=True):
        operators = (ValueOperator(case.layer, case.x + radius * way).dense() for way in ways)
        attained = torch.stack([torch.linalg.matrix_norm(matrix, ord=2) for matrix in operators]).amax(0)
        assert bool((at_x.mid * (1 + 1e-6) < attained).all())  # it does grow
        assert bool((attained <= most).all())


@pytest.mark.parametrize(("side", "most"), [("q_norm", 1.001), ("k_norm", 1.5)])
def test_bending_of_normed_scores_is_nearly_attained(side: str, most: float) -> None:
    eye, norm = torch.eye(2, dtype=torch.float64).unsqueeze(0), HeadNorm(torch.ones(2, dtype=torch.float64), eps=0.1)
    layer = AttentionLayer(eye, eye, eye, eye, scale=1.0).replace(**{side: norm})
    x = torch.tensor([[0.3, 0.1], [-0.3, -0.1]], dtype=torch.float64)
    ball = OverBall(Proved(), layer, x, Proved().lift(AT_X))
    bound = ball.map.bend(Proved().lift(ball.q))
    assert bound is not None
    g = torch.randn(4000, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g[:2000, :, 1] = 0.0  # one token alone
    g = g / torch.linalg.vector_norm(g, dim=(-2, -1), keepdim=True)
    truth = next(each for each in ingredients_of(layer) if each.name == "bend").truth
    largest = float(truth(Situation(layer, x, x.expand_as(g), g, 0.0)).max())
    assert largest <= float(bound.upper) <= most * largest


def bent_alone(side: str) -> tuple[AttentionLayer, Tensor]:
    """Scores whose first derivative vanishes at x, so that nothing but what bends in them is left.

    One side is constant, a bias that is turned; the other is normalised and lies where the scores are least.
    """
    angles = torch.tensor([[0.0], [1.3]], dtype=torch.float64)
    turn = torch.stack([torch.cat([angles.cos(), -angles.sin()], -1), torch.cat([angles.sin(), angles.cos()], -1)], -2)
    rotary = Rotary(angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))
    constant = torch.tensor([1.0, 0.0], dtype=torch.float64)
    at_keys = turn @ constant
    asked = (at_keys[0] - at_keys[1]).expand(2, 2) if side == "q" else -at_keys[:1].expand(2, 2)
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[:, :2] = torch.nn.functional.normalize((turn.mT @ asked.unsqueeze(-1)).squeeze(-1), dim=-1)
    x[:, 2] = torch.tensor([1.0, -1.0])
    moving, still = torch.eye(3, 2, dtype=torch.float64)[None], torch.zeros(1, 3, 2, dtype=torch.float64)
    value = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).reshape(1, 3, 1)
    norm, weights = HeadNorm(torch.ones(2, dtype=torch.float64), eps=1e-6), (value, torch.ones_like(value[:, :1]))
    options: dict[str, Any] = {"scale": 2.0, "rotary": rotary}
    if side == "q":
        return AttentionLayer(moving, still, *weights, b_k=constant[None], q_norm=norm, **options), x
    return AttentionLayer(still, moving, *weights, b_q=constant[None], k_norm=norm, **options), x


@pytest.mark.parametrize("side", ["q", "k"])
def test_what_bends_in_normalised_scores_is_covered(side: str) -> None:
    layer, x = bent_alone(side)
    radius, a = 0.2, Proved()
    ball = OverBall(a, layer, x, a.lift(torch.tensor([radius], dtype=torch.float64)))
    draw = torch.Generator().manual_seed(0)
    ways = torch.randn(4000, 2, 3, generator=draw, dtype=torch.float64)
    ways[..., 2] = 0
    ways[::2, 1] = 0
    ways[1::4, 0] = 0
    ways = ways / ways.flatten(1).norm(dim=1)[:, None, None]
    moved = x + radius * (1 - 1e-9) * torch.rand(4000, 1, 1, generator=draw, dtype=torch.float64) ** 0.2 * ways
    p = layer.attention(moved)
    assert 0.9 < float((p / ball.q[0]).max()) <= 1

    def scores(z: Tensor) -> Tensor:
        q, k = (side.value for side in layer.placed(z)[:2])
        return layer.scale * q @ k.mT

    slopes = torch.func.jvp(scores, (moved,), (ways,))[1]
    spread = (p * (slopes - (p * slopes).sum(-1, keepdim=True)) ** 2).sum(-1).sqrt()
    assert bool((spread[:, 0] <= ball.score_spread.upper[0]).all())


def test_gains_where_scores_are_normalised() -> None:
    layer, x = bent_alone("q")
    a, rho = Proved(), torch.tensor([0.1], dtype=torch.float64)
    gain = Attention(layer).gain(a, x, a.lift(rho)).upper
    ways = torch.randn(200, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = x + rho * ways / ways.flatten(1).norm(dim=1)[:, None, None]
    slopes = torch.linalg.matrix_norm(torch.stack([AttentionJacobian(layer, z).dense() for z in moved]), 2)
    assert bool((slopes <= gain).all())
