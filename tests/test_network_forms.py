"""Margins by quadratic forms: no attack goes below them, and every scalar stays where they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer, InputError, NotApplicableError
from holdfast.attacks.minimal import MinimalAttack
from holdfast.network import (
    Affine,
    Attention,
    ClassToken,
    HardProject,
    Head,
    KinkedMlp,
    MeanPool,
    Network,
    PatchEmbedding,
    Residual,
)
from holdfast.network.base import LinearPiece
from holdfast.network.compositions import certify_inputs
from holdfast.network.forms import Margins, kinks, margins_over_box, refusal, softmax
from holdfast.testing.draw import Dice

D, UNITS, CLASSES = 4, 6, 4
KINDS = ("one block", "two blocks", "three blocks", "masked", "post", "chain", "wide")


def draw(kind: str, seed: int, size: float = 0.7) -> tuple[Network, Tensor]:
    """A small transformer with kinks, and one input (1, n, d)."""
    dice = Dice(seed)

    def attention(**options: object) -> Attention:
        maps = {name: size / D**0.5 * dice.normal(2, D, 3) for name in ("w_q", "w_k", "w_v")}
        biases = {name: 0.3 * dice.normal(2, 3) for name in ("b_q", "b_k", "b_v")} | {"b_o": 0.3 * dice.normal(D)}
        return Attention(AttentionLayer(**maps, w_o=size / 2 * dice.normal(2, 3, D), **biases, **options))  # type: ignore[arg-type]

    def mlp(phi: str = "relu", residual: float = 0.0) -> KinkedMlp:
        w1, w2 = size / D**0.5 * dice.normal(D, UNITS), size / UNITS**0.5 * dice.normal(UNITS, D)
        return KinkedMlp(w1, 0.3 * dice.normal(UNITS), phi, w2, 0.3 * dice.normal(D), residual)

    def scaled() -> Affine:
        return Affine(torch.diag(torch.exp(0.3 * dice.normal(D))), 0.3 * dice.normal(D))

    def block(phi: str = "relu", **options: object) -> list[Residual]:
        return [Residual((scaled(), attention(**options))), Residual((scaled(), mlp(phi)))]

    x, pool = dice.normal(1, 3, D), MeanPool(3)
    stages: list[object]
    if kind == "one block":  # an image of 4 x 4 pixels, a class token that does not move
        embedding = PatchEmbedding(dice.normal(D, 2, 2, 2), dice.normal(D), (4, 4), front=dice.normal(1, D))
        stages, x = [embedding, *block(), ClassToken(0)], 0.5 * dice.normal(1, 2, 16)
    elif kind == "masked":
        mask = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
        stages = [*block(mask=mask), *block("abs", causal=True), pool]
    elif kind == "post":
        stages = [attention(residual=1.0), mlp(residual=1.0), scaled(), attention(residual=0.5), mlp("abs"), pool]
    elif kind == "chain":
        stages = [mlp(), mlp("abs", 1.0), mlp(), ClassToken(1)]
    elif kind == "wide":  # more numbers than the first affine map lets through
        stages, x = [Affine(dice.normal(9, D)), *block(), *block(), pool], dice.normal(1, 3, 9)
    else:
        stages = [part for _ in range(2 if kind == "two blocks" else 3) for part in block()] + [pool]
    head = Head(dice.normal(CLASSES, D), 0.3 * dice.normal(CLASSES))
    return Network(stages, head, kind), x  # type: ignore[arg-type]


def descend(
    objective: Callable[[Tensor], Tensor], start: Tensor, inside: Callable[[Tensor], Tensor], step: float
) -> Tensor:
    """Points of the region where the objective (of each of a batch) is small."""
    G = inside(start)
    best, found = torch.full((len(G),), math.inf).double(), G
    for k in range(14):
        G = G.detach().requires_grad_()
        with torch.enable_grad():
            value = objective(G)
            (slope,) = torch.autograd.grad(value.sum(), G)
        less = value.detach() < best
        best, found = torch.where(less, value.detach(), best), torch.where(less[:, None, None], G.detach(), found)
        length = slope.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-30)
        G = inside(G.detach() - step * 0.8**k * slope / length)
    return found


def region(
    x: Tensor, scale: float, shape: Tensor | None, seed: int, count: int
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Starts on the boundary, and the projection onto the region."""
    start = Dice(seed).normal(count, *x.shape[1:])
    if shape is None:
        return start / start.flatten(1).norm(dim=1)[
            :, None, None
        ] * scale, lambda G: G * (scale / G.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-300)).clamp(max=1.0)
    return start.sign() * shape * scale, lambda G: torch.maximum(torch.minimum(G, shape * scale), -shape * scale)


