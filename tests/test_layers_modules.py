"""Layers for certifiable models: gains by construction, proved gains, exports, steps on the manifold."""

import math
from functools import partial

import pytest
import torch

from holdfast.errors import InputError, UnknownNameError
from holdfast.layers import (
    Chain,
    Convolution,
    Entrywise,
    Flattened,
    LayerProject,
    Linear,
    ManifoldStep,
    MaxMin,
    MeanPool,
    MergedTokens,
    Neighbourhoods,
    Patches,
    PositionCodes,
    SelfAttention,
    Shifts,
    Sll,
    Surroundings,
    UnitRowHead,
    WeightedSelection,
    manifold_parameters,
    plain,
    shift_scores,
)
from holdfast.layers.attention.content import content_off, content_use
from holdfast.layers.linear.manifold import direction, nearest_orthonormal
from holdfast.layers.piece import LinearPiece, SmoothPiece
from holdfast.layers.tokens.selection import Rearrangement, Selection
from holdfast.linalg import Ball, MatrixOperator, upper
from holdfast.linalg.arithmetic import Numerical, Proved
from holdfast.models import VisionTransformer

WIDTH, TOKENS = 6, 4
KINDS = ["orthogonal", "orthogonal-torch", "sll"]


def shaken(layer):
    """The layer in float64 with weights that training could have reached; those on the manifold stay there."""
    held = {id(p) for p in manifold_parameters(layer)}
    with torch.no_grad():
        for p in layer.parameters():
            if id(p) not in held:
                p.add_(0.3 * torch.randn_like(p))
    return layer.double()


