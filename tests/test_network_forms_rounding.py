"""Forms at the edge of float64: defects, numbers that underflow or overflow, and bounds that are not numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from holdfast import AttentionLayer, InputError
from holdfast.compositions import certify_inputs, compositions
from holdfast.compositions.base import Aim
from holdfast.compositions.forms import Lower, Margins, batches, jets, least, margins_over_parts, refusal
from holdfast.compositions.forms.krylov import trust_region
from holdfast.compositions.forms.least import Quadratic
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.settled import Settled
from holdfast.compositions.forms.third import TokenOrders
from holdfast.errors import TimeLimitError
from holdfast.layers import Affine, Attention, KinkedMlp, Mlp, RMSNorm, TokenMean
from holdfast.linalg import Ball
from holdfast.linalg.threat import Threat
from holdfast.network import Head, Network, Residual
from holdfast.network.centre import Centre
from holdfast.testing.draw import Dice


def number(x: float) -> torch.Tensor:
    return torch.full((1,), x, dtype=torch.float64)


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("z", [-3.0, -1.0, 0.0, 1.0, 3.0])
def test_least_value_holds_for_every_point_and_defect(box: bool, z: float) -> None:
    """Of b - b² on |b| <= 1 the least value is at -1, whatever z is taken and however far 2F + μ = -1 is below zero."""
    region = Region.of(Ball.exact(torch.eye(1, dtype=torch.float64)), number(1.0) if box else None)
    quadratic = Quadratic(0.0, number(1.0), number(-1.0).unsqueeze(0), 0.0, 0.0)
    assert least._value(quadratic, 1.0, 1.0, number(z), region, 1.0) <= -2.0
    for mu in (0.0, 1.0, 2.0, 5.0):  # 2F + μ is semidefinite from 2 on
        assert least.proved(quadratic, mu, number(z), region, 1.0) <= -2.0


@pytest.mark.parametrize("where", ["entrance", "head", "units"])
def test_nothing_is_proved_of_what_underflows(where: str) -> None:
    """The squares of all slopes vanish in float64; the margins are small, and change their signs all the same."""
    dice = Dice(0)
    small = {name: 1e-170 if name == where else 1.0 for name in ("entrance", "head", "units")}
    mlp = KinkedMlp(dice.normal(3, 6), dice.normal(6), "relu", small["units"] * dice.normal(6, 3), torch.zeros(3))
    stages = [Affine(small["entrance"] * dice.normal(3, 3)), *([mlp] if where == "units" else []), TokenMean(2)]
    forms = Margins(Network(stages, Head(small["head"] * dice.normal(2, 3), torch.zeros(2))), dice.normal(2, 3))
    assert float(forms.walk.margins.min()) > 0
    assert not forms.at(1e3).least > 0


@pytest.mark.parametrize("follow", ["normalisations", "stream"])
def test_nothing_is_proved_of_what_underflows_behind_a_normalisation(
    follow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is small, its normalisations are not; the squares of values vanish in float64."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, *(("_NUMBERS", 0) if follow == "normalisations" else ("_MEMORY", 0)))

    def forms(stream: float, value: float, out: float) -> Margins:
        dice = Dice(0)

        def branch() -> Residual:
            w_q, w_k, w_v, w_o = dice.normal(1, 3, 2), dice.normal(1, 3, 2), dice.normal(1, 3, 2), dice.normal(1, 2, 3)
            layer = AttentionLayer(w_q, w_k, value * w_v, out * w_o)
            return Residual((RMSNorm(torch.exp(0.3 * dice.normal(3)), 1e-4 * stream**2), Attention(layer)))

        first, last = Affine(stream * torch.eye(3).double()), RMSNorm(torch.ones(3), 1e-4 * stream**2)
        network = Network([first, branch(), branch(), last, TokenMean(3)], Head(dice.normal(3, 3), dice.normal(3)))
        return Margins(network, dice.normal(3, 3))

    plain, small = forms(1.0, 1e-3, 1e-7), forms(1e-140, 1e-163, 1e13)
    assert torch.allclose(plain.walk.margins, small.walk.margins)
    assert plain.at(0.01).least > 0
    assert not small.at(0.01).least > 0


def test_extreme_scales_end_without_an_error() -> None:
    """Scale 0 is the centre; where margins do not change to first order, the search begins beyond all numbers."""
    dice = Dice(1)
    w2 = dice.normal(5, 2)
    mlp = Mlp(dice.normal(3, 5), dice.normal(5), "gelu", w2, torch.zeros(2))
    forms = Margins(Network([mlp], Head(torch.eye(2), torch.zeros(2))), dice.normal(1, 3))
    assert forms.at(0.0).least == pytest.approx(float(forms.walk.margins.min()), abs=1e-9)
    with pytest.raises(InputError, match=r"scale of a region is -1.0"):
        forms.at(-1.0)
    flat = Network([Affine(torch.zeros(3, 3)), mlp], Head(torch.eye(2), torch.zeros(2)))
    assert Margins(flat, dice.normal(1, 3)).largest(1e-2) >= 0
    for p in (3, 300):
        region = Region.of(Ball.exact(torch.eye(p, dtype=torch.float64)), None)
        zero, F = torch.zeros(p, dtype=torch.float64), -torch.eye(p, dtype=torch.float64)
        assert least.proved(Quadratic(1.0, zero, F, 0.0, 0.0), 0.0, zero, region, 1.0) <= 0.0
        assert least.proved(Quadratic(1.0, zero + 1.0, 1e300 * F, 0.0, 0.0), 0.0, zero, region, 1e10) == -math.inf


def test_halves_that_gain_little_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a gain of a thousandth of what is missing no number of halves suffices."""
    dice = Dice(3)
    network = Network([Affine(dice.normal(2, 2))], Head(1e4 * dice.normal(2, 2), torch.zeros(2)))
    lower = Settled.lower
    calls = []

    def hardly_better(self: Settled, *args: Any, **options: Any) -> Lower:
        calls.append(args)
        bounds = lower(self, *args, **options)
        return Lower(bounds.margins, -10.0 + 1e-3 * (len(calls) > 2), bounds.losses)  # two for every part

    monkeypatch.setattr(Settled, "lower", hardly_better)
    x = dice.normal(1, 2)
    assert margins_over_parts(network, x - 1e-9, x + 1e-9, 60.0).parts == 2


