"""What is chosen among compositions, and where they used to give up: no radius that can be had soon is lost."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from forms_cases import worst_excess
from holdfast import AttentionLayer
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.compositions.best import _chosen
from holdfast.compositions.forms import Margins, composition, margins
from holdfast.errors import TimeLimitError
from holdfast.layers import Attention, ClassToken, LayerNorm, Mlp, Scale, TokenMean
from holdfast.linalg.threat import Threat
from holdfast.network import Head, Network, Residual
from holdfast.network.centre import Centre
from holdfast.testing.draw import Dice

D = 4


def draw(seed: int, *, tokens: int = 3, normed: bool = False, causal: bool = False) -> tuple[Network, Tensor]:
    """Attention, an MLP, attention, read at the first token; and one input."""
    dice = Dice(seed)

    def attention() -> Attention:
        maps = {name: 0.5 * dice.normal(2, D, 3) for name in ("w_q", "w_k", "w_v")}
        return Attention(AttentionLayer(**maps, w_o=0.5 * dice.normal(2, 3, D), causal=causal))

    norm = LayerNorm(torch.ones(D).double(), torch.zeros(D).double(), 1e-3)
    first = attention()
    mlp = Mlp(0.5 * dice.normal(D, 6), 0.3 * dice.normal(6), "gelu", 0.5 * dice.normal(6, D), 0.3 * dice.normal(D))
    pieces = (first, mlp, attention())
    stages = [Residual((norm, piece)) for piece in pieces] if normed else pieces
    head = Head(dice.normal(3, D), 0.3 * dice.normal(3))
    return Network([*stages, ClassToken(0)], head, "small"), dice.normal(1, tokens, D)


def radius(network: Network, x: Tensor, method: str, threat: Threat | None = None) -> float:
    return certify_inputs(network, x, method=method, threat=threat or Threat())[0].radius


@pytest.mark.parametrize("method", ["forms", "telescoped"])
@pytest.mark.parametrize("kind", ["one key", "no queries"])
def test_attention_that_does_not_depend_on_its_scores(method: str, kind: str) -> None:
    """Rows of keys that agree, or vanish, leave nothing but rounding: that must not look like an error of its size."""
    network, x = draw(0, tokens=1 if kind == "one key" else 3, causal=True)
    for piece in network.pieces():
        if isinstance(piece, Attention) and kind == "no queries":
            piece.layer.w_q.zero_()
    (record,) = certify_inputs(network, x, method=method)
    attack = float(MinimalAttack()(network, x, torch.tensor([record.prediction])).radius)
    assert 0.3 * attack < record.radius <= attack
    if method == "forms":
        assert worst_excess(Margins(network, x[0]), x, record.radius, None, 0) < 1e-12


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves three compositions to choose from."""
    kept = {name: compositions[name] for name in ("telescoped", "forms", "best")}
    monkeypatch.setattr(compositions, "_items", kept)


@pytest.mark.usefixtures("few")
def test_forms_are_asked_where_they_answer_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = draw(5)
    forms, telescoped = radius(network, x, "forms"), radius(network, x, "telescoped")
    assert forms > 1.3 * telescoped
    assert radius(network, x, "best") > 0.98 * forms

    monkeypatch.setattr(composition, "_LONG", 0.0)  # from here on they take long
    (record,) = certify_inputs(network, x, method="best")
    assert (record.method, record.radius) == ("telescoped", pytest.approx(telescoped, rel=1e-3))
    assert any(note.startswith("forms may reach farther than telescoped") for note in record.unfinished)
    (record,) = certify_inputs(network, x, method="best", seconds=60.0)
    assert (record.method, record.unfinished) == ("forms", ())


@pytest.mark.usefixtures("few")
def test_a_box_is_worth_the_ball_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_BRANCHES", "_SETTLED"):  # what makes boxes sharper, and costs seconds
        monkeypatch.setattr(margins, name, 3)
    network, x = draw(4, normed=True)
    linf = Threat(norm="linf")
    least = radius(network, x, "telescoped") / math.sqrt(x.numel())
    assert radius(network, x, "forms", linf) < 0.99 * least
    (record,) = certify_inputs(network, x, method="best", threat=linf)
    assert record.radius > 0.998 * least
    assert (record.method, record.through) == ("telescoped", "ball")


def test_a_short_limit_leaves_boxes_what_the_quick_one_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = draw(3)
    quick = certify_inputs(network, x, method="gains", threat=Threat("linf"))[0]
    monkeypatch.setattr(composition, "_margins", lambda *_: (_ for _ in ()).throw(TimeLimitError("too late")))
    found = certify_inputs(network, x, threat=Threat("linf"), seconds=1000)[0]
    assert found.radius >= quick.radius > 0
    names = [method.name for method in _chosen(Centre(network, x, deadline=time.monotonic() + 9), Threat("linf"))[0]]
    assert names[:2] == ["gains", "forms"]
    assert [method.name for method in _chosen(Centre(network, x), Threat("linf"))[0]][:1] == ["forms"]


@pytest.mark.parametrize("size", [1e-5, 1e-9, 1e-11])
def test_a_radius_far_below_first_order_is_seen(size: float) -> None:
    """A token of this size in front of a norm: beyond it nothing is known, though it hardly counts."""
    dice = Dice(0)
    factors = torch.ones(3, D).double()
    factors[1] = size
    norm = LayerNorm(torch.ones(D).double(), torch.zeros(D).double(), 1e-30)
    network = Network([norm, Scale(factors), TokenMean(3)], Head(dice.normal(3, D), dice.normal(3)))
    x = dice.normal(1, 3, D)
    x[0, 1] = 1 + size * x[0, 1]
    assert radius(network, x, "forms") > 0.1 * size
