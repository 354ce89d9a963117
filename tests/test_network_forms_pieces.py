"""Forms of normalisations, smooth activations and other kinks: no attack goes below a margin or beyond a scalar."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forms_cases import above_minorant, worst_excess
from holdfast import AttentionLayer
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs, compositions
from holdfast.compositions.base import Aim
from holdfast.compositions.forms import Margins, jets, margins_over_box, margins_over_parts, settled, smooth, softmax
from holdfast.compositions.forms.normalised import Normalised
from holdfast.layers import (
    Affine,
    Attention,
    ClassToken,
    KinkedEntries,
    KinkedMlp,
    LayerNorm,
    Mlp,
    PairSort,
    Piece,
    Product,
    RMSNorm,
    SmoothEntries,
    SmoothProject,
    TokenMean,
    WindowMax,
)
from holdfast.layers.activation.functions import LeakyRelu, activations
from holdfast.layers.beside import Part, beside
from holdfast.layers.tokens.selection import Rearrangement
from holdfast.network import Head, Network, Residual
from holdfast.network.centre import Centre
from holdfast.testing.draw import Dice
from holdfast.testing.layers import turning

D, UNITS, CLASSES = 4, 6, 3
ORDERS = (1, 2, 3)  # of functions that are known as one form, where every piece is smooth
SMOOTH = ("pre-norm", "post-norm", "norms", "units", "smooth beside", "gated")
KINDS = (*((kind, most) for kind in SMOOTH for most in ORDERS),)
KINDS += (("activations", 1), ("entries", 1), ("sorted", 1), ("maxima", 1), ("beside", 1))


def draw(kind: str, seed: int, size: float = 1.0) -> tuple[Network, Tensor]:
    """A small network, and one input (1, 3, 4)."""
    dice = Dice(seed)

    def norm() -> LayerNorm:
        return LayerNorm(torch.exp(0.3 * dice.normal(D)), 0.3 * dice.normal(D), 1e-3)

    def attention() -> Attention:
        maps = {name: size / D**0.5 * dice.normal(2, D, 3) for name in ("w_q", "w_k", "w_v")}
        return Attention(AttentionLayer(**maps, w_o=size / 2 * dice.normal(2, 3, D), b_q=0.3 * dice.normal(2, 3)))

    def weights() -> tuple[Tensor, Tensor]:
        return size / D**0.5 * dice.normal(D, UNITS), 0.3 * dice.normal(UNITS)

    def mlp(phi: str, residual: float = 0.0) -> Mlp:
        return Mlp(*weights(), phi, size / UNITS**0.5 * dice.normal(UNITS, D), 0.3 * dice.normal(D), residual)

    def leaky(slope: float) -> KinkedMlp:
        return KinkedMlp(*weights(), LeakyRelu(slope), size / UNITS**0.5 * dice.normal(UNITS, D), 0.3 * dice.normal(D))

    half = torch.arange(D) < D // 2
    stages: dict[str, list[Piece | Residual]] = {
        "pre-norm": [Residual((norm(), attention())), Residual((norm(), mlp("gelu"))), norm()],
        "post-norm": [
            attention(),
            RMSNorm(torch.exp(0.3 * dice.normal(D)), 1e-3),
            mlp("silu", 1.0),
            norm(),
            attention(),
        ],
        "activations": [mlp("gelu-tanh"), mlp("tanh", 0.5), mlp("softplus"), leaky(0.2)],
        "entries": [
            KinkedEntries(LeakyRelu(-0.3), half),
            Affine(dice.normal(D, D)),
            SmoothEntries(activations["tanh"], ~half),
            Affine(dice.normal(D, D)),
            SmoothEntries(activations["gelu"], half | ~half),
        ],
        "sorted": [Affine(dice.normal(D, D)), PairSort(), Affine(dice.normal(D, D)), PairSort(), leaky(0.01)],
        "norms": [norm(), Affine(dice.normal(D, D)), SmoothProject(1.5), mlp("gelu"), norm()],
        "one norm": [norm()],
        "units": [mlp("gelu"), mlp("tanh", 0.5)],
    }
    pool = ClassToken(1) if kind == "post-norm" else TokenMean(3)
    head = Head(dice.normal(CLASSES, D), 0.3 * dice.normal(CLASSES))
    if kind == "maxima":  # windows that overlap, of three, two and four entries
        rows = torch.tensor([[0, 1, 2], [1, 2, -1]]).unsqueeze(1)
        down = torch.where(rows < 0, -1, rows * D + torch.arange(D).unsqueeze(-1))
        along = torch.tensor([[0, 1, 2, 5], [2, 3, 4, 5], [4, 5, 6, 7]]).unsqueeze(0)
        stages[kind] = [
            attention(),
            WindowMax(down, (3, D)),
            leaky(0.1),
            WindowMax(along, (2, D)),
            Affine(dice.normal(3, D)),
        ]
        pool = TokenMean(1)
    if kind == "smooth beside":
        stages[kind] = [*_beside(attention(), norm(), mlp("gelu"))]
    if kind == "beside":
        stages[kind] = [*_beside(attention(), norm(), mlp("gelu"), leaky(0.1)), Affine(dice.normal(D, D))]
    if kind == "gated":
        gate = (Affine(size / 2 * dice.normal(D, 2 * D)), SmoothEntries(activations["silu"], torch.arange(2 * D) < D))
        turned = Attention(attention().layer.replace(rotary=turning(dice.normal(3, 1))))
        stages[kind] = [
            Residual((RMSNorm(torch.exp(0.3 * dice.normal(D)), 1e-3), turned)),
            Residual((norm(), *gate, Product(), Affine(size * dice.normal(D, D)))),
            norm(),
        ]
    return Network([*stages[kind], pool], head, kind), dice.normal(1, 3, D)


def _up_to(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets forms know the functions' own orders up to the first, the second or the third, as if more cost too much."""
    if most < 3:
        monkeypatch.setattr(jets, "_TWISTS", 0.0)
    if most < 2:
        monkeypatch.setattr(jets, "_NUMBERS", 0)


