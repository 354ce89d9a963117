"""The norm of the softmax Jacobian against mpmath and dense eigenvalues: accuracy, sides, derivatives, odd rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mpmath as mp
import pytest
import torch
from torch import Tensor

from holdfast import HoldfastError, InputError, g_k, softmax_jacobian_norm
from holdfast.attention.softmax import covering_norm

UPPER = ("exact", "g1", "u2")
METHODS = (*UPPER, "lower")
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def peaked(n: int, tail: float, seed: int = 0) -> Tensor:
    """(4, n) rows with p_1 = 1 - tail, the rest shared out evenly or not."""
    shares = torch.rand(4, n - 1, generator=generator(seed), dtype=torch.float64) ** torch.tensor([[0], [1], [5], [40]])
    shares = tail * shares / shares.sum(-1, keepdim=True)
    return torch.cat([torch.full((4, 1), 1 - tail, dtype=torch.float64), shares], -1)


def root(p: list[mp.mpf]) -> mp.mpf:
    """‖M(p/S)‖ by bisection of the secular equation, in the arithmetic of mpmath."""
    total = mp.fsum(p)
    p = sorted((value / total for value in p if value > 0), reverse=True)
    if len(p) == 1:
        return mp.mpf(0)
    if p[0] == p[1]:
        return p[0]
    low, high = p[1], p[0]
    for _ in range(250):
        middle = mp.sqrt(low * high) if high > 4 * low else (low + high) / 2
        if mp.fsum(value / (value - middle) for value in p) < 0:
            low = middle
        else:
            high = middle
    return high


def as_it_stands(p: Tensor) -> Tensor:
    """‖diag(p) - ppᵀ‖ of the numbers themselves, by dense eigenvalues."""
    p = p.double()
    return torch.linalg.matrix_norm(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2), ord=2)


def normalised(p: Tensor) -> Tensor:
    p = p.double()
    return as_it_stands(p / p.sum(-1, keepdim=True))


# -- accuracy


@pytest.mark.parametrize("tail", [0.5, 1e-3, 1e-12, 1e-16, 1e-100, 1e-300])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_exact_agrees_with_mpmath(n: int, tail: float) -> None:
    rows = peaked(n, tail)
    with mp.workdps(50):
        for row, value in zip(rows.tolist(), softmax_jacobian_norm(rows).tolist(), strict=True):
            truth = root([mp.mpf(entry) for entry in row])
            assert abs(value / truth - 1) < 1e-12


@pytest.mark.parametrize("spread", [1.0, 10.0, 28.0])
def test_exact_agrees_with_the_softmax_before_rounding(spread: float) -> None:
    """The scores are exact and the probabilities rounded: near 1, p_1 itself has lost most digits of 1 - p_1."""
    scores = torch.stack([torch.linspace(0, -spread, 6, dtype=torch.float64), normal(6) - spread])
    scores[1, 2] = 0.0
    values = softmax_jacobian_norm(scores.softmax(-1)).tolist()
    with mp.workdps(50):
        for row, value in zip(scores.tolist(), values, strict=True):
            assert abs(value / root([mp.exp(score) for score in row]) - 1) < 1e-12


@pytest.mark.parametrize("std", [0.01, 0.3, 1.0, 3.0, 10.0, 40.0])
@pytest.mark.parametrize("n", [2, 3, 10, 65, 300])
def test_order_of_the_bounds(n: int, std: float) -> None:
    p = (normal(200, n) * std).softmax(-1)
    exact, g1, u2, lower = (softmax_jacobian_norm(p, method) for method in METHODS)
    slack = 1 + 1e-12
    assert bool((lower <= exact).all())
    assert bool((exact <= u2 * slack).all())
    assert bool((u2 <= g1 * slack).all())
    assert bool((g1 <= 0.5 * slack).all())
    assert bool((g1 <= 1.1717 * exact).all())
    assert bool((lower >= 0.9 * exact).all())
    torch.testing.assert_close(exact[:10], normalised(p[:10]), rtol=1e-12, atol=1e-15)


def test_mean_ratios_are_the_documented_ones() -> None:
    expected = {0.1: (1.001, 1.001), 1: (1.018, 1.013), 2: (1.048, 1.025), 4: (1.067, 1.022), 8: (1.052, 1.010)}
    for std, ratios in expected.items():
        p = (normal(500, 197) * std).softmax(-1)
        exact = softmax_jacobian_norm(p)
        found = [float((softmax_jacobian_norm(p, method) / exact).mean()) for method in ("g1", "u2")]
        assert found == pytest.approx(ratios, abs=0.006)


def test_formulas_where_they_are_equalities() -> None:
    for p, norm in (
        ([1.0], 0.0),
        ([0.7, 0.3], 0.42),
        ([0.4, 0.4, 0.2], 0.4),
        ([0.6, 0.2, 0.2], 0.36),
        ([0.25] * 4, 0.25),
    ):
        for method in UPPER:
            assert float(softmax_jacobian_norm(torch.tensor(p, dtype=torch.float64), method)) == pytest.approx(norm)


# -- never on the wrong side


def rows_of_every_kind(dtype: torch.dtype) -> Iterator[Tensor]:
    for n in (1, 2, 3, 8, 50):
        for std in (0.1, 1.0, 4.0, 12.0, 40.0):
            yield (normal(40, n) * std).to(dtype).softmax(-1)
    tiny = torch.finfo(dtype).smallest_normal
    for second in (1e-3, float(torch.finfo(dtype).eps) / 4, tiny, tiny / 8):
        for first in (1.0, 1.0 - float(torch.finfo(dtype).eps) / 2, 1.0 + float(torch.finfo(dtype).eps)):
            yield torch.tensor([[first, second, 0.0], [second, first, second], [first, second, second / 3]]).to(dtype)
    yield torch.tensor([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.4, 0.4, 0.2], [0.0, 1.0, 0.0]]).to(dtype)
    yield torch.full((1, 257), 1 / 257).to(dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_types_are_rounded_outward(dtype: torch.dtype) -> None:
    """For the numbers as they stand and for the row normalised; eigenvalues are dense ones, known to 1e-15."""
    for p in rows_of_every_kind(dtype):
        for truth in (as_it_stands(p), normalised(p)):
            for method in UPPER:
                value = softmax_jacobian_norm(p, method)
                assert value.dtype == dtype
                assert bool((value.double() >= truth - 2e-15).all()), (method, p)
            assert bool((softmax_jacobian_norm(p, "lower").double() <= truth + 2e-15).all())


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_types_are_rounded_outward_where_the_norm_is_tiny(dtype: torch.dtype) -> None:
    """Below what dense float64 eigenvalues see: against mpmath, with all digits."""
    tiny = float(torch.finfo(dtype).smallest_normal)
    eps = float(torch.finfo(dtype).eps)
    for second in (eps / 3, 1e-3 * eps, tiny, tiny / 8):
        p = torch.tensor([1.0, second, second / 2]).to(dtype)
        values = {method: mp.mpf(float(softmax_jacobian_norm(p, method))) for method in METHODS}
        with mp.workdps(200):
            row = [mp.mpf(float(entry)) for entry in p]
            matrix = mp.diag(row) - mp.matrix(row) * mp.matrix(row).T
            truths = (root(row), max(abs(value) for value in mp.eigsy(matrix, eigvals_only=True)))
            for truth in truths:
                assert all(values[method] >= truth for method in UPPER)
                assert values["lower"] <= truth * (1 + mp.mpf(10) ** -100)


@pytest.mark.parametrize("off", [0.0, 3e-16, 1e-12, -1e-12, 9e-3, -9e-3])
@pytest.mark.parametrize("tail", [0.3, 1e-6, 1e-12, 1e-30])
def test_float64_is_rounded_outward_for_the_normalised_row(tail: float, off: float) -> None:
    rows = peaked(5, tail) * (1 + off)
    values = {method: softmax_jacobian_norm(rows, method).tolist() for method in METHODS}
    with mp.workdps(60):
        for i, row in enumerate(rows.tolist()):
            truth = root([mp.mpf(entry) for entry in row])
            assert all(values[method][i] >= truth for method in UPPER)
            assert values["lower"][i] <= truth


def test_float64_rows_that_miss_the_sum_1_are_also_taken_as_they_stand() -> None:
    """Scaled rows, and rows of float32 that were cast: S is off by far more than float64 rounds."""
    scaled = [(normal(200, 6) * 2).softmax(-1) * (1 + off) for off in (-9e-3, -1e-9, 1e-9, 9e-3)]
    cast = [(normal(200, n) * std).float().softmax(-1).double() for n in (2, 50) for std in (1.0, 3.0, 9.0)]
    for p in (*scaled, *cast, torch.tensor([[0.4955, 0.4955], [0.5045, 0.5045]], dtype=torch.float64)):
        for truth in (normalised(p), as_it_stands(p)):
            for method in UPPER:
                assert bool((softmax_jacobian_norm(p, method) >= truth - 2e-15).all()), method
            assert bool((softmax_jacobian_norm(p, "lower") <= truth + 2e-15).all())


def test_subnormal_tails_are_rounded_outward() -> None:
    least = 5e-324
    for second, third in ((3, 3), (1, 0), (1, 1), (7, 2), (40, 13)):
        p = torch.tensor([1.0, second * least, third * least], dtype=torch.float64)
        values = {method: mp.mpf(float(softmax_jacobian_norm(p, method))) for method in METHODS}
        with mp.workdps(700):
            truth = root([mp.mpf(entry) for entry in p.tolist()])
            assert all(values[method] >= truth for method in UPPER)
            assert values["lower"] <= truth


def test_the_tail_is_summed() -> None:
    """1 - p_1 in float32 is up to 80 % too small for a peaked row."""
    p = (normal(4000, 50) * 12).float().softmax(-1)
    top = p.sort(-1, descending=True).values
    plain = top[:, 0] * (1 - top[:, 0] + top[:, 1])
    truth = softmax_jacobian_norm((normal(4000, 50) * 12).float().double().softmax(-1))
    assert bool((plain.double() < 0.5 * truth).any())
    assert bool((softmax_jacobian_norm(p, "g1").double() >= truth * (1 - 1e-5)).all())


def test_covering_rows_bound_everything_below_them() -> None:
    p = (normal(300, 9) * 3).softmax(-1)
    q = (p * (1 + 2 * torch.rand(300, 9, generator=generator(1), dtype=torch.float64))).clamp(max=1.0)
    for method in UPPER:
        assert bool((covering_norm(q, method) >= normalised(p) * (1 - 1e-12)).all())
        assert bool((covering_norm(5 * q, method) <= 0.5).all())
        torch.testing.assert_close(covering_norm(p, method), softmax_jacobian_norm(p, method), rtol=1e-12, atol=0.0)


# -- g_k


def test_g_k_bounds_the_eigenvalues_in_order() -> None:
    p = (normal(200, 8) * 2).softmax(-1)
    eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)).flip(-1)
    bounds = torch.stack([g_k(p, k) for k in range(1, 9)], -1)
    assert bool((bounds >= eigenvalues - 1e-15).all())
    assert bool((bounds[:, 1:] <= bounds[:, :-1] * (1 + 1e-12)).all())
    top = torch.cat([p.sort(-1, descending=True).values, torch.zeros(200, 1)], -1)
    torch.testing.assert_close(bounds, top[:, :-1] * (1 - top[:, :-1] + top[:, 1:]), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(bounds[:, 0], softmax_jacobian_norm(p, "g1"))


@pytest.mark.parametrize("dtype", [torch.float64, *NARROW], ids=str)
def test_g_k_holds_for_rows_that_do_not_sum_to_one(dtype: torch.dtype) -> None:
    """For every eigenvalue, of the row normalised and of the numbers as they stand."""
    rows = [(normal(40, 3) * std).to(dtype).softmax(-1) * 0.995 for std in (0.1, 1.0, 4.0, 12.0)]
    for p in (torch.tensor([[1 - 2.0**-12, 0.0, 0.0], [1.0, 2.0**-9, 0.0]]).to(dtype), *rows):
        wide = p.double()
        for q in (wide, wide / wide.sum(-1, keepdim=True)):
            eigenvalues = torch.linalg.eigvalsh(torch.diag_embed(q) - q.unsqueeze(-1) * q.unsqueeze(-2)).flip(-1)
            for k in (1, 2, 3):
                assert bool((g_k(p, k).double() >= eigenvalues[:, k - 1] - 2e-15).all())
        assert torch.equal(g_k(p, 1), softmax_jacobian_norm(p, "g1"))


# -- derivatives


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("std", [0.3, 2.0, 6.0])
def test_gradients(method: str, std: float) -> None:
    scores = (normal(3, 6) * std).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: softmax_jacobian_norm(z.softmax(-1), method), (scores,))
    assert torch.autograd.gradcheck(lambda z: g_k(z.softmax(-1), 2), (scores,))


def test_gradient_of_a_tiny_norm_keeps_its_digits() -> None:
    """The logarithm of ‖M‖ at p_1 = 1 - 1e-12, against a difference quotient in mpmath."""
    scores = torch.tensor([0.0, -28.0, -28.5, -31.0], dtype=torch.float64, requires_grad=True)
    softmax_jacobian_norm(scores.softmax(-1)).log().backward()
    with mp.workdps(60):
        step, plain = mp.mpf(10) ** -20, [mp.mpf(score) for score in scores.tolist()]
        for k, slope in enumerate(scores.grad.tolist()):
            moved = [score + (step if i == k else 0) for i, score in enumerate(plain)]
            ratio = mp.log(root([mp.exp(s) for s in moved]) / root([mp.exp(s) for s in plain])) / step
            assert slope == pytest.approx(float(ratio), abs=1e-8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW], ids=str)
def test_gradients_of_odd_rows_are_finite(method: str, dtype: torch.dtype) -> None:
    odd = [
        [1.0],
        [0.5, 0.5],
        [1.0, 0.0],
        [1.0, 0.0, 0.0],
        [0.5, 0.5, 0.0],
        [0.25] * 4,
        [0.4, 0.4, 0.1, 0.1],
        [1.0, 1e-38, 0.0],
    ]
    for row in odd:
        p = torch.tensor(row).to(dtype).requires_grad_()
        softmax_jacobian_norm(p, method).backward()
        assert p.grad is not None
        assert bool(torch.isfinite(p.grad).all())
        assert p.grad.dtype == dtype


def test_gradient_at_a_tie_is_shared() -> None:
    p = torch.tensor([0.4, 0.2, 0.4], dtype=torch.float64, requires_grad=True)
    softmax_jacobian_norm(p).backward()
    assert p.grad.tolist() == pytest.approx([0.9, 0.4, 0.9])


def test_second_derivatives_are_refused() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, requires_grad=True)
    with pytest.raises(HoldfastError, match="no second derivative here; use create_graph=False"):
        torch.autograd.grad(softmax_jacobian_norm(p), p, create_graph=True)


# -- shapes and complaints


@pytest.mark.parametrize("method", METHODS)
def test_batches(method: str) -> None:
    p = normal(2, 3, 5, 6).softmax(-1)
    whole = softmax_jacobian_norm(p, method)
    assert whole.shape == (2, 3, 5)
    loop = torch.stack([softmax_jacobian_norm(row, method) for row in p.reshape(-1, 6)])
    torch.testing.assert_close(whole.reshape(-1), loop, rtol=1e-14, atol=0.0)
    order = torch.randperm(6, generator=generator())
    torch.testing.assert_close(softmax_jacobian_norm(p[..., order], method), whole, rtol=1e-13, atol=0.0)
    padded = torch.nn.functional.pad(p, (0, 4))
    torch.testing.assert_close(softmax_jacobian_norm(padded, method), whole, rtol=1e-13, atol=0.0)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        ([0.5, 0.5], "p is list; expected a floating tensor of probabilities"),
        (torch.tensor([1, 0]), r"p is torch.int64 of shape \(2,\)"),
        (torch.tensor(1.0), r"p is torch.float32 of shape \(\)"),
        (torch.zeros(3, 0), r"p is torch.float32 of shape \(3, 0\)"),
        (torch.tensor([2.0, -1.0]), "least entry -1 .* apply softmax first"),
        (torch.tensor([0.3, 0.3]), "misses the sum 1 by 0.4"),
        (torch.tensor([math.nan, 1.0]), "misses the sum 1 by nan"),
        (torch.zeros(2, 3), "misses the sum 1 by 1"),
    ],
)
def test_complaints(p: object, message: str) -> None:
    for call in (lambda: softmax_jacobian_norm(p), lambda: g_k(p, 1)):  # type: ignore[arg-type]
        with pytest.raises(InputError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_unknown_methods_and_impossible_k() -> None:
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(InputError, match="method is 'g2'; expected one of exact, g1, u2, lower"):
        softmax_jacobian_norm(p, "g2")  # type: ignore[arg-type]
    for k in (0, 3):
        with pytest.raises(InputError, match=f"k is {k}; expected a whole number from 1 to the 2 entries"):
            g_k(p, k)
