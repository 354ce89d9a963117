"""Compositions beyond their conformance kit: pieces of other people, the centre, the search, refusals."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer, InputError, NotApplicableError, UnknownNameError
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import Composition, certify_inputs, compositions, register_composition, segments
from holdfast.compositions.search import largest
from holdfast.errors import HoldfastError, MemoryLimitError
from holdfast.layers.activation.functions import activations
from holdfast.layers.attention.piece import Attention
from holdfast.layers.norm.piece import LayerNorm
from holdfast.layers.perceptron.piece import Mlp
from holdfast.layers.piece import LinearPiece, Piece, SmoothPiece
from holdfast.layers.tokens.pooling import ClassToken
from holdfast.linalg.arithmetic import Arithmetic, Proved
from holdfast.linalg.curves import Curve, Grid
from holdfast.linalg.rounding import lift
from holdfast.network import centre as centres
from holdfast.network.centre import Centre, Enclosed, pulled, pushed
from holdfast.network.network import Head, Network, Residual
from holdfast.network.site import Site
from holdfast.studies import networks

PROVING = tuple(name for name in compositions if isinstance(compositions[name], Composition))
GUESSING = ("lofast", "layerwise", "end-to-end", "margin-gradient")  # in this order, from near to far


class Bent(SmoothPiece):
    """u + √(1 + (uV)²) A: a piece whose constants are plain to see, |φ'| <= 1 and 0 < φ'' <= 1."""

    def __init__(self, V: Tensor, A: Tensor) -> None:
        self.V, self.A = V, A

    def value(self, u: Any) -> Any:
        return u + ((u @ lift(self.V, u)).square() + 1.0).sqrt() @ lift(self.A, u)

    def push(self, u: Any, a: Any) -> Any:
        t = u @ lift(self.V, u)
        return a + ((a @ lift(self.V, u)) * (t / (t.square() + 1.0).sqrt())) @ lift(self.A, u)

    def pull(self, u: Any, c: Any) -> Any:
        t = u @ lift(self.V, u)
        return c + ((c @ lift(self.A.mT, u)) * (t / (t.square() + 1.0).sqrt())) @ lift(self.V.mT, u)

    def push2(self, u: Any, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def pull2(self, u: Any, c: Any, a: Any) -> Any:
        raise NotImplementedError

    def gain(self, a: Arithmetic[Any], u: Tensor, rho: Any) -> Any:
        return rho * 0.0 + a.matrix_norm(a.lift(self.V)) * a.matrix_norm(a.lift(self.A)) + 1.0

    def curvature(self, a: Arithmetic[Any], u: Tensor, rho: Any) -> Any:
        return rho * 0.0 + a.matrix_norm(a.lift(self.V)).square() * a.matrix_norm(a.lift(self.A))

    def reach(self, a: Arithmetic[Any], u: Tensor, rho: Any) -> Any:
        return self.gain(a, u, rho) * rho


class Kinked(Piece):
    """relu(u W)."""

    def __init__(self, W: Tensor) -> None:
        self.W = W

    def value(self, u: Any) -> Any:
        t = u @ lift(self.W, u)
        return (t + t.abs()) * 0.5

    def reach(self, a: Arithmetic[Any], u: Tensor, rho: Any) -> Any:
        return a.matrix_norm(a.lift(self.W)) * rho


class Mean(LinearPiece):
    """The mean of n = 4 tokens, which is exact in binary."""

    def value(self, u: Any) -> Any:
        return u.sum(-2, keepdim=True) * 0.25

    def push(self, u: Any, a: Any) -> Any:
        return a.sum(-2, keepdim=True) * 0.25

    def pull(self, u: Any, c: Any) -> Any:
        return u * 0.0 + c * 0.25

    def norm(self, a: Arithmetic[Any]) -> Any:
        return a.lift(torch.tensor(0.5, dtype=torch.float64))


@dataclass(frozen=True)
class Case:
    """A kind of random network: how its stages are arranged, the norm of its weights, the length of its tokens."""

    kind: str
    weight: float = 1.0
    row: float = 1.0

    def draw(self, seed: int, b: int = 2) -> tuple[Network, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def gaussian(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def matrix(norm: float) -> Tensor:
            m = gaussian(6, 6)
            return m * (norm / torch.linalg.matrix_norm(m, 2))

        def attention(residual: float) -> Attention:
            q, k, v = (matrix(self.weight).reshape(6, 2, 3).movedim(1, 0) for _ in range(3))
            biases = {"b_q": gaussian(2, 3), "b_v": gaussian(2, 3), "b_o": gaussian(6)}
            return Attention(AttentionLayer(q, k, v, matrix(self.weight).reshape(2, 3, 6), **biases, residual=residual))

        def bent() -> Bent:
            return Bent(matrix(0.7), matrix(0.5))

        stages = {
            "post": [attention(1.0), bent(), attention(1.0), bent()],
            "pre": [Residual((bent(), attention(0.0))), Residual((bent(),)), Residual((bent(), attention(0.0)))],
            "kink": [attention(1.0), Kinked(matrix(1.0)), bent(), attention(1.0)],
            "kinked branch": [bent(), Residual((bent(), Kinked(matrix(0.5)))), attention(1.0)],
            "only kinks": [Kinked(matrix(1.0)), Kinked(matrix(1.0))],
        }[self.kind]
        head = Head(gaussian(3, 6), gaussian(3))
        x = gaussian(b, 4, 6)
        return Network([*stages, Mean()], head), x * (self.row / torch.linalg.vector_norm(x, dim=-1, keepdim=True))


KINDS = ("post", "pre", "kink", "kinked branch")
HARD = [(Case(kind, weight, row), seed) for kind in KINDS for weight, row, seed in ((1.0, 1.0, 1), (2.0, 3.0, 2))]


def smallest_margin(network: Network, x: Tensor, y: Tensor) -> Tensor:
    logits = network(x)
    others = logits.scatter(-1, y.unsqueeze(-1), -torch.inf).amax(-1)
    return logits.gather(-1, y.unsqueeze(-1)).squeeze(-1) - others


def attained(network: Network, x: Tensor, y: Tensor, eps: Tensor, steps: int = 20) -> Tensor:
    """The smallest margin that projected descent finds within eps, over a few starts."""
    best = smallest_margin(network, x, y)
    for start in range(2):
        delta = torch.randn(x.shape, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
        for _ in range(steps):
            delta = delta * (eps / torch.linalg.vector_norm(delta, dim=(-2, -1)))[:, None, None] * (1 - 1e-12)
            delta = delta.detach().requires_grad_()
            margin = smallest_margin(network, x + delta, y)
            best = torch.minimum(best, margin.detach())
            (slope,) = torch.autograd.grad(margin.sum(), delta)
            length = torch.linalg.vector_norm(slope, dim=(-2, -1), keepdim=True)
            delta = delta.detach() - 0.5 * eps[:, None, None] * slope / length
    return best


@dataclass(frozen=True)
class Solved:
    """A network of a case at its inputs, with the curves and the radii of every composition that applies."""

    network: Network
    centre: Centre
    curves: dict[str, Any]
    radii: dict[str, Tensor]


@functools.cache
def solve(case: Case, seed: int) -> Solved:
    network, x = case.draw(seed)
    centre = Centre(network, x, guarantee="numerical")
    names = [name for name in PROVING if compositions[name].refusal(network) is None]
    curves = {name: compositions[name].curve(centre) for name in names}  # type: ignore[attr-defined]
    return Solved(network, centre, curves, {name: compositions[name](centre).radius for name in names})


@pytest.mark.slow
@pytest.mark.parametrize(("case", "seed"), HARD, ids=str)
class TestSoundness:
    def test_no_attack_comes_nearer_than_a_radius(self, case: Case, seed: int) -> None:
        s = solve(case, seed)
        attack = MinimalAttack(steps=20)(s.network, s.centre.x, s.centre.prediction)
        for name, radius in s.radii.items():
            assert bool((radius > 0).all()), name
            assert bool((radius <= attack.radius).all()), name

    def test_margins_are_lower_bounds_and_decrease(self, case: Case, seed: int) -> None:
        s = solve(case, seed)
        radii = [s.centre.first_order_radius * factor for factor in (0.03, 0.3, 1.0)]
        truth = [attained(s.network, s.centre.x, s.centre.prediction, radius) for radius in radii]
        for name, curve in s.curves.items():
            values = [curve(radius) for radius in radii]
            assert all(bool((value <= true).all()) for value, true in zip(values, truth, strict=True)), name
            assert all(bool((far <= near).all()) for near, far in itertools.pairwise(values)), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pre", "kink"])
def test_a_batch_is_its_members(kind: str) -> None:
    s = solve(Case(kind), 0)
    alone = Centre(s.network, s.centre.x[1:2], guarantee="numerical")
    for name, radius in s.radii.items():
        # Iterated norms differ in the last digits, and so may the last step of the search.
        torch.testing.assert_close(compositions[name](alone).radius, radius[1:2], rtol=2e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pre", "post", "kinked branch"])
def test_proved_is_just_below_numerical(kind: str) -> None:
    network, x = Case(kind).draw(4, b=1)
    numerical, proved = (Centre(network, x, guarantee=g) for g in ("numerical", "proved"))
    assert bool((proved.margin <= numerical.margin).all())
    for name in (name for name in PROVING if compositions[name].refusal(network) is None):
        radius = compositions[name](proved).radius
        torch.testing.assert_close(radius, compositions[name](numerical).radius, rtol=2e-3, atol=0)
        below, above = (compositions[name].curve(centre)(radius) for centre in (proved, numerical))
        assert bool((below <= above + 1e-9).all()), name
        torch.testing.assert_close(below, above, rtol=1e-3, atol=1e-4)


def test_best_is_the_largest_and_names_it() -> None:
    s = solve(Case("post"), 0)
    network, x = s.network, s.centre.x
    for i, best in enumerate(certify_inputs(network, x, guarantee="numerical")):
        assert best.radius >= max(float(radius[i]) for radius in s.radii.values()) * (1 - 2e-3)
        assert best.method in ("end-to-end", "margin-gradient")
        assert best.decided
        assert min(best.margin, best.seconds) > 0
        assert best.prediction == int(network(x[i]).argmax())


def test_of_many_classes_only_the_nearest_have_gradients_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = Case("pre").draw(3, b=1)
    generator = torch.Generator().manual_seed(4)
    head = Head(*(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((40, 6), (40,))))
    network = Network([network.stages[0], network.stages[-1]], head)
    eps = torch.tensor([0.2], dtype=torch.float64)
    every, features = (
        compositions[name].curve(Centre(network, x, guarantee="numerical"))(eps)  # type: ignore[attr-defined]
        for name in ("margin-gradient", "end-to-end")
    )
    monkeypatch.setattr(segments, "RIVALS", 6)
    few = compositions["margin-gradient"].curve(Centre(network, x, guarantee="numerical"))(eps)  # type: ignore[attr-defined]
    assert bool((features < few).all())  # the nearest classes are those that count
    assert bool((few <= every).all())
    assert bool((few <= attained(network, x, network(x).argmax(-1), eps)).all())
    monkeypatch.setattr(segments, "RIVALS", 1)
    least = compositions["margin-gradient"].curve(Centre(network, x, guarantee="numerical"))(eps)  # type: ignore[attr-defined]
    assert bool((features <= least).all() & (least <= few).all())


def test_best_says_what_did_not_apply() -> None:
    network, x = Case("only kinks").draw(0, b=1)
    (record,) = certify_inputs(Network(network.stages[:-1], network.head), x[:, :1])
    assert record.method in ("layerwise", "gains")
    assert record.radius > 0
    assert any("'margin-gradient' does not apply" in note for note in record.notes)


def test_best_proves_nothing_that_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def recorded(method: Composition) -> Any:
        curve = type(method)._curve
        return lambda self, centre: asked.append((self.name, centre.guarantee)) or curve(self, centre)

    for name in (*GUESSING, "telescoped"):
        monkeypatch.setattr(type(compositions[name]), "_curve", recorded(compositions[name]))  # type: ignore[arg-type]
    (record,) = certify_inputs(*transformer(0))
    assert record.method == "telescoped"
    assert set(asked) == {("telescoped", "proved"), *((name, "numerical") for name in GUESSING)}


def test_better_compositions_reach_farther() -> None:
    lofast, layerwise, end_to_end, gradient = (solve(Case("post"), 0).radii[name].mean() for name in GUESSING)
    assert lofast < layerwise < end_to_end <= gradient * (1 + 2e-3)


# -- the centre


class Long:
    """A network of `Bent`, `Kinked` and `Mean` in extended precision, by numpy."""

    def __init__(self, network: Network, x: Tensor) -> None:
        u = x.numpy().astype(np.longdouble)
        self.inputs = []
        for stage in network.stages:
            v = u
            for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
                self.inputs.append(v)
                v = self.value(piece, v)
            u = u + v if isinstance(stage, Residual) else v
        self.logits = (u @ network.head.weight.numpy().T.astype(np.longdouble))[..., 0, :] + network.head.bias.numpy()

    @staticmethod
    def value(piece: Piece, u: np.ndarray) -> np.ndarray:
        if isinstance(piece, Bent):
            V, A = (m.numpy().astype(np.longdouble) for m in (piece.V, piece.A))
            return u + np.sqrt(np.square(u @ V) + 1) @ A
        if isinstance(piece, Kinked):
            return np.maximum(u @ piece.W.numpy().astype(np.longdouble), 0)
        return u.mean(-2, keepdims=True)


@pytest.mark.parametrize("trace", [0.0, math.inf], ids=["by gains", "blindly"])
def test_the_centre_knows_how_far_rounding_led_astray(trace: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(centres, "_TRACE", trace)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    stages: list[Piece | Residual] = []
    for _ in range(6):
        stages += [Bent(draw(6, 6), draw(6, 6)), Residual((Bent(draw(6, 6), draw(6, 6)), Kinked(draw(6, 6))))]
    network, x = Network([*stages, Mean()], Head(draw(3, 6), draw(3))), draw(4, 4, 6)
    centre, long = Centre(network, x), Long(network, x)
    sites = [site for stage in centre.stages for site in stage.sites]
    errors = [np.sqrt(np.square(site.u.numpy() - u).sum((-2, -1))) for site, u in zip(sites, long.inputs, strict=True)]
    for site, error in zip(sites, errors, strict=True):
        assert (error <= site.r.numpy()).all()
    assert max(error.max() for error in errors) > 0  # there is something to know
    order = np.sort(long.logits, -1)
    assert (centre.margin.numpy() <= order[:, -1] - order[:, -2]).all()


def test_tangents_and_adjoints_are_enclosed() -> None:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    network = Network([Bent(draw(6, 6), draw(6, 6)) for _ in range(5)], Head(draw(3, 6), draw(3)))
    x = draw(1, 1, 6)
    centre, long = Centre(network, x), Long(network, x)
    tangents, exact = centre.identity(0), np.eye(6, dtype=np.longdouble)
    for stage, u in zip(centre.stages, long.inputs, strict=True):
        (site,) = stage.sites
        tangents = pushed(site, tangents)
        V, A = (m.numpy().astype(np.longdouble) for m in (site.piece.V, site.piece.A))  # type: ignore[attr-defined]
        t = (u @ V)[0]
        exact = exact + (exact @ V) * (t / np.sqrt(t * t + 1)) @ A
        error = np.sqrt(np.square(tangents.value[:, 0, 0].numpy() - exact).sum())
        assert 0 < error <= float(tangents.error)
    assert float(tangents.error) < 1e-6 * float(torch.linalg.vector_norm(tangents.value))
    adjoints = centre.pairs
    for stage in reversed(centre.stages):
        adjoints = pulled(stage.sites[0], adjoints)
    pairs = centre.pairs.value[:, 0, 0].numpy().astype(np.longdouble)
    error = np.sqrt(np.square(adjoints.value[:, 0, 0].numpy() - pairs @ exact.T).sum(-1))
    assert (error <= adjoints.error[:, 0].numpy()).all()


def test_tangents_and_adjoints_pay_for_a_point_that_is_not_exact() -> None:
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    piece, x, r, off = Bent(draw(6, 6), draw(6, 6)), draw(1, 4, 6), torch.tensor([0.1]).double(), 0.2
    site, vectors = Site(piece, x, r, lambda: r, Proved()), draw(3, 1, 4, 6)
    for carry, exact, error in ((pushed, piece.push, [off]), (pulled, piece.pull, [[off]] * 3)):
        carried = carry(site, Enclosed(vectors, torch.tensor(error).double()))
        for _ in range(10):
            move, others = draw(1, 4, 6), draw(3, 1, 4, 6)
            moved = x + move * r / move.norm()
            lengths = others.norm() if carry is pushed else others.norm(dim=(-2, -1), keepdim=True)
            away = exact(moved, vectors + others * off / lengths) - carried.value
            distance = away.norm() if carry is pushed else away.norm(dim=(-2, -1))
            assert bool((1e-3 * carried.error < distance).all() and (distance <= carried.error).all())


def test_both_ways_to_the_centre_agree_and_the_cheap_one_is_taken_where_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, x = transformer(0)
    cheap = Centre(network, x)
    monkeypatch.setattr(centres, "_TRACE", 0.0)
    dear = Centre(network, x)
    assert 0 < float(dear.stages[-1].sites[0].r) < float(cheap.stages[-1].sites[0].r)
    torch.testing.assert_close(cheap.margins, dear.margins, rtol=1e-4, atol=0)


def test_the_gain_between_two_inputs_of_attention_holds_there() -> None:
    network, x = Case("post", 2.0, 3.0).draw(1, b=1)
    piece = network.stages[0]
    assert isinstance(piece, Attention)
    r = torch.tensor([0.05], dtype=torch.float64)
    site = Site(piece, x, r, lambda: r, Centre(network, x).arithmetic())
    for seed in range(5):
        away = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        moved = x + away * r / torch.linalg.vector_norm(away)
        J = torch.autograd.functional.jacobian(piece.value, moved).reshape(24, 24)
        assert float(torch.linalg.matrix_norm(J, 2)) <= float(site.gain_here)


# -- the search


def test_the_search_finds_where_a_margin_is_lost_in_a_few_steps() -> None:
    losses = [
        lambda e: 2 * e,
        lambda e: e + 40 * e**3,
        lambda e: torch.exp(60 * e) / 1000,  # lost all at once
        lambda e: 1e7 * e,  # far below where the search begins
        lambda e: torch.where(e > 0.3, torch.inf, 0.0),
        lambda e: torch.full_like(e, 2.0),  # never held
        lambda e: e * 1e-3,  # far above
    ]
    asked = 0

    def margins(eps: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        return torch.stack([1 - loss(e) for loss, e in zip(losses, eps, strict=True)])

    ones = torch.ones(len(losses), dtype=torch.float64)
    found = largest(margins, ones, ones, 1e-12 * ones, 1e6 * ones, 0.25)
    radius, margin = found.radius, found.margin
    expected = torch.tensor([0.5, 0.26398, math.log(1000) / 60, 1e-7, 0.3, 0.0, 1e3], dtype=torch.float64)
    torch.testing.assert_close(radius, expected, rtol=2e-3, atol=0)
    assert bool((radius <= expected * (1 + 1e-4)).all())
    torch.testing.assert_close(margin[:4], margins(radius)[:4])
    assert bool((margin > 0).all())
    assert asked < 30


def test_the_search_stays_where_it_is_told_to() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    asked: list[Tensor] = []
    begin, least, most = ones * torch.tensor([0.0, 0.7, 0.2]), ones * 0.7, ones * 0.2
    radius = largest(lambda e: asked.append(e) or 0.5 - e, ones, begin, least, most, 0.25).radius  # type: ignore[func-returns-value]
    assert radius.tolist() == pytest.approx([0.0, 0.0, 0.2])
    assert len(asked) == 1


def test_a_tie_is_not_decided() -> None:
    network, x = Case("post").draw(0, b=1)
    head = Head(network.head.weight[:1].expand(2, -1), network.head.bias[:1].expand(2))
    (record,) = certify_inputs(Network(network.stages, head), x, method="layerwise")
    assert not record.decided
    assert record.margin <= 0
    assert record.radius == 0


@pytest.mark.parametrize("ratio", [1.5, 1.02])
def test_a_grid_gives_bounds_from_above(ratio: float) -> None:
    base, limit = torch.tensor([[0.1, 3.0], [10.0, 1e3]], dtype=torch.float64)
    grid = Grid(lambda: base, limit, ratio)
    calls = []

    def cube(rho: Tensor) -> Tensor:
        calls.append(rho)
        return rho**3

    curve = Curve(grid, cube)
    rho = torch.tensor(
        [[0.0, 1e-9, 0.3, 1.0, 9.9, 11.0], [0.0, 5.0, 7.0, 999.0, 1001.0, math.inf]], dtype=torch.float64
    )
    level = grid.level(rho)
    assert level[:, 0].tolist() == [grid.zero, grid.zero]
    assert (level == grid.beyond).tolist() == [[False] * 5 + [True], [False] * 4 + [True, True]]
    values = curve(level)
    assert bool((values >= rho**3).all())
    assert bool((values[level == grid.beyond] == math.inf).all())
    close = rho[0, 2:5] ** 3
    assert bool((values[0, 2:5] <= close * ratio**3 * (1 + 1e-9)).all())
    nearby = grid.level(rho * 0.999)
    curve(nearby)
    curve(level)
    assert len(calls) == len(torch.unique(torch.cat([level, nearby])).tolist()) - 1  # each known level once


# -- refusals


def test_methods_refuse_what_they_cannot_prove() -> None:
    network, x = Case("only kinks").draw(0, b=1)
    with pytest.raises(NotApplicableError, match="'end-to-end' does not apply to network: every piece"):
        certify_inputs(Network(network.stages[:-1], network.head), x[:, :1], method="end-to-end")
    with pytest.raises(NotApplicableError, match=r"its last stage has a kink \(Kinked\)"):
        certify_inputs(Network(network.stages[:-1], network.head), x[:, :1], method="margin-gradient")


def test_bad_calls_say_what_is_expected() -> None:
    network, x = Case("post").draw(0, b=1)
    with pytest.raises(UnknownNameError, match="did you mean 'margin-gradient'"):
        certify_inputs(network, x, method="margin-gradients")
    with pytest.raises(InputError, match=r"shape \(4, 6\)"):
        certify_inputs(network, x[0])
    with pytest.raises(InputError, match="guarantee is 'sure'"):
        certify_inputs(network, x, guarantee="sure")  # type: ignore[arg-type]
    with pytest.raises(MemoryLimitError, match="raise memory_limit"):
        certify_inputs(network, x, method="end-to-end", guarantee="numerical", memory_limit=1e3)


def test_a_composition_needs_its_metadata() -> None:
    class Nameless(Composition):
        cost = reference = "none"

    with pytest.raises(HoldfastError, match="Nameless lacks name"):
        register_composition(Nameless)


# -- with the pieces of real transformers


def transformer(seed: int) -> tuple[Network, Tensor]:
    """A small pre-norm encoder with LayerNorm, GELU, biases and a class token."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def norm() -> LayerNorm:
        return LayerNorm(1 + 0.1 * gaussian(6), 0.1 * gaussian(6), 1e-5)

    weights = [gaussian(2, 6, 3) / 6**0.5 for _ in range(3)]
    attention = Attention(AttentionLayer(*weights, gaussian(2, 3, 6) / 6**0.5, b_q=gaussian(2, 3)))
    mlp = Mlp(gaussian(6, 8) / 6**0.5, gaussian(8), activations["gelu"], gaussian(8, 6) / 8**0.5, gaussian(6))
    stages = [Residual((norm(), attention)), Residual((norm(), mlp)), norm(), ClassToken()]
    return Network(stages, Head(gaussian(3, 6), gaussian(3)), "encoder"), gaussian(1, 4, 6)


def test_inputs_that_are_taken_one_by_one_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = weakref.WeakSet[Centre](), list[int]()
    made = Centre.at

    def watched(self: Centre, x: torch.Tensor) -> Centre:
        gc.collect()
        alive.add(one := made(self, x))
        most.append(len(alive))
        return one

    monkeypatch.setattr(Centre, "at", watched)
    network, x = transformer(0)
    certify_inputs(network, x.repeat(4, 1, 1), method="telescoped")
    assert len(most) == 4 * len(x)
    assert max(most) <= 2


def test_a_large_batch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Site]] = []
    kept = Site.__init__

    def watched(self: Site, *args: Any) -> None:
        kept(self, *args)
        seen.append(weakref.ref(self))

    monkeypatch.setattr(Site, "__init__", watched)
    network, x = networks.draw(networks.RandomNetwork(2, 1.0, 0), 1)
    gc.disable()
    try:
        certify_inputs(network, x.repeat(1 + 2**13 // x.numel(), 1, 1), method="gains", guarantee="numerical")
        assert seen
        assert not any(each() for each in seen)
    finally:
        gc.enable()


def test_a_transformer_is_certified() -> None:
    network, x = transformer(0)
    attack = MinimalAttack(steps=20)(network, x, network(x).argmax(-1))
    for record, nearest in zip(certify_inputs(network, x), attack.radius.tolist(), strict=True):
        assert record.guarantee == "proved"
        assert 0.02 * nearest < record.radius <= nearest


def test_section_seven_networks_are_certified_almost_to_the_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = {name: compositions[name] for name in ("lofast", "margin-gradient")}
    monkeypatch.setattr(compositions, "_items", compared)
    measured = networks.measure(networks.RandomNetwork(2, 1.0, 0), 1, "numerical")
    (ratio,) = measured.ratios("margin-gradient")
    assert 0.9 < ratio <= 1
    assert measured.ratios("lofast")[0] < ratio
    assert [column.header for column in networks.table([measured]).columns[2:]] == [*compared, "attack"]
    assert measured.setting == networks.RandomNetwork(2, 1.0, 0)
