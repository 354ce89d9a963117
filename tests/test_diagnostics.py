"""The attention report, the paths it is made of, and the commands that show slopes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import holdfast
from holdfast import AttentionLayer, InputError, attention_report
from holdfast.attention import AttentionJacobian
from holdfast.attention.derivatives import AttentionPass
from holdfast.attention.paths import paths
from holdfast.cli.app import app
from holdfast.linalg import Ball
from holdfast.testing import Case, cases, changed, make_case

every_case = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


def turned(case: Case) -> Case:
    n, k = case.x.shape[-2], case.layer.k
    angles = torch.linspace(0, 2, n * (k - k % 2), dtype=torch.float64).reshape(n, -1)
    return Case("rotary", changed(case.layer, rotary=holdfast.Rotary(angles.cos(), angles.sin())), case.x)


# -- paths


@every_case
def test_paths_add_up_to_the_derivative(case: Case) -> None:
    """… and the quick Jacobian is that of `derivatives.py`, both ways."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(case.x.shape, generator=generator, dtype=torch.float64)
    for layer in (case.layer, turned(case).layer):
        jacobian, here = AttentionJacobian(layer, case.x), AttentionPass(layer, case.x)
        expected = jacobian.mv(g)
        size = float(case.size)
        u = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(here.push(g), expected, rtol=1e-9, atol=1e-12 * size**2)
        torch.testing.assert_close(here.pull(u), jacobian.rmv(u), rtol=1e-9, atol=1e-12 * size**2)
        torch.testing.assert_close(paths(layer, case.x, g).total, expected, rtol=1e-9, atol=1e-12 * size**2)
        ball = paths(layer, Ball.exact(case.x), Ball.exact(g)).total
        assert bool((ball.lower <= expected + 1e-12 * size**2).all())
        assert bool((ball.upper >= expected - 1e-12 * size**2).all())


def test_each_path_is_the_derivative_with_the_others_held() -> None:
    case = make_case("", n=5, biases=True, mask="each", residual=0.7)
    layer, x = case.layer, case.x
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    part = paths(layer, x, g)

    def output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The heads' outputs when queries, keys and values are made of different tokens."""
        at = [layer.run(each) for each in (q, k, v)]
        return layer.probabilities(at[0].q @ at[1].k.mT * layer.scale) @ at[2].v

    still = torch.zeros_like(g)
    for moving, path in enumerate((part.query, part.key, part.value)):
        directions = tuple(g if i == moving else still for i in range(3))
        torch.testing.assert_close(path, torch.func.jvp(output, (x, x, x), directions)[1])
    torch.testing.assert_close(part.residual, 0.7 * g)


# -- the report


@every_case
def test_report_is_what_it_says(case: Case) -> None:
    report = attention_report(case.layer, case.x)
    p = case.layer.attention(case.x)
    n = p.shape[-1]
    exact = holdfast.local_lipschitz(case.layer, case.x, side="upper").value
    torch.testing.assert_close(report.slope, exact, rtol=1e-4, atol=1e-100)
    torch.testing.assert_close(report.g1, holdfast.softmax_jacobian_norm(case.layer.whole_rows(p), "g1"))
    torch.testing.assert_close(report.attention_norm, torch.linalg.matrix_norm(p, ord=2), rtol=1e-5, atol=0.0)
    least = 0 if case.layer.sinks is not None else 1 - 1e-9
    assert bool(((report.attention_norm > least) & (report.attention_norm < math.sqrt(n) + 1e-9)).all())
    torch.testing.assert_close(report.entropy, -(p * p.clamp(min=1e-300).log()).sum(-1), rtol=1e-9, atol=1e-12)
    share = p.gather(-1, report.sink[..., None, None].expand(*p.shape[:-1], 1)).mean((-2, -1))
    torch.testing.assert_close(report.sink_share, share)
    total = (report.value_share + report.query_share + report.key_share).sum(-1) + report.residual_share
    torch.testing.assert_close(total, (report.slope > 0).double(), rtol=1e-9, atol=0.0)


