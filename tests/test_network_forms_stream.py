"""Functions that follow from the residual stream: attacked, and the same whatever is kept, merged, pushed or pulled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forms_cases import displacement, region, worst_excess
from holdfast import AttentionLayer
from holdfast.attacks.minimal import MinimalAttack
from holdfast.compositions import certify_inputs
from holdfast.compositions.forms import Margins, batches, jets, stream
from holdfast.errors import MemoryLimitError
from holdfast.layers import Attention, ClassToken, LayerNorm, Mlp, Piece, TokenMean
from holdfast.network import Head, Network, Residual
from holdfast.testing.draw import Dice
from test_network_forms_pieces import draw

D, TOKENS = 4, 5


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits but what follows from the stream."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_MEMORY", 0)


def deep(
    seed: int, kinds: str = "AMAMCM", size: float = 0.6, kappa: float = 1e-3, bend: float = 1.0
) -> tuple[Network, Tensor]:
    """Branches of attention and of units, and where the class token alone is left; and one input.

    Normalisations with a large kappa are nearly affine, as are units with a small bend.
    """
    dice = Dice(seed)

    def norm() -> LayerNorm:
        return LayerNorm((1 + kappa) ** 0.5 * torch.exp(0.3 * dice.normal(D)), 0.3 * dice.normal(D), kappa)

    def attention() -> Attention:
        maps = {name: size / D**0.5 * dice.normal(2, D, 3) for name in ("w_q", "w_k", "w_v")}
        return Attention(AttentionLayer(**maps, w_o=size / 2 * dice.normal(2, 3, D), b_q=0.3 * dice.normal(2, 3)))

    def units() -> Mlp:
        w1, w2 = bend * size / D**0.5 * dice.normal(D, 6), size / bend / 6**0.5 * dice.normal(6, D)
        return Mlp(w1, 0.3 * dice.normal(6), "gelu", w2, 0.3 * dice.normal(D))

    made: dict[str, list[Piece | Residual]] = {"C": [ClassToken(1)], "N": [norm()]}
    stages: list[Piece | Residual] = []
    for kind in kinds:
        branch = attention if kind == "A" else units
        stages += made[kind] if kind in made else [Residual((norm(), branch()))]
    pool: list[Piece | Residual] = [] if "C" in kinds else [TokenMean(TOKENS)]
    head = Head(dice.normal(3, D), 0.3 * dice.normal(3))
    return Network([*stages, *pool], head, kinds), dice.normal(1, TOKENS, D)


CASES = [("AMAMCM", 0.003), ("AAN", 0.01), ("MMAMN", 0.01), ("AMACMN", 0.003), ("A", 0.05), ("MA", 0.02)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("kinds", "scale"), CASES)
def test_no_attack_goes_beyond(kinds: str, scale: float, seed: int) -> None:
    network, x = deep(seed, kinds)
    forms = Margins(network, x[0])
    assert forms._batches.stream is not None
    assert forms.at(scale).losses["normalisation rest"] > 0
    assert all(bool(torch.isfinite(high).all()) for _, high in forms.beyond.values())
    assert worst_excess(forms, x, scale, None, seed) < 1e-12


@pytest.mark.parametrize(("kinds", "scale"), CASES)
def test_the_stream_keeps_within_what_is_carried(kinds: str, scale: float) -> None:
    """Token by token, the lengths of what δ has beyond first order."""
    _check_carried(*deep(2, kinds), scale)


@pytest.mark.parametrize(
    ("kinds", "kappa", "bend"), [("MN", 1e4, 1.0), ("AN", 1e4, 1.0), ("AMN", 1e4, 1e-4), ("MN", 1e-3, 1e-4)]
)
def test_each_part_of_what_branches_add_counts(kinds: str, kappa: float, bend: float) -> None:
    """Where all other parts are small: units, attention, attention behind which units are affine, and the norm."""
    for seed in range(3):
        _check_carried(*deep(seed, kinds, 1.0, kappa, bend), 0.02)


def _check_carried(network: Network, x: Tensor, scale: float) -> None:
    forms = Margins(network, x[0])
    forms.at(scale)
    carried = forms._batches.stream
    assert carried is not None
    before = {id(place.piece): i for i, place in enumerate(forms.walk.places)}
    G = region(x, scale, None, 3, 300)[0]
    for i in carried._entered:
        phi, u = carried._at(i), forms.walk.places[i].u

        def moved(G: Tensor, i: int = i, u: Tensor = u) -> Tensor:
            return displacement(network, x + G, before, i) - u

        _, first = torch.func.jvp(
            lambda t, moved=moved: moved(t * G), (torch.zeros(()).double(),), (torch.ones(()).double(),)
        )
        rest = (moved(G) - first).norm(dim=-1).amax(0)
        seen = ~torch.isnan(phi)
        assert bool(seen.any())
        assert bool((rest <= phi + 1e-12)[seen].all())


def test_what_is_kept_of_first_order_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = deep(0)
    kept = Margins(network, x[0]).at(0.003).margins
    monkeypatch.setattr(stream, "_ROOM", 0)
    monkeypatch.setattr(stream, "_CHUNK", 50)
    assert torch.allclose(Margins(network, x[0]).at(0.003).margins, kept, rtol=1e-6)


def test_sources_that_are_merged_say_less(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = deep(0, "AMAMAM")
    apart = Margins(network, x[0]).at(0.003)
    monkeypatch.setattr(stream, "_SOURCES", 0)
    forms = Margins(network, x[0])
    assert forms.at(0.003).least < apart.least
    assert worst_excess(forms, x, 0.003, None, 0) < 1e-12


def test_tokens_that_are_pulled_say_the_same_as_those_that_are_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = deep(0, "AMAMACM")
    pulled = Margins(network, x[0]).at(0.002)
    monkeypatch.setattr(stream, "_FEW", 0.0)
    pushed = Margins(network, x[0]).at(0.002)
    assert pulled.least == pytest.approx(pushed.least, rel=1e-9)


@pytest.mark.parametrize("kinds", ["AMAMCM", "AMN"])
def test_a_radius_is_found_below_the_attack(kinds: str) -> None:
    network, x = deep(1, kinds)
    (record,) = certify_inputs(network, x, method="forms")
    attack = float(MinimalAttack(steps=30)(network, x, torch.tensor([record.prediction])).radius)
    assert 1e-3 < record.radius <= attack


def test_other_networks_are_refused_for_their_memory() -> None:
    network, x = draw("post-norm", 0)
    with pytest.raises(MemoryLimitError, match="forms follows the numbers"):
        Margins(network, x[0]).at(0.01)
    network, x = deep(0, "AM")
    with pytest.raises(MemoryLimitError, match="forms follows the numbers"):
        Margins(network, x[0], torch.ones_like(x[0])).at(0.01)
