"""Norms of matrices whose norm is known, exactly or to many digits: estimates from below, proved values from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.errors import HoldfastError, InputError, MemoryLimitError
from holdfast.linalg import (
    AssembledOperator,
    Ball,
    FunctionJacobian,
    Gram,
    MatrixOperator,
    certified,
    estimate,
    estimated_norm,
    lanczos,
    thin_norm,
    upper,
)
from holdfast.linalg.lanczos import _dominant, top_eigenvalue
from holdfast.linalg.operator import _symmetric_product
from holdfast.linalg.rounding import frobenius_upper
from holdfast.linalg.squarings import gram_norm

MP = mpmath.mp.clone()
MP.dps = 60
FLOAT64 = torch.float64
FLOAT_MAX = torch.finfo(FLOAT64).max


def tensor(x: object) -> Tensor:
    return torch.tensor(x, dtype=FLOAT64)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = FLOAT64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def known(matrix: Tensor) -> Any:
    """The largest singular value of a small matrix, to 60 digits less a few."""
    J = MP.matrix(matrix.tolist())
    scale = max(abs(entry) for entry in J) or MP.mpf(1)
    J = J / scale
    G = J * J.T if J.rows <= J.cols else J.T * J
    return scale * MP.sqrt(max(MP.eigsy(G, eigvals_only=True)))


# -- matrices


def hadamard(doublings: int) -> Tensor:
    H = torch.ones(1, 1, dtype=FLOAT64)
    for _ in range(doublings):
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H


def with_singular_values(values: list[float], rows: int, columns: int, seed: int = 0) -> Tensor:
    k = len(values)
    U, V = (torch.linalg.qr(noise(size, k, seed=seed + i)).Q for i, size in enumerate((rows, columns)))
    return U @ torch.diag(tensor(values)) @ V.mT


# Integer matrices times a power of two; the square of the norm is an integer too.
EXACT: dict[str, tuple[Tensor, int]] = {
    "one by one": (tensor([[-3.0]]), 9),
    "diagonal": (torch.diag(tensor([3.0, -7.0, 2.0, 0.0])), 49),
    "permutation": (5 * torch.eye(9, dtype=FLOAT64)[torch.randperm(9, generator=torch.Generator().manual_seed(0))], 25),
    "rotation": (tensor([[3.0, 4.0], [-4.0, 3.0]]), 25),
    "hadamard": (3 * hadamard(4), 9 * 16),
    "rank one": (torch.outer(tensor([1.0, -2.0, 3.0]), tensor([5.0, 7.0, -11.0, 13.0])), 14 * 364),
    "row": (tensor([[2.0, 3.0, 6.0]]), 49),
    "column": (tensor([[2.0], [3.0], [6.0], [1.0]]), 50),
    "wide": (torch.ones(3, 200, dtype=FLOAT64), 600),
    "tall": (torch.ones(200, 3, dtype=FLOAT64), 600),
    "one large entry": (pad(tensor([[11.0]]), (2, 3, 1, 4)), 121),
    "identity of a size for Lanczos": (torch.eye(120, dtype=FLOAT64), 1),
    "hadamard of a size for Lanczos": (hadamard(7), 128),
}
# The rest have norms to 60 digits.
MEASURED: dict[str, Tensor] = {
    "random": noise(7, 7),
    "wide": noise(3, 12),
    "tall": noise(12, 3),
    "float32": noise(6, 8, dtype=torch.float32),
    "clustered": with_singular_values([1.0, 1 - 1e-12, 1 - 2e-12, 0.5], 7, 6),
    "equal": with_singular_values([2.0, 2.0, 2.0], 5, 8),
    "graded": with_singular_values([1.0, 1e-4, 1e-8, 1e-12], 6, 6),
    "nearly rank one": with_singular_values([1.0, 1e-15], 6, 6),
    "rank one": torch.outer(noise(7), noise(5, seed=1)),
    "mixed sizes": noise(6, 6) * 10 ** (5 * noise(6, 6, seed=1)),
    "tiny": 1e-200 * noise(5, 6),
    "huge": 1e200 * noise(6, 5),
    "largest": torch.full((2, 3), 1e307, dtype=FLOAT64),
}
by_exact = pytest.mark.parametrize(("matrix", "square"), EXACT.values(), ids=EXACT)
by_measured = pytest.mark.parametrize("matrix", MEASURED.values(), ids=MEASURED)


def is_above(value: Tensor, square: int, scale: float = 1.0) -> bool:
    return Fraction(value.item()) ** 2 >= square * Fraction(scale) ** 2


# -- proved values


@pytest.mark.parametrize("scale", [2.0**-650, 1.0, 2.0**650], ids=["tiny", "unit", "huge"])
@by_exact
def test_upper_of_integer_matrices(matrix: Tensor, square: int, scale: float) -> None:
    result = upper(MatrixOperator(matrix * scale))
    assert (result.side, result.guarantee) == ("upper", "proved")
    assert result.value.dtype == FLOAT64
    assert result.value.shape == result.residual.shape == ()
    assert is_above(result.value, square, scale)
    assert result.value.item() <= math.sqrt(square) * scale * (1 + 1e-6)


@pytest.mark.slow
def test_upper_of_a_size_in_several_blocks() -> None:
    value = upper(MatrixOperator(hadamard(11)[:1100])).value
    assert is_above(value, 2048)
    assert value.item() <= math.sqrt(2048) * (1 + 1e-6)


@by_measured
def test_upper_of_measured_matrices(matrix: Tensor) -> None:
    truth = known(matrix)
    assert truth <= upper(MatrixOperator(matrix)).value.item() <= truth * (1 + MP.mpf("1e-6"))


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (120, 120)])
def test_upper_of_nothing(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert 0 <= upper(MatrixOperator(torch.zeros(shape, dtype=dtype))).value.item() < 1e-150


@pytest.mark.parametrize("size", [2.0**-1074, 1e-320, 2.0**-1022, 1e-300])
def test_upper_where_numbers_end(size: float) -> None:
    matrix = torch.full((3, 4), size, dtype=FLOAT64)
    assert is_above(upper(MatrixOperator(matrix)).value, 12, size)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1.7e308])
@pytest.mark.parametrize("size", [3, 120])
def test_upper_refuses_what_is_not_finite(size: int, bad: float) -> None:
    matrix = torch.eye(size, dtype=FLOAT64)
    matrix[:2, :2] = bad  # the norm of the last one is twice as large, and no float64
    with pytest.raises(HoldfastError, match="not finite"):
        upper(MatrixOperator(matrix))


def corners(ball: Ball, count: int = 6) -> list[Tensor]:
    """Members whose entries lie at the ends of their intervals, rounded into them."""
    u, _, vt = torch.linalg.svd(ball.mid)
    aligned = torch.sign(torch.outer(u[:, 0], vt[0]))
    signs = [aligned, -aligned, *(torch.sign(noise(*ball.shape, seed=seed)) for seed in range(count - 2))]
    return [ball.mid + sign * ball.rad * (1 - 1e-15) for sign in signs]


@pytest.mark.parametrize("radius", [1e-300, 1e-12, 1e-3, 2.0])
@pytest.mark.parametrize("matrix", [noise(4, 6), torch.ones(5, 3, dtype=FLOAT64), 1e-9 * noise(1, 3)])
def test_upper_of_an_enclosed_matrix_covers_its_members(matrix: Tensor, radius: float) -> None:
    ball = Ball(matrix, radius * noise(*matrix.shape, seed=5).abs())
    value = upper(MatrixOperator(ball)).value.item()
    for member in corners(ball):
        assert known(member) <= value
    widened = known(matrix) + math.sqrt(min(matrix.shape)) * frobenius_upper(ball.rad).item()
    assert value <= widened * (1 + MP.mpf("1e-6"))


def test_upper_of_an_enclosed_matrix_is_attained() -> None:
    ball = Ball(torch.ones(4, 4, dtype=FLOAT64), torch.full((4, 4), 0.25, dtype=FLOAT64))
    assert 5 <= upper(MatrixOperator(ball)).value.item() <= 5 * (1 + 1e-7)


def test_upper_of_a_batch_is_that_of_its_members() -> None:
    matrix = noise(2, 3, 5, 4) * 10.0 ** torch.arange(-3, 3).reshape(2, 3, 1, 1)
    matrix[1, 1] = 0
    result = upper(MatrixOperator(matrix))
    assert result.value.shape == result.residual.shape == (2, 3)
    alone = torch.stack([upper(MatrixOperator(m)).value for m in matrix.flatten(0, 1)])
    torch.testing.assert_close(result.value.flatten(), alone, rtol=1e-12, atol=1e-150)


def test_upper_refuses_single_precision_balls() -> None:
    with pytest.raises(InputError, match="expected float64"):
        upper(MatrixOperator(Ball(torch.ones(3, 3), torch.zeros(3, 3))))


# -- memory


def need(operator: MatrixOperator) -> int:
    """Bytes for one member of the batch."""
    side = min(operator.matrix.shape[-2:])
    return 8 * (operator.doubles + 3 * side * side)


def test_too_large_a_map_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixOperator, "part", lambda *_: pytest.fail("work has begun"))
    matrix = torch.zeros(1, 1, dtype=FLOAT64).expand(200_000, 300_000)
    with pytest.raises(MemoryLimitError) as error:
        upper(MatrixOperator(matrix), memory_limit=3 * 2**30)
    needed = need(MatrixOperator(matrix)) / 2**30
    for words in ("200000 x 300000", f"{needed:.2f} GiB", "3.00 GiB", "memory_limit"):
        assert words in str(error.value)


@pytest.mark.parametrize(("members", "parts"), [(1, [1] * 5), (2, [2, 2, 1]), (4.9, [4, 1]), (math.inf, [5])])
def test_a_large_batch_is_done_in_parts(members: float, parts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    operator = MatrixOperator(noise(5, 6, 4))
    whole = upper(operator)
    seen: list[int] = []
    enclose = MatrixOperator.enclose
    monkeypatch.setattr(MatrixOperator, "enclose", lambda self: seen.append(self.batch.numel()) or enclose(self))
    result = upper(operator, memory_limit=members * need(operator))
    assert seen == parts
    torch.testing.assert_close(result.value, whole.value, rtol=1e-12, atol=0)


def test_one_byte_too_few_is_too_few() -> None:
    operator = MatrixOperator(noise(5, 6, 4))
    with pytest.raises(MemoryLimitError):
        upper(operator, memory_limit=need(operator) - 1)


# -- nothing that the proof only checks needs to be right


CHOLESKY = torch.linalg.cholesky_ex
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "identity": lambda A: torch.eye(A.shape[-1], dtype=FLOAT64).expand_as(A).clone(),
    "too small": lambda A: CHOLESKY(A).L * (1 - 1e-6),
    "too large": lambda A: CHOLESKY(A).L * (1 + 1e-6),
    "not triangular": lambda A: torch.ones_like(A),
    "huge": lambda A: torch.full_like(A, 1e200),
    "not a number": lambda A: torch.full_like(A, math.nan),
    "of another matrix": lambda A: CHOLESKY(A.flip(-1, -2)).L,
}


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
@by_exact
def test_a_wrong_factor_cannot_lower_the_bound(
    matrix: Tensor, square: int, factor: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sabotaged(A: Tensor) -> tuple[Tensor, Tensor]:
        return factor(A), torch.zeros(A.shape[:-2], dtype=torch.int32)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", sabotaged)
    operator = MatrixOperator(matrix)
    gram = operator.part(0, 1).gram()
    scaled = Fraction(square) / Fraction(gram.scale.item()) ** 2
    for shift, block in zip((1e-3, 0.5, 1 - 1e-12, 1.0, 1 + 1e-8), (512, 2, 1, 512, 2), strict=True):
        monkeypatch.setattr(certified, "_BLOCK", block)
        proved = certified._shifted(gram.matrix, tensor([float(scaled) * shift])).item()
        assert scaled <= min(proved, FLOAT_MAX)
        monkeypatch.setattr(certified, "_largest_eigenvalue", lambda *_, guess=float(scaled) * shift: tensor([guess]))
        assert is_above(upper(operator).value, square)


eigenvalue = certified._largest_eigenvalue


@pytest.mark.parametrize(
    "guess", [0.0, -1.0, 1e-300, 0.5, 1 - 1e-7, 1 - 1e-12, 1 - 1e-16, 3.0, 1e300, math.inf, math.nan]
)
@by_exact
def test_a_wrong_guess_cannot_lower_the_bound(
    matrix: Tensor, square: int, guess: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certified, "_largest_eigenvalue", lambda *arguments: eigenvalue(*arguments) * guess)
    monkeypatch.setattr(certified, "_FIRST_MARGIN", 1e-17)
    value = upper(MatrixOperator(matrix)).value
    assert is_above(value, square)
    if 0.99 < guess < 1:
        assert value.item() <= math.sqrt(square) * (1 + 1e-6)


@by_exact
def test_an_exact_gram_matrix_needs_no_error(matrix: Tensor, square: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gram = AssembledOperator.gram
    monkeypatch.setattr(
        AssembledOperator, "gram", lambda self: replace(g := gram(self), error=torch.zeros_like(g.error))
    )
    assert is_above(upper(MatrixOperator(matrix)).value, square)


@pytest.mark.parametrize("seed", range(30))
def test_a_shift_at_the_edge_is_proved_or_refused(seed: int) -> None:
    """Where rounding decides whether Cholesky succeeds, the defect decides what is proved."""
    J = noise(6, 9, seed=seed)
    G = _symmetric_product(J)
    G = G.tril() + G.tril(-1).mT
    truth = max(MP.eigsy(MP.matrix(G.tolist()), eigvals_only=True))
    steps = torch.cat([torch.arange(-40, 60, 2) * 2.0**-53, tensor([1e-10])])
    edge = float(truth) * (1 + steps.double())
    proved = certified._shifted(G.expand(len(edge), -1, -1), edge)
    assert all(value >= truth for value in proved.tolist())
    assert proved[-1] <= edge[-1] * (1 + 1e-12)


def edge_cases() -> list[tuple[Tensor, Tensor]]:
    """Roots whose squares, once rounded, hide that they are not exact; factors of random matrices; no factor at all."""
    numbers = noise(400).square() + 1
    hidden = [(x.reshape(1, 1), x.sqrt().reshape(1, 1)) for x in numbers if x.sqrt() * x.sqrt() == x]
    L = [noise(n, n, seed=n).tril() for n in range(2, 9)]
    full = torch.ones(6, 6, dtype=FLOAT64)
    return hidden[:20] + [(factor @ factor.mT, factor) for factor in L] + [(full, 0 * full)]


def distance_from_product(A: Tensor, L: Tensor) -> Any:
    exact = MP.matrix(L.tolist())
    rest = MP.matrix((A.tril() + A.tril(-1).mT).tolist()) - exact * exact.T
    return max(abs(x) for x in MP.eigsy(rest, eigvals_only=True))


def test_defect_of_a_given_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    for A, L in edge_cases():
        given = L, torch.zeros((), dtype=torch.int32)
        monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda _, given=given: given)
        truth, (_, defect) = distance_from_product(A, L), certified._factor(A.clone(), 1024)
        assert truth <= defect.lower.item()
        assert defect.upper.item() <= 3 * truth + 1e-11


@pytest.mark.parametrize("wrong", [0.0, 1e-9, 1e-3])
@pytest.mark.parametrize("block", [1, 3, 4])
def test_defect_of_a_factor_in_blocks(block: int, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a block of columns is, it is checked: also where a solver goes astray."""
    solve = torch.linalg.solve_triangular
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda *a, **k: solve(*a, **k) * (1 + wrong))
    for seed in range(6):
        rows = noise(5 + seed, 14, seed=seed)
        A = rows @ rows.mT
        factor = A.clone()
        holds, defect = certified._factor(factor, block)
        truth = distance_from_product(A, factor.tril())
        assert bool(holds)
        assert truth <= defect.lower.item()
        assert defect.upper.item() <= 8 * truth + 1e-11