LAYERS = {
    **{
        f"{kind} {shape}": lambda kind=kind, shape=shape: Linear(*shape, kind=kind, norm=0.7)
        for kind in KINDS
        for shape in ((6, 6), (6, 10), (6, 3))
    },
    "relu": lambda: Entrywise(WIDTH, "relu"),
    "abs": lambda: Entrywise(WIDTH, "abs"),
    "half-abs": lambda: Entrywise(WIDTH, "abs", on_half=True),
    "softplus": lambda: Entrywise(WIDTH, "softplus"),
    "half-smooth-abs": lambda: Entrywise(WIDTH, "smooth-abs", on_half=True, sharpness=3.0),
    "tanh": lambda: Entrywise(WIDTH, "tanh"),
    "maxmin": MaxMin,
    "hard": lambda: LayerProject(1.5),
    "smooth": lambda: LayerProject(1.5, smooth=True),
    "sll relu": lambda: Sll(WIDTH, Entrywise(9, "relu")),
    "sll softplus": lambda: Sll(WIDTH, Entrywise(9, "softplus")),
    "codes": lambda: PositionCodes(TOKENS, WIDTH),
    "mean": lambda: MeanPool(TOKENS),
    "flat": lambda: Flattened(TOKENS, WIDTH),
    "shifts": lambda: Shifts((2, 2), WIDTH),
    "neighbourhoods": lambda: Neighbourhoods((2, 2), WIDTH),
    "convolution": lambda: Convolution((2, 2), WIDTH, WIDTH),
    "surroundings": lambda: Surroundings((2, 2), WIDTH),
    "weighted convolution": lambda: Convolution((2, 2), WIDTH, WIDTH, weighted=True),
    "merged": lambda: MergedTokens((2, 2), WIDTH, 2),
    "chain": lambda: Chain(Linear(WIDTH, WIDTH, norm=0.5), Entrywise(WIDTH, "abs"), Linear(WIDTH, WIDTH, kind="sll")),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(sum(map(ord, request.param)))
    return shaken(LAYERS[request.param]())


def through(pieces, u):
    for piece in pieces:
        u = piece.value(u)
    return u


def test_pieces_compute_what_the_layer_computes(layer):
    x = 2 * torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    expected = layer(x).detach()
    assert torch.allclose(through(layer.pieces(), x), expected, rtol=1e-12, atol=1e-12)
    ball = through(layer.pieces(), Ball.exact(x))
    assert ((ball.mid - expected).abs() <= 2 * ball.rad + 1e-14).all()
    assert ball.rad.max() < 1e-12


def test_proved_gain_is_what_the_construction_promises(layer):
    x = 2 * torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    rho = Ball.exact(torch.tensor([0.1, 1.0], dtype=torch.float64))
    a, u, reach = Proved(), x, rho
    for piece in layer.pieces():
        reach = piece.reach(a, u, reach)
        u = piece.value(u)
    assert (reach.upper <= layer.gain * rho.mid * (1 + 1e-6)).all()


def test_no_attack_moves_a_layer_farther_than_its_gain(layer):
    """Gradient ascent on the movement; the gain is attained to a third, so the test has something to find."""
    torch.manual_seed(1)
    x = 2 * torch.randn(40, TOKENS, WIDTH, dtype=torch.float64)
    eps, attained = 0.5, 0.0
    delta = torch.randn_like(x)
    for _ in range(30):
        delta = (eps * delta / torch.linalg.matrix_norm(delta, keepdim=True)).requires_grad_()
        moved = torch.linalg.matrix_norm(layer(x + delta) - layer(x))
        attained = max(attained, float(moved.detach().max()) / eps)
        (delta,) = torch.autograd.grad(moved.sum(), delta)
    assert attained <= layer.gain * (1 + 1e-6)
    assert attained >= layer.gain / 3


def test_smooth_pieces_have_the_derivatives_of_the_layer(layer):
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    for piece in layer.pieces():
        if not isinstance(piece, SmoothPiece):
            return
        g = torch.randn(5, *x.shape, dtype=torch.float64)
        first = torch.stack([torch.func.jvp(piece.value, (x,), (each,))[1] for each in g])
        assert torch.allclose(piece.push(x, g), first, atol=1e-12)
        along = partial(piece.push, a=g[0])
        second = torch.stack([torch.func.jvp(along, (x,), (each,))[1] for each in g])
        assert torch.allclose(piece.push2(x, g, g[0]), second, atol=1e-12)
        c = torch.randn_like(piece.value(x))
        adjoint = (piece.pull(x, c) * g).sum((-2, -1))
        assert torch.allclose(adjoint, (c * piece.push(x, g)).sum((-2, -1)), atol=1e-12)
        bent = (piece.pull2(x, c, g[1]) * g).sum((-2, -1))
        assert torch.allclose(bent, (c * piece.push2(x, g, g[1])).sum((-2, -1)), atol=1e-12)
        x = piece.value(x)


@pytest.mark.parametrize("name", ["softplus", "smooth-abs", "tanh"])
def test_curvature_of_smooth_activations(name):
    activation = Entrywise(2, name, on_half=name == "smooth-abs", sharpness=5.0)
    (piece,) = activation.pieces()
    rho = torch.tensor([0.5], dtype=torch.float64)
    proved = piece.curvature(Proved(), torch.zeros(1, 2), Ball.exact(rho)).upper
    assert activation.curvature * (1 - 1e-9) <= float(proved) <= activation.curvature * (1 + 1e-6)
    assert float(piece.curvature(Numerical(), torch.zeros(1, 2), rho)) == pytest.approx(activation.curvature)
    t = torch.linspace(-4, 4, 4001, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(activation(torch.stack([t, t], 1))[:, 0].sum(), t, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), t)
    assert float(bend.abs().max()) == pytest.approx(activation.curvature, rel=1e-3)
    assert float(slope.detach().abs().max()) <= 1


def test_entries_beside_a_kink_have_no_curvature():
    assert Entrywise(2, "abs").curvature == math.inf
    assert not isinstance(Entrywise(2, "abs").pieces()[0], SmoothPiece)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 40), (24, 64), (64, 24)])
def test_norm_of_float32_maps(kind, shape):
    torch.manual_seed(0)
    for norm in (1.0, 0.25):
        linear = Linear(*shape, norm=norm, kind=kind)
        proved = float(upper(MatrixOperator(linear.weight.detach().double())).value)
        assert proved <= norm * (1 + 1e-6)
        if kind != "sll":
            assert proved >= norm * (1 - 1e-6)