def test_report_of_plain_situations() -> None:
    """Zero queries: uniform rows, and everything goes through the values. A sink: ‖P‖ near √n, g_1 near 0."""
    case = make_case("", n=6)
    flat = attention_report(changed(case.layer, w_q=torch.zeros_like(case.layer.w_q)), case.x)
    torch.testing.assert_close(flat.g1, torch.full_like(flat.g1, 1 / 6))
    torch.testing.assert_close(flat.entropy, torch.full_like(flat.entropy, math.log(6)))
    torch.testing.assert_close(flat.attention_norm, torch.ones_like(flat.attention_norm))
    torch.testing.assert_close(flat.value_share.sum(-1), torch.ones(2, dtype=torch.float64))
    x, w_k = case.x[:1], case.layer.w_k
    keys = 200 * (x[0, 3] @ w_k) / (x[0, 3] @ w_k).norm(dim=-1, keepdim=True)
    sunk = attention_report(
        changed(case.layer, w_q=torch.zeros_like(case.layer.w_q), b_q=keys),
        x * 0 + x[:, 3:4] * torch.eye(6)[3].double()[:, None],
    )
    assert sunk.sink.unique().tolist() == [3]
    assert float(sunk.sink_share.min()) > 0.999
    assert float(sunk.attention_norm.min()) > 0.999 * math.sqrt(6)
    assert float(sunk.g1.max()) < 1e-3
    residual = attention_report(changed(case.layer, w_v=torch.zeros_like(case.layer.w_v), residual=2.0), case.x)
    torch.testing.assert_close(residual.residual_share, torch.ones(2, dtype=torch.float64))


def test_report_covers_rotary_positions_and_masked_rows() -> None:
    case = turned(make_case("", causal=True, biases=True))
    report = attention_report(case.layer, case.x)
    exact = holdfast.local_lipschitz(case.layer, case.x, side="upper").value
    torch.testing.assert_close(report.slope, exact, rtol=1e-4, atol=0.0)
    assert bool((report.g1[..., 0] == 0).all())  # the first row sees one token
    assert bool((report.entropy[..., 0].abs() < 1e-12).all())


def test_shapes_tables_and_json() -> None:
    case = make_case("", n=5, h=3, k=2, residual=1.0)
    for x, batch in ((case.x, (2,)), (case.x[0], ()), (case.x.expand(3, 2, 5, 4), (3, 2))):
        report = attention_report(case.layer, x)
        assert report.g1.shape == (*batch, 3, 5)
        assert report.value_share.shape == (*batch, 3)
        assert report.slope.shape == batch
        assert set(json.loads(json.dumps(report.to_dict(), allow_nan=False))) == set(vars(report))
        table = report.table()
        assert table.row_count == math.prod(batch) * 4
    written = io.StringIO()
    Console(file=written, width=80).print(table)
    assert "…" not in written.getvalue()
    one, many = attention_report(case.layer, case.x[1]), attention_report(case.layer, case.x)
    torch.testing.assert_close(one.slope, many.slope[1], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(one.query_share, many.query_share[1], rtol=1e-2, atol=1e-4)
    single = case.float()
    torch.testing.assert_close(attention_report(single.layer, single.x).slope, many.slope, rtol=1e-4, atol=0.0)


def test_report_complains_about_its_input() -> None:
    case = make_case("")
    with pytest.raises(InputError, match=r"x has shape \(2, 4, 3\)"):
        attention_report(case.layer, case.x[..., :3])


# -- commands


@pytest.fixture
def saved(tmp_path: Path) -> tuple[AttentionLayer, torch.Tensor, list[str]]:
    case = make_case("", n=3)
    case.layer.save(tmp_path / "layer.safetensors")
    holdfast.storage.write_tensors(tmp_path / "x.safetensors", {"x": case.x})
    return case.layer, case.x, [str(tmp_path / "layer.safetensors"), str(tmp_path / "x.safetensors")]


def test_lipschitz_command(saved: tuple[AttentionLayer, torch.Tensor, list[str]]) -> None:
    layer, x, files = saved
    done = CliRunner().invoke(app, ["lipschitz", *files, "--method", "yudin", "--method", "best", "--json"])
    assert done.exit_code == 0, done.output
    first, best = json.loads(done.stdout)["results"]
    assert first["value"] == holdfast.lipschitz_bound(layer, x, "yudin").value.tolist()
    assert (best["method"], best["scope"]) == ("best", "point")
    options = ["--radius", "1.5", "--tokens", "3", "--method", "castin-ball"]
    done = CliRunner().invoke(app, ["lipschitz", files[0], *options])
    assert done.exit_code == 0, done.output
    assert "ball at 0" in done.output
    value = float(holdfast.lipschitz_bound(layer, radius=1.5, tokens=3, method="castin-ball").value)
    assert f"{value:.6g}" in done.output
    for wrong in (["lipschitz", *files, "--radius", "1.0"], ["lipschitz", files[0], "--tokens", "3"]):
        assert isinstance(CliRunner().invoke(app, wrong).exception, InputError)


def test_attention_command(saved: tuple[AttentionLayer, torch.Tensor, list[str]]) -> None:
    layer, x, files = saved
    done = CliRunner().invoke(app, ["attention", *files, "--inputs", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["report"] == attention_report(layer, x).to_dict()
    done = CliRunner().invoke(app, ["attention", *files])
    assert "attention by head" in done.output
