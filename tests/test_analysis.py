"""The analysis of a whole model: every number against a direct computation, padding, interrupts, storage, commands."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import holdfast
from holdfast.analysis import Analysis, AnalysisProgress, analyze
from holdfast.analysis.inputs import data_uri, describe
from holdfast.analysis.run import Work, analyze_layer
from holdfast.attention import Rotary
from holdfast.attention.heads import HeadJacobians
from holdfast.cli.analyze import _read_ids
from holdfast.data.digits import demo_digits
from holdfast.errors import InputError, UnknownNameError
from holdfast.graph.trace import TracedLayer, trace
from holdfast.models import load_digits_vit
from holdfast.models.loading import Picture
from holdfast.report.analysis import analysis_table
from holdfast.testing import make_case
from test_cli import Run, run  # noqa: F401 - a fixture

RADII = (0.01, 0.1)


class Texts(nn.Module):
    """A text model with padding: embeddings and two encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return out


def batch(*lengths: int, side: str = "right") -> dict[str, Tensor]:
    """Token ids of so many tokens each, padded to the longest."""
    n = max(lengths)
    ids = torch.arange(1, 1 + n).repeat(len(lengths), 1) + 3 * torch.arange(len(lengths)).unsqueeze(-1)
    mask = torch.stack([torch.arange(n) < length for length in lengths])
    mask = mask if side == "right" else mask.flip(-1)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


@pytest.fixture(scope="module")
def digits() -> Analysis:
    """The bundled model at two digits, proved."""
    images = demo_digits().images[:2]
    return analyze(load_digits_vit(), images, RADII, guarantee="proved", method="cov", proved_slope=True)


# -- the numbers


