"""The functions on which a place's rest depends: as covectors, applied to numbers, and bounded by absolute values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from forms_cases import worst_excess
from holdfast import AttentionLayer
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions.forms import Margins, batches, jets, margins
from holdfast.compositions.forms.softmax import Softmax
from holdfast.compositions.forms.units import Wiring
from holdfast.errors import MemoryLimitError
from holdfast.layers import Attention, ClassToken, KinkedMlp, LayerNorm, Mlp
from holdfast.network import Head, Network, Residual
from holdfast.testing.draw import Dice
from test_network_forms_pieces import draw

EVERY = ("pre-norm", "post-norm", "norms", "entries", "sorted", "maxima", "smooth beside", "beside", "gated")


@pytest.mark.parametrize("kind", EVERY)
def test_functions_are_their_covectors_in_every_form(kind: str) -> None:
    network, x = draw(kind, 2)
    forms, dice = Margins(network, x[0]), Dice(5)
    for i in forms.walk.curved:
        local, (n, d) = forms.walk.local(i), forms.walk.places[i].u.shape
        named, _ = local.covectors(forms.tokens[i])
        C = named.whole
        assert len(C) == named.count == len(forms.first_order(i))
        assert torch.equal(torch.cat([*named.parts(3)]), C)
        T, y = dice.normal(2, n, d), dice.normal(n, d).abs()
        assert torch.allclose(local.functions(T), torch.einsum("knd,mnd->km", C, T), atol=1e-12)
        exact, most = (C.abs() * y).sum((-2, -1)), local.most(y)
        assert bool((most >= exact).all())
        assert torch.allclose(most, exact, rtol=1e-8, atol=1e-12)


def _derived(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Network, Tensor]:
    """Normalisations, before attention and before units with kinks, from which all other functions follow."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_NUMBERS", 0)
    dice, d = Dice(seed), 4

    def norm() -> LayerNorm:
        return LayerNorm(torch.exp(0.3 * dice.normal(d)), 0.3 * dice.normal(d), 1e-3)

    maps = {name: dice.normal(2, d, 3) / 2 for name in ("w_q", "w_k", "w_v")}
    attention = Attention(AttentionLayer(**maps, w_o=dice.normal(2, 3, d) / 2))

    def mlp() -> KinkedMlp:
        return KinkedMlp(dice.normal(d, 6) / 2, 0.3 * dice.normal(6), "relu", dice.normal(6, d) / 3, torch.zeros(d))

    blocks = [Residual((norm(), piece)) for piece in (mlp(), attention, mlp())]
    stages = [*blocks, norm(), ClassToken(1)]
    return Network(stages, Head(dice.normal(3, d), dice.normal(3))), dice.normal(1, 3, d)


@pytest.mark.parametrize("seed", range(3))
def test_no_attack_goes_beyond_kinks_that_follow_from_normalisations(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, x = _derived(seed, monkeypatch)
    forms = Margins(network, x[0])
    for scale in (0.01, 0.1):
        assert worst_excess(forms, x, scale, None, seed) < 1e-12
    assert len(forms._batches.derived) == 3


@pytest.mark.parametrize("seed", range(3))
def test_functions_also_follow_from_normalisations_outside_of_branches(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sums are normalised, as in BERT."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_NUMBERS", 0)
    network, x = draw("post-norm", seed)
    forms = Margins(network, x[0])
    for scale in (0.01, 0.1):
        assert worst_excess(forms, x, scale, None, seed) < 1e-12
    assert [type(forms.walk.places[i].piece) for i in forms._batches.derived] == [Mlp, Attention]


def test_what_follows_from_a_sum_with_a_normalisation_has_covectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a branch the stream is more than what the normalisation in it gave out."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_NUMBERS", 0)
    dice, d = Dice(3), 4
    norm = LayerNorm(torch.exp(0.3 * dice.normal(d)), 0.3 * dice.normal(d), 1e-3)
    mlp = KinkedMlp(dice.normal(d, 6) / 2, 0.3 * dice.normal(6), "relu", dice.normal(6, d) / 3, torch.zeros(d))
    network = Network([Residual((norm,)), mlp, ClassToken(1)], Head(dice.normal(3, d), dice.normal(3)))
    x = dice.normal(1, 3, d)
    forms = Margins(network, x[0])
    assert worst_excess(forms, x, 0.1, None, 3) < 1e-12
    assert not forms._batches.derived


@pytest.mark.parametrize("place", [Softmax, Wiring])
def test_absolute_values_that_are_too_small_are_seen(place: type, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = _derived(1, monkeypatch)
    whole = place.most  # type: ignore[attr-defined]
    monkeypatch.setattr(place, "most", lambda *arguments: whole(*arguments) / 50)
    assert worst_excess(Margins(network, x[0]), x, 0.1, None, 1) > 1e-9


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = _derived(1, monkeypatch)
    monkeypatch.setattr(batches, "_MEMORY", 100)
    with pytest.raises(MemoryLimitError, match="forms follows the numbers of 7 places"):
        Margins(network, x[0]).at(0.1)


_LARGE_ATTENTION = """
import torch
from holdfast import AttentionLayer
from holdfast.usage import peak_memory
from holdfast.compositions.forms import Margins, jets
from holdfast.layers import Affine, Attention, TokenMean
from holdfast.network import Head, Network
from holdfast.testing.draw import Dice

def grown(tokens):
    dice, d = Dice(0), 32
    maps = {name: dice.normal(2, d, d) / 30 for name in ("w_q", "w_k", "w_v", "w_o")}
    stages = [Affine(dice.normal(4, d)), Attention(AttentionLayer(**maps)), TokenMean(tokens)]
    network = Network(stages, Head(dice.normal(3, d), dice.normal(3)))
    before = peak_memory()
    Margins(network, dice.normal(tokens, 4))._batches
    return peak_memory() - before

torch.set_num_threads(1)
jets.Jets.affordable = staticmethod(lambda walk, region: False)
grown(2)  # imports, and what is made once
print(grown(33))
"""


def test_attention_of_many_tokens_is_measured_in_little_memory() -> None:
    """A row after the other: what all rows need of keys at once would be 33 times 18 MB."""
    straight = dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536")  # what is free goes back to the system
    done = subprocess.run(
        [sys.executable, "-c", _LARGE_ATTENTION], capture_output=True, text=True, check=True, env=straight
    )
    assert 50 < float(done.stdout) < 400


def test_two_ways_to_know_a_derived_place_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """First-order rows that follow from a normalisation are those of covectors of their own."""
    network, x = _derived(2, monkeypatch)
    derived = Margins(network, x[0])
    follow = {i: derived.first_order(i) for i in derived._batches.derived}
    monkeypatch.setattr(batches, "_NUMBERS", 1e9)
    own = Margins(network, x[0])
    assert follow
    assert all(torch.allclose(rows, own.first_order(i), atol=1e-12) for i, rows in follow.items())


def test_glances_alone_find_a_radius_of_what_is_vast(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = _derived(1, monkeypatch)
    usual = Margins(network, x[0]).largest(1e-2)
    monkeypatch.setattr(margins, "_LARGE", 0)
    monkeypatch.setattr(batches, "_VAST", 0)
    forms = Margins(network, x[0])
    glanced = forms.largest(1e-2)
    assert 0.5 * usual < glanced <= 1.02 * usual
    assert forms.decide(glanced).least > 0
    assert glanced < float(MinimalAttack(steps=30)(network, x, network(x).argmax(-1)).radius)
