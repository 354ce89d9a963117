"""The package and its command line work with the hard requirements alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

OPTIONAL = (
    *("beartype", "transformers", "accelerate", "gguf", "huggingface_hub", "torchvision", "timm"),
    *("sklearn", "ray", "scipy", "onnx", "onnxruntime"),
)
UNUSED = (*OPTIONAL, "pydantic")  # typer may bring it and use it to read a command's arguments; we do not
BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(code: str, blocked: tuple[str, ...] = UNUSED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"BLOCKED = {blocked!r}\n{BLOCKER}{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_library_works_without_the_extras() -> None:
    done = run(
        "import torch, holdfast, holdfast.testing\n"
        "layer = holdfast.AttentionLayer.from_module(torch.nn.MultiheadAttention(4, 2))\n"
        "x = torch.ones(3, 4)\n"
        "assert holdfast.attack(layer, x, 0.1, steps=2).lower <= holdfast.bound(layer, x, 0.1).value\n"
        f"assert not {set(UNUSED)!r} & set(sys.modules)\n"
        "assert 'pytest' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


def test_help_needs_no_extra() -> None:
    done = run("import runpy\nsys.argv = ['holdfast', '--help']\nrunpy.run_module('holdfast', run_name='__main__')\n")
    assert done.returncode == 0, done.stderr
    assert "bound" in done.stdout


def test_commands_need_no_extra() -> None:
    done = run("sys.argv = ['holdfast', 'bounds', '--json']\nfrom holdfast.cli import main\nmain()\n", OPTIONAL)
    assert done.returncode == 0, done.stderr
    assert "lofast" in done.stdout


def test_blocker_blocks() -> None:
    done = run("import scipy\n")
    assert done.returncode == 1
    assert "No module named 'scipy'" in done.stderr


def test_hard_requirements_are_those_of_the_design() -> None:
    hard = [line for line in requires("holdfast") or [] if "extra ==" not in line]
    names = {line.split(">")[0].split("<")[0].split("=")[0].strip() for line in hard}
    assert names == {"torch", "numpy", "safetensors", "typer", "rich", "jinja2", "matplotlib", "jaxtyping"}
