"""Bounds of slopes: the table, the conformance kit, the front door, and the formulas written out."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import holdfast
import literal
from holdfast import AttentionLayer, InputError, SoundnessError, UnknownNameError
from holdfast.attention import fold
from holdfast.bounds import BallBound, PointBound, ball_bounds, bounds, list_bounds, point_bounds
from holdfast.bounds.base import Evaluation
from holdfast.bounds.lipschitz import attained_gain
from holdfast.linalg import Array
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.testing import BallBoundConformance, Case, PointBoundConformance, cases, changed, make_case
from holdfast.testing.draw import draw
from holdfast.testing.layers import typical
from holdfast.testing.lipschitz import _SlopeConformance

BIBLIOGRAPHY = Path(__file__).parents[1] / "docs" / "references.bib"
CASE = make_case("h=2, n=4, d=4, k=2", biases=True, residual=1.0)
LAYER, X = CASE.layer, CASE.x
METHODS = ("yudin", "yudin-b2", "yudin-b3")

# -- the table


class TestJacobian(PointBoundConformance):
    def name(self) -> str:
        return "jacobian"


class TestYudin(PointBoundConformance):
    def name(self) -> str:
        return "yudin"


class TestYudinB2(PointBoundConformance):
    def name(self) -> str:
        return "yudin-b2"


class TestYudinB3(PointBoundConformance):
    def name(self) -> str:
        return "yudin-b3"


class TestCastinData(PointBoundConformance):
    def name(self) -> str:
        return "castin-data"


class TestBestAtPoint(PointBoundConformance):
    def name(self) -> str:
        return "best"

    def cases(self) -> Sequence[Case]:
        """Some, and all typical ones: it takes the smallest of bounds that are tried with every case."""
        return [case for i, case in enumerate(cases()) if i % 4 == 0 or case in typical(cases())]


class TestCastinBall(BallBoundConformance):
    def name(self) -> str:
        return "castin-ball"


class TestCastinMasked(BallBoundConformance):
    def name(self) -> str:
        return "castin-masked"


class TestCastinSharp(BallBoundConformance):
    def name(self) -> str:
        return "castin-sharp"


class TestMeanField(BallBoundConformance):
    def name(self) -> str:
        return "mean-field"


class TestMeanFieldMasked(BallBoundConformance):
    def name(self) -> str:
        return "mean-field-masked"


class TestBestOnBall(BallBoundConformance):
    def name(self) -> str:
        return "best"


@pytest.mark.parametrize(
    ("kit", "registry"), [(PointBoundConformance, point_bounds), (BallBoundConformance, ball_bounds)]
)
def test_every_registered_bound_is_in_the_table(kit: type[_SlopeConformance], registry: object) -> None:
    rows = [item for name, item in globals().items() if name.startswith("Test") and issubclass(item, kit)]
    own = [b.name for b in registry.values() if type(b).__module__.startswith("holdfast.")]  # type: ignore[attr-defined]
    assert sorted(row().name() for row in rows) == sorted(own)


def test_references_are_in_the_bibliography() -> None:
    keys = set(re.findall(r"^@\w+\{([^,\s]+),", BIBLIOGRAPHY.read_text(encoding="utf-8"), re.MULTILINE))
    for bound in (*point_bounds.values(), *ball_bounds.values()):
        for reference in bound.reference.split(";"):
            assert reference.split(",")[0].strip() in {*keys, "holdfast"}, bound.name


def test_every_kind_is_listed_with_its_scope() -> None:
    scopes = {(bound.name, bound.scope) for bound in list_bounds()}
    assert {("lofast", "ball at x"), ("yudin", "point"), ("yudin-ball", "ball at x")} <= scopes
    assert {scope for name, scope in scopes if name == "best"} == {"ball at x", "point", "ball at 0"}
    assert len(scopes) == len(list_bounds())


# -- the formulas, written out with dense matrices


def written_out(layer: AttentionLayer, x: Tensor, method: str) -> float:
    """The formulas for one input, head by head and row by row."""
    norm, n = literal.norm, len(x)
    total = float(abs(layer.residual) if method == "yudin" else norm(literal.value_matrix(layer, x)))
    X_c = x - x.mean(0)
    query = torch.zeros(n, layer.d_out, layer.d, dtype=torch.float64)
    apart, stacked, firsts, seconds = 0.0, [], [], []
    sigma = [[] for _ in range(n)]
    for P, head in zip(layer.attention(x), literal.heads(layer), strict=True):
        A, C = layer.scale * head.w_q @ head.w_k.T, head.w_v @ head.w_o
        shift = layer.scale * head.w_k @ (head.b_q + torch.zeros(layer.k, dtype=torch.float64))
        K, V = x @ A + shift, x @ C
        top = torch.cat([P, torch.zeros(n, 1)], -1).sort(-1, descending=True).values
        g = top[:, 0] * (top[:, 1:].sum(-1) + top[:, 1])
        M = torch.diag_embed(P) - P[:, :, None] * P[:, None, :]
        if method == "yudin":
            scores = 2 * norm(x) * norm(A) + math.sqrt(n) * shift.norm()
            total += float(norm(C) * (norm(P) + norm(x) * scores * g.max()))
        elif method == "yudin-b2":
            firsts.append(X_c @ C)
            seconds.append(g.max() * norm(X_c @ A.T) + norm(g[:, None] * K))
            apart += float(norm(firsts[-1]) * seconds[-1])
        else:
            query += V.T @ M @ x @ A.T
            parts = [M[i] @ V for i in range(n)]
            apart += float(norm(torch.stack([norm(part) for part in parts])[:, None] * K))
            stacked.append(K)
            for i, part in enumerate(parts):
                sigma[i].append(part)
    if method == "yudin-b2":
        together = norm(torch.cat(firsts)) * torch.stack(seconds).norm()
        total += min(apart, float(together))
    if method == "yudin-b3":
        joint = torch.stack([norm(torch.cat(parts)) for parts in sigma])
        together = norm(torch.cat([joint[:, None] * K for K in stacked]))
        total += max(float(norm(block)) for block in query) + min(apart, float(together))
    return total


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", [case for case in cases() if case.plain], ids=lambda case: case.name)
def test_formula_is_the_documented_one(case: Case, method: str) -> None:
    kit = {"yudin": TestYudin, "yudin-b2": TestYudinB2, "yudin-b3": TestYudinB3}[method]()
    value = kit._value(case)
    for i in range(len(case.x)):
        one = case.member(i)
        assert float(value[i]) == pytest.approx(written_out(one.layer, one.x, method), rel=1e-6, abs=1e-100)


def test_each_refinement_is_tighter() -> None:
    """On one head, b2 is not above yudin, and b3 not above b2."""
    for seed in range(8):
        case = make_case("", seed, h=1, n=6, d=5, k=3, biases=seed % 2 == 0, sharpness=(0.1, 1.0, 5.0)[seed % 3])
        loose, middle, tight = (holdfast.lipschitz_bound(case.layer, case.x, name).value for name in METHODS)
        assert bool((middle <= loose * (1 + 1e-7)).all())
        assert bool((tight <= middle * (1 + 1e-7)).all())


def test_a_query_bias_counts() -> None:
    """With w_q = 0 the scores come from the bias alone; a bound that forgot it would miss the key path."""
    layer = changed(LAYER, w_q=torch.zeros_like(LAYER.w_q), residual=0.0)
    without = changed(layer, b_q=None)
    for method in METHODS:
        with_bias, plain = (holdfast.lipschitz_bound(each, X, method).value for each in (layer, without))
        assert bool((with_bias > plain * 1.05).all())
    other = changed(layer, b_k=None, b_v=None, b_o=None)
    for method in METHODS:
        values = (holdfast.lipschitz_bound(each, X, method).value for each in (layer, other))
        torch.testing.assert_close(*values, rtol=1e-7, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_bounds_hold_for_drawn_layers(seed: int) -> None:
    case = draw(5000 + seed)
    layer, x = case.layer.double(), case.x.double()
    exact = holdfast.local_lipschitz(layer, x, side="estimate", tolerance=1e-10).value
    for name in point_bounds:
        try:
            value = holdfast.lipschitz_bound(case.layer, case.x, name).value
        except SoundnessError:
            raise
        except holdfast.HoldfastError as error:  # the extreme draws overflow
            assert re.search("overflow", str(error))  # noqa: PT017
            continue
        rounding = 1e-16 * case.size**2  # of the estimate: it multiplies values, scores and keys
        assert bool((value >= exact * (1 - 1e-7) - rounding).all()), name


# -- the mean ratios of docs/math/softmax.md


def ratios(sharpness: float, seeds: int = 8) -> dict[str, float]:
    """Mean ratio to the exact norm: 24 tokens after LayerNorm, width 32, one head, A scaled by the sharpness."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        x, *maps = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((24, 32), *((1, 32, 32),) * 3))
        w_q, w_k, w_v = (w / math.sqrt(32) for w in maps)
        x = torch.nn.functional.layer_norm(x, (32,))
        w_o = torch.eye(32, dtype=torch.float64)[None]
        layer = AttentionLayer(w_q * sharpness, w_k, w_v, w_o)
        exact = float(holdfast.local_lipschitz(layer, x, tolerance=1e-9).value)
        for name in METHODS:
            value = float(holdfast.lipschitz_bound(layer, x, name, guarantee="numerical").value)
            found.setdefault(name, []).append(value / exact)
    return {name: sum(values) / len(values) for name, values in found.items()}