def test_only_the_lower_triangle_of_a_factor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    G = noise(1, 5, 5).square()
    tau = tensor([G.norm().item()])
    expected = certified._shifted(G, tau)

    def littered(A: Tensor) -> tuple[Tensor, Tensor]:
        L, info = CHOLESKY(A)
        return L + torch.ones_like(L).triu(1), info

    monkeypatch.setattr(torch.linalg, "cholesky_ex", littered)
    assert torch.equal(certified._shifted(G, tau), expected)


@pytest.mark.parametrize("block", [1, 4, 5, 1024])
def test_symmetric_product_in_blocks(block: int) -> None:
    J = noise(2, 11, 6)
    G = _symmetric_product(J, block)
    torch.testing.assert_close(G, J @ J.mT)
    if block < 11:
        assert torch.equal(G[:, :4, 5:], G[:, 5:, :4].mT)


@pytest.mark.parametrize("length", [1, 2, 5, 300])
@pytest.mark.parametrize("radius", [0.0, 1e-17, 1e-6, 1.0])
@pytest.mark.parametrize("transposed", [False, True], ids=["row", "column"])
def test_gram_matrix_of_a_row_or_column(length: int, radius: float, transposed: bool) -> None:
    """One number, whose error can be checked in rational arithmetic."""
    for seed in range(20):
        row = noise(1, 1, length, seed=seed) * 10 ** noise(1, seed=seed).item()
        ball = Ball(row, row.abs() * radius)
        gram = MatrixOperator(ball.mT if transposed else ball).gram()
        assert gram.matrix.shape == (1, 1, 1)
        middle, scale = Fraction(gram.matrix.item()), Fraction(gram.scale.item())
        for sign in (-1, 0, 1):
            entries = [
                Fraction(x) + sign * Fraction(r)
                for x, r in zip(row.flatten().tolist(), ball.rad.flatten().tolist(), strict=True)
            ]
            assert abs(sum(x * x for x in entries) / scale**2 - middle) <= gram.error.item()
        assert gram.error.item() <= (1e-12 + 2.1 * radius + radius**2) * gram.matrix.item()


