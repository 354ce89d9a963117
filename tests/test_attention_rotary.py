"""Rotary positions and score bias: the layer, its Jacobian, its proved norm, files, and who refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer, InputError, NotApplicableError
from holdfast.attention import AttentionJacobian, Rotary, ValueOperator, fold
from holdfast.attention.rotary import Pairing
from holdfast.bounds import bounds
from holdfast.linalg import Ball, FunctionJacobian
from holdfast.testing import Case, ProvableConformance, changed, make_case
from holdfast.testing.layers import turning


def angles(n: int, r: int, *batch: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*batch, n, r, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positions(n: int, r: int, *batch: int, pairing: Pairing = "half") -> Rotary:
    """Rotations as models have them: the two entries of a pair share an angle."""
    half = angles(n, r // 2, *batch)
    turned = torch.cat([half, half], -1) if pairing == "half" else half.repeat_interleave(2, -1)
    return Rotary(turned.cos(), turned.sin(), pairing)


def with_terms(case: Case, batch: bool = False, r: int | None = None, **terms: bool) -> Case:
    layer, (b, n, _) = case.layer, case.x.shape
    own = (b,) if batch else ()
    new: dict[str, Any] = {}
    if terms.get("rotary"):
        new["rotary"] = positions(n, r or layer.k, *own)
    if terms.get("bias"):
        new["score_bias"] = angles(n, n, *own, layer.h, seed=1)
    return Case(case.name, changed(layer, **new), case.x)


CASES = {
    "rotary": {"rotary": True},
    "partial rotary": {"rotary": True, "r": 2},
    "bias": {"bias": True},
    "both": {"rotary": True, "bias": True},
    "both, each input its own": {"rotary": True, "bias": True, "batch": True},
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    plain = make_case("", n=5, d=6, k=4, h=4, g=2, biases=True, mask="each", causal=True, residual=1.5)
    return with_terms(plain, **CASES[request.param])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rotation_is_complex_multiplication(pairing: Pairing) -> None:
    n, k = 5, 6
    angle, q = angles(n, k // 2), angles(n, k, 3, seed=1)
    joined = torch.cat([angle, angle], -1) if pairing == "half" else angle.repeat_interleave(2, -1)
    turned = Rotary(joined.cos(), joined.sin(), pairing).turn(q)
    pairs = (q[..., : k // 2], q[..., k // 2 :]) if pairing == "half" else (q[..., ::2], q[..., 1::2])
    expected = torch.complex(*pairs) * torch.polar(torch.ones_like(angle), angle)
    found = (
        (turned[..., : k // 2], turned[..., k // 2 :]) if pairing == "half" else (turned[..., ::2], turned[..., 1::2])
    )
    torch.testing.assert_close(torch.complex(*found), expected)


def test_entries_beyond_r_stay_and_turn_back_is_the_transpose() -> None:
    rotary = Rotary(angles(5, 4), angles(5, 4, seed=1))  # any numbers, not a rotation
    q, p = angles(5, 6, 3, seed=2), angles(5, 6, 3, seed=3)
    torch.testing.assert_close(rotary.turn(q)[..., 4:], q[..., 4:])
    torch.testing.assert_close((rotary.turn(q) * p).sum(), (q * rotary.turn_back(p)).sum())
    torch.testing.assert_close(rotary.turn_back(q[..., 1:3, :], slice(1, 3)), rotary.turn_back(q)[..., 1:3, :])


def test_scores_depend_on_the_distance_of_positions() -> None:
    angle = torch.arange(6.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 1.0, 0.3], dtype=torch.float64)
    plain = make_case("", n=6, d=4, k=4, h=1)
    layer = changed(plain.layer, rotary=Rotary(angle.cos(), angle.sin()))
    same = plain.x[:, :1].expand(-1, 6, -1)
    s = layer.attention(same).log()
    torch.testing.assert_close((s[..., 0, 1] - s[..., 0, 0]), (s[..., 3, 4] - s[..., 3, 3]))


def test_bias_is_added_to_the_scores() -> None:
    case = with_terms(make_case("", biases=True), bias=True)
    layer = case.layer
    assert layer.score_bias is not None
    plain = changed(layer, score_bias=None).attention(case.x).log()
    torch.testing.assert_close(layer.attention(case.x), (plain + layer.score_bias).softmax(-1))


def test_jacobian_is_that_of_autograd(case: Case) -> None:
    own, expected = AttentionJacobian(case.layer, case.x), FunctionJacobian(case.layer, case.x, batch_dims=1)
    torch.testing.assert_close(own.dense(), expected.dense())
    u = torch.randn(3, *case.x.shape, dtype=torch.float64)
    torch.testing.assert_close(own.rmv(u), expected.rmv(u))


def test_one_input_with_few_tokens_is_that_of_autograd() -> None:
    case = with_terms(make_case("", n=3, d=8, k=6, biases=True), rotary=True, bias=True)
    x = case.x[0]
    torch.testing.assert_close(AttentionJacobian(case.layer, x).dense(), FunctionJacobian(case.layer, x).dense())


def test_enclosures_hold_the_exact_matrix(case: Case) -> None:
    for operator in (AttentionJacobian(case.layer, case.x), ValueOperator(case.layer, case.x)):
        enclosure = operator.enclose()
        distance = (enclosure.matrix - operator.dense()).flatten(1).norm(dim=-1)
        assert bool((distance <= enclosure.error + 1e-13 * enclosure.matrix.flatten(1).norm(dim=-1)).all())
        assert bool((enclosure.error < 1e-9).all())


def test_forward_pass_in_balls_holds_the_layer(case: Case) -> None:
    ball = case.layer.output(X := Ball.exact(case.x), case.layer.run(X))
    assert bool(((ball.mid - case.layer(case.x)).abs() <= 2 * ball.rad).all())


def test_proved_norm_is_above_the_estimate_and_close(case: Case) -> None:
    low = holdfast.local_lipschitz(case.layer, case.x)
    high = holdfast.local_lipschitz(case.layer, case.x, side="upper")
    assert high.guarantee == "proved"
    exact = torch.linalg.matrix_norm(AttentionJacobian(case.layer, case.x).dense(), ord=2)
    assert bool((low.value <= exact * (1 + 1e-12)).all() and (exact <= high.value).all())
    torch.testing.assert_close(high.value, low.value, rtol=1e-5, atol=0)


def test_attack_works(case: Case) -> None:
    found = holdfast.attack(case.layer, case.x, 0.1, restarts=2, steps=5)
    moved = (case.layer(found.witness) - case.layer(case.x)).flatten(1).norm(dim=-1)
    torch.testing.assert_close(found.lower, moved)
    slope = holdfast.local_lipschitz(case.layer, case.x).value
    assert bool((found.lower > 0.05 * slope).all())


def test_part_is_the_layer_of_one_member(case: Case) -> None:
    part = case.layer.part(case.x.shape[:1], 1, 2)
    torch.testing.assert_close(part(case.x[1:]), case.layer(case.x)[1:])


def test_saved_layers_come_back(case: Case, tmp_path: Path) -> None:
    case.layer.save(tmp_path / "layer.safetensors")
    back = AttentionLayer.load(tmp_path / "layer.safetensors")
    assert torch.equal(back(case.x), case.layer(case.x))
    assert repr(back) == repr(case.layer)


def test_saved_pairing_comes_back(tmp_path: Path) -> None:
    plain = make_case("", n=5, k=4)
    layer = changed(plain.layer, rotary=positions(5, 4, pairing="interleaved"))
    layer.save(tmp_path / "layer.safetensors")
    assert torch.equal(AttentionLayer.load(tmp_path / "layer.safetensors")(plain.x), layer(plain.x))


def test_other_dtype_and_other_mask_keep_the_terms(case: Case) -> None:
    single = case.layer.to(torch.float32)
    torch.testing.assert_close(single(case.x.float()).double(), case.layer(case.x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(case.layer.with_mask(case.layer.mask)(case.x), case.layer(case.x))


def test_repr_names_the_terms() -> None:
    case = with_terms(make_case("", n=5, k=4), rotary=True, bias=True)
    assert "rotary=(5, 4), score_bias=(2, 5, 5)" in repr(case.layer)


class TestTurnedJacobian(ProvableConformance):
    def build(self, layer: AttentionLayer, x: Tensor) -> AttentionJacobian:
        n, r = x.shape[-2], layer.k - layer.k % 2
        rotary = positions(n, r).to(layer.dtype) if r else None
        bias = angles(n, n, layer.h, seed=1).to(layer.dtype)
        return AttentionJacobian(changed(layer, rotary=rotary, score_bias=bias), x)


# -- bounds


KINDS: dict[str, dict[str, Any]] = {
    "half": {"rotary": turning(angles(4, 2))},
    "interleaved": {"rotary": turning(angles(4, 2), "interleaved")},
    "partial": {"rotary": turning(angles(4, 1))},
    "positions of each input": {"rotary": turning(angles(4, 2, 2))},
    "scaled": {"rotary": Rotary(1.3 * angles(4, 4).cos(), 1.3 * angles(4, 4).sin())},
    "any numbers": {"rotary": Rotary(angles(4, 4), angles(4, 4, seed=1))},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_bound_holds_for_every_kind_of_rotation(kind: str) -> None:
    plain = make_case("", n=4, d=5, k=4, biases=True)
    layer, radii = plain.layer.replace(**KINDS[kind]), [1e-3, 0.1, 1.0]
    attained = holdfast.attack(layer, plain.x, radii, restarts=3, steps=30).lower
    for name in set(bounds) - {"best"}:  # it takes the smallest of the others
        assert bool((bounds[name](layer, plain.x, radii).value >= attained).all()), name


def test_without_turning_the_bounds_are_those_of_the_plain_layer() -> None:
    """But for norms of products, which are taken factor by factor; these count in second order only."""
    plain = make_case("", n=4, d=5, k=4, biases=True)
    still = plain.layer.replace(rotary=Rotary(angles(4, 4) * 0 + 1, angles(4, 4) * 0))
    for name in ("lofast", "plus", "cov", "second-order", "mixed", "rows"):
        expected, found = (bounds[name](layer, plain.x, [1e-7, 0.1]).value for layer in (plain.layer, still))
        torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=1e-5, atol=0)
        assert bool((found >= expected * (1 - 1e-9)).all())


def test_norm_of_a_rotation_is_one_and_of_any_numbers_that_of_its_matrix() -> None:
    assert 1 <= turning(angles(4, 2)).norm < 1 + 1e-14
    rotary = Rotary(angles(1, 4), angles(1, 4, seed=1), "interleaved")
    matrix = rotary.turn(torch.eye(4, dtype=torch.float64).unsqueeze(-2)).squeeze(-2).mT
    torch.testing.assert_close(rotary.norm, float(torch.linalg.matrix_norm(matrix, ord=2)))


def test_measures_do_not_know_positions() -> None:
    layer = make_case("", k=4, rotary=4).layer
    for name in ("mean-field", "mean-field-masked"):
        with pytest.raises(NotApplicableError, match="rotary"):
            holdfast.lipschitz_bound(layer.replace(causal=name.endswith("masked")), radius=1.0, tokens=4, method=name)
    with pytest.raises(InputError, match="tokens is 3 and the rotary positions are for 4"):
        holdfast.lipschitz_bound(layer, radius=1.0, tokens=3)


@pytest.mark.parametrize("name", list(bounds))
def test_bounds_hold_with_a_score_bias(name: str) -> None:
    case = with_terms(make_case("", n=4, d=5), bias=True)
    radii = [1e-3, 0.1, 1.0]
    attained = holdfast.attack(case.layer, case.x, radii, restarts=3, steps=30).lower
    assert bool((bounds[name](case.layer, case.x, radii).value >= attained).all())


def test_rows_of_all_queries_are_refused() -> None:
    case = with_terms(make_case(""), rotary=True)
    with pytest.raises(NotApplicableError, match="others for every query"):
        _ = fold(case.layer, case.x).key


def test_inner_quantities_can_be_attacked() -> None:
    case = with_terms(make_case("", n=4, biases=True, mask="shared"), rotary=True)
    bound = holdfast.bound(case.layer, case.x, 0.3, "lofast")
    for objective in ("delta-21", "scores"):
        found = holdfast.attack(case.layer, case.x, 0.3, objective=objective, restarts=3, steps=20).lower
        assert bool((found <= bound.terms["delta_21"].squeeze(-1)).all())
        assert bool((found > 0).all())


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"rotary": Rotary(angles(4, 4), angles(4, 4))}, "rotary turns 4 entries of a head, and a head has 2"),
        (
            {"rotary": Rotary(angles(4, 2).float(), angles(4, 2).float())},
            "rotary cos is torch.float32 on cpu; expected",
        ),
        ({"score_bias": angles(4, 4, 3)}, r"score_bias has shape \(3, 4, 4\); expected \(n, n\), \(2, n, n\) or"),
        ({"score_bias": angles(4, 4) / 0}, "score_bias .* NaN or infinite entries"),
        ({"score_bias": [[0.0]]}, "score_bias is list; expected a tensor"),
        ({"score_bias": angles(4, 4), "rotary": Rotary(angles(3, 2), angles(3, 2))}, "rotary for 3, score_bias for 4"),
    ],
)
def test_terms_that_do_not_fit(terms: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        changed(make_case("").layer, **terms)


def test_rotary_that_is_not_one() -> None:
    with pytest.raises(InputError, match="with r even"):
        Rotary(angles(4, 3), angles(4, 3))
    with pytest.raises(InputError, match="pairing is 'quarter'; expected"):
        Rotary(angles(4, 2), angles(4, 2), "quarter")  # type: ignore[arg-type]


def test_inputs_of_another_length_or_batch() -> None:
    case = with_terms(make_case(""), rotary=True, bias=True, batch=True)
    with pytest.raises(InputError, match="x has 3 tokens and the rotary is for 4"):
        case.layer(case.x[:, :3])
    with pytest.raises(InputError, match=r"rotary has batch shape \(2,\) and x \(\); expected the same"):
        case.layer(case.x[0])


def test_half_of_a_rotary_in_a_file() -> None:
    layer = make_case("").layer
    tensors = {name: getattr(layer, name) for name in ("w_q", "w_k", "w_v", "w_o")}
    with pytest.raises(InputError, match="one of rotary_cos and rotary_sin is missing"):
        AttentionLayer.from_tensors(tensors | {"rotary_cos": angles(4, 2)})
