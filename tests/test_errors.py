"""Every complaint: its kind, and that its one line speaks of the caller's own arguments."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast import (
    AttentionLayer,
    Bound,
    HoldfastError,
    InputError,
    MemoryLimitError,
    NotApplicableError,
    SoundnessError,
    UnknownNameError,
    register_bound,
)
from holdfast.attacks import Attack, Objective, objectives
from holdfast.attention import HeadNorm
from holdfast.bounds import bounds
from holdfast.bounds.base import Evaluation
from holdfast.certification.journal import opened
from holdfast.cli import main
from holdfast.errors import ConversionError, NotFiniteError
from holdfast.linalg import Array, FunctionJacobian
from holdfast.linalg.arithmetic import Arithmetic
from holdfast.registry import Registry
from holdfast.results import CertificationRun, Target
from holdfast.storage import check_folder, check_output, make_folder, write_tensors, write_text
from holdfast.testing import changed, make_case
from holdfast.train.interrupts import held_interrupts
from holdfast.train.loop import train
from holdfast.train.monitor import Monitor

CASE = make_case("h=2, n=4, d=4, k=2", biases=True)
LAYER, X = CASE.layer, CASE.x
MASKED = make_case("masked", mask="each").layer
NAN, INF = math.nan, math.inf


def complains(error: type[HoldfastError], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def spoiled(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    t.view(-1)[1] = value
    return t


def wrong(match: str, **arguments: Any) -> Any:
    """A parameter: the layer with some arguments replaced."""
    return pytest.param(arguments, match, id=match[:50])


# -- a layer


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        wrong(r"w_q is None; expected a tensor", w_q=None),
        wrong(r"w_v is list; expected a torch tensor", w_v=[1.0]),
        wrong(r"w_k has dtype torch.float16; expected float32 or float64", w_k=LAYER.w_k.half()),
        wrong(r"b_o has dtype torch.int64", b_o=torch.ones(4, dtype=torch.int64)),
        wrong(r"w_o has shape \(4, 4\); expected three dimensions", w_o=torch.ones(4, 4).double()),
        wrong(r"w_q has shape \(2, 0, 2\); every size must be at least 1", w_q=torch.ones(2, 0, 2).double()),
        wrong(r"w_q has 3 heads and w_k 2; the key-value heads must divide", w_q=torch.ones(3, 4, 2).double()),
        wrong(r"w_k has shape \(2, 5, 2\); expected \(2, 4, 2\) beside w_q", w_k=torch.ones(2, 5, 2).double()),
        wrong(r"w_v has shape \(1, 4, 2\); expected \(2, 4, 2\)", w_v=torch.ones(1, 4, 2).double()),
        wrong(r"w_o has shape \(2, 3, 4\); expected \(2, 2, 4\)", w_o=torch.ones(2, 3, 4).double()),
        wrong(r"b_q has shape \(2,\); expected \(2, 2\)", b_q=torch.ones(2).double()),
        wrong(r"b_k has shape \(2, 3\); expected \(2, 2\)", b_k=torch.ones(2, 3).double()),
        wrong(r"b_v has shape \(1, 2\); expected \(2, 2\)", b_v=torch.ones(1, 2).double()),
        wrong(r"b_o has shape \(5,\); expected \(4,\)", b_o=torch.ones(5).double()),
        wrong(r"w_o is torch.float32 on cpu and w_q torch.float64 on cpu; give all", w_o=LAYER.w_o.float()),
        wrong(r"b_v is torch.float64 on meta and w_q torch.float64 on cpu", b_v=LAYER.b_v.to("meta")),  # type: ignore[union-attr]
        wrong(r"w_q of shape \(2, 4, 2\) has 1 NaN or infinite entries", w_q=spoiled(LAYER.w_q, NAN)),
        wrong(r"b_k of shape \(2, 2\) has 1 NaN or infinite entries", b_k=spoiled(LAYER.b_k, -INF)),  # type: ignore[arg-type]
        wrong(r"scale is nan; expected a finite number", scale=NAN),
        wrong(r"residual is inf; expected a finite number", residual=INF),
        wrong(
            r"residual is 1 but the layer maps width 4 to 3; a residual needs equal widths",
            residual=1.0,
            w_o=torch.ones(2, 2, 3).double(),
            b_o=None,
        ),
        wrong(r"mask is list; expected a bool tensor", mask=[[True]]),
        wrong(r"mask is torch.float32; expected a bool tensor, True where", mask=torch.ones(4, 4)),
        wrong(r"mask has shape \(4,\); expected \(n, n\) or \(b, n, n\)", mask=torch.ones(4).bool()),
        wrong(r"mask has shape \(4, 3\); expected \(n, n\)", mask=torch.ones(4, 3).bool()),
        wrong(
            r"mask leaves no key to the query at index \(2,\) \(1 such rows\)",
            mask=(torch.arange(4) != 2).expand(4, 4).mT,
        ),
        wrong(
            r"index \(1, 3\) \(1 such rows\); every query needs .* let padding tokens attend to themselves",
            mask=torch.stack([torch.ones(4, 4), torch.ones(4, 4).triu(1) + torch.eye(4, 3).mm(torch.eye(3, 4))]).bool(),
        ),
        wrong(
            r"mask leaves no key to the query at index \(0,\) \(3 such rows\)",
            mask=torch.ones(3, 3).triu(1).bool(),
            causal=True,
        ),
    ],
)
def test_arguments_of_a_layer(arguments: dict[str, Any], match: str) -> None:
    complains(InputError, match, lambda: changed(LAYER, **arguments))


@pytest.mark.parametrize(
    ("x", "match"),
    [
        pytest.param([[1.0]], r"x is list; expected a tensor \(…, n, 4\)", id="list"),
        pytest.param(X.half(), r"x has dtype torch.float16; expected float32 or float64", id="half"),
        pytest.param(
            X[0, 0], r"x has shape \(4,\); expected \(…, n, 4\) with at least one token", id="one token's vector"
        ),
        pytest.param(torch.ones(3, 5).double(), r"x has shape \(3, 5\); expected \(…, n, 4\)", id="width"),
        pytest.param(torch.ones(0, 4).double(), r"x has shape \(0, 4\); .* at least one token", id="no token"),
        pytest.param(torch.ones(0, 3, 4).double(), r"x has shape \(0, 3, 4\)", id="no input"),
        pytest.param(X.to("meta"), r"x is on meta and the layer on cpu; move one of them", id="device"),
        pytest.param(spoiled(X, NAN), r"x of shape \(2, 4, 4\) has 1 NaN or infinite entries", id="NaN"),
        pytest.param(spoiled(X, INF), r"x of shape \(2, 4, 4\) has 1 NaN or infinite entries", id="infinity"),
    ],
)
def test_inputs(x: Any, match: str) -> None:
    for call in (
        lambda: LAYER(x),
        lambda: LAYER.attention(x),
        lambda: holdfast.bound(LAYER, x, 0.1),
        lambda: holdfast.attack(LAYER, x, 0.1),
        lambda: holdfast.local_lipschitz(LAYER, x),
        lambda: holdfast.local_lipschitz(LAYER, x, side="upper"),
    ):
        complains(InputError, match, call)


def test_input_that_does_not_fit_the_mask() -> None:
    complains(InputError, r"x has 3 tokens and the mask is for 4", lambda: MASKED(X[:, :3]))
    complains(InputError, r"mask has batch shape \(2,\) and x \(\); expected the same", lambda: MASKED(X[0]))
    complains(InputError, r"mask has batch shape \(2,\) and x \(3,\)", lambda: MASKED(X[:1].expand(3, 4, 4)))
    complains(InputError, r"mask has batch shape \(2,\) and x \(\)", lambda: holdfast.bound(MASKED, X[0], 0.1))


def test_dtypes_that_differ() -> None:
    match = r"x is torch.float32 and the layer torch.float64; use layer.to\(x.dtype\) or x.to\(layer.dtype\)"
    complains(InputError, match, lambda: LAYER(X.float()))
    complains(InputError, match, lambda: LAYER.attention(X.float()))
    complains(InputError, match, lambda: holdfast.local_lipschitz(LAYER, X.float()))


# -- modules and files


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (nn.MultiheadAttention(4, 2, kdim=3), r"separate key or value widths \(kdim, vdim\), which is not plain"),
        (nn.MultiheadAttention(4, 2, vdim=3), r"separate key or value widths"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), r"appends bias_k and bias_v tokens"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), r"appends a zero token \(add_zero_attn\)"),
        (nn.MultiheadAttention(4, 2, dropout=0.1), r"is in training mode with dropout 0.1; call eval\(\) first"),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2), r"dropout 0.2; call eval\(\) first"),
        (nn.Linear(4, 4), r"from_module got Linear; expected nn.MultiheadAttention or nn.TransformerEncoderLayer"),
    ],
)
def test_modules_that_are_not_plain_attention(module: Any, match: str) -> None:
    complains(InputError, match, lambda: AttentionLayer.from_module(module))


def test_files(tmp_path: Path) -> None:
    missing, broken = tmp_path / "missing.safetensors", tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a file of tensors")
    complains(
        InputError, r"no file '.*missing.safetensors'; expected a safetensors", lambda: AttentionLayer.load(missing)
    )
    complains(InputError, r"broken.safetensors' cannot be read as safetensors", lambda: AttentionLayer.load(broken))
    complains(InputError, r"is a folder; expected a safetensors file", lambda: AttentionLayer.load(tmp_path))


def test_tensors_by_name() -> None:
    named = {name: getattr(LAYER, name) for name in ("w_q", "w_k", "w_v", "w_o")}
    two = {"w_q": LAYER.w_q, "weight": LAYER.w_k}
    match = r"no tensor named w_k, w_v, w_o; found w_q, weight; a layer needs w_q, w_k, w_v, w_o"
    complains(InputError, match, lambda: AttentionLayer.from_tensors(two))
    complains(InputError, r"x.st: no tensor named .*; found nothing", lambda: AttentionLayer.from_tensors({}, "x.st"))
    several = named | {"scale": torch.ones(2)}
    complains(InputError, r"scale has shape \(2,\); expected one number", lambda: AttentionLayer.from_tensors(several))


# -- the front doors


@pytest.mark.parametrize(
    ("eps", "match"),
    [
        (-0.1, r"eps is -0.1; expected a finite number that is not negative"),
        (NAN, r"eps is nan; expected a finite number"),
        (INF, r"eps is inf; expected a finite number"),
        ([0.1, -1.0], r"eps is -1.0; expected"),
        ((0.1, NAN), r"eps is nan; expected"),
        ([], r"eps is an empty sequence; expected at least one radius"),
        (True, r"eps is True; expected"),
        ([0.1, False], r"eps is False; expected"),
        ("0.1", r"eps is '0.1'; expected"),
        (["0.1"], r"eps is '0.1'; expected"),
        (None, r"eps is None; expected"),
        (torch.tensor(-0.5), r"eps is -0.5; expected"),
        (torch.ones(2, 2), r"the radii have shape \(2, 2\); expected one number, or one dimension of them"),
    ],
)
def test_radii(eps: Any, match: str) -> None:
    complains(InputError, match, lambda: holdfast.bound(LAYER, X, eps))
    complains(InputError, match, lambda: holdfast.attack(LAYER, X, eps))


def test_unknown_names_meet_the_nearest_one() -> None:
    match = r"unknown method 'lofest': did you mean 'lofast'\? known: .*best.*lofast-xi.*naive"
    complains(UnknownNameError, match, lambda: holdfast.bound(LAYER, X, 0.1, method="lofest"))
    complains(UnknownNameError, r"unknown method 'zzz': known: ", lambda: holdfast.bound(LAYER, X, 0.1, method="zzz"))
    match = r"unknown objective 'delta-23': did you mean 'delta-2[12]?'\? known: .*output, scores"
    complains(UnknownNameError, match, lambda: holdfast.attack(LAYER, X, 0.1, objective="delta-23"))


def test_unknown_guarantee_and_side() -> None:
    unknown: Any = "certain"
    match = r"guarantee is 'certain'; lofast offers proved and numerical"
    complains(InputError, match, lambda: holdfast.bound(LAYER, X, 0.1, "lofast", guarantee=unknown))
    match = r"side is 'certain'; expected \"estimate\" or \"upper\""
    complains(InputError, match, lambda: holdfast.local_lipschitz(LAYER, X, side=unknown))
    complains(InputError, r"side is 'lower'; expected", lambda: holdfast.local_lipschitz(LAYER, X, side="lower"))
    match = r"side=\"upper\" is proved only for an AttentionLayer: a bare function has no proved rounding"
    complains(InputError, match, lambda: holdfast.local_lipschitz(torch.sin, X, side="upper"))


def test_attacks_of_no_length() -> None:
    complains(InputError, r"restarts is 0; expected at least 1", lambda: holdfast.attack(LAYER, X, 0.1, restarts=0))
    complains(InputError, r"steps is -3; expected at least 1", lambda: holdfast.attack(LAYER, X, 0.1, steps=-3))


def test_functions_without_a_jacobian() -> None:
    match = r"the function returned tuple; expected one tensor"
    complains(InputError, match, lambda: holdfast.local_lipschitz(lambda x: (x, x), X))  # type: ignore[arg-type, return-value]
    match = r"the function maps \(2, 4, 4\) to \(4,\); with batch_dims=1 both must begin with the same"
    complains(InputError, match, lambda: FunctionJacobian(lambda x: x.sum((0, 1)), X, batch_dims=1))


# -- limits


def test_memory_limit() -> None:
    match = r"a proved norm of a \d+ x \d+ map needs 0.00 GiB and the limit is 0.00 GiB; raise memory_limit, use fewer"
    for name in ("naive", "lofast-xi", "lofast"):
        complains(MemoryLimitError, match, lambda name=name: holdfast.bound(LAYER, X, 0.1, name, memory_limit=100))
    complains(MemoryLimitError, match, lambda: holdfast.local_lipschitz(LAYER, X, side="upper", memory_limit=100))
    large = make_case("large", n=2000, d=8)
    match = r"16000 x 16000 map needs \d+\.\d\d GiB and the limit is 8.00 GiB"
    complains(MemoryLimitError, match, lambda: holdfast.local_lipschitz(large.layer, large.x, side="upper"))


def test_best_leaves_out_what_needs_too_much() -> None:
    limit = 4000.0  # enough for matrices of tokens and weights, too little for the 16 x 16 map
    result = holdfast.bound(LAYER, X, 0.1, memory_limit=limit)
    complains(MemoryLimitError, r"needs", lambda: holdfast.bound(LAYER, X, 0.1, "lofast", memory_limit=limit))
    assert any(note.startswith("lofast was left out: a proved norm") for note in result.notes)
    assert "lofast" not in result.terms
    naive = holdfast.bound(LAYER, X, 0.1, "naive", memory_limit=limit).value
    assert bool((result.value <= naive * (1 + 1e-15)).all())
    fresh = changed(LAYER, w_q=LAYER.w_q.clone())  # norms of weights that are known already need no memory
    complains(NotApplicableError, r"no bound applies: ", lambda: holdfast.bound(fresh, X, 0.1, memory_limit=1))


def test_overflow() -> None:
    match = r"bound 'naive' has no finite value at eps=1e\+200: it overflowed float64; use a smaller eps"
    complains(HoldfastError, match, lambda: holdfast.bound(LAYER, X, (0.1, 1e200), "naive"))
    huge = changed(LAYER, w_v=LAYER.w_v * 1e200, w_o=LAYER.w_o * 1e200)
    match = r"a proved norm is not finite: the map overflows float64; scale the weights or the input"
    complains(HoldfastError, match, lambda: holdfast.local_lipschitz(huge, X, side="upper"))
    broken = changed(LAYER, q_norm=HeadNorm(torch.ones(LAYER.k, dtype=torch.float64), eps=0.0))
    match = r"'plus' has no finite value at eps=100: a norm of queries or keys has eps 0, .*; use a smaller eps"
    complains(NotFiniteError, match, lambda: holdfast.bound(broken, X, 100.0, "plus"))
    complains(NotFiniteError, match, lambda: holdfast.bound(broken, X, 100.0, "plus", guarantee="numerical"))
    assert bool(torch.isfinite(holdfast.bound(broken, X, 100.0).value).all())  # the saturated value stays
    one_overflows = changed(LAYER, w_o=LAYER.w_o * 1e160)
    assert bool(torch.isfinite(holdfast.bound(one_overflows, X, 0.1).value).all())  # others do not


# -- methods that misbehave


def fake_bound(value: float, **metadata: Any) -> type[Bound]:
    """A bound that returns a constant."""

    class Fake(Bound):
        name, cost, reference = "fake", "nothing", "holdfast"

        def _refusal(self, layer: AttentionLayer) -> str | None:
            return "it has a mask" if layer.mask is not None else None

        def _evaluate(self, a: Arithmetic[Array], layer: AttentionLayer, x: Tensor, eps: Array) -> Evaluation[Array]:
            return Evaluation(a.lift(torch.full((*x.shape[:-2], eps.shape[0]), value, dtype=torch.float64)), {})

    for field, given in metadata.items():
        setattr(Fake, field, given)
    return Fake


def test_a_bound_below_what_is_attained_is_withheld() -> None:
    match = r"bound 'fake' returned a value below one that is attained; the value is withheld"
    for guarantee in ("proved", "numerical"):
        complains(SoundnessError, match, lambda g=guarantee: fake_bound(1e-3)()(LAYER, X, 0.1, guarantee=g))
    assert bool((fake_bound(1e9)()(LAYER, X, 0.1).value >= 1e9).all())


def test_a_bound_that_is_not_finite_is_withheld() -> None:
    for value in (NAN, INF):
        match = r"bound 'fake' has no finite value at eps=0.1: it overflowed float64"
        complains(HoldfastError, match, lambda v=value: fake_bound(v)()(LAYER, X, 0.1))


def test_a_bound_that_does_not_apply() -> None:
    match = r"bound 'fake' does not apply: it has a mask"
    complains(NotApplicableError, match, lambda: fake_bound(1e9)()(MASKED, X, 0.1))


def test_registering_twice_or_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_items", dict(bounds._items))
    known = set(bounds)
    match = r"method 'lofast' is registered twice; give the second one another name"
    complains(HoldfastError, match, lambda: register_bound(fake_bound(1.0, name="lofast")))
    complains(
        HoldfastError, r"Fake lacks cost, reference", lambda: register_bound(fake_bound(1.0, cost=None, reference=3))
    )
    complains(
        HoldfastError, r"Fake lacks valid guarantees", lambda: register_bound(fake_bound(1.0, guarantees=("sure",)))
    )
    assert set(bounds) == known
    register_bound(fake_bound(1.0))
    assert set(bounds) == {*known, "fake"}
    match = r"objective 'output' is registered twice"
    complains(HoldfastError, match, lambda: objectives.add("output")(objectives["output"]))


def test_an_empty_registry() -> None:
    nothing: Registry[int] = Registry("figure")
    assert list(nothing) == []
    complains(UnknownNameError, r"unknown figure 'a': known: $", lambda: nothing["a"])


class Lost(Attack):
    """Returns points that are nowhere."""

    name = "lost"

    def _search(self, objective: Objective, eps: Tensor, seed: int) -> Tensor:
        return torch.full((1, len(eps), *objective.centre.shape), NAN, dtype=torch.float64)


def test_an_attack_that_cannot_be_pulled_into_the_ball() -> None:
    match = r"an attack left the ball and could not be pulled back"
    complains(SoundnessError, match, lambda: Lost()(LAYER, X, 0.1))


# -- data, devices and files of a run


def pixels(shape: tuple[int, ...] = (4, 4)) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 3)).eval()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([(torch.zeros(4, 4), 0), (torch.zeros(4, 4), 3)], r"label of input 1 .* is 3; the model answers .* 0 to 2"),
        ([(torch.zeros(4, 4), -1)], r"label of input 0 of 'given inputs' is -1"),
        (
            [(spoiled(torch.zeros(4, 4), NAN), 0)],
            r"input 0 of 'given inputs', of shape \(4, 4\), is nan at \(0, 1\); expected finite numbers, and 1 of 16",
        ),
    ],
)
def test_data_of_a_run(data: Any, match: str) -> None:
    complains(InputError, match, lambda: holdfast.certify(pixels(), data, 0.1, "gains"))


def test_images_without_a_channel_axis() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2, 2), nn.Flatten(), nn.Linear(8, 3)).eval()
    match = r"inputs have shape \(4, 4\), and the model takes images with a channel axis; pass them as \(1, 4, 4\)"
    complains(InputError, match, lambda: holdfast.certify(model, [(torch.zeros(4, 4), 0)], 0.1, "gains"))


def test_a_model_that_keeps_tensors_of_a_run() -> None:
    model, kept = pixels(), []
    model.kept = kept  # type: ignore[assignment]
    model.register_forward_hook(lambda module, given, output: kept.append(output))
    model(torch.zeros(1, 4, 4))
    match = r"Sequential cannot be copied \(.*\); a hook or an attribute may keep tensors of an earlier run"
    complains(ConversionError, match, lambda: holdfast.certify(model, [(torch.zeros(4, 4), 0)], 0.1, "gains"))


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:99"])
def test_devices(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    match = f"the device is '{device}'(; expected cpu, cuda| and this torch finds no GPU)"
    data = [(torch.zeros(4, 4), 0)]
    complains(InputError, match, lambda: holdfast.certify(pixels(), data, 0.1, device=device))
    complains(InputError, match, lambda: train("digits-smooth", tmp_path / "run", device=device))
    assert not list(tmp_path.iterdir())


def test_outputs_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    complains(InputError, r"cannot be written: it is a folder", lambda: check_output(tmp_path))
    complains(InputError, r"cannot be written: it is a device or a pipe", lambda: check_output("/dev/full"))
    complains(InputError, r"file' is not a folder", lambda: check_output(tmp_path / "file" / "page.html"))
    complains(
        InputError,
        rf"there is no folder '{tmp_path}/a b'; make it first: mkdir -p '{tmp_path}/a b'$",
        lambda: check_output(tmp_path / "a b" / "page.html"),
    )
    check_folder(tmp_path / "missing" / "folder", "page.html")
    complains(InputError, r"it is a file; expected the name of a folder", lambda: check_folder(tmp_path / "file", "x"))
    complains(InputError, r"it is a file; expected the name of a folder", lambda: make_folder(tmp_path / "file"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        complains(InputError, r"you may not write in", lambda: check_output(tmp_path / "page.html"))
        complains(InputError, r"you may not write in", lambda: check_folder(tmp_path / "missing" / "folder"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))  # type: ignore[attr-defined]
        complains(InputError, r"no space is left on disk", lambda: check_output(tmp_path / "page.html"))


def test_a_missing_folder_is_refused_before_the_work(tmp_path: Path) -> None:
    run, there = CertificationRun("m", "d", (0.1,), (), (), {}, ""), tmp_path / "missing"
    data = [(torch.zeros(4, 4), 0)]
    for call in (
        lambda: holdfast.certify(pixels(), data, 0.1, out=there / "run.jsonl"),
        lambda: holdfast.certification.merge([tmp_path / "no-run.jsonl"], there / "run.jsonl"),
        lambda: run.to_junit(there / "junit.xml", Target(0.5, 0.1)),
        lambda: LAYER.save(there / "layer.safetensors"),
        lambda: Monitor(pixels(), torch.zeros(1, 4, 4), path=there / "monitor.jsonl"),
    ):
        complains(InputError, r"there is no folder '.*missing'; make it first: mkdir -p", call)
    assert not list(tmp_path.iterdir())


def command(arguments: list[str]) -> int | str | None:
    """The exit status of the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["holdfast", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
    return caught.value.code


def test_the_command_line_checks_outputs_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    wrong = str(tmp_path / "file" / "x")
    for arguments in (
        ["certify", "no-such-model", "--data", "digits", "--out", wrong],
        ["certify", "no-such-model", "--data", "digits", "--html", wrong],
        ["analyze", "no-such-model", "--text", "a", "--html", wrong],
        ["bound", "--demo", "--out", wrong],
        ["demo", "--out", wrong],
        ["train", "digits-smooth", "--out", wrong],
        ["repro", "networks", "--out", wrong],
        ["repro", "networks", "--out", str(tmp_path / "results"), "--runs", wrong],
    ):
        assert command(arguments) == 2
        said = capsys.readouterr().err
        assert "cannot be written" in said
        assert said.count("\n") == 1
    missing = str(tmp_path / "missing" / "x.png")
    for arguments in (
        ["certify", "no-such-model", "--data", "digits", "--out", missing],
        ["certify", "no-such-model", "--data", "digits", "--html", missing],
        ["certify", "no-such-model", "--data", "digits", "--target", "0.9@0.1", "--junit", missing],
        ["merge", "no-such-run", "--out", missing],
        ["analyze", "no-such-model", "--text", "a", "--html", missing],
        ["analyze", "no-such-model", "--text", "a", "--plot", missing],
        ["bound", "--demo", "--out", missing],
        ["bound", "--demo", "--curve", missing],
        ["models", "card", "digits-smooth", "--out", missing],
        ["models", "halve", "no-such-model", missing],
    ):
        assert command(arguments) == 2
        assert "missing'; make it first: mkdir -p" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_one_name_for_two_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.jsonl").write_text("what must not be lost")
    run = str(tmp_path / "run.jsonl")
    for arguments in (
        ["certify", "no-such-model", "--data", "digits", "--out", run, "--html", run],
        ["certify", "no-such-model", "--data", "digits", "--html", run, "--beside", run],
        ["merge", run, "--out", str(tmp_path / "all.jsonl"), "--html", run],
        ["analyze", "no-such-model", "--text", "a", "--html", run, "--out", run],
    ):
        assert command(arguments) == 2
        assert "run.jsonl' names two files of this command" in capsys.readouterr().err
    assert (tmp_path / "run.jsonl").read_text() == "what must not be lost"


def test_a_line_that_finds_no_room_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, write = 10, os.write

    def full(descriptor: int, content: bytes) -> int:
        left = room - os.fstat(descriptor).st_size
        if not left:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:left])

    monkeypatch.setattr(os, "write", full)
    file, words = tmp_path / "run.jsonl", r"run.jsonl' cannot be written: No space left on device"
    with opened(file) as journal:
        complains(InputError, f"{words}$", lambda: journal.append(b"a header that is too long\n"))
    assert not file.exists()
    with opened(file) as journal:
        journal.append(b"short\n")
        complains(InputError, f"{words}; what was finished before is kept", lambda: journal.append(b"longer\n"))
    assert file.read_bytes() == b"short\n"


def test_a_file_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    complains(
        InputError, r"page.html' cannot be written: No space left", lambda: write_text(tmp_path / "page.html", "")
    )
    assert not list(tmp_path.iterdir())


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_tensors(tmp_path / "model.safetensors", {"w": torch.ones(1)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(("presses", "finished"), [(1, True), (2, False)])
def test_an_interrupt_waits_for_the_end_of_a_step(presses: int, finished: bool) -> None:
    done = []

    def step() -> None:
        with held_interrupts():
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
            done.append("the rest of the step")

    with pytest.raises(KeyboardInterrupt):
        step()
    assert bool(done) is finished
