"""`rows` and `gains`: attacked, compared with exact norms, and caught where a part of the bound is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer
from holdfast.attacks.minimal import MinimalAttack
from holdfast.bounds import bounds, rows
from holdfast.compositions import best as best_module
from holdfast.compositions import certify_inputs, compositions
from holdfast.compositions import gains as gains_module
from holdfast.layers import Affine
from holdfast.layers.attention.piece import Attention
from holdfast.linalg import Ball
from holdfast.linalg.arithmetic import Arithmetic, Numerical, Proved
from holdfast.linalg.squarings import gram_norm
from holdfast.models import ModelConfig, Transformer
from holdfast.network import centre as centres
from holdfast.network import site as sites
from holdfast.network.centre import Centre
from holdfast.network.network import Head, Network, Residual
from holdfast.testing.draw import Dice, draw, plain
from holdfast.testing.layers import Case, make_case

RADII = (1e-6, 1e-3, 0.03, 0.3, 1.0, 3.0)


def layer_of(
    n: int,
    d: int,
    h: int,
    *,
    seed: int,
    weight: float = 1.0,
    row: float = 1.0,
    orthogonal: bool = True,
    peak: float = 0.0,
) -> tuple[AttentionLayer, Tensor]:
    """A layer with square maps of one norm, tokens of one length, and circular shifts in the scores."""
    dice = Dice(seed)

    def square() -> Tensor:
        w = dice.normal(d, d)
        return weight * (torch.linalg.qr(w).Q if orthogonal else w / torch.linalg.matrix_norm(w, 2))

    q, k, v = (square().reshape(d, h, d // h).movedim(1, 0) for _ in range(3))
    shifts = torch.stack([torch.eye(n, dtype=torch.float64).roll(shift, 1) for shift in range(h)])
    layer = AttentionLayer(q, k, v, square().reshape(h, d // h, d), score_bias=peak * shifts if peak else None)
    x = dice.normal(2, n, d)
    return layer, x * (row / torch.linalg.vector_norm(x, dim=-1, keepdim=True))


def attained(layer: AttentionLayer, x: Tensor, radii: tuple[float, ...], steps: int = 20) -> Tensor:
    return holdfast.attack(layer, x, list(radii), restarts=2, steps=steps).lower


# -- attacks


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.slow) for s in range(6, 300))])
def test_no_attack_moves_a_random_layer_farther(seed: int) -> None:
    case = plain(draw(seed))
    reached = attained(case.layer, case.x, RADII)
    for guarantee in ("proved", "numerical"):
        value = holdfast.bound(case.layer, case.x, RADII, method="rows", guarantee=guarantee).value
        assert bool((value * (1 + 1e-12) >= reached).all())


@pytest.mark.parametrize("peak", [0.0, 3.0, 8.0])
@pytest.mark.parametrize("row", [0.5, 4.0])
def test_no_attack_moves_a_layer_with_positions_farther(peak: float, row: float) -> None:
    layer, x = layer_of(6, 8, 2, seed=1, row=row, peak=peak, weight=1.5)
    found = holdfast.bound(layer.to(torch.float32), x.float(), RADII, method="rows").value
    assert bool((found >= attained(layer.to(torch.float32).double(), x.float().double(), RADII)).all())


def without(name: str) -> Callable[..., dict[str, Tensor]]:
    """The terms of the bound, one of them forgotten."""
    whole = rows.AtPoint.terms
    return lambda self, radii: {key: term * (key != name) for key, term in whole(self, radii).items()}


def narrow(seed: int, n: int) -> Case:
    """One head of width 1: hardly anything is lost, so that every term is needed."""
    g = torch.Generator().manual_seed(seed)
    torch.randint(2, 5, (), generator=g)
    sharpness, size = float(torch.rand((), generator=g) * 3), float(torch.rand((), generator=g) * 3 + 0.2)
    return make_case("narrow", seed, n=n, d=1, k=1, h=1, sharpness=sharpness, size=size)


def unseen() -> Case:
    """Scores that vanish at x in first order: queries and keys read a coordinate in which all tokens are 0."""
    first, second = (torch.eye(2, dtype=torch.float64)[None, :, i : i + 1] for i in range(2))
    layer = AttentionLayer(first, first, second, second.mT)
    x = torch.tensor([[[0.0, 0.0], [0.0, 1e4], [0.0, -1e4]]], dtype=torch.float64)
    return Case("unseen", layer, x)


FAULTS = {"fixed": narrow(2, 2), "queries": narrow(246, 4), "keys": narrow(219, 4), "bilinear": unseen()}


@pytest.mark.parametrize("term", FAULTS)
def test_a_term_that_is_left_out_is_caught(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, radii = FAULTS[term], (1e-4, 0.03, 0.3)
    reached = attained(case.layer, case.x, radii)

    def value() -> Tensor:
        a = Proved()
        eps = a.lift(torch.tensor(radii, dtype=torch.float64))
        return a.number(bounds["rows"]._evaluate(a, case.layer, case.x, eps).value)

    assert bool((value() >= reached).all())
    monkeypatch.setattr(rows.AtPoint, "terms", without(term))
    assert bool((value() < reached).any())


PATHS = {"values": (3, narrow(2, 2)), "queries": (4, narrow(246, 4)), "keys": (5, narrow(219, 4))}


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_is_left_out_of_the_three_is_caught(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, case = PATHS[path]
    radii = (1e-4, 0.03, 0.3)
    reached, whole = attained(case.layer, case.x, radii), rows.norm_of_paths

    def forgetful(*given: Tensor) -> Tensor:
        return whole(*(each * 0 if i == place else each for i, each in enumerate(given)))

    def together() -> Tensor:
        found = holdfast.bound(case.layer, case.x, radii, method="rows").terms["together"]
        return found * torch.tensor(radii, dtype=torch.float64)

    assert bool((together() >= reached).all())
    monkeypatch.setattr(rows, "norm_of_paths", forgetful)
    eps = torch.tensor(radii, dtype=torch.float64)
    a = Proved()
    value = a.number(bounds["rows"]._evaluate(a, case.layer, case.x, a.lift(eps)).value)
    assert bool((value < reached).any())


@pytest.mark.parametrize(("by", "beyond"), [(400, 0), (505, 75)])
def test_no_term_underflows_where_small_weights_meet_large_ones(by: int, beyond: int) -> None:
    """The same map with its weights scaled: W^Q and W^O are tiny, W^K and W^V huge."""
    case, radii = narrow(246, 4), torch.tensor((1e-4, 0.03, 0.3), dtype=torch.float64)
    reached, given, a = attained(case.layer, case.x, tuple(radii.tolist())), case.layer, Proved()
    powers = {"q": -by, "k": by, "v": by, "o": -by - beyond}
    tensors = {name: t * 2.0 ** powers[name[2]] for name, t in given._tensors().items()}
    layer = AttentionLayer(**tensors, scale=given.scale)
    found = a.number(bounds["rows"]._evaluate(a, layer, case.x, a.lift(radii)).value)
    assert bool((found * 2.0**beyond >= reached).all())


# -- values


@pytest.mark.parametrize("seed", range(6))
def test_proved_is_not_below_numerical_and_close(seed: int) -> None:
    layer, x = layer_of(5, 8, 2, seed=seed, row=2.0, peak=2.0 * (seed % 2))
    proved = holdfast.bound(layer, x, RADII, method="rows").value
    numerical = holdfast.bound(layer, x, RADII, method="rows", guarantee="numerical").value
    assert bool((proved >= numerical - 1e-12).all())
    assert bool((proved <= numerical * (1 + 1e-6)).all())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"row": 1.0}, 1.02),
        ({"row": 1.0, "peak": 6.0}, 1.02),
        ({"row": 4.0}, 1.3),
        ({"row": 4.0, "peak": 6.0}, 1.3),
        ({"row": 1.0, "orthogonal": False}, 1.6),
    ],
)
def test_close_to_cov_on_ordinary_layers(options: dict[str, Any], most: float) -> None:
    layer, x = layer_of(24, 32, 4, seed=0, **options)
    found, cov = (
        holdfast.bound(layer, x, (1e-3, 0.03, 0.1), method=m, guarantee="numerical").value for m in ("rows", "cov")
    )
    assert float((found / cov).max()) < most


def test_each_input_may_have_radii_of_its_own() -> None:
    layer, x = layer_of(5, 8, 2, seed=3)
    piece = Attention(layer)
    radii = torch.tensor([[0.1, 0.2], [0.3, 0.05]], dtype=torch.float64)
    together = piece.reach(Numerical(), x, radii, "rows")
    alone = torch.stack([piece.reach(Numerical(), x[i], radii[i], "rows") for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)


def test_the_paths_together_are_mostly_less_than_their_sum() -> None:
    layer, x = layer_of(24, 32, 4, seed=0, row=4.0, peak=6.0)
    found = holdfast.bound(layer, x, (1e-3, 0.03, 0.1), method="rows")
    apart = torch.stack([found.terms[name] for name in ("fixed", "queries", "keys", "bilinear")]).sum(0)
    ratio = found.value / torch.tensor((1e-3, 0.03, 0.1), dtype=torch.float64) / apart
    assert float(ratio.max()) <= 1 + 1e-12
    assert float(ratio.mean()) < 0.95


# -- the lemmas


class Paths:
    """Rows and heads that move as in Lemma 7, and a search for the tokens that move them most."""

    def __init__(self, seed: int, h: int = 3, n: int = 5) -> None:
        dice = Dice(seed)
        self.P = torch.softmax(4 * dice.normal(h, n, n), -1)
        self.values, self.queries = 1 + 0.2 * dice.normal(h).abs(), dice.normal(h, n).abs()
        near = torch.eye(n, dtype=torch.float64).roll(1, 1)
        self.pull = dice.normal(h, n, n).abs() * (0.05 + near)  # of row i by key j
        self.share = rows.shares(self.pull.mT.square())
        self.keys = (self.pull.mT.square() / self.share).sum(-1).sqrt()

    def moved(self, v: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """How far all rows move where ‖γ_jW_l^V‖, ‖γ_jW_l^Q‖, ‖γ_jW_l^K‖ are v, q, k (h, n)."""
        by_value = self.values.unsqueeze(-1) * (self.P @ v.unsqueeze(-1)).squeeze(-1)
        by_keys = (self.pull * k.unsqueeze(-2)).square().sum(-1).add(1e-30).sqrt()
        return torch.linalg.vector_norm(by_value + self.queries * q + by_keys)

    def farthest(self) -> float:
        h, n = self.queries.shape
        free = Dice(9).normal(8, 3 * h + 1, n).requires_grad_()
        optimizer, best = torch.optim.Adam([free], lr=0.05), 0.0
        for _ in range(300):
            size = torch.nn.functional.normalize(free[:, -1].abs(), dim=-1)
            parts = [torch.nn.functional.normalize(each.abs(), dim=1) for each in free[:, :-1].split(h, 1)]
            moved = torch.stack([self.moved(*(part[i] * size[i] for part in parts)) for i in range(len(free))])
            best = max(best, float(moved.detach().max()))
            optimizer.zero_grad()
            (-moved.sum()).backward()
            optimizer.step()
        return best

    def bound(self, *forgotten: str) -> float:
        norms = torch.linalg.matrix_norm(self.P, 2)
        paths = [getattr(self, path).unsqueeze(0) * (path not in forgotten) for path in ("values", "queries", "keys")]
        return float(rows.norm_of_paths(self.P, norms, self.share, *paths))


@pytest.mark.parametrize("seed", range(2))
def test_nothing_moves_the_three_paths_farther_than_their_norm(seed: int) -> None:
    paths = Paths(seed)
    farthest = paths.farthest()
    apart = float((paths.values * torch.linalg.matrix_norm(paths.P, 2)).max() + paths.queries.max() + paths.keys.max())
    assert farthest <= paths.bound() < apart
    for path in ("values", "queries", "keys"):
        assert paths.bound(path) < farthest
    assert paths.bound("values", "queries", "keys") < 1e-100


def test_paths_of_one_token_and_head_add_up() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    found = rows.norm_of_paths(one, one[0, 0], one, 2 * one[0], 3 * one, 5 * one)
    torch.testing.assert_close(found, 10 * one[0, 0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_traces_and_norms_are_not_below_the_largest_eigenvalues(seed: int) -> None:
    case = draw(seed)
    for here in (rows.by_traces(Proved(), case.layer, case.x), rows.at_point(Proved(), case.layer, case.x)):
        apart = [z.mid.unsqueeze(-3) - (here.p @ z.mid).unsqueeze(-2) for z in (here.value, here.key)]
        tops = [
            (here.value_top, here.p, apart[0]),
            (here.key_top, here.p, apart[1]),
            (here.drawn_top, here.drawn, here.query.mid.unsqueeze(-3)),
        ]
        for top, weights, z in tops:
            exact = torch.linalg.eigvalsh((weights.unsqueeze(-1) * z).mT @ z)[..., -1]
            assert bool((top >= exact * (1 - 1e-9)).all())


def test_scores_that_hardly_move_need_no_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(6, 8, 2, seed=3, peak=4.0)
    still = AttentionLayer(1e-9 * layer.w_q, layer.w_k, layer.w_v, layer.w_o, score_bias=layer.score_bias)
    exact = rows.gain(rows.at_point(Proved(), still, x).terms(torch.tensor(RADII, dtype=torch.float64)))

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a norm was taken")

    monkeypatch.setattr(rows, "covariance_norms", refuse)
    found = holdfast.bound(still, x, RADII, method="rows").value
    assert bool((found >= attained(still, x, RADII)).all())
    torch.testing.assert_close(found, exact * torch.tensor(RADII, dtype=torch.float64), rtol=2e-6, atol=0)
    with pytest.raises(AssertionError, match="a norm was taken"):
        holdfast.bound(layer, x, RADII, method="rows")


@pytest.mark.parametrize("method", ["rows", "pairs"])
def test_an_input_whose_scores_hardly_move_does_not_change_another(method: str) -> None:
    layer, x = layer_of(6, 8, 2, seed=3, peak=4.0)
    both = torch.stack([x[0], 1e-9 * x[0], x[1]])
    together = holdfast.bound(layer, both, (1e-9, 0.1), method=method).value
    alone = torch.cat([holdfast.bound(layer, each[None], (1e-9, 0.1), method=method).value for each in both])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


def test_a_flattened_point_can_be_sharpened() -> None:
    layer, x = layer_of(5, 8, 2, seed=1)
    here = rows.by_traces(Proved(), layer, torch.stack([x, 2 * x, 3 * x]))
    torch.testing.assert_close(here.flat().sharpened().key_top, here.sharpened().flat().key_top, rtol=0, atol=0)


def test_mean_probabilities_between_the_scores() -> None:
    layer, x = layer_of(5, 8, 2, seed=6, row=2.0, peak=2.0, weight=2.0)
    here, dice = rows.at_point(Numerical(), layer, x), Dice(7)
    t = (torch.arange(200, dtype=torch.float64) + 0.5) / 200

    def scores(z: Tensor) -> Tensor:
        return layer.complete((z.unsqueeze(-3) @ layer.w_q * layer.scale) @ (z.unsqueeze(-3) @ layer.w_k).mT)

    for radius in (1e-3, 0.1, 1.0, 5.0):
        q = here.probabilities(torch.full((1, 1, 1, 1, 1), radius, dtype=torch.float64))[0]
        shift = dice.normal(20, *x.shape)
        shift = shift * (radius / torch.linalg.vector_norm(shift, dim=(-2, -1), keepdim=True))
        begin, end = scores(x), scores(x + shift)
        mean = torch.softmax(begin + t.view(-1, 1, 1, 1, 1, 1) * (end - begin), -1).mean(0)
        assert bool((mean <= q * (1 + 1e-5)).all())
        grown = here.log_p + t.view(-1, 1, 1, 1, 1) * (here.slope + here.bend * radius) * radius
        torch.testing.assert_close(q, grown.clamp(max=0.0).exp().mean(0), rtol=1e-3, atol=1e-12)


def test_probabilities_that_nearly_underflow_are_covered_on_the_smallest_balls() -> None:
    layer, x = layer_of(5, 8, 2, seed=6, row=2.0, peak=280.0, weight=2.0)
    here = rows.at_point(Proved(), layer, x)
    assert 0 < float(here.p.min()) < 1e-120
    for radius in (0.0, 1e-300, 1e-190, 1e-100):
        q = here.probabilities(torch.full((1, 1, 1, 1, 1), radius, dtype=torch.float64))[0]
        assert bool((here.p <= q).all())
        assert bool((q <= here.p * (1 + 1e-9)).all())


def test_covers_are_covers_and_tight_for_two_keys() -> None:
    dice = Dice(0)
    p = torch.softmax(4 * dice.normal(400, 5), -1)
    q = (p * torch.exp(dice.normal(400, 5).abs())).clamp(max=1.0)
    gap = torch.diag_embed(rows.cover(q)) - torch.diag_embed(p) + p.unsqueeze(-1) * p.unsqueeze(-2)
    assert float(torch.linalg.eigvalsh(gap).min()) >= -1e-12
    two = torch.softmax(4 * dice.normal(100, 2), -1)
    gap = torch.diag_embed(rows.cover(two)) - torch.diag_embed(two) + two.unsqueeze(-1) * two.unsqueeze(-2)
    assert float(torch.linalg.eigvalsh(gap)[..., 0].abs().max()) < 1e-12


def test_norms_of_covariances_are_above_the_true_ones_and_near() -> None:
    dice = Dice(1)
    p, z = torch.softmax(3 * dice.normal(3, 2, 7, 7), -1), dice.normal(3, 2, 7, 4)
    radius = 1e-3 * dice.normal(3, 2, 7, 4).abs()
    moved = z + radius * torch.sign(dice.normal(3, 2, 7, 4))
    for rows_of, ball in ((z, z), (moved, Ball(z, radius))):
        off = rows_of.unsqueeze(-3) - (p @ rows_of).unsqueeze(-2)
        true = torch.linalg.eigvalsh(off.mT @ (p.unsqueeze(-1) * off))[..., -1]
        found = rows.covariance_norms(p, ball)
        assert bool((found >= true * (1 - 1e-14)).all())
    exact = rows.covariance_norms(p, z)
    off = z.unsqueeze(-3) - (p @ z).unsqueeze(-2)
    true = torch.linalg.eigvalsh(off.mT @ (p.unsqueeze(-1) * off))[..., -1]
    assert bool((exact <= true * 1.05).all())


@pytest.mark.parametrize("size", [1e-82, 1.0, 1e82])
def test_radii_count_at_every_scale(size: float) -> None:
    dice = Dice(4)
    p, z = torch.softmax(dice.normal(2, 7, 7), -1), dice.normal(2, 7, 1)
    off = z.unsqueeze(-3) - (p @ z).unsqueeze(-2)
    radius = torch.full_like(z, 1e-3)
    farther = z + radius * torch.sign(off[:, 0])
    true = torch.linalg.vecdot(p[:, 0], (farther - p[:, :1] @ farther).squeeze(-1).square())
    found = rows.covariance_norms(p, Ball(size * z, size * radius))
    assert bool((found[:, 0] / size**2 >= true * (1 - 1e-12)).all())
    assert bool((found[:, 0] / size**2 <= true * 1.1).all())


def test_norms_on_a_ball_from_those_at_its_centre() -> None:
    dice = Dice(2)
    base, z = torch.softmax(3 * dice.normal(50, 6), -1), dice.normal(50, 6, 3)
    weights = base * torch.exp(dice.normal(50, 6))
    weights[0] = 0
    base[1] = 0

    def top(w: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(z.mT @ (w.unsqueeze(-1) * z))[..., -1].clamp(min=0)

    found = rows.grown(top(base) * (1 + 1e-14), base, weights, z.square().sum(-1))
    assert bool((found >= top(weights) * (1 - 1e-14)).all())
    same = rows.grown(top(base), base, base, z.square().sum(-1))
    torch.testing.assert_close(same, top(base), rtol=1e-9, atol=1e-200)


def test_norms_of_probabilities() -> None:
    P = torch.softmax(3 * Dice(3).normal(20, 6, 6), -1)
    found, true = rows.norm_of_probabilities(P), torch.linalg.matrix_norm(P, 2)
    assert bool((found >= true).all())
    assert bool((found <= true * 1.02).all())
    shifts = torch.stack([torch.eye(6, dtype=torch.float64).roll(i, 1) for i in range(6)])
    assert float(rows.norm_of_probabilities(shifts).max()) < 1 + 1e-12


def test_flat_spectra_take_more_squarings_and_nothing_depends_on_the_others() -> None:
    flat, steep = torch.eye(48, dtype=torch.float64), torch.diag(0.5 ** torch.arange(48, dtype=torch.float64))
    both = torch.stack([flat, steep])
    found = gram_norm(both, torch.zeros(2, dtype=torch.float64), 5, 0.01)
    assert bool((found >= 1).all())
    assert bool((found <= 1.031).all())
    for i in range(2):
        assert torch.equal(gram_norm(both[i], torch.zeros((), dtype=torch.float64), 5, 0.01), found[i])


def test_weights_that_change_in_place_are_seen() -> None:
    layer, x = layer_of(5, 8, 2, seed=4)
    first = holdfast.bound(layer, x, 0.1, method="rows").value
    assert torch.equal(holdfast.bound(layer, x, 0.1, method="rows").value, first)
    layer.w_o.mul_(2.0)
    torch.testing.assert_close(holdfast.bound(layer, x, 0.1, method="rows").value, 2 * first, rtol=1e-9, atol=0)


def test_what_weights_give_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_of(5, 8, 2, seed=5)
    asked: list[str] = []
    whole = rows._maps
    monkeypatch.setattr(rows, "_maps", lambda a, *rest: asked.append(a.guarantee) or whole(a, *rest))
    arithmetics: tuple[Arithmetic[Any], ...] = (Proved(), Proved(), Numerical(), Numerical())
    for a in arithmetics:
        Attention(layer).reach(a, x, a.lift(torch.tensor([0.1], dtype=torch.float64)), "rows")
    assert asked == ["proved", "numerical"]


# -- whole networks


def network_of(seed: int, **options: Any) -> tuple[Network, Tensor]:
    torch.manual_seed(seed)
    config = ModelConfig(input="image", classes=3, channels=1, side=8, patch=4, width=8, depth=2, heads=2, **options)
    model = Transformer(config).double()
    return model.to_network(), model.encode(torch.rand(3, 1, 8, 8))


NETWORKS = (
    {},
    {"activation": "half-smooth-abs", "projection": "smooth"},
    {"residual": True, "pool": "mean"},
    {"stem": "convolutions", "stem_layers": 2, "stem_width": 8},
)


@pytest.mark.parametrize(
    ("options", "large"), [*((options, i % 2 == 0) for i, options in enumerate(NETWORKS)), (NETWORKS[0], False)]
)
def test_no_attack_comes_nearer_than_a_radius(
    options: dict[str, Any], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        shrink(monkeypatch)
    network, x = network_of(0, **options)
    centre = Centre(network, x)
    radius = compositions["gains"](centre).radius
    attack = MinimalAttack(steps=20)(network, centre.x, centre.prediction)
    assert bool((radius > 0).all())
    assert bool((radius <= attack.radius).all())
    numerical = compositions["gains"](Centre(network, x, guarantee="numerical")).radius
    torch.testing.assert_close(radius, numerical, rtol=2e-3, atol=0)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every input were large."""
    for module in (sites, centres, gains_module):
        monkeypatch.setattr(module, "LARGE", 8)
    monkeypatch.setattr(best_module, "_MANY", 8)


