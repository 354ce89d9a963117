"""Activations: derivatives against mpmath, and ranges that hold and are attained."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from holdfast.layers.activation.base import SmoothActivation, _turning
from holdfast.layers.activation.functions import Absolute, Relu, Softplus, activations
from holdfast.linalg import Ball

MP = mpmath.mp.clone()
MP.prec = 200

BY_MPMATH: dict[str, Any] = {
    "gelu": lambda t: t * (1 + MP.erf(t / MP.sqrt(2))) / 2,
    "gelu-tanh": lambda t: t * (1 + MP.tanh(MP.sqrt(2 / MP.pi) * (t + MP.mpf(0.044715) * t**3))) / 2,
    "silu": lambda t: t / (1 + MP.exp(-t)),
    "tanh": MP.tanh,
    "softplus": lambda t: MP.log(1 + MP.exp(t)),
    "centred-softplus": lambda t: MP.log((1 + MP.exp(t)) / 2),
    "softplus(7)": lambda t: MP.log(1 + MP.exp(7 * t)) / 7,
    "centred-softplus(0.3)": lambda t: MP.log((1 + MP.exp(MP.mpf(0.3) * t)) / 2) / MP.mpf(0.3),
}
SMOOTH: list[SmoothActivation] = [each for each in activations.values() if isinstance(each, SmoothActivation)]
SMOOTH += [Softplus(7.0), Softplus(0.3, centred=True)]
every = pytest.mark.parametrize("phi", SMOOTH, ids=lambda phi: phi.name)
orders = pytest.mark.parametrize("k", [1, 2, 3, 4])


def tensor(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_all_have_a_definition_here() -> None:
    assert {phi.name for phi in SMOOTH} == set(BY_MPMATH)


@every
def test_derivatives_are_enclosed(phi: SmoothActivation) -> None:
    points = tensor([-60.0, -9.3, -2.0, -0.7, -1e-3, 0.0, 1e-9, 0.3, 1.4, 3.1, 12.0, 45.0])
    for k in range(6):
        ball, value = phi.derivative(k, Ball.exact(points)), phi.derivative(k, points)
        for t, low, high, found in zip(*(x.tolist() for x in (points, ball.lower, ball.upper, value)), strict=True):
            exact = MP.taylor(BY_MPMATH[phi.name], MP.mpf(t), k)[k] * MP.factorial(k)
            slack = MP.mpf(10) ** -30  # of the numerical differentiation
            assert low - slack <= exact <= high + slack, (k, t)
            assert high - low <= 1e-12 * max(1, 7.0**k)
            assert abs(found - exact) <= 1e-12 * max(1, 7.0**k)


@every
def test_each_derivative_is_that_of_the_one_before(phi: SmoothActivation) -> None:
    t = 3 * normal(200)
    for k in range(5):
        found = torch.func.jvp(lambda z, k=k: phi.derivative(k, z), (t,), (torch.ones_like(t),))[1]
        torch.testing.assert_close(phi.derivative(k + 1, t), found, rtol=1e-9, atol=1e-9)


@every
@orders
def test_ranges_hold_and_are_attained(phi: SmoothActivation, k: int) -> None:
    """On a fine grid of every interval nothing lies outside, and both ends are nearly reached."""
    centre = torch.cat([4 * normal(60), 30 * normal(20, seed=1)])
    radius = torch.exp(3 * normal(80, seed=2) - 1)
    low, high = centre - radius, centre + radius
    found = phi.range(k, low, high)
    grid = low + (high - low) * torch.linspace(0, 1, 2001, dtype=torch.float64).unsqueeze(-1)
    values = phi.derivative(k, grid)
    size = float(values.abs().max())
    assert bool((values >= found.low - 1e-14 * size).all())
    assert bool((values <= found.high + 1e-14 * size).all())
    # between two points of the grid the derivative moves by less than this
    step = (high - low) / 2000 * float(phi.derivative(k + 1, tensor(0.0) + torch.linspace(-40, 40, 8001)).abs().max())
    slack = (step + 1e-12 * max(1, size)).clamp(max=4 * size)
    assert bool((found.high <= values.amax(0) + slack).all())
    assert bool((found.low >= values.amin(0) - slack).all())
    assert bool((phi.supremum(k, low, high) == torch.maximum(found.high, -found.low)).all())


@every
@orders
def test_extrema_are_found(phi: SmoothActivation, k: int) -> None:
    """The range over the line is that on a fine grid, to the accuracy of its square."""
    unit = phi.unit
    grid = torch.linspace(-25 * unit, 25 * unit, 100_001, dtype=torch.float64)
    values = phi.derivative(k, grid)
    everywhere = phi.range(k, tensor(-torch.inf), tensor(torch.inf))
    size = float(values.abs().max())
    assert abs(float(everywhere.high) - float(values.max())) <= 1e-5 * size
    assert abs(float(everywhere.low) - float(values.min())) <= 1e-5 * size
    assert float(everywhere.high) >= float(values.max()) * (1 - 1e-15)
    assert len(_turning(phi, k)) <= 8


def test_known_extrema() -> None:
    gelu, everything = activations["gelu"], (tensor(-torch.inf), tensor(torch.inf))
    assert isinstance(gelu, SmoothActivation)
    p = lambda t: float(torch.exp(tensor(-t * t / 2)) / (2 * torch.pi) ** 0.5)  # noqa: E731
    for k, exact in ((2, 2 * p(0)), (4, 4 * p(0))):
        assert exact <= float(gelu.supremum(k, *everything)) <= exact * (1 + 1e-13)
    t = ((7 - 33**0.5) / 2) ** 0.5
    exact = p(t) * (4 * t - t**3)
    assert exact * (1 - 1e-15) <= float(gelu.supremum(3, *everything)) <= exact * (1 + 1e-13)
    assert Softplus(8.0).supremum(2, *everything) == pytest.approx(2.0, rel=1e-12)
    tanh = activations["tanh"]
    assert isinstance(tanh, SmoothActivation)
    assert tanh.supremum(2, *everything) == pytest.approx(4 / 27**0.5, rel=1e-12)


@every
@orders
def test_drift_holds_and_vanishes_with_the_radius(phi: SmoothActivation, k: int) -> None:
    centre, radius = 3 * normal(50), torch.exp(2 * normal(50, seed=1))
    drift = phi.drift(k, centre, radius)
    grid = centre + radius * torch.linspace(-1, 1, 501, dtype=torch.float64).unsqueeze(-1)
    moved = (phi.derivative(k, grid) - phi.derivative(k, centre)).abs().amax(0)
    assert bool((drift >= moved - 1e-13).all())
    tiny = phi.drift(k, centre, torch.full_like(centre, 1e-12))
    assert bool((tiny <= 1e-9 * (1 if k < 4 else 1e3)).all())


def test_slopes_of_kinked_activations() -> None:
    low, high = tensor([-2.0, -1.0, 0.0, 1.0]), tensor([-1.0, 0.0, 1.0, 2.0])
    for phi, slopes in ((Relu(), (0.0, 1.0)), (Absolute(), (-1.0, 1.0))):
        flat, steep = slopes
        found = phi.slopes(low, high)
        assert found.low.tolist() == [flat, flat, steep, steep]
        assert found.high.tolist() == [flat, flat, steep, steep]
        both = phi.slopes(tensor([-1.0]), tensor([1.0]))
        assert (both.low.tolist(), both.high.tolist()) == ([flat], [steep])
        assert phi.all_slopes == slopes


@pytest.mark.parametrize("name", ["tanh", "softplus", "centred-softplus", "relu"])
def test_restricted_activations_have_slopes_between_0_and_1(name: str) -> None:
    phi = activations[name]
    assert phi.restricted
    low, high = phi.all_slopes
    assert low >= -1e-14
    assert high <= 1 + 1e-13
    assert not activations["gelu"].restricted


def test_ends_of_an_interval_are_exact_numbers() -> None:
    """A range is that of real numbers: at a single point it is the enclosed value."""
    gelu, t = activations["gelu"], tensor([0.3])
    assert isinstance(gelu, SmoothActivation)
    found = gelu.range(2, t, t)
    x = MP.mpf(0.3)
    exact = MP.npdf(x) * (2 - x**2)
    assert Fraction(float(found.low)) <= Fraction(str(exact)) <= Fraction(float(found.high))
    assert float(found.high - found.low) < 1e-14