def worst_excess(forms: Margins, x: Tensor, scale: float, shape: Tensor | None, seed: int) -> float:
    """How far an attack gets beyond what is claimed of margins, and of all scalars; not positive if all holds."""
    network, walk = forms.walk.network, forms.walk
    lower, worst = forms.at(scale), -math.inf
    start, inside = region(x, scale, shape, seed, 4)
    length = float(start.flatten(1).norm(dim=1).max())
    for j in range(CLASSES):
        if j != forms.prediction:

            def margin(G: Tensor, j: int = j) -> Tensor:
                logits: Tensor = network(x + G)
                return logits[:, forms.prediction] - logits[:, j]

            G = descend(margin, start, inside, length)
            worst = max(worst, float(lower.margins[j] - margin(G).min()))
    before = {id(place.piece): i for i, place in enumerate(walk.places)}
    for i, (low, high) in forms.beyond.items():
        C, _ = walk.places[i].local.covectors(forms.tokens[i])  # type: ignore[union-attr]
        first = forms.functions[i][0].X @ forms.region.basis.mT
        pick = torch.linspace(0, len(C) - 1, 5).long()

        def rest(G: Tensor, i: int = i, C: Tensor = C[pick], first: Tensor = first[pick]) -> Tensor:
            moved = displacement(network, x + G, before, i) - walk.places[i].u
            sides = forms.region.sides
            flat = G.flatten(1) if shape is None or sides is None else G.flatten(1) / shape.flatten() * sides
            return torch.einsum("bnd,knd->bk", moved, C) - flat @ first.mT

        scattered = rest(inside(region(x, scale, shape, seed + 2, 200)[0]), i, C, first)  # before a kink nothing slopes
        worst = max(worst, float((scattered - high).max()), float((-scattered - low).max()))
        for sign, bound in ((1.0, high[pick]), (-1.0, low[pick])):
            many, within = region(x, scale, shape, seed + 1, len(pick))
            G = descend(lambda G, s=sign: -s * rest(G).diagonal(), many, within, length)  # type: ignore[misc]
            worst = max(worst, float((sign * rest(G).amax(0) if sign > 0 else -rest(G).amin(0)).sub(bound).max()))
    return worst


def displacement(network: Network, u: Tensor, before: dict[int, int], place: int) -> Tensor:
    """The input of one place."""
    for stage in network.stages:
        v = u
        for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
            if before.get(id(piece)) == place:
                return v
            v = piece.value(v)
        u = u + v if isinstance(stage, Residual) else v
    raise AssertionError(place)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("box", [False, True])
def test_no_attack_goes_beyond(kind: str, box: bool) -> None:
    for seed, size, scale in ((0, 1.0, 0.03), (1, 0.7, 0.3)):
        network, x = draw(kind, seed, size)
        shape = torch.exp(Dice(seed).normal(*x.shape[1:])) if box else None
        forms = Margins(network, x[0], shape)
        assert worst_excess(forms, x, scale, shape, seed) < 1e-12


def test_tight_where_little_bends() -> None:
    """At small radii the bound is the first order, up to what is quadratic."""
    for kind in KINDS:
        network, x = draw(kind, 3)
        forms = Margins(network, x[0])
        tiny = 1e-6
        losses = forms.walk.margins - forms.at(tiny).margins[forms.walk.others]
        slopes = torch.linalg.vector_norm(forms.gradients, dim=-1)
        assert float((losses / tiny / slopes - 1).abs().max()) < 1e-2


def test_linear_networks_are_exact() -> None:
    dice = Dice(5)
    network = Network([Affine(dice.normal(5, 3)), MeanPool(4)], Head(dice.normal(3, 3), dice.normal(3)))
    x = dice.normal(1, 4, 5)
    logits = network(x)[0]
    y = int(logits.argmax())
    grown = torch.autograd.functional.jacobian(network, x)[0].flatten(1)
    others = [j for j in range(3) if j != y]
    margins, rows = logits[y] - logits[others], grown[y] - grown[others]
    exact = float((margins / rows.norm(dim=1)).min())
    (record,) = certify_inputs(network, x, method="forms")
    assert exact * 0.985 < record.radius <= exact
    box = (margins - 0.01 * rows.abs().sum(1)).min()
    found = margins_over_box(network, x[0] - 0.01, x[0] + 0.01).least
    assert float(box) - 1e-9 < found <= float(box) + 1e-15


