"""The closed-form Jacobian and the two maps of the LoFAST splitting, against differentiation and against the paper."""

from __future__ import annotations

import mpmath
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast
import literal
from holdfast import AttentionLayer
from holdfast.attention import AttentionJacobian, ValueOperator, score_operator
from holdfast.linalg import FunctionJacobian, LinearOperator
from holdfast.testing import Case, make_case
from holdfast.testing.bounds import dense_jacobian

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def differentiated(case: Case) -> Tensor:
    """(b, n d_out, n d) by reverse differentiation, input by input."""
    members = [case.member(i) for i in range(len(case.x))]
    return torch.stack([dense_jacobian(each.layer, each.x) for each in members])


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# -- AttentionJacobian


def test_products_equal_differentiation(combination: Case) -> None:
    J = AttentionJacobian(combination.layer, combination.x)
    expected = differentiated(combination)
    b, n, d = combination.x.shape
    v, u = normal(3, b, n, d), normal(3, b, n, combination.layer.d_out)
    torch.testing.assert_close(J.dense(), expected, **CLOSE)
    torch.testing.assert_close(J.mv(v).flatten(2), torch.einsum("bij,mbj->mbi", expected, v.flatten(2)), **CLOSE)
    torch.testing.assert_close(J.rmv(u).flatten(2), torch.einsum("bij,mbi->mbj", expected, u.flatten(2)), **CLOSE)


def test_enclosure_equals_differentiation(combination: Case) -> None:
    enclosure = AttentionJacobian(combination.layer, combination.x).enclose()
    expected = differentiated(combination)
    torch.testing.assert_close(enclosure.matrix, expected, **CLOSE)
    assert bool((enclosure.error <= 1e-11 * torch.linalg.matrix_norm(expected)).all())