@pytest.mark.parametrize("rotary", [False, True])
def test_a_head_alone_has_the_norm_of_a_layer_with_one_head(rotary: bool) -> None:
    case = make_case("", h=4, g=2, n=5, d=9, k=4, biases=True, mask="each", residual=1.5)
    angles = torch.rand(5, 4, dtype=torch.float64)
    turned = Rotary(angles.cos(), angles.sin()) if rotary else None
    found = HeadJacobians(case.layer.replace(rotary=turned), case.x).dense()
    for head in range(4):
        cut = {name: getattr(case.layer, name)[head : head + 1] for name in ("w_q", "w_o", "b_q")}
        cut |= {name: getattr(case.layer, name)[head // 2 : head // 2 + 1] for name in ("w_k", "w_v", "b_k", "b_v")}
        alone = holdfast.AttentionLayer(**cut, mask=case.layer.mask, rotary=turned)
        expected = holdfast.local_lipschitz(alone, case.x, tolerance=1e-12).value
        torch.testing.assert_close(torch.linalg.matrix_norm(found[:, head], 2), expected, rtol=1e-8, atol=0)


def test_every_number_agrees_with_a_direct_computation(digits: Analysis) -> None:
    assert [layer.name for layer in digits.layers] == ["blocks.0.attention", "blocks.1.attention"]
    for found, traced in zip(digits.layers, trace(load_digits_vit(), demo_digits().images[:2]), strict=True):
        layer, x = traced.layer.double(), traced.x.double()
        p = layer.attention(x)
        slope = holdfast.local_lipschitz(layer, x)
        assert slope.right is not None
        rows = p.unsqueeze(-1) * p.unsqueeze(-2)
        expected = {
            "slope": slope.value,
            "slope_upper": holdfast.local_lipschitz(layer, x, side="upper").value,
            "softmax_norm": torch.linalg.eigvalsh(torch.diag_embed(p) - rows)[..., -1].amax(-1),
            "attention_norm": torch.linalg.matrix_norm(p, 2),
            "entropy": -(p * p.log()).sum(-1).mean(-1),
            "bound": holdfast.bound(layer, x, RADII, "cov").value,
            "energy": slope.right.square().sum(-1),
        }
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(getattr(found, name)).double(), value, rtol=1e-4, atol=1e-9)
        assert (torch.tensor(found.softmax_g1) >= torch.tensor(found.softmax_norm)).all()
        assert found.rebuild_error <= 1e-5
        assert found.bound is not None
        assert found.attack is not None
        for lower, upper, gain in zip(found.attack, found.bound, found.slope, strict=True):
            assert all(0.9 * gain * eps < low <= high for low, high, eps in zip(lower, upper, RADII, strict=True))
        assert all(math.isclose(sum(energy), 1, rel_tol=1e-9) for energy in found.energy)
    assert all(1 <= ratio < 3 for ratio in digits.tightness)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(side: str) -> None:
    model = Texts().eval()
    padded = batch(6, 4, 4, side=side)
    found = analyze(model, padded, RADII, method="plus", tokens=[["a"] * 6, ["b"] * 4, ["c"] * 4])
    assert [sum(view.padding) for view in found.inputs] == [0, 2, 2]
    assert found.inputs[1].tokens.count("b") == 4
    for place in (0, 1) if side == "right" else (1,):
        real = padded["attention_mask"][place].bool()
        ids = padded["input_ids"][place][real].unsqueeze(0)
        alone = analyze(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, RADII, method="plus")
        for together, single in zip(found.layers, alone.layers, strict=True):
            for name in ("slope", "head_slope", "softmax_norm", "attention_norm", "entropy", "bound", "attack"):
                whole, part = torch.tensor(getattr(together, name)[place]), torch.tensor(getattr(single, name)[0])
                torch.testing.assert_close(whole, part, rtol=2e-4, atol=0)
            energy = torch.tensor(together.energy[place])
            assert (energy[~real] == 0).all()
            torch.testing.assert_close(energy[real], torch.tensor(single.energy[0]), rtol=0, atol=1e-3)


def test_a_layer_without_a_proof_by_the_method_says_so_and_has_another_bound() -> None:
    case = make_case("", h=4, g=2, n=5, d=9, k=4, causal=True)
    angles = torch.rand(2, 5, 4, dtype=torch.float64)
    layer = case.layer.replace(rotary=Rotary(angles.cos(), angles.sin()), soft_cap=5.0)
    padding = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])}
    shown = describe(padding, case.x, None, None)
    work = Work([0.1], "second-order", "numerical", proved_slope=False, attack=True, seed=0)
    found = analyze_layer(7, TracedLayer("turned", layer, case.x, 0.0), shown, work)
    assert "the layer caps its scores" in found.bound_note
    assert found.bound is not None
    assert found.attack is not None
    assert all(bound[0] >= attained[0] for bound, attained in zip(found.bound, found.attack, strict=True))
    short = layer.replace(rotary=Rotary(angles[1, :3].cos(), angles[1, :3].sin()))
    expected = holdfast.local_lipschitz(short, case.x[1, :3])
    assert found.slope[1] == pytest.approx(expected.value.item(), rel=1e-5)
    assert found.energy[1][3:] == (0.0, 0.0)


# -- what is asked for


def test_layers_and_tokens_can_be_chosen() -> None:
    model, seen = Texts().eval(), list[AnalysisProgress]()
    found = analyze(model, batch(9), 0.1, layers=[1], max_tokens=4, attack=False, progress=seen.append)
    assert [layer.index for layer in found.layers] == [1]
    assert found.inputs[0].tokens == ("0", "1", "2", "3")
    assert found.layers[0].attack is None
    assert found.tightness == ()
    assert [(p.done, p.planned) for p in seen] == [(0, 1), (1, 1)]
    assert "encoder.layers.1" in seen[0].name


