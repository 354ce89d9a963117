"""What branches do to the rest of the stream: every term of the bounds, where it is the one that counts."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer
from holdfast.compositions.forms import Margins, batches, jets
from holdfast.compositions.forms.normalised import Normalised
from holdfast.compositions.forms.passing import Passing, vector_rests
from holdfast.compositions.forms.single import TokenMoves
from holdfast.compositions.forms.softmax import Softmax
from holdfast.layers import Attention, LayerNorm, Mlp, TokenMean
from holdfast.network import Head, Network, Residual
from holdfast.testing.draw import Dice
from test_compositions_telescoped_rounding import exact, value

D, TOKENS = 4, 3
HEAD = Head(torch.eye(2, 1).double(), torch.tensor([1.0, 0.0]))


def behind_a_norm(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Passing, Normalised, Tensor]:
    """A branch of a network that follows from the stream, its normalisation, and the covectors of its functions."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_MEMORY", 0)
    dice = Dice(4)
    maps = {name: dice.normal(2, D, 3) for name in ("w_q", "w_k", "w_v")}
    layer = AttentionLayer(**maps, w_o=dice.normal(2, 3, D), b_q=dice.normal(2, 3))
    units = Mlp(dice.normal(D, 5), dice.normal(5), "gelu", dice.normal(5, D), dice.normal(D))
    norm = LayerNorm(torch.exp(0.5 * dice.normal(D)), dice.normal(D), 1e-3)
    branch = Residual((norm, Attention(layer) if kind == "attention" else units))
    network = Network([branch, TokenMean(TOKENS)], Head(dice.normal(3, D), dice.normal(3)))
    forms = Margins(network, dice.normal(TOKENS, D))
    forms.at(1e-3)
    entered, local = forms._batches.stream._entered[0], forms.walk.local(0)  # type: ignore[union-attr]
    assert entered.behind is not None
    assert isinstance(local, Normalised)
    return entered.behind, local, forms.walk.local(1).covectors(forms.tokens[1])[0].whole