def test_large_networks_take_no_norm_of_a_map_on_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    network, x = network_of(1)
    records = certify_inputs(network, x)
    for record in records:
        assert record.method == "gains"
        assert "attention on 4x8 numbers was too large for lofast, layerwise" in record.notes[0]
    by_name = certify_inputs(network, x, method="lofast", guarantee="numerical")
    assert all(mine.radius >= other.radius for mine, other in zip(records, by_name, strict=True))


def test_gains_is_near_layerwise() -> None:
    """Each is better at times: `layerwise` knows better bounds, and looks at fewer radii."""
    network, x = network_of(2, residual=True, pool="mean")
    centre = Centre(network, x, guarantee="numerical")
    fast, best = (compositions[name](centre).radius for name in ("gains", "layerwise"))
    assert bool(((fast / best - 1).abs() < 0.5).all())


def test_dense_jacobians_say_what_rounding_did_to_large_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lead that is lost in rounding where branches count by their own gains, and proved where stages do."""
    shrink(monkeypatch)
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cancelling = Affine(torch.eye(16, dtype=torch.float64) * -0.9)
    head = Head(torch.eye(2, 16, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    network = Network([Residual((cancelling,))] * 8, head)
    best, other = network(x).topk(2).indices[0].tolist()
    lost = network_with_lead(network, x, best, other, 0.0)
    sharp, rough = (float(Centre(lost, x, dense=dense)._hidden[0, [best, other]].max()) for dense in (True, False))
    assert sharp < 0.1 * rough
    near = network_with_lead(network, x, best, other, (sharp + rough) / 2)
    for dense in (False, True):
        centre = Centre(near, x, dense=dense)
        assert centre.prediction.tolist() == [best]
        assert bool(centre.margin > 0) == dense
    assert certify_inputs(near, x, method="margin-gradient")[0].decided
    assert not certify_inputs(near, x, method="gains")[0].decided
    late = Centre(near, x, dense=True, deadline=-1.0)
    assert late.prediction.tolist() == [best]
    assert not bool(late.margin > 0)


def network_with_lead(network: Network, x: Tensor, best: int, other: int, lead: float) -> Network:
    """The network with another bias of one class, which is `lead` behind the best one."""
    logits, bias = network(x)[0], network.head.bias.clone()
    bias[other] += logits[best] - logits[other] - lead
    return Network(network.stages, replace(network.head, bias=bias))
