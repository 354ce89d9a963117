"""Margins by quadratic forms: no attack goes below them, and every scalar stays where they say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from forms_cases import worst_excess
from holdfast import AttentionLayer, InputError, NotApplicableError
from holdfast.attacks.minimal import MinimalAttack
from holdfast.attention.rotary import Rotary
from holdfast.compositions import certify_inputs
from holdfast.compositions.forms import Margins, batches, heads, kinks, margins_over_box, refusal, softmax
from holdfast.layers import Affine, Attention, ClassToken, HardProject, KinkedMlp, PatchEmbedding, TokenMean
from holdfast.layers.piece import LinearPiece
from holdfast.linalg.threat import L2, Threat
from holdfast.network import Head, Network, Residual
from holdfast.testing.draw import Dice

D, UNITS, CLASSES = 4, 6, 4
KINDS = ("one block", "two blocks", "three blocks", "masked", "post", "chain", "wide", "rotary")


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

    x, pool = dice.normal(1, 3, D), TokenMean(3)
    stages: list[object]
    if kind == "one block":  # an image of 4 x 4 pixels, a class token that does not move
        embedding = PatchEmbedding(dice.normal(D, 2, 2, 2), dice.normal(D), (4, 4), front=dice.normal(1, D))
        stages, x = [embedding, *block(), ClassToken(0)], 0.5 * dice.normal(1, 2, 16)
    elif kind == "masked":
        mask = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
        stages = [*block(mask=mask), *block("abs", causal=True), pool]
    elif kind == "rotary":
        angles = torch.arange(3).double().unsqueeze(-1).expand(3, 2)
        rotary = Rotary(angles.cos(), angles.sin(), "interleaved")
        stages = [*block(rotary=rotary), *block(rotary=rotary, causal=True), pool]
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("box", [False, True])
def test_no_attack_goes_beyond(kind: str, box: bool) -> None:
    seed, size, scale = ((0, 1.0, 0.03), (1, 0.7, 0.3))[(KINDS.index(kind) + box) % 2]
    network, x = draw(kind, seed, size)
    shape = torch.exp(Dice(seed).normal(*x.shape[1:])) if box else None
    forms = Margins(network, x[0], shape)
    assert worst_excess(forms, x, scale, shape, seed) < 1e-12


@pytest.mark.parametrize("kind", ["two blocks", "masked", "wide"])
def test_one_part_after_the_other_claims_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large networks are treated in parts, and covectors at one row apart: the same bounds, and as sound."""
    (network, x), scale = draw(kind, 1), 0.1
    whole = Margins(network, x[0]).at(scale).margins
    monkeypatch.setattr(batches, "_CHUNK", 1)
    monkeypatch.setattr(softmax, "_MANY", 0)
    forms = Margins(network, x[0])
    assert worst_excess(forms, x, scale, None, 0) < 1e-12
    torch.testing.assert_close(
        forms.at(scale).margins, whole, rtol=0.02, atol=0.02 * float(whole[whole < math.inf].abs().max())
    )


def test_tight_where_little_bends() -> None:
    """At small radii the bound is the first order, up to what is quadratic."""
    for kind in KINDS:
        network, x = draw(kind, 3)
        forms = Margins(network, x[0])
        tiny = 1e-6
        losses = forms.walk.margins - forms.at(tiny).margins[forms.walk.others]
        slopes = torch.linalg.vector_norm(forms.gradients, dim=-1)
        assert float((losses / tiny / slopes - 1).abs().max()) < 1e-2


@pytest.mark.parametrize("kind", ["one block", "two blocks", "rotary"])
@pytest.mark.parametrize("box", [False, True])
def test_decisions_are_those_of_the_margins(kind: str, box: bool) -> None:
    network, x = draw(kind, 3)
    radius = Margins(network, x[0], torch.ones_like(x[0]) if box else None).largest(1e-2)
    asked = [share * radius for share in (0.2, 0.9, 1.0, 1.3, 30.0)]
    answers = []
    for scale in asked:
        forms, deciding = (Margins(network, x[0], torch.ones_like(x[0]) if box else None) for _ in range(2))
        lower, tight = deciding.decide(scale), forms.at(scale)
        assert (lower.least > 0) == (tight.least > 0)
        assert lower.least <= tight.least + 1e-12
        assert deciding.decide(scale) is lower
        answers.append(lower.least > 0)
    assert answers[0]
    assert not answers[-1]
    assert "_batches" not in vars(deciding)  # first order has said so
    (record,) = certify_inputs(network, x, method="forms", at=asked, threat=Threat("linf") if box else L2)
    assert record.radius == max(scale for scale, holds in zip(asked, answers, strict=True) if holds)
    assert record.losses


def test_linear_networks_are_exact() -> None:
    dice = Dice(5)
    network = Network([Affine(dice.normal(5, 3)), TokenMean(4)], Head(dice.normal(3, 3), dice.normal(3)))
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
        monkeypatch.setattr(kinks.Kinks, "range", lambda self, *a, **k: plain_range(self, *a, **k)[::-1])
    else:
        (network, x), scale = draw("two blocks", 1), 0.01
        monkeypatch.setattr(heads.HeadRows, "bent", lambda self, covered, index: 0.0 * covered.error[index])
        if fault == "third order":  # the second order is exact for margins; the third is all that is left out
            network, x, scale = *draw("one block", 1), 0.3
            monkeypatch.undo()
            monkeypatch.setattr(heads.HeadRows, "_weights", _nothing(heads.HeadRows._weights))
            monkeypatch.setattr(heads.HeadRows, "range", lambda self, covered, *_: 1e-9 + 0.0 * covered.error)
    forms = Margins(network, x[0])
    assert worst_excess(forms, x, scale, None, 0) > 1e-6


def _nothing(weights: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda self, rows: tuple(0.0 * part for part in weights(self, rows))  # type: ignore[return-value]


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
