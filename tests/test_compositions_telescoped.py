"""Networks as polynomials: exact derivatives, what they leave out is bounded, and nothing that overflows is proved."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

from holdfast import AttentionLayer, NotApplicableError
from holdfast.attacks.minimal import MinimalAttack
from holdfast.attention.rotary import Rotary
from holdfast.compositions import compositions
from holdfast.compositions.telescoped.expansion import Expansion, refusal
from holdfast.compositions.telescoped.minimum import Cubic
from holdfast.data.digits import demo_digits
from holdfast.graph import to_network
from holdfast.layers import (
    Affine,
    ClassToken,
    Flatten,
    KinkedMlp,
    LayerNorm,
    Mlp,
    Place,
    RMSNorm,
    SmoothProject,
    TokenMean,
    sll,
    sll_diagonal,
)
from holdfast.layers.activation.functions import activations
from holdfast.layers.attention.piece import Attention
from holdfast.linalg import forms
from holdfast.linalg.graded import DEGREES, Graded, smaller
from holdfast.linalg.squarings import gram_norm, thin_gram_norm
from holdfast.models import digits
from holdfast.network.centre import Centre
from holdfast.network.network import Head, Network, Residual
from holdfast.testing.draw import Dice

KINDS = ("pre-norm", "post-norm", "rms and masks", "sll", "place", "branches", "linear")
N, D = 3, 4


def draw_network(kind: str, seed: int, size: float = 1.0) -> tuple[Network, Tensor]:
    """A small network of one kind, with two inputs."""
    dice = Dice(seed)

    def attention(residual: float = 0.0, **options: object) -> Attention:
        maps = {name: size / D**0.5 * dice.normal(2, D, 2) for name in ("w_q", "w_k", "w_v")}
        biases = {name: 0.3 * dice.normal(2, 2) for name in ("b_q", "b_k", "b_v")} | {"b_o": 0.3 * dice.normal(D)}
        return Attention(
            AttentionLayer(**maps, w_o=size / 2 * dice.normal(2, 2, D), **biases, residual=residual, **options)  # type: ignore[arg-type]
        )

    def mlp(phi: str, residual: float = 0.0) -> Mlp:
        w1, w2 = size / D**0.5 * dice.normal(D, 5), size / 5**0.5 * dice.normal(5, D)
        return Mlp(w1, 0.3 * dice.normal(5), phi, w2, 0.3 * dice.normal(D), residual)

    def norm() -> LayerNorm:
        return LayerNorm(1 + 0.3 * dice.normal(D), 0.3 * dice.normal(D), 1e-5)

    def affine() -> Affine:
        return Affine(0.5 * dice.normal(D, D), dice.normal(D))

    x, w = dice.normal(2, N, D), dice.normal(D, 6)
    allowed = torch.tensor([[[1, 0, 1], [1, 1, 0], [1, 1, 1]], [[1, 1, 0], [0, 1, 0], [1, 1, 0]]]).bool()
    rms = RMSNorm(torch.ones(D).double(), 1e-6), RMSNorm(dice.normal(D), 1e-3)
    layer = sll(w, dice.normal(6), sll_diagonal(w, torch.ones(6).double()), activations["centred-softplus"])
    stages = {
        "pre-norm": lambda: [Residual((norm(), attention())), Residual((norm(), mlp("gelu"))), norm(), ClassToken(0)],
        "post-norm": lambda: [
            attention(1.0),
            norm(),
            mlp("silu", 1.0),
            norm(),
            attention(1, causal=True),
            TokenMean(N),
        ],
        "rms and masks": lambda: [
            affine(),
            Residual((rms[0], attention(mask=allowed))),
            Residual((rms[1], affine(), mlp("tanh"))),
            ClassToken(1),
        ],
        "sll": lambda: [
            SmoothProject(2.0),
            layer,
            Residual((affine(),)),
            attention(0.5, score_bias=dice.normal(2, N, N)),
            TokenMean(N),
        ],
        "place": lambda: [
            Place(x[0], [1]),
            Residual((norm(), attention())),
            Residual((norm(), mlp("gelu"))),
            Flatten(),
        ],
        "branches": lambda: [
            Residual((affine(),)),
            Residual((mlp("gelu-tanh"),)),
            Residual((norm(), affine(), attention(), affine())),
            TokenMean(N),
        ],
        "linear": lambda: [affine(), TokenMean(N)],
    }[kind]()
    width = N * D if kind == "place" else D
    network = Network(stages, Head(dice.normal(3, width), dice.normal(3)), kind)
    return network, 0.1 * dice.normal(2, 1, D) if kind == "place" else x


@functools.cache
def expanded(kind: str, seed: int = 0, size: float = 1.0) -> tuple[Network, Tensor, Expansion]:
    network, x = draw_network(kind, seed, size)
    with torch.no_grad():
        return network, x, Expansion(network, x)


def margins(network: Network, y: Tensor, x: Tensor) -> Tensor:
    logits = network(x)
    return logits.gather(-1, y.expand(logits.shape[:-1]).unsqueeze(-1)) - logits


def polynomial(at: Expansion, G: Tensor) -> Tensor:
    """(s, b, classes) the margins' cubic polynomials at G (s, b, n, d)."""
    G = G.flatten(-2)
    bent = torch.einsum("bjpq,sbp,sbq->sbj", at.hessian, G, G) / 2
    twisted = torch.einsum("bjpqr,sbp,sbq,sbr->sbj", at.twist, G, G, G) / 6
    return at.margins + torch.einsum("bjp,sbp->sbj", at.gradient, G) + bent + twisted