OPTIONS = {
    "values of another width": {"w_v": torch.ones(2, 3, 1), "w_o": torch.ones(2, 1, 3)},
    "a mask or a score bias for each input": {"mask": torch.ones(1, 2, 2, dtype=torch.bool)},
    "a soft cap": {"soft_cap": 1.0},
    "sinks": {"sinks": torch.zeros(2)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_attention_beyond_dot_products_is_refused(option: str) -> None:
    maps = {name: torch.ones(2, 3, 2) for name in ("w_q", "w_k", "w_v")} | {"w_o": torch.ones(2, 2, 3)}
    layer = AttentionLayer(**(maps | OPTIONS[option]))  # type: ignore[arg-type]
    network = Network([Attention(layer), TokenMean(2)], Head(torch.eye(3), torch.zeros(3)))
    assert f"Attention with {option}" in (refusal(network) or "")


def test_margins_that_do_not_change_to_first_order() -> None:
    """At 0 all gradients vanish; the answer changes where 4(gelu(x) + gelu(-x)) is 1, x being one of two numbers."""
    pair = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    mlp = Mlp(pair, torch.zeros(2), "gelu", torch.tensor([[4.0], [4.0]]), torch.zeros(1))
    network = Network([mlp], Head(torch.tensor([[0.0], [1.0]]), torch.tensor([1.0, 0.0])))
    x = torch.linspace(0, 2, 2001).double()
    truth = float(x[4 * (gelu(x) + gelu(-x)) < 1].max())
    radius = Margins(network, torch.zeros(1, 2)).largest(1e-2)
    assert 0.5 * truth < radius <= truth + 1e-3
    (record,) = certify_inputs(network, torch.zeros(1, 1, 2), method="forms")
    assert 0.5 * truth < record.radius <= truth + 1e-3


def test_what_has_no_margin_is_refused() -> None:
    one = Network([TokenMean(2)], Head(torch.ones(1, 3), torch.zeros(1)), "one-class")
    with pytest.raises(InputError, match="one-class has 1 class; expected two or more"):
        certify_inputs(one, torch.zeros(1, 2, 3), method="forms")
    with pytest.raises(InputError, match="one-class has 1 class; expected two or more"):
        Margins(one, torch.zeros(2, 3))
    with pytest.raises(InputError, match="a residual branch has no pieces"):
        Residual(())


def test_time_limits_act_while_forms_prepare() -> None:
    dice = Dice(4)
    mlp = KinkedMlp(dice.normal(3, 6), dice.normal(6), "relu", dice.normal(6, 3), torch.zeros(3))
    network = Network([mlp, TokenMean(2)], Head(dice.normal(2, 3), dice.normal(2)))
    left = iter([False, True, True, True])
    forms = Margins(Network([mlp, *network.stages], network.head), dice.normal(2, 3), overdue=lambda: next(left))
    with pytest.raises(TimeLimitError, match="the time for this input was over"):
        forms.at(0.1)
    (record,) = certify_inputs(network, dice.normal(1, 2, 3), method="forms", seconds=1e-9)
    assert record.radius == 0
    assert record.unfinished == ("the time was over before the search of forms had ended",)


@pytest.mark.parametrize("p", [1, 4, 120])
@pytest.mark.parametrize("bend", [-1.0, 0.0, 1.0])
def test_trust_regions_are_solved(p: int, bend: float) -> None:
    """The conditions that say where a quadratic function is least on a ball; matrices of either sign, and of both."""
    dice = Dice(p)
    A = dice.normal(p, p) / p**0.5
    H = A @ A.mT * bend if bend else A + A.mT
    g = dice.normal(p)
    for r in (0.01, 1.0, 100.0):
        mu, b = trust_region(lambda x: H @ x, g, r)
        assert mu >= max(0.0, -float(torch.linalg.eigvalsh(H)[0]) * (1 - 1e-3))
        assert float(b.norm()) <= r * (1 + 1e-9)
        assert float((H @ b + mu * b + g).norm()) <= 2e-4 * float(g.norm())
        assert mu < 1e-9 or float(b.norm()) >= r * (1 - 1e-6)


@pytest.mark.parametrize("scale", [-0.01, -1.0, math.nan])
def test_negative_scales_are_refused(scale: float) -> None:
    dice = Dice(3)
    forms = Margins(Network([Affine(dice.normal(2, 2))], Head(dice.normal(3, 2), dice.normal(3))), dice.normal(1, 2))
    for ask in (forms.at, forms.decide):
        with pytest.raises(InputError, match="expected a number that is not negative"):
            ask(scale)


def test_what_is_not_a_number_stays_so() -> None:
    orders = TokenOrders.of(torch.ones(1, 2, 3).double())
    for unsure in (0.5, math.nan, 1.0):
        orders.add(torch.ones(1, 2, 3).double(), torch.ones(3).double(), unsure)
    most = orders.most(torch.tensor([0]), torch.ones(1, 1, 2).double(), torch.ones(1, 1).double())
    assert not bool(torch.isfinite(most).any())


def _led_by_nobody(seed: int, monkeypatch: pytest.MonkeyPatch) -> Centre:
    """A network at an input where balls of the whole network know of no lead, as in many layers of real models."""
    dice = Dice(seed)
    mlp = Mlp(dice.normal(3, 5), dice.normal(5), "gelu", dice.normal(5, 4), torch.zeros(4))
    centre = Centre(Network([mlp], Head(torch.eye(4), torch.zeros(4))), dice.normal(1, 1, 3))
    monkeypatch.setattr(centre, "margin", centre.margin - 100)
    return centre


@pytest.mark.parametrize("aim", [Aim(), Aim(at=(1e-2, 1e-3)), Aim(Threat("linf"))])
def test_forms_prove_a_lead_that_balls_of_the_whole_network_lose(aim: Aim, monkeypatch: pytest.MonkeyPatch) -> None:
    centre = _led_by_nobody(0, monkeypatch)
    whole, quick = compositions["forms"](centre, aim=aim), compositions["gains"](centre, aim=aim)
    assert float(quick.radius) == 0
    assert float(whole.radius) > 0
    assert 0 < float(whole.lead) <= float(centre.margin) + 100 + 1e-12
    assert float(compositions["best"](centre, aim=aim).lead) == float(whole.lead)


def test_forms_prove_no_lead_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding leaves open may be decided in one way there and in another one here."""
    centre = _led_by_nobody(0, monkeypatch)
    monkeypatch.setattr(centre, "prediction", (centre.prediction + 1) % 4)
    radii = compositions["forms"](centre)
    assert float(radii.radius) == 0
    assert not float(radii.lead) > 0
    assert not bool((compositions["forms"].curve(centre)(torch.full((1,), 1e-3).double()) > 0).any())


def test_classes_that_tie_have_no_lead() -> None:
    mlp = Mlp(torch.eye(3), torch.zeros(3), "gelu", torch.eye(3), torch.zeros(3))
    x = torch.tensor([[[1.0, 1.0, -1.0]]], dtype=torch.float64)
    (record,) = certify_inputs(Network([mlp], Head(torch.eye(3), torch.zeros(3))), x, method="forms")
    assert not record.decided
    assert record.radius == 0
