"""The small parts of forms: blocks of the region, squares that become numbers, sums before norms."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.compositions.forms import Margins, jets
from holdfast.compositions.forms.local import Problem
from holdfast.compositions.forms.region import Region
from holdfast.compositions.forms.suprema import QuadraticSums
from holdfast.layers import LayerNorm, Mlp, TokenMean
from holdfast.linalg import Ball
from holdfast.network import Head, Network
from holdfast.testing.draw import Dice


@pytest.mark.parametrize("slight", [0.0, 0.05, 1e9])
def test_squares_that_become_numbers_take_no_less(slight: float) -> None:
    """At every point of the ball the polynomial is below the exact one, by no more than what is slight."""
    dice, K, p = Dice(1), 12, 5
    x, weights = dice.normal(K, p), {"one": dice.normal(K), "other": -dice.normal(K).abs() / 3}
    problem = Problem.of(1.0, torch.zeros(p).double(), slight)
    problem.add_squares(x, weights, torch.zeros(K).double(), x.norm(dim=-1))
    b = dice.normal(200, p)
    b = b / b.norm(dim=-1, keepdim=True) * torch.linspace(0, 1, 200).double().unsqueeze(-1)
    exact = 1.0 + (b @ x.mT).square() @ (weights["one"] + weights["other"])
    below = problem.value + ((b @ problem.form) * b).sum(-1)
    assert bool((below <= exact + 1e-12).all())
    assert float((exact - below).max()) <= (2 * slight if slight < 1 else 1e3) + 1e-12
    assert (float(problem.form.abs().max()) == 0) == (slight > 1)
    parts = problem.breakdown(b[-1], float(1.0 - below[-1]))
    assert parts["relaxation"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("box", [False, True])
def test_blocks_of_the_input_are_told_apart(box: bool) -> None:
    """Two patches of six numbers with three and two outputs, an idle input, a fixed output."""
    dice = Dice(2)
    L = torch.zeros(6, 13).double()
    L[:3, :6], L[3:5, 6:12] = dice.normal(3, 6), dice.normal(2, 6)
    L = L[:, torch.randperm(13, generator=torch.Generator().manual_seed(0))]
    half = dice.normal(13).abs() if box else None
    region = Region.of(Ball.exact(L), half)
    assert [len(block.inputs) for block in region.blocks] == [6, 6]
    assert region.p == 5
    h = torch.ones(13).double() if half is None or region.sides is None else half / region.sides
    torch.testing.assert_close(region.J @ region.basis.mT, L * h, rtol=0, atol=1e-12)
    assert region.missed < 1e-12
    c = dice.normal(4, 6)
    rows, error = region.reduced(c)
    torch.testing.assert_close(region.spread(rows), c @ (L * h), rtol=0, atol=1e-12)
    assert float(error.max()) < 1e-10
    y = dice.normal(500, 13)
    y = y.clamp(-1, 1) * region.sides if region.sides is not None else y / y.norm(dim=-1, keepdim=True)
    assert bool(((y @ region.spread(rows).mT).abs() <= region.supremum(rows)).all())


def test_norms_are_computed_for_those_alone_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums suffice for functions at a small scale: only the margins ask for norms there."""
    dice, asked = Dice(3), []
    monkeypatch.setattr(jets, "_NUMBERS", 0)
    most = QuadraticSums.most
    monkeypatch.setattr(QuadraticSums, "most", lambda self, c: (asked.append(len(c)), most(self, c))[1])
    layers = [Mlp(dice.normal(4, 6), dice.normal(6), "gelu", dice.normal(6, 4), torch.zeros(4)) for _ in range(2)]
    forms = Margins(Network(layers, Head(dice.normal(3, 4), dice.normal(3))), dice.normal(1, 4))
    assert not asked
    forms.at(1e-6)
    few = sum(asked)
    forms.at(0.5)
    assert sum(asked) > few


class Parallel(torch.nn.Module):
    """Attention, an MLP and an adapter side by side; the head may say nothing, or the same of two classes."""

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 1, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
        self.down, self.up = torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
        self.head = torch.nn.Linear(4, len(head))
        self.head.weight.data = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.mlp(x) + self.up(torch.nn.functional.gelu(self.down(x)))
        return self.head((x + self.attention(x, x, x, need_weights=False)[0] + beside).mean(1))


@pytest.mark.parametrize("says", ["something", "the same twice", "nothing"])
def test_branches_side_by_side_and_heads_that_say_little(says: str) -> None:
    torch.manual_seed(0)
    head = torch.randn(2, 4) if says == "something" else torch.randn(1, 4).expand(2, 4) * (says != "nothing")
    model = Parallel(head.clone()).double().eval()
    x = torch.randn(1, 3, 4).double()
    label = int(model(x).argmax())
    radius = holdfast.certify(model, [(x[0], label)], [0.01], "forms", progress=False).records[0].radius
    assert radius > 0
    others = x + radius * torch.nn.functional.normalize(torch.randn(200, 12), dim=-1).double().reshape(-1, 3, 4)
    assert bool((model(others).argmax(-1) == label).all())


@pytest.mark.parametrize("box", [False, True])
def test_margins_that_do_not_change_are_proved_far(box: bool) -> None:
    dice = Dice(3)
    idle = Mlp(torch.zeros(4, 6), dice.normal(6), "gelu", dice.normal(6, 4), dice.normal(4))
    norm = LayerNorm(torch.ones(4).double(), torch.zeros(4).double(), 1e-3)
    network = Network([norm, idle, TokenMean(3)], Head(dice.normal(3, 4), dice.normal(3)))
    forms = Margins(network, dice.normal(3, 4), torch.ones(3, 4).double() if box else None)
    assert forms.largest(0.01) > 1