def on_ball(G: Tensor, eps: Tensor) -> Tensor:
    return G * (eps / torch.linalg.vector_norm(G, dim=(-2, -1))).clamp(max=1.0)[..., None, None]


def ascend(network: Network, at: Expansion, eps: Tensor, left_out: Tensor, seed: int, steps: int) -> Tensor:
    """(b, classes) the largest share of what is left out that an ascent finds, on the sphere and inside of it."""
    G = Dice(seed).normal(64, *at.x.shape)
    G = on_ball(1e9 * G, eps)
    G[32:] *= torch.linspace(0.01, 1, 32).double().reshape(-1, 1, 1, 1)
    best = torch.zeros_like(left_out)
    for _ in range(steps):
        G = G.detach().requires_grad_()
        off = (margins(network, at.prediction, at.x + G) - polynomial(at, G)).abs()
        share = (off - 1e-12) / (left_out + 1e-30)
        best = torch.maximum(best, share.detach().nan_to_num(nan=0.0).amax(0))
        (slope,) = torch.autograd.grad(off.amax(-1).sum(), G)
        length = torch.linalg.vector_norm(slope, dim=(-2, -1), keepdim=True).clamp(min=1e-300)
        G = on_ball(G + 0.3 * eps[..., None, None] * slope / length, eps)
    return best


# -- derivatives


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_are_exact(kind: str) -> None:
    network, x, at = expanded(kind)
    for i in range(2):

        def f(v: Tensor, i: int = i) -> Tensor:
            batch = torch.cat([x[:i], v.reshape(1, *x.shape[1:]), x[i + 1 :]])  # masks belong to inputs
            return margins(network, at.prediction, batch)[i]

        v = x[i].flatten()
        first = torch.func.jacfwd(f)
        second = torch.func.jacfwd(first)
        expected = f(v), first(v), second(v), torch.func.jacfwd(second)(v)
        for mine, its in zip((at.margins, at.gradient, at.hessian, at.twist), expected, strict=True):
            assert torch.allclose(mine[i], its, rtol=1e-11, atol=1e-12 * (1 + float(its.abs().max())))


# -- what is left out


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_found_is_above_what_is_left_out(kind: str) -> None:
    network, _, at = expanded(kind)
    found = torch.zeros(())
    for radius in (1e-3, 0.02, 0.2):
        eps = torch.full((2,), radius, dtype=torch.float64)
        left_out = at.left_out(eps)
        share = ascend(network, at, eps, left_out, seed=1, steps=4)
        assert float(share.max()) <= 1.0, f"eps {radius}: {share.tolist()}"
        found = torch.maximum(found, share.max())
    assert float(found) > 0.001 or kind == "linear"  # the bound is not idle


