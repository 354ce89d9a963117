"""The wheel, installed without the checkout, runs the demo in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: object) -> str:
        line = [str(part) for part in command]
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("holdfast-*.whl")
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    (installed,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # torch and the like, from this one
    assert str(installed) in run(python, "-c", "import holdfast; print(holdfast.__file__)")
    assert "Written:" in run(tmp_path / "fresh" / "bin" / "holdfast", "demo", "--inputs", "1", "--workers", "1")
    assert (tmp_path / "out" / "demo.html").is_file()
