"""What today's models do to scores: query-key norms, soft caps, sinks, windows, ALiBi, values of another width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast import AttentionLayer, InputError, NotApplicableError
from holdfast.attention import AttentionJacobian, HeadNorm, large_radius_limit
from holdfast.attention.head_norm import Placed
from holdfast.attention.heads import HeadJacobians
from holdfast.attention.masks import alibi, blocks, chunked, sliding_window
from holdfast.attention.sink_token import with_sink_token
from holdfast.bounds import bounds
from holdfast.layers import Attention
from holdfast.linalg import Ball, FunctionJacobian
from holdfast.testing import Case, make_case


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W = normal(4)
OPTIONS: dict[str, dict[str, Any]] = {
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": normal(4)},
    "rms": {"q_norm": HeadNorm(W), "k_norm": HeadNorm(normal(2, 4))},
    "layer norm after the rotation": {
        "q_norm": HeadNorm(W, W, 1e-2, "layer", after_rotation=True),
        "k_norm": HeadNorm(W, eps=1e-2, kind="layer", after_rotation=True),
    },
    "one norm over all heads": {
        "q_norm": HeadNorm(normal(4, 4), across=True),
        "k_norm": HeadNorm(normal(2, 4), normal(2, 4, seed=1), kind="layer", across=True),
    },
    "keys alone": {"k_norm": HeadNorm(W)},
    "everything": {"soft_cap": 2.0, "sinks": normal(4), "q_norm": HeadNorm(W), "k_norm": HeadNorm(W)},
}
#: Those that the bounds by the probabilities of the whole ball cover.
SMOOTH = ("sinks", "rms", "layer norm after the rotation", "one norm over all heads", "keys alone")
BASE = make_case("", n=4, d=5, k=4, h=4, g=2, biases=True, mask="each", causal=True, residual=1.0, rotary=4)


@pytest.fixture(params=OPTIONS, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, BASE.layer.replace(**OPTIONS[request.param]), BASE.x)


def literally(layer: AttentionLayer, x: Tensor) -> Tensor:
    """The layer written out, head by head and row by row, with torch's own norms."""
    n, repeats, out = x.shape[-2], layer.h // layer.g, torch.zeros(x.shape[-2], layer.d_out, dtype=x.dtype)
    raw = {
        "q": torch.stack([x @ layer.w_q[head] + layer.b_q[head] for head in range(layer.h)]),
        "k": torch.stack([x @ layer.w_k[head // repeats] + layer.b_k[head // repeats] for head in range(layer.h)]),
    }
    for name, norm in (("q", layer.q_norm), ("k", layer.k_norm)):
        z = raw[name]
        if norm is None or not norm.after_rotation:
            z = z if norm is None else normalised(norm, z, layer)
            z = layer.rotary.turn(z) if layer.rotary is not None else z
        else:
            z = normalised(norm, layer.rotary.turn(z) if layer.rotary is not None else z, layer)
        raw[name] = z
    allowed = layer.allowed(n)
    for head in range(layer.h):
        values = x @ layer.w_v[head // repeats] + layer.b_v[head // repeats]
        for i in range(n):
            s = layer.scale * raw["k"][head] @ raw["q"][head, i]
            s = s if layer.soft_cap is None else layer.soft_cap * torch.tanh(s / layer.soft_cap)
            s = s[allowed[i]].exp()
            total = s.sum() + (0 if layer.sinks is None else layer.sinks[head].exp())
            out[i] += (s / total) @ values[allowed[i]] @ layer.w_o[head]
    return out + layer.b_o + layer.residual * x


def normalised(norm: HeadNorm, z: Tensor, layer: AttentionLayer) -> Tensor:
    weight, bias = (
        t.repeat_interleave(layer.h // len(t), 0) if t is not None and t.ndim == 2 else t
        for t in (norm.weight, norm.bias)
    )
    rows = z.movedim(0, 1)  # (n, h, k)
    shape = rows.shape[1:] if norm.across else rows.shape[2:]
    function = torch.nn.functional.rms_norm if norm.kind == "rms" else torch.nn.functional.layer_norm
    plain = function(rows, shape, eps=norm.eps)
    scaled = plain * weight + (0 if bias is None else bias)
    return scaled.movedim(1, 0)


def test_value_is_the_formula(case: Case) -> None:
    for i in range(len(case.x)):
        one = case.member(i)
        torch.testing.assert_close(one.layer(one.x), literally(one.layer, one.x))


def test_jacobian_is_that_of_autograd_and_is_enclosed(case: Case) -> None:
    own, expected = AttentionJacobian(case.layer, case.x), FunctionJacobian(case.layer, case.x, 1)
    torch.testing.assert_close(own.dense(), expected.dense())
    u = normal(3, *case.x.shape, seed=2)
    torch.testing.assert_close(own.rmv(u), expected.rmv(u))
    enclosure = own.enclose()
    distance = (enclosure.matrix - expected.dense()).flatten(1).norm(dim=-1)
    assert bool((distance <= enclosure.error + 1e-13 * enclosure.matrix.flatten(1).norm(dim=-1)).all())
    assert bool((enclosure.error < 1e-8).all())


def test_a_head_alone(case: Case) -> None:
    if case.name == "one norm over all heads":
        with pytest.raises(NotApplicableError, match="leaves no head alone"):
            HeadJacobians(case.layer, case.x)
        return
    own = HeadJacobians(case.layer, case.x)
    v, u = normal(2, 4, *own.domain), normal(2, 4, *own.codomain, seed=1)
    torch.testing.assert_close((own.mv(v) * u).sum(), (v * own.rmv(u)).sum())


def test_balls_hold_the_layer(case: Case) -> None:
    ball = case.layer.output(X := Ball.exact(case.x), case.layer.run(X))
    assert bool(((ball.mid - case.layer(case.x)).abs() <= 2 * ball.rad + 1e-14).all())


def test_bounds_hold_or_say_why_not(case: Case) -> None:
    radii = [1e-4, 1e-2, 0.3, 3.0]
    attained = holdfast.attack(case.layer, case.x, radii, restarts=3, steps=30).lower
    held = []
    for name in bounds:
        try:
            assert bool((bounds[name](case.layer, case.x, radii).value >= attained).all())
        except NotApplicableError as error:
            assert "the layer" in str(error)  # noqa: PT017
            assert "does not cover" in str(error)  # noqa: PT017
        else:
            held.append(name)
    assert {"naive", "lofast-xi", "taylor", "best"} <= set(held)
    second = {"plus", "cov", "second-order", "mixed"}
    assert second & set(held) == (second if case.name in SMOOTH else set())


def test_bounds_are_tight_for_small_radii(case: Case) -> None:
    """The Jacobian counts, not norms of its parts: an ascent of few steps comes near."""
    attained = holdfast.attack(case.layer, case.x, 1e-6, restarts=2, steps=10).lower
    for name in ("taylor", "second-order") if case.name in SMOOTH else ("taylor",):
        ratio = holdfast.bound(case.layer, case.x, 1e-6, name).value / attained
        assert bool((ratio >= 1).all())
        assert bool((ratio < 1.01).all())


def test_sinks_are_a_token_that_does_not_move() -> None:
    for layer in (BASE.layer, BASE.layer.replace(b_k=None, b_v=None), BASE.layer.replace(b_v=None, rotary=None)):
        sunk = layer.replace(sinks=normal(4), residual=0.0, score_bias=alibi(4, 4))
        whole, x = with_sink_token(sunk, BASE.x)
        assert whole.sinks is None
        torch.testing.assert_close(whole(x)[..., :-1, :], sunk(BASE.x))
        torch.testing.assert_close(whole(x)[..., -1, :], layer.b_o.expand(2, -1))


def test_second_derivatives_of_norms() -> None:
    """The constant of Lemma 1 is attained, and never exceeded."""
    for norm in (HeadNorm(W), HeadNorm(W, kind="layer", eps=0.3), HeadNorm(normal(1, 4), eps=2.0, across=True)):
        u, a = normal(200, 1, 1, 4), normal(200, 1, 1, 4, seed=1)
        second = torch.func.jvp(
            lambda t, norm=norm, a=a: torch.func.jvp(lambda s: Placed(s, norm, None).value, (t,), (a,))[1], (u,), (a,)
        )[1]
        bound = norm.sharpest(u, torch.zeros(1, dtype=torch.float64)).squeeze(-1) * a.square().sum((-2, -1))
        assert bool((second.flatten(1).norm(dim=-1) <= bound.flatten() * (1 + 1e-12)).all())
    plain, u = HeadNorm(torch.ones(4, dtype=torch.float64), eps=0.0), torch.tensor([1.0, 0, 0, 0]).double()
    a = torch.tensor([1 / 3, 2 / 3, 0, 0]).double().sqrt()
    second = torch.func.jvp(
        lambda t: torch.func.jvp(lambda s: Placed(s.reshape(1, 1, 4), plain, None).value, (t,), (a,))[1], (u,), (a,)
    )[1]
    torch.testing.assert_close(second.norm(), plain.sharpest(u.reshape(1, 1, 4), torch.zeros(1).double()).squeeze())


def test_files_dtypes_and_words(case: Case, tmp_path: Path) -> None:
    case.layer.save(tmp_path / "layer.safetensors")
    back = AttentionLayer.load(tmp_path / "layer.safetensors")
    assert torch.equal(back(case.x), case.layer(case.x))
    assert repr(back) == repr(case.layer)
    single = case.layer.to(torch.float32)
    torch.testing.assert_close(single(case.x.float()).double(), case.layer(case.x), rtol=1e-3, atol=1e-3)


def test_a_large_cap_and_faint_sinks_change_nothing() -> None:
    plain = BASE.layer(BASE.x)
    torch.testing.assert_close(BASE.layer.replace(soft_cap=1e9)(BASE.x), plain)
    torch.testing.assert_close(BASE.layer.replace(sinks=torch.full((4,), -800.0).double())(BASE.x), plain)


def test_values_of_another_width() -> None:
    layer = BASE.layer.replace(w_v=normal(2, 5, 3), b_v=normal(2, 3), w_o=normal(4, 3, 5))
    torch.testing.assert_close(AttentionJacobian(layer, BASE.x).dense(), FunctionJacobian(layer, BASE.x, 1).dense())
    attained = holdfast.attack(layer, BASE.x, 0.2, restarts=2, steps=20).lower
    for name in bounds:
        assert bool((bounds[name](layer, BASE.x, 0.2).value >= attained).all()), name
    HeadJacobians(layer, BASE.x).dense()


def test_masks_and_alibi() -> None:
    assert sliding_window(4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert sliding_window(3, 2, causal=False).int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert chunked(4, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert blocks([1, 2]).int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    bias = alibi(8, 3)
    assert bias[0, 2].tolist() == [-1.0, -0.5, 0.0]
    assert bias[7, 0, 1].item() == -(2.0**-8)
    assert alibi(3, 2)[:, 0, 1].tolist() == [-(2.0**-4), -(2.0**-8), -(2.0**-2)]
    layer = BASE.layer.replace(mask=chunked(4, 2), score_bias=alibi(4, 4))
    attained = holdfast.attack(layer, BASE.x, 0.2, restarts=2, steps=20).lower
    assert bool((holdfast.bound(layer, BASE.x, 0.2).value >= attained).all())
    with pytest.raises(InputError, match="width is 0; expected a whole number"):
        sliding_window(4, 0)
    with pytest.raises(InputError, match="sizes is empty"):
        blocks([])


def test_who_else_refuses() -> None:
    layer = BASE.layer.replace(rotary=None, soft_cap=1.0)
    with pytest.raises(NotApplicableError, match="query-key norms"):
        Attention(layer.replace(q_norm=HeadNorm(W))).value(BASE.x)
    with pytest.raises(NotApplicableError, match="no third derivative with a soft cap"):
        Attention(layer).push3(*(BASE.x for _ in range(4)))
    with pytest.raises(NotApplicableError, match="a soft cap"):
        large_radius_limit(layer, BASE.x)
    with pytest.raises(NotApplicableError, match="caps its scores"):
        holdfast.lipschitz_bound(layer.replace(mask=None), radius=1.0, tokens=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soft_cap": 0.0}, "soft_cap is 0.0; expected a positive number"),
        ({"sinks": normal(3)}, r"sinks is \(3,\), .*; expected \(4,\)"),
        ({"q_norm": HeadNorm(normal(3))}, r"the weight of q_norm is \(3,\)"),
        ({"k_norm": HeadNorm(normal(4, 4))}, r"the weight of k_norm is \(4, 4\), .*; expected \(2, 4\)"),
        ({"caps": 1.0}, "replace got caps; a layer has w_q"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        BASE.layer.replace(**options)


def test_norms_that_are_none() -> None:
    with pytest.raises(InputError, match="kind of a head norm is 'batch'"):
        HeadNorm(W, kind="batch")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"bias of a head norm has shape \(2,\)"):
        HeadNorm(W, normal(2))
    with pytest.raises(InputError, match="eps of a head norm is -1"):
        HeadNorm(W, eps=-1)