def test_rows_are_assembled_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("pieces", h=4, g=2, biases=True, mask="each", residual=1.0, n=5)
    whole = AttentionJacobian(case.layer, case.x).enclose()
    for doubles in (1, 5 * 2 * 4 * 4 * 2, 5 * 2 * 4 * 4 * 3):  # one row at a time, two, three
        monkeypatch.setattr("holdfast.attention.dense_rows._CHUNK_DOUBLES", doubles)
        pieces = AttentionJacobian(case.layer, case.x).enclose()
        torch.testing.assert_close(pieces.matrix, whole.matrix, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(pieces.error, whole.error, rtol=1e-6, atol=0.0)


def mp_attention(layer: AttentionLayer, x: mpmath.matrix) -> list[mpmath.mpf]:
    """F(x), entry by entry in mpmath; for one head."""
    w_q, w_k, w_v, w_o = (mpmath.matrix(getattr(layer, name)[0].tolist()) for name in ("w_q", "w_k", "w_v", "w_o"))
    n = x.rows
    ones = mpmath.ones(n, 1)

    def bias(b: Tensor | None, width: int) -> mpmath.matrix:
        return ones * (mpmath.zeros(1, width) if b is None else mpmath.matrix([b.flatten().tolist()]))

    q, k, v = x * w_q + bias(layer.b_q, layer.k), x * w_k + bias(layer.b_k, layer.k), x * w_v + bias(layer.b_v, layer.k)
    allowed = layer.allowed(n)
    weights = mpmath.matrix(n, n)
    for i in range(n):
        for j in range(n):
            score = mpmath.mpf(layer.scale) * sum(q[i, c] * k[j, c] for c in range(layer.k))
            weights[i, j] = mpmath.exp(score) if allowed is None or bool(allowed[i, j]) else mpmath.mpf(0)
    for i in range(n):
        total = sum(weights[i, j] for j in range(n))
        for j in range(n):
            weights[i, j] /= total
    out = weights * v * w_o + bias(layer.b_o, layer.d_out) + mpmath.mpf(layer.residual) * x
    return [out[i, c] for i in range(n) for c in range(layer.d_out)]


def mp_jacobian(layer: AttentionLayer, x: Tensor) -> list[list[mpmath.mpf]]:
    """Columns of DF(x), by central differences with a step of 1e-30 in 90 digits."""
    step, columns = mpmath.mpf(10) ** -30, []
    for entry in range(x.numel()):
        sides = []
        for sign in (1, -1):
            moved = mpmath.matrix(x.tolist())
            moved[entry // x.shape[1], entry % x.shape[1]] += sign * step
            sides.append(mp_attention(layer, moved))
        columns.append([(a - b) / (2 * step) for a, b in zip(*sides, strict=True)])
    return columns


@pytest.mark.parametrize("sharpness", [1.0, 20.0])
@pytest.mark.parametrize("options", [{}, {"biases": True, "causal": True, "residual": 0.1}], ids=["plain", "all"])
def test_enclosure_holds_the_exact_jacobian(sharpness: float, options: dict[str, bool]) -> None:
    case = make_case("tiny", n=3, d=2, k=2, h=1, sharpness=sharpness, **options)
    enclosure = AttentionJacobian(case.layer, case.x).enclose()
    for i, x in enumerate(case.x):
        with mpmath.workdps(90):
            exact, found = mp_jacobian(case.layer, x), enclosure.matrix[i].mT.tolist()
            squares = [
                (e - f) ** 2 for row, other in zip(exact, found, strict=True) for e, f in zip(row, other, strict=True)
            ]
            distance = mpmath.sqrt(sum(squares))
            assert 0 < distance <= mpmath.mpf(enclosure.error[i].item())
            assert enclosure.error[i] <= 1e-11 * enclosure.matrix[i].norm()
            norm = mpmath.svd_r(mpmath.matrix(exact), compute_uv=False)[0]
            proved = holdfast.local_lipschitz(case.layer, x, side="upper").value.item()
            assert norm <= mpmath.mpf(proved) <= norm * (1 + mpmath.mpf("1e-7"))


def test_function_jacobian_agrees(combination: Case) -> None:
    J = FunctionJacobian(combination.layer, combination.x, batch_dims=1)
    torch.testing.assert_close(J.dense(), AttentionJacobian(combination.layer, combination.x).dense(), **CLOSE)


def test_several_batch_dimensions(combination: Case) -> None:
    x = torch.stack([combination.x, 2 * combination.x, -combination.x])
    J = AttentionJacobian(combination.layer, x)
    assert J.batch == (3, 2)
    for i in range(3):
        expected = AttentionJacobian(combination.layer, x[i]).dense()
        torch.testing.assert_close(J.dense()[i], expected, **CLOSE)
        torch.testing.assert_close(J.part(2 * i, 2 * i + 2).dense(), expected, **CLOSE)


# -- local_lipschitz


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_local_lipschitz_lies_between_estimate_and_proof(dtype: torch.dtype) -> None:
    case = make_case("between", h=4, g=2, biases=True, mask="each", residual=1.0)
    layer, x = case.layer.to(dtype), case.x.to(dtype)
    exact = torch.linalg.matrix_norm(differentiated(Case("widened", layer.double(), x.double())), ord=2)
    lower, upper = holdfast.local_lipschitz(layer, x), holdfast.local_lipschitz(layer, x, side="upper")
    assert (lower.side, lower.guarantee) == ("estimate", "numerical")
    assert (upper.side, upper.guarantee) == ("upper", "proved")
    assert lower.value.shape == upper.value.shape == (2,)
    assert lower.value.dtype == dtype
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    assert bool((lower.value <= exact * (1 + rounding)).all())
    assert bool((lower.value >= exact * (1 - 1e-5)).all())
    assert bool((exact * (1 - 1e-13) <= upper.value).all())
    assert bool((upper.value <= exact * (1 + 1e-7)).all())
    assert set(upper.to_dict()) == {"value", "side", "guarantee", "residual", "iterations", "seconds"}


def test_local_lipschitz_of_a_function() -> None:
    case = make_case("function", residual=1.0)
    expected = torch.linalg.matrix_norm(differentiated(case), ord=2)
    for function in (case.layer, lambda x: case.layer(x) + 1):
        each = holdfast.local_lipschitz(function, case.x, batch_dims=1, tolerance=1e-9)
        torch.testing.assert_close(each.value, expected, rtol=1e-6, atol=0.0)
    one = holdfast.local_lipschitz(lambda x: 3 * x.sum(), torch.ones(2, 8, dtype=torch.float64))
    torch.testing.assert_close(one.value, torch.tensor(12.0, dtype=torch.float64))


# -- ValueOperator


def test_value_operator_is_that_of_lemma_1(combination: Case) -> None:
    op = ValueOperator(combination.layer, combination.x)
    enclosure = op.enclose()
    for i in range(len(combination.x)):
        member = combination.member(i)
        expected = literal.value_matrix(member.layer, member.x)
        torch.testing.assert_close(op.dense()[i], expected, **CLOSE)
        torch.testing.assert_close(enclosure.matrix[i], expected, **CLOSE)
        assert enclosure.error[i] <= 1e-11 * expected.norm()


# -- ScoreOperator


def test_score_operator_is_that_of_equation_20(combination: Case) -> None:
    dense = score_operator(combination.layer, combination.x).dense()
    for i in range(len(combination.x)):
        member = combination.member(i)
        expected = [literal.score_matrix(member.layer, member.x, head) for head in literal.heads(member.layer)]
        torch.testing.assert_close(dense[i], torch.stack(expected), **CLOSE)


# -- memory


class LargestTensor(TorchDispatchMode):
    """Records how many numbers the largest tensor holds that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.parametrize("build", [AttentionJacobian, ValueOperator, score_operator])
def test_products_hold_no_large_matrix(build: type[LinearOperator]) -> None:
    """Nothing larger than the probabilities of all heads: neither nd × nd nor n² × nd."""
    case = make_case("long", n=64, d=8, k=4, h=2, biases=True, residual=1.0).member(0)
    op = build(case.layer, case.x)  # type: ignore[arg-type, call-arg]
    with LargestTensor() as largest:
        op.rmv(op.mv(normal(*op.batch, *op.domain)))
    h, n, d = 2, 64, 8
    assert h * n * n <= largest.numel < 2 * h * n * n < (n * d) ** 2 // 8
