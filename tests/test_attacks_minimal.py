"""The search for the smallest change of an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from certify_cases import CLASSES, exact_radii, labelled, linear_network
from holdfast import InputError
from holdfast.attacks.minimal import MinimalAttack, answer_changed
from holdfast.attention.movement import distance
from holdfast.data.digits import demo_digits
from holdfast.graph import to_network
from holdfast.layers import TokenMean
from holdfast.linalg.rounding import Ball
from holdfast.models import load_digits_vit
from holdfast.models.digits import DigitsViT
from holdfast.network import Head, Network


def test_the_distance_to_a_linear_boundary_is_found_and_proved() -> None:
    network, x = linear_network(), labelled(12).inputs.double()
    prediction = network(x).argmax(-1)
    found = MinimalAttack()(network, x, prediction)
    exact = exact_radii(network, x)
    assert found.guarantee == "proved"
    assert bool((found.radius >= exact).all())
    torch.testing.assert_close(found.radius, exact, rtol=1e-6, atol=0)
    moved = x + found.perturbation.double()
    assert bool((distance(x, moved).upper <= found.radius).all())
    logits = network(Ball.exact(moved))
    rivals = logits.mid.scatter(1, prediction[:, None], -torch.inf).argmax(1)
    rows = torch.arange(len(x))
    assert bool(((logits[rows, rivals] - logits[rows, prediction]).lower >= 0).all())


def test_a_lead_that_rounding_may_have_made_proves_no_change() -> None:
    """The logits are 0.1 + 0.2 and 0.3 in float64: which one is larger, balls of their rounding cannot tell."""
    weight = torch.tensor([[0.1, 0.2], [0.3, 0.0]], dtype=torch.float64)
    network = Network([TokenMean(1)], Head(weight, torch.zeros(2, dtype=torch.float64)))
    x = torch.ones(2, 1, 2, dtype=torch.float64)
    for prediction in (0, 1):
        assert not bool(answer_changed(network, x, torch.full((2,), prediction)).any())
    assert bool(answer_changed(network, x + torch.tensor([0.0, 1e-9]), torch.ones(2, dtype=torch.int64)).all())


def test_where_nothing_changes_nothing_is_claimed() -> None:
    def constant(z: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0, 0.0], dtype=z.dtype) + 0 * z.sum((-2, -1))[:, None]

    x = torch.randn(3, 2, 2, dtype=torch.float64)
    found = MinimalAttack()(constant, x, torch.zeros(3, dtype=torch.int64))
    assert found.radius.tolist() == [torch.inf] * 3
    assert not bool(found.perturbation.any())


def test_a_tie_is_a_change() -> None:
    network = linear_network()
    tie = torch.zeros(1, 1, 6, dtype=torch.float64)  # no bias: all logits are exactly 0
    for answer in range(CLASSES):
        assert bool(answer_changed(lambda z: network(z), tie, torch.tensor([answer])))


def test_more_than_one_start_is_needed_and_made() -> None:
    """From x itself the search ends at the far boundary, where the gradient points; random ones find the near one."""

    def bent(z: Tensor) -> Tensor:
        near = 1 - 4 * torch.relu(z[:, 0, 1] - 0.05)  # flat at x, so its gradient says nothing there
        far = 1 - z[:, 0, 0]
        margin = torch.minimum(near, far)
        return torch.stack([margin, torch.zeros_like(margin)], 1)

    x, answer = torch.zeros(1, 1, 2, dtype=torch.float64), torch.tensor([0])
    alone = MinimalAttack(restarts=1)(bent, x, answer)
    several = MinimalAttack(restarts=8)(bent, x, answer)
    assert float(alone.radius) == pytest.approx(1.0, rel=1e-3)
    assert float(several.radius) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize("name", ["restarts", "targets", "steps"])
def test_counts_are_checked(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is 0; expected at least 1"):
        MinimalAttack(**{name: 0})


# -- on a real model


@pytest.fixture(scope="module")
def digits() -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    model, x = load_digits_vit().double(), demo_digits().images.double()
    return model, x, model(x).argmax(-1)


def test_batches_and_seeds(digits: tuple[Callable[[Tensor], Tensor], Tensor, Tensor]) -> None:
    model, x, prediction = digits
    attack = MinimalAttack(restarts=2, targets=3, steps=12)
    together = attack(model, x[:3], prediction[:3], seed=5)
    alone = [attack(model, x[i : i + 1], prediction[i : i + 1], seed=5) for i in range(3)]
    torch.testing.assert_close(together.radius, torch.cat([each.radius for each in alone]), rtol=1e-6, atol=0)
    assert together.guarantee == "numerical"  # a bare function has no proved rounding


def test_the_attack_is_as_strong_as_projected_descent(
    digits: tuple[Callable[[Tensor], Tensor], Tensor, Tensor],
) -> None:
    """No plain descent at 0.98 of the found distance changes an answer: ten random starts for every target."""
    model, x, prediction = digits
    x, prediction = x[:2], prediction[:2]
    found = MinimalAttack()(model, x, prediction)
    eps = 0.98 * found.radius
    assert not descend(model, x, prediction, eps, restarts=3, steps=40)
    assert descend(model, x, prediction, 1.05 * found.radius, restarts=1, steps=40)  # the check can find one


@pytest.mark.slow
def test_a_long_search_finds_nothing_nearer(digits: tuple[Callable[[Tensor], Tensor], Tensor, Tensor]) -> None:
    model, x, prediction = digits
    x, prediction = x[:4], prediction[:4]
    found = MinimalAttack()(model, x, prediction)
    longer = MinimalAttack(restarts=20, steps=100)(model, x, prediction, seed=7)
    assert bool((longer.radius >= 0.999 * found.radius).all())
    assert not descend(model, x, prediction, 0.99 * found.radius, restarts=10, steps=200)


def descend(
    model: Callable[[Tensor], Tensor], x: Tensor, prediction: Tensor, eps: Tensor, restarts: int, steps: int
) -> bool:
    """Projected gradient descent on every margin, on the sphere of radius eps: whether some answer changes."""
    generator = torch.Generator().manual_seed(11)
    targets = [(prediction + shift) % 10 for shift in range(1, 10)]
    radius = eps.repeat(9 * restarts)[:, None, None]
    centre, answer = x.repeat(9 * restarts, 1, 1), prediction.repeat(9 * restarts)
    goal = torch.cat(targets).repeat(restarts)
    delta = torch.randn(centre.shape, generator=generator, dtype=torch.float64)
    delta[: len(goal) // restarts] *= 1e-6
    for step in range(steps):
        delta = delta * radius / torch.linalg.vector_norm(delta, dim=(-2, -1), keepdim=True)
        z = (centre + delta).requires_grad_()
        logits = model(z)
        if bool((logits.argmax(1) != answer).any()):
            return True
        margin = logits.gather(1, answer[:, None]) - logits.gather(1, goal[:, None])
        (gradient,) = torch.autograd.grad(margin.sum(), z)
        length = torch.linalg.vector_norm(gradient, dim=(-2, -1), keepdim=True)
        delta = delta - radius * (1 - step / steps) * gradient / length
    return False


def test_networks_too_deep_for_balls_are_attacked_in_float64() -> None:
    torch.manual_seed(0)
    model = DigitsViT(depth=6).double().eval()
    images = demo_digits().images[:2].double()
    converted = to_network(model, images)
    x = converted.encode(images)
    prediction = converted.network(x).argmax(-1)
    found = MinimalAttack(restarts=1, steps=20)(converted.network, x, prediction)
    assert found.guarantee == "numerical"
    assert bool(torch.isfinite(found.radius).all())
    moved = converted.network(x + found.perturbation.double()).argmax(-1)
    assert bool((moved != prediction).all())