def test_one_hidden_layer_against_a_grid() -> None:
    """Two numbers move: the least margin over a fine grid is the truth, and the bound is not far below it."""
    dice = Dice(8)
    w1, b1 = dice.normal(2, 8), 0.5 * dice.normal(8)
    network = Network(
        [KinkedMlp(w1, b1, "relu", dice.normal(8, 3), dice.normal(3))], Head(dice.normal(2, 3), dice.normal(2))
    )
    x = dice.normal(1, 1, 2)
    forms = Margins(network, x[0])
    angle = torch.linspace(0, 2 * math.pi, 400).double()
    directions = torch.stack([angle.cos(), angle.sin()], -1)
    for scale in (0.1, 0.5, 1.0):
        points = x + (torch.linspace(0, scale, 60).double()[:, None, None] * directions).reshape(-1, 1, 2)
        logits = network(points)
        truth = float((logits[:, forms.prediction] - logits[:, 1 - forms.prediction]).min())
        start = float(forms.walk.margins[0])
        assert truth - 0.5 * (start - truth) < forms.at(scale).least <= truth


def test_radius_is_below_every_attack_and_losses_add_up() -> None:
    network, x = draw("two blocks", 4, 1.2)
    (record,) = certify_inputs(network, x, method="forms")
    attack = MinimalAttack()(network, x, torch.tensor([record.prediction])).radius
    assert 0 < record.radius <= float(attack)
    forms = Margins(network, x[0])
    lower = forms.at(record.radius)
    j = int(lower.margins.argmin())
    assert sum(lower.losses.values()) == pytest.approx(
        float(forms.walk.margins[forms.walk.others.index(j)]) - lower.least
    )
    assert record.losses.keys() >= {
        "first order",
        "second order",
        "kinks",
        "attention rest",
        "carried rests",
        "rounding",
    }


@pytest.mark.parametrize("fault", ["parabola", "side", "second order", "third order"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (network, x), scale = draw("chain", 1), 1.0
    if fault == "parabola":
        plain = kinks.parabola
        monkeypatch.setattr(kinks, "parabola", lambda *a: 0.1 * plain(*a))
    elif fault == "side":
        plain_range = kinks.Kinks.range
        monkeypatch.setattr(kinks.Kinks, "range", lambda self, *a: plain_range(self, *a)[::-1])
    else:
        (network, x), scale = draw("two blocks", 1), 0.01
        prepare = softmax.Softmax.prepare
        monkeypatch.setattr(softmax.Softmax, "prepare", lambda self, mu: _without_bent(prepare(self, mu)))
        if fault == "third order":  # the second order is exact for margins; the third is all that is left out
            network, x, scale = *draw("one block", 1), 0.3
            monkeypatch.undo()
            monkeypatch.setattr(softmax.Softmax, "_weights", _nothing(softmax.Softmax._weights))
            monkeypatch.setattr(softmax.Softmax, "range", lambda self, rows, _: (1e-9 + 0.0 * rows.bent,) * 2)
    forms = Margins(network, x[0])
    assert worst_excess(forms, x, scale, None, 0) > 1e-6


def _nothing(weights: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return lambda self, rows: tuple(0.0 * part for part in weights(self, rows))  # type: ignore[return-value]


def _without_bent(rows: softmax.Rows) -> softmax.Rows:
    return softmax.Rows(**{**vars(rows), "bent": 0.0 * rows.bent})


def test_refusals() -> None:
    project = Network([HardProject(1.0)], Head(torch.eye(2).double(), torch.zeros(2).double()))
    assert refusal(project) == "HardProject has no forms"
    with pytest.raises(NotApplicableError, match="HardProject has no forms"):
        Margins(project, torch.zeros(1, 2))
    linear = Network([ClassToken(0)], Head(torch.eye(2).double(), torch.zeros(2).double()))
    assert all(isinstance(piece, LinearPiece) for piece in linear.pieces())
    with pytest.raises(InputError, match=r"lower has shape \(1, 2\).*lower <= upper"):
        margins_over_box(linear, torch.ones(1, 2), torch.zeros(1, 2))


def test_overflow_proves_nothing() -> None:
    network, x = draw("two blocks", 2)
    forms = Margins(network, x[0])
    for scale in (1e4, 1e160, math.inf):
        assert not forms.at(scale).least > 0