@pytest.mark.parametrize("kind", ["attention", "units"])
@pytest.mark.parametrize("token", range(TOKENS))
def test_functions_see_what_one_token_has_beyond_first_order(
    kind: str, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else being 0, the supremum of c·(scale ⊙ (w - n a + z)) is known: of what is carried, of n, and of w."""
    behind, norm, C = behind_a_norm(kind, monkeypatch)
    one, none = torch.eye(TOKENS).double()[token], torch.zeros(TOKENS).double()
    still = TokenMoves(none, none, none, none, none, none, 0.0)
    m, n = C[:, token] * norm._scale, norm._n[token]
    along = m @ n
    truths = {
        "carried": (replace(still, carried=one), (m - along.unsqueeze(-1) * n).norm(dim=-1)),
        "along": (replace(still, beyond=one), along.abs()),
        "turned": (replace(still, rest=one, a=one), m.norm(dim=-1)),
        "turned by what is beyond": (replace(still, rest=one, beyond=one), m.norm(dim=-1)),
        "rounded": (replace(still, tiny=one), m.norm(dim=-1)),
    }
    for moves, truth in truths.values():
        assert bool((behind.functions(moves) >= truth * (1 - 1e-9)).all())
        assert bool((behind.functions(moves) > 0).any())


def test_what_a_normalisation_adds_itself() -> None:
    """By n(g - 1 + a) + w(g - 1), also where one of both vanishes."""
    dice = Dice(1)
    n = torch.nn.functional.normalize(dice.normal(500, D), dim=-1)
    across = dice.normal(500, D)
    across = torch.nn.functional.normalize(across - (across * n).sum(-1, keepdim=True) * n, dim=-1)
    cosine = torch.linspace(-1, 1, 500).double().unsqueeze(-1)
    w = 0.1 * (cosine * n + (1 - cosine.square()).clamp(min=0.0).sqrt() * across)
    a, b = (w * n).sum(-1), w.square().sum(-1)
    g = (1 + 2 * a + b).rsqrt()
    z = n * (g - 1 + a).unsqueeze(-1) + w * (g - 1).unsqueeze(-1)
    none = torch.zeros(500).double()
    for long, rest in ((w.norm(dim=-1), none), (none, w.norm(dim=-1))):
        own = TokenMoves(none, none, long, rest, a.abs(), (g - 1 + a).abs(), 1.0).own
        assert bool((z.norm(dim=-1) <= own * (1 + 1e-9) + 1e-15).all())
        assert bool((own <= 4 * 0.01).all())


#: Three tokens with a number each for queries, keys and values; by how much these may move; how tight the bound is.
HEADS = {
    "queries and keys": ([[0, 0, 1], [0, 0, -2], [0, 0, 3]], [[1, 1, 0]] * 3, 0.05, 0.2),
    "keys and values": ([[1, 1, 2], [1, -1, 2], [1, 0, 2]], [[0, 1, 1]] * 3, 0.05, 0.1),
    "keys alone": ([[1, 1, 4], [1, -1, 0], [1, 0, 0]], [[0, 1, 0]] * 3, 0.1, 0.1),
    "one key in particular": ([[1, -4, 0], [1, 0, 1], [1, 0, -1]], [[0, 5, 0], [0, 0.05, 0], [0, 0.05, 0]], 1.0, 0.1),
}


@pytest.mark.parametrize("moving", HEADS)
def test_the_length_of_a_heads_rest(moving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes in which one term of the rest is larger than all others: bilinear, of values, of α, and of N E[α]."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    at, half, scale, tight = HEADS[moving]
    x, shape = (torch.tensor(rows, dtype=torch.float64) for rows in (at, half))
    w_q, w_k, w_v = torch.eye(3, dtype=torch.float64).reshape(3, 1, 3, 1)
    piece = Attention(AttentionLayer(w_q, w_k, w_v, torch.ones(1, 1, 1).double(), scale=1.0))
    forms = Margins(Network([piece, TokenMean(3)], HEAD), x, shape)
    forms.at(scale)
    local = forms.walk.local(0)
    assert isinstance(local, Softmax)
    heads = local._heads[None]
    bound = vector_rests(heads, heads.value_norms)[0]
    G = (2 * torch.rand(20000, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1) * shape
    G = torch.cat([G, G.sign() * shape]) * scale

    def moved(t: Tensor) -> Tensor:
        return piece.value(x + t * G)

    zero = torch.zeros((), dtype=torch.float64)
    start, first = torch.func.jvp(moved, (zero,), (zero + 1,))
    rest = (moved(zero + 1) - start - first).norm(dim=-1).amax(0)
    assert bool((rest <= bound).all())
    assert bool((rest >= tight * bound).any())


@pytest.mark.parametrize("far", [0.0, 1e3, 1e6])
def test_the_stream_knows_how_it_was_rounded(far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At scale 0 nothing moves but what rounding has moved, against 50 digits."""
    monkeypatch.setattr(jets.Jets, "affordable", lambda walk, region: False)
    monkeypatch.setattr(batches, "_MEMORY", 0)
    dice = Dice(2)

    def norm() -> LayerNorm:
        return LayerNorm(torch.exp(0.5 * dice.normal(D)), dice.normal(D), 1e-5)

    def attention() -> Attention:
        return Attention(AttentionLayer(*(dice.normal(2, D, 3) for _ in range(3)), dice.normal(2, 3, D)))

    units = Mlp(dice.normal(D, 5), dice.normal(5), "tanh", dice.normal(5, D), dice.normal(D))
    branches = [Residual((norm(), piece)) for piece in (attention(), units, attention())]
    network = Network([*branches, norm(), TokenMean(TOKENS)], Head(dice.normal(3, D), dice.normal(3)))
    x = dice.normal(TOKENS, D) + far
    forms = Margins(network, x)
    forms.at(0.0)
    stream = forms._batches.stream
    assert stream is not None
    with mpmath.workdps(50):
        u = exact(x)
        for i, branch in enumerate(branches):
            u = u + value(branch.pieces[1], value(branch.pieces[0], u))
            off = u - exact(forms.walk.places[2 * i + 2].u)
            rest = torch.tensor([float(mpmath.sqrt(row)) for row in (off * off).sum(-1)], dtype=torch.float64)
            assert bool((rest <= stream._at(2 * i + 2)).all())
            assert float(rest.amax()) > 0