def test_free_maps_promise_nothing():
    assert Linear(3, 3, kind="free").gain == math.inf
    assert SelfAttention(4, 2).gain == math.inf


def test_head_of_unit_rows():
    head = UnitRowHead(8, 3)
    with torch.no_grad():
        head.parametrizations.weight.original.mul_(torch.tensor([[5.0], [0.1], [2.0]]))
    assert torch.allclose(head.weight.norm(dim=1), torch.ones(3))


def test_patches_are_pixels_of_squares():
    image = torch.arange(32.0).reshape(1, 2, 4, 4)
    tokens = Patches(2, 4, 2)(image)
    assert tokens[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]
    (piece,) = Patches(2, 4, 2).pieces()
    assert isinstance(piece, LinearPiece)
    assert torch.equal(piece.value(image.reshape(1, 2, 16)), tokens)
    assert torch.equal(Patches(1, 4, 2)(image[:, 0]), Patches(1, 4, 2)(image[:, :1]))


def test_shifts_with_an_orthogonal_map_are_a_circular_convolution():
    torch.manual_seed(0)
    grid, width = (5, 6), 9
    shifts, mix = Shifts(grid, width), Linear(width, width, bias=False)
    x = torch.randn(2, 30, width)
    kernel = torch.zeros(width, width, 3, 3)
    for channel, (down, right) in enumerate(
        [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)]
    ):
        kernel[:, channel, 1 - down, 1 - right] = mix.weight[:, channel].detach()
    image = torch.nn.functional.pad(x.mT.reshape(2, width, *grid), (1, 1, 1, 1), mode="circular")
    expected = torch.nn.functional.conv2d(image, kernel).flatten(2).mT
    assert torch.allclose(mix(shifts(x)), expected, atol=1e-5)


