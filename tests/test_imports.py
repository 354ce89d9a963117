"""The public names are there, and what needs no torch does not import it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import holdfast
from holdfast.cli.app import COMMANDS, app, load
from holdfast.errors import UnknownNameError
from holdfast.testing import make_case


def test_the_three_lists_of_public_names_agree() -> None:
    source = ast.parse(Path(holdfast.__file__).read_text())
    typed = {
        alias.name
        for block in source.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(holdfast._HOME) == set(holdfast.__all__) - {"__version__"}
    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
    assert holdfast.data.__name__ == "holdfast.data"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        holdfast.nonsense  # noqa: B018


def test_packages_hold_what_they_name() -> None:
    for file in Path(holdfast.__file__).parent.glob("*/**/__init__.py"):
        held, named = set[str](), list[str]()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):  # what is loaded on demand is imported below
            if isinstance(node, ast.Import | ast.ImportFrom):
                held |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                held.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                held.add(ast.unparse(node.target))
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                named = ast.literal_eval(node.value)
        assert set(named) <= held, (file, set(named) - held)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    script = (
        "import sys; from holdfast.cli.app import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "certify" in done.stdout or holdfast.__version__ in done.stdout


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    assert {name: load(name).help for name in COMMANDS} == COMMANDS
    assert {"install_completion", "show_completion"} <= {p.name for p in get_command(app).params}


def test_a_long_list_of_names_is_cut_to_the_nearest() -> None:
    said = str(UnknownNameError("config", "name-33", [f"name-{i}" for i in range(70)]))
    assert "did you mean 'name-33'" in said
    assert "70 are known, such as" in said
    assert said.count("name-") < 8


def test_a_layer_moves_as_in_torch() -> None:
    layer = make_case("plain").layer
    for moved in (layer.to("cpu"), layer.to(torch.device("cpu")), layer.to(device="cpu")):
        assert moved.dtype == layer.dtype
    assert layer.to("cpu", torch.float32).dtype == torch.float32 == layer.to(dtype=torch.float32).dtype
    with pytest.raises(RuntimeError, match="meta"):  # the device does arrive: there the weights cannot be read
        layer.to("meta")