def test_what_a_piece_leaves_out_reaches_the_next() -> None:
    """100 gelu(tanh(x)/10) at 0, where gelu is nearly quadratic: what is left out comes from the bend of tanh."""
    one, zero = torch.ones(1, 1).double(), torch.zeros(1).double()
    stages = [Mlp(one, zero, "tanh", one, zero), Mlp(0.1 * one, zero, "gelu", 100 * one, zero)]
    network = Network(stages, Head(torch.tensor([[1.0], [0.0]]).double(), torch.tensor([1.0, 0.0]).double()))
    at = Expansion(network, torch.zeros(1, 1, 1).double())
    eps = torch.tensor([0.02]).double()
    G = eps.reshape(1, 1, 1, 1)
    off = (margins(network, at.prediction, at.x + G) - polynomial(at, G)).abs()[0, 0, 1]
    assert 0.7 < float(off / at.left_out(eps)[0, 1]) <= 1


@pytest.mark.parametrize("kind", ["pre-norm", "post-norm", "sll", "branches"])
def test_forms_hold_what_arrives_at_every_piece(kind: str) -> None:
    """Of its input beyond degree 2: rests of earlier pieces, through Jacobians and past branches."""
    network, x = draw_network(kind, 0)
    x, radius = x[:1], 0.02
    at = Expansion(network, x)
    eps = torch.full((1,), radius, dtype=torch.float64)
    g = Dice(4).normal(100, at.directions.p)
    g = g / torch.linalg.vector_norm(g, dim=-1, keepdim=True)
    G = g * torch.linspace(0.1, 1, 100).double().unsqueeze(-1) * radius

    def inputs(v: Tensor) -> tuple[Tensor, ...]:
        """Of every piece; v (…, p)."""
        v, found = v.reshape(*v.shape[:-1], *x.shape[1:]), []
        for stage in network.stages:
            branch = v
            for piece in stage.pieces if isinstance(stage, Residual) else (stage,):
                found.append(branch)
                branch = piece.value(branch)
            v = v + branch if isinstance(stage, Residual) else branch
        return tuple(found)

    start, moved = inputs(x.flatten()), inputs(x.flatten() + G)
    slope = torch.func.jacfwd(inputs)
    first, second = slope(x.flatten()), torch.func.jacfwd(slope)(x.flatten())
    carried: list[tuple[Tensor | None, Tensor]] = []
    best = 0.0
    for k, spot in enumerate(at.spots):
        third = None
        if spot.curved is not None:
            form = at._arriving(k, carried, eps)
            third = spot.curved.third(form, eps)
            straight = torch.einsum("ndp,sp->snd", first[k], G) + torch.einsum("ndpq,sp,sq->snd", second[k], G, G) / 2
            rest = torch.linalg.vector_norm(moved[k] - start[k] - straight, dim=-1)
            bound = radius * torch.einsum("sp,bnpq,sq->sn", g, form, g).sqrt()
            assert bool((rest <= bound + 1e-13).all()), k
            best = max(best, float((rest / (bound + 1e-12)).max()))
        carried.append((third, spot.defects[0] + spot.defects[1] * eps + spot.defects[2] * eps**2))
    assert best > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_found_in_many_networks_is_above_what_is_left_out(kind: str, size: float) -> None:
    for seed in range(1, 6):
        network, _, at = expanded(kind, seed, size)
        for radius in (1e-3, 0.02, 0.1, 0.5, 2.0):
            eps = torch.full((2,), radius, dtype=torch.float64)
            share = ascend(network, at, eps, at.left_out(eps), seed, steps=15)
            assert float(share.max()) <= 1.0, f"seed {seed}, eps {radius}: {share.tolist()}"


@pytest.mark.parametrize("kind", KINDS)
def test_more_is_left_out_on_larger_balls(kind: str) -> None:
    _, _, at = expanded(kind)
    radii = torch.logspace(-10, 1, 23, dtype=torch.float64)
    values = torch.stack([at.left_out(eps.expand(2)) for eps in radii]).nan_to_num(nan=math.inf)
    assert bool((values[1:] >= values[:-1] * (1 - 1e-9)).all())


def test_inputs_do_not_see_each_other() -> None:
    network, x, at = expanded("pre-norm")
    eps = torch.tensor([0.01, 0.03], dtype=torch.float64)
    together = at.left_out(eps)
    for i in range(2):
        alone = Expansion(network, x[i : i + 1])
        assert torch.allclose(alone.left_out(eps[i : i + 1])[0], together[i], rtol=1e-9, atol=0)
        assert torch.allclose(alone.twist[0], at.twist[i], rtol=1e-10, atol=1e-12)


# -- whole certificates


