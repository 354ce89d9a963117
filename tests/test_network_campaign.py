"""Networks under attack in the campaign: compositions withstand it as they are, and not where they are wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.compositions import compositions
from holdfast.compositions.base import Curve
from holdfast.compositions.gains import Gains
from holdfast.linalg.threat import L2, LINF, Threat
from holdfast.network.centre import Centre
from holdfast.testing.campaign import run_campaign
from holdfast.testing.network_attack import least_margins
from holdfast.testing.networks import NETWORK_KINDS, draw_network

LINEAR, KINKED = (NETWORK_KINDS.index(kind) for kind in ("linear", "kink at the end"))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compositions, "_items", {name: compositions[name] for name in ("gains", "forms")})


@pytest.mark.usefixtures("few")
def test_finds_nothing_at_a_kink() -> None:
    report = run_campaign(0, seed=KINKED, demo=False, networks=1)
    assert report.sound
    assert report.networks == 1
    shapes = ("l2", "linf", "linf, clipped")
    assert report.slack.keys() == {f"{name}, {shape}" for name in ("gains", "forms") for shape in shapes}


@pytest.mark.usefixtures("few")
def test_what_claims_too_much_is_found_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Gains._curve

    def more(self: Gains, centre: Centre) -> Curve:
        curve = whole(self, centre)
        return lambda eps: curve(0.99 * eps)

    monkeypatch.setattr(Gains, "_curve", more)
    report = run_campaign(0, seed=LINEAR, demo=False, networks=1)
    assert {finding.what for finding in report.violations} == {"gains, l2"}
    assert all(finding.is_network for finding in report.violations)
    line = ["campaign", "--no-demo", "--layers", "0", "--pieces", "0", "--networks", "1", "--seed", str(LINEAR)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 1
    assert " ".join(line[2:]) in " ".join(result.stdout.split())


@pytest.mark.parametrize("threat", [L2, LINF, Threat("linf", (-1.0, 1.0))])
def test_the_attack_stays_within_reach_and_finds_what_there_is(threat: Threat) -> None:
    """On a linear network the least margin over the ball is known: the attack comes near it, from above."""
    case = draw_network("linear")
    x: Tensor = threat.inside(case.x)
    centre = Centre(case.network, x)
    eps = centre.first_order(threat) / 2
    found = least_margins(case.network, x, centre.prediction, eps, threat, 0)
    proved = compositions["forms"].curve(centre, threat)(eps)  # type: ignore[attr-defined]
    assert bool((proved <= found).all())
    torch.testing.assert_close(found, proved, rtol=0.02, atol=1e-3)
