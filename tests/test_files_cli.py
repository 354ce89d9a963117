"""`holdfast certify` on ONNX files, VNN-LIB specifications and functions in Python files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import holdfast
from holdfast.cli import main
from holdfast.graph.onnx import OnnxModel
from holdfast.models.python_file import load_python, read_arguments
from onnx_cases import exported

Call = Callable[..., tuple[int, str, str]]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))
    def forward(self, x):
        return self.body(x)

def small(width=5, name="a"):
    assert name == "a", f"no model {name}"
    return Net(width)

def nothing():
    return 3
"""


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Call]:
    """Runs the command line here, in a folder with mine.py, w.safetensors, data.safetensors, m.onnx and p.vnnlib."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MODEL)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    save_file({f"body.{name}": t for name, t in net.state_dict().items()}, tmp_path / "w.safetensors")
    x = torch.randn(3, 4)
    save_file({"inputs": x, "labels": net(x).argmax(1)}, tmp_path / "data.safetensors")
    exported(net, x[:1], tmp_path / "m.onnx")
    _specify(tmp_path / "p.vnnlib", x[0], int(net(x[:1]).argmax()), 1e-3)
    _specify(tmp_path / "wide.vnnlib", x[0], int(net(x[:1]).argmax()), 30.0)

    def run(line: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["holdfast", *line.split()])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    yield run
    sys.modules.pop("mine", None)


def _specify(path: Path, x: torch.Tensor, label: int, radius: float) -> None:
    lines = [f"(declare-const X_{i} Real)" for i in range(4)] + [f"(declare-const Y_{j} Real)" for j in range(3)]
    lines += [f"(assert (<= X_{i} {v + radius}))\n(assert (>= X_{i} {v - radius}))" for i, v in enumerate(x.tolist())]
    rivals = " ".join(f"(and (>= Y_{j} Y_{label}))" for j in range(3) if j != label)
    path.write_text("\n".join([*lines, f"(assert (or {rivals}))"]))


def test_an_onnx_file_and_a_python_function_are_certified_alike(call: Call) -> None:
    radii = []
    for model in ("m.onnx", "mine.py:small --weights w.safetensors --arg width=5"):
        status, out, err = call(f"certify {model} --data data.safetensors --radii 0.01 --json")
        assert (status, err) == (0, "")
        radii.append([record["radius"] for record in json.loads(out)["records"]])
    assert min(radii[0]) > 0
    assert radii[0] == pytest.approx(radii[1], rel=1e-6)


def test_a_run_of_a_python_function_is_verified(call: Call) -> None:
    assert call("certify mine.py:small --weights w.safetensors --data data.safetensors --out run.jsonl")[0] == 0
    assert call("verify run.jsonl --weights w.safetensors")[0] == 0
    status, _, err = call("verify run.jsonl")
    assert status == 2
    assert "was made from something other than what was given" in err


@pytest.mark.slow
@pytest.mark.parametrize("model", ["m.onnx", "mine.py:small --weights w.safetensors"])
def test_files_are_certified_by_several_processes(model: str, call: Call) -> None:
    status, out, err = call(f"certify {model} --data data.safetensors --workers 2 --batch 1 --json")
    assert (status, err) == (0, "")
    assert len(json.loads(out)["records"]) == 3


def test_specifications_are_decided(call: Call, tmp_path: Path) -> None:
    status, out, err = call("certify m.onnx --vnnlib p.vnnlib --out result.txt")
    assert (status, out, err) == (0, "unsat\nWritten: result.txt\n", "")
    assert (tmp_path / "result.txt").read_text() == "unsat\n"
    status, out, err = call("certify m.onnx --vnnlib wide.vnnlib --timeout 60")
    assert (status, err) == (0, "")
    assert out.startswith("sat\n((X_0 ")
    x = torch.tensor([float(v) for v in re.findall(r"\(X_\d (\S+)\)", out)], dtype=torch.float64)
    y = torch.tensor([float(v) for v in re.findall(r"\(Y_\d (\S+?)\)", out)], dtype=torch.float64)
    assert torch.equal(OnnxModel("m.onnx").executed(x.unsqueeze(0))[0].double(), y)
    status, out, _ = call("certify m.onnx --vnnlib wide.vnnlib --json")
    assert json.loads(out)["verdict"] == "sat"
    found = json.loads(call("certify m.onnx --vnnlib p.vnnlib --json")[1])
    assert (found["verdict"], found["parts"]) == ("unsat", 1)
    assert "first order" in found["losses"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("certify m.onnx", "expected one of --data, for radii of a data set, and --vnnlib, for a specification"),
        ("certify m.onnx --data digits --vnnlib p.vnnlib", "expected one of --data"),
        (
            "certify digits --vnnlib p.vnnlib",
            "--vnnlib was given for a model that is not an ONNX file; expected FILE.onnx",
        ),
        ("certify none.onnx --vnnlib p.vnnlib", "no file 'none.onnx'; expected an ONNX file"),
        ("certify m.onnx --vnnlib none.vnnlib", "'none.vnnlib' cannot be read: there is no such file"),
        ("certify m.onnx --vnnlib p.vnnlib --timeout -1", "timeout is -1; expected a positive number of seconds"),
        ("certify m.onnx --weights w.safetensors --data digits", "given for 'm.onnx'; they belong to FILE.py:FUNCTION"),
        ("certify mine.py --data digits", "the model is 'mine.py'; expected FILE.py:FUNCTION"),
        ("certify none.py:small --data digits", "no file 'none.py'; expected a Python file"),
        ("certify mine.py:large --data digits", "mine.py has no function 'large'; expected one that returns a model"),
        ("certify mine.py:nothing --data digits", "mine.py:nothing returned int; expected a torch.nn.Module"),
        ("certify mine.py:small --arg name=b --data digits", "mine.py:small failed: AssertionError: no model b"),
        ("certify mine.py:small --arg width --data digits", "--arg is 'width'; expected NAME=VALUE"),
        ("certify mine.py:small --weights none --data digits", "no file 'none'; expected a safetensors file"),
        ("certify mine.py:small --arg width=6 --weights w.safetensors --data digits", "does not hold the weights of"),
        ("certify mine.py:small --weights mine.py --data digits", "'mine.py' does not hold the weights of"),
    ],
)
def test_bad_lines_get_one_line_and_status_2(line: str, message: str, call: Call) -> None:
    status, out, err = call(line)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_file_that_fails_to_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text("import nowhere_at_all")
    with pytest.raises(
        holdfast.InputError, match=r"broken_model\.py' cannot be imported: ModuleNotFoundError: No module"
    ):
        load_python(str(tmp_path / "broken_model.py:build"))
    (tmp_path / "torch.py").write_text("")
    with pytest.raises(holdfast.InputError, match="the name 'torch' is taken or invalid; rename the file"):
        load_python(str(tmp_path / "torch.py:build"))


def test_arguments_are_read_as_python_writes_them() -> None:
    found = read_arguments(["depth=4", "rate=1e-3", "bias=False", "sizes=[1, 2]", "name=tiny"])
    assert found == {"depth": 4, "rate": 1e-3, "bias": False, "sizes": [1, 2], "name": "tiny"}