def test_gram_matrices_of_a_batch() -> None:
    gram = MatrixOperator(noise(3, 5, 4) * tensor([1e-200, 1.0, 1e200]).reshape(3, 1, 1)).gram()
    assert isinstance(gram, Gram)
    assert gram.matrix.shape == (3, 4, 4)
    assert gram.error.shape == gram.scale.shape == (3,)
    assert bool((gram.error < 1e-12).all())


# -- estimates


@pytest.mark.parametrize("scale", [2.0**-650, 1.0, 2.0**650], ids=["tiny", "unit", "huge"])
@by_exact
def test_estimate_of_integer_matrices(matrix: Tensor, square: int, scale: float) -> None:
    value = estimate(MatrixOperator(matrix * scale)).value.item() / scale
    assert value == pytest.approx(math.sqrt(square), rel=2e-6)
    assert value <= math.sqrt(square) * (1 + 1e-12)


@by_measured
def test_estimate_of_measured_matrices(matrix: Tensor) -> None:
    result = estimate(MatrixOperator(matrix))
    assert (result.side, result.guarantee) == ("estimate", "numerical")
    assert result.value.dtype == matrix.dtype
    above = 1e-6 if matrix.dtype == torch.float32 else 1e-12
    truth = known(matrix)
    assert truth * (1 - MP.mpf("2e-6")) <= result.value.item() <= truth * (1 + MP.mpf(above))