def test_neighbourhoods_with_a_map_are_a_circular_convolution():
    torch.manual_seed(0)
    grid, width = (5, 6), 4
    around, mix = Neighbourhoods(grid, width), Linear(9 * width, 7, bias=False)
    x = torch.randn(2, 30, width)
    kernel = mix.weight.detach().reshape(7, 3, 3, width).permute(0, 3, 1, 2) / 3
    image = torch.nn.functional.pad(x.mT.reshape(2, width, *grid), (1, 1, 1, 1), mode="circular")
    expected = torch.nn.functional.conv2d(image, kernel).flatten(2).mT
    assert torch.allclose(mix(around(x)), expected, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grid", [(5, 6), (1, 3), (2, 1)])
def test_a_convolution_is_neighbourhoods_and_a_map(grid, weighted):
    torch.manual_seed(0)
    convolution = Convolution(grid, 4, 7, weighted=weighted).double()
    torch.nn.init.normal_(convolution.map.bias)
    if weighted:
        torch.nn.init.normal_(convolution.around.shares)
    x = torch.randn(2, grid[0] * grid[1], 4, dtype=torch.float64)
    expected = convolution.map(convolution.around(x))
    assert torch.allclose(convolution(x), expected, atol=1e-14)
    assert convolution.gain == 1.0


def test_neighbourhoods_keep_the_norm():
    x = torch.randn(3, 12, 5, dtype=torch.float64)
    assert torch.allclose(Neighbourhoods((3, 4), 5)(x).norm(), x.norm())


def test_shares_of_neighbours_add_up_to_what_lies_on_the_grid():
    torch.manual_seed(0)
    around = Surroundings((3, 4), 2).double()
    torch.nn.init.normal_(around.shares)
    shares = around.shares.softmax(0).detach()
    inside = torch.zeros(1, 12, 2, dtype=torch.float64)
    inside[0, 5] = 3.0  # all nine places that it goes to are on the grid
    corner = torch.zeros(1, 12, 2, dtype=torch.float64)
    corner[0, 0] = 1.0  # a neighbour to the right has it at its left
    assert torch.allclose(around(inside).norm(), inside.norm())
    assert torch.allclose(around(corner).square().sum(), shares[[0, 1, 3, 4]].sum())


def test_shares_that_underflow_can_be_trained() -> None:
    around = Surroundings((3, 3), 2)
    with torch.no_grad():
        around.shares[4] = 200.0
    around(torch.randn(1, 9, 2)).sum().backward()
    assert around.shares.grad is not None
    assert bool(torch.isfinite(around.shares.grad).all())


@pytest.mark.parametrize("own", [0, 1, 1.5, math.nan])
def test_the_own_share_is_between_0_and_1(own: float) -> None:
    with pytest.raises(InputError, match=rf"own is {own}; expected a share above 0 and below 1"):
        Surroundings((2, 2), 2, own)


def test_an_index_of_floats_is_refused() -> None:
    with pytest.raises(InputError, match=r"an index of torch.float32 \(2, 2\) does not choose"):
        Selection(torch.zeros(2, 2), (2, 2))


def test_a_weighted_convolution_starts_as_its_own_share():
    x = torch.randn(2, 12, 6)
    assert torch.allclose(Convolution((3, 4), 6, 6, weighted=True)(x), 0.75**0.5 * x, atol=1e-6)


def test_the_norm_of_a_weighted_selection_is_that_of_its_matrix():
    torch.manual_seed(0)
    index, weights = torch.randint(-1, 6, (4, 5)), torch.randn(4, 5, dtype=torch.float64)
    piece = WeightedSelection(index, weights, (3, 2))
    matrix = piece.value(torch.eye(6, dtype=torch.float64).reshape(6, 3, 2)).flatten(1)
    exact = torch.linalg.matrix_norm(matrix, 2).item()
    assert exact <= (1 + 1e-13) * float(piece.norm(Proved()).upper) <= exact * (1 + 1e-12)


def test_weights_of_another_shape_than_the_index_are_refused():
    with pytest.raises(InputError, match=r"weights have shape \(1, 2\); expected \(2, 2\)"):
        WeightedSelection(torch.zeros(2, 2, dtype=torch.int64), torch.ones(1, 2), (2, 2))


def test_an_index_that_uses_an_entry_too_often_is_refused():
    with pytest.raises(InputError, match="does not use every entry"):
        Rearrangement(torch.tensor([[0, 1], [1, 2]]), (2, 2))


@pytest.mark.parametrize(("grid", "heads"), [((4, 4), 8), ((1, 7), 4), ((2, 2), 6)])
def test_shift_scores_give_doubly_stochastic_attention(grid, heads):
    p = shift_scores(grid, heads, 5.0).double().softmax(-1)
    assert torch.allclose(p.sum(-2), torch.ones(heads, math.prod(grid), dtype=torch.float64))
    assert torch.allclose(torch.linalg.matrix_norm(p, 2), torch.ones(heads, dtype=torch.float64))
    different = min(heads, math.prod(grid))
    assert len({tuple(head.argmax(-1).tolist()) for head in p}) == different


@pytest.mark.parametrize("residual", [0.0, 1.0])
@pytest.mark.parametrize("positions", [None, (2, 2)])
def test_attention_is_its_attention_layer(residual, positions):
    torch.manual_seed(0)
    scores = None if positions is None else shift_scores(positions, 3, 2.0)
    attention = shaken(SelfAttention(6, 3, norm=0.5, position_scores=scores, residual=residual, score_norm=1.5))
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    layer = attention.layer()
    assert torch.allclose(layer(x), attention(x).detach(), atol=1e-12)
    assert torch.allclose(layer.attention(x), attention.probabilities(x).detach(), atol=1e-12)
    assert torch.linalg.matrix_norm(layer.w_v.movedim(0, 1).flatten(1), 2) <= 0.5 * (1 + 1e-6)
    assert torch.allclose(through(attention.pieces(), x), attention(x).detach(), atol=1e-12)


def test_content_off_and_its_use():
    torch.manual_seed(0)
    attention = SelfAttention(6, 2, position_scores=shift_scores((2, 2), 2, 1.0)).double()
    x = 3 * torch.randn(30, 4, 6, dtype=torch.float64)
    off = content_off(attention, x, batch=7)
    mean = attention.content_scores(x).mean(0)
    assert torch.allclose(off.probabilities(x)[3], (mean + attention.position_scores).softmax(-1))
    assert not torch.allclose(off(x), attention(x))
    use = content_use(attention, x, batch=11)
    p = attention.probabilities(x)
    assert float(use.total_variation[0]) == pytest.approx(float((p - p.mean(0)).detach().abs().sum(-1).mean() / 2))
    assert float(use.score_norm[0]) == pytest.approx(1.0)
    with torch.no_grad():
        attention.query.weight.zero_()
    assert float(content_use(attention, x).total_variation) == pytest.approx(0, abs=1e-12)
    assert torch.allclose(content_off(attention, x)(x), attention(x))


def test_content_off_of_a_standard_transformer():
    torch.manual_seed(0)
    model = VisionTransformer(side=8, channels=1, patch=4, depth=2, width=8, heads=2).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    images = torch.rand(12, 1, 8, 8, dtype=torch.float64)
    model.requires_grad_(False)
    first = model.blocks[0].attention
    x = model.blocks[0].attention_norm(model._embed(images))
    _, p = first(x, x, x, average_attn_weights=False)
    assert float(content_use(model, images, batch=5).total_variation[0]) == pytest.approx(
        float((p - p.mean(0)).abs().sum(-1).mean() / 2)
    )
    off = content_off(model, images, batch=5)
    assert not torch.allclose(off(images), model(images))
    # Scores of one input are their own mean, and with those the answer stays what it was.
    torch.testing.assert_close(content_off(model, images[:1])(images[:1]), model(images[:1]))
    fixed = off.blocks[0].attention(x, x, x)[0]
    projected = torch.nn.functional.linear(x, first.in_proj_weight, first.in_proj_bias)
    q, k, v = (y.unflatten(-1, (2, 4)).movedim(-2, -3) for y in projected.chunk(3, -1))
    mixed = (q @ k.mT / 2).mean(0).softmax(-1) @ v
    torch.testing.assert_close(fixed, first.out_proj(mixed.movedim(-3, -2).flatten(-2)))
    norms = content_use(model, images).score_norm
    w_q, w_k, _ = first.in_proj_weight.chunk(3)
    heads = [torch.linalg.matrix_norm(w_q[h : h + 4].mT @ w_k[h : h + 4], 2) for h in (0, 4)]
    assert float(norms[0]) == pytest.approx(float(max(heads)))
    with pytest.raises(InputError, match="batch_first=False"):
        content_use(torch.nn.MultiheadAttention(4, 2), torch.zeros(1, 2, 4))


def test_plain_has_the_same_outputs_and_leaves_the_original_alone(layer):
    x = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    before = layer(x)
    exported = plain(layer)
    assert torch.equal(exported(x), before)
    assert not any("parametrizations" in name for name in exported.state_dict())
    assert torch.equal(layer(x), before)
    with torch.no_grad():
        for p in exported.parameters():
            p.zero_()
    assert torch.equal(layer(x), before)


# -- steps on the manifold


def orthonormality(w):
    w = w.double()
    gram = w @ w.mT if w.shape[0] < w.shape[1] else w.mT @ w
    return float(torch.linalg.matrix_norm(gram - torch.eye(len(gram), dtype=torch.float64), 2))


def test_nearest_orthonormal_is_the_polar_factor():
    torch.manual_seed(0)
    U = torch.linalg.qr(torch.randn(3, 7, 5, dtype=torch.float64)).Q
    Vh = torch.linalg.qr(torch.randn(3, 5, 5, dtype=torch.float64)).Q
    near = U * torch.linspace(0.64, 1.36, 5, dtype=torch.float64) @ Vh
    assert torch.allclose(nearest_orthonormal(near), U @ Vh, rtol=0, atol=1e-8)
    assert torch.allclose(nearest_orthonormal(near.mT), (U @ Vh).mT, rtol=0, atol=1e-8)


def test_directions_have_singular_values_near_one():
    torch.manual_seed(0)
    for g in (torch.randn(4, 30, 12), torch.randn(4, 12, 12), torch.randn(4, 12, 30) * 1e-4):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.linalg.svdvals(direction(g.to(dtype)).float())
            assert values.max() < 1.25
            assert values.median() > 0.6


@pytest.mark.parametrize("lr", [0.01, 0.25])
def test_steps_stay_on_the_manifold_and_decrease_a_loss(lr):
    torch.manual_seed(0)
    model = Chain(Linear(12, 20), Entrywise(20, "abs", on_half=True), Linear(20, 20), Linear(20, 8))
    x, goal = torch.randn(64, 3, 12), torch.randn(64, 3, 8)
    optimiser = ManifoldStep(manifold_parameters(model), lr=lr, momentum=0.9)
    assert len(optimiser.param_groups[0]["params"]) == 3
    losses = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = (model(x) - goal).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        assert max(orthonormality(w.detach()) for w in manifold_parameters(model)) < 1e-5
    assert min(losses) < losses[0] - 0.1
    if lr == 0.01:
        assert losses[-1] < losses[20] < losses[0]


def test_steps_find_a_hidden_rotation():
    torch.manual_seed(0)
    hidden = torch.linalg.qr(torch.randn(10, 10)).Q
    model = Linear(10, 10, bias=False)
    if torch.det(model.weight) * torch.det(hidden) < 0:  # the two halves of the orthogonal group are apart
        hidden[0] = -hidden[0]
    x = torch.randn(200, 1, 10)
    optimiser = ManifoldStep(manifold_parameters(model), lr=0.1, momentum=0.5)
    for step in range(150):
        optimiser.param_groups[0]["lr"] = 0.1 * (1 - step / 150) + 1e-6
        optimiser.zero_grad()
        (model(x) - x @ hidden.mT).square().mean().backward()
        optimiser.step()
    assert torch.allclose(model.weight, hidden, atol=1e-2)


def test_a_step_resumes_from_its_state():
    def run(interrupted):
        torch.manual_seed(0)
        model = Linear(5, 5, bias=False)
        optimiser = ManifoldStep(manifold_parameters(model), lr=0.05)
        x, goal = torch.randn(20, 1, 5), torch.randn(20, 1, 5)
        for step in range(6):
            if interrupted and step == 3:
                stored, weights = optimiser.state_dict(), model.state_dict()
                model = Linear(5, 5, bias=False)
                model.load_state_dict(weights)
                optimiser = ManifoldStep(manifold_parameters(model), lr=0.05)
                optimiser.load_state_dict(stored)
            optimiser.zero_grad()
            (model(x) - goal).square().mean().backward()
            optimiser.step()
        return model.weight

    assert torch.equal(run(False), run(True))


# -- errors


def test_errors():
    with pytest.raises(UnknownNameError, match="did you mean 'orthogonal'"):
        Linear(2, 2, kind="orthogonl")
    with pytest.raises(InputError, match="norm is -1"):
        Linear(2, 2, norm=-1)
    with pytest.raises(UnknownNameError, match="did you mean 'softplus'"):
        Entrywise(2, "softpluss")
    with pytest.raises(InputError, match="width 3 is odd"):
        Entrywise(3, "abs", on_half=True)
    with pytest.raises(InputError, match="tokens have width 3"):
        MaxMin()(torch.zeros(1, 1, 3))
    with pytest.raises(InputError, match=r"slopes in \[0, 1\]"):
        Sll(4, Entrywise(4, "abs"))
    with pytest.raises(InputError, match="radius of a projection is 0"):
        LayerProject(0)
    with pytest.raises(InputError, match="3 heads do not divide the width 4"):
        SelfAttention(4, 3)
    with pytest.raises(InputError, match="patches of side 3 do not fit"):
        Patches(1, 8, 3)
    with pytest.raises(InputError, match=r"expected \(b, 3, 8, 8\)"):
        Patches(3, 8, 2)(torch.zeros(2, 1, 8, 8))
    with pytest.raises(InputError, match="do not fit a grid of 3 x 3"):
        MergedTokens((3, 3), 4, 2)
    with pytest.raises(InputError, match="lr is 1"):
        ManifoldStep(manifold_parameters(Linear(2, 2)), lr=1)
    with pytest.raises(InputError, match="has no SelfAttention"):
        content_use(Linear(2, 2), torch.zeros(1, 2))