@pytest.mark.parametrize("kind", ["branches", "sll", "place"])
def test_a_proved_radius_is_below_an_attack(kind: str) -> None:
    network, x = draw_network(kind, 5, 0.7)
    centre = Centre(network, x)
    radii = compositions["telescoped"](centre)
    attack = MinimalAttack(steps=30)(network, x, centre.prediction)
    assert bool((radii.radius > 0).any())
    assert bool((radii.radius <= attack.radius).all())


def test_every_input_keeps_its_own_mask() -> None:
    network, x = draw_network("rms and masks", 5, 0.7)
    together = compositions["telescoped"](Centre(network, x)).radius
    branch = network.stages[1]
    assert isinstance(branch, Residual)
    attention = branch.pieces[1]
    assert isinstance(attention, Attention)
    assert attention.layer.mask is not None
    for i in range(2):
        masked = Attention(attention.layer.with_mask(attention.layer.mask[i]))
        stages = [network.stages[0], Residual((branch.pieces[0], masked)), *network.stages[2:]]
        alone = compositions["telescoped"](Centre(Network(stages, network.head), x[i : i + 1])).radius
        assert float(alone) == pytest.approx(float(together[i]), rel=1e-3)
        assert float(alone) > 0


@pytest.mark.slow
def test_digits_margins_stay_above_what_is_proved() -> None:
    """An attack on the smallest margin inside a ball never gets below the polynomial's least value less the rest."""
    converted = to_network(digits.load_digits_vit(), demo_digits().images[:2])
    network, images = converted.network, converted.encode(demo_digits().images[:2]).double()
    with torch.no_grad():
        at = Expansion(network, images)
        cubic = Cubic(at.gradient, at.hessian, at.twist)
    own = torch.nn.functional.one_hot(at.prediction, 10).bool()
    for radius in (0.003, 0.01, 0.03):
        eps = torch.full((2,), radius, dtype=torch.float64)
        with torch.no_grad():
            left_out = at.left_out(eps)
            proved = at.margins + cubic.least(eps.unsqueeze(-1).expand_as(left_out)) - left_out
        # One start for every class; the own class has no slope.
        G = 1e-6 * Dice(0).normal(10, *images.shape) - at.gradient.movedim(1, 0).unflatten(-1, images.shape[1:])
        for _ in range(8):
            G = on_ball(1e9 * G, eps).detach().requires_grad_()
            reached = margins(network, at.prediction, images + G)
            goal = reached.diagonal(dim1=0, dim2=2)
            assert bool((goal >= proved)[~own].all())
            off = (reached - polynomial(at, G)).abs()
            assert bool((off <= left_out + 1e-11)[:, ~own].all())
            (slope,) = torch.autograd.grad(goal.sum(), G)
            length = torch.linalg.vector_norm(slope, dim=(-2, -1), keepdim=True)
            G = G.detach() - 0.3 * radius * slope / length.clamp(min=1e-300)


# -- refusals, and numbers that overflow


def test_pieces_without_an_expansion_are_refused() -> None:
    head, eye = Head(torch.eye(2).double(), torch.zeros(2).double()), torch.eye(2).double()
    kinked = Network([KinkedMlp(eye, torch.zeros(2), "relu", eye, torch.zeros(2)), TokenMean(3)], head)
    assert refusal(kinked) == "KinkedMlp has no expansion"
    with pytest.raises(NotApplicableError, match="network cannot be expanded: KinkedMlp has no expansion"):
        Expansion(kinked, torch.zeros(1, 3, 2).double())
    maps = [torch.ones(1, 2, 2).double() for _ in range(4)]
    turned = AttentionLayer(*maps, rotary=Rotary(torch.ones(3, 2).double(), torch.zeros(3, 2).double()))
    assert refusal(Network([Attention(turned), TokenMean(3)], head)) is None
    sunk = AttentionLayer(*maps, sinks=torch.zeros(1).double())
    assert refusal(Network([Attention(sunk), TokenMean(3)], head)) == "Attention has no expansion with sinks"
    assert refusal(Network([], head)) == "a network without pieces has no expansion"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linear"])
@pytest.mark.parametrize("radius", [10.0, 1e3, 1e30, 1e200, math.inf, math.nan])
def test_nothing_is_proved_where_numbers_overflow(kind: str, radius: float) -> None:
    _, _, at = expanded(kind)
    left_out = at.left_out(torch.full((2,), radius, dtype=torch.float64))
    others = ~torch.nn.functional.one_hot(at.prediction, 3).bool()
    assert not bool((left_out < at.margins)[others].any())


