"""Forms of large networks: what is kept in less memory, made anew or only glanced at says the same, and is attacked."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from forms_cases import worst_excess
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import base, certify_inputs, compositions
from holdfast.compositions.base import Aim
from holdfast.compositions.forms import Margins, batches, jets, margins, softmax
from holdfast.compositions.forms.local import SmoothLocal
from holdfast.compositions.forms.normalised import Normalised
from holdfast.compositions.forms.third import Triples
from holdfast.compositions.search import Curve, Reached, widened
from holdfast.layers import Affine, KinkedMlp, TokenMean
from holdfast.linalg.directions import Directions
from holdfast.linalg.threat import Threat
from holdfast.network import Head, Network, Residual
from holdfast.network.centre import Centre
from holdfast.testing.draw import Dice
from test_network_forms_pieces import draw

SMOOTH = ("pre-norm", "post-norm", "gated", "smooth beside")


def _third(local: SmoothLocal, second: Tensor, directions: Directions, most: int) -> tuple[Tensor, Tensor, float]:
    """The third order of a place from second orders of its functions, how often triples count, and its rounding."""
    twist, defect = local.third_order(second, float(torch.linalg.vector_norm(second.double())), directions)
    triples = [t for q in range(directions.p) for t in Triples.parts(q, directions, most)]
    return torch.cat([twist(t) / 3 for t in triples]), torch.cat([t.count for t in triples]), defect


@pytest.mark.parametrize("kind", SMOOTH)
def test_third_orders_of_few_triples_and_of_second_orders_in_float32(kind: str) -> None:
    network, x = draw(kind, 5)
    forms = Margins(network, x[0])
    directions, functions = Directions(forms.region.p, torch.device("cpu")), forms.functions
    generator = torch.Generator().manual_seed(0)
    for i, (known, _) in functions.items():
        local = forms.walk.local(i)
        assert isinstance(local, SmoothLocal)
        second = torch.randn(len(known), len(directions.first), generator=generator, dtype=torch.float64)
        exact, count, _ = _third(local, second, directions, 10**6)
        few, _, _ = _third(local, second, directions, 3)
        assert torch.allclose(exact, few, atol=1e-12)
        narrow, _, defect = _third(local, second.float(), directions, 10**6)
        wrong = (count @ (narrow - exact).square().sum((-2, -1))).sqrt()
        assert 0 < float(wrong) <= defect


def test_large_networks_without_any_curved_place() -> None:
    """Affine but for a residual branch, with more numbers than matrices are made for: the radius is the exact one."""
    draw, d, tokens = torch.Generator().manual_seed(0), 64, 20

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    A = noise(d, d) / 16
    head = Head(noise(3, d), noise(3))
    first = Affine(torch.eye(d, dtype=torch.float64), noise(d))
    network = Network((first, Residual((Affine(A, noise(d)),)), TokenMean(tokens)), head, "affine")
    x = noise(1, tokens, d)
    (one,) = certify_inputs(network, x, method="forms")
    logits = network(x)[0]
    y = int(logits.argmax())
    slopes = (head.weight[y] - head.weight) @ (torch.eye(d, dtype=torch.float64) + A).mT / tokens**0.5
    exact = torch.stack([(logits[y] - logits[j]) / slopes[j].norm() for j in range(3) if j != y]).min()
    assert 0.99 * exact <= one.radius <= exact


def test_float64_as_the_default_changes_nothing() -> None:
    network, x = draw("pre-norm", 5)
    radius = Margins(network, x[0]).largest(0.01)
    torch.set_default_dtype(torch.float64)
    try:
        assert Margins(network, x[0]).largest(0.01) == radius > 0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", SMOOTH)
def test_functions_that_are_made_anew_say_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = draw(kind, 3)
    monkeypatch.setattr(softmax, "_MANY", 0)
    kept = Margins(network, x[0]).at(0.02).margins
    monkeypatch.setattr(batches, "_ROOM", 0)
    monkeypatch.setattr(jets, "_TRIPLES", 5)
    assert torch.allclose(Margins(network, x[0]).at(0.02).margins, kept, rtol=1e-9)


def _derive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_NUMBERS", 0)


@pytest.mark.parametrize("box", [False, True])
def test_no_attack_goes_beyond_functions_that_follow_from_normalisations(
    box: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _derive(monkeypatch)
    for seed, scale in ((1, 0.1), (2, 0.5)) if box else ((0, 0.02), (1, 0.1)):
        network, x = draw("pre-norm", seed)
        shape = torch.exp(0.5 * Dice(seed).normal(*x.shape[1:])) if box else None
        forms = Margins(network, x[0], shape)
        assert worst_excess(forms, x, scale, shape, seed) < 1e-12
        assert forms._batches.derived


def test_a_normalisation_that_forgets_its_rest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _derive(monkeypatch)
    monkeypatch.setattr(Normalised, "output_beyond", lambda self: torch.zeros_like(self.u))
    network, x = draw("pre-norm", 1)
    assert worst_excess(Margins(network, x[0]), x, 0.1, None, 1) > 1e-9


@pytest.mark.parametrize("kind", ["pre-norm", "activations", "norms"])
def test_glances_find_about_the_largest_scale(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = draw(kind, 1)
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    usual = Margins(network, x[0]).largest(1e-2)
    monkeypatch.setattr(margins, "_LARGE", 0)
    forms = Margins(network, x[0])
    most = float((forms.walk.margins / torch.linalg.vector_norm(forms.gradients, dim=-1)).min())
    glanced = forms._glanced(most, 0.0)
    assert 0 < glanced <= 1.02 * usual
    largest = forms.largest(1e-2)
    assert 0.9 * usual <= largest <= 1.1 * usual
    assert forms.decide(glanced).least > 0
    attack = MinimalAttack(steps=30)(network, x, network(x).argmax(-1)).radius
    assert largest < float(attack)


def test_what_a_glance_has_proved_outlives_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over as soon as the sharper search begins."""
    network, x = draw("pre-norm", 1)
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(margins, "_LARGE", 0)
    centre, search = Centre(network, x, deadline=time.monotonic() + 100), Margins._searched

    def too_late(forms: Margins, *args: float) -> float:
        centre._clock.deadline.moment = 0.0
        return search(forms, *args)

    monkeypatch.setattr(Margins, "_searched", too_late)
    radii = compositions["forms"](centre)
    assert centre.overdue
    assert radii.unfinished
    assert float(radii.radius) > 0
    assert float(radii.margin) > 0
    assert Margins(network, x[0]).at(float(radii.radius)).least >= float(radii.margin)


def test_what_clipped_boxes_have_proved_outlives_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over while wider boxes are tried, so that what the proved one loses cannot be told any more."""
    dice = Dice(4)
    mlp = KinkedMlp(dice.normal(3, 4), dice.normal(4), "relu", dice.normal(4, 3), torch.zeros(3))
    network, x = Network([mlp, TokenMean(2)], Head(dice.normal(2, 3), dice.normal(2))), dice.normal(1, 2, 3)
    centre = Centre(network, x, deadline=time.monotonic() + 100)

    def too_late(curve: Curve, reached: Reached, most: float) -> Reached:
        centre._clock.deadline.moment = 0.0
        return widened(curve, reached, most)

    monkeypatch.setattr(base, "widened", too_late)
    threat = Threat("linf", (float(x.min()), float(x.max())))
    radii = compositions["forms"](centre, None, Aim(threat))
    assert centre.overdue
    assert radii.unfinished
    assert float(radii.radius) > 0
    assert radii.losses == ({},)
