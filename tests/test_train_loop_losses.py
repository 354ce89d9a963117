"""What a training minimises: gains and slopes against their definitions, losses against their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import holdfast
from holdfast.attention.layer import split_heads
from holdfast.errors import InputError
from holdfast.layers import Convolution, Layer, LayerProject, SelfAttention
from holdfast.layers.attention.content import content_off
from holdfast.layers.attention.piece import Attention
from holdfast.layers.steepness import norm_estimate
from holdfast.models import Transformer, config
from holdfast.train.augment import AUGMENTATIONS
from holdfast.train.ball_gains import gain_over_ball
from holdfast.train.forward import features, logits_of, run
from holdfast.train.gains import attention_steepness, norm_of_rows
from holdfast.train.losses import LOSSES, ContentFloor, CrossEntropy, Emma, JaSMinTerm, Pgd
from holdfast.train.slopes import SLOPES, GainsSlope, GradientSlope, JacobianSlope, SecondOrderSlope, pair_norms

SIZES = {"side": 8, "patch": 4, "width": 8, "heads": 2, "depth": 2, "neck": 6, "vocabulary": 30, "tokens": 5}


def model_of(name: str = "digits-smooth", **changes) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(config(name), **SIZES | changes)).double()


def batch(model: Transformer, count: int = 4):
    torch.manual_seed(1)
    c = model.config
    labels = torch.randint(c.classes, (count,))
    if c.input == "words":
        return torch.randint(c.vocabulary, (count, c.tokens)), labels
    return torch.rand(count, c.channels, c.side, c.side, dtype=torch.float64), labels


def pass_of(model: Transformer, differentiate: bool = False, progress: float = 1.0):
    inputs, labels = batch(model)
    return run(model, inputs, labels, torch.tensor(progress), differentiate=differentiate)


def feature_jacobians(model: Transformer, x: torch.Tensor) -> torch.Tensor:
    """(b, d, input) of the features, by reverse differentiation."""
    rows = []
    for one in x:
        found = torch.autograd.functional.jacobian(lambda at: features(model, at.unsqueeze(0))[0].flatten(), one)
        rows.append(found.flatten(1))
    return torch.stack(rows)


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("name", ["digits-smooth", "cifar10-stem", "sst2-smooth"])
def test_a_pass_computes_the_logits_of_the_model(name, differentiate):
    model = model_of(name, stem_width=18)
    found, (inputs, _) = pass_of(model, differentiate), batch(model)
    assert torch.allclose(found.logits, model(inputs), atol=1e-12)
    assert len(found.entering) == 2
    assert torch.equal(found.entering[0], features(model, found.x)[1][0])


@pytest.mark.parametrize("residual", [0.0, 1.0])
@pytest.mark.parametrize("strength", [0.1, 3.0, 10.0])
@pytest.mark.parametrize("positions", [False, True])
def test_gain_and_curvature_of_attention_are_above_its_derivatives(residual, strength, positions):
    torch.manual_seed(0)
    scores = torch.randn(2, 5, 5) if positions else None
    layer = SelfAttention(8, 2, norm=0.7, position_scores=scores, residual=residual)
    with torch.no_grad():
        layer.query.weight *= strength
    x = torch.randn(16, 5, 8)
    true = holdfast.local_lipschitz(layer.layer(), x.double()).value
    found = attention_steepness([layer], [x])
    gain, curvature = found.gain.detach(), found.curvature.detach()
    # Three steps of power iteration leave it at most a little below the closed form, which is above the truth.
    assert (gain >= true * 0.995).all()
    if strength == 0.1:
        assert (gain <= true * 1.2 + 0.1).all()
    piece, u = Attention(layer.layer()), x.double()
    g = torch.randn(200, *x.shape, dtype=torch.float64)
    g[100:] *= torch.zeros(100, 1, 5, 1).bernoulli_(0.3).double() + 1e-3  # few tokens move
    g = g / g.flatten(2).norm(dim=-1)[..., None, None]
    bends = piece.push2(u, g, g).flatten(2).norm(dim=-1).amax(0)
    assert (bends <= curvature).all()


@pytest.mark.parametrize(("strength", "positions"), [(0.1, True), (1.0, False), (4.0, True)])
def test_the_gain_over_a_ball_is_that_of_the_bound_and_above_what_an_attack_reaches(strength, positions):
    torch.manual_seed(0)
    scores = torch.randn(2, 5, 5) if positions else None
    layer = SelfAttention(8, 2, position_scores=scores).double()
    with torch.no_grad():
        layer.query.weight *= strength
    x = torch.randn(3, 5, 8).double()
    radii = [1e-3, 0.1, 0.4]
    found = torch.stack([gain_over_ball(layer, x, torch.full((3,), r).double()).detach() for r in radii], -1)
    bound = holdfast.bound(layer.layer(), x, radii, method="rows", guarantee="numerical").value / torch.tensor(radii)
    # Eigenvalues over the ball are taken there, where the bound starts from those at x.
    assert ((found / bound > 0.7) & (found / bound < 1.15)).all()
    assert (found.diff() >= 0).all()
    assert (found[:, -1] >= 0.99 * holdfast.attack(layer.layer(), x, radii[-1], seed=0).lower / radii[-1]).all()


def test_the_slope_over_a_ball_charges_growth():
    model = model_of("digits-patches")
    with torch.no_grad():
        for attention in model.attentions:
            attention.query.weight *= 3
    found = pass_of(model)
    near, far = (GainsSlope(radius=r)(found) for r in (1e-3, 0.5))
    others = torch.ones_like(near).scatter(1, found.labels.unsqueeze(1), 0.0).bool()
    assert (far[others] > 1.02 * near[others]).all()
    assert (near[others] <= 1.02 * GainsSlope()(found)[others]).all()
    shared = GainsSlope(radius=0.5, sample=1)(found)
    assert torch.allclose(shared[0], far[0], rtol=1e-6)
    for weight in (model.attentions[0].query.weight, model.attentions[1].key.weight, model.attentions[0].value.weight):
        (pull,) = torch.autograd.grad(far.sum(), weight, retain_graph=True)
        assert torch.isfinite(pull).all()
        assert pull.abs().max() > 0


def test_layers_are_taken_together_or_one_by_one():
    torch.manual_seed(0)
    layers = [SelfAttention(8, 2, position_scores=torch.randn(2, 5, 5)) for _ in range(3)]
    x = [torch.randn(4, 5, 8) for _ in layers]
    together = attention_steepness(layers, x)
    for i in range(3):
        alone = attention_steepness([layers[i]], [x[i]])
        assert torch.allclose(alone.gain[0], together.gain[i], rtol=1e-5)
        assert torch.allclose(alone.curvature[0], together.curvature[i], rtol=1e-5)
    assert attention_steepness(layers, x, curved=False).curvature == math.inf


def test_a_sample_gives_the_mean_of_its_gains():
    model = model_of("digits-patches")
    found = pass_of(model)
    own, shared = GainsSlope()(found), GainsSlope(sample=2)(found)
    steepness = attention_steepness(model.attentions, [x[:2] for x in found.entering], curved=False)
    rest = own[0] / steepness.gain[:, 0].prod()  # the gains of the other layers, which no input changes
    same_label = found.labels == found.labels[0]
    expected = (rest * steepness.gain.mean(1).prod()).expand(len(own), -1)
    assert torch.allclose(shared[same_label], expected[same_label], rtol=1e-4)


def test_norms_by_a_few_steps():
    torch.manual_seed(0)
    w, p = torch.randn(6, 9).double(), torch.randn(3, 2, 5, 5).double().softmax(-1)
    assert norm_estimate(w).item() == pytest.approx(torch.linalg.matrix_norm(w, 2).item(), rel=0.05)
    assert torch.allclose(norm_of_rows(p), torch.linalg.matrix_norm(p, 2), rtol=1e-3)


def test_slopes_of_a_network_are_in_order():
    model = model_of()
    found = pass_of(model, differentiate=True)
    sigma = torch.linalg.matrix_norm(feature_jacobians(model, found.x.detach()), 2)
    pairs = pair_norms(found)
    exact = pairs * sigma.unsqueeze(1)
    assert torch.allclose(JacobianSlope(steps=200)(found), exact, rtol=2e-3)
    assert (JacobianSlope()(found) <= exact * (1 + 1e-9)).all()
    assert (GainsSlope()(found) >= exact * 0.995).all()
    assert (GainsSlope()(found).gather(1, found.labels.unsqueeze(1)) == 0).all()


def test_the_margin_gradient_is_that_of_the_closest_margin():
    model = model_of()
    found = pass_of(model, differentiate=True)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        logits = model(x)
        rows = torch.arange(len(logits))
        (g,) = torch.autograd.grad((logits[rows, found.labels] - logits[rows, found.rivals]).sum(), x)
        return g

    here = gradient(found.x)
    norm = here.flatten(1).norm(dim=1)
    others = functional.one_hot(found.labels, 10) == 0
    assert torch.allclose(GradientSlope(curvature=0.0)(found), norm.unsqueeze(1) * others, rtol=1e-6)
    there = gradient(found.x - 0.3 * here / norm.reshape(-1, 1, 1, 1))
    expected = norm + 2.0 / 2 * (there - here).flatten(1).norm(dim=1)
    assert torch.allclose(GradientSlope(radius=0.3, curvature=2.0)(found), expected.unsqueeze(1) * others, rtol=1e-6)
    assert (norm <= torch.linalg.matrix_norm(feature_jacobians(model, found.x), 2) * pair_norms(found).amax(1)).all()


@pytest.mark.parametrize("kind", ["orthogonal", "free"])
def test_a_convolution_is_as_steep_as_its_map(kind):
    torch.manual_seed(0)
    convolution = Convolution((2, 3), 3, 4, kind=kind)
    assert convolution.steepness() == convolution.map.steepness()
    assert convolution.steepness().curvature == 0.0


def test_the_smooth_projection_attains_its_curvature():
    layer = LayerProject(2.0, smooth=True)
    x = torch.tensor([0.5 * 2.0, 0.0], dtype=torch.float64)
    (bend,) = torch.func.jacrev(torch.func.jacrev(lambda t: layer(x * t)))(torch.ones(1, dtype=torch.float64))[
        0
    ].flatten()
    assert abs(bend.item()) == pytest.approx(layer.steepness().curvature, rel=1e-6)  # a step of length 1


def test_the_second_order_slope_is_above_the_second_derivative():
    model = model_of(projection="smooth")
    found = pass_of(model, differentiate=True)
    first = GradientSlope(curvature=0.0)(found)
    bent = (SecondOrderSlope(radius=2.0)(found) - first).gather(1, found.rivals.unsqueeze(1)).squeeze(1)
    for i in range(4):
        y, j = found.labels[i], found.rivals[i]
        hessian = torch.autograd.functional.hessian(
            lambda at, y=y, j=j: (lambda f: f[0, y] - f[0, j])(model(at.unsqueeze(0))), found.x[i].detach()
        )
        size = found.x[i].numel()
        assert torch.linalg.matrix_norm(hessian.reshape(size, size), 2) <= bent[i]
    with pytest.raises(InputError, match="Entrywise has a kink"):
        SecondOrderSlope()(pass_of(model_of("digits-patches"), differentiate=True))


@pytest.mark.parametrize("kind", sorted(SLOPES))
@pytest.mark.parametrize("name", ["digits-smooth", "sst2-smooth"])
def test_slopes_can_be_differentiated_by_the_weights(name, kind):
    model = model_of(name)
    slope = SLOPES[kind]()
    weight = model.attentions[0].query.weight
    step = torch.randn_like(weight)

    def value() -> torch.Tensor:
        return slope(pass_of(model, differentiate=slope.differentiates)).sum()

    (g,) = torch.autograd.grad(value(), weight)
    assert torch.isfinite(g).all()
    if kind == "jacobian":
        return  # its direction is held fixed, and is not yet the top one
    h = 1e-5
    with torch.no_grad():
        weight += h * step
        up = value()
        weight -= 2 * h * step
        down = value()
    # Directions of power iteration and of the step to x' are held fixed too; near the top they do not matter.
    assert ((up - down) / (2 * h)).item() == pytest.approx((g * step).sum().item(), rel=0.2, abs=1e-3)


def test_a_pass_without_its_pullback_says_so():
    with pytest.raises(InputError, match="without its pullback"):
        GradientSlope()(pass_of(model_of()))


class Unknown(Layer):
    """A layer that promises nothing."""

    @property
    def gain(self) -> float:
        return math.inf

    def forward(self, x):
        return x

    def pieces(self):
        return ()


def test_a_layer_without_a_gain_is_named():
    model = model_of(head="free", maps="free")
    assert torch.isfinite(GainsSlope()(pass_of(model))).all()
    model.pool.append(Unknown())
    with pytest.raises(InputError, match="Unknown has no known gain"):
        GainsSlope()(pass_of(model))


# -- losses


def test_every_loss_is_tested_here():
    assert set(LOSSES) == {"cross-entropy", "emma", "pgd", "jasmin", "content-floor"}


def test_cross_entropy_with_margin_and_temperature():
    found = pass_of(model_of())
    handicapped = found.logits.clone()
    handicapped[torch.arange(4), found.labels] -= 0.3
    expected = functional.cross_entropy(handicapped / 0.2, found.labels)
    assert CrossEntropy(margin=0.3, temperature=0.2)(found).item() == pytest.approx(expected.item())


def test_emma_is_its_formula_and_grows_with_the_training():
    model = model_of()
    found = pass_of(model)
    L = GainsSlope()(found)
    expected = 0.0
    for i, y in enumerate(found.labels.tolist()):
        lifted = found.logits[i].clone()
        for j in range(10):
            if j != y:
                radius = ((found.logits[i, y] - found.logits[i, j]) / L[i, j]).item()
                lifted[j] += min(max(radius, 0.0), 0.2) * L[i, j]
        expected += functional.cross_entropy(lifted / 0.5, found.labels[i]).item() / 4
    assert Emma(radius=0.2, temperature=0.5)(found).item() == pytest.approx(expected, rel=1e-6)
    values = [Emma(radius=0.2, growth=0.5)(pass_of(model, progress=t)).item() for t in (0.0, 0.25, 0.5, 1.0)]
    assert values[0] == pytest.approx(CrossEntropy()(found).item())
    assert values[0] <= values[1] <= values[2] == pytest.approx(values[3])


def test_the_radius_of_emma_grows_from_its_first_to_its_last():
    model = model_of()
    expected = {0.0: 0.05, 0.25: 0.175, 0.5: 0.3, 1.0: 0.3}
    for progress, radius in expected.items():
        growing = Emma(radius=0.3, first_radius=0.05)(pass_of(model, progress=progress))
        assert growing.item() == pytest.approx(Emma(radius=radius, growth=0)(pass_of(model)).item(), rel=1e-6)


def test_annealing_forgets_inputs_with_a_large_margin():
    model = model_of()
    found = pass_of(model)
    with torch.no_grad():
        model.head.bias[found.labels[0]] += 3
    found = pass_of(model)
    p = ((found.logits - 0.5 * functional.one_hot(found.labels, 10)) / 0.2).softmax(1)
    p = p.gather(1, found.labels.unsqueeze(1)).squeeze(1)
    annealed = CrossEntropy(margin=0.5, temperature=0.2, gamma=5)
    expected = ((1 - p) ** 5 * -p.log()).mean()
    assert annealed(found).item() == pytest.approx(expected.item(), rel=1e-9)
    plain = CrossEntropy(margin=0.5, temperature=0.2)
    first = [
        torch.autograd.grad(loss(found), found.logits, retain_graph=True)[0][0].norm() for loss in (annealed, plain)
    ]
    assert p[0] > 0.9
    assert first[0] < 1e-3 * first[1]
    lifted = Emma(radius=0, margin=0.5, temperature=0.2, gamma=5)
    assert lifted(found).item() == pytest.approx(expected.item(), rel=1e-9)
    assert torch.isfinite(torch.autograd.grad(annealed(found), model.head.bias)[0]).all()
    with pytest.raises(InputError, match=r"gamma is 0\.5; expected 0, or at least 1"):
        Emma(gamma=0.5)


def test_emma_pushes_the_slope_down():
    model = model_of()
    with torch.no_grad():
        model.head.bias[3] += 5  # so that every margin is far from used up
    inputs, _ = batch(model)
    found = run(model, inputs, torch.full((4,), 3), torch.tensor(1.0))
    L = GainsSlope()(found)
    (g,) = torch.autograd.grad(Emma(radius=0.2)(found), model.attentions[0].query.weight, retain_graph=True)
    (steeper,) = torch.autograd.grad(L.sum(), model.attentions[0].query.weight)
    assert (g * steeper).sum() > 0


@pytest.mark.parametrize("name", ["digits-smooth", "sst2-smooth"])
def test_pgd_raises_the_loss_within_its_ball(name, monkeypatch):
    model = model_of(name)
    found = pass_of(model)
    seen = []
    monkeypatch.setattr(
        "holdfast.train.losses.features", lambda m, x: seen.append(x.detach().clone()) or features(m, x)
    )
    attacked = Pgd(radius=0.5, steps=5)(found)
    assert attacked > functional.cross_entropy(logits_of(model, features(model, found.x)[0]), found.labels)
    assert all(((x - found.x).flatten(1).norm(dim=1) <= 0.5 * (1 + 1e-6)).all() for x in seen[-1:])
    assert ((seen[-1] - found.x).flatten(1).norm(dim=1) > 0.4).all()
    assert torch.autograd.grad(attacked, model.head.bias)[0].abs().max() > 0


def test_jasmin_is_the_mean_over_the_layers():
    model = model_of()
    found = pass_of(model)
    layers = [a.probabilities(x) for a, x in zip(model.attentions, found.entering, strict=True)]
    expected = torch.stack([holdfast.jasmin(p, 2) for p in layers]).mean()
    assert JaSMinTerm(k=2)(found).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_content_floor_lifts_what_is_below_it():
    model = model_of()
    with torch.no_grad():
        for attention in model.attentions:
            attention.query.weight *= 0.1
    found = pass_of(model)
    variations = [
        (a.probabilities(x) - a.probabilities(x).mean(0)).abs().sum(-1).mean() / 2
        for a, x in zip(model.attentions, found.entering, strict=True)
    ]
    lacking = ContentFloor(floor=0.5)(found)
    assert lacking.item() == pytest.approx((0.5 / torch.stack(variations).mean()).log().item(), rel=1e-6)
    assert ContentFloor(floor=1e-9)(found).item() == 0
    with pytest.raises(InputError, match="floor is 0"):
        ContentFloor(floor=0)
    weights = [attention.query.weight for attention in model.attentions]
    pulls = torch.autograd.grad(lacking, weights)
    # However small the scores are: U is nearly linear in the weights of all layers together.
    assert sum((g * w).sum().item() for g, w in zip(pulls, weights, strict=True)) == pytest.approx(-1, abs=0.1)


def test_the_content_floor_sees_what_reaches_the_output():
    model = model_of()
    found = pass_of(model)
    shares = []
    for attention, x in zip(model.attentions, found.entering, strict=True):
        p, v = attention.probabilities(x), split_heads(attention.value(x), attention.heads)
        apart, whole = (p - p.mean(0)) @ v, p @ v
        shares.append((apart.flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)).mean())
    floor = ContentFloor(floor=0.5, of="output")
    assert floor(found).item() == pytest.approx((0.5 / torch.stack(shares).mean()).log().item(), rel=1e-5)
    with torch.no_grad():
        for attention in model.attentions:
            attention.query.weight.zero_()
    assert floor(pass_of(model)).item() > 10


def test_the_content_floor_sees_what_reaches_the_logits():
    model = model_of()
    found, (inputs, _) = pass_of(model), batch(model)
    off = content_off(model, inputs)(inputs)
    # `content_off` takes all means from one pass with content, and so does the loss.
    change = found.logits - off
    use = (change - change.mean(1, keepdim=True)).norm(dim=1).mean()
    lacking = ContentFloor(floor=5.0, of="logits")(found)
    assert lacking.item() == pytest.approx((5.0 / use).log().item(), rel=1e-5)
    assert torch.autograd.grad(lacking, model.attentions[0].query.weight)[0].abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*sorted(SLOPES), "over a ball"])
def test_losses_compile_to_one_graph(kind):
    from holdfast.train.objective import TrainingObjective

    model = model_of().float()
    inputs, labels = batch(model)
    slope = GainsSlope(radius=0.1) if kind == "over a ball" else SLOPES[kind]()
    losses = (Emma(slope=slope), Pgd(steps=1), ContentFloor(), JaSMinTerm())
    objective = TrainingObjective(model, losses if kind == "gains" else losses[:1])
    compiled = torch.compile(objective, backend="aot_eager", fullgraph=kind != "gains")
    arguments = inputs.float(), labels, torch.tensor(0.5)
    assert compiled(*arguments).item() == pytest.approx(objective(*arguments).item(), rel=1e-5)


# -- augmentation


def images(count: int = 64) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(count, 3, 16, 16)


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_augmentations_keep_shape_and_range_and_follow_their_seed(name):
    x, change = images(), AUGMENTATIONS[name]
    first = change(x, torch.Generator().manual_seed(1))
    assert first.shape == x.shape
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, change(x, torch.Generator().manual_seed(1)))
    assert not torch.equal(first, change(x, torch.Generator().manual_seed(2)))


def test_flips_and_moves_are_what_they_say():
    x = images()
    flipped = AUGMENTATIONS["flip"](x, torch.Generator().manual_seed(0))
    turned = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, x, strict=True)]
    assert 15 < sum(turned) < 50
    assert all(t or torch.equal(a, b) for t, a, b in zip(turned, flipped, x, strict=True))
    for name, mode in (("crop", "reflect"), ("shift", "constant")):
        padded = functional.pad(x, [2] * 4, mode=mode)
        moved = AUGMENTATIONS[name](x, torch.Generator().manual_seed(0))
        places = set()
        for i in range(len(x)):
            found = [
                (r, c)
                for r in range(5)
                for c in range(5)
                if torch.equal(moved[i], padded[i, :, r : r + 16, c : c + 16])
            ]
            assert len(found) == 1
            places.update(found)
        assert len(places) > 15


def test_random_changes_are_of_every_kind_and_leave_half_of_the_images_alone():
    from holdfast.train import augment

    x = images(600)
    changed = AUGMENTATIONS["rand"](x, torch.Generator().manual_seed(0))
    alone = sum(torch.equal(a, b) for a, b in zip(changed, x, strict=True))
    assert 0.5 * 600 <= alone + 40 <= 0.65 * 600
    for kind in range(augment._KINDS):
        chosen, degree = torch.full((600, 1, 1, 1), kind), torch.linspace(-1, 1, 600).reshape(-1, 1, 1, 1)
        one = augment._recoloured(augment._moved(x, chosen, degree), chosen, degree)
        one = augment._with_hole(one, chosen, torch.Generator().manual_seed(0))
        share = (one != x).flatten(1).any(1).float().mean()
        assert share == 0 if kind == 0 else share > 0.9


def test_random_changes_are_what_they_say():
    from holdfast.train import augment

    x = images(2)
    still = torch.zeros(2, 1, 1, 1)
    moved = augment._moved(x, torch.full_like(still, 3), still + 2 / 16 / augment._MOVE)  # one pixel to the left
    assert torch.allclose(moved[..., :-1], x[..., 1:], atol=1e-5)
    assert torch.allclose(moved[..., -1], torch.zeros(()), atol=1e-5)
    turned = augment._moved(x, torch.full_like(still, 5), still + 6)  # twelfths of half a turn
    assert torch.allclose(turned, x.rot90(1, (-2, -1)), atol=1e-4)
    grey = augment._recoloured(x, torch.full_like(still, 8), still - 1 / augment._COLOUR)
    assert torch.allclose(grey, x.mean(1, keepdim=True).expand_as(x), atol=1e-6)
    levels = augment._recoloured(x, torch.full_like(still, 9), still + 1)
    assert len(levels.unique()) == 16
    assert (levels - x).abs().max() <= 0.5 / 15 + 1e-6
    dark = augment._recoloured(x, torch.full_like(still, 10), still + 1)
    assert torch.equal(dark, torch.where(x > 0.5, 1 - x, x))


def test_colours_change_by_little():
    x = images()
    change = (AUGMENTATIONS["colour"](x, torch.Generator().manual_seed(0)) - x).abs()
    assert 0.01 < change.mean() < 0.1
    assert change.max() <= 0.25