@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (120, 3)])
def test_estimate_of_nothing(shape: tuple[int, int]) -> None:
    result = estimate(MatrixOperator(torch.zeros(shape, dtype=FLOAT64)))
    assert result.value.item() == result.residual.item() == 0


@pytest.mark.parametrize("max_iterations", [1, 2, 3, 8, 200])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("shape", [(60, 40), (2, 40, 60), (5, 3), (1, 9), (9, 1)])
def test_residual_and_vectors_are_what_they_are_called(
    shape: tuple[int, ...], scale: float, max_iterations: int
) -> None:
    matrix = noise(*shape)
    result = estimate(MatrixOperator(matrix * scale), max_iterations=max_iterations)
    assert result.iterations <= max_iterations
    assert result.left is not None
    assert result.right is not None
    u, v = result.left, result.right
    sigma, residual = result.value / scale, result.residual / scale
    one = torch.ones(shape[:-2], dtype=FLOAT64)
    torch.testing.assert_close(u.norm(dim=-1), one)
    torch.testing.assert_close(v.norm(dim=-1), one)
    close: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close((matrix @ v.unsqueeze(-1)).squeeze(-1), sigma.unsqueeze(-1) * u, **close)
    back = (matrix.mT @ u.unsqueeze(-1)).squeeze(-1) - sigma.unsqueeze(-1) * v
    torch.testing.assert_close(back.norm(dim=-1), residual, rtol=1e-9, atol=1e-12)
    # Some singular value lies within the residual of the estimate.
    values = torch.linalg.svdvals(matrix)
    assert bool(((values - sigma.unsqueeze(-1)).abs().amin(-1) <= residual + 1e-12).all())


