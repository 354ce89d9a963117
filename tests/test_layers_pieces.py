"""Every piece of a network inherits the conformance tests; a test fails while an exported piece is not drawn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast.layers
from holdfast.errors import InputError
from holdfast.layers import (
    AddPositions,
    Affine,
    Attention,
    ClassToken,
    Flatten,
    HardProject,
    KinkedMlp,
    LayerNorm,
    Mlp,
    PairSort,
    PatchEmbedding,
    Piece,
    Place,
    RMSNorm,
    Selection,
    SmoothProject,
    TokenMean,
    WindowMax,
    sll,
    sll_diagonal,
)
from holdfast.layers.activation.functions import Softplus, activations
from holdfast.linalg import Ball
from holdfast.linalg.arithmetic import Numerical, Proved
from holdfast.testing.draw_pieces import KINDS, draw_piece
from holdfast.testing.pieces import PieceCase, PieceConformance, attained, bound
from tables import concrete

SEEDS = {Mlp: range(4), LayerNorm: range(3), KinkedMlp: range(3), PatchEmbedding: range(3)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class _Drawn(PieceConformance):
    kind: type[Piece]

    def cases(self) -> list[PieceCase]:
        seeds = SEEDS.get(self.kind, range(1, 3))
        cases = [draw_piece(self.kind, seed, extreme=False) for seed in seeds]
        return [PieceCase(f"{seed}: {case.name}", case.piece, case.u) for seed, case in zip(seeds, cases, strict=True)]


for _kind in KINDS:
    _name = f"Test{_kind.__name__}"
    globals()[_name] = type(_name, (_Drawn,), {"kind": _kind})


def test_every_piece_is_exported_and_drawn() -> None:
    pieces = {kind for kind in concrete(Piece) if kind.__module__.startswith("holdfast.layers.")}
    assert len(pieces) > 20
    assert pieces - {getattr(holdfast.layers, name) for name in holdfast.layers.__all__} == set()
    assert pieces - set(KINDS) == {Attention}  # it has tests of its own


def test_an_entry_counts_in_the_windows_that_it_may_win() -> None:
    """One entry in four windows, a bit below the largest of each."""
    windows = torch.tensor([[[0, 1], [0, 2], [0, 3], [0, 4]]])
    piece, u = WindowMax(windows, (1, 5)), torch.tensor([[0.0, 0.1, 0.1, 0.1, 0.1]]).double()
    radii = [0.05, 1.0]
    below, above = bound(Proved(), piece, "reach", u, radii).tolist()
    assert below == pytest.approx(0.05)
    moved = piece.value(u + torch.tensor([[1.0, 0, 0, 0, 0]])) - piece.value(u)
    assert float(moved.norm()) == pytest.approx(1.8)
    assert 1.8 <= above <= 2.0 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_constant_of_an_extreme_piece_is_below_what_is_attained(kind: type[Piece]) -> None:
    radii = (1e-8, 1e-4, 1e-2, 0.3, 3.0, 100.0)
    for seed in range(100):
        case = draw_piece(kind, seed)
        for constant, found in attained(case, radii, seed).items():
            assert bool((bound(Proved(), case.piece, constant, case.u, radii) >= found).all()), (seed, constant)


# -- each piece is what torch computes


def test_norms_are_those_of_torch() -> None:
    u, gamma, beta = normal(2, 3, 6), normal(6, seed=1), normal(6, seed=2)
    same(LayerNorm(gamma, beta, 1e-3).value(u), functional.layer_norm(u, (6,), gamma, beta, 1e-3))
    same(RMSNorm(gamma, 1e-3).value(u), functional.rms_norm(u, (6,), gamma, 1e-3))


@pytest.mark.parametrize("name", list(activations))
def test_mlp_is_that_of_torch(name: str) -> None:
    by_torch = {
        "gelu": nn.GELU(),
        "gelu-tanh": nn.GELU("tanh"),
        "silu": nn.SiLU(),
        "tanh": nn.Tanh(),
        "softplus": nn.Softplus(),
        "centred-softplus": lambda t: functional.softplus(t) - math.log(2),
        "relu": nn.ReLU(),
        "abs": torch.abs,
    }
    first, second = nn.Linear(4, 7).double(), nn.Linear(7, 4).double()
    u = normal(2, 3, 4)
    kind = KinkedMlp if name in ("relu", "abs") else Mlp
    piece = kind(first.weight.mT, first.bias, name, second.weight.mT, second.bias, residual=1.0)
    same(piece.value(u), u + second(by_torch[name](first(u))))


@pytest.mark.parametrize("stride", [None, (1, 2), (3, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 0)])
def test_patch_embedding_is_a_convolution(stride: tuple[int, int] | None, padding: tuple[int, int]) -> None:
    w, b, front, image = normal(5, 2, 2, 3), normal(5), normal(2, 5), normal(4, 2, 6, 7)
    tokens = functional.conv2d(image, w, b, stride or (2, 3), padding).flatten(2).mT
    tokens = torch.cat([front.expand(4, 2, 5), tokens], 1)
    positions = normal(*tokens.shape[1:], seed=3)
    piece = PatchEmbedding(w, b, (6, 7), stride, padding, front, positions)
    same(piece.value(image.flatten(-2)), tokens + positions)
    dense = torch.func.jacrev(piece.value)(image[0].flatten(-2)).flatten(2).flatten(0, 1)
    exact = float(torch.linalg.matrix_norm(dense, ord=2))
    norm = float(piece.norm(Proved()).upper)
    assert norm >= exact * (1 - 1e-12)
    if stride != (1, 2) and padding == (0, 0):  # no two patches share a pixel
        assert norm <= exact * (1 + 1e-6)


def test_pooling_and_projection() -> None:
    u = normal(2, 3, 4)
    same(TokenMean(3).value(u), u.mean(-2, keepdim=True))
    same(TokenMean(3, skip=1).value(u), u[:, 1:].mean(-2, keepdim=True))
    same(ClassToken(2).value(u), u[:, 2:])
    same(Flatten().value(u), u.reshape(2, 1, 12))
    same(AddPositions(normal(3, 4)).value(u), u + normal(3, 4))
    pairs = u.unflatten(-1, (2, 2))
    same(PairSort().value(u), torch.stack([pairs.amax(-1), pairs.amin(-1)], -1).flatten(-2))
    length = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    same(HardProject(1.7).value(u), torch.where(length > 1.7, u / length * 1.7, u))
    same(SmoothProject(1.7).value(u), u / (1 + (length / 1.7) ** 2).sqrt())
    assert torch.equal(HardProject(100.0).value(u), u)


def test_place_moves_the_chosen_tokens_alone() -> None:
    x, g = normal(5, 4), normal(2, 4)
    moved = Place(x, [3, 1]).value(g)
    expected = x.clone()
    expected[3] += g[0]
    expected[1] += g[1]
    same(moved, expected)
    assert torch.equal(Place(x, [3, 1]).value(torch.zeros(2, 4).double()), x)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


# -- constants are tight where they can be


def radii(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_layer_norm_reach_stays_near_its_slope() -> None:
    """The slope blows up on the ball, the movement does not."""
    piece, u = LayerNorm(torch.ones(16), torch.zeros(16), 1e-6), normal(1, 3, 16)
    sigma = float(u.std(-1, correction=0).min())
    rho = radii(3.99 * sigma)  # almost to the centre, where the slope is 1/√eps
    gain, reach = (float(bound(Proved(), piece, name, u, rho)) for name in ("gain", "reach"))
    assert gain > 50
    assert reach < 1.5 * float(rho) / sigma
    assert float(bound(Proved(), piece, "reach", u, radii(1e9))) <= 2 * 48**0.5 * (1 + 1e-9)


def test_constants_at_the_centre_are_exact() -> None:
    """At radius zero the gain is ‖Df(u)‖; the curvature of a norm with equal factors is attained."""
    u = normal(1, 2, 5)
    for piece in (
        LayerNorm(normal(5), normal(5), 1e-5),
        RMSNorm(normal(5), 1e-5),
        SmoothProject(0.7),
        Mlp(normal(5, 8), normal(8), "gelu", normal(8, 5), normal(5), residual=1.0),
    ):
        dense = torch.func.jacrev(piece.value)(u[0]).flatten(2).flatten(0, 1)
        exact = float(torch.linalg.matrix_norm(dense, ord=2))
        found = float(bound(Proved(), piece, "gain", u, radii(0.0)))
        assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-6)
    plain = PieceCase("equal factors", LayerNorm(torch.ones(5), torch.zeros(5), 1e-9), u)
    reached = float(attained(plain, (1e-6,), 0)["curvature"])
    assert float(bound(Proved(), plain.piece, "curvature", u, radii(1e-6))) <= 1.05 * reached


def test_units_that_cannot_switch_count_with_their_slope() -> None:
    w1, w2, u = normal(4, 9), normal(9, 4), normal(1, 1, 4)
    b1 = torch.where(torch.arange(9) % 2 == 0, 50.0, -50.0).double()
    piece = KinkedMlp(w1, b1, "relu", w2, torch.zeros(4))
    exact = float(torch.linalg.matrix_norm(w1[:, ::2] @ w2[::2], ord=2))
    for rho in (1e-3, 1.0):
        found = float(bound(Proved(), piece, "reach", u, radii(rho)))
        assert exact * rho * (1 - 1e-12) <= found <= exact * rho * (1 + 1e-6)
    everywhere = float(bound(Proved(), piece, "reach", u, radii(1e6))) / 1e6
    assert exact < everywhere


def test_a_unit_counts_as_soon_as_it_can_reach_its_kink() -> None:
    one = torch.ones(1, 1).double()
    piece, u = KinkedMlp(one, -0.7 * one[0], "relu", one, 0 * one[0]), torch.zeros(1, 1, 1).double()
    below, beyond = bound(Proved(), piece, "reach", u, radii(0.699, 0.71)).squeeze(0).tolist()
    assert below <= 1e-9
    assert 0.01 <= beyond <= 0.72


def test_an_entry_that_is_chosen_three_times_counts_three_times() -> None:
    norm = float(Selection(torch.tensor([[0, 0, 1], [0, -1, 1]]), (1, 2)).norm(Proved()).upper)
    assert 3**0.5 <= norm <= 3**0.5 * (1 + 1e-9)


def test_a_sharp_softplus_is_flat_away_from_its_bend() -> None:
    w1, w2, u = normal(4, 9), normal(9, 4), normal(1, 2, 4)
    piece = Mlp(w1, torch.full((9,), 20.0), Softplus(10.0), w2, torch.zeros(4))
    near, far = (float(bound(Proved(), piece, "curvature", u, radii(rho))) for rho in (0.1, 100.0))
    assert near < 1e-9 < 1 < far


@pytest.mark.parametrize("phi", ["tanh", "softplus", "centred-softplus", "relu"])
def test_sll_has_gain_one(phi: str) -> None:
    w, b = normal(5, 8), normal(8, seed=1)
    diagonal = sll_diagonal(w, torch.exp(normal(8, seed=2)))
    piece, u = sll(w, b, diagonal, activations[phi]), normal(3, 2, 5)
    same(piece.value(u), u - 2 * activations[phi].value(u @ w + b) / diagonal @ w.mT)
    assert 1 <= piece.limit <= 1 + 1e-7
    assert bool(
        (bound(Proved(), piece, "reach", u, radii(0.1, 10.0)) <= radii(0.1, 10.0) * piece.limit * (1 + 1e-12)).all()
    )
    wrong = sll(w, b, diagonal * 0.3, activations[phi])
    assert wrong.limit > 1


def test_sll_with_orthogonal_columns_attains_its_limit() -> None:
    """X - 2 W T⁻¹ φ(Wᵀx) is a reflection where all slopes are 1, and for a smaller T steeper: 2/T - 1."""
    w, eye = torch.linalg.qr(normal(4, 3)).Q, torch.ones(3).double()
    for t in (1.0, 0.8):
        piece = sll(w, 10 * eye, t * eye, activations["relu"])
        J = torch.func.jacrev(piece.value)(torch.zeros(1, 4).double()).reshape(4, 4)
        exact = float(torch.linalg.matrix_norm(J, ord=2))
        assert exact <= piece.limit <= exact * (1 + 1e-7)


def test_radii_may_differ_for_each_input_and_cost_no_loop() -> None:
    piece, u = Mlp(normal(4, 6), normal(6), "gelu", normal(6, 4), normal(4)), normal(5, 3, 4)
    rho = torch.arange(1.0, 11.0).reshape(5, 2).double()
    a = Numerical()
    found = piece.gain(a, u, rho)
    assert found.shape == (5, 2)
    same(found[2], piece.gain(a, u[2], rho[2]))


# -- errors

WRONG = {
    "w1, b1, w2, b2 have shapes": lambda: Mlp(normal(3, 4), normal(4), "gelu", normal(5, 3), normal(3)),
    "residual is 1 and the widths are 3 and 2": lambda: Mlp(
        normal(3, 4), normal(4), "gelu", normal(4, 2), normal(2), 1.0
    ),
    "'relu' has a kink.*use KinkedMlp": lambda: Mlp(normal(3, 4), normal(4), "relu", normal(4, 3), normal(3)),
    "'gelu' is smooth.*use Mlp": lambda: KinkedMlp(normal(3, 4), normal(4), "gelu", normal(4, 3), normal(3)),
    "unknown activation 'gelo': did you mean 'gelu'": lambda: Mlp(
        normal(3, 4), normal(4), "gelo", normal(4, 3), normal(3)
    ),
    "eps is 0": lambda: LayerNorm(torch.ones(3), torch.zeros(3), 0.0),
    "gamma has 3 entries and beta 2": lambda: LayerNorm(torch.ones(3), torch.zeros(2), 1e-5),
    "w holds a value that is not finite": lambda: Affine(torch.full((2, 2), torch.nan)),
    "w is torch.int64": lambda: Affine(torch.ones(2, 2, dtype=torch.long)),
    "w has shape .2, 2. and b 3 entries": lambda: Affine(torch.ones(2, 2), torch.ones(3)),
    "projection is -1": lambda: HardProject(-1.0),
    "projection is nan": lambda: SmoothProject(float("nan")),
    "3 tokens of which 3 are skipped": lambda: TokenMean(3, skip=3),
    "index is -1": lambda: ClassToken(-1),
    "tokens are .7.": lambda: Place(normal(3, 4), [7]),
    "tokens are .1, 1.": lambda: Place(normal(3, 4), [1, 1]),
    "positions have shape": lambda: PatchEmbedding(normal(5, 1, 2, 2), None, (4, 4), positions=normal(3, 5)),
    "no patch of an image": lambda: PatchEmbedding(normal(5, 1, 2, 2), None, (1, 4)),
    "'gelu' has slopes outside": lambda: sll(normal(3, 4), normal(4), torch.ones(4), activations["gelu"]),
    "the diagonal has 3 entries": lambda: sll(normal(3, 4), normal(4), torch.ones(3), activations["relu"]),
    "sharpness is 0": lambda: Softplus(0.0),
    "order 5 of an activation": lambda: Softplus().supremum(5, radii(0.0), radii(1.0)),
    "input of torch.float32": lambda: Affine(normal(3, 4)).value(torch.zeros(1, 3)),
    "MaxMin got 3 channels": lambda: PairSort().value(normal(1, 3)),
    "does not choose windows": lambda: WindowMax(torch.zeros(2, 3, 1, dtype=torch.long), (2, 3)),
    "a window has no entries": lambda: WindowMax(torch.tensor([[[0, 1], [-1, -1]]]), (2, 3)),
    "these windows are of": lambda: WindowMax(torch.tensor([[[0, 1]]]), (2, 3)).value(normal(3, 2)),
    "made for 2": lambda: TokenMean(2).value(normal(3, 4)),
    "no token 5": lambda: ClassToken(5).value(normal(3, 4)),
    "an image has shape": lambda: PatchEmbedding(normal(5, 1, 2, 2), None, (4, 4)).value(normal(1, 15)),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_say_what_was_passed(message: str) -> None:
    with pytest.raises(InputError, match=message):
        WRONG[message]()


def test_weights_in_float32_are_kept_exactly() -> None:
    w = torch.randn(3, 4)
    assert torch.equal(Affine(w).w, w.double())
    assert isinstance(Affine(w).value(Ball.exact(torch.zeros(1, 3))), Ball)