def test_an_interrupt_keeps_what_is_finished() -> None:
    def stop_at(layer: int) -> Callable[[AnalysisProgress], None]:
        def progress(now: AnalysisProgress) -> None:
            if now.done == layer and now.name:
                raise KeyboardInterrupt

        return progress

    found = analyze(Texts().eval(), batch(4), 0.1, method="plus", progress=stop_at(1))
    assert found.interrupted
    assert (len(found.layers), found.planned) == (1, 2)
    with pytest.raises(KeyboardInterrupt):
        analyze(Texts().eval(), batch(4), 0.1, method="plus", progress=stop_at(0))


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "layer": ({"layers": [0, 2]}, "layers includes 2; the model has attention layers 0 to 1"),
    "no layer": ({"layers": []}, "includes no layer"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "names": ({"tokens": [["a"]]}, "1 names were given, and it has 4 tokens"),
    "inputs": ({"tokens": [["a"], ["b"]]}, "tokens has 2 members and there are 1 inputs"),
    "eps": ({"eps": -1.0}, "eps is -1.0"),
    "picture": ({"pictures": [Picture(torch.zeros(8, 8, 3, dtype=torch.uint8), (2, 2), 1)]}, r"1 \+ 2 × 2 tokens"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_named(case: str) -> None:
    options, message = BAD_ARGUMENTS[case]
    with pytest.raises(InputError, match=message):
        analyze(Texts().eval(), batch(4), **({"eps": 0.1} | options))


def test_unknown_methods_and_inputs_without_ids_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cov'"):
        analyze(Texts(), batch(4), 0.1, method="covv")
    with pytest.raises(InputError, match="max_tokens cuts token ids"):
        analyze(load_digits_vit(), demo_digits().images[:1], 0.1, max_tokens=3)


# -- what is kept and shown


def test_json_brings_everything_back(digits: Analysis) -> None:
    text = digits.to_json()
    assert json.loads(text)["schema"] == "holdfast.analysis/1"
    assert Analysis.from_json(text) == digits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema is None"),
        ('{"schema": "holdfast.analysis/0"}', "expected 'holdfast.analysis/1'"),
        ('{"schema": "holdfast.analysis/1"}', "'inputs'"),
        ('{"schema": "holdfast.analysis/1", "inputs": [{"tokens": []}], "layers": []}', "padding"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Analysis.from_json(text)


def test_table_and_figure_show_the_layers(digits: Analysis) -> None:
    shown = " ".join(printed(digits, 160).split())
    assert "Layers: blocks.….attention." in shown
    assert "entropy" in shown
    assert "cov, proved, rounded up" in shown
    assert digits.layers[0].bound is not None
    left, right, _ = digits.plot().axes
    assert len(left.lines) == 3
    assert right.images[0].get_array().shape == (2, 4)


def printed(analysis: Analysis, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(analysis_table(analysis, width))
    return console.export_text()


NAMES = {
    "numbered": (["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"], ["0", "1"]),
    "two kinds": (["model.layers.0.self_attn", "model.layers.0.cross_attn"], ["self_attn", "cross_attn"]),
    "nothing shared": (["encoder.block.0.layer.0.SelfAttention", "other"], ["other"]),
}


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("count", [1, 3, 5])
def test_nothing_is_cut_at_80_columns(digits: Analysis, case: str, count: int) -> None:
    names, short = NAMES[case]
    eps = (0.00123, 0.0123, 0.123, 1.23, 12.3)[:count]
    row = tuple(0.000987654 * 1.1**e for e in range(count))
    layers = [
        replace(layer, name=name, bound=(row, row), attack=(row, row))
        for layer, name in zip(digits.layers, names, strict=True)
    ]
    shown = printed(replace(digits, model="/a/long/way/to/model", eps=eps, layers=tuple(layers)), 80)
    assert "…" not in shown.replace(".….", "")
    assert "model: attention layers" in shown
    assert "/a/long" not in shown
    rows = [line.split() for line in shown.splitlines() if "0.000987" in line]
    assert len(rows) == 2
    assert all({"0.000987", "0.000988"} <= set(row) for row in rows)
    assert all(any(name in row for row in rows) for name in short)


def test_small_pictures_keep_every_pixel() -> None:
    import base64

    from PIL import Image

    pixels = torch.arange(8 * 8 * 3, dtype=torch.uint8).reshape(8, 8, 3)
    uri = data_uri(pixels)
    stream = io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,")))
    assert list(Image.open(stream).tobytes()) == pixels.flatten().tolist()
    assert data_uri(torch.zeros(500, 400, 3, dtype=torch.uint8)).startswith("data:image/jpeg")


# -- the command


def test_the_command_writes_a_page_json_and_a_figure(run: Run, tmp_path: Path) -> None:  # noqa: F811
    page, kept, figure = (tmp_path / name for name in ("page.html", "out.json", "figure.svg"))
    options = (
        "--eps",
        "0.01,0.1",
        "--layers",
        "1",
        "--method",
        "plus",
        "--html",
        page,
        "--out",
        kept,
        "--plot",
        figure,
    )
    done = run("analyze", "--demo", *options)
    assert done.returncode == 0, done.stderr
    assert "digits ViT (bundled): attention layers" in done.stdout
    assert "page.html" in done.stdout
    assert page.read_text().startswith("<!doctype html>")
    assert "<svg" in figure.read_text()[:1000]
    found = Analysis.from_json(kept.read_text())
    assert found.command is not None
    assert found.command.startswith("holdfast analyze --demo --eps 0.01,0.1")
    assert [layer.index for layer in found.layers] == [1]


def test_the_command_prints_json(run: Run) -> None:  # noqa: F811
    done = run("analyze", "--demo", "--eps", "0.1", "--method", "plus", "--no-attack", "--json")
    assert done.returncode == 0, done.stderr
    assert Analysis.from_json(done.stdout).attack == "No attack was requested."


BAD_CALLS = {
    "no model": ((), "no model was given"),
    "no input": (("minilm",), "no input was given for 'minilm'"),
    "two inputs": (("minilm", "--text", "a", "--image", "b.png"), "--text and --image were given"),
    "demo and model": (("minilm", "--demo"), "choose one"),
    "demo and text": (("--demo", "--text", "a"), "choose one"),
    "layers": (("--demo", "--layers", "1-"), "expected numbers and ranges"),
    "no such layer": (("--demo", "--layers", "0,5"), "layers includes 5"),
    "method": (("--demo", "--method", "covv"), "did you mean 'cov'"),
    "eps": (("--demo", "--eps", "x"), "expected numbers separated by commas"),
    "plot": (("--demo", "--plot", "a.bmp"), "ends in .png, .svg or .pdf"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_get_one_line_and_status_2(run: Run, case: str) -> None:  # noqa: F811
    arguments, message = BAD_CALLS[case]
    done = run("analyze", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_token_ids_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("1 2 3\n4 5 6\n\n")
    assert _read_ids(file) == [[1, 2, 3], [4, 5, 6]]
    for content, message in {
        "1 2\n3": "lines of 2, 1 ids",
        "": "lines of no ids",
        "a b": "holds something other than numbers; expected lines of token ids",
    }.items():
        file.write_text(content)
        with pytest.raises(InputError, match=message):
            _read_ids(file)


def test_an_interrupted_command_keeps_what_is_finished(
    run: Run,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = holdfast.analysis.run.analyze_layer, list[int]()

    def interrupted(index: int, *arguments: Any) -> Any:
        calls.append(index)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(index, *arguments)

    monkeypatch.setattr(holdfast.analysis.run, "analyze_layer", interrupted)
    page = tmp_path / "page.html"
    done = run("analyze", "--demo", "--eps", "0.1", "--method", "plus", "--html", page)
    assert done.returncode == 130
    assert "interrupted; 1 of 2 layers were finished" in done.stderr
    assert "1 of 2 layers were finished" in page.read_text()