def test_estimate_of_a_batch_is_that_of_its_members() -> None:
    matrix = noise(2, 3, 8, 6) * 10.0 ** torch.arange(-3, 3).reshape(2, 3, 1, 1)
    matrix[0, 1] = 0
    matrix[1, 0, :, 1:] = 0  # exhausted after one step
    result = estimate(MatrixOperator(matrix), tolerance=1e-12)
    assert result.value.shape == result.residual.shape == (2, 3)
    assert result.left is not None
    assert result.left.shape == (2, 3, 8)
    alone = torch.stack([estimate(MatrixOperator(m), tolerance=1e-12).value for m in matrix.flatten(0, 1)])
    torch.testing.assert_close(result.value.flatten(), alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_a_gpu_is_never_asked_between_two_looks(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where asking waits, small eigenproblems are squared and looks are rare: the same values, vectors and NaN."""
    matrix = with_singular_values([3.0, 2.999, *(2 / k for k in range(1, 49))], 60, 50) * scale
    matrices = torch.stack([matrix, torch.zeros_like(matrix), matrix.mT.reshape(60, 50), matrix * torch.nan])
    monkeypatch.setattr(lanczos, "waits", lambda device: True)
    with Waits() as waits:
        result = estimate(MatrixOperator(matrices), tolerance=1e-9)
    assert waits.count <= 2 * math.log(result.iterations, 4 / 3)
    truth = torch.linalg.svdvals(matrices[:3] / scale)[:, 0] * scale
    torch.testing.assert_close(result.value[:3], truth, rtol=1e-8, atol=0)
    assert bool(result.value[3].isnan())
    assert result.right is not None
    pushed = (matrices[0] / scale @ result.right[0]).norm()
    assert float(pushed) == pytest.approx(float(truth[0] / scale), rel=1e-8)
    (only,) = estimate(MatrixOperator(tensor([[[2.0]]]) * scale)).value
    assert float(only / scale) == pytest.approx(2)


class Waits(TorchDispatchMode):
    """Counts the numbers that are asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-10])