def _beside(*pieces: Piece) -> list[Piece]:
    """Pieces on tokens that are joined with their input and, in the end, added up: u ↦ u + f(u), without residuals."""
    size, made = 3 * D, list[Piece]()
    entries = torch.arange(size)
    add = Affine(torch.cat([torch.eye(size), torch.eye(size)]).double())
    for piece in pieces:
        made += [beside(piece, Part(entries.reshape(3, D), entries, (3, D), size)), add]
    return [Rearrangement(entries.reshape(1, size), (3, D)), *made, Rearrangement(entries.reshape(3, D), (1, size))]


@pytest.mark.parametrize(("kind", "most"), KINDS)
@pytest.mark.parametrize("box", [False, True])
def test_no_attack_goes_beyond(kind: str, box: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _up_to(most, monkeypatch)
    for seed, scale in ((1, 0.1), (2, 0.5)) if box else ((0, 0.02), (1, 0.1)):
        network, x = draw(kind, seed)
        shape = torch.exp(0.5 * Dice(seed).normal(*x.shape[1:])) if box else None
        forms = Margins(network, x[0], shape)
        assert worst_excess(forms, x, scale, shape, seed) < 1e-12
        if not box:
            assert above_minorant(network, x, scale, seed) < 1e-12


@pytest.mark.parametrize(("kind", "most"), KINDS)
def test_second_order_is_exact(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a margin loses beyond first order at a small radius is its Hessian's, up to what is cubic."""
    _up_to(most, monkeypatch)
    monkeypatch.setattr(settled, "_TRIFLE", 0.0)
    network, x = draw(kind, 3)
    forms, radius = Margins(network, x[0]), 1e-4
    lower = forms.at(radius)
    y, j = forms.prediction, int(lower.margins.argmin())
    s = forms.walk.others.index(j)

    def margin(flat: Tensor) -> Tensor:
        logits: Tensor = network((x.flatten() + flat).reshape(x.shape))[0]
        return logits[y] - logits[j]

    H = torch.autograd.functional.hessian(margin, torch.zeros(x.numel(), dtype=torch.float64))
    slope = forms.region.basis @ forms.gradients[s]
    G = -slope / slope.norm() * radius
    expected = float(forms.walk.margins[s] - slope.norm() * radius + G @ H @ G / 2)
    assert lower.least == pytest.approx(expected, abs=0.05 * float(H.norm()) * radius**2 + 1e-11)


@pytest.mark.parametrize("most", ORDERS)
def test_radii_are_below_every_attack_and_name_their_losses(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _up_to(most, monkeypatch)
    network, x = draw("pre-norm", 4)
    (record,) = certify_inputs(network, x, method="forms")
    attack = MinimalAttack()(network, x, torch.tensor([record.prediction])).radius
    assert 0.02 * float(attack) < record.radius <= float(attack)
    rests = {"activation rest", "normalisation rest", "attention rest", "carried rests" if most < 3 else "third order"}
    assert record.losses.keys() >= {"first order", "second order"} | rests


FAULTS = {  # the draws that show them, and the scale
    "drift": ("activations", 2, 0.5),
    "second order": ("norms", 2, 0.02),
    "third order": ("one norm", 2, 0.1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settle, prepare, weights = smooth.SmoothUnits.settle, Normalised.prepare, Normalised._weights

    def without_drift(self: smooth.SmoothUnits, *args: Any) -> float:
        moved = settle(self, *args)
        self._third, self._number, self._form = 0 * self._third, 0 * self._number, 0 * self._form
        return moved

    _up_to(1, monkeypatch)
    if fault == "drift":
        monkeypatch.setattr(smooth.SmoothUnits, "settle", without_drift)
    elif fault == "second order":
        monkeypatch.setattr(Normalised, "prepare", lambda self, mu: replace(prepare(self, mu), bent=0 * mu[:, 0, 0]))
    else:
        monkeypatch.setattr(Normalised, "_weights", lambda self, rows: tuple(0 * x for x in weights(self, rows)))
    kind, seed, scale = FAULTS[fault]
    network, x = draw(kind, seed)
    if fault == "second order":  # of scalars; that of margins is exact
        assert worst_excess(Margins(network, x[0]), x, scale, None, seed) > 1e-9
    else:
        assert above_minorant(network, x, scale, seed) > 1e-9


@pytest.mark.parametrize("kind", SMOOTH)
def test_orders_are_derivatives(kind: str) -> None:
    """The margins' second and third orders against automatic differentiation."""
    network, x = draw(kind, 3)
    forms = Margins(network, x[0])
    found, s = forms._batches.jets, 0
    assert found is not None
    y, j = forms.prediction, forms.walk.others[s]

    def margin(flat: Tensor) -> Tensor:
        logits: Tensor = network((x.flatten() + forms.region.basis @ flat).reshape(x.shape))[0]
        return logits[y] - logits[j]

    zero = torch.zeros(forms.region.p, dtype=torch.float64)
    hessian = torch.func.hessian(margin)
    torch.testing.assert_close(found.forms[s], hessian(zero) / 2, rtol=1e-9, atol=1e-11)
    third = torch.func.jacrev(hessian)(zero) / 6
    end = len(forms.walk.places)
    assert float(found.third[end][s]) == pytest.approx(float(third.norm()), rel=1e-6)


ORDER_FAULTS = {  # where an attack shows them
    "second": ("norms", 2, 0.05),
    "units": ("units", 2, 0.05),
    "norms": ("norms", 2, 0.05),
    "attention": ("post-norm", 3, 0.05),
}


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_faults_planted_in_orders_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions without their second order; or without a third one, and a kind of piece without what is beyond."""
    finish, settle = jets.Jets.finish, smooth.SmoothUnits.settle

    def forgotten(self: jets.Jets) -> None:
        finish(self)
        orders = self.second if fault == "second" else self.third
        orders |= {i: 0 * norms for i, norms in orders.items()}

    def nothing_beyond(self: smooth.SmoothUnits, *args: Any) -> float:
        moved = settle(self, *args)
        self._left = 0 * self._left
        return moved

    monkeypatch.setattr(jets.Jets, "finish", forgotten)
    if fault == "units":
        monkeypatch.setattr(smooth.SmoothUnits, "settle", nothing_beyond)
    elif fault == "norms":
        monkeypatch.setattr(Normalised, "_beyond_third", lambda self, one, *_: 0 * one.size.sum(-1))
    elif fault == "attention":
        monkeypatch.setattr(softmax, "beyond_third", lambda heads, one, third: 0 * one.error)
    kind, seed, scale = ORDER_FAULTS[fault]
    network, x = draw(kind, seed)
    assert worst_excess(Margins(network, x[0]), x, scale, None, seed) > 1e-9


def test_parts_prove_what_the_whole_does_not() -> None:
    """Two numbers move: a few halves suffice, and bounds over parts are between those over the box and the truth."""
    network, x = draw("norms", 0)
    half = torch.zeros_like(x[0])
    half[0, :2] = 1.0
    scale = 1.3 * Margins(network, x[0], half).largest(1e-2)
    low, high = x[0] - scale * half, x[0] + scale * half
    assert margins_over_box(network, low, high).least <= 0
    parts = margins_over_parts(network, low, high, 30.0)
    assert 0 < parts.least <= _least_on_grid(network, x, scale * half)
    assert float(parts.margins.min()) == parts.least
    assert parts.parts >= 2
    assert margins_over_parts(network, x[0], x[0], 1.0).parts == 1
    hopeless = margins_over_parts(network, x[0] - 50 * half, x[0] + 50 * half, 2.0)
    assert hopeless.least <= 0


def _least_on_grid(network: Network, x: Tensor, half: Tensor) -> float:
    steps = torch.linspace(-1, 1, 60, dtype=torch.float64)
    moves = torch.cartesian_prod(steps, steps)
    points = x.repeat(len(moves), 1, 1)
    points[:, 0, :2] += moves * half[0, :2]
    logits = network(points)
    y = int(network(x).argmax())
    others = [j for j in range(CLASSES) if j != y]
    return float((logits[:, y : y + 1] - logits[:, others]).min())


@pytest.mark.parametrize("at", [(), (0.01,)])
def test_a_centre_is_free_as_soon_as_nobody_asks(at: tuple[float, ...]) -> None:
    network, x = draw("pre-norm", 3)
    centre = Centre(network, x, deadline=time.monotonic() + 100)
    reached = compositions["forms"](centre, None, Aim(at=at))
    assert bool((reached.radius > 0).all())
    parts = [weakref.ref(part) for part in (centre, *centre.stages, *(s for t in centre.stages for s in t.sites))]
    gc.disable()
    try:
        del centre
        assert all(part() is None for part in parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["pre-norm", "gated", "beside"])
def test_memory_is_free_as_soon_as_nobody_asks(kind: str) -> None:
    """Margins of large networks hold gigabytes, and cycles are collected seldom."""
    network, x = draw(kind, 3)
    forms = Margins(network, x[0])
    forms.at(0.01)
    forms.decide(0.02)
    parts = [weakref.ref(part) for part in (forms, forms.walk, *map(forms.walk.local, forms.walk.curved))]
    gc.disable()
    try:
        del forms
        assert all(part() is None for part in parts)
    finally:
        gc.enable()