@pytest.mark.parametrize(
    ("sharpness", "expected"),
    [(0.05, (1.18, 1.07, 1.05)), (1.0, (15.7, 5.6, 2.2)), (30.0, (24.0, 6.1, 1.55))],
)
def test_ratios_are_the_documented_ones(sharpness: float, expected: tuple[float, ...]) -> None:
    assert list(ratios(sharpness, seeds=2).values()) == pytest.approx(expected, rel=0.3)


# -- the front door


def test_best_at_a_point_is_the_smallest_and_says_which() -> None:
    result = holdfast.lipschitz_bound(LAYER, X)
    others = {name: holdfast.lipschitz_bound(LAYER, X, name).value for name in point_bounds if name != "best"}
    torch.testing.assert_close(result.value, torch.stack(list(others.values())).amin(0), rtol=1e-12, atol=0.0)
    assert set(result.terms) == set(others)
    assert any("is smallest at" in note for note in result.notes)


def test_best_leaves_out_what_overflows() -> None:
    result = holdfast.lipschitz_bound(LAYER, radius=30.0, tokens=4)
    assert bool(torch.isfinite(result.value))
    assert any("mean-field overflowed" in note for note in result.notes)
    assert "mean-field" not in result.terms
    with pytest.raises(holdfast.HoldfastError, match="overflowed float64"):
        holdfast.lipschitz_bound(LAYER, radius=30.0, tokens=4, method="mean-field")