def test_estimate_stops_by_its_own_residual(tolerance: float) -> None:
    values = [4.0, *(1 / k for k in range(1, 300))]
    matrix = with_singular_values(values, 320, 310)
    result = estimate(MatrixOperator(matrix), tolerance=tolerance)
    assert result.iterations < 20
    assert result.residual.item() > 0
    assert 4 * (1 - tolerance) <= result.value.item() <= 4 * (1 + 1e-12)


def test_estimate_is_repeatable_and_its_start_is_the_seed() -> None:
    operator = MatrixOperator(noise(50, 50))
    values = [estimate(operator, max_iterations=4, seed=seed).value.item() for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


# -- Jacobians of functions

WEIGHT = noise(3, 4, seed=7)


def self_attention(x: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, 2)).movedim(-2, -3) for t in (x, x @ WEIGHT.mT @ WEIGHT, x.tanh()))
    return scaled_dot_product_attention(q, k, v)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x @ WEIGHT.mT,
    "pointwise": lambda x: x.sin() * x,
    "reduction": lambda x: x.square().sum((-2, -1)),
    "flattened": lambda x: x.flatten(-2).cumsum(-1).tanh(),
    "attention": self_attention,
}
by_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    J: Tensor = torch.func.jacrev(function)(x)
    return J.reshape(-1, x.numel())


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e200])
def test_top_eigenvalues_of_many_matrices(scale: float) -> None:
    """Spread, close together, of rank one, all alike, zero, and not a number, in one batch."""
    spectra = [torch.linspace(0, 1, 120), 1 - torch.arange(120) * 1e-5, torch.eye(120)[0], torch.ones(120)]
    Q = torch.linalg.qr(noise(120, 120)).Q
    known_ones = torch.stack([(Q * spectrum.to(FLOAT64)) @ Q.mT for spectrum in spectra])
    odd_ones = torch.stack([torch.zeros(120, 120, dtype=FLOAT64), torch.full((120, 120), math.nan, dtype=FLOAT64)])
    matrices = torch.cat([known_ones, odd_ones]) * scale
    values = top_eigenvalue(lambda v: matrices @ v, matrices, 1e-9)
    torch.testing.assert_close(values[:4] / scale, torch.ones(4, dtype=FLOAT64), rtol=1e-8, atol=0)
    assert values[4] == 0
    assert values[5].isnan()


