"""Every operation on balls holds the exact result: rational arithmetic, or mpmath where there are roots and powers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast.errors import HoldfastError, InputError
from holdfast.linalg.rounding import (
    FLOOR,
    UNIT,
    Ball,
    down,
    frobenius,
    frobenius_upper,
    gamma,
    lift,
    outward,
    power_of_two,
    product_error,
    up,
)

Exact = np.ndarray[Any, Any]  # of Fraction
Case = tuple[Ball, Exact]  # a ball and one of its members

MP = mpmath.mp.clone()
MP.prec = 400
SUBNORMAL = 2.0**-1074
LARGEST = torch.finfo(torch.float64).max

quickly = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no fault
)


# -- exact numbers


def tensor(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def exact(x: Tensor) -> Exact:
    return np.vectorize(Fraction, otypes=[object])(x.numpy())


def by_mpmath(function: Callable[[Any], Any]) -> Callable[[Exact], Exact]:
    """The function of rational numbers, to 400 bits."""

    def one(z: Fraction) -> Fraction:
        value = function(MP.mpf(z.numerator) / z.denominator)
        mantissa, exponent = value.man_exp
        return int(MP.sign(value)) * mantissa * Fraction(2) ** exponent

    return np.vectorize(one, otypes=[object])


EXP, EXPM1, LOG, SQRT, TANH, ERF = (
    by_mpmath(function) for function in (MP.exp, MP.expm1, MP.log, MP.sqrt, MP.tanh, MP.erf)
)


def member(ball: Ball, where: Exact) -> Exact:
    """The member at mid + where · rad, for -1 <= where <= 1."""
    return exact(ball.mid) + where * exact(ball.rad)


def members(ball: Ball, count: int, seed: int = 0) -> Iterator[Exact]:
    """The midpoint, two extreme members and members drawn from corners and inside."""
    generator = np.random.default_rng(seed)
    for i in range(count):
        if i < 3:
            where = np.full(ball.shape, Fraction(i - 1), dtype=object)
        else:
            sixths = generator.integers(-9, 10, ball.shape).clip(-6, 6)
            where = np.vectorize(lambda k: Fraction(int(k), 6), otypes=[object])(sixths)
        yield member(ball, where)


def assert_holds(ball: Ball, value: Exact) -> None:
    """The ball makes no claim (an infinite radius, or none at all), or a true one."""
    assert ball.mid.shape == ball.rad.shape == value.shape
    parts = (ball.mid, ball.rad, ball.lower, ball.upper)
    for mid, rad, lower, upper, z in zip(*(t.flatten().tolist() for t in parts), value.flat, strict=True):
        assert not z < lower
        assert not z > upper
        if not rad < math.inf:
            continue
        assert math.isfinite(mid)
        assert abs(z - Fraction(mid)) <= rad


# -- operands: a few numbers where floating point breaks, and any others

EDGES = (0.0, SUBNORMAL, 1e-320, FLOOR, 1.4 * 2.0**-1021, 1e-300, 1e-160, 1e-10, 1 / 3, 1.0, 1 + 2 * UNIT, 1e10)
EDGES += (1e16, 1e155, 1e300, LARGEST)
numbers = st.sampled_from([sign * x for x in EDGES for sign in (1, -1)]) | st.floats(
    allow_nan=False, allow_infinity=False
)
relative = st.sampled_from([0.0, 0.0, 2.0**-52, 1e-9, 0.3, 1 - 2.0**-50, 1.0])
absolute = st.sampled_from([0.0, 0.0, 0.0, SUBNORMAL, 1e-320, 1e-307, 1e-30, 1.0, 1e200])
places = st.sampled_from([Fraction(-1), Fraction(-1, 3), Fraction(0), Fraction(1)])


@st.composite
def cases(draw: st.DrawFn, *shape: int, values: st.SearchStrategy[float] = numbers) -> Case:
    size = math.prod(shape)

    def fill(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(strategy, min_size=size, max_size=size))

    mid = tensor(fill(values)).reshape(shape)
    rad = mid.abs() * tensor(fill(relative)).reshape(shape) + tensor(fill(absolute)).reshape(shape)
    ball = Ball(mid, torch.where(torch.isfinite(rad), rad, 0.0))
    where = np.array(fill(places), dtype=object).reshape(shape)
    return ball, member(ball, where)


def point(mid: object, rad: object = 0.0) -> Case:
    """The ball, and its member next to zero."""
    ball = Ball(tensor(mid), tensor(rad).expand_as(tensor(mid)))
    return ball, member(ball, np.vectorize(lambda m: Fraction(-1 if m > 0 else 1), otypes=[object])(ball.mid.numpy()))


# -- arithmetic


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul], ids=lambda op: op.__name__)
@quickly
@given(a=cases(2, 1), b=cases(3))
def test_elementwise(op: Callable[[Any, Any], Any], a: Case, b: Case) -> None:
    assert_holds(op(a[0], b[0]), op(a[1], b[1]))


@quickly
@given(a=cases(2, 1), b=cases(3))
@example(a=point([[1.5e-318], [1.0]]), b=point([1.5e-308, -1e-300, 3.0], [1e-320, 1e-307, 0.0]))
@example(a=point([[1e300], [-1e-300]]), b=point([1e-300, 1e300, 1e8], [1e-301, 1e299, 1e8 * (1 - 2.0**-50)]))
def test_division(a: Case, b: Case) -> None:
    quotient = a[0] / b[0]
    may_vanish = b[0].mid.abs() <= b[0].rad
    assert bool((quotient.rad[:, may_vanish] == math.inf).all())
    # Where the divisor may vanish there is no claim to check, and any divisor will do.
    divisor = np.where(may_vanish.numpy(), Fraction(1), b[1])
    assert_holds(quotient, a[1] / divisor)


@quickly
@given(a=cases(2, 3), b=cases(3, 2))
@example(a=point([[1e300, 1.0, 0.0]] * 2), b=point([[1.4 * 2.0**-1021] * 2, [0.0] * 2, [1e300] * 2]))
@example(a=point([[1 + 2 * UNIT] * 3] * 2), b=point([[1 + 6 * UNIT] * 2, [1.0] * 2, [-1.0] * 2]))
@example(a=point([[1e155, 1.0, 1.0]] * 2), b=point([[-1e155] * 2, [1.0] * 2, [1.0] * 2]))
def test_matrix_product(a: Case, b: Case) -> None:
    assert_holds(a[0] @ b[0], a[1] @ b[1])


@pytest.mark.parametrize("subnormal", [SUBNORMAL, 7 * SUBNORMAL, 1e-310, 1.4 * 2.0**-1021])
@pytest.mark.parametrize("large", [1.1e300, 1 / 3 * 1e308, 1e16 + 2])
def test_matrix_product_of_tiny_and_large(subnormal: float, large: float) -> None:
    (a, x), (b, y) = point([[large]]), point([[subnormal]])
    assert_holds(a @ b, x @ y)
    assert_holds(b @ a, x @ y)


@pytest.mark.parametrize("dim", [0, -1, (0, 1)])
@quickly
@given(a=cases(2, 3))
@example(a=point([[-1e308] * 3] * 2))
def test_sum(dim: int | tuple[int, ...], a: Case) -> None:
    assert_holds(a[0].sum(dim), np.asarray(a[1].sum(dim), dtype=object))
    assert_holds(a[0].sum(dim, keepdim=True), a[1].sum(dim, keepdims=True))


@quickly
@given(a=cases(2, 3))
def test_unary(a: Case) -> None:
    ball, z = a
    assert_holds(ball, z)
    assert_holds(-ball, -z)
    assert_holds(ball.square(), z * z)
    assert_holds(ball.abs(), abs(z))
    assert_holds(ball.amax(-1), z.max(-1))
    assert_holds(ball.clamp(max=0.25), np.minimum(z, Fraction(1, 4)))
    assert_holds(ball.clamp(min=-0.25), np.maximum(z, Fraction(-1, 4)))
    assert_holds(ball[:1].minimum(ball[1:]), np.minimum(z[:1], z[1:]))


@quickly
@given(a=cases(4))
@example(a=point([-0.0, 0.0, 1.0, -1.0], [0.0, SUBNORMAL, 1.0, 2.0]))
@example(a=point([1e-320, 1e-300, 1e300, 1e-15], [1e-320, 1e-316, 1e284, 1e-15]))
def test_square_root_of_the_members_that_have_one(a: Case) -> None:
    root = a[0].sqrt()
    assert bool((root.rad >= 0).all())
    some = (a[0].mid + a[0].rad >= 0).numpy()  # else no member has a root, and nothing is claimed
    z = np.where(a[1] > 0, a[1], Fraction(0))
    assert_holds(Ball(root.mid[some], root.rad[some]), SQRT(z[some]))


turns = st.sampled_from([-0.0, -1e4, -745.2, -708.5, -690.0, -1e-300, 709.0, 715.0])


@quickly
@given(a=cases(4, values=turns | st.floats(-800, 800)))
@example(a=point([-1e3, -800.0, -750.0, 700.0], [300.0, 200.0, 1.0, 1e-3]))
def test_exponential(a: Case) -> None:
    ball = Ball(a[0].mid, a[0].rad.clamp(max=300.0))
    for z in members(ball, 5):
        assert_holds(ball.exp(), EXP(z))


def test_exponential_of_a_badly_known_exponent_is_between_0_and_the_largest() -> None:
    for mid, rad in ((-1e19, 1e4), (-2000.0, 1000.0), (-1e300, 1e290)):
        ball = Ball(tensor(mid), tensor(rad)).exp()
        assert 0.0 <= ball.upper < 1e-299
    wide = Ball(tensor(-20.0), tensor(19.0)).exp()
    assert float(EXP(Fraction(-1))) <= wide.upper < 0.37
    assert not bool(torch.isfinite(Ball(tensor(-math.inf), tensor(math.inf)).exp().upper))


@quickly
@given(a=cases(4))
@example(a=point([1.0, 1 + 2 * UNIT, 1 - UNIT, 1e-320], [0.0, 0.0, 1e-300, 9e-321]))
def test_logarithm_of_positive_members(a: Case) -> None:
    logarithm = a[0].log()
    may_vanish = a[0].mid <= a[0].rad
    assert bool((logarithm.rad[may_vanish] == math.inf).all())
    assert_holds(logarithm, LOG(np.where(may_vanish.numpy(), Fraction(1), a[1])))


saturations = st.sampled_from([-0.0, 1e-320, -1e-300, 0.5, 5.9, -6.0, 19.1, 27.0, -300.0, 1e4, 1e200])


@quickly
@given(a=cases(4, values=saturations | st.floats(-30, 30)))
@example(a=point([1e300, -1e30, 28.0, 0.0], [9e299, 1e30, 1.0, 1e200]))
def test_saturating_functions(a: Case) -> None:
    for ball, function in ((a[0].tanh(), TANH), (a[0].erf(), ERF)):
        assert_holds(ball, function(a[1]))
        assert bool((ball.rad <= 2 + 1e-9).all())


def test_a_saturated_function_hardly_moves() -> None:
    for ball in (Ball(tensor(20.0), tensor(1.0)).tanh(), Ball(tensor(7.0), tensor(1.0)).erf()):
        assert ball.rad < 1e-14
    assert Ball(tensor(5.0), tensor(1.0)).clamp(max=3.0).rad == 0
    assert Ball(tensor(-5.0), tensor(1.0)).clamp(min=0.0).rad == 0


@pytest.mark.parametrize("other", [2.5, 3, tensor([0.1, -7.0]), torch.tensor([0.1, -7.0])], ids=repr)
def test_numbers_and_tensors_are_taken_as_exact(other: Any) -> None:
    ball = Ball(tensor([1 / 3, -1e5]), tensor([1e-3, 0.5]))
    y = exact(other.double()) if isinstance(other, Tensor) else Fraction(other)
    for z in members(ball, 6):
        for result, value in [
            (ball + other, z + y),
            (other + ball, y + z),
            (ball - other, z - y),
            (ball * other, z * y),
            (other * ball, y * z),
            (ball / other, z / y),
        ]:
            assert_holds(result, value)


def test_long_inner_products() -> None:
    generator = torch.Generator().manual_seed(0)
    k = 4000
    a, b = (torch.randn(k, generator=generator, dtype=torch.float64) for _ in range(2))
    # The second half undoes the first up to a part in 1e10, so that rounding is all there is.
    a = torch.cat([a, a]) * 2.0 ** torch.randint(-20, 20, (1,), generator=generator)
    b = torch.cat([b, -b * (1 + 1e-10)])
    ball = Ball(a, a.abs() * 1e-14).unsqueeze(0) @ Ball(b, torch.zeros_like(b)).unsqueeze(-1)
    for z in members(Ball(a, a.abs() * 1e-14), 4):
        assert_holds(ball, np.array([[z @ exact(b)]], dtype=object))
    assert_holds((Ball.exact(a) * Ball.exact(b)).sum(0), np.array(exact(a) @ exact(b), dtype=object))


# -- what overflows makes no claim

TWO_SCORES = (tensor([[1e155], [1e155]]), tensor([[-1e155, -1.0000001e155]]))
OVERFLOWS: dict[str, Callable[[], Ball]] = {
    "product": lambda: Ball.exact(tensor(1e200)) * -1e200,
    "sum": lambda: Ball.exact(tensor(-LARGEST)) - LARGEST,
    "long sum": lambda: Ball.exact(tensor([-1e308] * 4)).sum(0),
    "matrix product": lambda: Ball.exact(TWO_SCORES[0]) @ TWO_SCORES[1],
    "quotient": lambda: Ball.exact(tensor(-1e200)) / 1e-200,
    "quotient by zero": lambda: Ball.exact(tensor(-1.0)) / 0.0,
    "zero by zero": lambda: Ball.exact(tensor(0.0)) / 0.0,
    "exp": lambda: Ball.exact(tensor(800.0)).exp(),
    "wide exp": lambda: Ball(tensor(0.0), tensor(800.0)).exp(),
    "softmax": lambda: (Ball.exact(TWO_SCORES[0]) @ TWO_SCORES[1]).softmax(-1),
    "log_softmax": lambda: (Ball.exact(TWO_SCORES[0]) @ TWO_SCORES[1]).log_softmax(-1),
    "logarithm of zero": lambda: Ball.exact(tensor(0.0)).log(),
    "softmax upwards": lambda: (Ball.exact(-TWO_SCORES[0]) @ TWO_SCORES[1]).softmax(-1),
    "frobenius": lambda: frobenius(Ball.exact(tensor([[LARGEST, LARGEST]]))),
}


@pytest.mark.parametrize("overflow", OVERFLOWS.values(), ids=OVERFLOWS)
def test_overflow_makes_no_claim(overflow: Callable[[], Ball]) -> None:
    ball = overflow()
    assert not bool((ball.rad < math.inf).any())
    assert not bool((ball.upper < math.inf).any())
    assert not bool((ball.lower > -math.inf).any())


# -- softmax


def exact_softmax(z: Exact, masked: Tensor) -> Exact:
    """Along rows of a matrix."""
    e = EXP(z - np.where(masked.numpy(), Fraction(-(10**6)), z).max(-1, keepdims=True))
    e = np.where(masked.numpy(), Fraction(0), e)
    return e / e.sum(-1, keepdims=True)


SCORES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "ordinary": lambda g: torch.randn(4, 6, generator=g, dtype=torch.float64),
    "large": lambda g: 1e3 * torch.randn(4, 6, generator=g, dtype=torch.float64),
    "large and close": lambda g: 1e3 + torch.randn(4, 6, generator=g, dtype=torch.float64),
    "peaked": lambda g: tensor([[0.0, -800.0, -800.0, -800.0, -36.0, -36.0]] * 4),
    "vanishing": lambda g: tensor([[0.0, -690.0, -700.0, -708.4, -744.0, -746.0]] * 4),
    "equal": lambda g: torch.full((4, 6), 1 / 3, dtype=torch.float64),
    "single": lambda g: torch.full((4, 1), -1e3, dtype=torch.float64),
}
MASKS: dict[str, Callable[[int], Tensor]] = {
    "unmasked": lambda n: torch.zeros(4, n, dtype=torch.bool),
    "causal": lambda n: torch.ones(4, n, dtype=torch.bool).triu(1),
}


@pytest.mark.parametrize("radius", [0.0, 1e-13, 0.05])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_softmax(scores: Callable[[torch.Generator], Tensor], mask: Callable[[int], Tensor], radius: float) -> None:
    mid = scores(torch.Generator().manual_seed(0))
    masked = mask(mid.shape[-1])
    ball = Ball(mid, torch.full_like(mid, radius))
    p = ball.masked_fill(masked, -math.inf).softmax(-1)
    log_p = ball.masked_fill(masked, -math.inf).log_softmax(-1)
    allowed = ~masked
    assert torch.equal(log_p.mid == -math.inf, masked)
    assert not any(bool(t[masked].any()) for t in (p.mid, p.rad, log_p.rad))
    for z in members(ball, 6):
        truth = exact_softmax(z, masked)
        assert_holds(p, truth)
        assert_holds(log_p[allowed], LOG(truth[allowed.numpy()]))
    # Radii are as wide as the scores' own uncertainty makes them, and not much wider.
    uncertainty = max(radius, 1e-12)
    assert bool((p.rad <= 20 * uncertainty * p.mid + 1e-290).all())
    assert bool((log_p.rad[allowed] <= 20 * uncertainty).all())


# -- norms


@pytest.mark.parametrize("scale", [2.0**-1074, 1e-310, 1e-200, 1.0, 1e200, 2.0**1019])
@pytest.mark.parametrize("spread", [0.0, 200.0], ids=["even", "graded"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 50)])
def test_frobenius_norms(shape: tuple[int, int], spread: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    x = x * 10 ** (-spread * torch.rand(shape, generator=generator, dtype=torch.float64)) * scale
    x[0, 0] = scale
    ball = Ball(x, x.abs() * 1e-7)
    norm = frobenius(ball)
    assert norm.shape == ()
    for z in members(ball, 4):
        length = SQRT(np.asarray((z * z).sum(), dtype=object))
        assert_holds(norm, length)
    length = SQRT(np.asarray((exact(x) ** 2).sum(), dtype=object)).item()
    assert length <= frobenius_upper(x).item()
    if scale > 1e-300:
        assert frobenius_upper(x).item() <= length * (1 + 1e-12)
        assert norm.rad.item() <= norm.mid.item() * 1.1e-7


def test_norms_of_nothing_and_over_other_dimensions() -> None:
    zero = torch.zeros(3, 3, dtype=torch.float64)
    assert 0 <= frobenius_upper(zero).item() < 1e-300
    assert frobenius(Ball.exact(zero)).lower.item() <= 0
    x = tensor([[[3.0, 4.0], [6.0, 8.0]]])
    assert torch.equal(frobenius(x, (-1,)), tensor([[5.0, 10.0]]))
    assert_holds(frobenius(Ball.exact(x), (-1,)), exact(tensor([[5.0, 10.0]])))
    assert frobenius(x.float()).dtype == torch.float32


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_no_norm_of_what_is_not_finite(bad: float) -> None:
    assert not frobenius_upper(tensor([[1.0, bad]])).item() < math.inf


@pytest.mark.parametrize(("relative", "scale"), [(0.0, 1.0), (1e-9, 1.0), (1e-9, 1e150), (1e-3, 1e-170)])
def test_a_product_is_off_by_no_more_than_its_factors_allow(relative: float, scale: float) -> None:
    g = torch.Generator().manual_seed(2)
    left, right, other = (torch.randn(m, n, generator=g, dtype=torch.float64) for m, n in ((3, 7), (7, 5), (3, 5)))
    right, other = right * scale, other * scale
    balls = [Ball(x, x.abs() * relative) for x in (left, right)]
    product = left @ right
    for roundings, computed in ((0, product), (1, product + other)):
        bound = Fraction(product_error(*balls, roundings=roundings).upper.item())
        if roundings:  # the other term is exact, and its part of the rounding is counted where it comes from
            bound += Fraction(gamma(1)) * Fraction(frobenius_upper(other).item())
        for L, R in zip(members(balls[0], 6), members(balls[1], 6, seed=1), strict=True):
            off = exact(computed) - L @ R - (exact(other) if roundings else 0)
            assert (off * off).sum() <= bound**2
    assert product_error(*balls).upper.item() <= 8 * (relative + 1e-14) * frobenius_upper(product).item() + 1e-300


# -- the assumptions and the small tools


def exponents() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    ladder = torch.arange(-1074, 1024, dtype=torch.float64) * math.log(2)
    tiny = 2.0 ** -torch.arange(0, 80, dtype=torch.float64)
    spread = torch.rand(1500, generator=generator, dtype=torch.float64) * 1454.9 - 745.13
    return torch.cat([ladder, ladder + 0.34657, tiny, -tiny, spread, tensor([0.0, 709.78, -708.396, -745.13])])


def saturating() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    sizes = torch.exp(torch.randn(1500, generator=generator, dtype=torch.float64) * 3)
    return torch.cat(
        [sizes, -sizes, 2.0 ** -torch.arange(0, 80, dtype=torch.float64), tensor([0.0, 0.46875, 0.625, 9.0])]
    )


ACCURACY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Exact], Exact], Tensor]] = {
    "exp": (torch.exp, EXP, exponents()),
    "log": (torch.log, LOG, torch.cat([exponents().exp(), 1 + exponents() * UNIT])),
    "expm1": (torch.expm1, EXPM1, torch.cat([exponents().abs(), 10 ** -torch.arange(0, 323, dtype=torch.float64)])),
    "tanh": (torch.tanh, TANH, saturating()),
    "erf": (torch.erf, ERF, saturating()),
}


@pytest.mark.parametrize(("function", "truth", "points"), ACCURACY.values(), ids=ACCURACY)
def test_powers_are_accurate_to_four_units(
    function: Callable[[Tensor], Tensor], truth: Callable[[Exact], Exact], points: Tensor
) -> None:
    """Other loops of the machine run over entries that do not lie side by side."""
    points = points[points != 0] if function is torch.log else points[points < 709.78]
    contiguous, strided = function(points), function(points.repeat_interleave(2)[::2])
    for pair, z in zip(zip(contiguous.tolist(), strided.tolist(), strict=True), truth(exact(points)), strict=True):
        for value in set(pair):
            assert abs(Fraction(value) - z) <= 4 * Fraction(math.ulp(float(z)))


def test_a_long_dot_product_has_a_narrow_radius() -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.rand(64, generator=generator, dtype=torch.float64) for _ in range(2))
    for ball in (Ball.exact(a).unsqueeze(0) @ Ball.exact(b).unsqueeze(1), (Ball.exact(a) * b).sum(0)):
        assert 0 < ball.rad.item() < 1e-12 * ball.mid.item()


def test_one_operation_has_a_narrow_radius() -> None:
    a, b = Ball.exact(tensor([1 / 3, -2.7e8, 1e-100])), Ball.exact(tensor([3.3, 4.1e-9, 7.0]))
    for ball in (a + b, a - b, a * b, a / b, a.square(), b.sqrt(), b.exp(), b.log(), a.tanh(), b.erf()):
        assert bool((ball.rad <= 20 * UNIT * ball.mid.abs()).all())
    assert Ball(tensor(0.0), tensor(1e-20)).sqrt().rad <= 1.001e-10


@pytest.mark.parametrize("k", [0, 1, 2, 3, 64, 1000, 10**6 + 7, 2**40])
def test_gamma_is_rounded_up(k: int) -> None:
    truth = k * Fraction(UNIT) / (1 - k * Fraction(UNIT))
    assert truth <= gamma(k) <= truth * (1 + 8 * Fraction(UNIT))


@quickly
@given(x=numbers)
def test_neighbours(x: float) -> None:
    t = tensor(x)
    assert down(t).item() == math.nextafter(x, -math.inf)
    assert up(t).item() == math.nextafter(x, math.inf)
    assert (down(x), up(x)) == (down(t).item(), up(t).item())


@quickly
@given(x=numbers.map(abs).filter(lambda x: x <= 1e300), by=st.sampled_from([2.0**-50, 1e-15, 1e-12, 1e-9]))
def test_many_roundings_are_paid_for_together(x: float, by: float) -> None:
    for value in (x, tensor(x)):
        assert float(up(value, by)) == x * (1 + by) >= x
        assert float(down(value, by)) == x * (1 - by) <= x
    assert Fraction(outward(tensor(x)).item()) >= Fraction(x) * (1 + 2**8 * Fraction(UNIT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaling_is_by_powers_of_two(dtype: torch.dtype) -> None:
    low, high, usual = (-148, 128, 115) if dtype == torch.float32 else (-1073, 1024, 1015)
    for exponent in range(low, high):
        x = torch.tensor([[0.0, -1.5 * 2.0**exponent]], dtype=dtype)
        scale = power_of_two(x, (-2, -1))
        assert scale.shape == (1, 1)
        assert math.frexp(scale.item())[0] == 0.5
        assert torch.isfinite(1 / scale)
        if abs(exponent) < usual:
            assert 0.5 <= x.abs().max().item() / scale.item() <= 1
    for odd in (0.0, math.inf, math.nan):
        assert power_of_two(torch.tensor([odd], dtype=dtype), (0,)).item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_shorter_floats_are_exact(dtype: torch.dtype) -> None:
    x = torch.tensor([1 / 3, -65504.0, 1e-7, 0.0], dtype=dtype)
    ball = Ball.exact(x.requires_grad_())
    assert ball.mid.dtype == torch.float64
    assert not ball.mid.requires_grad
    assert ball.mid.tolist() == x.tolist()
    assert not bool(ball.rad.any())
    assert torch.equal(lift(x.detach(), ball).mid, ball.mid)
    assert lift(x.detach(), torch.zeros(1)).dtype == torch.float32


RESHAPES: dict[str, Callable[[Any], Any]] = {
    "mT": lambda t: t.mT,
    "index": lambda t: t[..., 1:, :],
    "reshape": lambda t: t.reshape(3, 8),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t[:1].squeeze(0),
    "flatten": lambda t: t.flatten(0, 1),
    "diagonal": lambda t: t.diagonal(1, -2, -1),
    "expand": lambda t: t.expand(5, 2, 3, 4),
    "movedim": lambda t: t.movedim(0, 2),
    "repeat_interleave": lambda t: t.repeat_interleave(2, 1),
}


@pytest.mark.parametrize("change", RESHAPES.values(), ids=RESHAPES)
def test_shapes_change_as_for_tensors(change: Callable[[Any], Any]) -> None:
    mid = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    ball = change(Ball(mid, mid + 100))
    assert torch.equal(ball.mid, change(mid))
    assert torch.equal(ball.rad, change(mid + 100))
    assert (ball.shape, ball.ndim, ball.device) == (ball.mid.shape, ball.mid.ndim, mid.device)


def test_single_precision_is_refused() -> None:
    ball = Ball(torch.ones(2, 2), torch.zeros(2, 2))
    for attempt in (lambda: ball @ ball, lambda: ball + 1.0, ball.exp, ball.sqrt, lambda: frobenius_upper(ball.mid)):
        with pytest.raises(InputError, match="expected float64"):
            attempt()


def test_flushed_subnormals_are_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        with pytest.raises(HoldfastError, match="set_flush_denormal"):
            Ball.exact(tensor(1e-310)) * 1e300
    finally:
        torch.set_flush_denormal(False)