def test_a_score_bias_and_rotary_positions_are_covered() -> None:
    bias = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angles = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(4, 2)
    turned = changed(LAYER, rotary=holdfast.Rotary(angles.cos(), angles.sin()))
    for layer in (changed(LAYER, score_bias=bias), turned):
        exact = holdfast.local_lipschitz(layer, X, side="upper").value
        for method in METHODS:
            assert bool((holdfast.lipschitz_bound(layer, X, method).value >= exact * (1 - 1e-7)).all())
    assert bool((attained_gain(turned, X) <= holdfast.local_lipschitz(turned, X, side="upper").value).all())


@pytest.mark.parametrize("method", [*METHODS, "castin-data", "castin-ball", "mean-field"])
def test_a_slope_bounds_nothing_over_a_ball_at_x(method: str) -> None:
    assert method not in bounds
    with pytest.raises(InputError, match="proves nothing about a ball around x; call lipschitz_bound"):
        holdfast.bound(LAYER, X, 0.1, method=method)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither x nor a radius with tokens"),
        ({"radius": 1.0}, "neither x nor a radius with tokens"),
        ({"x": X, "radius": 1.0}, "both x and a radius"),
        ({"x": X, "tokens": 4}, "both x and a radius"),
        (
            {"x": X, "method": "castin-ball"},
            "'castin-ball' holds on a ball around 0; in the place of x pass radius",
        ),
        ({"radius": 1.0, "tokens": 4, "method": "yudin"}, "'yudin' holds at a point; pass x"),
        ({"radius": -1.0, "tokens": 4}, "radius is -1.0; expected a finite number"),
        ({"radius": 10**400, "tokens": 4}, "radius is a whole number beyond float64; expected a finite number"),
        ({"x": X, "method": None}, "method at a point is None; expected a name, one of best, "),
        ({"x": X, "method": ["yudin"]}, r"method at a point is \['yudin'\]; expected a name"),
        ({"radius": [], "tokens": 4}, "radius is an empty sequence"),
        ({"radius": 1.0, "tokens": 0}, "tokens is 0; expected how many tokens"),
        ({"radius": 1.0, "tokens": 2.5}, "tokens is 2.5; expected how many tokens"),
        ({"radius": 1.0, "tokens": 4, "p": 0.5}, "p is 0.5; expected a number from 1 to inf"),
        ({"radius": 1.0, "tokens": 4, "p": math.nan}, "p is nan; expected a number from 1 to inf"),
        ({"x": X, "guarantee": "likely"}, "guarantee is 'likely'; best offers proved and numerical"),
        ({"x": X[..., :3]}, r"x has shape \(2, 4, 3\)"),
    ],
)
def test_complaints(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        holdfast.lipschitz_bound(LAYER, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_unknown_names_get_the_nearest_one_of_the_scope() -> None:
    with pytest.raises(UnknownNameError, match="unknown method at a point 'yudinb3': did you mean 'yudin-b3'"):
        holdfast.lipschitz_bound(LAYER, X, "yudinb3")
    with pytest.raises(UnknownNameError, match="unknown method on a ball around 0 'castin'"):
        holdfast.lipschitz_bound(LAYER, radius=1.0, tokens=4, method="castin")


def test_a_mask_fixes_the_tokens() -> None:
    layer = make_case("", mask="each").layer
    with pytest.raises(InputError, match="tokens is 5 and the mask is for 4"):
        holdfast.lipschitz_bound(layer, radius=1.0, tokens=5)


# -- the base class doubts, the kit can fail


class HalfAtPoint(PointBound):
    """Half of the slope."""

    name, cost, reference = "half", "nothing", "holdfast"

    def _refusal(self, layer: AttentionLayer) -> str | None:
        return None

    def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor) -> Evaluation[Array]:
        f = fold(layer, a.lift(x))
        return Evaluation(a.matrix_norm(f.p).amax(-1) * 0.0 + 1e-3, {})


class SmallOnBall(BallBound):
    """A constant that is no bound."""

    name, cost, reference = "small", "nothing", "holdfast"

    def _refusal(self, layer: AttentionLayer, p: float) -> str | None:
        return None

    def _evaluate(
        self, a: Arithmetic[Array], layer: AttentionLayer, radius: Array, tokens: int, p: float
    ) -> Evaluation[Array]:
        return Evaluation(radius * 0.0 + 1e-3, {})


def test_a_value_below_an_attained_slope_is_withheld() -> None:
    for guarantee in ("proved", "numerical"):
        with pytest.raises(SoundnessError, match="'half' returned a value below one that is attained"):
            HalfAtPoint()(LAYER, X, guarantee=guarantee)
        with pytest.raises(SoundnessError, match="'small' returned a value below one that is attained"):
            SmallOnBall()(LAYER, 1.0, 4, guarantee=guarantee)


@pytest.mark.parametrize(
    ("options", "tokens", "memory", "looked_at"),
    [
        ({}, 4, 1e9, 4),
        ({}, 3000, 1e9, 250),  # a divisor
        ({}, 3001, 1e9, 1),
        ({"causal": True}, 3001, 1e9, 256),
        ({}, 3000, 1e6, 40),
        ({"causal": True}, 3000, 1e6, 44),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, 4, 1e9, 4),
        ({"mask": torch.ones(300, 300, dtype=torch.bool)}, 300, 1e9, None),
        ({}, 4, 100, None),
    ],
)
def test_check_of_a_ball_keeps_to_the_memory(
    options: dict[str, object], tokens: int, memory: float, looked_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def record(layer: AttentionLayer, x: Tensor) -> Tensor:
        seen.append(x.shape[-2])
        return attained_gain(layer, x)

    monkeypatch.setattr("holdfast.bounds.lipschitz.attained_gain", record)
    layer = changed(LAYER, residual=0.0, **options)
    with contextlib.suppress(SoundnessError):
        SmallOnBall()(layer, 1.0, tokens, memory_limit=memory)
    assert seen == ([] if looked_at is None else [looked_at])


def test_copies_that_move_alike_have_the_slope_of_one_sequence() -> None:
    for seed in range(5):
        case = make_case("copies", seed, n=3, h=2, biases=True)
        one, three = (holdfast.local_lipschitz(case.layer, x).value for x in (case.x, case.x.repeat(1, 3, 1)))
        assert bool((three >= one * (1 - 1e-6)).all())


class KitForHalf(PointBoundConformance):
    def name(self) -> str:
        return "half"


class KitForSmall(BallBoundConformance):
    def name(self) -> str:
        return "small"


def test_kit_catches_values_that_are_no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = torch.zeros((), dtype=torch.float64)
    monkeypatch.setattr("holdfast.bounds.lipschitz.attained_gain", lambda layer, x: nothing.expand(x.shape[:-2]))
    monkeypatch.setattr(point_bounds, "_items", point_bounds._items | {"half": HalfAtPoint()})
    monkeypatch.setattr(ball_bounds, "_items", ball_bounds._items | {"small": SmallOnBall()})
    plain = cases()[0]
    with pytest.raises(AssertionError):
        KitForHalf().test_not_below_the_exact_norm(plain)
    with pytest.raises(AssertionError):
        KitForSmall().test_not_below_any_slope_that_is_found(plain)
    with pytest.raises(AssertionError):
        KitForSmall().test_holds_for_every_exponent(plain)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_what_is_attained_is_never_above_the_norm(case: Case) -> None:
    attained = attained_gain(case.layer, case.x)
    exact = holdfast.local_lipschitz(case.layer, case.x, side="upper").value
    assert bool((attained <= exact).all())
    assert bool((attained >= 0.5 * exact - 1e-100).all())