@by_function
def test_jacobian_of_a_function(function: Callable[[Tensor], Tensor]) -> None:
    x = noise(5, 4)
    operator = FunctionJacobian(function, x)
    truth = jacobian(function, x)
    assert (operator.batch, operator.domain, operator.codomain) == ((), x.shape, function(x).shape)
    torch.testing.assert_close(operator.dense(), truth)
    norm = torch.linalg.matrix_norm(truth, 2)
    torch.testing.assert_close(estimate(operator, tolerance=1e-10).value, norm, rtol=1e-8, atol=0)


@by_function
def test_jacobians_of_a_batch(function: Callable[[Tensor], Tensor]) -> None:
    x = noise(3, 5, 4)
    operator = FunctionJacobian(function, x, batch_dims=1)
    truth = torch.stack([jacobian(function, member) for member in x])
    assert operator.batch == (3,)
    torch.testing.assert_close(operator.dense(), truth)
    norms = torch.linalg.matrix_norm(truth, 2)
    torch.testing.assert_close(estimate(operator, tolerance=1e-10).value, norms, rtol=1e-8, atol=0)


@pytest.mark.parametrize("directions", [(), (1,), (6,), (2, 3)], ids=str)
@by_function
def test_several_directions_at_once(function: Callable[[Tensor], Tensor], directions: tuple[int, ...]) -> None:
    x = noise(2, 5, 4)
    operator = FunctionJacobian(function, x, batch_dims=1)
    truth = operator.dense()
    v = noise(*directions, *x.shape, seed=1)
    u = noise(*directions, *operator.batch, *operator.codomain, seed=2)
    columns, rows = v.reshape(*directions, 2, -1, 1), u.reshape(*directions, 2, -1, 1)
    torch.testing.assert_close(operator.mv(v), (truth @ columns).reshape(u.shape))
    torch.testing.assert_close(operator.rmv(u), (truth.mT @ rows).reshape(v.shape))