@pytest.mark.parametrize("far", [1e160, math.inf, math.nan])
@pytest.mark.parametrize("kind", ["pre-norm", "post-norm"])
def test_nothing_is_proved_at_an_input_that_overflows(kind: str, far: float) -> None:
    """And another one beside it does not suffer."""
    network, x = draw_network(kind, 0)
    eps = torch.full((2,), 1e-4, dtype=torch.float64)
    own = torch.nn.functional.one_hot(Expansion(network, x).prediction, 3).bool()
    proved = []
    for place in (0.0, far):
        at = Expansion(network, x + torch.tensor([0.0, place]).double().reshape(2, 1, 1) * x[:1])
        least = Cubic(at.gradient, at.hessian, at.twist).least(eps.unsqueeze(-1).expand(2, 3))
        proved.append((at.margins + least - at.left_out(eps)).masked_fill(own, math.inf).amin(-1))
    assert float(proved[0][0]) == pytest.approx(float(proved[1][0]), rel=1e-9)
    assert not float(proved[1][1]) > 0


# -- the least value of a cubic


def draw_cubic(seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Of every kind: without a gradient, without a twist, without both, and the hard case of a trust region."""
    dice = Dice(seed)
    p = dice.pick(1, 2, 3, 4, 6)
    g, H, T = dice.normal(p), dice.normal(p, p), dice.normal(p, p, p)
    H, T = H + H.mT, sum(T.permute(order) for order in itertools.permutations(range(3))) / 6
    kind = seed % 6
    if kind == 1:
        g = g * 0
    if kind in (2, 4):
        T = T * 0
    if kind == 3:
        H = H * 0
    if kind == 4:
        lowest = torch.linalg.eigh(H).eigenvectors[:, 0]
        g = g - lowest * (lowest @ g)
    if kind == 5:
        H = H @ H.mT
    return g, H, T, dice.pick(1e-8, 1e-3, 0.1, 1.0, 10.0, 1e5)


@pytest.mark.parametrize("seed", range(36))
def test_no_value_of_a_cubic_is_below_the_least(seed: int) -> None:
    g, H, T, eps = draw_cubic(seed)
    least = float(Cubic(g, H, T).least(torch.tensor(eps, dtype=torch.float64)))
    G = Dice(seed).normal(300, len(g))
    G = G / torch.linalg.vector_norm(G, dim=-1, keepdim=True)
    G[100:200] *= torch.rand(100, 1, generator=torch.Generator().manual_seed(seed)).double()
    G = eps * G
    size = float(g.norm() * eps + H.norm() * eps**2 + T.norm() * eps**3)
    best = math.inf
    for _ in range(150):
        bent, twisted = G @ H, torch.einsum("sq,sr,pqr->sp", G, G, T)
        best = min(best, float((G * (g + bent / 2 + twisted / 6)).sum(-1).min()))
        G = G - (g + bent + twisted / 2) * (eps**2 / size)
        G = G * (eps / torch.linalg.vector_norm(G, dim=-1, keepdim=True)).clamp(max=1.0)
    assert least <= best + 1e-14 * size
    if not T.any():
        assert least >= best - 1e-3 * size  # a trust region is solved, but for what the descent has left


def test_a_cubic_that_is_not_a_number_has_no_least_value() -> None:
    eps = torch.ones((), dtype=torch.float64)
    for bad in (math.nan, math.inf):
        for place in range(3):
            parts = [torch.ones(2).double(), torch.eye(2).double(), torch.zeros(2, 2, 2).double()]
            parts[place] = parts[place] + bad
            assert not float(Cubic(*parts).least(eps)) > -math.inf
    for huge in (1e200, math.inf, math.nan):
        cubic = Cubic(torch.ones(2).double(), torch.eye(2).double(), torch.ones(2, 2, 2).double())
        assert not float(cubic.least(torch.tensor(huge, dtype=torch.float64))) > -1e100


# -- norms, forms, degrees


@pytest.mark.parametrize("scale", [1e-160, 1e-150, 1e-100, 1e-8, 1.0, 1e8, 1e100, 1e150])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 3), (6, 6)])
def test_norms_by_squaring_are_above_the_true_ones(scale: float, shape: tuple[int, int]) -> None:
    dice = Dice(0)
    rows = dice.normal(40, *shape)
    rows[0] = 0
    rows[1:10] = rows[1:10, :, :1] @ rows[1:10, :1, :]
    found, true = thin_gram_norm(rows * scale) / scale, torch.linalg.matrix_norm(rows, 2)
    assert bool((found >= true * (1 - 1e-14)).all())
    assert bool((found[1:] <= 1.3 * true[1:]).all()) or scale < 1e-140
    gram = rows @ rows.mT
    error = dice.normal(*gram.shape)
    error = 1e-3 * (error + error.mT)
    length = torch.linalg.matrix_norm(error)
    found = gram_norm(gram * scale, length * scale) / scale**0.5
    assert bool((found >= torch.linalg.matrix_norm(gram + error, 2).sqrt() * (1 - 1e-14)).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e160])
def test_norms_of_what_overflows_are_not_small(bad: float) -> None:
    rows = torch.tensor([[bad, 1.0, -bad], [-bad, 1.0, 2.0]], dtype=torch.float64)
    assert not float(thin_gram_norm(rows)) < 1e100
    A = rows.mT @ rows
    for form in (A, forms.firm(A), forms.plus(A, A), forms.plus(A, torch.eye(3).double()), forms.product(A, A)):
        assert not float(forms.root(form)) < 1e100


@pytest.mark.parametrize("scale", [1e-90, 1e-10, 1.0, 1e40])
def test_forms_hold_sums_products_and_squares(scale: float) -> None:
    dice = Dice(1)
    G = dice.normal(200, 4)
    G = G / torch.linalg.vector_norm(G, dim=-1, keepdim=True)

    def size(A: Tensor) -> Tensor:
        return torch.einsum("sp,pq,sq->s", G, A, G)

    zero = torch.zeros(4, 4).double()
    for one, two in ((dice.normal(3, 4), scale * dice.normal(1, 4)), (zero, dice.normal(2, 4)), (zero, zero)):
        A, B = forms.of_rows(one), forms.of_rows(two)
        x, y = (torch.linalg.vector_norm(G @ rows.mT, dim=-1) for rows in (one, two))
        assert bool((size(A) >= x.square()).all())
        assert bool((size(B) >= y.square()).all())
        assert bool((size(forms.plus(A, B)) >= (x + y).square() * (1 - 1e-12)).all())
        assert bool((size(forms.product(A, B)) >= x * y * (1 - 1e-12)).all())
        assert float(forms.root(A)) >= float(torch.linalg.matrix_norm(one, 2)) * (1 - 1e-12)
        eps = torch.tensor([0.3]).double()
        squared = forms.square(A.unsqueeze(0), eps)[0]
        assert bool((size(squared) * 0.3**2 >= (size(A) * 0.3**2).square() * (1 - 1e-12)).all())
        assert bool((size(forms.unit(A, torch.tensor(2.0).double())) >= 4 * (1 - 1e-12)).all())


def test_degrees_hold_products_of_polynomials() -> None:
    """Numbers x_1 + x_2 + x_3 + x_R and y likewise: the parts of products are within the graded bounds."""
    dice = Dice(2)
    x, y = dice.normal(50, DEGREES + 1), dice.normal(50, DEGREES + 1)
    one, two = (Graded(tuple(z[:, :DEGREES].abs().unbind(-1)), z[:, DEGREES].abs()) for z in (x, y))
    both, total = one * two, x.sum(-1) * y.sum(-1)
    known = []
    for degree in range(1, DEGREES + 1):
        part = sum(
            (x[:, i - 1] * y[:, degree - i - 1] for i in range(1, degree)), start=torch.zeros(50, dtype=torch.float64)
        )
        assert bool((part.abs() <= both.parts[degree - 1] + 1e-15).all())
        known.append(part)
    assert bool(((total - sum(known)).abs() <= both.rest + 1e-14).all())
    assert bool((total.abs() <= both.total + 1e-14).all())
    least = smaller(both, both.times(2.0))
    assert all(torch.equal(a, b) for a, b in zip((*least.parts, least.rest), (*both.parts, both.rest), strict=True))
    assert torch.equal(both.all_rest().rest, both.total)
    assert not both.all_rest().parts[1].any()