def test_directions_of_stored_matrices() -> None:
    matrix = noise(2, 5, 4)
    operator = MatrixOperator(matrix)
    v, u = noise(3, 2, 4, seed=1), noise(3, 2, 5, seed=2)
    torch.testing.assert_close(operator.mv(v), torch.einsum("bmn,kbn->kbm", matrix, v))
    torch.testing.assert_close(operator.rmv(u), torch.einsum("bmn,kbm->kbn", matrix, u))
    assert torch.equal(operator.dense(), matrix)
    assert torch.equal(MatrixOperator(Ball.exact(matrix)).dense(), matrix)


@pytest.mark.parametrize(
    ("function", "batch_dims", "message"),
    [(lambda x: (x, x), 0, "expected one tensor"), (lambda x: x.sum(0), 1, "same batch dimensions")],
)
def test_functions_that_do_not_fit(function: Callable[[Tensor], Any], batch_dims: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FunctionJacobian(function, noise(3, 4), batch_dims)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_powers_find_what_the_eigensolver_finds(size: int) -> None:
    B = noise(30, size, size)
    squares = B @ B.mT
    value, vector = _dominant(squares, 30)
    values, vectors = torch.linalg.eigh(squares)
    torch.testing.assert_close(value, values[:, -1], rtol=1e-12, atol=0)
    torch.testing.assert_close(vector.abs(), vectors[..., -1].abs(), rtol=0, atol=1e-6)
    assert not bool(_dominant(torch.zeros_like(squares), 30)[1].any())


def test_squarings_hold_for_every_matrix_within_the_error() -> None:
    gram, error = torch.diag(tensor([1.0, 0.5])), tensor(0.1)
    for squarings in range(1, 5):
        assert float(gram_norm(gram, error, squarings)) ** 2 * (1 + 1e-12) >= 1.1
    exact = gram_norm(gram, 0 * error, 8)
    assert 1 <= float(exact) <= 1 + 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_map_that_is_not_finite_has_no_norm(bad: float) -> None:
    matrices = noise(3, 5, 4)
    matrices[1, 2, 3] = bad
    value = estimate(MatrixOperator(matrices)).value
    assert bool(value[1].isnan())
    torch.testing.assert_close(value[::2], torch.linalg.matrix_norm(matrices[::2], 2))


@pytest.mark.parametrize("shape", [(3, 5, 40), (40, 5), (2, 3, 7, 7), (1, 1)])
def test_thin_norms_are_spectral_norms(shape: tuple[int, ...]) -> None:
    matrix = noise(*shape) * 1e200
    torch.testing.assert_close(thin_norm(matrix), torch.linalg.matrix_norm(matrix, 2), rtol=1e-13, atol=0)
    matrix.flatten()[0] = math.nan
    assert int(thin_norm(matrix).isnan().sum()) == 1
    assert not bool(thin_norm(torch.zeros_like(matrix)).any())


@pytest.mark.parametrize("scale", [1e-200, 1e-165, 1e-90, 1.0, 1e90, 1e165])
def test_estimated_norms_of_any_size(scale: float) -> None:
    """Squares of small and large numbers do not fit into float64; a map that vanishes has the norm 0."""
    matrices = torch.stack([noise(9, 7), torch.zeros(9, 7, dtype=FLOAT64)])
    values = estimated_norm(MatrixOperator(matrices * scale), 1e-9)
    torch.testing.assert_close(values / scale, torch.linalg.matrix_norm(matrices, 2), rtol=1e-6, atol=0)
